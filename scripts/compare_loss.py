"""Loss curves and table of several runs: `echo-megatron compare` without an installation of the command line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from echo_megatron.report import main

if __name__ == "__main__":
    sys.exit(main())
