"""Tables of `plan` and `doctor`: Rich on a terminal, Markdown lines elsewhere; and the plan's page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echo_megatron.bench.rows import MIB
from echo_megatron.result_files import markdown_table, provenance_lines

PREDICTIONS = [
    "model", "P", "setting", "step, ms", "speed-up", "first token, ms", "speed-up", "sent a step, GB",
    "state, MiB", "workspace, MiB", "kept with recompute, MiB",
]  # fmt: skip
CALLS = ["P", "collective", "message", "NCCL, ms", "echo4, ms", "NCCL / echo4", "echo8, ms", "NCCL / echo8"]
ERRORS = [
    "what", "measured, ms", "plan, ms", "error", "measured speed-up", "plan's speed-up", "error of the gain",
]  # fmt: skip
KINDS = {
    "left_out": "One all-reduce, its size left out of what the plan is made from",
    "transfer": "Two-shot rows from the one-shot curve, as the plan does above P = 2",
    "shares": "One reduce-scatter or all-gather of sequence parallelism, its size left out",
    "shares_transfer": "All-gathers at 8 bits from those at 4, as the plan does with reduce-scatters",
    "step": "Training steps without load, by a fit to the other models",
    "forward": "Prefills without load, by a fit to the other models",
}
NAMES = {  # in the summary, what is asked for first
    "step": "steps",
    "forward": "prefills",
    "left_out": "all-reduces",
    "transfer": "two-shot from one-shot",
    "shares": "sequence parallelism's calls",
    "shares_transfer": "all-gathers at 8 bits from 4",
}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: Rich's on a terminal, plain lines where the output is read by something else."""
    if not sys.stdout.isatty():
        print("\n".join([title, "", *markdown_table(columns, rows), ""]))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))  # a message may hold what Rich takes for markup
    Console().print(table)


def prediction_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells of `PREDICTIONS`."""
    return [
        [
            row["model"],
            str(row["world_size"]),
            row["setting"],
            _number(row["step_ms"], 1),
            _speedup(row, "step_speedup"),
            _number(row["forward_ms"], 1),
            _speedup(row, "forward_speedup"),
            f"{row['sent_bytes'] / 1e9:.2f}",
            *(f"{row[name] / MIB:.1f}" for name in ("state_bytes", "workspace_bytes", "kept_bytes")),
        ]
        for row in rows
    ]


def call_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Cells of `CALLS`."""
    return [
        [
            str(row["world_size"]),
            row["collective"],
            f"{row['bytes'] / MIB:g} MiB",
            f"{row['nccl_ms']:.3f}",
            *(cell for name in ("echo4", "echo8") for cell in _with_ratio(row["nccl_ms"], row[f"{name}_ms"])),
        ]
        for row in rows
    ]


def error_rows(rows: Sequence[Mapping[str, Any]], kind: str) -> list[list[str]]:
    """Cells of `ERRORS` of one kind."""
    return [
        [
            row["what"],
            f"{row['measured']:.3f}",
            f"{row['predicted']:.3f}",
            f"{row['error']:+.1%}",
            _number(row["measured_speedup"], 3),
            _planned_speedup(row),
            "–" if row["gain_error"] is None else f"{row['gain_error']:+.0%}",
        ]
        for row in rows
        if row["kind"] == kind
    ]


def machine_line(results: Mapping[str, Any]) -> str:
    """The machine that is predicted for."""
    on = results["planned_machine"]
    how = "measured" if on["is_measured"] else "given, or the datasheet's times what two H200 reached of theirs"
    return (
        f"{on['gpu']}: wire {on['wire_gb_per_s']:.0f} GB/s, HBM {on['hbm_gb_per_s']:.0f} GB/s ({how}), "
        f"{on['tflops']:g} TFLOPS BF16. {on['source']}."
    )


def calibration_line(results: Mapping[str, Any]) -> str:
    """What was fitted, and to what."""
    fitted, on = results["calibration"], results["planned_machine"]
    returned, covering = fitted["returned_range"], fitted["covering_range"]
    text = (
        f"Fitted to steps of two {on['calibrated_with']} ({', '.join(fitted['models'])}): matmuls at "
        f"{fitted['matmul_share']:.0%} of the peak, what lies between them at {fitted['memory_share']:.0%} of HBM. "
        f"Of the time of NCCL's calls that a matmul waits for, {fitted['returned']:.0%} ({returned[0]:.0%} to "
        f"{returned[1]:.0%}) comes back as a higher clock of the other kernels. Of NCCL's calls beside a matmul, "
        f"{fitted['covering']:.1f} ({covering[0]:.1f} to {covering[1]:.1f}) times the share of the matmul that they "
        f"cover lengthens a step, at most all of it; of Echo's, {fitted['exposed_echo']:.0%}. Speed-ups are what the "
        "ends of these ranges give; milliseconds go by the means. "
    )
    if on["gpu"] != on["calibrated_with"]:
        return f"{text}All of these are the {on['calibrated_with']}'s: no step was measured on {on['gpu']}."
    return f"{text}Above P = 2 they are those of P = 2: no step was measured there."


def markdown(results: Mapping[str, Any]) -> str:
    """The page beside the JSON."""
    parts = [
        "# Predicted steps, bytes and memory",
        "",
        "Predictions, not measurements: [how they are made and how far to trust them](../plan.md).",
        "",
        machine_line(results),
        calibration_line(results),
        "",
        *markdown_table(PREDICTIONS, prediction_rows(results["rows"])),
        "",
        "## One collective",
        "",
        *markdown_table(CALLS, call_rows(results["calls"])),
        "",
        "## The model's error on measured points",
        "",
        f"Two H200, P = 2. {summary_line(results['errors'])}",
    ]
    for kind, title in KINDS.items():
        parts += ["", f"{title}:", "", *markdown_table(ERRORS, error_rows(results["errors"], kind))]
    return "\n".join([*parts, "", "## Made by", "", *provenance_lines(results)]) + "\n"


def summary_line(errors: Sequence[Mapping[str, Any]]) -> str:
    """How far off speed-ups were, which is what a plan is asked for; then milliseconds."""
    gains, times = [], []
    for kind, name in NAMES.items():
        rows = [row for row in errors if row["kind"] == kind]
        found = [row["gain_error"] for row in rows if row["gain_error"] is not None]
        gains.append(f"{name} {_percent_range(found)}")
        times.append(f"{name} {_percent_range([row['error'] for row in rows])}")
    return (
        f"{_range_sentence(errors)}Errors of the gain (the speed-up less one): {'; '.join(gains)}. "
        f"Of milliseconds: {'; '.join(times)}."
    )


def _range_sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """How often the range held, of Echo's steps and prefills; empty where none were compared."""
    outside = [
        max(row["speedup_low"] - row["measured_speedup"], row["measured_speedup"] - row["speedup_high"])
        for row in errors
        if row["speedup_low"] is not None and row["gain_error"] is not None
    ]
    if not outside:
        return ""
    missed = [distance for distance in outside if distance > 0]
    rest = f", the others up to {max(missed):.3f} outside" if missed else ""
    held = f"{len(outside) - len(missed)} of {len(outside)}"
    return f"{held} speed-ups of steps and prefills lie in the plan's range{rest}. "


def _percent_range(values: Sequence[float]) -> str:
    return f"{min(values):+.0%} to {max(values):+.0%}" if values else "not known"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _with_ratio(nccl: float, ms: float) -> tuple[str, str]:
    return f"{ms:.3f}", f"{nccl / ms:.2f}"


def _speedup(row: Mapping[str, Any], name: str) -> str:
    """The range; one number where its ends are the same."""
    low, high = (_number(row[f"{name}_{end}"], 3) for end in ("low", "high"))
    return low if low == high else f"{low} to {high}"


def _planned_speedup(row: Mapping[str, Any]) -> str:
    value = _number(row["predicted_speedup"], 3)
    if row["speedup_low"] in (None, row["speedup_high"]):
        return value
    return f"{value} ({row['speedup_low']:.3f} to {row['speedup_high']:.3f})"
