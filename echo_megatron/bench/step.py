"""Times training steps and prefills of whole models: 16-bit, Echo, and without the sites' all-reduces (the bound).

Run by torchrun, one process a GPU, all of them one tensor-parallel group. Every part writes the results anew, so that
a run which is cut leaves what it has measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from echo_megatron.bench.step_load import Load
from echo_megatron.bench.step_models import DEFAULT_MODELS, MODELS, TRANSFORMER_ENGINE, layers_kind
from echo_megatron.bench.step_timing import Ranks
from echo_megatron.config import TransportName
from echo_megatron.pretrain.quiet import quieten_libraries
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
    parser.add_argument("--budget-s", type=float, default=380.0, help="seconds that the parts are fitted into")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long a rank waits for another")
    parser.add_argument("--transport", choices=list(TransportName.__members__), default="auto", help="of Echo's")
    parser.add_argument("--no-profile", action="store_true", help="leave out the profiler")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--name", default="step")
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing: Markdown and figure of a result")
    options = parser.parse_args(arguments)
    options.loads = sorted(set(options.loads))
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "bench_step.py") -> int:
    """Entry point; returns the exit status."""
    start = time.monotonic()
    options = parse_arguments(arguments, prog)
    if options.render:
        render(options.render)
        return 0
    if "LOCAL_RANK" not in os.environ:
        print(
            "error: expected to be started by torchrun, one process a GPU: "
            "torchrun --nproc-per-node 2 scripts/bench_step.py",
            file=sys.stderr,
        )
        return 2

    def run(device: torch.device, ranks: Ranks, load: Load | None) -> int:
        from echo_megatron.bench.step_run import StepBench

        return StepBench(options, device, ranks, load, start).run()

    return on_ranks(run, any(options.loads), options.timeout_s)


def render(path: Path) -> None:
    """Markdown and figure beside a JSON of results."""
    from echo_megatron.bench import step_figure, step_tables

    results = json.loads(path.read_text(encoding="utf-8"))
    write_results(path.parent, path.stem, results, step_tables.markdown(results))
    step_figure.draw(path.with_suffix(".png"), results)


def on_ranks(run: Callable[[torch.device, Ranks, Load | None], int], has_load: bool, timeout_s: float) -> int:
    """Runs a bench on torchrun's processes, which become one tensor-parallel group.

    Args:
        run: of this rank's device, the ranks' agreements and its copier; returns the exit status.
        has_load: whether there is a copier.
        timeout_s: how long a rank waits for another.

    Returns:
        The exit status: 2 where `run` refuses by a ValueError.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron's order of communication; read by CUDA
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    use_cuda = torch.cuda.device_count() >= world_size
    device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
    peer = torch.device("cuda", (rank + 1) % world_size) if use_cuda else device
    load = Load(device, peer) if has_load else None  # its process starts while this one imports
    try:
        return _on_rank(run, device, load, timeout_s)
    except ValueError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if load is not None:
            load.close()


def _on_rank(
    run: Callable[[torch.device, Ranks, Load | None], int], device: torch.device, load: Load | None, timeout_s: float
) -> int:
    if int(os.environ["RANK"]):
        warnings.filterwarnings("ignore")  # the first rank's are enough
    quieten_libraries()
    if device.type == "cpu":
        from echo_megatron.pretrain.cpu_shims import install_cpu_shims

        install_cpu_shims()
    else:
        torch.cuda.set_device(device)
    if layers_kind(device) == TRANSFORMER_ENGINE:
        importlib.import_module("transformer_engine.pytorch")  # before Megatron-core looks for it
    from megatron.core import parallel_state

    timeout = timedelta(seconds=timeout_s)
    # No device_id: a gloo group beside a bound default group would be asked to connect on the GPU.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timeout)
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dist.get_world_size(),
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        # Longer than anything else waits: a rank that failed at once meets those that waited for it in vain.
        return run(device, Ranks(dist.new_group(backend="gloo", timeout=3 * timeout)), load)
    finally:
        gc.collect()  # a model's last references: its groups end before torch.distributed does
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def load_percent(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"expected a duty cycle of 0 to 100 per cent, got {text!r}")
    return int(text)
