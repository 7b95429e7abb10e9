"""Random calls of every kind on real ranks for minutes, against the reference, beside copies and with little memory.

usage: torchrun --nproc-per-node P scripts/soak.py [--minutes 10] [--out docs/results --name soak_h200x2]; --help lists
       the options; --device cpu --minutes 0.1 tries it out. Exit status 1: a result differed, or a call failed.
"""

import sys

from echo_megatron.bench.soak import main

if __name__ == "__main__":
    sys.exit(main())
