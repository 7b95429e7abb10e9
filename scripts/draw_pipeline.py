"""Draw docs/pipeline.png: the iterations of one team of the all-reduce kernel, and the way of one record.

usage: python scripts/draw_pipeline.py [--out docs/pipeline.png]
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from draw_how_it_works import GREY, INK, SEGMENT_COLOURS, arrow, save, tint
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

DEPTH = 2
NUM_TILES = 8
RING = 16  # slots; a power of two that holds 3 depth + 2, at the largest depth
SHOWN = 2  # the tile whose way is drawn
PUSHED = 13  # the tile being written in the ring

SLOT, SLOT_PITCH = 0.29, 0.315
RING_LEFT, RING_Y, FLAGS_Y = 4.05, 3.58, 1.22

CELL, GAP = 0.66, 0.16
LEFT = 1.75
LANES = {"push": 9.35, "reduce": 7.75, "tail": 6.15}  # lower edge
OTHERS, MARKED = SEGMENT_COLOURS[0], SEGMENT_COLOURS[1]


def x_of(iteration: int) -> float:
    """Left edge of an iteration's cells."""
    return LEFT + iteration * (CELL + GAP)


def tile(ax: Axes, x: float, y: float, number: int, colour: str, dark: bool, size: float = CELL) -> None:
    """A tile or its slot, with its number."""
    face = colour if dark else tint(colour)
    ax.add_patch(Rectangle((x, y), size, size, facecolor=face, edgecolor=colour, linewidth=1.3, zorder=4))
    ink = "white" if dark else INK
    ax.text(x + size / 2, y + size / 2 - 0.01, str(number), ha="center", va="center", color=ink, fontsize=11, zorder=5)


def draw_iterations(ax: Axes) -> None:
    """What a team does in each iteration: three tiles in three phases."""
    lags = {"push": 0, "reduce": DEPTH, "tail": 2 * DEPTH}
    texts = {
        "push": "quantize, store in\nthe peers' memory",
        "reduce": "add the peers' records,\nquantize the sum, store",
        "tail": "decode the peers'\nsums, write y",
    }
    ax.text(LEFT - 0.25, 10.85, "iteration", ha="right", va="center", fontsize=10.5, color=GREY)
    for iteration in range(NUM_TILES + 2 * DEPTH):
        x = x_of(iteration) + CELL / 2
        ax.text(x, 10.85, str(iteration), ha="center", va="center", fontsize=10.5, color=GREY)
    for number, (phase, lag) in enumerate(lags.items(), 1):
        y = LANES[phase]
        ax.text(
            *(LEFT - 0.25, y + CELL / 2),
            f"{number}  {phase}",
            ha="right",
            va="center",
            fontsize=13,
            fontweight="bold",
            color=INK,
        )
        for number_of_tile in range(NUM_TILES):
            x = x_of(number_of_tile + lag)
            marked = number_of_tile == SHOWN
            tile(ax, x, y, number_of_tile, MARKED if marked else OTHERS, dark=marked)
        end = x_of(NUM_TILES + lag) + 0.05
        if phase == "tail":
            ax.text(x_of(0) - 0.05, y + CELL / 2, texts[phase], va="center", fontsize=10, color=INK, linespacing=1.3)
        else:
            ax.text(end, y + CELL / 2, texts[phase], va="center", fontsize=10, color=INK, linespacing=1.3)
    for upper, lower, lag in (("push", "reduce", 0), ("reduce", "tail", DEPTH)):
        start = (x_of(SHOWN + lag) + CELL / 2, LANES[upper] - 0.04)
        end_point = (x_of(SHOWN + lag + DEPTH) + CELL / 2 - 0.05, LANES[lower] + CELL + 0.04)
        arrow(ax, start, end_point, MARKED)
    middle = x_of(SHOWN + DEPTH) + CELL / 2
    ax.text(middle + 0.1, 9.0, "its records cross the link while", fontsize=10, color=MARKED, va="center")
    ax.text(
        middle + 0.42, 8.72, f"tiles {SHOWN + 1} and {SHOWN + 2} are pushed", fontsize=10, color=MARKED, va="center"
    )
    middle = x_of(SHOWN + 2 * DEPTH) + CELL / 2
    ax.text(middle + 0.1, 7.26, "the peers' sums arrive", fontsize=10, color=MARKED, va="center")
    draw_depth(ax, SHOWN, SHOWN + DEPTH)


def draw_depth(ax: Axes, first: int, last: int) -> None:
    """The distance of two phases, above the first lane."""
    y = LANES["push"] + CELL + 0.18
    start, end = x_of(first) + CELL / 2, x_of(last) + CELL / 2
    ax.plot([start, start, end, end], [y - 0.06, y + 0.06, y + 0.06, y - 0.06], color=INK, linewidth=1.1)
    ax.text((start + end) / 2, y + 0.2, f"depth {DEPTH}", ha="center", va="center", fontsize=10, color=INK)


def frame(ax: Axes, x: float, y: float, width: float, height: float, title: str) -> None:
    """A rank."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0.02,rounding_size=0.15",
            facecolor="white",
            edgecolor=GREY,
            linewidth=1.1,
        )
    )
    ax.text(x + 0.2, y + height - 0.3, title, va="center", fontsize=11.5, fontweight="bold", color=INK)


def part(ax: Axes, x: float, y: float, width: float, height: float, text: str, face: str | tuple[float, ...]) -> None:
    """Warps, with what they do."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=INK, linewidth=1.1, zorder=4))
    ax.text(
        *(x + width / 2, y + height / 2),
        text,
        ha="center",
        va="center",
        fontsize=10.5,
        color=INK,
        linespacing=1.35,
        zorder=5,
    )


def step(ax: Axes, x: float, y: float, number: int) -> None:
    """A numbered circle on an arrow."""
    ax.add_patch(plt.Circle((x, y), 0.17, facecolor="white", edgecolor=MARKED, linewidth=1.3, zorder=6))
    ax.text(x, y - 0.01, str(number), ha="center", va="center", fontsize=10, color=MARKED, zorder=7)


def draw_record(ax: Axes) -> None:
    """From a team of one rank to the same team of another, through the ring in the receiver's memory."""
    frame(ax, -0.2, 0.55, 3.35, 4.5, "rank 0, a thread block")
    part(ax, 0.05, 3.05, 2.85, 1.25, "a team: 4 warps,\na tile of 4,096 values", tint(OTHERS))
    part(ax, 0.05, 0.85, 2.85, 1.05, "send warp\nof all teams", "#eeeeee")
    frame(ax, 3.75, 0.55, 9.5, 4.5, "rank 1")
    part(ax, 10.15, 3.05, 2.85, 1.25, "the same team", tint(OTHERS))
    part(ax, 10.15, 0.85, 2.85, 1.05, "receive warp\nof all teams", "#eeeeee")

    draw_ring(ax)
    end = RING_LEFT + RING * SLOT_PITCH
    ways = (
        ((2.92, 3.78), (RING_LEFT - 0.06, RING_Y + SLOT / 2), (3.45, 3.73)),
        ((1.47, 3.03), (1.47, 1.94), (1.47, 2.5)),
        ((2.92, 1.37), (RING_LEFT - 0.06, FLAGS_Y + SLOT / 2), (3.45, 1.37)),
        ((end + 0.02, FLAGS_Y + SLOT / 2), (10.12, 1.37), (9.55, 1.37)),
        ((11.57, 1.92), (11.57, 3.02), (11.57, 2.45)),
        ((end + 0.02, RING_Y + SLOT / 2), (10.12, 3.73), (9.55, 3.7)),
    )
    notes = (
        "all warps store codes and scales",
        "each warp counts its stores, in shared memory",
        "one system fence for all that is ready, then the flags",
        "polls and acquires; compares the signature",
        "tells the team, in shared memory",
        "the team loads the record",
    )
    for idx, ((start, stop, place), note) in enumerate(zip(ways, notes, strict=True)):
        arrow(ax, start, stop, MARKED)
        step(ax, *place, idx + 1)
        left, y = 0.1 + 6.6 * (idx // 3), 0.02 - 0.4 * (idx % 3)
        step(ax, left, y, idx + 1)
        ax.text(left + 0.35, y, note, va="center", fontsize=10.5, color=INK)


def draw_ring(ax: Axes) -> None:
    """The slots of one ring and their flags; the tile being written, and those that the reader may not have read."""
    first = PUSHED - 1 - 3 * DEPTH
    for slot in range(RING):
        x = RING_LEFT + slot * SLOT_PITCH
        current, unread = slot == PUSHED, first <= slot < PUSHED
        colour = MARKED if current else OTHERS if unread else "#bbbbbb"
        face = colour if current else tint(colour) if unread else "white"
        for y in (RING_Y, FLAGS_Y):
            ax.add_patch(Rectangle((x, y), SLOT, SLOT, facecolor=face, edgecolor=colour, linewidth=1.1, zorder=4))
            if current:
                ax.text(
                    x + SLOT / 2, y + SLOT / 2, "k", ha="center", va="center", fontsize=9.5, color="white", zorder=5
                )
    middle = RING_LEFT + RING * SLOT_PITCH / 2
    texts = (
        (middle, RING_Y + 0.62, f"ring of {RING} slots: tile k in slot k mod {RING}"),
        (middle + 0.75, RING_Y - 0.45, f"perhaps not yet read: k − 1 − 3·depth to k, {3 * DEPTH + 2} slots"),
        (middle, FLAGS_Y - 0.32, "flags, 64 bits: tile number + 1, exponent, signature"),
    )
    for x, y, text in texts:
        ax.text(x, y, text, ha="center", va="center", fontsize=10.5, color=INK)
    start, stop = RING_LEFT + first * SLOT_PITCH, RING_LEFT + PUSHED * SLOT_PITCH + SLOT
    y = RING_Y - 0.1
    ax.plot([start, start, stop, stop], [y, y - 0.12, y - 0.12, y], color=INK, linewidth=1.0)


def draw() -> plt.Figure:
    """The figure, 11 by 9.4 inches."""
    figure, ax = plt.subplots(figsize=(11, 9.4))
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.01, top=0.99)
    ax.set_xlim(-0.5, 13.5)
    ax.set_ylim(-1.05, 11.15)
    ax.axis("off")
    draw_iterations(ax)
    ax.plot([-0.2, 13.2], [5.55, 5.55], color=GREY, linewidth=0.8)
    draw_record(ax)
    return figure


def main(arguments: list[str] | None = None) -> None:
    save(draw, Path("docs/pipeline.png"), arguments)


if __name__ == "__main__":
    main()
