"""Several runs one after the other in the same processes: for studies of many short runs, which start up only once."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Sequence

import torch

from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.pretrain.worker import lock_run_folder, prepare_process


def run_series(configs: Sequence[PretrainConfig], command: str, budget_s: float | None = None) -> list[str]:
    """Train each run that is not finished, in this process, one of those that torchrun started.

    Args:
        configs: the runs, of the same parallel sizes, device and determinism.
        command: what the user typed, for run.json.
        budget_s: seconds after which no further run starts that, by the longest so far, would not end in time; None: no
            limit. A run that was stopped goes on from its checkpoint the next time.

    Returns:
        Names of the runs that are not finished: for want of time, or because their loss was not finite.

    Raises:
        ValueError, OSError: runs that can't share processes, or see `preflight`.
    """
    begin = time.monotonic()
    _check_alike(configs)
    rank = prepare_process(configs[0])
    from echo_megatron.pretrain.cpu_shims import seed_all
    from echo_megatron.pretrain.distributed import any_rank, distributed
    from echo_megatron.pretrain.loop import NonFiniteError, Trainer
    from echo_megatron.pretrain.preflight import preflight
    from echo_megatron.pretrain.stop import StopRequest

    plans = [preflight(config, int(os.environ["LOCAL_WORLD_SIZE"])) for config in configs]
    unfinished, longest = [], 0.0
    with distributed(configs[0], plans[0].device) as device:
        for config, plan in zip(configs, plans, strict=True):
            checkpoints = CheckpointFolder(config.run_dir / "checkpoints", config.trainer.keep_checkpoints)
            if checkpoints.latest() == config.trainer.max_steps:
                continue
            start = time.monotonic()
            is_late = budget_s is not None and start - begin + longest > budget_s
            if any_rank(is_late, device):
                unfinished.append(config.name)
                continue
            with lock_run_folder(config.run_dir, rank):
                seed_all(config.seed)
                trainer = Trainer(config, plan, device, StopRequest(config.run_dir, None), command)
                try:
                    status = trainer.run()
                except NonFiniteError as error:
                    status = "failed"
                    if rank == 0:
                        print(f"{config.run_dir}: {error}", file=sys.stderr, flush=True)
                trainer.close()
            del trainer
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            longest = max(longest, time.monotonic() - start)
            if status != "finished":
                unfinished.append(config.name)
                if status == "stopped":
                    break
    return unfinished


def _check_alike(configs: Sequence[PretrainConfig]) -> None:
    if not configs:
        raise ValueError("series: expected at least one run, got none")
    first = configs[0].trainer
    for config in configs:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "device", "deterministic", "timeout_s"):
            if (own := getattr(config.trainer, name)) != (expected := getattr(first, name)):
                raise ValueError(
                    f"series: expected trainer.{name}={expected} in every run, {config.name} has {own}; start it by "
                    "itself"
                )
    if len({config.run_dir for config in configs}) < len(configs):
        raise ValueError("series: expected every run to have a name of its own; add the seed or the arm to it")
