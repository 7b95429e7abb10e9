"""Random calls of every kind on real ranks for minutes, each against the reference or the other ranks: scripts/soak.py.

Beside them run copies between the GPUs, a rank is late at random, streams differ from rank to rank, and the allocator
may hold so little device memory that it has to give blocks back while calls are under way.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.bench.soak_bar import Bar
from echo_megatron.bench.step_load import Load
from echo_megatron.communicator import Communicator
from echo_megatron.config import (
    GROUP_SIZES,
    PAPER_FEEDBACK,
    Algorithm,
    Direction,
    EchoConfig,
    Policy,
    Rescale,
    Residual,
)
from echo_megatron.reference import SimulatedGroup, exact_sum
from echo_megatron.result_files import made_by, markdown_table, provenance_lines, write_results
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_CONFIGS = {"cuda": 8, "cpu": 3}
MOST_VALUES = {"cuda": 16 << 20, "cpu": 1 << 14}
NUM_STREAMS = 3
PASSES_BETWEEN_AGREEMENTS = 20
MOST_MESSAGES = 10  # of mismatches in the result
MOST_CHURNED = 64  # blocks
# None, what the residual has as its default, and averages, which the local residual has not.
_FEEDBACKS: tuple[dict[str, Any], ...] = ({"eta": 0.0}, {}, {}, vars(PAPER_FEEDBACK))
LONGEST_DELAY = 2_000_000  # GPU cycles, about a millisecond


def draw_config(draw: random.Random) -> EchoConfig:
    """Options whose results the reference gives: all but the choice of algorithm by message."""
    return EchoConfig(
        policy=draw.choice(list(Policy)),
        group_size=draw.choice(GROUP_SIZES),
        algorithm=draw.choice((Algorithm.one_shot, Algorithm.two_shot)),
        residual=draw.choice((Residual.local, Residual.local, Residual.consensus)),
        rescale=draw.choice(list(Rescale)),
        **draw.choice(_FEEDBACKS),
    )


@dataclass
class Counts:
    """What was done, by kind of call, and what was found."""

    calls: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    mismatches: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)


class Soak:
    """One rank's part.

    Args:
        device: of this rank.
        seed: of what all ranks draw alike.
        share_compared: of the passes that are compared with the reference; of the others ranks hold the same bits.
    """

    def __init__(self, device: torch.device, seed: int, share_compared: float) -> None:
        self.device, self.share_compared = device, share_compared
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.draw = random.Random(seed)  # the same on all ranks
        self.own_draw = random.Random(1000 * seed + self.rank)
        group = dist.group.WORLD
        assert group is not None
        self.configs = [draw_config(self.draw) for _ in range(NUM_CONFIGS[device.type])]
        self.communicators = [Communicator(group, config) for config in self.configs]
        self.counts = Counts()
        generator = torch.Generator(device).manual_seed(seed)
        size = (self.world_size, MOST_VALUES[device.type] + 4096)
        self.values = torch.randn(size, generator=generator, device=device)
        self.streams = [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)] if device.type == "cuda" else []
        self.digest = torch.zeros((), dtype=torch.int64, device=device)
        self.churned: list[Tensor] = []

    def run_pass(self) -> None:
        """A few calls of one kind and shape on one communicator, under way at once, then looked at."""
        draw = self.draw
        idx = draw.randrange(len(self.configs))
        config, communicator = self.configs[idx], self.communicators[idx]
        kinds = ["all_reduce", "all_reduce", "all_gather"]
        kinds += ["reduce_scatter"] if config.residual is not Residual.consensus else []
        kinds += ["exact"] if communicator.transport.name == "p2p" else []
        kind, dtype = draw.choice(kinds), draw.choice(DTYPES)
        num_values = self._size(kind)
        reference = SimulatedGroup(self.world_size, config) if draw.random() < self.share_compared else None
        direction, is_in_place = draw.choice(list(Direction)), draw.random() < 0.3
        results = []
        for number in range(draw.randint(1, 4)):
            site = Site(number, direction, bits=draw.choice((4, 8)))
            xs = self._inputs(num_values, dtype)
            expected = None if reference is None else self._expected(reference, kind, xs, site)
            late = draw.random() < 0.1 and draw.randrange(self.world_size) == self.rank
            output = self._call(communicator, kind, xs[self.rank], site, is_in_place, late)
            results.append((output, expected, xs))  # consensus reads x after the call
            self.counts.calls[kind] += 1
            self.counts.num_bytes[kind] += num_values * dtype.itemsize
        for output, expected, _ in results:
            self._look(kind, output, expected, f"{kind} of {num_values} values of {dtype}, {direction.name}, {config}")
        self._churn()

    def _size(self, kind: str) -> int:
        """Small ones mostly; of a reduce-scatter's shares a multiple."""
        most = MOST_VALUES[self.device.type] // (16 if kind == "exact" else 1)
        num_values = int(2 ** self.draw.uniform(0, most.bit_length() - 1))
        if kind != "reduce_scatter":
            return num_values
        return max(num_values // self.world_size, 1) * self.world_size

    def _inputs(self, num_values: int, dtype: torch.dtype) -> list[Tensor]:
        """Every rank's: a window of what all hold, at an amplitude of its own and sometimes off alignment."""
        begin, factor = self.draw.randrange(4096), 2.0 ** self.draw.randint(-8, 6)
        room = self.draw.choice((0, 0, 1))
        xs = []
        for values in self.values:
            x = torch.empty(num_values + room, dtype=dtype, device=self.device)[room:]
            xs.append(x.copy_(values[begin : begin + num_values] * factor))
        return xs

    def _expected(self, reference: SimulatedGroup, kind: str, xs: list[Tensor], site: Site) -> Tensor:
        if kind == "reduce_scatter":
            return reference.reduce_scatter(xs, site)[self.rank]
        if kind == "all_gather":
            return reference.all_gather(xs, site.bits)
        return exact_sum(torch.stack(xs)) if kind == "exact" else reference.all_reduce(xs, site)

    def _call(
        self, communicator: Communicator, kind: str, x: Tensor, site: Site, is_in_place: bool, is_late: bool
    ) -> Tensor:
        stream = self.own_draw.choice([None, *self.streams])
        current = torch.cuda.current_stream(self.device) if self.streams else None
        if stream is not None and current is not None:
            stream.wait_stream(current)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            if is_late:
                self._sleep()
            if kind in ("all_reduce", "exact"):
                call = communicator.exact_all_reduce if kind == "exact" else communicator.all_reduce
                output = call(x, site, out=x if is_in_place else None)
            else:
                output = getattr(communicator, kind)(x, site)
        if stream is not None and current is not None:
            current.wait_stream(stream)
            x.record_stream(stream)
            output.record_stream(current)
        return output

    def _sleep(self) -> None:
        if self.streams:
            torch.cuda._sleep(self.own_draw.randrange(LONGEST_DELAY))
        else:
            time.sleep(0.002)

    def _look(self, kind: str, output: Tensor, expected: Tensor | None, what: str) -> None:
        if kind != "reduce_scatter":  # of that, every rank has a share of its own
            bits = output.contiguous().view(torch.int16 if output.element_size() == 2 else torch.int32)
            self.digest = self.digest * 31 + bits.sum(dtype=torch.int64)
        if expected is None:
            return
        self.counts.compared[kind] += 1
        if not torch.equal(output.nan_to_num(12345.0), expected.nan_to_num(12345.0)):
            self.note(kind, f"rank {self.rank}: {what}: differs from the reference")

    def note(self, kind: str, message: str) -> None:
        """A mismatch."""
        self.counts.mismatches[kind] += 1
        if len(self.counts.messages) < MOST_MESSAGES:
            self.counts.messages.append(message)

    def _churn(self) -> None:
        """Blocks of random size come and go, so that calls get memory that others have just used."""
        size = self.own_draw.randrange(1, MOST_VALUES[self.device.type])
        try:
            self.churned.append(torch.full((size,), float("nan"), device=self.device))
        except torch.cuda.OutOfMemoryError:
            self.churned.clear()
        if len(self.churned) > MOST_CHURNED:
            self.churned.pop(self.own_draw.randrange(len(self.churned)))

    def agree(self) -> None:
        """All calls so far have run without a failure, and the ranks hold the same bits."""
        if self.streams:
            torch.cuda.synchronize(self.device)
        for communicator in self.communicators:
            communicator.check()
        digests = [torch.empty_like(self.digest) for _ in range(self.world_size)]
        dist.all_gather(digests, self.digest)
        if len({int(digest) for digest in digests}) != 1:
            self.note("all_reduce", f"rank {self.rank}: the ranks hold different bits")
            self.digest.zero_()

    def destroy(self) -> None:
        for communicator in self.communicators:
            communicator.destroy()


def limit_memory(device: torch.device, memory_gib: float) -> None:
    """What PyTorch's allocator may hold in this process; the workspaces, which are not of it, come on top."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * 2**30 / total), device)


def peak_memory(device: torch.device) -> dict[str, float | int]:
    """GiB, and how often the allocator had to give blocks back before it could serve."""
    if device.type != "cuda":
        return {"process_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        "num_alloc_retries": int(torch.cuda.memory_stats(device)["num_alloc_retries"]),
    }


def soak(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Runs until the minutes are over; this rank's results.

    Raises:
        CommunicationError: a call failed.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    load = None
    if options.load:
        target = torch.device("cuda", (rank + 1) % world_size) if device.type == "cuda" else device
        load = Load(device, target)
        load.wait_until_ready()
        load.set_duty(options.load / 100)
    limit_memory(device, options.memory_gib)
    run = Soak(device, options.seed, options.compared)
    start, passes = time.monotonic(), 0
    before = load.look() if load else None
    try:
        with Bar(options.minutes, rank == 0) as bar:
            is_over = False
            while not is_over:
                for _ in range(PASSES_BETWEEN_AGREEMENTS):
                    run.run_pass()
                    passes += 1
                run.agree()
                bar.update(run.counts.calls.total(), run.counts.mismatches.total())
                over = torch.tensor(int(time.monotonic() - start > 60 * options.minutes), device=device)
                dist.all_reduce(over, op=dist.ReduceOp.MAX)
                is_over = bool(over.item())
        copied = load.since(before) if load and before else None
    finally:
        if load:
            load.close()
    counts = run.counts
    rows = [
        {"kind": kind, "calls": counts.calls[kind], "compared": counts.compared[kind],
         "mismatches": counts.mismatches[kind], "gib": counts.num_bytes[kind] / 2**30}
        for kind in sorted(counts.calls)
    ]  # fmt: skip
    result = {
        "transport": run.communicators[0].transport.name, "seconds": time.monotonic() - start, "passes": passes,
        "rows": rows, "messages": counts.messages, "peak": peak_memory(device),
        "copied_gb_per_s": copied.gb_per_s if copied else 0.0,
    }  # fmt: skip
    run.destroy()
    return result


def combine(results: list[dict[str, Any]], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Of all ranks: calls are the same on each, mismatches add up, of peaks the largest."""
    rows = [dict(row) for row in results[0]["rows"]]
    for row, *others in zip(rows, *(result["rows"] for result in results), strict=True):
        row["mismatches"] = sum(other["mismatches"] for other in others)
    peaks = results[0]["peak"]
    return {
        **made_by("scripts/soak.py", vars(options), device, "torch"),
        "world_size": len(results),
        "transport": results[0]["transport"],
        "seconds": results[0]["seconds"],
        "passes": results[0]["passes"],
        "calls": sum(row["calls"] for row in rows),
        "compared": sum(row["compared"] for row in rows),
        "mismatches": sum(row["mismatches"] for row in rows),
        "messages": [message for result in results for message in result["messages"]],
        "peak": {name: max(result["peak"][name] for result in results) for name in peaks},
        "copied_gb_per_s": results[0]["copied_gb_per_s"],
        "rows": rows,
    }


def to_markdown(results: dict[str, Any]) -> str:
    """The table of a result."""
    rows = [
        [row["kind"], f"{row['calls']:,}", f"{row['compared']:,}", str(row["mismatches"]), f"{row['gib']:.1f}"]
        for row in results["rows"]
    ]
    peak = ", ".join(f"{name} {value:.2f}" for name, value in results["peak"].items())
    copies = f"background copies {results['copied_gb_per_s']:.0f} GB/s a GPU"
    lines = [
        f"# {results['seconds'] / 60:.1f} minutes of random calls on {results['world_size']} ranks", "",
        *markdown_table(["kind", "calls", "compared with the reference", "mismatches", "GiB"], rows), "",
        f"Transport {results['transport']}; {copies}; peak of a rank: {peak}.", "",
        *provenance_lines(results), "",
    ]  # fmt: skip
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak.py", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compared", type=float, default=0.3, help="share of the passes compared with the reference")
    parser.add_argument("--load", type=float, default=100.0, help="per cent of the time in which copies are under way")
    parser.add_argument("--memory-gib", type=float, default=12.0, help="of a GPU, what PyTorch's allocator may hold")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--name", default="soak_h200x2")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Soaks on torchrun's processes.

    Returns:
        The exit status: 1 where a result differed or a call failed, 2 where the processes are not torchrun's.
    """
    options = parse(arguments)
    if "LOCAL_RANK" not in os.environ:
        command = "torchrun --nproc-per-node 2 scripts/soak.py"
        print(f"error: expected to be started by torchrun, one process a rank: {command}", file=sys.stderr)
        return 2
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    try:
        return report(soak(device, options), device, options)
    except CommunicationError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # the other ranks' memory may be gone: no collective clean-up
    finally:
        dist.destroy_process_group()


def report(own: dict[str, Any], device: torch.device, options: argparse.Namespace) -> int:
    """Prints and writes what all ranks found; the exit status. Collective."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, own)
    combined = combine(results, options, device)
    if dist.get_rank() == 0:
        print(to_markdown(combined), *combined["messages"], sep="\n", flush=True)
        if options.out:
            write_results(options.out, options.name, combined, to_markdown(combined))
    return 1 if combined["mismatches"] else 0
