#!/bin/sh
# usage: make_venv.sh FOLDER VERSIONS LOCK...
# Makes the environment FOLDER, or completes one that is there, with exactly the versions of the lock files.
# VERSIONS are the Pythons that will do, e.g. '3.12 3.13'. A LOCK written nodeps:FILE is installed without its dependencies.
# pip's own configuration (index, proxy, cache) is the user's: nothing of it is set here.
set -eu

say() { printf '\n== %s\n' "$*"; }

cd "$(dirname "$0")/.."
folder=$1
versions=$2
shift 2

usable() {
    [ -x "$folder/bin/python" ] &&
        PYTHON="$folder/bin/python" sh scripts/find_python.sh $versions >/dev/null 2>&1 &&
        "$folder/bin/python" -m pip --version >/dev/null 2>&1
}

if usable; then
    say "$folder is there ($("$folder/bin/python" --version)); completing it"
else
    python=$(sh scripts/find_python.sh $versions)
    say "making $folder with $python ($("$python" --version))"
    "$python" -m venv --clear "$folder"
fi

install() { "$folder/bin/python" -m pip install --no-input --disable-pip-version-check "$@"; }

say "installing requirements/build.txt"
install -r requirements/build.txt
for lock in "$@"; do
    say "installing ${lock#nodeps:} (torch and CUDA's libraries are 3 GB to download the first time: 2 to 5 minutes)"
    case $lock in
        nodeps:*) install --no-build-isolation --no-deps -r "${lock#nodeps:}" ;;
        *) install --no-build-isolation -r "$lock" ;;
    esac
done
say "installing this project, editable"
install --no-build-isolation --no-deps --editable .
say "$folder is ready"
