"""The loss table (paper Table 7) and its remarks, as a JSON report and as Markdown."""

import math
import statistics
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from echo_megatron import provenance
from echo_megatron.loss_runs import LossRun
from echo_megatron.loss_statistics import (
    Arm,
    Statistic,
    Windows,
    all_differences,
    loss_at,
    shared_options,
    tail_difference,
    tail_loss,
)
from echo_megatron.result_files import markdown_table

MISSING = "n/a"


def build_report(
    arms: list[Arm], baseline: Arm, windows: Windows, title: str | None, remarks: list[str]
) -> dict[str, Any]:
    """All numbers of the comparison: arms, differences, runs, remarks, and what they were made with."""
    runs = [run for arm in arms for run in arm.runs]
    validation_step = _common_validation_step(runs, windows)
    baseline_bytes = _tp_bytes(baseline, windows)
    entries = []
    for arm in arms:
        difference = tail_difference(arm, baseline, windows)
        tail = Statistic.of([tail_loss(run, windows) for run in arm.runs])
        tp_bytes = _tp_bytes(arm, windows)
        entries.append(
            {
                "label": arm.label,
                "baseline": arm is baseline,
                "tp_comm": arm.runs[0].tp_comm,
                "runs": [run.name for run in arm.runs],
                "seeds": arm.seeds,
                "lr": arm.runs[0].lr,
                "steps": [run.progress for run in arm.runs],
                "step_1000": _statistic([loss_at(run, 1000) for run in arm.runs]),
                "tail": asdict(tail),
                "delta": 0.0 if arm is baseline else difference.mean,
                "delta_error": None if arm is baseline else difference.error,
                "delta_percent": 0.0 if arm is baseline else 100 * difference.mean / (tail.mean - difference.mean),
                "validation": _statistic([run.validation.get(validation_step or -1) for run in arm.runs]),
                "tp_bytes": tp_bytes,
                "tp_bytes_ratio": tp_bytes / baseline_bytes if tp_bytes is not None and baseline_bytes else None,
                "tokens_per_s": _tokens_per_s(arm, windows),
            }
        )
    differences = [asdict(entry) | {"sentence": entry.sentence()} for entry in all_differences(arms, baseline, windows)]
    return {
        "title": title or _title(runs[0]),
        "caption": f"{data_caption(runs[0])} {_window_caption(windows, validation_step)}",
        "baseline": baseline.label,
        "windows": asdict(windows),
        "validation_step": validation_step,
        "arms": entries,
        "differences": differences,
        "remarks": remarks + _remarks(runs, windows),
        "runs": [_run_entry(run, windows) for run in runs],
        "made_by": {
            "command": provenance.command(),
            "versions": {name: version(name) for name in ("numpy", "matplotlib", "tensorboard")},
        },
    }


def header(report: dict[str, Any]) -> list[str]:
    """The table's columns; the tail loss is named after the window that was used."""
    tail, step = f"tail-{report['windows']['tail']}", report["validation_step"]
    validation = "validation loss" if step is None else f"validation loss (step {step})"
    columns = ["tp_comm", "seeds", "max lr", "steps", "step 1000", tail, "Δ", "Δ %", validation]
    return [*columns, "TP bytes sent per rank", "× baseline", "tokens/s"]


def row(arm: dict[str, Any]) -> list[str]:
    """One arm's cells, in the order of `header`."""
    delta = f"{arm['delta']:+.4f}"
    if len(arm["seeds"]) > 1 and not arm["baseline"] and math.isfinite(arm["delta_error"]):
        delta += f" ± {arm['delta_error']:.4f}"
    return [
        arm["label"],
        ", ".join(MISSING if seed is None else str(seed) for seed in arm["seeds"]),
        _number(arm["lr"], ".3g"),
        " / ".join(dict.fromkeys(arm["steps"])),
        _mean_and_spread(arm["step_1000"]),
        _mean_and_spread(arm["tail"]),
        "–" if arm["baseline"] else delta,
        "–" if arm["baseline"] else f"{arm['delta_percent']:+.2f}",
        _mean_and_spread(arm["validation"]),
        _bytes(arm["tp_bytes"]),
        _number(arm["tp_bytes_ratio"], ".3f"),
        _number(arm["tokens_per_s"], ",.0f"),
    ]


def markdown(report: dict[str, Any], figure: str) -> str:
    """The report as Markdown with the figure, the table, the differences, the remarks and each run's provenance."""
    several_seeds = any(len(arm["seeds"]) > 1 for arm in report["arms"])
    lines = [
        f"# {report['title']}",
        "",
        f"![loss curves]({figure})",
        "",
        *markdown_table(header(report), [row(arm) for arm in report["arms"]]),
    ]
    lines += ["", report["caption"]]
    if several_seeds:
        lines += [
            "",
            "± of a loss is the standard deviation over seeds, ± of Δ the standard error of its mean.",
        ]
    lines += ["", "## Differences in tail loss", "", *(f"- {entry['sentence']}" for entry in report["differences"])]
    if report["remarks"]:
        lines += ["", "## Remarks", "", *(f"- {remark}" for remark in report["remarks"])]
    columns = ["run", "arm", "seed", "steps", "tail loss", "commit", "machine", "versions", "command"]
    labels = {name: arm["label"] for arm in report["arms"] for name in arm["runs"]}
    rows = [
        [
            run["name"],
            labels[run["name"]],
            _text(run["seed"]),
            run["steps"],
            _number(run["tail"], ".4f"),
            _text(run["commit"]),
            _pairs(run["machine"]),
            _pairs(run["versions"]),
            f"`{run['command']}`" if run["command"] else MISSING,
        ]
        for run in report["runs"]
    ]
    lines += ["", "## Runs", "", *markdown_table(columns, rows), "", f"Made by `{report['made_by']['command']}`."]
    return "\n".join(lines) + "\n"


def data_caption(run: LossRun) -> str:
    """Names the data, and says so where it is not the paper's."""
    data = run.record.get("data") or {}
    if not data.get("name"):
        return "Data: not recorded."
    tokens = f" ({data['tokens']:,} tokens)" if data.get("tokens") else ""
    paper = "" if data["name"] == "dolma_c4" else ", standing in for the paper's Dolma C4"
    return f"Data: {data['name']}{tokens}{paper}."


def _title(run: LossRun) -> str:
    parameters, size = run.facts["parameters"], run.facts["tensor_parallel"]
    model = (run.config.get("model") or {}).get("name", "model")
    data = (run.record.get("data") or {}).get("name")
    parts = [
        f"{model}, {_millions(parameters)} parameters" if parameters else None,
        data and f"{data} data",
        f"P = {size}" if size else None,
        f"batch {run.facts['batch']} × {run.facts['sequence']} tokens" if run.facts["sequence"] else None,
    ]
    return ", ".join(part for part in parts if part) or "Training loss"


def _window_caption(windows: Windows, validation_step: int | None) -> str:
    text = f"Tail loss: mean of steps {windows.end - windows.tail + 1:,} to {windows.end:,}"
    text += " (shrunk from 100 steps to a third of the run)." if windows.tail < 100 else "."
    return text + ("" if validation_step is None else f" Validation loss at step {validation_step:,}.")


def _remarks(runs: list[LossRun], windows: Windows) -> list[str]:
    remarks = [f"{run.name} is not finished: {run.progress}." for run in runs if run.finished is False]
    if len({run.last_step for run in runs}) > 1:
        remarks.append(f"The runs end at different steps; every number ends at step {windows.end:,}, which all have.")
    for run in runs:
        if bad := run.nonfinite_steps:
            remarks.append(f"{run.name}: {len(bad)} losses are not finite, the first at step {bad[0]:,}.")
    for run in runs:
        if run.source != "run folder":
            remarks.append(f"{run.name} is read from {run.source}, which record neither TP bytes nor tokens/s.")
    for name, consequence in (("machine", ", so tokens/s do not compare"), ("versions", ""), ("commit", "")):
        if len({str(run.record[name]) for run in runs if name in run.record}) > 1:
            remarks.append(f"The runs differ in {name}{consequence}; see the list of runs.")
    if shared := shared_options(runs):
        remarks.append(f"Every Echo arm has {', '.join(shared)}.")
    if any(run.facts["precision"] == "fp32" for run in runs):
        remarks.append(
            "In fp32 uncompressed communication sends 32 bits a value; against bf16 the ratios would double."
        )
    return remarks


def _run_entry(run: LossRun, windows: Windows) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "source": run.source,
        "seed": run.facts["seed"],
        "steps": run.progress,
        "finished": run.finished,
        "tail": tail_loss(run, windows),
        "nonfinite_steps": run.nonfinite_steps,
        "facts": run.facts,
        **{name: run.record.get(name) for name in ("data", "machine", "versions", "commit", "command")},
    }


def _common_validation_step(runs: list[LossRun], windows: Windows) -> int | None:
    """Last step at which all runs that validate have done so."""
    validated = [set(run.validation) for run in runs if run.validation]
    common = [step for step in set.intersection(*validated) if step <= windows.end] if validated else []
    return max(common, default=None)


def _statistic(values: list[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return asdict(Statistic.of(known)) if len(known) == len(values) else None


def _tp_bytes(arm: Arm, windows: Windows) -> float | None:
    """Bytes that rank 0 sent up to `windows.end`, mean over seeds."""
    totals = [run.tp_bytes[run.steps <= windows.end].sum() for run in arm.runs if run.tp_bytes is not None]
    return float(statistics.fmean(totals)) if len(totals) == len(arm.runs) else None


def _tokens_per_s(arm: Arm, windows: Windows) -> float | None:
    """Median over steps, so that start-up, validation and checkpoints do not count; mean over seeds."""
    medians = [
        statistics.median(run.tokens_per_s[run.steps <= windows.end].tolist())
        for run in arm.runs
        if run.tokens_per_s is not None
    ]
    return statistics.fmean(medians) if len(medians) == len(arm.runs) else None


def _mean_and_spread(statistic: dict[str, Any] | None) -> str:
    if statistic is None:
        return MISSING
    spread = f" ± {statistic['sd']:.4f}" if statistic["n"] > 1 else ""
    return f"{statistic['mean']:.4f}{spread}"


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def _text(value: object) -> str:
    return MISSING if value is None else str(value)


def _pairs(values: dict[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if values else MISSING


def _bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    power = min(4, max(0, int(math.log10(count) // 3))) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
