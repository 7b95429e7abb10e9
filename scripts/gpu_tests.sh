#!/usr/bin/env bash
# The tests that need GPUs, on the GPUs of this machine: scripts/gpu_tests.sh [PYTEST_ARGUMENT…]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m pytest tests/gpu "$@"
