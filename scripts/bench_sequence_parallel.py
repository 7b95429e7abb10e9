"""Times reduce-scatters and all-gathers against NCCL's: `echo-megatron bench --sequence-parallel` for torchrun.

usage: torchrun --nproc-per-node P scripts/bench_sequence_parallel.py [--quick] [--rows …] [--sizes …]
       [--out docs/results --name sequence_parallel_h200x2]; --help lists the options, docs/bench.md says how it
       measures.
"""

import sys

from echo_megatron.bench.all_reduce import main

if __name__ == "__main__":
    sys.exit(main(["--sequence-parallel", *sys.argv[1:]], prog="bench_sequence_parallel.py"))
