"""Times one all-reduce: the group's own (the baseline, NCCL or gloo) against Echo's presets, in the same run.

usage: torchrun --nproc-per-node P scripts/bench_all_reduce.py [--mib 1 16 64 256] [--out docs/results --name NAME]

A row is one message size a rank. Every preset's result is compared with the reference before it is timed. A time is
the median of --iterations calls after --warmup; on GPUs by CUDA events, with a buffer larger than L2 written before
each call; the slowest rank's median counts. Calls walk through the sites of a pass: the state is read and written.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron import PRESETS, EchoConfig
from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction
from echo_megatron.reference import SimulatedGroup
from echo_megatron.result_files import made_by, markdown_table, provenance_lines, write_results
from echo_megatron.sites import Site

MIB = 1 << 20
NUM_SITES = 56
CHECKED_VALUES = 100_003
FLUSH_BYTES = 256 * MIB
QUANTIZED = [name for name in PRESETS if EchoConfig.preset(name).quantizes]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mib", type=float, nargs="+", default=[0.0625, 1, 4, 16, 64, 256], help="BF16 message, MiB a rank"
    )
    parser.add_argument("--presets", nargs="+", choices=QUANTIZED, default=QUANTIZED)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--name", default="collective")
    return parser.parse_args()


def world() -> dist.ProcessGroup:
    """The default group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def check(preset: str, device: torch.device) -> None:
    """Raises when a rank's result differs from the reference's in one bit."""
    config = EchoConfig.preset(preset)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    communicator, simulated = Communicator(world(), config), SimulatedGroup(world_size, config)
    for idx in range(3):
        generator = torch.Generator().manual_seed(idx)
        xs = [torch.randn(CHECKED_VALUES, generator=generator).to(device, torch.bfloat16) for _ in range(world_size)]
        site = Site(idx, Direction.forward, bits=config.bits)
        if not torch.equal(communicator.all_reduce(xs[rank], site), simulated.all_reduce(xs, site)):
            raise AssertionError(f"rank {rank}: {preset} differs from the reference at site {idx}")


def measure(call: Callable[[], Any], warmup: int, iterations: int, device: torch.device) -> float:
    """Median milliseconds of one call on the slowest rank."""
    flush = torch.empty(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None
    times = []
    for iteration in range(warmup + iterations):
        dist.barrier()
        if flush is None:
            start = time.perf_counter()
            call()
            elapsed = (time.perf_counter() - start) * 1e3
        else:
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        if iteration >= warmup:
            times.append(elapsed)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure_row(mib: float, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Milliseconds of the baseline and of every preset at one size."""
    x = torch.randn(int(mib * MIB) // 2, device=device).to(torch.bfloat16)
    timing = (options.warmup, options.iterations, device)
    row = {"bytes": x.numel() * 2, f"{dist.get_backend()}_ms": measure(lambda: dist.all_reduce(x.clone()), *timing)}
    for preset in options.presets:
        config = EchoConfig.preset(preset)
        communicator = Communicator(world(), config)
        sites = itertools.cycle([Site(idx, Direction.forward, bits=config.bits) for idx in range(NUM_SITES)])
        row[f"{preset}_ms"] = measure(lambda c=communicator, s=sites: c.all_reduce(x, next(s)), *timing)  # type: ignore[misc]
    return row


def main() -> None:
    options = parse_arguments()
    use_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    for preset in options.presets:
        check(preset, device)
    rows = [measure_row(mib, options, device) for mib in options.mib]
    if dist.get_rank() == 0:
        columns = list(rows[0])
        table = markdown_table(
            columns, [[f"{row[c]:,.0f}" if c == "bytes" else f"{row[c]:.3f}" for c in columns] for row in rows]
        )
        print("\n".join(table))
        if options.out:
            made = made_by("scripts/bench_all_reduce.py", vars(options), device, "torch")
            launcher = f"torchrun --nproc-per-node {dist.get_world_size()}"
            made["command"] = made["command"].replace("python", launcher, 1)
            results = {**made, "world_size": dist.get_world_size(), "transport": "collective", "rows": rows}
            lines = ["# One all-reduce over the collective transport", "", *table, "", *provenance_lines(made)]
            write_results(options.out, options.name, results, "\n".join(lines) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
