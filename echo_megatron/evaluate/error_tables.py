"""The errors to expect as tables: increases of perplexity by bits and P beside the paper's Table 4, and of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.evaluate.settings import parse_setting
from echo_megatron.result_files import markdown_table

Row = Mapping[str, Any]
# 16-bit perplexity and the increase of each row, in %, from Table 4: WikiText, P = 4.
TABLE_4 = {"Llama-3-8B": (6.07, 6.36, 6.73, 6.07), "Qwen3-8B": (9.70, 9.80, 10.45, 9.70)}
POLICIES = (
    "relative error: rms of the rounding error by rms of the message; of the largest: the same of the largest value of "
    "each group alone; span: (highest - lowest) / (2 * largest magnitude) of a group, 1 where it reaches as far to "
    "both sides of zero, 0.5 where it is one-sided. These are means over {num_sites} sites of one window of "
    "{context:,} tokens, P = {world_size}, rounded once. perplexity: of the paper's form with that policy, {tokens:,} "
    "tokens of {data}, in brackets against 16 bits. massive exact: with exact sums at the {num_massive} sites where a "
    "value is over {threshold:g} times the rms of its message: {massive}; control: with exact sums at the other linear "
    "of these layers instead."
)
# Label, and the same settings of the paper's form and of ours.
TABLE_4_ROWS = (
    ("4 bits", "echo4_paper", "echo4"),
    ("4 bits, no compensation", "echo4_paper,eta=0.0", "uncompensated"),
    ("8 bits", "echo8_paper", "echo8"),
)


def expected_errors(results: Mapping[str, Any]) -> list[str]:
    """Caption, increases by setting and P, the paper's form against ours, and Table 4 where P = 4 was measured."""
    rows: list[Row] = results["rows"]
    settings = results["settings"]
    note = f" ({settings['note']})" if settings.get("note") else ""
    lines = [
        f"{settings['model']}, {settings['tokens']:,} tokens of {settings['data']}{note}: increase of perplexity "
        "against 16 bits in %, ± the standard error over the text.",
        "",
        *increases_table(rows),
    ]
    if ratios := loss_ratios(rows):
        lines += ["", f"echo4_paper adds to the loss, in multiples of what echo4 adds: {ratios}."]
    if beside := table_4(rows):
        lines += ["", "Beside the paper's Table 4, increases in % at P = 4:", "", *beside]
    return lines


def increases_table(rows: Sequence[Row]) -> list[str]:
    """A line for each setting that was measured at most sizes, by bits, a column for each P."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["bits"] != 16:
            found.setdefault(_key(row), {})[row["P"]] = row
    sizes = sorted({row["P"] for row in rows})
    shown = [cells for cells in found.values() if 2 * len(cells) > len(sizes)]
    shown.sort(key=lambda cells: next(iter(cells.values()))["bits_a_value"])
    lines = []
    for cells in shown:
        first = next(iter(cells.values()))
        values = [_increase(cells[size]) if size in cells else "" for size in sizes]
        lines.append([first["setting"], f"{first['bits_a_value']:.2f}", *values])
    return markdown_table(["setting", "bits a value", *(f"P={size}" for size in sizes)], lines)


def loss_ratios(rows: Sequence[Row]) -> str:
    """By how many times echo4_paper's added loss is echo4's, P by P; empty where one of them is missing."""
    ratios = []
    for size in sorted({row["P"] for row in rows}):
        paper, ours = (_find(rows, name, size) for name in ("echo4_paper", "echo4"))
        if paper is not None and ours is not None and paper["delta_loss"] and ours["delta_loss"]:
            ratios.append(f"{paper['delta_loss'] / ours['delta_loss']:.1f} at P={size}")
    return ", ".join(ratios)


def table_4(rows: Sequence[Row]) -> list[str]:
    """The paper's increases, and those of both forms here; empty where nothing was measured at P = 4."""
    lines = []
    for idx, (label, paper_form, ours) in enumerate(TABLE_4_ROWS):
        own = [_find(rows, name, 4) for name in (paper_form, ours)]
        if any(own):
            paper = [f"{100 * (values[idx + 1] / values[0] - 1):+.1f}" for values in TABLE_4.values()]
            lines.append([label, *paper, *("" if row is None else _increase(row) for row in own)])
    if not lines:
        return []
    heads = [*(f"paper, {model}" for model in TABLE_4), "here, the paper's form", "here, ours"]
    return markdown_table(["", *heads], lines)


def policy_errors(results: Mapping[str, Any]) -> list[str]:
    """Caption and table of scripts/policy_errors.py."""
    settings = results["settings"]
    words = {**settings, "massive": ", ".join(settings["massive"]), "num_massive": len(settings["massive"])}
    return [POLICIES.format(**words), "", *policy_table(results["rows"], settings["perplexity_16bit"])]


def policy_table(rows: Sequence[Row], native: float) -> list[str]:
    """A line for each row."""
    columns = ["bits", "g", "policy", "span", "relative error", "of the largest", "perplexity", "massive exact"]
    lines = [
        [
            str(row["bits"]),
            str(row["group_size"]),
            row["policy"],
            f"{row['span']:.2f}",
            f"{row['relative_error']:.4f}",
            f"{row['relative_error_of_largest']:.5f}",
            *(
                "" if row[name] is None else f"{row[name]:.3f} ({100 * (row[name] / native - 1):+.2f} %)"
                for name in ("perplexity", "perplexity_massive_exact", "perplexity_control_exact")
            ),
        ]
        for row in rows
    ]
    return markdown_table([*columns, "control"], lines)


def _key(row: Row) -> str:
    return str(row["key"].split(" ", 2)[2])


def _find(rows: Sequence[Row], name: str, world_size: int) -> Row | None:
    key = parse_setting(name).key
    return next((row for row in rows if row["P"] == world_size and _key(row) == key), None)


def _increase(row: Row) -> str:
    """In %; the error of the loss is that of the perplexity's relative increase times the perplexities' ratio."""
    if row["delta_percent"] is None:
        return "not finite"
    error = row["delta_loss_error"]
    spread = "" if error is None else f" ± {error * (100 + row['delta_percent']):.2f}"
    return f"{row['delta_percent']:+.2f}{spread}"
