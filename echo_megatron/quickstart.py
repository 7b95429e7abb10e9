"""Pretrain a small GPT with 16-bit and with Echo communication, and compare: `python -m echo_megatron.quickstart`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

# Run folder -> overrides of `echo-megatron pretrain`. The first is the baseline of the comparison.
# The model is so small that on GPUs its sums would be exact, which takes no longer there.
QUANTIZE = "tp_comm.min_bytes=16384"
ARMS = {
    "nccl": ["tp_comm=nccl"],
    "echo4": ["tp_comm=echo4", QUANTIZE],
}
ABLATION = {
    "echo4_uncompensated": ["tp_comm=echo4", "tp_comm.eta=0.0", QUANTIZE],
    "echo4_paper": ["tp_comm=echo4_paper", QUANTIZE],
}
SEQUENCE_PARALLEL = {
    f"{name}_sequence_parallel": [*overrides, "trainer.sequence_parallel=true"] for name, overrides in ARMS.items()
}
EXIT_STOPPED = 130  # as a shell reports a program that Ctrl-C ended


class Runner:
    """Starts one run at a time and hands SIGINT and SIGTERM on to it, once each."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_stopping = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._pass_on)

    def run(self, command: Sequence[str]) -> int:
        """Exit status of `command`."""
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # A session of its own, so that Ctrl-C reaches it through `_pass_on` alone and not twice.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        return self._process.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.is_stopping = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m echo_megatron.quickstart",
        description="Pretrains a small Qwen3-shaped GPT on public-domain text at tensor parallel 2, once with "
        "Megatron's own communication and once with Echo at 4 bits, same seed and data, and compares the losses. "
        "Runs that are finished are not repeated; a run that was stopped goes on.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of the runs (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("data/sample"), help="folder of the tokens (%(default)s)")
    parser.add_argument("--steps", type=int, help="steps of each run (default: configs/experiment/quickstart.yaml)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234], help="one run a seed (%(default)s)")
    parser.add_argument(
        "--ablation", action="store_true", help="two more runs: without compensation, and the paper's form of Echo"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="two more runs: both communications with sequence parallelism"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the runs of an earlier quickstart in --out first")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run, e.g. trainer.device=cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare the data, train every arm, compare; returns the exit status."""
    options = parse_arguments(arguments)
    start = time.monotonic()
    runner = Runner()
    try:
        prepare(options.data)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = plan(options)
    for name, overrides in runs.items():
        folder = options.out / name
        if options.fresh and folder.exists():
            shutil.rmtree(folder)
        if runner.is_stopping:
            return EXIT_STOPPED
        status = runner.run(command(options, name, overrides))
        if status != 0:
            hint = "; --fresh starts the runs anew" if folder.exists() else ""
            print(f"error: the run {folder} failed with status {status}{hint}", file=sys.stderr)
            return status
        if runner.is_stopping or json.loads((folder / "run.json").read_text())["status"] != "finished":
            print(f"stopped in {folder}; the same command goes on from there", file=sys.stderr)
            return EXIT_STOPPED
    return compare(options, list(runs), start)


def prepare(folder: Path) -> None:
    """Make the sample tokens where they are not there yet."""
    from echo_megatron.data import prepare_sample

    sample = prepare_sample(folder)
    print(f"{folder}: {sample.train_tokens:,} training and {sample.validation_tokens:,} validation tokens", flush=True)


def plan(options: argparse.Namespace) -> dict[str, list[str]]:
    """Folder name and overrides of every run, seed by seed."""
    arms = ARMS | (ABLATION if options.ablation else {}) | (SEQUENCE_PARALLEL if options.sequence_parallel else {})
    return {
        name if len(options.seeds) == 1 else f"{name}_seed{seed}": [*overrides, f"seed={seed}"]
        for seed in options.seeds
        for name, overrides in arms.items()
    }


def command(options: argparse.Namespace, name: str, overrides: Sequence[str]) -> list[str]:
    """The command line of one run."""
    steps = [] if options.steps is None else [f"trainer.max_steps={options.steps}"]
    places = [f"name={name}", f"runs_dir={options.out}", f"data.folder={options.data}"]
    arguments = ["experiment=quickstart", *places, *overrides, *steps, *options.overrides]
    return [sys.executable, "-m", "echo_megatron.cli", "pretrain", *arguments]


def compare(options: argparse.Namespace, names: Sequence[str], start: float) -> int:
    """Write figure and table into --out and print the table."""
    from echo_megatron.cli import main as cli

    folders = [str(options.out / name) for name in names]
    status = cli(["compare", *folders, "--out", str(options.out), "--baseline", "nccl"])
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    print(f"{minutes} min {seconds} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
