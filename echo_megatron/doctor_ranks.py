"""One rank of the doctor's self-test and measurement, under torchrun: the benches' rows, checked and then timed.

The benches check a row against the reference, bit for bit, before they time it. The first rank writes what was found.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron.bench import all_reduce
from echo_megatron.bench.all_reduce import Bench
from echo_megatron.bench.echo_calls import TIMEOUT_S, algorithm_of
from echo_megatron.bench.rows import ITEMSIZE, Kind, Row
from echo_megatron.bench.shares import SharesBench
from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig, StateDtype, TransportName
from echo_megatron.run_folder import write_atomic
from echo_megatron.sites import Site
from echo_megatron.transports.p2p import P2PTransport

ROWS = {Bench: ["echo4_local", "echo8_local"], SharesBench: ["echo4_reduce_scatter", "echo8_all_gather"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is that of a process that did its part, whatever it found."""
    parser = argparse.ArgumentParser(prog="python -m echo_megatron.doctor_ranks", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of the findings")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of the messages that are timed")
    parser.add_argument("--seconds", type=float, required=True, help="of timing, about")
    parser.add_argument("--transport", choices=list(TransportName.__members__), default="auto")
    parser.add_argument("--limit-s", type=float, required=True, help="seconds after which this process ends itself")
    options = parser.parse_args(arguments)
    # Even where a call into the driver hangs and nobody is left to end it.
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    rank, use_cuda = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", timeout=timedelta(seconds=3 * TIMEOUT_S), device_id=device if use_cuda else None
    )
    world = dist.group.WORLD
    assert world is not None
    try:
        found = look(world, device, options)
        if rank == 0:
            write_atomic(options.out, json.dumps(found))
    finally:
        dist.destroy_process_group()
    return 0


def look(group: dist.ProcessGroup, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """The self-test and the measurement; what was found, the same kind of thing on every rank."""
    found = _choices(group, device, options)
    for kind in ROWS:
        bench = kind(_bench_options(options, kind, device), group, device)
        bench.rows = [row for row in bench.rows if _is_preset(row, device)]
        bench.run()
        results = bench.results()
        found["rows"] += results["rows"]
        found["left_out"] |= results["left_out"]
        found["ceilings"] = results["ceilings"] and {
            name: rate if math.isfinite(rate) else None for name, rate in results["ceilings"].items()
        }
        found["symmetric"] = bench.memory.is_symmetric
    return found


def _is_preset(row: Row, device: torch.device) -> bool:
    """What the presets call; on a CPU, where a check takes seconds, 8 bits by the all-gather alone."""
    if row.config is None or row.kind is Kind.all_gather:
        return True
    return row.state_dtype == StateDtype.compact.name and (device.type == "cuda" or row.bits == 4)


def _choices(group: dist.ProcessGroup, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Transport, algorithm and crossover of the preset echo4."""
    config = EchoConfig(transport=TransportName[options.transport], timeout_s=TIMEOUT_S)
    communicator = Communicator(group, config)
    transport, site = communicator.transport, Site(0, Direction.forward, bits=config.bits)
    algorithms = {
        str(size): algorithm_of(
            communicator, torch.empty(size // ITEMSIZE, dtype=torch.bfloat16, device=device), site
        ).name
        for size in options.sizes
    }  # fmt: skip
    found = {
        "device": device.type,
        "world_size": group.size(),
        "transport": transport.name,
        "describe": communicator.describe(),
        "min_bytes": communicator.min_bytes(),
        "algorithms": algorithms,
        "tables": list(transport.table.sources) if isinstance(transport, P2PTransport) else [],
        "rows": [],
        "left_out": {},
    }
    communicator.destroy()
    return found


def _bench_options(options: argparse.Namespace, kind: type[Bench], device: torch.device) -> argparse.Namespace:
    words = ["--rows", *ROWS[kind], "--policies", "rotated", "--sizes", *map(str, options.sizes)]
    seconds = options.seconds / len(ROWS)  # the benches run one after the other
    words += ["--transport", options.transport, "--budget-s", f"{seconds:g}"]
    words += ["--warmup", "10", "--iterations", "30", "--max-s", f"{seconds / 10:g}"]
    words += ["--sequence-parallel"] if kind is SharesBench else []
    asked = all_reduce.parse_arguments(words, "doctor")
    if device.type == "cpu":
        asked.warmup, asked.iterations = 1, 3
    return asked


if __name__ == "__main__":
    sys.exit(main())
