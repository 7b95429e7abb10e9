"""What a checkpoint holds, in Megatron's distributed format: model, optimizer, scheduler, random states, step."""

from __future__ import annotations

import queue
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model

from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder


@dataclass
class TrainingState:
    """All that a checkpoint restores, apart from the step."""

    chunk: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def save(folder: CheckpointFolder, step: int, state: TrainingState, settings: dict[str, Any]) -> None:
    """Write the checkpoint of `step`; does nothing where it is the latest already. Called by all processes.

    Raises:
        OSError: the disk is full or not writable.
    """
    if _agree(folder.latest()) == step:
        return
    is_writer = dist.get_rank() == 0
    if is_writer:
        folder.begin(step)
    dist.barrier()
    # Megatron starts a server process a rank to collect the results of asynchronous writers. This save is synchronous:
    # a queue in the process does, and a killed rank leaves no process behind.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    sharded = {**_sharded(state, is_loading=False), "step": step, "scheduler": state.scheduler.state_dict()}
    dist_checkpointing.save(sharded, str(folder.partial(step)))
    dist.barrier()
    if is_writer:
        folder.commit(step, settings)
    dist.barrier()


def load(folder: CheckpointFolder, step: int, state: TrainingState) -> None:
    """Restore `state` and the random-number states from the checkpoint of `step`. Called by all processes."""
    loaded = dist_checkpointing.load(_sharded(state, is_loading=True), str(folder.whole(step)))
    _model(state).load_state_dict(loaded["model"])
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["scheduler"])
    _set_rng_state(loaded["rng"])
    assert loaded["step"] == step


def _sharded(state: TrainingState, is_loading: bool) -> dict[str, Any]:
    """Megatron's sharded state dict of model, optimizer and random-number states."""
    model = _model(state).sharded_state_dict()
    return {
        "model": model,
        "optimizer": state.optimizer.sharded_state_dict(model, is_loading=is_loading),
        "rng": ShardedObject(
            "rng_state",
            _rng_state(),
            (
                parallel_state.get_pipeline_model_parallel_world_size(),
                parallel_state.get_tensor_model_parallel_world_size(),
            ),
            (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
            replica_id=parallel_state.get_data_parallel_rank(),
        ),
    }


def _model(state: TrainingState) -> Any:
    """The GPT without Megatron's wrappers, whose prefixes would otherwise end up in the checkpoint's names."""
    return unwrap_model(state.chunk)


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002  # Megatron uses the global generator
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _agree(value: Any) -> Any:
    """Rank 0's value on every process."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
