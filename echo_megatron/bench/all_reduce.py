"""Times every row at every size in one run and writes JSON, Markdown and a figure.

`echo-megatron bench` starts one process a GPU; under torchrun it runs as one of them. A row is checked before it is
timed: Echo's against the reference bit for bit, the others' sums loosely. Results are written after every row; the
figure is drawn from them by `--render`, where Matplotlib is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron import provenance
from echo_megatron.arguments import message_size
from echo_megatron.bench import echo_calls, runs, tables
from echo_megatron.bench.baselines import Unavailable, make_baseline
from echo_megatron.bench.critical_path import MODELS, Matmuls
from echo_megatron.bench.memory import Memory
from echo_megatron.bench.rows import (
    ITEMSIZE,
    LARGE_SIZES,
    MIB,
    QUICK_SIZES,
    SMALL_SIZES,
    SMOOTH_SIZES,
    Row,
    all_rows,
    select,
    smooth_sizes,
)
from echo_megatron.bench.timing import Inputs, Timer, Timing, agree_max
from echo_megatron.bench.traffic import Traffic, as_json, bound_ms, measure_ceilings, traffic
from echo_megatron.config import TransportName
from echo_megatron.result_files import made_by, write_results

CALL_MS_UP_TO = 32 * MIB  # launching shows in small messages only
NCCL = "nccl16"  # the row that all are compared with
UNRECORDED = ("num_ranks", "render", "sequence_parallel")  # say nothing about the results, or the script does
METHOD = (
    "Medians of {iterations} calls after {warmup} (fewer where one measurement would take over {max_s:g} s), by CUDA "
    "events, of the slowest rank. ms: the host is ahead of the GPU and the ranks have just passed a barrier, so "
    "launching is not in it; call_ms: idle GPU, launching included. A call takes the next of several buffers of "
    "together 256 MiB, so inputs are not in L2; nothing else is flushed. Sums are {place}. Echo walks through the 56 "
    "sites of a pass, the first of which reads no state. consensus: a period of back-to-back calls, each of which "
    "waits for the update of the last. critical: matmul, call, matmul minus the matmuls alone, alternating, nothing of "
    "an earlier call running meanwhile, except that consensus follows an untimed matmul, call, matmul whose update it "
    "waits for. NCCL is measured at the beginning and at the end, the faster counts. bytes are of BF16, a rank."
)


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    names = ", ".join(dict.fromkeys(row.name for row in all_rows()))
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="reduce-scatter and all-gather in place of the all-reduce"
    )
    parser.add_argument("--rows", nargs="+", help=f"names, of {names}, or docs/bench.md's; default all")
    parser.add_argument("--policies", nargs="+", choices=["rotated", "zero_aware"], help="of Echo's rows; default both")
    parser.add_argument("--sizes", nargs="+", type=message_size, help="such as 64K 16M 1G; default 4K to 1G")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), help="matmuls of the critical rows; default all")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and calls: a look")
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--max-s", type=float, default=3.0, help="seconds of one measurement at most")
    parser.add_argument("--budget-s", type=float, default=200.0, help="seconds after which the rest is left out")
    parser.add_argument("--transport", choices=list(TransportName.__members__), default="auto", help="of Echo's rows")
    parser.add_argument("--out-of-place", action="store_true", help="Echo's sums into a new tensor")
    parser.add_argument("--no-check", action="store_true", help="do not compare with the reference before timing")
    parser.add_argument("--tune", action="store_true", help="measure the p2p transport's choices and write its table")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md; with --tune the table's file")
    parser.add_argument("--name", help="default all_reduce, or sequence_parallel")
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing: Markdown and figure of a result")
    parser.add_argument(
        "--onto", type=Path, metavar="JSON", help="results whose other rows stay: put this run's into them"
    )
    parser.add_argument("--num-ranks", type=int, help="processes to start where torchrun did not; default all GPUs")
    options = parser.parse_args(arguments)
    options.name = options.name or ("sequence_parallel" if options.sequence_parallel else "all_reduce")
    if options.sequence_parallel and (options.tune or options.onto or options.out_of_place or options.models):
        parser.error("--sequence-parallel: expected none of --tune, --onto, --out-of-place and --models beside it")
    if options.quick:
        options.warmup, options.iterations, options.max_s = 10, 30, 1.0
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "echo-megatron bench") -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments, prog)
    if options.render:
        render(options.render)
        return 0
    if "LOCAL_RANK" not in os.environ:
        return _start_ranks(options.num_ranks, sys.argv[1:] if arguments is None else arguments)
    use_cuda = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None)
    world = dist.group.WORLD
    assert world is not None
    try:
        if options.tune:
            from echo_megatron.bench.tune import tune

            return tune(world, device, options.out)
        if options.sequence_parallel:
            from echo_megatron.bench.shares import SharesBench

            return SharesBench(options, world, device).run()
        return Bench(options, world, device).run()
    finally:
        dist.destroy_process_group()


class Bench:
    """One rank of a run.

    Another collective's bench is a subclass: its rows, sizes, calls, and what of them stands in the results.

    Args:
        options: see `parse_arguments`.
        group: the ranks.
        device: this rank's.

    Raises:
        ValueError: a row's name is unknown, or `--onto` names other results.
    """

    script = "scripts/bench_all_reduce.py"
    method = METHOD

    def __init__(self, options: argparse.Namespace, group: dist.ProcessGroup, device: torch.device) -> None:
        self.options, self.device, self.group = options, device, group
        self.rank, self.world_size = group.rank(), group.size()
        self.base = (
            runs.load(options.onto, provenance.machine(device)["gpu"], self.world_size) if options.onto else None
        )
        self.start = time.monotonic()
        self.sizes = sorted(options.sizes or self._default_sizes())
        self.rows = [row for row in select(self._all_rows(), options.rows) if self._wanted(row)]
        self.memory = Memory(max(self.sizes), group, device)
        self.timer = Timer(device, options.warmup, options.iterations, options.max_s, self.memory.barrier)
        self.ceilings = measure_ceilings(self.memory, self.timer)
        self.entries: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}

    def run(self) -> int:
        """All rows, NCCL's again at the end; returns the exit status."""
        for row in [*self.rows, *(row for row in self.rows if row.is_baseline)]:
            start = time.monotonic()
            self._run_row(row)
            if self.rank == 0:
                now = time.monotonic()
                print(f"{now - self.start:6.1f} s  {row.key}  ({now - start:.1f} s)", flush=True)
                if self.options.out:
                    results = self.results()
                    write_results(self.options.out, self.options.name, results, self._markdown(results))
        if self.rank == 0:
            entries = self._with_ratios()
            print("\n".join([*tables.time_table(entries), "", *tables.time_table(entries, "nccl_ratio")]))
            print("\n".join(f"left out: {name}: {why}" for name, why in self.left_out.items()))
        return int(any(why.startswith("AssertionError") for why in self.left_out.values()))

    def results(self) -> dict[str, Any]:
        """The content of the JSON: this run's, within those that it goes onto."""
        entries = self._with_ratios()
        options = {name: value for name, value in vars(self.options).items() if name not in UNRECORDED}
        options["sizes"] = options["sizes"] and [str(size) for size in options["sizes"]]
        made = made_by(self.script, options, self.device, "torch", "triton", "flashinfer-python")
        made["command"] = made["command"].replace("python", f"torchrun --nproc-per-node {self.world_size}", 1)
        place = "into a new tensor" if self.options.out_of_place else "in place"
        results = runs.of_one_run(
            {
                **made,
                "date": datetime.now(UTC).date().isoformat(),
                "world_size": self.world_size,
                "method": self.method.format(**vars(self.options), place=place),
                "ceilings": as_json(self.ceilings),
                "matmuls": {name: {"hidden": hidden, "ffn": ffn} for name, (hidden, ffn) in MODELS.items()},
                "left_out": self.left_out,
                "rough_places": tables.rough_places(entries),
                "rows": entries,
            }
        )
        return results if self.base is None else runs.merged(self.base, results, [row.key for row in self.rows])

    def _all_rows(self) -> list[Row]:
        return all_rows()

    def _default_sizes(self) -> Sequence[int]:
        return QUICK_SIZES if self.options.quick else (*SMALL_SIZES, *LARGE_SIZES)

    def _with_ratios(self) -> list[dict[str, Any]]:
        return with_ratios(self.entries)

    def _markdown(self, results: dict[str, Any]) -> str:
        return tables.markdown(results)

    def _inputs(self, row: Row, size: int) -> Inputs:
        return Inputs(self.memory.values, size // ITEMSIZE, self.timer.calls, self.world_size)

    def _traffic(self, row: Row, size: int, call: Any) -> Traffic | None:
        return traffic(row, size // ITEMSIZE, self.world_size, call.algorithm)

    def _wanted(self, row: Row) -> bool:
        return row.policy is None or self.options.policies is None or row.policy in self.options.policies

    def _run_row(self, row: Row) -> None:
        try:
            call = self._make(row)
            if not self.options.no_check:
                self._check(row, call)
            for size, beside in self._sizes(row):
                if agree_max(time.monotonic() - self.start, self.device) > self.options.budget_s:
                    self.left_out[row.key] = f"--budget-s {self.options.budget_s:g}: from {size} bytes on"
                    break
                self._time(row, call, size, beside)
                call.check()
            call.close()
        except (Unavailable, AssertionError, ValueError, RuntimeError) as error:
            # The ranks fail alike, or the next collective fails: what was measured is written already.
            self.left_out[row.key] = f"{type(error).__name__}: {error}"

    def _make(self, row: Row) -> Any:
        if row.config is None:
            return make_baseline(row, self.group, self.device, self.memory.is_symmetric)
        config = row.config.replace(transport=TransportName[self.options.transport])
        return echo_calls.make_echo_call(row, config, self.group, not self.options.out_of_place)

    def _check(self, row: Row, call: Any) -> None:
        if row.config is not None:
            echo_calls.check(call, self.device)
            if self.device.type == "cuda" and self.sizes[-1] >= LARGE_SIZES[0]:
                echo_calls.check(call, self.device, echo_calls.CHECKED_VALUES_LARGE)
            return
        x = self.memory.values[: min(1 << 20, self.memory.values.numel())]
        echo_calls.check_sum(call, x.normal_(), row.bits)

    def _sizes(self, row: Row) -> list[tuple[int, bool]]:
        """Sizes of a row, and whether they lie beside another one."""
        sizes = [(size, False) for size in self.sizes if self.options.sizes or row.times(size)]
        if row.smooth:
            bases = [base for base in SMOOTH_SIZES if (base, False) in sizes]
            sizes += [(size, True) for base in bases for size in smooth_sizes(base)]
        return sorted(sizes)

    def _time(self, row: Row, call: Any, size: int, beside: bool) -> None:
        if row.critical:
            for model in self.options.models if self.options.models is not None else MODELS:
                if Matmuls.fits(model, size, self.world_size):
                    matmuls = Matmuls(model, size, self.world_size, self.device)
                    timing = self.timer.added(matmuls.around(call), matmuls.alone, call.leads_in)
                    self._note(row, call, size, timing, matmuls=model)
            return
        inputs = self._inputs(row, size)
        inputs.fill()

        def lead_in() -> None:  # the timed call then waits for an update, as each does in a pass
            inputs.before()
            call(inputs.next())

        before = lead_in if call.leads_in else inputs.before
        timing = self.timer.measure(lambda: call(inputs.next()), before, with_call=size <= CALL_MS_UP_TO)
        self._note(row, call, size, timing, beside=beside)

    def _note(
        self, row: Row, call: Any, size: int, timing: Timing, beside: bool = False, matmuls: str | None = None
    ) -> None:
        moved = self._traffic(row, size, call)
        bounds = bound_ms(moved, self.ceilings) if moved and self.ceilings else (None, None)
        fractions = [None if bound is None or timing.ms <= 0 else bound / timing.ms for bound in bounds]
        self.entries.append(
            {
                "row": row.name,
                "policy": row.policy,
                "state_dtype": row.state_dtype,
                "transport": call.transport,
                "algorithm": call.algorithm,
                "bytes": size,
                "ms": timing.ms,
                "call_ms": timing.call_ms,
                "wire_fraction": fractions[0],
                "hbm_fraction": fractions[1],
                "iterations": timing.iterations,
                **({"matmuls": matmuls} if matmuls else {}),
                **({"beside": True} if beside else {}),
            }
        )


def with_ratios(
    entries: Sequence[dict[str, Any]], baseline_of: Callable[[str], str] = lambda row: NCCL
) -> list[dict[str, Any]]:
    """Entries with `nccl_ratio`, NCCL's time at that size divided by theirs; of NCCL's two measurements the faster.

    A size beside another is compared with NCCL at the nearest size.

    Args:
        entries: as they were measured.
        baseline_of: the row of NCCL's that a row is compared with, from the rows' names.
    """
    baselines: dict[str, dict[int, dict[str, Any]]] = {}
    kept = []
    for entry in entries:
        name, size = entry["row"], entry["bytes"]
        if baseline_of(name) != name:
            kept.append(entry)
            continue
        baseline = baselines.setdefault(name, {})
        if size not in baseline or entry["ms"] < baseline[size]["ms"]:
            spread = {"drift": entry["ms"] / baseline[size]["ms"] - 1} if size in baseline else {}
            baseline[size] = {**entry, **spread}
        else:
            baseline[size] = {**baseline[size], "drift": entry["ms"] / baseline[size]["ms"] - 1}

    def ratio(entry: dict[str, Any]) -> float | None:
        baseline = baselines.get(baseline_of(entry["row"]))
        if not baseline or entry["ms"] <= 0:
            return None
        nearest = min(baseline, key=lambda size: abs(size - entry["bytes"]))
        return baseline[nearest]["ms"] / entry["ms"]

    measured = [entry for baseline in baselines.values() for entry in baseline.values()]
    return [{**entry, "nccl_ratio": ratio(entry)} for entry in (*measured, *kept)]


def render(path: Path) -> None:
    """Markdown and figure beside a JSON of results."""
    from echo_megatron.bench import figures

    results = json.loads(path.read_text(encoding="utf-8"))
    if "collectives" in results:  # sequence parallelism's
        from echo_megatron.bench import shares

        write_results(path.parent, path.stem, results, shares.markdown(results))
        figures.draw_shares(path.with_suffix(".png"), results)
        return
    write_results(path.parent, path.stem, results, tables.markdown(results))
    figures.draw(path.with_suffix(".png"), results)


def _start_ranks(num_ranks: int | None, arguments: Sequence[str]) -> int:
    """Runs this command under torchrun on this machine; returns its exit status."""
    count = num_ranks or torch.cuda.device_count()
    if count < 2:
        print(
            f"error: --num-ranks: expected at least 2 ranks, got {count} (GPUs here); pass --num-ranks", file=sys.stderr
        )
        return 2
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.call([*launcher, "-m", "echo_megatron.cli", "bench", *arguments], env=environment)
