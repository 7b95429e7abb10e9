"""Everything here needs GPUs; without one it is skipped and counted as skipped. `scripts/gpu_tests.sh` runs it."""

import os
from pathlib import Path

# Before anything asks for the GPU, see virtual_workspaces.py.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--num-calls", type=int, default=2000, help="calls of tests/gpu/test_p2p_random.py")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
