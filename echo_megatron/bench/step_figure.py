"""The figure of `bench_step`: speed-up over 16 bits by load, Echo's and the bound, a panel for each model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from echo_megatron.bench.step_tables import BOUND, ECHO, NATIVE, QUANTITIES
from echo_megatron.figures import COLOURS

BOUND_COLOUR = "0.78"
MORE = {"echo8": COLOURS["echo8"], "echo4_bf16": "#56B4E9"}
WIDTH = 0.8


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Write the figure to `path` (PNG, 4 in high, 150 dpi)."""
    rows = [row for row in results["rows"] if row["setting"] != NATIVE and row["step_speedup"] is not None]
    models = list(dict.fromkeys(row["model"] for row in rows)) or [""]
    figure = Figure(figsize=(max(6.0, 4.2 * len(models)), 6.4), dpi=150, layout="constrained")
    panels = figure.subplots(len(QUANTITIES), len(models), squeeze=False, sharey=True)
    for line, (what, words) in zip(panels, QUANTITIES.items(), strict=True):
        for axes, model in zip(line, models, strict=True):
            of_model = [row for row in rows if row["model"] == model]
            loads = sorted({row["load"] for row in of_model})
            colours = {ECHO: COLOURS["echo4"], **MORE, BOUND: BOUND_COLOUR}
            shown = [name for name in colours if any(row["setting"] == name for row in of_model)]
            width = WIDTH / max(1, len(shown))
            measured = {load: [name for name in shown if _has(of_model, name, load)] for load in loads}
            for setting in shown:
                own = {row["load"]: row[f"{what}_speedup"] for row in of_model if row["setting"] == setting}
                places = (measured[load].index(setting) + 0.5 - len(measured[load]) / 2 for load in own)
                positions = [loads.index(load) + width * place for load, place in zip(own, places, strict=True)]
                gains = [value - 1 for value in own.values()]  # bars grow from 1, where nothing is gained
                bars = axes.bar(positions, gains, 0.92 * width, bottom=1, color=colours[setting], label=setting)
                words_of = [f"{value:.2f}" for value in own.values()]
                axes.bar_label(bars, words_of, fontsize=6, rotation=90, padding=2)
            axes.axhline(1, color="0.3", linewidth=0.8)
            axes.set_xticks(range(len(loads)), [f"{load} %" for load in loads])
            axes.set_title(f"{model}: {words}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].margins(y=0.12)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=max(1, len(labels)))
    for axes in panels[-1]:
        axes.set_xlabel("background copies, share of the time", fontsize=9)
    figure.suptitle(
        f"Times faster than 16 bits, {results['world_size']} × {results['machine']['gpu'] or 'CPU process'}; "
        "skipped is the bound",
        fontsize=10,
    )
    figure.savefig(path)


def _has(rows: Sequence[Mapping[str, Any]], setting: str, load: int) -> bool:
    return any((row["setting"], row["load"]) == (setting, load) for row in rows)
