"""Results of `bench_step` as tables: step and prefill, the bound, the paper's Table 3 beside them, profile, memory."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.bench.rows import MIB
from echo_megatron.bench.step_timing import gained_share, spread
from echo_megatron.result_files import markdown_table, provenance_lines

Row = Mapping[str, Any]
NATIVE, ECHO, BOUND = "nccl16", "echo4", "skipped"
ARMS = {NATIVE: "16bit", BOUND: "bound"}  # as results of training call them
QUANTITIES = {"step": "training step", "forward": "time to first token"}
GIB = 1 << 30

# Paper Table 3: A100 server, P = 8, speed-up of 4-bit Echo over 16 bits at loads of 0, 50, 75 and 100 %.
PAPER_LOADS = (0, 50, 75, 100)
PAPER_SPEEDUP = {
    ("llama3_8b", "forward"): (1.16, 1.33, 1.38, 1.44),
    ("qwen3_8b", "forward"): (1.09, 1.21, 1.24, 1.31),
    ("llama3_8b", "step"): (1.09, 1.22, 1.27, 1.38),
    ("qwen3_8b", "step"): (1.08, 1.20, 1.25, 1.34),
}


def row_of(model: str, setting: str, load: int, visits: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of the results from one or more visits."""
    row: dict[str, Any] = {"model": model, "setting": setting, "load": load, "rounds": len(visits)}
    for what in ("step", "forward"):
        found = spread([visit[what].ms for visit in visits])
        row |= {f"{what}_ms": found.median, f"{what}_q1_ms": found.q1, f"{what}_q3_ms": found.q3}
        row[f"{what}_wall_ms"] = statistics.median(visit[what].wall_ms for visit in visits)
        if clocks := [clock for visit in visits if (clock := visit["clock"][what]) is not None]:
            row[f"{what}_mhz"] = statistics.median(clock.mhz for clock in clocks)
            row[f"{what}_watts"] = statistics.median(clock.watts for clock in clocks)
    row["copy_gb_per_s"] = statistics.median(visit["copied"].gb_per_s for visit in visits)
    row["copy_busy"] = statistics.median(visit["copied"].busy for visit in visits)
    row["loss"] = visits[-1]["loss"]
    return {**row, **visits[0]["memory"]}


def with_ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with `step_speedup`, `step_share` and the same of `forward`; None where what they are of is missing.

    And with `arm`, and where memory was measured `peak_gib`, what PyTorch's allocator held at most.

    The speed-up is the 16-bit time divided by the row's; the share is of what skipping the all-reduces saves.
    """
    times = {(row["model"], row["load"], row["setting"]): row for row in rows}
    found = []
    for row in rows:
        native, bound = (times.get((row["model"], row["load"], name)) for name in (NATIVE, BOUND))
        ratios: dict[str, Any] = {"arm": ARMS.get(row["setting"], row["setting"])}
        if "peak_allocated_bytes" in row:
            ratios["peak_gib"] = row["peak_allocated_bytes"] / GIB
        for what in QUANTITIES:
            key = f"{what}_ms"
            base, least = (None if other is None else other[key] for other in (native, bound))
            ratios[f"{what}_speedup"] = None if base is None else base / row[key]
            ratios[f"{what}_share"] = gained_share(base, row[key], least)
        found.append({**row, **ratios})
    return found


def setting_table(rows: Sequence[Row], load: int) -> list[str]:
    """Every setting at one load: ms with quartiles, speed-up, share of the bound's gain."""
    columns = ["model", "setting", "rounds"]
    for words in QUANTITIES.values():
        columns += [f"{words}, ms (quartiles)", "speed-up", "share of the bound's gain"]
    lines = []
    for row in (row for row in rows if row["load"] == load):
        cells = [row["model"], row["setting"], str(row["rounds"])]
        for what in QUANTITIES:
            low, high = row[f"{what}_q1_ms"], row[f"{what}_q3_ms"]
            cells += [
                f"{row[f'{what}_ms']:.1f} ({low:.1f} to {high:.1f})",
                speedup_cell(row[f"{what}_speedup"]),
                share_cell(row[f"{what}_share"]) if row["setting"] not in (NATIVE, BOUND) else "",
            ]
        lines.append(cells)
    return markdown_table(columns, lines)


def clock_table(rows: Sequence[Row]) -> list[str]:
    """Clock and power of rank 0's GPU in the timed steps and prefills."""
    names = [f"{what}_{unit}" for what in QUANTITIES for unit in ("mhz", "watts")]
    columns = [f"{words}, {unit}" for words in QUANTITIES.values() for unit in ("MHz", "W")]
    lines = [
        [
            row["model"],
            f"{row['load']} %",
            row["setting"],
            *("" if name not in row else f"{row[name]:.0f}" for name in names),
        ]
        for row in rows
    ]
    return markdown_table(["model", "load", "setting", *columns], lines)


def load_table(rows: Sequence[Row], what: str) -> list[str]:
    """One of `QUANTITIES` by model and load: 16 bits in ms, speed-up of echo4, of the bound, and the paper's."""
    loads = sorted({row["load"] for row in rows})
    by_place = {(row["model"], row["setting"], row["load"]): row for row in rows}
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):

        def cells(setting: str, key: str, words: Any, model: str = model) -> list[str]:
            found = (by_place.get((model, setting, load)) for load in loads)
            return ["" if row is None else words(row[f"{what}_{key}"]) for row in found]

        lines += [
            [model, "16 bits, ms", *cells(NATIVE, "ms", lambda ms: f"{ms:.1f}")],
            [model, "echo4, speed-up", *cells(ECHO, "speedup", speedup_cell)],
            [model, "bound", *cells(BOUND, "speedup", speedup_cell)],
            [model, "echo4's share of the bound's gain", *cells(ECHO, "share", share_cell)],
        ]
        if (model, what) in PAPER_SPEEDUP:
            paper = dict(zip(PAPER_LOADS, PAPER_SPEEDUP[model, what], strict=True))
            lines.append([model, "paper, speed-up", *(speedup_cell(paper.get(load)) for load in loads)])
    return markdown_table([QUANTITIES[what], "", *(f"load {load} %" for load in loads)], lines)


def link_table(links: Sequence[Row], num_bytes: int) -> list[str]:
    """The all-reduce of the group itself, and what the copies carry, at every load."""
    columns = ["load", "copies alone, GB/s a GPU", f"16-bit all-reduce of {_size(num_bytes)}, ms", "slowdown"]
    lines = [
        [
            f"{link['load']} % (copying {link['busy']:.0%} of the time)",
            f"{link['copy_alone_gb_per_s']:.0f}",
            f"{link['all_reduce_ms']:.2f}",
            speedup_cell(link["slowdown"]),
            f"{link['copy_gb_per_s']:.0f}",
        ]
        for link in links
    ]
    return markdown_table([*columns, "copies beside it, GB/s a GPU"], lines)


def profile_table(profiles: Sequence[Row]) -> list[str]:
    """The sites' calls by direction: one call, all of them, how much is exposed, and the share of the step."""
    spans: dict[tuple[str, str], float] = {}
    for row in profiles:
        key = row["model"], row["setting"]
        spans[key] = spans.get(key, 0.0) + row["span_ms"]
    lines = [
        [
            row["model"],
            row["setting"],
            row["direction"],
            f"{row['calls']} of {row['sites']}",
            f"{row['call_ms']:.3f} ({row['call_q1_ms']:.3f} to {row['call_q3_ms']:.3f})",
            f"{row['sum_ms']:.1f} ({row['sum_ms'] / spans[row['model'], row['setting']]:.1%})",
            f"{row['exposed_ms']:.1f} ({row['exposed_ms'] / spans[row['model'], row['setting']]:.1%})",
            f"{row['span_ms']:.1f}",
            f"{row['idle_ms']:.1f}",
            f"{row['others_ms']:.1f}" if "others_ms" in row else "",  # older results have none
        ]
        for row in profiles
    ]
    columns = ["model", "setting", "direction", "calls", "a call, ms (quartiles)", "all calls, ms (of the step)"]
    columns += ["exposed, ms (of the step)", "the pass, ms", "nothing runs, ms", "other kernels, ms"]
    return markdown_table(columns, lines)


def memory_table(rows: Sequence[Row]) -> list[str]:
    """Peaks with and without Echo, and what its state and workspace take."""
    native = {row["model"]: row for row in rows if row["setting"] == NATIVE and "peak_allocated_bytes" in row}
    lines = []
    for row in (row for row in rows if "peak_allocated_bytes" in row and row["model"] in native):
        base = native[row["model"]]
        lines.append(
            [
                row["model"],
                row["setting"],
                *(
                    f"{row[name] / GIB:.2f} ({(row[name] - base[name]) / MIB:+.0f} MiB)"
                    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")
                ),
                f"{row['state_bytes'] / MIB:.1f}",
                f"{row['workspace_bytes'] / MIB:.1f}",
            ]
        )
    columns = ["model", "setting", "peak allocated, GiB", "peak reserved, GiB", "used on the GPU, GiB"]
    return markdown_table([*columns, "state, MiB", "workspace, MiB"], lines)


def summary(results: Row) -> list[str]:
    """What is printed at the end."""
    lines = [line for load in _loads(results) for line in (f"load {load} %", *setting_table(results["rows"], load))]
    return [*lines, *left_out(results)]


def markdown(results: Row) -> str:
    """The page beside the JSON."""
    rows = results["rows"]
    world_size = results["world_size"]
    lines = [f"# Training step and time to first token at P = {world_size}", "", results["method"], ""]
    lines += [f"- {name}: {_model(model)}" for name, model in results["models"].items()]
    lines += [f"- {name}: {words}" for name, words in results["echo"].items()]
    for load in _loads(results):
        lines += ["", f"## Every setting, load {load} %", "", *setting_table(rows, load)]
    if rows:
        lines += [
            "",
            "## By load",
            "",
            f"The paper's Table 3 is of A100 servers at P = 8; these are at P = {world_size} on "
            f"{results['machine']['gpu'] or 'CPU processes'}, with another link and another share of communication: "
            "what can be reached here is the bound.",
        ]
        for what in QUANTITIES:
            lines += ["", *load_table(rows, what)]
    if results["links"]:
        lines += ["", "## The link", "", *link_table(results["links"], results["link_bytes"])]
    if results["profiles"]:
        lines += [
            "",
            "## The sites' calls in place",
            "",
            "Kernels of one profiled step on rank 0. A call's time is in place: waiting for the other ranks is in it. "
            "Exposed is when no other kernel ran.",
            "",
            *profile_table(results["profiles"]),
        ]
    if any("step_mhz" in row for row in rows):
        lines += ["", "## Clock and power", "", *clock_table(rows)]
    if any("peak_allocated_bytes" in row for row in rows):
        lines += ["", "## Memory of a rank", "", "In brackets: more than 16 bits.", "", *memory_table(rows)]
    lines += ["", *left_out(results), "", "## Made by", ""]
    return "\n".join([*lines, *(f"- {line}" for line in [f"{results['date']}.", *provenance_lines(results)])]) + "\n"


def _loads(results: Row) -> list[int]:
    return sorted({row["load"] for row in results["rows"]})


def left_out(results: Row) -> list[str]:
    """A line for each part that was not measured, with the reason."""
    return [f"- left out: {name}: {why}" for name, why in results["left_out"].items()]


def _model(model: Row) -> str:
    sites = ", ".join(f"{count} {direction}" for direction, count in model["sites"].items())
    return (
        f"{model['layers']} of {model['layers_of_model']} layers ({model['layers_kind']}), batch {model['batch']} x "
        f"{model['sequence']}, {model['parameters_a_rank'] / 1e6:,.0f} M parameters a rank, sites: {sites}, each "
        f"{_size(model['message_bytes'])}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:g} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:g} KiB"


def speedup_cell(ratio: float | None) -> str:
    """A ratio of times; empty where it is not known."""
    return "" if ratio is None else f"{ratio:.3f}"


def share_cell(share: float | None) -> str:
    """A share of the bound's gain; empty where it is not known."""
    return "" if share is None else f"{share:.0%}"
