"""Checkpoints of a run: Megatron's distributed format, written beside and renamed, so that a killed save never costs one.

    checkpoints/iter_0000100/   model, optimizer, scheduler, random-number states, step, settings
    checkpoints/latest.json     {"step": 100, "folder": "iter_0000100"}

A save writes `iter_….tmp`, renames it, and only then replaces `latest.json`; both renames are atomic.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from echo_megatron.run_folder import write_atomic


@dataclass
class TrainingState:
    """All that a checkpoint restores, apart from the step."""

    chunk: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


class Checkpoints:
    """The checkpoints of one run folder. Every method is called by all processes, but for `latest` and `settings`.

    Args:
        path: the folder `checkpoints`.
        keep: how many of the newest stay.
    """

    def __init__(self, path: Path, keep: int):
        self.path = path
        self._keep = keep

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, or None.

        Raises:
            ValueError: latest.json names a checkpoint that is not there.
        """
        pointer = self.path / "latest.json"
        if not pointer.exists():
            return None
        step = int(json.loads(pointer.read_text())["step"])
        if not self._folder(step).is_dir():
            raise ValueError(f"{pointer}: names {self._folder(step).name}, which is missing; restore it or delete the run folder")
        return step

    def settings(self, step: int) -> dict[str, Any]:
        """The settings of the run that saved the checkpoint."""
        return json.loads((self._folder(step) / "settings.json").read_text())

    def save(self, step: int, state: TrainingState, settings: dict[str, Any]) -> None:
        """Write the checkpoint of `step` and drop old ones; does nothing where it is the latest already.

        Raises:
            OSError: the disk is full or not writable.
        """
        if _agree(self.latest()) == step:
            return
        folder, partial = self._folder(step), self._folder(step).with_suffix(".tmp")
        if dist.get_rank() == 0:
            self._drop_partial()
            shutil.rmtree(folder, ignore_errors=True)  # whole, but latest.json never came to name it
            partial.mkdir(parents=True)
        dist.barrier()
        sharded = {**_sharded(state, is_loading=False), "step": step, "scheduler": state.scheduler.state_dict()}
        dist_checkpointing.save(sharded, str(partial))
        dist.barrier()
        if dist.get_rank() == 0:
            write_atomic(partial / "settings.json", json.dumps(settings, indent=2) + "\n")
            os.replace(partial, folder)
            write_atomic(self.path / "latest.json", json.dumps({"step": step, "folder": folder.name}) + "\n")
            for old in sorted(self.path.glob("iter_*[0-9]"))[: -self._keep]:
                if old != folder:
                    shutil.rmtree(old)
        dist.barrier()

    def load(self, step: int, state: TrainingState) -> None:
        """Restore `state` and the random-number states from the checkpoint of `step`."""
        loaded = dist_checkpointing.load(_sharded(state, is_loading=True), str(self._folder(step)))
        state.chunk.load_state_dict(loaded["model"])
        state.optimizer.load_state_dict(loaded["optimizer"])
        state.scheduler.load_state_dict(loaded["scheduler"])
        _set_rng_state(loaded["rng"])
        assert loaded["step"] == step

    def _folder(self, step: int) -> Path:
        return self.path / f"iter_{step:07d}"

    def _drop_partial(self) -> None:
        for partial in self.path.glob("iter_*.tmp"):
            shutil.rmtree(partial)


def _sharded(state: TrainingState, is_loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of model, optimizer and random-number states."""
    model = state.chunk.sharded_state_dict()
    return {
        "model": model,
        "optimizer": state.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "rng": ShardedObject(
            "rng_state",
            _rng_state(),
            (parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
    }


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _agree(value: Any) -> Any:
    """Rank 0's value on every process."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
