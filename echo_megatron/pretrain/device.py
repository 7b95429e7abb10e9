"""Which device, precision and kind of layers a run gets on this machine."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from echo_megatron.pretrain.schema import Device, Layers, Precision, TrainerConfig

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


def resolve_layers(layers: Layers, device: torch.device) -> Layers:
    """Whose layers the model is made of.

    Raises:
        ValueError: Transformer Engine's layers are asked for on the CPU or where it is not installed; or local layers
            on a CPU where it is installed, because Megatron-core then takes its norms all the same.
    """
    is_installed = find_spec("transformer_engine") is not None
    if device.type == "cpu" and is_installed:
        raise ValueError(
            "model.layers: Transformer Engine is installed, and Megatron-core takes its norms, which need a GPU. "
            "Expected an environment without transformer-engine for the CPU (make venv), or trainer.device=cuda"
        )
    if layers is Layers.transformer_engine and (device.type == "cpu" or not is_installed):
        what = "there is none on the CPU" if device.type == "cpu" else "transformer-engine is not installed"
        raise ValueError(f"model.layers=transformer_engine: {what}; use model.layers=local or auto")
    if layers is not Layers.auto:
        return layers
    return Layers.transformer_engine if is_installed else Layers.local
