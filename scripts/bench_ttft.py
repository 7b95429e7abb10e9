"""Times inference of whole models: time to first token by batch and load, decoded tokens a second.

usage: torchrun --nproc-per-node P scripts/bench_ttft.py [--models …] [--loads 0 100] [--out docs/results
       --name ttft_h200x2]; --help lists the options, docs/bench_ttft.md says what is measured and how.
"""

import sys

from echo_megatron.bench.ttft import main

if __name__ == "__main__":
    sys.exit(main())
