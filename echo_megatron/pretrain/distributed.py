"""Processes of a run: which device, torch.distributed and Megatron's groups in each, all with bounded waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all
from echo_megatron.pretrain.schema import Device, Precision, PretrainConfig, TrainerConfig

logger = logging.getLogger(__name__)


def resolve_device(trainer: TrainerConfig, num_local_processes: int | None = None) -> torch.device:
    """The kind of device to train on, torch.device("cuda") or torch.device("cpu").

    Args:
        trainer: the run's parallel sizes and `device`.
        num_local_processes: processes on this machine; None: all of the run's.

    Raises:
        ValueError: `device: cuda` with fewer GPUs than processes on this machine.
    """
    needed = num_local_processes or trainer.world_size
    available = torch.cuda.device_count()
    if trainer.device is Device.cpu:
        return torch.device("cpu")
    if available >= needed:
        return torch.device("cuda")
    if trainer.device is Device.cuda:
        raise ValueError(
            f"trainer.device=cuda: expected at least {needed} GPUs on this machine (tensor_parallel={trainer.tensor_parallel} "
            f"x pipeline_parallel={trainer.pipeline_parallel} x data_parallel={trainer.data_parallel}), got {available}; "
            "use smaller parallel sizes, or trainer.device=cpu"
        )
    logger.warning(
        "trainer.device=auto: %d GPUs for %d processes; training on the CPU over gloo (trainer.device=cuda refuses instead)",
        *(available, needed),
    )
    return torch.device("cpu")


def resolve_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Parameters' and activations' type.

    Raises:
        ValueError: bf16 on the CPU, where Megatron's optimizer for it does not run.
    """
    if precision is Precision.bf16 and device.type == "cpu":
        raise ValueError("trainer.precision=bf16: expected a CUDA device, got cpu; use trainer.precision=auto or fp32")
    if precision is Precision.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision is Precision.bf16 else torch.float32


@contextmanager
def distributed(config: PretrainConfig, device: torch.device) -> Iterator[torch.device]:
    """Join the processes that torchrun started, build Megatron's groups and seed; leave them all at the end.

    Args:
        config: the run.
        device: kind of device, from `resolve_device`.

    Yields:
        This process's device.

    Raises:
        ValueError: torchrun's number of processes is not the product of the parallel sizes.
    """
    trainer = config.trainer
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != trainer.world_size:
        raise ValueError(
            f"torchrun started {world_size} processes; expected tensor_parallel={trainer.tensor_parallel} x pipeline_parallel="
            f"{trainer.pipeline_parallel} x data_parallel={trainer.data_parallel} = {trainer.world_size}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        install_cpu_shims()
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    timeout = timedelta(seconds=trainer.timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=trainer.tensor_parallel,
            pipeline_model_parallel_size=trainer.pipeline_parallel,
            distributed_timeout_minutes=max(1, trainer.timeout_s // 60),
            create_gloo_process_groups=False,
        )
        seed_all(config.seed)
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any process; every process has to call it."""
    tensor = torch.tensor(int(flag), device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())
