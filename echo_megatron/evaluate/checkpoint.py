"""Models of `echo-megatron pretrain`'s checkpoints, for evaluation: at any tensor-parallel size, without optimizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from echo_megatron.config import EchoConfig
from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.schema import Layers, PretrainConfig, Recompute, from_composed

CONFIG = "config.yaml"
EXTRA_STATE = "_extra_state"  # of FP8, which no pretraining here uses; local layers have it empty


@dataclass(frozen=True)
class RunCheckpoint:
    """One checkpoint of a run.

    Attributes:
        run: name of the run.
        step: optimizer steps that it has behind it.
        path: the folder in Megatron's distributed format.
        config: of the run.
        precision: of parameters in training, `torch.bfloat16` or `torch.float32`.
    """

    run: str
    step: int
    path: Path
    config: PretrainConfig
    precision: torch.dtype


def is_run(folder: Path) -> bool:
    """Whether `folder` is a run folder, or a checkpoint in one."""
    return any((parent / CONFIG).is_file() for parent in _places(folder))


def _places(folder: Path) -> tuple[Path, Path]:
    """Where config.yaml is: in the run folder itself, or above `checkpoints/iter_…`."""
    return folder, folder.absolute().parent.parent


def find_checkpoint(folder: Path) -> RunCheckpoint:
    """The newest checkpoint of a run folder, or the one that `folder` is.

    Raises:
        ValueError: there is none, or config.yaml is not a run's.
    """
    run = next((place for place in _places(folder) if (place / CONFIG).is_file()), None)
    if run is None:
        raise ValueError(f"{folder}: expected a run folder with {CONFIG}, or a checkpoints/iter_… in one")
    if run == folder:
        checkpoints = CheckpointFolder(folder / "checkpoints", 1)
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"{folder}: has no checkpoint yet (checkpoints/latest.json); train it first")
        checkpoints.check(step)
        path = checkpoints.whole(step)
    else:
        path = folder
        if not (path / "settings.json").is_file():
            raise ValueError(f"{folder}: expected a whole checkpoint with settings.json, got none")
        step = int(path.name.removeprefix("iter_"))
    settings = json.loads((path / "settings.json").read_text())
    precision = {"torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}[settings["precision"]]
    return RunCheckpoint(run.resolve().name, step, path, _read_config(run / CONFIG), precision)


def _read_config(path: Path) -> PretrainConfig:
    try:
        loaded = OmegaConf.merge(OmegaConf.structured(PretrainConfig), OmegaConf.load(path))
        # The communication is an evaluation's own; what the run's version took, this one may refuse.
        loaded.tp_comm = EchoConfig()
        return from_composed(loaded)
    except (OmegaConfBaseException, OSError) as error:
        raise ValueError(f"{path}: is not a run's configuration ({error})") from error


def load_run(
    checkpoint: RunCheckpoint, tp: int, dtype: torch.dtype, layers: Layers, device: torch.device | None = None
) -> Any:
    """This rank's part of the model, a GPTModel in evaluation mode.

    Megatron's distributed format is resharded: the run may have had other tensor- and pipeline-parallel sizes and other
    layers. Model parallelism has to be initialized with `tp` ranks and no pipeline stages.

    Args:
        checkpoint: from `find_checkpoint`.
        tp: tensor-parallel size.
        dtype: torch.bfloat16 or torch.float32, of parameters and activations.
        layers: local or Transformer Engine's.
        device: where the model goes; None: it stays on the CPU.

    Raises:
        ValueError: a size that `tp` does not divide, or a checkpoint that lacks parameters.
    """
    from megatron.core import dist_checkpointing

    from echo_megatron.pretrain.model import build_gpt

    config = evaluation_config(checkpoint.config, tp)
    model = build_gpt(config, dtype, layers).to(device or "cpu", dtype)
    sharded = {name: part for name, part in model.sharded_state_dict().items() if EXTRA_STATE not in name}
    try:
        loaded = dist_checkpointing.load({"model": sharded}, str(checkpoint.path))["model"]
    except Exception as error:  # the format's readers raise many unrelated types
        raise ValueError(
            f"{checkpoint.path}: cannot be read as this model ({type(error).__name__}: {error}); the checkpoint is "
            "damaged, or config.yaml is another run's"
        ) from error
    missing = [name for name in model.load_state_dict(loaded, strict=False).missing_keys if EXTRA_STATE not in name]
    if missing:
        raise ValueError(f"{checkpoint.path}: lacks {', '.join(missing[:4])}; config.yaml is another run's")
    return model.eval()


def evaluation_config(config: PretrainConfig, tp: int) -> PretrainConfig:
    """The run's configuration at tensor-parallel size `tp` alone, without recompute and sequence parallelism.

    Raises:
        ValueError: a size that `tp` does not divide.
    """
    copy = from_composed(OmegaConf.structured(config))
    copy.trainer.tensor_parallel, copy.trainer.pipeline_parallel, copy.trainer.data_parallel = tp, 1, 1
    copy.trainer.sequence_parallel = False  # decides where norms are computed, and no number of the model
    copy.trainer.deterministic = False  # of gradients; Transformer Engine refuses it in processes not started for it
    copy.model.recompute = Recompute.none
    for name, value in (
        ("model.num_attention_heads", copy.model.num_attention_heads),
        ("model.num_query_groups", copy.model.num_query_groups),
        ("model.ffn_hidden_size", copy.model.ffn_hidden_size),
        ("data.padded_vocab_size", copy.data.padded_vocab_size),
    ):
        if value % tp:
            raise ValueError(f"{name}: expected a multiple of {tp} ranks, got {value}; use fewer ranks, or simulate")
    return copy
