"""Finds what `--model` names, chooses what computes it, and makes a subject of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from echo_megatron.evaluate.checkpoint import RunCheckpoint, find_checkpoint, is_run, load_run
from echo_megatron.evaluate.hf_config import read_config
from echo_megatron.evaluate.hf_files import has_safetensors
from echo_megatron.evaluate.subjects import MegatronSubject, Subject, TransformersSubject
from echo_megatron.pretrain.schema import Layers


class Engine(Enum):
    """What computes the model."""

    auto = "auto"  # megatron where it can, else transformers
    megatron = "megatron"  # as P real ranks compute it, bit for bit
    transformers = "transformers"  # any model with the two linears; the last bits are its own


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found and not yet loaded.

    Attributes:
        text: as given.
        run: its checkpoint, where it is a run of `echo-megatron pretrain`; else None: a Hugging Face folder or name.
    """

    text: str
    run: RunCheckpoint | None


def find_model(text: str) -> ModelSource:
    """What `text` names.

    Raises:
        ValueError: a folder that is neither a run nor a Hugging Face checkpoint; a run without a checkpoint.
    """
    folder = Path(text)
    if folder.is_dir() and is_run(folder):
        return ModelSource(text, find_checkpoint(folder))
    if folder.exists() and not (folder / "config.json").is_file():
        raise ValueError(
            f"--model {text}: expected a run folder (config.yaml, checkpoints/), a checkpoint in one, or a Hugging "
            "Face folder (config.json), got neither"
        )
    if not folder.exists() and text.count("/") != 1:
        raise ValueError(f"--model {text}: no such folder; a hub name has the form owner/name")
    return ModelSource(text, None)


def choose_engine(
    source: ModelSource, wanted: Engine, world_sizes: Sequence[int], is_simulated: bool
) -> tuple[Engine, str]:
    """What computes `source`, and why where `auto` finds that megatron cannot.

    A Hugging Face model whose ranks are simulated is megatron's where `load_hf` reads it and every P divides it.

    Args:
        source: from `find_model`.
        wanted: as given.
        world_sizes: every P of this call: rows of one file are of one engine.
        is_simulated: whether the ranks are simulated.

    Raises:
        ValueError: transformers is wanted for a run or for real ranks.
    """
    if wanted is Engine.transformers and source.run is not None:
        raise ValueError("--engine transformers: expected with a Hugging Face model alone, got a run folder")
    if wanted is Engine.transformers and not is_simulated:
        raise ValueError("--engine transformers: simulates ranks, expected without torchrun; real ranks are megatron's")
    if wanted is not Engine.auto or source.run is not None or not is_simulated:
        return (Engine.megatron if wanted is Engine.auto else wanted), ""
    reason = _why_not_megatron(source.text, world_sizes)
    return (Engine.transformers if reason else Engine.megatron), reason


def _why_not_megatron(text: str, world_sizes: Sequence[int]) -> str:
    """Empty where `load_hf` reads the model and every P divides it. Damaged files are for it to refuse."""
    from echo_megatron.evaluate.hf import checkpoint_folder
    from echo_megatron.evaluate.hf_model import rope_scaling_factor

    folder = checkpoint_folder(text)
    try:
        config = read_config(folder / "config.json")
        rope_scaling_factor(config)
    except ValueError as error:
        return str(error).replace(f"{folder}/", "")
    if not has_safetensors(folder):
        return "no safetensors files"
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        value = getattr(config, name)
        if refused := [size for size in world_sizes if value % size]:
            return f"{name} is {value}, not a multiple of P={', '.join(map(str, refused))}"
    return ""


def load_subject(
    source: ModelSource,
    engine: Engine,
    world_size: int,
    is_simulated: bool,
    dtype: torch.dtype,
    layers: Layers,
    device: torch.device,
) -> Subject:
    """The model on `device`.

    Args:
        source: from `find_model`.
        engine: from `choose_engine`.
        world_size: real tensor-parallel ranks; 1 in a simulation.
        is_simulated: whether the ranks of the settings are simulated.
        dtype: of parameters and activations.
        layers: of Megatron's model, local or Transformer Engine's.
        device: of this process.

    Raises:
        ValueError: see `load_run` and `load_hf`; sizes that `world_size` does not divide.
    """
    if source.run is not None:
        run = source.run
        facts = {"model": f"{run.run}, step {run.step:,}", "engine": f"megatron-core, {layers.name} layers"}
        model = load_run(run, world_size, dtype, layers, device)
        return MegatronSubject(model, run.config.data.vocab_size, _with_sites(facts, model), is_simulated)
    if engine is Engine.megatron:
        from echo_megatron.evaluate.hf import load_hf

        try:
            model = load_hf(source.text, layers=layers, dtype=dtype).to(device)
        except ValueError as error:
            hint = "; --engine transformers simulates ranks of what transformers reads" if is_simulated else ""
            raise ValueError(f"{error}{hint}") from error
        facts = {"model": _name(source.text), "engine": f"megatron-core, {layers.name} layers"}
        return MegatronSubject(model, model.hf_config.vocab_size, _with_sites(facts, model), is_simulated)
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(source.text, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {source.text}: transformers cannot load it ({error})") from error
    return TransformersSubject(model.to(device), {"model": _name(source.text), "engine": "transformers"})


def _name(text: str) -> str:
    return Path(text).resolve().name if Path(text).is_dir() else text


def _with_sites(facts: dict[str, Any], model: Any) -> dict[str, Any]:
    return facts | {"num_sites": 2 * model.config.num_layers}
