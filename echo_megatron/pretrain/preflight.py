"""Everything that can be refused before processes start: options, data, device, run folder, a run to be resumed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.dataset import Data, check_data
from echo_megatron.pretrain.device import resolve_device, resolve_dtype, resolve_layers
from echo_megatron.pretrain.schema import Layers, PretrainConfig, Resume
from echo_megatron.pretrain.schema_checks import validate
from echo_megatron.pretrain.settings import check_same, run_settings


@dataclass
class Plan:
    """What a run turned out to be on this machine.

    Attributes:
        device: kind of device.
        dtype: of parameters and activations.
        layers: whose layers the model is made of.
        data: the tokens, for reports.
        settings: everything that decides the run's numbers.
    """

    device: torch.device
    dtype: torch.dtype
    layers: Layers
    data: Data
    settings: dict[str, Any]


def preflight(config: PretrainConfig, num_local_processes: int | None = None) -> Plan:
    """Check the whole run.

    Args:
        config: the run.
        num_local_processes: processes on this machine; None: all of the run's.

    Raises:
        ValueError: options that do not go together, too few GPUs, missing tokens, or another run in the run folder.
        OSError: a run folder that cannot be written.
    """
    validate(config)
    device = resolve_device(config.trainer, num_local_processes)
    dtype = resolve_dtype(config.trainer.precision, device)
    layers = resolve_layers(config.model.layers, device)
    data = check_data(config.data)
    resolved = {"precision": str(dtype), "device": device.type, "layers": layers.name}
    settings = run_settings(config, {"data": data.fingerprint, **resolved})
    _check_writable(config)
    _check_resume(config, settings)
    return Plan(device, dtype, layers, data, settings)


def _check_writable(config: PretrainConfig) -> None:
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.run_dir):
            pass
    except OSError as error:
        raise OSError(
            f"run folder {config.run_dir}: cannot be written ({error}); choose another runs_dir or name"
        ) from error


def _check_resume(config: PretrainConfig, settings: dict[str, Any]) -> None:
    checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.keep_checkpoints)
    step = checkpoints.latest()
    if config.trainer.resume is Resume.never and (config.run_dir / "metrics.jsonl").exists():
        raise ValueError(
            f"trainer.resume=never: {config.run_dir} holds a run already; choose another name, delete the folder, "
            "or resume with trainer.resume=auto"
        )
    if step is not None:
        checkpoints.check(step)
        check_same(checkpoints.settings(step), settings, config.trainer.accept_changes, str(config.run_dir))
