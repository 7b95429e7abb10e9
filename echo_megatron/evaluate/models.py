"""Finds what `--model` names and makes a subject of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echo_megatron.evaluate.checkpoint import RunCheckpoint, find_checkpoint, is_run, load_run
from echo_megatron.evaluate.subjects import MegatronSubject, Subject, TransformersSubject
from echo_megatron.pretrain.schema import Layers


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found and not yet loaded.

    Attributes:
        text: as given.
        run: its checkpoint, where it is a run of `echo-megatron pretrain`; else None: a Hugging Face folder or name.
    """

    text: str
    run: RunCheckpoint | None

    @property
    def needs_megatron(self) -> bool:
        """Whether Megatron's parallel groups are needed, besides on real ranks."""
        return self.run is not None


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


def load_subject(
    source: ModelSource, world_size: int, is_simulated: bool, dtype: torch.dtype, layers: Layers, device: torch.device
) -> Subject:
    """The model on `device`.

    Args:
        source: from `find_model`.
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
    if not is_simulated:
        from echo_megatron.evaluate.hf import load_hf

        model = load_hf(source.text, layers=layers, dtype=dtype).to(device)
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
