"""Results of `bench_ttft` as tables: time to first token by batch and load, tokens a second by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.bench.step_tables import BOUND, NATIVE, left_out, share_cell, speedup_cell
from echo_megatron.bench.step_timing import gained_share, spread
from echo_megatron.result_files import markdown_table, provenance_lines

Row = Mapping[str, Any]
KINDS = {"eager": "launched by Python", "graph": "as a CUDA graph"}


def quartiles(values: Sequence[float], prefix: str) -> dict[str, float]:
    """Median and quartiles of one or more times in ms, under names with `prefix`."""
    found = spread(values)
    return {f"{prefix}ms": found.median, f"{prefix}q1_ms": found.q1, f"{prefix}q3_ms": found.q3}


def with_ratios(rows: Sequence[Row], place: Sequence[str], times: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with a speed-up and a share of the bound's gain for each of `times`; None where one is missing.

    Args:
        rows: with a `setting`.
        place: keys that rows to compare have in common.
        times: keys of times; of `graph_ms` come `graph_speedup` and `graph_share`.
    """
    by_place = {(*(row[key] for key in place), row["setting"]): row for row in rows}
    found = []
    for row in rows:
        here = tuple(row[key] for key in place)
        ratios: dict[str, float | None] = {}
        for name in times:
            if name not in row:
                continue
            native, bound = (
                None if other is None else other.get(name)
                for other in (by_place.get((*here, setting)) for setting in (NATIVE, BOUND))
            )
            prefix = name.removesuffix("ms")
            ratios[f"{prefix}speedup"] = None if native is None else native / row[name]
            ratios[f"{prefix}share"] = gained_share(native, row[name], bound)
        found.append({**row, **ratios})
    return found


def prefill_table(rows: Sequence[Row], load: int) -> list[str]:
    """Time to first token at one load: every setting by model and batch."""
    lines = []
    for row in (row for row in rows if row["load"] == load):
        lines.append(
            [
                row["model"],
                f"{row['batch']} x {row['sequence']:,}",
                row["setting"],
                f"{row['ms']:.2f} ({row['q1_ms']:.2f} to {row['q3_ms']:.2f})",
                speedup_cell(row["speedup"]),
                share_cell(row["share"]) if row["setting"] not in (NATIVE, BOUND) else "",
                _size(row["message_bytes"]),
                _size(row["sent_bytes"]),
                str(row["rounds"]),
            ]
        )
    columns = ["model", "batch", "setting", "ms (quartiles)", "speed-up", "share of the bound's gain", "a message"]
    return markdown_table([*columns, "sent by a rank", "rounds"], lines)


def load_table(rows: Sequence[Row]) -> list[str]:
    """Speed-up of the time to first token by load, each setting's and the bound."""
    loads = sorted({row["load"] for row in rows})
    by_place: dict[tuple[str, int, str], dict[int, Row]] = {}
    for row in rows:
        if row["setting"] != NATIVE:
            by_place.setdefault((row["model"], row["batch"], row["setting"]), {})[row["load"]] = row
    lines = [
        [model, str(batch), setting, *("" if load not in own else speedup_cell(own[load]["speedup"]) for load in loads)]
        for (model, batch, setting), own in by_place.items()
    ]
    return markdown_table(["model", "batch", "setting", *(f"load {load} %" for load in loads)], lines)


def overview(results: Row) -> list[str]:
    """Time to first token for a page: 16 bits in ms, the speed-up of each other setting, at every load."""
    rows = results["prefill"]
    others = [name for name in dict.fromkeys(row["setting"] for row in rows) if name != NATIVE]
    by_place = {(row["model"], row["load"], row["batch"], row["setting"]): row for row in rows}
    lines = []
    for model, load, batch in dict.fromkeys((row["model"], row["load"], row["batch"]) for row in rows):
        native = by_place.get((model, load, batch, NATIVE))
        cells = [by_place.get((model, load, batch, name)) for name in others]
        if native is not None:
            first = [model, f"{load} %", f"{batch} x {native['sequence']:,}", str(native["rounds"])]
            speedups = ["" if row is None else speedup_cell(row["speedup"]) for row in cells]
            lines.append([*first, f"{native['ms']:.1f}", *speedups])
    names = [f"{name} (the bound)" if name == BOUND else name for name in others]
    return markdown_table(["model", "load", "batch", "rounds", "16 bits, ms", *names], lines)


def decode_table(rows: Sequence[Row], kind: str) -> list[str]:
    """Tokens a second of one of `KINDS`, and in brackets the speed-up: settings by batch."""
    batches = sorted({row["batch"] for row in rows})
    by_place: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_place.setdefault((row["model"], row["setting"]), {})[row["batch"]] = row
    lines = []
    for (model, setting), own in by_place.items():
        cells = [_tokens(own.get(batch), kind) for batch in batches]
        if any(cells):
            lines.append([model, setting, *cells])
    return markdown_table(["model", "setting", *(f"batch {batch}" for batch in batches)], lines)


def message_table(rows: Sequence[Row]) -> list[str]:
    """What a rank sends for a token of every sequence at the sites, by batch; and how large a message is."""
    batches = sorted({row["batch"] for row in rows})
    by_place: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        by_place.setdefault((row["model"], row["setting"]), {})[row["batch"]] = row
    lines = []
    for model in dict.fromkeys(model for model, _ in by_place):
        of_model = {setting: own for (name, setting), own in by_place.items() if name == model}
        sizes = {batch: row["message_bytes"] for own in of_model.values() for batch, row in own.items()}
        lines.append([model, "a message", *(_size(sizes[batch]) if batch in sizes else "" for batch in batches)])
        for setting, own in of_model.items():
            cells = (_size(own[batch]["sent_bytes"]) if batch in own else "" for batch in batches)
            lines.append([model, f"{setting}, sent", *cells])
    return markdown_table(["model", "", *(f"batch {batch}" for batch in batches)], lines)


def summary(results: Row) -> list[str]:
    """What is printed at the end."""
    lines = []
    for load in _loads(results):
        lines += [f"time to first token, load {load} %", *prefill_table(results["prefill"], load)]
    for kind in _kinds(results):
        lines += [f"tokens a second, {KINDS[kind]}", *decode_table(results["decode"], kind)]
    return [*lines, *left_out(results)]


def markdown(results: Row) -> str:
    """The page beside the JSON."""
    lines = [f"# Inference at P = {results['world_size']}", "", results["method"], ""]
    lines += [
        f"- {name}: {model['layers']} of {model['layers_of_model']} layers ({model['layers_kind']}), "
        f"{model['parameters_a_rank'] / 1e6:,.0f} M parameters a rank, {model['sites']} sites"
        for name, model in results["models"].items()
    ]
    lines += [f"- {name}: {words}" for name, words in results["echo"].items()]
    if results["prefill"]:
        lines += ["", "## Time to first token, by load", "", *load_table(results["prefill"])]
    for load in _loads(results):
        lines += ["", f"## Time to first token, load {load} %", "", *prefill_table(results["prefill"], load)]
    for kind in _kinds(results):
        lines += ["", f"## Tokens a second, {KINDS[kind]}", "", *decode_table(results["decode"], kind)]
    if results["decode"]:
        lines += ["", "## Bytes of a decode step", "", *message_table(results["decode"])]
    lines += ["", *left_out(results), "", "## Made by", ""]
    return "\n".join([*lines, *(f"- {line}" for line in [f"{results['date']}.", *provenance_lines(results)])]) + "\n"


def _kinds(results: Row) -> list[str]:
    return [kind for kind in KINDS if any(f"{kind}_ms" in row for row in results["decode"])]


def _loads(results: Row) -> list[int]:
    return sorted({row["load"] for row in results["prefill"]})


def _tokens(row: Row | None, kind: str) -> str:
    if row is None or f"{kind}_ms" not in row:
        return ""
    speedup = row[f"{kind}_speedup"]
    return f"{row[f'{kind}_tokens_per_s']:,.0f}" + ("" if speedup is None else f" ({speedup:.3f})")


def _size(num_bytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"
