"""Which device and precision a run gets on this machine."""

from __future__ import annotations

import logging

import torch

from echo_megatron.pretrain.schema import Device, Precision, TrainerConfig

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
            f"trainer.device=cuda: expected at least {needed} GPUs on this machine (tensor_parallel="
            f"{trainer.tensor_parallel} x pipeline_parallel={trainer.pipeline_parallel} x data_parallel="
            f"{trainer.data_parallel}), got {available}; "
            "use smaller parallel sizes, or trainer.device=cpu"
        )
    logger.warning(
        "trainer.device=auto: %d GPUs for %d processes; training on the CPU (trainer.device=cuda refuses instead)",
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
