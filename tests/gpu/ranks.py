"""Runs a function in one process a GPU over NCCL and hands its results, or every failure, back to the test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_GPUS = min(torch.cuda.device_count(), 8)


def visible_devices() -> list[str]:
    """The GPUs of this process as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(device) for device in range(torch.cuda.device_count())]


def _entry(
    rank: int,
    world_size: int,
    folder: str,
    device: int,
    orderly: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
            device_id=torch.device("cuda", device),
        )
        result = fn(rank, world_size, *args)
        torch.save(result, f"{folder}/unfinished{rank}")
        Path(f"{folder}/unfinished{rank}").rename(f"{folder}/result{rank}")
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
        os._exit(1)  # the group may be beyond an orderly end
    if not orderly:
        os._exit(0)  # NCCL's group has no orderly end once a rank is dead
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    env: Mapping[str, str] | None = None,
    rank_env: Callable[[int], Mapping[str, str]] | None = None,
    devices: Sequence[int] | None = None,
    killed: Sequence[int] = (),
    timeout_s: float = 150.0,
) -> list[Any]:
    """`fn(rank, world_size, *args)` on every rank; `fn` must be importable (module level).

    Args:
        fn: what each rank runs, with its GPU set and NCCL's group made.
        args: further arguments.
        world_size: number of ranks; all GPUs unless told.
        env: environment of all ranks.
        rank_env: environment of one rank.
        devices: GPU of each rank, as it sees them; its own number unless told.
        killed: ranks that end themselves; they have no result.
        timeout_s: bound of the whole.

    Raises:
        AssertionError: a rank failed or hangs; the message holds every rank's traceback.
    """
    world_size = world_size or NUM_GPUS
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world_size):
            device = rank if devices is None else devices[rank]
            process = context.Process(target=_entry, args=(rank, world_size, folder, device, not killed, fn, args))
            # Kernels are loaded as in any user's process, not as virtual ranks need it.
            own = {"CUDA_MODULE_LOADING": "LAZY", **(env or {}), **(rank_env(rank) if rank_env else {})}
            with _environment(own):
                process.start()
            processes.append(process)
        hung = _join(processes, Path(folder), timeout_s)
        problems = [f"rank {path.name[5:]}:\n{path.read_text()}" for path in sorted(Path(folder).glob("error*"))]
        problems += [f"rank {rank} hangs after {timeout_s:g} s" for rank in hung]
        for rank, process in enumerate(processes):
            has_result = Path(f"{folder}/result{rank}").exists()
            if rank not in killed and not has_result and rank not in hung and not problems:
                problems.append(f"rank {rank} ended with exit code {process.exitcode} and no result")
        assert not problems, "\n".join(problems)
        return [
            None if rank in killed else torch.load(f"{folder}/result{rank}", weights_only=False)
            for rank in range(world_size)
        ]


def _join(processes: list[Any], folder: Path, timeout_s: float) -> list[int]:
    """Waits for all; once a rank has failed the others get ten seconds. The ranks that had to be ended."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(folder.glob("error*")):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
    for process in processes:
        process.join()
    return [] if any(folder.glob("error*")) else hung


@contextmanager
def _environment(variables: Mapping[str, str]):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
