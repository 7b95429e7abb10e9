"""One thread in the tests' own process: it forks the ranks, and a child of a process with an OpenMP pool can hang."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.protocol_model import Layout

torch.set_num_threads(1)


MAX_WORKERS = 8  # each starts up to eight ranks of 0.5 GB


@pytest.hookimpl(optionalhook=True)  # the GPU tests run where there is no xdist, too
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of `-n auto`: none where there are GPUs, of which a test takes all and watches the memory."""
    cores = len(os.sched_getaffinity(0))
    return 0 if torch.cuda.is_available() or cores < 2 else min(cores, MAX_WORKERS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-minutes", type=float, default=0.0, help="how long tests/test_fuzz.py draws new examples")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`data` options of tokens that a small model learns in a few steps."""
    from tests.pretrain_runs import import_what_runs_need, write_tokens

    import_what_runs_need()
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Offsets and sizes of cuda/layout.cuh, compiled for the host."""
    from tests.compiler import COMPILER
    from tests.protocol_model import Layout

    return Layout(str(COMPILER), tmp_path_factory.mktemp("layout"))
