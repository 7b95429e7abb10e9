#!/bin/sh
# usage: find_python.sh [VERSION...]
# Prints the path of a Python that can make an environment: CPython of one of the versions, 3.12 and 3.13 unless told
# (megatron-core 0.19.2 has wheels for these two only), with venv, ensurepip and ssl.
#
# Every candidate is run, since a name proves nothing: a python3.12 on PATH can be a pyenv shim that exits with 127,
# and Debian's python3 may lack ensurepip. $PYTHON, when set, is the only candidate.
# Exit status: 0 and the path on stdout, or 1 and the reasons on stderr.
set -u
# Lists are split at newlines only: folders on PATH may hold spaces.
IFS='
'
[ $# -gt 0 ] || set -- 3.12 3.13
versions=$(printf '%s\n' "$@")
spoken=$(printf '%s\n' "$@" | sed '$!s/$/ or/' | tr '\n' ' ')

check='
import sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.implementation.name != "cpython":
    sys.exit("it is %s, not CPython" % sys.implementation.name)
if "%d.%d" % tuple(sys.version_info[:2]) not in sys.argv[1:]:
    sys.exit("it is Python %s" % version)
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("it is the free-threaded build of Python %s" % version)
for module in ("venv", "ensurepip", "ssl", "zlib", "ctypes"):
    try:
        __import__(module)
    except ImportError:
        sys.exit("it is Python %s without the module %s" % (version, module))
# Of an environment, the interpreter below it: an environment made from an environment breaks with it.
print(getattr(sys, "_base_executable", "") if sys.prefix != sys.base_prefix else "")
'

rejected=""

# try CANDIDATE: print it and leave when it works, else note why not.
try() {
    if output=$("$1" -I -c "$check" $versions 2>&1 </dev/null); then
        echo "${output:-$1}"
        exit 0
    else
        status=$?
    fi
    reason=$(printf '%s\n' "$output" | sed '/^$/d' | head -n 1)
    rejected="$rejected
  $1: ${reason:-no message} (exit $status)"
}

fail() {
    what=$1
    set -- $versions
    {
        echo "find_python.sh: $what"
        echo "  expected: CPython ${spoken}with the modules venv, ensurepip, ssl, zlib and ctypes"
        echo "  got:${rejected:- no Python at all}"
        echo "  what to do: install one (Debian, Ubuntu: python$1 and python$1-venv; pyenv: pyenv install $1),"
        echo "              or name one you have: make PYTHON=/path/to/python$1 ..."
    } >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || rejected="
  $PYTHON: no such command"
    [ -n "$rejected" ] || try "$PYTHON"
    fail "PYTHON=$PYTHON cannot be used"
fi

# PATH whole, and not only its first match: a broken shim may hide a good one.
folders=$(printf '%s' "${PATH:-}" | tr ':' '\n')
pyenv_root=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
for version in $versions; do
    for candidate in \
        $(for folder in $folders; do echo "$folder/python$version"; done) \
        "$pyenv_root"/versions/$version*/bin/python$version \
        "${HOME:-/nonexistent}"/.local/share/uv/python/cpython-$version*/bin/python$version \
        /usr/local/bin/python$version /usr/bin/python$version /opt/*/bin/python$version
    do
        if [ -x "$candidate" ] && [ ! -d "$candidate" ]; then try "$candidate"; fi
    done
done
for folder in $folders; do
    for name in python3 python; do
        if [ -x "$folder/$name" ] && [ ! -d "$folder/$name" ]; then try "$folder/$name"; fi
    done
done
fail "no usable Python found"
