"""Times all-reduces against NCCL on the GPUs of this machine: `echo-megatron bench` as a script for torchrun.

usage: torchrun --nproc-per-node P scripts/bench_all_reduce.py [--quick] [--rows …] [--sizes …] [--out docs/results
       --name all_reduce_h200x2]; --help lists the options, docs/bench.md says how it measures.
"""

import sys

from echo_megatron.bench.all_reduce import main

if __name__ == "__main__":
    sys.exit(main(prog="bench_all_reduce.py"))
