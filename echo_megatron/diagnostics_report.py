"""`echo-megatron inspect`: what `diagnostics.Inspector` measured in a run, from the run's TensorBoard events."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from echo_megatron.config import Direction
from echo_megatron.diagnostics import QUANTITIES
from echo_megatron.event_files import load_scalars
from echo_megatron.run_folder import finite

PREFIX = "echo/"
_LAYER = re.compile(r"layers\.(\d+)\.")
COLUMNS = {
    "relative_error": ("relative error", "{:.4f}"),
    "injected_error": ("injected", "{:.4f}"),
    "accumulated_error": ("|S|", "{:.3g}"),
    "bound_used": ("of bound", "{:.3f}"),
    "amax": ("amax", "{:.3g}"),
    "saturated": ("saturated", "{:.2%}"),
    "underflowed": ("underflowed", "{:.2%}"),
    "bytes": ("bytes a call", "{:,.0f}"),
    "exact_calls": ("exact calls", "{:.0f}"),
}
# The bound leaves the rounding of a bf16 or compact state out; full feedback, whose bound is one error, shows it.
STATE_ROUNDING = 1.1
_OFTEN_ALIKE = ("saturated", "underflowed", "bytes", "exact_calls")  # below the table where all sites agree


@dataclass(frozen=True)
class SiteValues:
    """A site's quantities in one step; one that was not logged is absent."""

    direction: str
    site: str
    values: dict[str, float]


@dataclass(frozen=True)
class Inspection:
    """What a run measured: its steps, and the sites of each in the order of their pass, forward first."""

    run: Path
    steps: dict[int, list[SiteValues]]

    def step(self, number: int | None) -> int:
        """`number`, or the last step that was measured.

        Raises:
            ValueError: the step was not measured.
        """
        if number is None:
            return max(self.steps)
        if number not in self.steps:
            raise ValueError(f"{self.run}: step {number} was not measured; expected one of {_listed(self.steps)}")
        return number


def load_inspection(run: Path) -> Inspection:
    """The measurements of a run folder, or of any folder with TensorBoard events of one run.

    Raises:
        FileNotFoundError: there are no event files.
        ValueError: they hold no measurements, or lie in several folders.
    """
    scalars = load_scalars(run, PREFIX)
    steps: dict[int, dict[tuple[str, str], dict[str, float]]] = {}
    for tag, logged in scalars.items():
        parts = tag.split("/")
        if len(parts) < 4 or parts[1] not in Direction.__members__ or parts[-1] not in QUANTITIES:
            continue
        for step, value in logged.items():
            sites = steps.setdefault(step, {})
            sites.setdefault((parts[1], "/".join(parts[2:-1])), {})[parts[-1]] = value
    if not steps:
        raise ValueError(
            f"{run}: its events hold no measurements (tags {PREFIX}…); run it with inspect_every, see docs/inspect.md"
        )
    return Inspection(
        run,
        {
            step: sorted((SiteValues(*key, values) for key, values in steps[step].items()), key=_place)
            for step in sorted(steps)
        },
    )


def _place(site: SiteValues) -> tuple[int, int]:
    """By direction and layer, the last layer first in a backward pass; inside a layer as logged, that is as called."""
    direction = list(Direction.__members__).index(site.direction)
    found = _LAYER.search(site.site)
    layer = int(found[1]) if found else 0
    return direction, -layer if site.direction == Direction.backward.name else layer


def remarks(sites: Sequence[SiteValues]) -> list[str]:
    """What is out of its range, one line a kind."""
    kinds = {
        "the sum is not finite": lambda v: not np.isfinite(v.get("relative_error", 0.0)),
        "the accumulated error exceeds its bound": lambda v: v.get("bound_used", 0.0) > STATE_ROUNDING,
        "groups underflowed": lambda v: v.get("underflowed", 0.0) > 0,
    }
    lines = []
    for what, is_out in kinds.items():
        names = [f"{site.direction} {site.site}" for site in sites if is_out(site.values)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"{what} at {len(names)} of {len(sites)} sites: {', '.join(names[:3])}{more}")
    return [f"{line}; see docs/inspect.md" for line in lines]


def show(inspection: Inspection, step: int, console: Console) -> None:
    """Print the table of one step and what is out of its range."""
    for direction in Direction.__members__:
        sites = [site for site in inspection.steps[step] if site.direction == direction]
        if not sites:
            continue
        shown = [name for name in COLUMNS if any(name in site.values for site in sites)]
        alike = [name for name in shown if name in _OFTEN_ALIKE and len({site.values.get(name) for site in sites}) == 1]
        caption = ", ".join(f"{COLUMNS[name][0]} {_cell(sites[0], name)}" for name in alike)
        title = f"{inspection.run.name}, step {step}, {direction}"
        table = Table(title=title, caption=f"at every site: {caption}" if caption else None)
        table.add_column("site", overflow="fold")
        shown = [name for name in shown if name not in alike]
        for name in shown:
            table.add_column(COLUMNS[name][0], justify="right")
        for site in sites:
            table.add_row(_short(site.site), *(_cell(site, name) for name in shown))
        console.print(table)
    for line in remarks(inspection.steps[step]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(f"measured steps: {_listed(inspection.steps)}", markup=False, highlight=False, soft_wrap=True)


def _short(name: str) -> str:
    """`layers.3.mlp.linear_fc2` as `3 linear_fc2`: a terminal may have 80 columns."""
    found = _LAYER.search(name)
    return f"{found[1]} {name.rpartition('.')[2]}" if found else name


def _cell(site: SiteValues, name: str) -> str:
    return COLUMNS[name][1].format(site.values[name]) if name in site.values else ""


def to_json(inspection: Inspection, step: int) -> dict[str, Any]:
    """One step as plain data; a number that is not finite is None."""
    sites = [{"direction": site.direction, "site": site.site, **site.values} for site in inspection.steps[step]]
    content = {"run": str(inspection.run), "step": step, "measured_steps": list(inspection.steps), "sites": sites}
    plain: dict[str, Any] = finite(content)
    return plain


def draw(inspection: Inspection, step: int, path: Path) -> None:
    """Write relative error and accumulated error by site to `path` (PNG); the first measured step lies pale beneath."""
    directions = [d for d in Direction.__members__ if any(s.direction == d for s in inspection.steps[step])]
    figure = Figure(figsize=(5.5 * len(directions), 6.5), dpi=150, layout="constrained")
    figure.suptitle(inspection.run.name, fontsize=11)
    grid = figure.subplots(2, len(directions), squeeze=False)
    first = min(inspection.steps)
    for column, direction in enumerate(directions):
        for number, alpha in ((first, 0.35), (step, 1.0)) if first != step else ((step, 1.0),):
            sites = [site for site in inspection.steps[number] if site.direction == direction]
            _draw_errors(grid[0, column], sites, f"step {number}", alpha)
            _draw_accumulated(grid[1, column], sites, f"step {number}", alpha)
        grid[0, column].set_title(direction, fontsize=10)
    for axes in grid.flat:
        axes.set_xlabel("site, in the order of the pass")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.grid(color="0.92", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_errors(axes: Axes, sites: list[SiteValues], label: str, alpha: float) -> None:
    _draw(axes, sites, "relative_error", f"relative error, {label}", "#0072B2", ".-", alpha)
    _draw(axes, sites, "injected_error", f"injected by the call, {label}", "#E69F00", ".--", alpha)
    axes.set_ylabel("error / norm of the exact sum")
    axes.set_ylim(bottom=0)


def _draw_accumulated(axes: Axes, sites: list[SiteValues], label: str, alpha: float) -> None:
    _draw(axes, sites, "accumulated_error", f"accumulated error, {label}", "#0072B2", ".-", alpha)
    _draw(axes, sites, "accumulated_bound", f"its bound, {label}", "#000000", ".--", alpha)
    axes.set_yscale("log")
    axes.set_ylabel("norm")


def _draw(axes: Axes, sites: list[SiteValues], quantity: str, label: str, color: str, line: str, alpha: float) -> None:
    axes.plot(_column(sites, quantity), line, markersize=4, color=color, alpha=alpha, label=label)


def _column(sites: list[SiteValues], name: str) -> list[float]:
    return [site.values.get(name, np.nan) for site in sites]


def _listed(steps: dict[int, list[SiteValues]]) -> str:
    numbers = list(steps)
    shown = [str(number) for number in numbers]
    return ", ".join(shown) if len(shown) <= 12 else ", ".join((*shown[:5], "…", *shown[-5:]))


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """`echo-megatron inspect`; 0, or 2 with a message where there is nothing to show."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, or folder of TensorBoard events")
    parser.add_argument("--step", type=int, help="which measured step (default: the last)")
    parser.add_argument("--json", action="store_true", help="print the step as JSON instead of a table")
    parser.add_argument("--figure", type=Path, metavar="PNG", help="draw errors by site to this file")
    arguments = parser.parse_args(argv)
    try:
        inspection = load_inspection(arguments.run)
        step = inspection.step(arguments.step)
        if arguments.figure is not None:
            draw(inspection, step, arguments.figure)
    except (ValueError, OSError) as error:
        print(f"inspect: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(to_json(inspection, step), indent=2, allow_nan=False))
    else:
        show(inspection, step, Console())
    return 0
