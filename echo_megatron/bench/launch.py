"""How a bench of whole models starts: its common options, and torchrun's processes as one tensor-parallel group."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from echo_megatron.bench.step_load import Load
from echo_megatron.bench.step_models import TRANSFORMER_ENGINE, layers_kind
from echo_megatron.bench.step_timing import Ranks
from echo_megatron.config import TransportName
from echo_megatron.pretrain.quiet import quieten_libraries

Run = Callable[[torch.device, Ranks, Load | None], int]


def add_run_options(parser: argparse.ArgumentParser, name: str, budget_s: float) -> None:
    """Options that every bench of whole models has; `name` and `budget_s` are defaults."""
    parser.add_argument("--budget-s", type=float, default=budget_s, help="seconds that the parts are fitted into")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long a rank waits for another")
    parser.add_argument("--transport", choices=list(TransportName.__members__), default="auto", help="of Echo's")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--name", default=name)
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing: Markdown and figure of a result")


def refuse_unknown(parser: argparse.ArgumentParser, known: Iterable[str], settings: Sequence[str]) -> None:
    """Ends the command, before anything starts, where `settings` has a name that is not `known`."""
    if unknown := sorted(set(settings) - set(known)):
        parser.error(f"--settings: expected some of {', '.join(known)}; got {', '.join(unknown)}")


def launch(script: str, options: argparse.Namespace, run: Run, render: Callable[[Path], None]) -> int:
    """Runs a bench on torchrun's processes, or renders a result.

    Args:
        script: its path in the repository.
        options: those of `add_run_options`, and `loads`.
        run: of this rank's device, the ranks' agreements and its copier; returns the exit status.
        render: writes Markdown and figure beside a JSON of results.

    Returns:
        The exit status: 2 where the processes are not torchrun's, or `run` refuses by a ValueError.
    """
    if options.render:
        render(options.render)
        return 0
    if "LOCAL_RANK" not in os.environ:
        print(
            f"error: expected to be started by torchrun, one process a GPU: torchrun --nproc-per-node 2 {script}",
            file=sys.stderr,
        )
        return 2
    return on_ranks(run, any(options.loads), options.timeout_s)


def on_ranks(run: Run, has_load: bool, timeout_s: float) -> int:
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


def _on_rank(run: Run, device: torch.device, load: Load | None, timeout_s: float) -> int:
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


def load_percent(text: str) -> int:
    if not text.isdecimal() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"expected a duty cycle of 0 to 100 per cent, got {text!r}")
    return int(text)
