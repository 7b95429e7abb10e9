"""The paper's Tables 2 and 3 on the GPUs of this machine, with the tests on as many ranks: one command, nine minutes.

usage: python scripts/paper_tables.py [--ranks P] [--parts all_reduce tests step ttft] [--budget-s 540]
                                      [--out docs/results]
       python scripts/paper_tables.py --device cpu --out FOLDER        rehearsal of everything, without GPUs
       python scripts/paper_tables.py --ranks P --render               the page anew from the JSONs in --out
--help lists the options, docs/paper_tables.md says what is measured and how.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # sources that are not installed

from echo_megatron.bench.paper_tables import main

if __name__ == "__main__":
    sys.exit(main())
