"""These tests run in the environment of `make nemo-env`; elsewhere they are not collected."""

import os
from importlib.metadata import PackageNotFoundError, version

try:
    version("nemo_toolkit")  # not find_spec("nemo"), which would find this folder
except PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]
else:
    # megatron-core 0.15.3 compiles a CUDA extension when it is imported, and without a GPU has to be told for which.
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
