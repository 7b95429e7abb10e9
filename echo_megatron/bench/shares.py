"""Sequence parallelism's collectives against NCCL's: `echo-megatron bench --sequence-parallel`.

Rows, calls, checks and tables beside those of the all-reduce's bench, which does the timing. A row's bytes are those of
the larger tensor, a rank: what goes into a reduce-scatter, what comes out of an all-gather.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.bench import tables
from echo_megatron.bench.all_reduce import Bench
from echo_megatron.bench.baselines import NativeShares
from echo_megatron.bench.echo_calls import CHECKED_SITES, CHECKED_VALUES, CHECKED_VALUES_LARGE, NUM_SITES, EchoCall
from echo_megatron.bench.rows import ITEMSIZE, LARGE_SIZES, MIB, QUICK_SIZES, Kind, Row
from echo_megatron.bench.timing import Inputs, agree_max
from echo_megatron.bench.traffic import Traffic, share_traffic
from echo_megatron.config import Collective, Direction, EchoConfig, Policy, StateDtype, TransportName
from echo_megatron.reference import SimulatedGroup
from echo_megatron.result_files import markdown_table
from echo_megatron.sites import Site

SIZES = tuple(mib * MIB for mib in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024))
BASELINES = {Collective.reduce_scatter: "nccl_reduce_scatter", Collective.all_gather: "nccl_all_gather"}
GATHERS = (Kind.nccl_all_gather, Kind.all_gather)
# Ratios to NCCL of the same run, from 64 MiB on; for both quantizers.
TARGETS = {
    ("echo4_reduce_scatter", "bf16"): 2.8,
    ("echo4_reduce_scatter", "compact"): 2.8,
    ("echo8_all_gather", None): 1.7,
}
METHOD = (
    "Medians of {iterations} calls after {warmup} (fewer where one measurement would take over {max_s:g} s), by CUDA "
    "events, of the slowest rank. ms: the host is ahead of the GPU and the ranks have just passed a barrier, so "
    "launching is not in it; call_ms: idle GPU, launching included. A call takes the next of several buffers of "
    "together 256 MiB, so inputs are not in L2; nothing else is flushed. Outputs are tensors that exist. Echo walks "
    "through the 56 sites of a pass, the first of which reads no state. NCCL is measured at the beginning and at the "
    "end, the faster counts. bytes are of BF16, a rank, of the larger of the call's two tensors."
)


def all_rows() -> list[Row]:
    """Every row, what they are compared with first; a reduce-scatter without compensation has no `state_dtype`."""
    rows = [
        Row("nccl_reduce_scatter", Kind.nccl_reduce_scatter),
        Row("nccl_all_gather", Kind.nccl_all_gather),
    ]
    for policy in (Policy.rotated, Policy.zero_aware):
        config = EchoConfig(policy=policy, group_size=32 if policy is Policy.rotated else 128)
        stored = (config.replace(state_dtype=dtype) for dtype in (StateDtype.bf16, StateDtype.compact))
        scattered = [config.replace(eta=0.0), *stored]
        rows += [Row("echo4_reduce_scatter", Kind.reduce_scatter, 4, one) for one in scattered]
        rows += [Row(f"echo{bits}_all_gather", Kind.all_gather, bits, config.replace(gather_bits=bits, eta=0.0))
                 for bits in (8, 4)]  # fmt: skip
    return rows


def collective_of(name: str) -> Collective:
    """What the row of a name calls."""
    return Collective.all_gather if name.endswith("all_gather") else Collective.reduce_scatter


class ShareCall(EchoCall):
    """`Communicator.reduce_scatter` or `all_gather` on a pass of 56 sites, into a tensor that exists.

    Args:
        group: the process group.
        row: which call.
        config: the row's, with the transport to use.
        outputs: what the outputs are cut from.
    """

    algorithm = None

    def __init__(self, group: dist.ProcessGroup, row: Row, config: EchoConfig, outputs: Tensor) -> None:
        super().__init__(group, config)
        self.gathers, self.bits, self.outputs = row.kind is Kind.all_gather, row.bits, outputs
        self._sites = itertools.cycle([Site(idx, Direction.forward, bits=row.bits) for idx in range(NUM_SITES)])

    def __call__(self, x: Tensor) -> Tensor:
        world_size, site = self.communicator.group.size(), next(self._sites)
        if self.gathers:
            return self.communicator.all_gather(x, site, out=self.outputs[: x.numel() * world_size])
        return self.communicator.reduce_scatter(x, site, out=self.outputs[: x.numel() // world_size])


class SharesBench(Bench):
    """See `Bench`."""

    script = "scripts/bench_sequence_parallel.py"
    method = METHOD

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(options, group, device)
        checked = CHECKED_VALUES_LARGE if device.type == "cuda" else CHECKED_VALUES
        largest = max(*self.sizes, ITEMSIZE * checked)
        self.outputs = torch.empty(largest // ITEMSIZE + self.world_size, dtype=torch.bfloat16, device=device)

    def results(self) -> dict[str, Any]:
        """The content of the JSON."""
        results = super().results()
        del results["matmuls"]
        return {**results, "collectives": [collective.name for collective in BASELINES]}

    def _all_rows(self) -> list[Row]:
        return all_rows()

    def _default_sizes(self) -> Sequence[int]:
        return [size for size in QUICK_SIZES if size >= MIB] if self.options.quick else SIZES

    def _with_ratios(self) -> list[dict[str, Any]]:
        from echo_megatron.bench.all_reduce import with_ratios

        return with_ratios(self.entries, lambda name: BASELINES[collective_of(name)])

    def _markdown(self, results: dict[str, Any]) -> str:
        return markdown(results)

    def _inputs(self, row: Row, size: int) -> Inputs:
        share = size // ITEMSIZE // self.world_size
        num_values = share if row.kind in GATHERS else share * self.world_size
        return Inputs(self.memory.values, num_values, self.timer.calls, world_size=1)  # x stays as it is

    def _traffic(self, row: Row, size: int, call: Any) -> Traffic | None:
        return share_traffic(row, size // ITEMSIZE, self.world_size)

    def _make(self, row: Row) -> Any:
        if row.config is None:
            return NativeShares(self.group, row.kind in GATHERS, self.outputs)
        config = row.config.replace(transport=TransportName[self.options.transport])
        return ShareCall(self.group, row, config, self.outputs)

    def _check(self, row: Row, call: Any) -> None:
        sizes = [CHECKED_VALUES]
        if row.config is not None and self.device.type == "cuda" and self.sizes[-1] >= LARGE_SIZES[0]:
            sizes.append(CHECKED_VALUES_LARGE)
        for num_values in sizes:
            check(call, row, self.rank, self.world_size, self.device, num_values // self.world_size)


def check(call: Any, row: Row, rank: int, world_size: int, device: torch.device, num_share_values: int) -> None:
    """Compares the first sites of a pass with the reference, bit for bit; NCCL's with the exact result, loosely.

    Raises:
        AssertionError: a rank's result differs; on every rank.
    """
    gathers = row.kind in GATHERS
    simulated = None if row.config is None else SimulatedGroup(world_size, row.config)
    generator = torch.Generator(device).manual_seed(0)
    shape = (num_share_values if gathers else world_size * num_share_values,)
    different = 0.0
    for idx in range(CHECKED_SITES):
        xs = [torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for _ in range(world_size)]
        found = call(xs[rank])
        if simulated is None:
            exact = torch.cat(xs) if gathers else torch.stack(xs).float().sum(0).view(world_size, -1)[rank]
            different += ((found.float() - exact.float()).norm() / exact.float().norm() > 0.01).item()
            continue
        site = Site(idx, Direction.forward, bits=row.bits)
        expected = simulated.all_gather(xs, row.bits) if gathers else simulated.reduce_scatter(xs, site)[rank]
        different += int((found != expected).sum())
    call.check()
    if most := int(agree_max(different, device)):
        raise AssertionError(
            f"{row.key}: expected the reference's bits for {num_share_values} values a share at {CHECKED_SITES} sites, "
            f"got {most} other values on one rank"
        )


def target_table(entries: Sequence[tables.Entry]) -> list[str]:
    """Times faster than NCCL from 64 MiB on, beside what was aimed at; bold is reached."""
    sizes = sorted({entry["bytes"] for entry in entries if entry["bytes"] >= LARGE_SIZES[0]})
    rows = []
    for key, by_size in tables.series(entries).items():
        target = TARGETS.get((key[0], key[2]))
        if target is not None:
            cells = (by_size[size]["nccl_ratio"] if size in by_size else None for size in sizes)
            words = ["" if ratio is None else f"{ratio:.2f}" for ratio in cells]
            reached = [f"**{word}**" if word and float(word) >= target else word for word in words]
            rows.append([tables.label_of(key), f"{target:.1f}", *reached])
    return markdown_table(["NCCL / row", "target", *map(tables.size_label, sizes)], rows)


def bounds_table(entries: Sequence[tables.Entry], size: int = LARGE_SIZES[-1]) -> list[str]:
    """Measured milliseconds at one size, the least that wire and HBM allow, and the ratio to NCCL at that bound."""
    found = tables.series(entries)
    rows = []
    for key, by_size in found.items():
        entry = by_size.get(size)
        if entry is None or entry["wire_fraction"] is None or entry["hbm_fraction"] is None:
            continue
        least = [entry["ms"] * entry[name] for name in ("wire_fraction", "hbm_fraction")]
        baseline = found.get((BASELINES[collective_of(key[0])], None, None, None), {}).get(size)
        best = "" if baseline is None else f"{baseline['ms'] / max(least):.2f}"
        cells = [f"{ms:.3f} ({ms / entry['ms']:.0%})" for ms in least]
        rows.append([tables.label_of(key), f"{entry['ms']:.3f}", *cells, best])
    columns = ["measured", "least by the wire", "least by HBM", "NCCL / that bound"]
    return markdown_table([f"ms at {tables.size_label(size)}", *columns], rows)


def lines(results: Mapping[str, Any]) -> list[str]:
    """What was aimed at and what bounds it, as Markdown."""
    entries = results["rows"]
    return [
        f"Times faster than NCCL's own at P = {results['world_size']}; bold is reached.",
        "",
        *target_table(entries),
        "",
        "What wire and HBM allow, by the bytes that a call cannot avoid; in brackets the share that is reached:",
        "",
        *bounds_table(entries),
    ]


def markdown(results: Mapping[str, Any]) -> str:
    """The page beside the JSON."""
    entries = results["rows"]
    parts = [
        f"# Sequence parallelism's collectives at P = {results['world_size']}",
        "",
        results["method"],
        "",
        "## Times",
        "",
        *tables.time_table(entries),
        "",
        "## Ratios to NCCL",
        "",
        *tables.time_table(entries, "nccl_ratio"),
        "",
        "## Targets and bounds",
        "",
        *lines(results),
        "",
    ]
    if results["ceilings"]:
        carried = ", ".join(f"{name} {rate:.0f}" for name, rate in results["ceilings"].items())
        parts += [f"Measured in the same run: {carried}.", ""]
    parts += [*(f"- {name}: {why}" for name, why in results["left_out"].items()), "", "## Made by", ""]
    return "\n".join([*parts, *(f"- {line}" for line in tables.provenance(results))]) + "\n"
