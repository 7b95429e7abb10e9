"""Draw docs/how_it_works.png: one two-shot all-reduce of four ranks, and the feedback from one site to the next.

usage: python scripts/draw_how_it_works.py [--out docs/how_it_works.png]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

# Okabe and Ito's palette, told apart by colour-blind readers; each segment carries its number as well.
SEGMENT_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
INK, GREY = "#222222", "#8a8a8a"
NUM_RANKS = 4
SHOWN = 1  # the segment whose way is drawn

CELL, GAP = 0.62, 0.06
ROW_HEIGHT = 1.06
COLUMNS = {"push": 1.0, "reduce": 5.35, "gather": 9.4}  # left edge of each stage
TOP = 4.0


def tint(colour: str) -> tuple[float, float, float]:
    """A colour mixed with white: what has been through a 4-bit code."""
    red, green, blue = to_rgb(colour)
    return 0.7 + 0.3 * red, 0.7 + 0.3 * green, 0.7 + 0.3 * blue


def row(rank: int) -> float:
    """Lower edge of a rank's cells."""
    return TOP - rank * ROW_HEIGHT


def column(stage: str, idx: int) -> float:
    """Left edge of a stage's cell."""
    return COLUMNS[stage] + idx * (CELL + GAP)


def cell(ax: Axes, x: float, y: float, segment: int, *, exact: bool, width: float = CELL, text: str = "") -> None:
    """A segment: dark where it is unquantized, pale where it is a code."""
    colour = SEGMENT_COLOURS[segment]
    face = colour if exact else tint(colour)
    ax.add_patch(Rectangle((x, y), width, CELL, facecolor=face, edgecolor=colour, linewidth=1.4))
    label = text or str(segment)
    ink = "white" if exact else INK
    ax.text(x + width / 2, y + CELL / 2 - 0.01, label, ha="center", va="center", color=ink, fontsize=11)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, bend: float = 0.0) -> None:
    """An arrow over everything else."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=13,
            linewidth=1.6,
            color=colour,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
            zorder=3,
        )
    )


def draw_collective(ax: Axes) -> None:
    """Push, reduce, gather; the arrows follow one segment."""
    titles = {
        "push": ("1  push", "quantize the segments\nof the other ranks, send them"),
        "reduce": ("2  reduce", "owner adds 3 decoded copies to its own\nunquantized segment, in rank order, FP32"),
        "gather": ("3  gather", "quantize the sum once more;\nevery rank decodes the same codes"),
    }
    centres = {"push": column("push", 2) - GAP / 2, "reduce": column("reduce", 0) + 1.36, "gather": column("gather", 2)}
    for stage, (title, text) in titles.items():
        x = centres[stage]
        ax.text(x, TOP + 1.92, title, ha="center", va="center", fontsize=14, fontweight="bold", color=INK)
        ax.text(x, TOP + 1.28, text, ha="center", va="center", fontsize=10.5, color=INK, linespacing=1.3)
    for rank in range(NUM_RANKS):
        ax.text(0.72, row(rank) + CELL / 2, f"rank {rank}", ha="right", va="center", fontsize=11.5, color=INK)
        for segment in range(NUM_RANKS):
            cell(ax, column("push", segment), row(rank), segment, exact=segment == rank)
            cell(ax, column("gather", segment), row(rank), segment, exact=False, text=f"Σ{segment}")
        draw_sum(ax, rank)
    draw_way_of_one_segment(ax)


def draw_sum(ax: Axes, rank: int) -> None:
    """The owner's sum: contributions in rank order, its own unquantized."""
    part = 0.48
    for source in range(NUM_RANKS):
        x = COLUMNS["reduce"] + source * (part + 0.2)
        cell(ax, x, row(rank), rank, exact=source == rank, width=part)
        if source:
            ax.text(x - 0.1, row(rank) + CELL / 2 - 0.01, "+", ha="center", va="center", fontsize=11, color=INK)


def draw_way_of_one_segment(ax: Axes) -> None:
    colour = SEGMENT_COLOURS[SHOWN]
    part = 0.48
    middle = row(SHOWN) + CELL / 2
    entry = COLUMNS["reduce"] - 0.12
    exit_x = COLUMNS["reduce"] + 3 * (part + 0.2) + part + 0.1
    push_end = column("push", NUM_RANKS - 1) + CELL + 0.1
    for rank in range(NUM_RANKS):
        y = row(rank) + CELL / 2
        if rank != SHOWN:
            arrow(ax, (push_end, y), (entry, middle + 0.11 * (SHOWN - rank)), colour)
        arrow(ax, (exit_x, middle + 0.07 * (SHOWN - rank)), (column("gather", 0) - 0.1, y), colour)
    ax.text((push_end + entry) / 2 + 0.05, row(3) - 0.02, "codes of\nsegment 1", ha="center", fontsize=10, color=colour)
    ax.text(
        (exit_x + column("gather", 0)) / 2, row(3) - 0.38, "code of\nthe sum", ha="center", fontsize=10, color=colour
    )


def box(ax: Axes, x: float, y: float, width: float, text: str, face: str) -> None:
    """A rounded box around centred text."""
    height = 0.95
    ax.add_patch(
        FancyBboxPatch(
            (x, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0.02,rounding_size=0.12",
            facecolor=face,
            edgecolor=INK,
            linewidth=1.2,
        )
    )
    ax.text(x + width / 2, y, text, ha="center", va="center", fontsize=11, color=INK, linespacing=1.35)


def draw_site(ax: Axes, x: float, name: str, y: float) -> None:
    """One site: the adder and the all-reduce."""
    ax.text(x + 1.0, y + 0.86, name, ha="center", va="center", fontsize=11.5, fontweight="bold", color=INK)
    box(ax, x, y, 2.0, "quantized\nall-reduce", "#e8eef4")


def draw_feedback(ax: Axes) -> None:
    """x' = x + c at every site; what a site rounds off goes into the correction of the next one."""
    sites, state = -2.25, -4.25
    first, second = 2.15, 8.35
    for x, name in ((first, "site t"), (second, "site t + 1")):
        adder = x - 0.85
        draw_site(ax, x, name, sites)
        ax.add_patch(plt.Circle((adder, sites), 0.2, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=4))
        ax.text(adder, sites - 0.02, "+", ha="center", va="center", fontsize=13, color=INK, zorder=5)
        arrow(ax, (adder - 0.95, sites), (adder - 0.22, sites), INK)
        arrow(ax, (adder + 0.22, sites), (x - 0.04, sites), INK)
        arrow(ax, (x + 2.04, sites), (x + 2.95, sites), INK)
        ax.text(adder - 0.72, sites + 0.2, "x", ha="center", fontsize=12, color=INK, style="italic")
        ax.text(adder + 0.5, sites + 0.2, "x′", ha="center", fontsize=12, color=INK, style="italic")
        ax.text(x + 2.5, sites + 0.2, "y", ha="center", fontsize=12, color=INK, style="italic")
    feedback = SEGMENT_COLOURS[0]
    box(ax, 3.95, state, 2.35, "c\nstate of the pass", tint(feedback))  # type: ignore[arg-type]
    # Site t gets the correction that earlier sites left.
    arrow(ax, (first - 0.85, sites - 1.1), (first - 0.85, sites - 0.23), feedback)
    ax.text(first - 1.0, sites - 0.8, "c", ha="right", va="center", fontsize=12.5, color=feedback, style="italic")
    arrow(ax, (first + 1.0, sites - 0.52), (3.9, state + 0.05), feedback, bend=0.25)
    ax.text(3.15, state - 0.02, "u", ha="right", va="center", fontsize=12.5, color=feedback, style="italic")
    ax.text(
        2.85,
        state - 0.02,
        "what this rank\nrounded off",
        ha="right",
        va="center",
        fontsize=10.5,
        color=feedback,
        linespacing=1.3,
    )
    arrow(ax, (6.35, state), (second - 0.85, sites - 0.23), feedback, bend=0.3)
    ax.text(7.55, state + 0.42, "c", ha="left", va="center", fontsize=12.5, color=feedback, style="italic")
    ax.text(
        7.95,
        state - 0.08,
        "x′ = x + c: the error comes back\nin the next sum with opposite sign.\nEach pass starts with c = 0.",
        ha="left",
        va="center",
        fontsize=10.5,
        color=INK,
        linespacing=1.35,
    )


def draw() -> plt.Figure:
    """The figure, 11 by 9.4 inches."""
    figure, ax = plt.subplots(figsize=(11, 9.4))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99)
    ax.set_xlim(-0.4, 12.6)
    ax.set_ylim(-4.95, 6.25)
    ax.axis("off")
    draw_collective(ax)
    legend_y = -0.45
    cell(ax, 3.0, legend_y, 0, exact=True, width=0.5, text=" ")
    ax.text(3.65, legend_y + CELL / 2, "unquantized, FP32", va="center", fontsize=10.5, color=INK)
    cell(ax, 6.6, legend_y, 0, exact=False, width=0.5, text=" ")
    ax.text(7.25, legend_y + CELL / 2, "through a 4-bit code", va="center", fontsize=10.5, color=INK)
    ax.plot([0.2, 12.2], [-0.85, -0.85], color=GREY, linewidth=0.8)
    draw_feedback(ax)
    return figure


def save(draw: Callable[[], plt.Figure], target: Path, arguments: list[str] | None) -> None:
    """The command line of a script that draws one figure of docs/how_it_works.md."""
    parser = argparse.ArgumentParser(description=f"Draw {target} for docs/how_it_works.md.")
    parser.add_argument("--out", type=Path, default=target, help="PNG (%(default)s)")
    args = parser.parse_args(arguments)
    figure = draw()
    # Without the version of matplotlib in it, the same drawing is the same file.
    figure.savefig(args.out, dpi=150, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    print(f"written: {args.out}")


def main(arguments: list[str] | None = None) -> None:
    save(draw, Path("docs/how_it_works.png"), arguments)


if __name__ == "__main__":
    main()
