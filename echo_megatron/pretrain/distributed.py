"""Processes of a run: which device, torch.distributed and Megatron's groups in each, all with bounded waits."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.transports.protocol import CommunicationError


@contextmanager
def distributed(config: PretrainConfig, device: torch.device) -> Iterator[torch.device]:
    """Join the processes that torchrun started, build Megatron's groups and seed; leave them all at the end.

    A CommunicationError ends the process, with its traceback and status 1.

    Args:
        config: the run.
        device: kind of device, from `resolve_device`.

    Yields:
        This process's device.

    Raises:
        ValueError: torchrun's number of processes is not the product of the parallel sizes.
    """
    trainer = config.trainer
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != trainer.world_size:
        raise ValueError(
            f"torchrun started {world_size} processes; expected tensor_parallel={trainer.tensor_parallel} x "
            f"pipeline_parallel={trainer.pipeline_parallel} x data_parallel={trainer.data_parallel} = "
            f"{trainer.world_size}"
        )
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        install_cpu_shims()
    if trainer.deterministic:
        torch.use_deterministic_algorithms(True)
        # Nothing here reads memory before it is written; filling every new tensor would only cost time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    timeout = timedelta(seconds=trainer.timeout_s)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=trainer.tensor_parallel,
            pipeline_model_parallel_size=trainer.pipeline_parallel,
            distributed_timeout_minutes=trainer.timeout_s / 60,  # becomes a timedelta
            create_gloo_process_groups=False,
        )
        seed_all(config.seed)
        yield device
    except CommunicationError:
        traceback.print_exc()
        end_process()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def end_process() -> NoReturn:
    """At once, after a rank was lost: leaving NCCL's groups in order would wait for it until their time-out."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether `flag` is set on any process; every process has to call it."""
    tensor = torch.tensor(int(flag), device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return bool(tensor.item())
