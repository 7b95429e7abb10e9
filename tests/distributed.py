"""Runs a function in P gloo processes and hands its results, or the first failure, back to the test."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(
    rank: int, world_size: int, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        result = fn(rank, world_size, *args)
        torch.save(result, f"{folder}/result{rank}")
        dist.barrier()
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """`fn(rank, world_size, *args)` on every rank; `fn` must be importable (module level).

    Raises:
        AssertionError: a rank failed; the message holds every rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(
                _entry, (world_size, folder, timeout_s, fn, args), nprocs=world_size, start_method="fork"
            )
        except Exception as error:
            texts = [f"rank {p.name[5:]}:\n{p.read_text()}" for p in sorted(Path(folder).glob("error*"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world_size)]


def _entry_that_may_die(
    rank: int, world_size: int, folder: str, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """As `run_ranks` does it, but a rank may die: no barrier at the end, and no clean-up that waits for the others."""
    torch.set_num_threads(1)
    if port:
        store: dist.Store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    else:
        store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(fn(rank, world_size, *args), f"{folder}/result{rank}")
    os._exit(0)


def run_with_losses(
    fn: Callable[..., Any], world_size: int, folder: Path, *args: Any, store: str = "file"
) -> list[int | None]:
    """Exit code of every rank; what `fn` returned lies in result0, result1, …

    Args:
        fn: of every rank; it may kill its process.
        world_size: number of ranks.
        folder: an empty one.
        args: of `fn`, behind rank and world size.
        store: what the ranks meet in: a `file`, or a server in the process of rank 0 (`tcp`).
    """
    context = mp.get_context("fork")
    ranks = range(world_size)
    port = 0
    if store == "tcp":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    processes = [
        context.Process(target=_entry_that_may_die, args=(rank, world_size, str(folder), port, fn, args))
        for rank in ranks
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]
