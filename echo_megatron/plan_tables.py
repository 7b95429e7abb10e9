"""Tables of `plan` and `doctor`: Rich on a terminal, Markdown lines elsewhere; and the plan's page."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from echo_megatron.result_files import markdown_table, provenance_lines

MIB = 1 << 20
PREDICTIONS = [
    "model", "P", "setting", "step, ms", "speed-up", "first token, ms", "speed-up", "sent a step, GB",
    "state, MiB", "workspace, MiB", "kept with recompute, MiB",
]  # fmt: skip
CALLS = ["P", "collective", "message", "NCCL, ms", "echo4, ms", "NCCL / echo4", "echo8, ms", "NCCL / echo8"]
ERRORS = ["what", "measured, ms", "plan, ms", "error", "measured speed-up", "plan's speed-up"]
KINDS = {
    "left_out": "One all-reduce, its size left out of what the plan is made from",
    "transfer": "Two-shot rows from the one-shot curve, as the plan does above P = 2",
    "step": "Training steps without load",
    "forward": "Prefills without load",
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
            _number(row["step_speedup"], 3),
            _number(row["forward_ms"], 1),
            _number(row["forward_speedup"], 3),
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
            _number(row["predicted_speedup"], 3),
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
    """What was fitted."""
    fitted = results["calibration"]
    return (
        f"Fitted to measured steps: matmuls at {fitted['matmul_share']:.0%} of the peak, what lies between them at "
        f"{fitted['memory_share']:.0%} of HBM; backward calls lengthen a step by {fitted['exposed_nccl']:.0%} (NCCL) "
        f"and {fitted['exposed_echo']:.0%} (Echo) of their time, from {', '.join(fitted['models'])}."
    )


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
    """The largest error of each kind."""
    largest = {kind: max((abs(e["error"]) for e in errors if e["kind"] == kind), default=0.0) for kind in KINDS}
    return "Largest errors: " + "; ".join(
        f"{KINDS[kind][0].lower()}{KINDS[kind][1:]} {error:.0%}" for kind, error in largest.items()
    ) + "."  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _with_ratio(nccl: float, ms: float) -> tuple[str, str]:
    return f"{ms:.3f}", f"{nccl / ms:.2f}"
