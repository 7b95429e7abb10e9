"""One thread in the tests' own process: it forks the ranks, and a child of a process with an OpenMP pool can hang."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-minutes", type=float, default=0.0, help="how long tests/test_fuzz.py draws new examples")
