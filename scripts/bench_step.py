"""Times training steps and prefills of whole models: 16-bit, Echo, and without the sites' all-reduces (the bound).

usage: torchrun --nproc-per-node P scripts/bench_step.py [--models …] [--loads 0 50 75 100] [--out docs/results
       --name step_h200x2]; --help lists the options, docs/bench_step.md says what is measured and how.
"""

import sys

from echo_megatron.bench.step import main

if __name__ == "__main__":
    sys.exit(main())
