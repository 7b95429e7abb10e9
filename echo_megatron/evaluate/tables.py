"""The Markdown of an evaluation's results: one table of settings by P, and the ablation beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.evaluate.settings import NATIVE, OURS, TABLE_8, parse_setting
from echo_megatron.result_files import markdown_table, provenance_lines

Row = dict[str, Any]

ALL_ROWS = (
    "Δ is against 16 bits at the same ranks, ± the standard error of the difference of losses over the text. bytes: "
    "what a rank sends at the sites, relative to 16-bit values in a ring."
)


def markdown(results: Mapping[str, Any]) -> str:
    """The page of a results file."""
    lines = [f"# Perplexity by communication: {results['settings']['model']}", "", *summary(results)]
    lines += ["", "## All rows", "", ALL_ROWS, "", *settings_table(results["rows"])]
    for run in results["runs"]:
        lines += ["", *provenance_lines(run)]
    return "\n".join(lines) + "\n"


def summary(results: Mapping[str, Any]) -> list[str]:
    """Settings by P, and the ablation where it was measured."""
    lines = [caption(results["settings"]), "", *overview_table(results["rows"])]
    if ablation := ablation_table(results["rows"]):
        lines += ["", "The paper's Table 8, and the same questions to our form:", "", *ablation]
    return lines


def caption(settings: dict[str, Any]) -> str:
    """What was measured, in words."""
    note = f" ({settings['note']})" if settings.get("note") else ""
    windows = f"in windows of {settings['context']:,}, {settings['precision']}, {settings['num_sites']} sites"
    return (
        f"{settings['model']}, {settings['tokens']:,} tokens of {settings['data']}{note} {windows}. In brackets the "
        "difference to 16 bits at the same P."
    )


def overview_table(rows: Sequence[Row]) -> list[str]:
    """A line for each setting that was measured at most sizes, a column for each P: perplexity, and Δ in %."""
    sizes = sorted({(row["ranks"] == "real", row["P"]) for row in rows})
    by_setting: dict[str, dict[tuple[bool, int], Row]] = {}
    for row in rows:
        by_setting.setdefault(row["key"].split(" ", 2)[2], {})[row["ranks"] == "real", row["P"]] = row
    lines = []
    for cells in by_setting.values():
        if 2 * len(cells) <= len(sizes):
            continue  # of an ablation at some P
        first = next(iter(cells.values()))
        values = [_with_delta(cells[size]) if size in cells else "" for size in sizes]
        lines.append([first["setting"], f"{first['bits_a_value']:.2f}", *values])
    heads = [f"P={size}{', real ranks' if is_real else ''}" for is_real, size in sizes]
    return markdown_table(["setting", "bits a value", *heads], lines)


def _with_delta(row: Row) -> str:
    delta = "" if row["delta_percent"] is None else f" ({row['delta_percent']:+.2f} %)"
    return f"{perplexity_of(row)}{delta}"


def settings_table(rows: Sequence[Row]) -> list[str]:
    """A line for each setting and P, in the order of measurement."""
    columns = ["setting", "P", "ranks", "algorithm", "bytes", "perplexity", "Δ %", "Δ loss, nats"]
    ordered = sorted(rows, key=lambda row: (row["ranks"], row["P"]))
    return markdown_table(columns, [_cells(row) for row in ordered])


def _cells(row: Row) -> list[str]:
    return [
        row["setting"],
        str(row["P"]),
        row["ranks"],
        row["algorithm"] or "",
        f"{row['bytes_relative']:.3f}",
        perplexity_of(row),
        "" if row["delta_percent"] is None else f"{row['delta_percent']:+.2f}",
        _delta_loss(row),
    ]


def perplexity_of(row: Row) -> str:
    """Three decimals; a non-finite one by name."""
    value = row["perplexity"]
    return "not finite" if value is None else f"{value:.3f}"


def _delta_loss(row: Row) -> str:
    if row["delta_loss"] is None:
        return ""
    error = "" if row["delta_loss_error"] is None else f" ± {row['delta_loss_error']:.4f}"
    return f"{row['delta_loss']:+.4f}{error}"


def ablation_table(rows: Sequence[Row]) -> list[str]:
    """The paper's Table 8: our perplexities of its form at 4 and 8 bits, its own, and ours of our form."""
    blocks: list[str] = []
    for world_size, kind in dict.fromkeys((row["P"], row["ranks"]) for row in rows):
        own = {row["key"].split(" ", 2)[2]: row for row in rows if (row["P"], row["ranks"]) == (world_size, kind)}
        body = [
            [label, *(_value(own, f"echo{bits}_paper", overrides) for bits in (4, 8)), f"{paper:.3f}"]
            for overrides, (label, paper) in TABLE_8.items()
        ]
        body += [
            [f"ours: {label}", *(_value(own, f"echo{bits}", overrides) for bits in (4, 8)), ""]
            for overrides, label in OURS.items()
        ]
        body = [line for line in body if line[1] or line[2]]
        if any(line[0] == label for line in body for label, _ in list(TABLE_8.values())[1:]):
            native = own.get(NATIVE)
            if native is not None:
                body.insert(0, ["16 bit", perplexity_of(native), perplexity_of(native), "6.07"])
            columns = [f"P={world_size}, {kind}", "4 bits", "8 bits", "paper: Llama-3-8B, 4 bits, P=4"]
            blocks += [*([""] if blocks else []), *markdown_table(columns, body)]
    return blocks


def _value(own: dict[str, Row], preset: str, overrides: str) -> str:
    name = f"{preset},{overrides}" if overrides else preset
    row = own.get(parse_setting(name).key)
    if row is None:
        return ""
    return _with_delta(row)
