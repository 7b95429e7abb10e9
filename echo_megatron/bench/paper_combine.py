"""What `paper_tables` measured, put beside the paper, the bounds, the aims and the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo_megatron.bench.rows import CROSSING, LARGE_SIZES, MIB
from echo_megatron.bench.step_tables import BOUND, ECHO, NATIVE, PAPER_LOADS, PAPER_SPEEDUP, QUANTITIES
from echo_megatron.bench.tables import MATMULS, PAPER_MS, PAPER_POLICY

Row = Mapping[str, Any]
DEFAULT_POLICY, DEFAULT_STATE = "rotated", "compact"
PAPER_SLOWDOWN = (1.00, 1.80, 2.07, 2.73)  # Table 3's second column: a 1 GB NCCL all-reduce at PAPER_LOADS
AIM_SIZES = (512 * MIB, 1024 * MIB)
PLAN_SETTINGS = {"nccl": NATIVE, "echo4": ECHO, "echo8": "echo8"}


@dataclass(frozen=True)
class Line:
    """A line of Table 2.

    Attributes:
        words: what it is called.
        row: of the bench; policy, state and matmuls as its results have them.
        paper: the row of `PAPER_MS` that it is; None: the paper has none.
    """

    words: str
    row: str
    policy: str | None = None
    state: str | None = None
    matmuls: str | None = None
    paper: str | None = None

    def fits(self, entry: Row) -> bool:
        asked = (self.row, self.policy, self.state, self.matmuls)
        return asked == tuple(entry.get(key) for key in ("row", "policy", "state_dtype", "matmuls"))


# The paper's rows in its order, each with the paper's quantizer and then the default one; then those of ours alone.
LINES = (
    Line("NCCL 16-bit", "nccl16", paper="nccl16"),
    Line("two-collective, 8-bit", "two_collective_8", paper="two_collective_8"),
    Line("two-collective, 4-bit", "two_collective_4", paper="two_collective_4"),
    Line("8-bit", "echo8", PAPER_POLICY, paper="echo8"),
    Line("8-bit, rotated", "echo8", DEFAULT_POLICY),
    Line("4-bit", "echo4", PAPER_POLICY, paper="echo4"),
    Line("4-bit, rotated", "echo4", DEFAULT_POLICY),
    Line("4-bit + unfused compensator", "echo4_unfused", PAPER_POLICY, "bf16", paper="echo4_unfused"),
    Line(
        "4-bit + fused compensator, added to the critical path", "echo4_paper_critical", PAPER_POLICY, "bf16", MATMULS,
        "echo4_paper_critical",
    ),
    Line("NCCL 16-bit, added to the critical path", "nccl16_critical", matmuls=MATMULS),
    Line("echo4 (default), the whole call", "echo4_local", DEFAULT_POLICY, DEFAULT_STATE),
    Line("echo4 (default), added to the critical path", "echo4_local_critical", DEFAULT_POLICY, DEFAULT_STATE, MATMULS),
    Line("echo8 (default), the whole call", "echo8_local", DEFAULT_POLICY, DEFAULT_STATE),
)  # fmt: skip
# What was aimed at for four and eight ranks: times faster than NCCL.
AIMS = (("4-bit", 3.0, LINES[5]), ("4-bit, rotated", 3.0, LINES[6]), ("compensated 4-bit (echo4)", 2.6, LINES[10]))
PLANNED = {"nccl_ms": LINES[0], "echo4_ms": LINES[10], "echo8_ms": LINES[12]}


def combine(head: Row, found: Mapping[str, Row], plan: Row, plan_name: str) -> dict[str, Any]:
    """The content of the combined JSON.

    Args:
        head: `world_size`, `machine_key`, `gpu`, `nccl`, `runs`.
        found: results of all_reduce, nccl_defaults, step and ttft; each empty where it was not measured.
        plan: the predictions; empty where there are none.
        plan_name: of their file.
    """
    entries, defaults = (
        [entry for entry in found[what].get("rows", ()) if not entry.get("beside")]
        for what in ("all_reduce", "nccl_defaults")
    )
    step, ttft, world_size = found["step"], found["ttft"], head["world_size"]
    return {
        **head,
        "sources": {what: source_of(results) for what, results in found.items() if results},
        "aims": aims(entries),
        "table2": table2(entries, defaults),
        "crossover": crossover(entries),
        "links": links(step),
        "table3": table3(step, ttft),
        "plan": {"file": plan_name, "rows": compare_plan(plan, world_size, head["gpu"], entries, step)},
    }


def source_of(results: Row) -> dict[str, Any]:
    """What a file of results was made with."""
    return {key: results[key] for key in ("command", "commit", "date", "machine", "versions", "method", "left_out")}


def sizes_of(entries: Sequence[Row]) -> list[int]:
    """The paper's, or where none of them was measured, as in a rehearsal, those that were."""
    measured = sorted({entry["bytes"] for entry in entries})
    return list(LARGE_SIZES) if set(LARGE_SIZES) & set(measured) or not measured else measured


def by_size(entries: Sequence[Row], line: Line) -> dict[int, Row]:
    """The entries of a line."""
    return {entry["bytes"]: entry for entry in entries if line.fits(entry)}


def table2(entries: Sequence[Row], defaults: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each line and size: ours, the least by the wire and by HBM, and the paper's."""
    rows = []
    for line in LINES:
        measured = by_size(entries, line)
        for size in sizes_of(entries):
            rows.append({**_cell(line, size, measured.get(size)), **_paper_cell(line.paper, size)})
        if line.row == NATIVE and defaults:
            own = Line("NCCL 16-bit, nothing set but multicast off", NATIVE)
            rows += [_cell(own, size, entry) for size, entry in by_size(defaults, own).items()]
    return rows


def aims(entries: Sequence[Row]) -> list[dict[str, Any]]:
    """What was aimed at for four and eight ranks, and what was reached; `met` is None where it was not measured."""
    rows = []
    for words, aim, line in AIMS:
        measured = by_size(entries, line)
        for size in AIM_SIZES:
            ratio = measured[size]["nccl_ratio"] if size in measured else None
            met = None if ratio is None else ratio >= aim
            rows.append({"what": words, "bytes": size, "aim": aim, "measured": ratio, "met": met})
    return rows


def crossover(entries: Sequence[Row]) -> dict[str, Any]:
    """One-shot and two-shot of the default options by size, and from which size on two-shot is always the faster.

    `two_shot_from` is None where it is not at the largest size; `rows` is empty where they were not measured.
    """
    times: dict[str, dict[int, float]] = {}
    for entry in entries:
        times.setdefault(entry["row"], {})[entry["bytes"]] = entry["ms"]
    one, two = times.get("echo4_one_shot", {}), times.get("echo4_two_shot", {})
    rows: list[dict[str, Any]] = [
        {"bytes": size, "one_shot_ms": one[size], "two_shot_ms": two[size], "nccl_ms": times.get(NATIVE, {}).get(size)}
        for size in sorted(set(one) & set(two))
        if size <= CROSSING
    ]
    start = None
    for size in sorted((row["bytes"] for row in rows), reverse=True):
        if two[size] >= one[size]:
            break
        start = size
    return {"rows": rows, "two_shot_from": start}


def links(step: Row) -> list[dict[str, Any]]:
    """Table 3's second column: how much longer NCCL takes at each load, and the paper's."""
    paper = dict(zip(PAPER_LOADS, PAPER_SLOWDOWN, strict=True))
    return [{**link, "paper_slowdown": paper.get(link["load"])} for link in step.get("links", ())]


def table3(step: Row, ttft: Row) -> list[dict[str, Any]]:
    """A row for each model, quantity and load: 16 bits in ms, speed-up of echo4, of the bound, and the paper's.

    Time to first token is that of `bench_ttft`, the largest batch; where it has none, the prefill of `bench_step`.
    """
    prefills = ttft.get("prefill", ())
    batch = max((row["batch"] for row in prefills), default=0)
    tokens = [{**row, "forward_ms": row["ms"]} for row in prefills if row["batch"] == batch]
    steps = list(step.get("rows", ()))
    shapes = {name: f"{shape['batch']} x {shape['sequence']}" for name, shape in step.get("models", {}).items()}
    rows: list[dict[str, Any]] = []
    measured = {row["model"]: (tokens, "bench_ttft", f"{batch} x {row['sequence']}") for row in tokens}
    for what in ("forward", "step"):  # the paper's order
        for model in dict.fromkeys(row["model"] for row in (*tokens, *steps)):
            own = steps, "bench_step", shapes.get(model, "")
            source, bench, batch_words = measured.get(model, own) if what == "forward" else own
            rows += _of_model(source, model, what, {"bench": bench, "batch": batch_words})
    return rows


def compare_plan(
    plan: Row, world_size: int, gpu: str | None, entries: Sequence[Row], step: Row
) -> list[dict[str, Any]]:
    """Predictions for this number of ranks of this GPU that were measured: both values and the error.

    The error is relative, positive where the prediction is too large. Of steps with another batch than was predicted
    for only the speed-ups are compared.
    """
    if not plan or plan["planned_machine"]["gpu"] != gpu:
        return []
    rows = []
    for call in plan["calls"]:
        if call["world_size"] == world_size and call["collective"] == "all_reduce":
            for key, line in PLANNED.items():
                entry = by_size(entries, line).get(call["bytes"])
                if entry is not None:
                    place = {"what": line.words, "bytes": call["bytes"], "unit": "ms"}
                    rows.append({**place, **_error(call[key], entry["ms"])})
    unloaded = {(row["model"], row["setting"]): row for row in step.get("rows", ()) if row["load"] == 0}
    messages = {name: shape["message_bytes"] for name, shape in step.get("models", {}).items()}
    for row in plan["rows"]:
        measured = unloaded.get((row["model"], PLAN_SETTINGS.get(row["setting"], "")))
        if row["world_size"] != world_size or measured is None:
            continue
        for what in QUANTITIES:
            pairs = {"ms": (row[f"{what}_ms"], measured[f"{what}_ms"])}
            if messages[row["model"]] != row["message_bytes"]:
                pairs = {}
            if row["setting"] != "nccl":
                pairs["speed-up"] = row[f"{what}_speedup"], measured[f"{what}_speedup"]
            words = f"{row['model']}, {QUANTITIES[what]}, {row['setting']}"
            for unit, (predicted, value) in pairs.items():
                if value is not None:
                    place = {"what": words, "bytes": messages[row["model"]], "unit": unit}
                    rows.append({**place, **_error(predicted, value)})
    return rows


def _cell(line: Line, size: int, entry: Row | None) -> dict[str, Any]:
    found: dict[str, Any] = {"line": line.words, "row": line.row, "bytes": size}
    if entry is None:
        return {**found, "ms": None, "nccl_ratio": None, "wire_ms": None, "hbm_ms": None, "algorithm": None}
    bounds = {
        f"{name}_ms": None if (share := entry.get(f"{name}_fraction")) is None else share * entry["ms"]
        for name in ("wire", "hbm")
    }
    return {**found, "ms": entry["ms"], "nccl_ratio": entry["nccl_ratio"], **bounds, "algorithm": entry["algorithm"]}


def _paper_cell(name: str | None, size: int) -> dict[str, Any]:
    if name is None or size not in LARGE_SIZES:
        return {}
    idx = LARGE_SIZES.index(size)
    ms = PAPER_MS[name][1][idx]
    return {"paper_ms": ms, "paper_ratio": PAPER_MS[NATIVE][1][idx] / ms}


def _of_model(rows: Sequence[Row], model: str, what: str, source: Row) -> list[dict[str, Any]]:
    by_place = {(row["setting"], row["load"]): row[f"{what}_ms"] for row in rows if row["model"] == model}
    paper = dict(zip(PAPER_LOADS, PAPER_SPEEDUP.get((model, what), (None,) * len(PAPER_LOADS)), strict=True))
    found = []
    for load in sorted({load for _, load in by_place}):
        native, echo, bound = (by_place.get((setting, load)) for setting in (NATIVE, ECHO, BOUND))
        found.append(
            {
                "model": model,
                "what": what,
                **source,
                "load": load,
                "native_ms": native,
                "echo4_speedup": native / echo if native and echo else None,
                "bound_speedup": native / bound if native and bound else None,
                "paper_speedup": paper.get(load),
            }
        )
    return found


def _error(predicted: float, measured: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
