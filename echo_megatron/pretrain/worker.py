"""One process of a run, as torchrun starts it: `torchrun … -m echo_megatron.pretrain.worker --config FILE`."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf

from echo_megatron.pretrain.quiet import quieten_libraries
from echo_megatron.pretrain.schema import PretrainConfig, from_composed

EXIT_USER_ERROR = 2
EXIT_NONFINITE = 3


def run_worker(config: PretrainConfig, command: str, launcher_pid: int | None = None) -> int:
    """Train in this process, one of those that torchrun started.

    Args:
        config: the run.
        command: what the user typed, for run.json.
        launcher_pid: process that started torchrun, or None where a user did.

    Returns:
        0: finished, or stopped with a checkpoint; 2: refused; 3: the loss was not finite.
    """
    rank = prepare_process(config)
    from echo_megatron.pretrain.distributed import distributed
    from echo_megatron.pretrain.loop import NonFiniteError, Trainer
    from echo_megatron.pretrain.preflight import preflight
    from echo_megatron.pretrain.stop import StopRequest

    stop = StopRequest(config.run_dir, launcher_pid)
    try:
        plan = preflight(config, int(os.environ["LOCAL_WORLD_SIZE"]))
        with lock_run_folder(config.run_dir, rank), distributed(config, plan.device) as device:
            Trainer(config, plan, device, stop, command).run()
    except (ValueError, OSError) as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except NonFiniteError as error:
        if rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_NONFINITE
    return 0


def prepare_process(config: PretrainConfig) -> int:
    """What has to be set before CUDA and Megatron start, and logging; returns this process's rank."""
    # Read when CUDA starts: Megatron orders communication by the first, cuBLAS is repeatable by the second.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.trainer.deterministic:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine reads it at import
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    rank = int(os.environ["RANK"])
    if rank != 0:
        logging.getLogger().setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
    quieten_libraries()
    return rank


@contextmanager
def lock_run_folder(run_dir: Path, rank: int) -> Iterator[None]:
    """Rank 0 holds the run folder: two runs in one folder would destroy each other's checkpoints."""
    if rank != 0:
        yield
        return
    with (run_dir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = "another process is training in it; wait for it or choose another name"
            raise ValueError(f"run folder {run_dir}: {text}") from None
        yield


def main() -> int:
    """Read the configuration that the launcher wrote, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file with the whole configuration")
    parser.add_argument("--command", default=" ".join(sys.argv), help="what run.json says was typed")
    parser.add_argument("--launcher-pid", type=int, help="stop when this process is gone")
    arguments = parser.parse_args()
    schema = OmegaConf.structured(PretrainConfig)
    config = from_composed(OmegaConf.merge(schema, OmegaConf.load(arguments.config)))
    return run_worker(config, arguments.command, arguments.launcher_pid)


if __name__ == "__main__":
    sys.exit(main())
