"""Runs that a file of results is made of: `--onto` puts the rows of a new run into the results of earlier ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from echo_megatron.bench import tables

Results = Mapping[str, Any]

BASELINE = "nccl16"
RUN_FIELDS = ("command", "commit", "date", "machine", "versions", "method", "ceilings")


def load(path: Path, gpu: str | None, world_size: int) -> dict[str, Any]:
    """Results that a run on `world_size` ranks of this GPU can go onto.

    Raises:
        ValueError: the file is missing, not such results, or of another GPU or number of ranks.
    """
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = results["machine"]["gpu"], results["world_size"]
        runs, rows = results["runs"], results["rows"]
        complete = all(set(RUN_FIELDS) <= set(run) for run in runs) and all("run" in row for row in rows)
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"--onto {path}: expected results of this bench; got {type(error).__name__}: {error}"
        ) from error
    if not complete:
        raise ValueError(f"--onto {path}: expected runs with {', '.join(RUN_FIELDS)} and rows with run; got others")
    if found != (gpu, world_size):
        raise ValueError(
            f"--onto {path}: expected results of {world_size} × {gpu}, as here; got {found[1]} × {found[0]}; write to "
            "a file of its own instead"
        )
    return results


def of_one_run(results: Results) -> dict[str, Any]:
    """Results with `runs`, the one run, and each row's `run`, the index in it."""
    run = {name: results[name] for name in RUN_FIELDS}
    return {**results, "runs": [run], "rows": [{**row, "run": 0} for row in results["rows"]]}


def merged(base: Results, new: Results, rerun: Iterable[str]) -> dict[str, Any]:
    """`base` with the rows of `new`, one run's, in place of those of the same series and size.

    A row keeps the ratio of its own run. NCCL's rows stay those of `base`, or the table's ratios would not be of its
    times; the new run's are in its entry of `runs`, as `nccl16_ms`. Runs without a row left are dropped.

    Args:
        base: see `load`.
        new: see `of_one_run`.
        rerun: keys of the rows that the new run tried: why an earlier one left them out no longer counts.
    """
    [run] = new["runs"]
    nccl = {str(row["bytes"]): row["ms"] for row in new["rows"] if row["row"] == BASELINE}
    rows = {_place(row): row for row in base["rows"]}
    number = len(base["runs"])
    for row in new["rows"]:
        if row["row"] == BASELINE and _place(row) in rows:
            continue
        rows[_place(row)] = {**row, "run": number}
    runs = [*base["runs"], {**run, "nccl16_ms": nccl}]
    used = sorted({row["run"] for row in rows.values()})
    entries = [{**row, "run": used.index(row["run"])} for row in rows.values()]
    left_out = {name: why for name, why in base["left_out"].items() if name not in set(rerun)}
    return {
        **base,
        "left_out": {**left_out, **new["left_out"]},
        "rough_places": tables.rough_places(entries),
        "runs": [runs[idx] for idx in used],
        "rows": entries,
    }


def _place(row: Results) -> tuple[tables.Key, int]:
    return tables.key_of(row), row["bytes"]
