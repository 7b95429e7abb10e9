"""These tests run in the environment of `make nemo-env`; elsewhere they are not collected."""

import importlib.util
import os

if importlib.util.find_spec("nemo") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    torch.set_num_threads(1)  # this process forks the ranks, and a child of a process with an OpenMP pool can hang
    # megatron-core 0.15.3 compiles a CUDA extension when it is imported.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
