"""Accumulated error of a pass of N sites: no compensation, each residual and what is made of it, how state is stored.

usage: python scripts/error_feedback_simulation.py [--out docs/results] [--seeds 5]

A site's partial outputs are n independent Student-t(5) values a rank, of variance 5/3: not scaled to one. From one site
to the next they follow x <- rho x + sqrt(1 - rho^2) fresh, of correlation rho. S_N is the sum over the pass of what the
ranks received minus the sum of what they contributed, without the correction; its rms is over the n elements. S_1 is
the error of one site alone. All arms of a row see the same data.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from echo_megatron.config import PAPER_FEEDBACK, Direction, EchoConfig
from echo_megatron.reference import SimulatedGroup
from echo_megatron.result_files import made_by, markdown_table, provenance_lines, write_results
from echo_megatron.sites import Site

DEGREES_OF_FREEDOM = 5
AVERAGES = {**vars(PAPER_FEEDBACK), "residual": "local"}  # the paper's coefficients on the rank's own error
FAMILIES = {"zero_aware": "echo4_paper", "rotated": "echo4"}  # the preset whose wire it is
# By its name without the family: what differs from the family's preset.
FORMS: dict[str, dict[str, Any]] = {
    "none": {"eta": 0.0},
    "consensus": {"residual": "consensus"},
    "averages": {**AVERAGES, "state_dtype": "bf16"},
    "local": {"residual": "local"},
    "local fp32": {"residual": "local", "state_dtype": "fp32"},
    "local bf16": {"residual": "local", "state_dtype": "bf16"},
    "averages fp32": {**AVERAGES, "state_dtype": "fp32"},
}
ARMS = {
    f"{family} {form}": EchoConfig.preset(preset, **options)
    for family, preset in FAMILIES.items()
    for form, options in FORMS.items()
}
# Columns of the tables and the arm of each, without its family.
RESIDUALS = {
    "none": "none",
    "consensus": "consensus",
    "local, averages": "averages",
    "local, full feedback": "local",
}
STATES = {
    "full feedback, fp32": "local fp32",
    "bf16": "local bf16",
    "compact": "local",
    "averages, fp32": "averages fp32",
    "averages, bf16": "averages",
}
PROTOTYPE_NUM_SITES = 56
# Of the independent prototype that chose the residual, same set-up; it has no rotated arms and no full feedback.
PROTOTYPE: dict[tuple[str, int, float], float] = {
    (f"zero_aware {mode}", world_size, rho): value
    for world_size, by_mode in {
        2: {"none": (2.14, 1.99, 1.80), "consensus": (0.65, 0.67, 0.79), "averages": (0.63, 0.59, 0.53)},
        4: {"none": (3.16, 3.00, 2.72), "consensus": (0.98, 1.09, 1.48), "averages": (0.94, 0.89, 0.81)},
        8: {"none": (4.53, 4.33, 3.96), "consensus": (1.44, 1.67, 2.41), "averages": (1.34, 1.29, 1.19)},
    }.items()
    for mode, row in by_mode.items()
    for rho, value in zip((0.0, 0.5, 0.9), row, strict=True)
}
# The prototype is one draw with three digits. Tails of t(5) make draws of this size differ by up to 2 %.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Setup:
    """A row's size.

    Attributes:
        world_size: P.
        rho: correlation of a site's partial outputs with the next site's.
        num_sites: N.
        num_values: elements of a site.
    """

    world_size: int
    rho: float
    num_sites: int
    num_values: int


def student_t(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32 Student-t(5) values, variance 5/3."""
    normal = torch.randn(shape, generator=generator)
    chi_square = torch.randn((DEGREES_OF_FREEDOM, *shape), generator=generator).square().sum(0)
    return normal / (chi_square / DEGREES_OF_FREEDOM).sqrt()


def accumulated_errors(setup: Setup, seed: int) -> dict[str, tuple[float, float]]:
    """rms of S_1 and of S_N of every arm on one draw of the data."""
    generator = torch.Generator().manual_seed(seed)
    shape = (setup.world_size, setup.num_values)
    groups = {name: SimulatedGroup(setup.world_size, config) for name, config in ARMS.items()}
    errors = {name: torch.zeros(setup.num_values, dtype=torch.float64) for name in ARMS}
    first: dict[str, float] = {}
    contributions = student_t(shape, generator)
    for idx in range(setup.num_sites):
        if idx:
            fresh = student_t(shape, generator)
            contributions = setup.rho * contributions + (1 - setup.rho**2) ** 0.5 * fresh
        exact = contributions.double().sum(0)
        for name, group in groups.items():
            errors[name] += group.all_reduce(list(contributions), Site(idx, Direction.forward)).double() - exact
            first.setdefault(name, _rms(errors[name]))
    return {name: (first[name], _rms(error)) for name, error in errors.items()}


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def simulate(setups: list[Setup], seeds: int, console: Console) -> list[dict[str, Any]]:
    """A row for each setup and arm: mean and standard deviation over seeds, beside the prototype's value."""
    rows = []
    with Progress(console=console) as progress:
        task = progress.add_task("simulating", total=len(setups) * seeds)
        for setup in setups:
            draws = []
            for seed in range(seeds):
                draws.append(accumulated_errors(setup, seed))
                progress.advance(task)
            rows += [_row(setup, name, [draw[name] for draw in draws]) for name in ARMS]
    return rows


def _row(setup: Setup, arm: str, draws: list[tuple[float, float]]) -> dict[str, Any]:
    values = [last for _, last in draws]
    mean = statistics.fmean(values)
    same_pass = setup.num_sites == PROTOTYPE_NUM_SITES
    prototype = PROTOTYPE.get((arm, setup.world_size, setup.rho)) if same_pass else None
    return {
        "world_size": setup.world_size,
        "rho": setup.rho,
        "arm": arm,
        "algorithm": SimulatedGroup(setup.world_size, ARMS[arm]).algorithm.name,
        "state_dtype": ARMS[arm].state_dtype_of(Direction.forward).name if ARMS[arm].compensates else None,
        "mean_of_one_site": statistics.fmean(first for first, _ in draws),
        "mean": mean,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "prototype": prototype,
        "agrees": None if prototype is None else abs(mean - prototype) <= TOLERANCE * prototype,
    }


def markdown(results: dict[str, Any]) -> str:
    """The results as Markdown: one table an arm family, a line for each P and rho."""
    rows, setup = results["rows"], results["setup"]
    lines = [
        "# Accumulated error of one pass, simulated",
        "",
        f"rms of S_N over {setup['num_values']:,} elements after N = {setup['num_sites']} sites; partial outputs "
        f"Student-t(5), variance 5/3, of correlation rho from one site to the next; 4 bits, "
        f"mean ± standard deviation of {setup['seeds']} seeds.",
        "",
        "consensus: the paper's residual with its coefficients. local, averages: those coefficients on the rank's own "
        "rounding error. local, full feedback: that error is added whole to the next site's contribution. one site: "
        "rms of the error of the first site alone.",
        "",
        "## The paper's wire: zero_aware, g = 128, two-shot",
        "",
        "In brackets the value of an independent prototype. " + agreement(rows, setup["tolerance"]),
        "",
        *_family_table(rows, "zero_aware", RESIDUALS),
        "",
        "## Preset echo4: rotated, g = 32, 8-bit scale; one-shot at P = 2, two-shot above",
        "",
        "The same bytes. The preset is local, full feedback.",
        "",
        *_family_table(rows, "rotated", RESIDUALS),
        "",
        "## How the state is stored",
        "",
        "The local residual of both wires. Full feedback keeps the correction and, in fp32 and bf16, the fast average "
        "that it does not read: 8 and 4 bytes a value. compact, the preset's, is the correction alone in 8 bits with a "
        "BF16 scale for 32 values: 1.125 bytes.",
        "",
        "zero_aware:",
        "",
        *_family_table(rows, "zero_aware", STATES),
        "",
        "rotated:",
        "",
        *_family_table(rows, "rotated", STATES),
        "",
        *provenance_lines(results["made_by"]),
    ]
    return "\n".join(lines) + "\n"


def agreement(rows: list[dict[str, Any]], tolerance: float) -> str:
    """How many rows agree with the prototype, and which do not."""
    compared = [row for row in rows if row["prototype"] is not None]
    if not compared:
        return "No row has one at this size."
    misses = [f"{row['arm']} at P = {row['world_size']}, rho = {row['rho']}" for row in compared if not row["agrees"]]
    text = f"{len(compared) - len(misses)} of {len(compared)} agree within {tolerance:.0%}"
    return f"{text}; not: {', '.join(misses)}." if misses else f"{text}."


def _family_table(rows: list[dict[str, Any]], family: str, columns: dict[str, str]) -> list[str]:
    by_key = {(row["world_size"], row["rho"], row["arm"]): row for row in rows}
    keys = list(dict.fromkeys((row["world_size"], row["rho"]) for row in rows))
    lines = []
    for world_size, rho in keys:
        cells = [by_key[world_size, rho, f"{family} {form}"] for form in columns.values()]
        one_site = f"{cells[0]['mean_of_one_site']:.3f}"
        lines.append([str(world_size), str(rho), one_site, *map(_cell, cells)])
    return markdown_table(["P", "rho", "one site", *columns], lines)


def _cell(row: dict[str, Any]) -> str:
    spread = "" if row["sd"] is None else f" ± {row['sd']:.3f}"
    prototype = "" if row["prototype"] is None else f" ({row['prototype']:.2f})"
    return f"{row['mean']:.3f}{spread}{prototype}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Accumulated error of a pass under error feedback, simulated.")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sites", type=int, default=PROTOTYPE_NUM_SITES, help="N")
    parser.add_argument("--values", type=int, default=16384, help="elements of a site")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rhos", type=float, nargs="+", default=[0.0, 0.5, 0.9])
    args = parser.parse_args(arguments)
    for name in ("seeds", "sites", "values"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
    if bad := [rho for rho in args.rhos if not 0 <= rho < 1]:
        parser.error(f"--rhos: expected numbers in [0, 1), got {bad[0]}")
    if bad := [world_size for world_size in args.world_sizes if not 2 <= world_size <= 8]:
        parser.error(f"--world-sizes: expected 2 to 8, got {bad[0]}")

    options = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    console = Console(stderr=True)
    setups = [Setup(p, rho, args.sites, args.values) for p in args.world_sizes for rho in args.rhos]
    results: dict[str, Any] = {
        "setup": {
            "num_sites": args.sites,
            "num_values": args.values,
            "seeds": args.seeds,
            "distribution": "Student-t(5), variance 5/3",
            "error": "rms over elements of the sum over sites of output minus exact sum",
            "tolerance": TOLERANCE,
        },
        "rows": simulate(setups, args.seeds, console),
        "made_by": made_by("scripts/error_feedback_simulation.py", options, torch.device("cpu"), "torch"),
    }
    text = markdown(results)
    json_path = write_results(args.out, "error_feedback_simulation", results, text)
    print(text)
    console.print(f"written: {json_path} and .md beside it")


if __name__ == "__main__":
    main()
