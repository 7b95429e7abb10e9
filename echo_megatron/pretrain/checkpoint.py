"""What a checkpoint holds, in Megatron's distributed format: model, optimizer, scheduler, random states, step."""

from __future__ import annotations

import logging
import queue
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
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder

logger = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """All that a checkpoint restores, apart from the step."""

    chunk: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def save(folder: CheckpointFolder, step: int, state: TrainingState, settings: dict[str, Any]) -> None:
    """Write the checkpoint of `step`; does nothing where it is the latest already. Called by all processes.

    Raises:
        OSError: the disk is full or not writable; the checkpoint before this one is whole.
        RuntimeError: a rank is missing.
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
    _write(sharded, folder.partial(step), step)
    if is_writer:
        folder.commit(step, settings)
    dist.barrier()


def load(folder: CheckpointFolder, step: int, state: TrainingState) -> None:
    """Restore `state` and the random-number states from the checkpoint of `step`. Called by all processes.

    Raises:
        ValueError: it can't be read, on this process or another.
    """
    error = None
    try:
        loaded = dist_checkpointing.load(_sharded(state, is_loading=True), str(folder.whole(step)))
    except (Exception, CheckpointException) as caught:
        logger.debug("checkpoint of step %d", step, exc_info=True)
        error = f"rank {dist.get_rank()}: {_cause(caught)}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next(filter(None, errors), None):
        raise ValueError(f"{folder.whole(step)}: can't be read ({first}); {folder.way_out(step)}")
    _model(state).load_state_dict(loaded["model"])
    state.optimizer.load_state_dict(loaded["optimizer"])
    state.scheduler.load_state_dict(loaded["scheduler"])
    _set_rng_state(loaded["rng"])
    assert loaded["step"] == step


def _write(sharded: dict[str, Any], path: Path, step: int) -> None:
    """Megatron's save; its errors with what was being done and what is left."""
    where = f"rank {dist.get_rank()} of {dist.get_world_size()}: checkpoint of step {step}"
    rest = "the checkpoint before it, if any, is whole"
    try:
        dist_checkpointing.save(sharded, str(path))
        dist.barrier()
    except (OSError, CheckpointException) as error:
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(
            f"{where}: {path} could not be written ({_cause(error)}; {free:,.0f} MiB are free on its disk); {rest}: "
            "make room, then start the run again"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(f"{where}: a process has ended or does not answer ({error}); {rest}") from error


def _cause(error: BaseException) -> str:
    """One line; of a CheckpointException, which holds other ranks' tracebacks, the last line of the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}".rstrip(": ")


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
