#!/usr/bin/env bash
# The tests that need GPUs, on the GPUs of this machine: scripts/gpu_tests.sh [PYTEST_ARGUMENT…]
# Everything in tests/gpu unless a file is named. Tests of several ranks on one GPU need one; the tests of processes
# (test_p2p_processes*.py, test_communicator_nccl.py) need two or more and are skipped otherwise.
#   scripts/gpu_tests.sh tests/gpu/test_p2p_random.py --num-calls 100000     the long run
#   scripts/sanitize_kernels.sh                                              the kernels under compute-sanitizer
set -euo pipefail
cd "$(dirname "$0")/.."
where=(tests/gpu)
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then where=(); fi
done
exec "${PYTHON:-.venv/bin/python}" -m pytest "${where[@]}" "$@"
