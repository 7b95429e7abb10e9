"""The Markdown of an evaluation's results: one table of settings by P, and the ablation beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_megatron.evaluate.settings import NATIVE, OURS, TABLE_8, parse_setting
from echo_megatron.result_files import markdown_table, provenance_lines

Row = dict[str, Any]


def markdown(results: dict[str, Any]) -> str:
    """The page of a results file."""
    settings, rows = results["settings"], results["rows"]
    lines = [f"# Perplexity by communication: {settings['model']}", "", caption(settings), "", *settings_table(rows)]
    if ablation := ablation_table(rows):
        lines += ["", "## Ablation", "", *ablation]
    for run in results["runs"]:
        lines += ["", *provenance_lines(run)]
    return "\n".join(lines) + "\n"


def caption(settings: dict[str, Any]) -> str:
    """What was measured, in words."""
    note = f" ({settings['note']})" if settings.get("note") else ""
    return (
        f"{settings['tokens']:,} tokens of {settings['data']}{note} in windows of {settings['context']:,}, "
        f"{settings['precision']}, {settings['num_sites']} sites. Δ is against 16 bit at the same P, ± the standard "
        "error of the difference of losses over the text. Bytes are those that a rank sends at the sites, against "
        "16-bit values in a ring."
    )


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
    """Two decimals, or four where the perplexity is small; a non-finite one by name."""
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
    delta = "" if row["delta_percent"] is None else f" ({row['delta_percent']:+.2f} %)"
    return f"{perplexity_of(row)}{delta}"
