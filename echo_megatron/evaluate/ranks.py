"""The processes of an evaluation: torchrun's as tensor-parallel ranks, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_ranks() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


@contextmanager
def model_parallel(device: torch.device, timeout_s: float = 600.0) -> Iterator[torch.device]:
    """Joins torch.distributed and makes all its ranks one tensor-parallel group of Megatron's.

    Args:
        device: kind of device; on a CPU Megatron's shims are installed, for good.
        timeout_s: seconds that a rank waits for the others.

    Yields:
        This process's device.
    """
    from megatron.core import parallel_state

    from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all

    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        install_cpu_shims()
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if under_torchrun():
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
        )
        seed_all(1234)
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
