"""The figure of `bench_ttft`: speed-up of prefill by load and of decoding by batch, two panels for each model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echo_megatron.bench.step_figure import BOUND_COLOUR
from echo_megatron.bench.step_tables import BOUND, NATIVE
from echo_megatron.bench.ttft_models import ALL4, EARLY8, ECHO
from echo_megatron.figures import COLOURS

STYLES = {
    ECHO: (COLOURS["echo4"], "o"),
    EARLY8: (COLOURS["echo8"], "s"),
    ALL4: ("#56B4E9", "^"),
    BOUND: (BOUND_COLOUR, "D"),
}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Write the figure to `path` (PNG, 150 dpi)."""
    models = list(results["models"]) or [""]
    kind = "graph" if any("graph_ms" in row for row in results["decode"]) else "eager"
    figure = Figure(figsize=(max(6.0, 4.2 * len(models)), 6.4), dpi=150, layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharey="row")
    for above, below, model in zip(*panels, models, strict=True):
        prefill = [row for row in results["prefill"] if row["model"] == model]
        largest = max((row["batch"] for row in prefill), default=0)
        rows = [row for row in prefill if row["batch"] == largest]
        _lines(above, rows, "load", "speedup")
        above.set_title(f"{model}: time to first token, batch {largest}", fontsize=9)
        above.set_xlabel("background copies, % of the time", fontsize=8)
        rows = [row for row in results["decode"] if row["model"] == model]
        _lines(below, rows, "batch", f"{kind}_speedup")
        words = "as a CUDA graph" if kind == "graph" else "launched by Python"
        below.set_title(f"{model}: decoded tokens a second, {words}", fontsize=9)
        below.set_xlabel("batch", fontsize=8)
        if rows:
            below.set_xscale("log", base=2)
            batches = sorted({row["batch"] for row in rows})
            below.set_xticks(batches, [str(batch) for batch in batches])
    figure.suptitle(
        f"Times faster than 16 bits, {results['world_size']} × {results['machine']['gpu'] or 'CPU process'}; "
        "skipped is the bound",
        fontsize=10,
    )
    figure.savefig(path)


def _lines(axes: Axes, rows: list[Mapping[str, Any]], across: str, key: str) -> None:
    axes.axhline(1, color="0.3", linewidth=0.8)
    for setting, (colour, marker) in STYLES.items():
        own = {row[across]: row[key] for row in rows if row["setting"] == setting and row.get(key) is not None}
        if own:
            places = sorted(own)
            axes.plot(places, [own[x] for x in places], marker=marker, markersize=4, color=colour, label=setting)
    if any(row["setting"] == NATIVE for row in rows):
        axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
