#!/bin/sh
# Prints the path of a Python that can make the environment: CPython 3.12 or 3.13 with venv, ensurepip and ssl.
# megatron-core 0.19.2 has wheels for these two only.
#
# Every candidate is run, since a name proves nothing: a python3.12 on PATH can be a pyenv shim that exits with 127,
# and Debian's python3 may lack ensurepip. $PYTHON, when set, is the only candidate.
# Exit status: 0 and the path on stdout, or 1 and the reasons on stderr.
set -u

check='
import sys
version = ".".join(map(str, sys.version_info[:3]))
if sys.implementation.name != "cpython":
    sys.exit(f"it is {sys.implementation.name}, not CPython")
if not (3, 12) <= tuple(sys.version_info[:2]) < (3, 14):
    sys.exit(f"it is Python {version}")
import sysconfig
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(f"it is the free-threaded build of Python {version}")
for module in ("venv", "ensurepip", "ssl", "zlib", "ctypes"):
    try:
        __import__(module)
    except ImportError:
        sys.exit(f"it is Python {version} without the module {module}")
# Of an environment, the interpreter below it: an environment made from an environment breaks with it.
print(getattr(sys, "_base_executable", "") if sys.prefix != sys.base_prefix else "")
'

rejected=""

# try CANDIDATE: print it and leave when it works, else note why not.
try() {
    if output=$("$1" -I -c "$check" 2>&1 </dev/null); then
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
    {
        echo "find_python.sh: $1"
        echo "  expected: CPython 3.12 or 3.13 with the modules venv, ensurepip, ssl, zlib and ctypes"
        echo "  got:${rejected:- no Python at all}"
        echo "  what to do: install one (Debian, Ubuntu: python3.12 and python3.12-venv; pyenv: pyenv install 3.12),"
        echo "              or name one you have: make PYTHON=/path/to/python3.12 ..."
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
IFS='
'
for version in 3.12 3.13; do
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
