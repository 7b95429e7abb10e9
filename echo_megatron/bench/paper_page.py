"""The combined page of `paper_tables` as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from echo_megatron.bench.step_tables import QUANTITIES
from echo_megatron.bench.tables import size_label
from echo_megatron.result_files import markdown_table, provenance_lines

Row = Mapping[str, Any]
NONE = "–"  # not measured, or the paper has none


def markdown(page: Row) -> str:
    """The page of a combined JSON, see `paper_combine.combine`."""
    machine = f"{page['world_size']} × {page['gpu'] or 'CPU process'}"
    sections = {
        "Parts": parts(page),
        "Aims": aims(page),
        f"Table 2: one all-reduce at P = {page['world_size']}": table2(page),
        "One-shot and two-shot": crossover(page),
        f"Table 3: whole models at P = {page['world_size']}, by load": table3(page),
        "Predictions": plan(page),
        "Made by": made(page),
    }
    lines = [f"# The paper's tables on {machine}", ""]
    if page["gpu"] is None:
        lines += ["A rehearsal on a CPU with tiny sizes: its times say nothing.", ""]
    for title, content in sections.items():
        lines += [f"## {title}", "", *content, ""]
    return "\n".join(lines)


def parts(page: Row) -> Iterator[str]:
    """Every part as it last ended, what is left out of it, and the tests."""
    last = {part["name"]: (part, run) for run in page["runs"] for part in run["parts"]}
    rows = [
        [
            name,
            f"**{part['status']}**" if part["status"] != "done" else "done",
            part["why"] or "",
            f"{part['seconds']:.0f} of {part['limit_s']:.0f}",
            f"[{part['results']}]({part['results']})" if part["results"] else "",
            run["date"],
        ]
        for name, (part, run) in last.items()
    ]
    yield from markdown_table(["part", "", "", "seconds", "results", "of"], rows)
    notes = [
        f"- {name}, left out: {key}: {why}" for name, (part, _) in last.items() for key, why in part["left_out"].items()
    ]
    for name, (part, _) in last.items():
        if tests := part["tests"]:
            yield from ("", f"{name}: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped, "
                        f"{tests['not_run']} not run, each on {page['world_size']} ranks.")  # fmt: skip
            notes += [f"- {test}: {outcome}" for test, outcome in tests["others"].items()]
    if notes:
        yield from ("", *notes)


def aims(page: Row) -> Iterator[str]:
    """Aim, measured, met or missed."""
    yield "Times faster than NCCL of the same run, set for P = 4 and P = 8."
    yield ""
    rows = [
        [
            aim["what"],
            size_label(aim["bytes"]),
            f"{aim['aim']:.1f}",
            _ratio(aim["measured"]),
            {None: "not measured", True: "met", False: "missed"}[aim["met"]],
        ]
        for aim in page["aims"]
    ]
    yield from markdown_table(["what", "message", "aim", "measured", ""], rows)


def table2(page: Row) -> Iterator[str]:
    """Lines as the paper's; below each what the machine allows."""
    cells = page["table2"]
    if not any(cell["ms"] is not None for cell in cells):
        yield "Not measured."
        return
    sizes = sorted({cell["bytes"] for cell in cells})
    yield (
        "Milliseconds, in brackets times faster than NCCL. Paper: four A100. Least: by the bytes that a call cannot "
        "avoid, over the wire and through HBM. NCCL is its whole call, also where a time is what was added to "
        "the critical path (between matmuls of Llama-3-8B), as in the paper."
    )
    yield ""
    rows = []
    for line in dict.fromkeys(cell["line"] for cell in cells):
        own = {cell["bytes"]: cell for cell in cells if cell["line"] == line}
        if any(cell.get("paper_ms") for cell in own.values()):
            rows.append([line, "paper", *(_with_ratio(own.get(size), "paper_ms", "paper_ratio") for size in sizes)])
        rows.append([line, "here", *(_with_ratio(own.get(size), "ms", "nccl_ratio") for size in sizes)])
        if any(cell["wire_ms"] is not None for cell in own.values()):
            rows.append([line, "least: wire / HBM", *(_bounds(own.get(size)) for size in sizes)])
    yield from markdown_table(["ms", "", *map(size_label, sizes)], rows)
    found = page["nccl"]["set"]
    words = ", ".join(f"{key}={value}" for key, value in found.items()) or "nothing, so these are its defaults"
    yield from ("", f"NCCL as it was found: set was {words}. Multicast is {page['nccl']['multicast']}, for every row.")


def crossover(page: Row) -> Iterator[str]:
    """Times of both algorithms by size."""
    found = page["crossover"]
    if not found["rows"]:
        yield "Not measured."
        return
    start, largest = found["two_shot_from"], found["rows"][-1]["bytes"]
    yield (
        f"Two-shot is the faster from {size_label(start)} on, of the sizes measured."
        if start is not None
        else f"One-shot is still as fast at {size_label(largest)}, the largest size measured."
    )
    yield from ("", "echo4's options with one algorithm at every size, ms; bold is the faster.", "")
    rows = []
    for row in found["rows"]:
        one, two = row["one_shot_ms"], row["two_shot_ms"]
        faster = [f"**{ms:.4f}**" if ms == min(one, two) else f"{ms:.4f}" for ms in (one, two)]
        rows.append([size_label(row["bytes"]), *faster, NONE if row["nccl_ms"] is None else f"{row['nccl_ms']:.4f}"])
    yield from markdown_table(["message", "one-shot", "two-shot", "NCCL"], rows)


def table3(page: Row) -> Iterator[str]:
    """The slowdown of NCCL by load, then speed-ups in the paper's order."""
    rows3, links = page["table3"], page["links"]
    if not rows3 and not links:
        yield "Not measured."
        return
    loads = sorted({row["load"] for row in (*rows3, *links)})
    yield (
        "Load: share of the time that copies run between the GPUs. Paper: eight A100, batches of 64 (Qwen3-8B's "
        "training step: 32) x 2,048. The bound skips the sites' all-reduces."
    )
    yield ""
    slow = {link["load"]: link for link in links}
    rows = [
        ["NCCL's all-reduce takes longer", "", who, *(_ratio(slow.get(load, {}).get(key)) for load in loads)]
        for who, key in (("paper", "paper_slowdown"), ("here", "slowdown"))
        if slow
    ]
    for what, model in dict.fromkeys((row["what"], row["model"]) for row in rows3):
        own = {row["load"]: row for row in rows3 if (row["what"], row["model"]) == (what, model)}
        first = next(iter(own.values()))
        head = [QUANTITIES[what], f"{model}, {first['batch']} ({first['bench']})"]
        lines = {"paper, speed-up": "paper_speedup", "echo4, speed-up": "echo4_speedup", "bound": "bound_speedup"}
        rows += [
            [*head, words, *(_ratio(own.get(load, {}).get(key), 3) for load in loads)]
            for words, key in lines.items()
            if any(row[key] is not None for row in own.values())
        ]
        rows.append([*head, "16 bits, ms", *(_number(own.get(load, {}).get("native_ms"), 1) for load in loads)])
    yield from markdown_table(["", "", "", *(f"load {load} %" for load in loads)], rows)


def plan(page: Row) -> Iterator[str]:
    """Each prediction for this machine that was measured."""
    found = page["plan"]
    if not found["rows"]:
        machine = f"{page['world_size']} × {page['gpu'] or 'CPU process'}"
        yield f"{found['file']} has none of what was measured for {machine}."
        return
    worst = max(found["rows"], key=lambda row: abs(row["error"]))
    yield (
        f"Of {found['file']}, written down before. The error is positive where the prediction is too large; "
        f"the largest: {worst['error']:+.1%} ({worst['what']})."
    )
    yield ""
    rows = [
        [row["what"], size_label(row["bytes"]), row["unit"], f"{row['predicted']:.3f}", f"{row['measured']:.3f}",
         f"{row['error']:+.1%}"]
        for row in found["rows"]
    ]  # fmt: skip
    yield from markdown_table(["what", "message", "", "predicted", "measured", "error"], rows)


def made(page: Row) -> Iterator[str]:
    """Commands, commits and versions of this page's runs, and of the files that it is made from."""
    for run in page["runs"]:
        yield f"- {run['date']}, parts {', '.join(part['name'] for part in run['parts'])}: {_provenance(run)}"
    for what, source in page["sources"].items():
        yield f"- {what}, {source['date']}: {_provenance(source)}"


def _provenance(made_by: Row) -> str:
    return " ".join(provenance_lines(made_by))


def _with_ratio(cell: Row | None, key: str, ratio: str) -> str:
    if cell is None or cell.get(key) is None:
        return NONE
    words = f"{cell[key]:.3f}"
    return words if cell[ratio] is None else f"{words} ({cell[ratio]:.2f})"


def _bounds(cell: Row | None) -> str:
    if cell is None or cell["wire_ms"] is None:
        return NONE
    return f"{cell['wire_ms']:.3f} / {cell['hbm_ms']:.3f}"


def _ratio(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


_number = _ratio
