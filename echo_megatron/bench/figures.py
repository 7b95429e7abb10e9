"""The figure: ratio to NCCL by size, a panel for each quantizer, and microseconds of small messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from echo_megatron.bench.rows import MIB
from echo_megatron.bench.tables import MATMULS, Key, series, size_label

# Okabe and Ito's colours, as in the loss figures: colour is the row, dashes are the compact state.
COLOURS = {
    "echo4": "#E69F00",
    "echo4_local": "#0072B2",
    "echo8_local": "#009E73",
    "echo4_local_critical": "#882255",
    "echo4_consensus_critical": "#D55E00",
    "echo4_paper_critical": "#CC79A7",
    "two_collective_4": "#8C6D31",
    "flashinfer_fp8": "#56B4E9",
    "symm_mem_two_shot": "#7F7F7F",
}
SMALL_COLOURS = {
    "nccl16": "#000000",
    "symm_mem_one_shot": "#B0B0B0",
    "symm_mem_two_shot": "#7F7F7F",
    "echo4_local": "#0072B2",
    "auto": "#56B4E9",
}
SHARE_COLOURS: dict[str, dict[str | None, str]] = {
    "echo4_reduce_scatter": {None: "#E69F00", "bf16": "#0072B2", "compact": "#0072B2"},
    "echo8_all_gather": {None: "#009E73"},
    "echo4_all_gather": {None: "#D55E00"},
}
POLICIES = {"rotated": "rotated (default)", "zero_aware": "zero_aware (the paper's)"}
SMALLEST = 256 * 1024  # of the ratios' panels
LARGEST_SMALL = 4 * MIB


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """Write the figure to `path` (PNG, 13 in wide, 150 dpi)."""
    figure = Figure(figsize=(13, 4.8), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.85))
    plain = [entry for entry in results["rows"] if not entry.get("beside")]
    found = {key: by_size for key, by_size in series(plain).items() if key[3] in (None, MATMULS)}
    for axes, (policy, title) in zip((left, middle), POLICIES.items(), strict=True):
        shown = {key: by_size for key, by_size in found.items() if key[0] in COLOURS and key[1] in (None, policy)}
        for name in COLOURS:
            for key in (key for key in shown if key[0] == name):
                ratios = {size: entry["nccl_ratio"] for size, entry in shown[key].items() if size >= SMALLEST}
                _plot(axes, ratios, _style(key, COLOURS[name]))
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_title(f"times faster than NCCL: {title}", fontsize=10)
        _finish(axes, sorted({entry["bytes"] for entry in plain if entry["bytes"] >= SMALLEST}))
    middle.sharey(left)
    for name, colour in SMALL_COLOURS.items():
        for key in (key for key in found if key[0] == name and key[1] in (None, "rotated")):
            times = {size: 1e3 * entry["ms"] for size, entry in found[key].items() if size <= LARGEST_SMALL}
            _plot(right, times, _style(key, colour))
    right.set_title("small messages, µs (rotated)", fontsize=10)
    right.set_ylim(bottom=0)
    _finish(right, sorted({entry["bytes"] for entry in plain if entry["bytes"] <= LARGEST_SMALL}))
    figure.suptitle(
        f"One all-reduce, {results['world_size']} × {results['machine']['gpu'] or 'CPU process'}, BF16 bytes a rank",
        fontsize=11,
    )
    figure.savefig(path)


def draw_shares(path: Path, results: Mapping[str, Any]) -> None:
    """As `draw`, of sequence parallelism's collectives (PNG, 10 in wide, 150 dpi)."""
    figure = Figure(figsize=(10, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    found = series(results["rows"])
    sizes = sorted({entry["bytes"] for entry in results["rows"]})
    for axes, (policy, title) in zip(panels, POLICIES.items(), strict=True):
        for key, by_size in found.items():
            if key[0] in SHARE_COLOURS and key[1] == policy:
                style = _style(key, SHARE_COLOURS[key[0]][key[2]])
                if key[0] == "echo4_reduce_scatter" and key[2] is None:
                    style["label"] = f"{key[0]}, no compensation"
                _plot(axes, {size: entry["nccl_ratio"] for size, entry in by_size.items()}, style)
        axes.axhline(1, color="0.5", linewidth=0.8)
        axes.set_title(f"times faster than NCCL: {title}", fontsize=10)
        _finish(axes, sizes, with_legend=False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False
    )
    figure.suptitle(
        f"Reduce-scatter and all-gather, {results['world_size']} × {results['machine']['gpu'] or 'CPU process'}, "
        "BF16 bytes a rank of the larger tensor",
        fontsize=11,
    )
    figure.savefig(path)


def _plot(axes: Axes, values: Mapping[int, float], style: Mapping[str, Any]) -> None:
    """A line by size; none, and no place in the legend, where the panel has no point of it."""
    if values:
        axes.plot(sorted(values), [values[size] for size in sorted(values)], **style)


def _style(key: Key, colour: str) -> dict[str, Any]:
    name, _, state_dtype, _ = key
    compact = state_dtype == "compact"
    return {
        "color": colour,
        "linestyle": "--" if compact else "-",
        "marker": "s" if compact else "o",
        "markersize": 3.5,
        "linewidth": 1.4,
        "label": f"{name}, compact state" if compact else name,
    }


def _finish(axes: Axes, sizes: Sequence[int], with_legend: bool = True) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_label(size) for size in sizes], rotation=60, fontsize=7)
    axes.minorticks_off()
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if with_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, loc="upper left")
