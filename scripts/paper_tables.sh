#!/usr/bin/env bash
# The paper's Tables 2 and 3 on all GPUs of this machine within nine minutes: scripts/paper_tables.sh [OPTION…]
# The options are those of scripts/paper_tables.py; docs/paper_tables.md has them. PYTHON=/path/to/python overrides
# .venv's, or where there is no .venv, python3.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
if [ ! -x "$python" ]; then python=python3; fi
exec "${PYTHON:-$python}" scripts/paper_tables.py "$@"
