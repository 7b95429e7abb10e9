"""The figure: ratio to NCCL by size, and times with the bounds of wire and HBM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echo_megatron.bench.tables import Entry, label_of, series, size_label

# Okabe and Ito's colours, as in the loss figures: colour is the row, dashes are the paper's quantizer.
COLOURS = {
    "nccl16": "#000000",
    "symm_mem_two_shot": "#7F7F7F",
    "two_collective_4": "#8C6D31",
    "flashinfer_fp8": "#56B4E9",
    "echo4": "#E69F00",
    "echo4_local": "#0072B2",
    "echo8_local": "#009E73",
    "echo4_consensus_critical": "#D55E00",
    "echo4_paper_critical": "#CC79A7",
}
BOUNDED = "echo4_local"  # whose bounds are drawn
MATMULS = "llama3_8b"  # of the critical rows


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Write the figure to `path` (PNG, 12 in wide, 150 dpi)."""
    figure = Figure(figsize=(12, 4.6), dpi=150, layout="constrained")
    ratios, times = figure.subplots(1, 2)
    shown = {key: by_size for key, by_size in series(_plain(results["rows"])).items() if key[0] in COLOURS}
    for key, by_size in shown.items():
        sizes = sorted(by_size)
        style: dict[str, Any] = {
            "color": COLOURS[key[0]],
            "linestyle": "--" if key[1] == "zero_aware" else "-",
            "marker": {"compact": "s", None: "o"}.get(key[2], "^"),
            "markersize": 3,
            "linewidth": 1.2,
            "label": label_of(key),
        }
        ratios.plot(sizes, [by_size[size]["nccl_ratio"] for size in sizes], **style)
        times.plot(sizes, [by_size[size]["ms"] for size in sizes], **style)
    _draw_bounds(times, results["rows"])
    ratios.axhline(1, color="0.6", linewidth=0.8)
    ratios.set_title("times faster than NCCL of the same run", fontsize=10)
    times.set_title(f"ms; dotted: bounds of {BOUNDED} (bf16): wire red, HBM blue", fontsize=10)
    times.set_yscale("log")
    ticks = sorted({entry["bytes"] for entry in _plain(results["rows"])})
    for axes in (ratios, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [size_label(size) for size in ticks], rotation=60, fontsize=7)
        axes.minorticks_off()
        axes.grid(color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = ratios.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7, frameon=False)
    figure.suptitle(
        f"One all-reduce, {results['world_size']} × {results['machine']['gpu'] or 'CPU process'}", fontsize=11
    )
    figure.savefig(path)


def _plain(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.get("beside") and entry.get("matmuls") in (None, MATMULS)]


def _draw_bounds(axes: Axes, entries: list[Entry]) -> None:
    """Bounds are times multiplied by the share of the bound that they reach."""
    own = [
        e for e in _plain(entries) if e["row"] == BOUNDED and e["policy"] == "rotated" and e["state_dtype"] == "bf16"
    ]
    for name, colour in (("wire_fraction", "#D55E00"), ("hbm_fraction", "#0072B2")):
        points = sorted((e["bytes"], e["ms"] * e[name]) for e in own if e[name] is not None)
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=":", linewidth=1.2) if points else None
