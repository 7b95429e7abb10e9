"""Times inference of whole models: time to first token by batch and load, and decoded tokens a second.

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
PREFILL_BATCHES = (1, 4, 16)
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT_MODELS))
    parser.add_argument("--settings", nargs="+", help="these and nccl16; default all")
    parser.add_argument(
        *("--loads", "--load"), nargs="+", type=load_percent, default=list(LOADS), help="of prefills, in per cent"
    )
    parser.add_argument("--batches", nargs="+", type=positive, default=list(PREFILL_BATCHES), help="of prefills")
    parser.add_argument("--sequence", type=positive, help="tokens of a prompt; default by model")
    parser.add_argument("--decode-batches", nargs="*", type=positive, default=list(DECODE_BATCHES))
    parser.add_argument("--tokens", type=positive, default=16, help="timed tokens of a decoding visit")
    parser.add_argument("--layers", type=positive, help="transformer layers; default the model's")
    parser.add_argument("--rounds", type=positive, default=4, help="visits to every setting at most")
    parser.add_argument("--steps", type=positive, default=2, help="timed prefills of a visit")
    parser.add_argument("--no-graphs", action="store_true", help="decode without CUDA graphs alone")
    add_run_options(parser, name="ttft", budget_s=420.0)
    options = parser.parse_args(arguments)
    if options.settings:
        from echo_megatron.bench.ttft_models import serving_settings

        refuse_unknown(parser, serving_settings(options.timeout_s, TransportName[options.transport]), options.settings)
    for name in ("loads", "batches", "decode_batches"):
        setattr(options, name, sorted(set(getattr(options, name))))
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "bench_ttft.py") -> int:
    """Entry point; returns the exit status."""
    start = time.monotonic()
    options = parse_arguments(arguments, prog)

    def run(device: torch.device, ranks: Ranks, load: Load | None) -> int:
        from echo_megatron.bench.ttft_run import TtftBench

        return TtftBench(options, device, ranks, load, start).run()

    return launch("scripts/bench_ttft.py", options, run, render)


def render(path: Path) -> None:
    """Markdown and figure beside a JSON of results."""
    from echo_megatron.bench import ttft_figure, ttft_tables

    results = json.loads(path.read_text(encoding="utf-8"))
    write_results(path.parent, path.stem, results, ttft_tables.markdown(results))
    ttft_figure.draw(path.with_suffix(".png"), results)
