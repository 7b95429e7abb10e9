"""One thread in the tests' own process: it forks the ranks, and a child of a process with an OpenMP pool can hang."""

import torch

torch.set_num_threads(1)
