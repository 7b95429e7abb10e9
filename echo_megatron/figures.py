"""The loss figure: the paper's Fig. 3 (full curve, tail with its spread) and the difference to the baseline."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from echo_megatron.loss_runs import FloatArray, IntArray
from echo_megatron.loss_statistics import Arm, Windows, difference_curve, mean_curve, moving_average, paired_runs

# Okabe and Ito's colours, which the colour-blind tell apart. An arm of this name has its colour in every figure.
COLOURS = {
    "nccl": "#000000",
    "echo4": "#0072B2",
    "echo4 without compensation": "#E69F00",
    "echo4_paper": "#D55E00",
    "echo8": "#009E73",
    "echo8_paper": "#CC79A7",
}
MORE_COLOURS = ("#56B4E9", "#CC79A7", "#009E73", "#E69F00", "#D55E00", "#0072B2", "#8C6D31", "#7F7F7F")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.5, 1), (6, 1.5, 1.5, 1.5), (3, 1, 1, 1, 1, 1))

MOST_IN_PANEL = 5  # arms whose legend fits beside the falling curve

Styles = dict[str, dict[str, Any]]  # label -> keywords of Axes.plot


def draw(path: Path, arms: list[Arm], baseline: Arm, windows: Windows, title: str, caption: str) -> None:
    """Write the figure to `path` (PNG, 12 in wide, 150 dpi)."""
    figure = Figure(figsize=(12, 4.1), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=11)
    full, tail, difference = figure.subplots(1, 3)
    colours = arm_colours([arm.label for arm in arms])
    others = [arm.label for arm in arms if arm is not baseline]
    styles = {label: _style(place, colours[label]) for place, label in enumerate(others)}
    # wide and pale underneath, so that a curve which lies on it is seen
    styles[baseline.label] = {"color": colours[baseline.label], "linewidth": 3.2, "alpha": 0.3, "zorder": 2}
    handles = _draw_full(full, arms, styles, windows)
    legend: dict[str, Any] = {"handles": handles, "fontsize": 8.5, "frameon": False, "handlelength": 3}
    if len(handles) <= MOST_IN_PANEL:
        full.legend(loc="upper right", **legend)
        figure.supxlabel(caption, fontsize=8, color="0.35")
    else:  # over the curve they would hide it
        figure.legend(loc="outside lower center", ncols=3, title=caption, title_fontsize=8, **legend)
    _draw_tail(tail, arms, styles, windows)
    _draw_difference(difference, arms, baseline, styles, windows)
    for axes in (full, tail, difference):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def arm_colours(labels: list[str]) -> dict[str, str]:
    """A colour for each label: its own in `COLOURS`, or one that is still free."""
    colours = {label: COLOURS[label] for label in labels if label in COLOURS}
    free = [colour for colour in MORE_COLOURS if colour not in colours.values()]
    for place, label in enumerate(label for label in labels if label not in colours):
        colours[label] = free[place % len(free)]
    return colours


def _style(place: int, colour: str) -> dict[str, Any]:
    return {"color": colour, "linewidth": 1.3, "dashes": DASHES[place % len(DASHES)], "zorder": 3 + place}


def _draw_full(axes: Axes, arms: list[Arm], styles: Styles, windows: Windows) -> list[Any]:
    """The legend's entries."""
    highest, lowest = [], []
    for arm in arms:
        steps, losses = mean_curve(arm)
        mean, _ = moving_average(steps, losses.mean(axis=0), windows.curve)
        axes.plot(steps, mean, label=_legend_label(arm), **styles[arm.label])
        _mark_nonfinite(axes, arm, styles[arm.label]["color"])
        # The first steps fall from ln(vocabulary) and would flatten all that follows.
        shown = mean[(steps > 0.1 * steps[-1]) & np.isfinite(mean)]
        highest += [shown.max()] if len(shown) else []
        lowest += [shown.min()] if len(shown) else []
    axes.axvspan(windows.end - windows.panel, windows.end, color="0.9", zorder=0, linewidth=0)
    if highest:
        _limit(axes, min(lowest), max(highest))
    axes.set_ylabel("training loss (nats/token)")
    axes.set_title(f"full run (y clipped), {_steps(windows.curve)} average", fontsize=10)
    handles, _ = axes.get_legend_handles_labels()
    if any(run.nonfinite_steps for arm in arms for run in arm.runs):
        handles.append(Line2D([], [], color="0.3", marker="x", linestyle="none", label="loss not finite"))
    return handles


def _draw_tail(axes: Axes, arms: list[Arm], styles: Styles, windows: Windows) -> None:
    start = windows.end - windows.panel
    edges: list[float] = []
    seeds = max(len(arm.runs) for arm in arms)
    for arm in arms:
        steps, losses = mean_curve(arm, windows.end)
        mean, spread = _band(steps, losses, windows.band)
        inside = (steps > start) & np.isfinite(mean)
        steps, mean, spread = steps[inside], mean[inside], spread[inside]
        colour = styles[arm.label]["color"]
        axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.10, linewidth=0, zorder=1)
        axes.plot(steps, mean, **styles[arm.label])
        _mark_nonfinite(axes, arm, colour, start, windows.end)
        edges += [*(mean - spread), *(mean + spread)]
    if edges:
        _limit(axes, min(edges), max(edges))
    axes.set_xlim(start, windows.end)
    axes.set_ylabel("training loss (nats/token)")
    over = "over steps" if seeds == 1 else "over seeds"
    axes.set_title(f"last {windows.panel:,} steps, {_steps(windows.band)} average, ±1 s.d. {over}", fontsize=10)


def _draw_difference(axes: Axes, arms: list[Arm], baseline: Arm, styles: Styles, windows: Windows) -> None:
    axes.axhline(0, **styles[baseline.label])
    edges: list[float] = [0.0]
    with_error = False
    for arm in arms:
        if arm is baseline:
            continue
        steps, rows = difference_curve(arm, baseline)
        full = steps >= steps[0] + windows.band - 1  # averages over fewer steps jump about at the start
        smooth = np.stack([moving_average(steps, row, windows.band)[0] for row in rows])[:, full]
        steps, mean = steps[full], smooth.mean(axis=0)
        error = smooth.std(axis=0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else np.zeros_like(mean)
        colour = styles[arm.label]["color"]
        if len(paired_runs(arm, baseline)) > 1:
            with_error = True
            axes.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0, zorder=1)
        axes.plot(steps, mean, **styles[arm.label])
        shown = (steps > 0.1 * windows.end) & np.isfinite(mean)
        edges += [*(mean - error)[shown], *(mean + error)[shown]]
    _limit(axes, min(edges), max(edges))
    axes.set_ylabel(f"loss − loss of {baseline.label} (nats/token)")
    band = " ± standard error" if with_error else ""
    axes.set_title(f"difference{band}, {_steps(windows.band)} average", fontsize=10)


def _band(steps: IntArray, losses: FloatArray, window: int) -> tuple[FloatArray, FloatArray]:
    """Moving average and its band: spread over the window's steps, or over seeds where there are several."""
    if len(losses) == 1:
        return moving_average(steps, losses[0], window)
    smooth = np.stack([moving_average(steps, row, window)[0] for row in losses])
    return smooth.mean(axis=0), smooth.std(axis=0, ddof=1)


def _mark_nonfinite(axes: Axes, arm: Arm, colour: object, start: float = -math.inf, end: float = math.inf) -> None:
    steps = [step for run in arm.runs for step in run.nonfinite_steps if start < step <= end]
    transform = axes.get_xaxis_transform()  # x in steps, y in fractions of the axes
    axes.plot(steps, [0.03] * len(steps), "x", color=str(colour), transform=transform, markersize=6, zorder=10)


def _legend_label(arm: Arm) -> str:
    unfinished = " (unfinished)" if any(run.finished is False for run in arm.runs) else ""
    return f"{arm.label}{f', {len(arm.runs)} seeds' if len(arm.runs) > 1 else ''}{unfinished}"


def _limit(axes: Axes, low: float, high: float) -> None:
    margin = 0.06 * (high - low) or 0.01
    axes.set_ylim(low - margin, high + margin)


def _steps(count: int) -> str:
    return f"{count}-step"
