"""Times training steps and prefills of whole models: 16-bit, Echo, and without the sites' all-reduces (the bound).

Run by torchrun, one process a GPU, all of them one tensor-parallel group. Every part writes the results anew, so that
a run which is cut leaves what it has measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from echo_megatron.arguments import positive
from echo_megatron.bench.launch import add_run_options, launch, load_percent, refuse_unknown
from echo_megatron.bench.step_load import Load
from echo_megatron.bench.step_models import DEFAULT_MODELS, MODELS
from echo_megatron.bench.step_timing import Ranks
from echo_megatron.config import TransportName
from echo_megatron.result_files import write_results

LOADS = (0, 50, 75, 100)


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT_MODELS))
    parser.add_argument(
        "--settings", nargs="+", help="these and nccl16 at every load; default all, at loads above 0 the three of them"
    )
    parser.add_argument(
        "--loads",
        "--load",
        nargs="+",
        type=load_percent,
        default=list(LOADS),
        help="duty cycles of the copies, in per cent",
    )
    parser.add_argument(
        "--layers", type=positive, help="transformer layers; default the model's; fewer where they do not fit"
    )
    parser.add_argument("--batch", type=positive, help="sequences; default by model")
    parser.add_argument("--sequence", type=positive, help="tokens of a sequence; default by model")
    parser.add_argument("--rounds", type=positive, default=4, help="visits to every setting, at each load, at most")
    parser.add_argument("--steps", type=positive, default=1, help="timed steps of a visit, and timed prefills")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiler")
    add_run_options(parser, name="step", budget_s=380.0)
    options = parser.parse_args(arguments)
    if options.settings:
        from echo_megatron.bench.step_settings import all_settings

        refuse_unknown(parser, all_settings(options.timeout_s, TransportName[options.transport]), options.settings)
    options.loads = sorted(set(options.loads))
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "bench_step.py") -> int:
    """Entry point; returns the exit status."""
    start = time.monotonic()
    options = parse_arguments(arguments, prog)

    def run(device: torch.device, ranks: Ranks, load: Load | None) -> int:
        from echo_megatron.bench.step_run import StepBench

        return StepBench(options, device, ranks, load, start).run()

    return launch("scripts/bench_step.py", options, run, render)


def render(path: Path) -> None:
    """Markdown and figure beside a JSON of results."""
    from echo_megatron.bench import step_figure, step_tables

    results = json.loads(path.read_text(encoding="utf-8"))
    results["rows"] = step_tables.with_ratios(results["rows"])  # an older file gets what rows have since
    write_results(path.parent, path.stem, results, step_tables.markdown(results))
    step_figure.draw(path.with_suffix(".png"), results)
