"""Trains Qwen3-0.6B on all GPUs of this machine, one arm a call, for as many steps as fit into nine minutes.

usage: python scripts/train_at_scale.py --arm 16bit  [--ranks P] [--budget-s 540] [--out runs/train_at_scale]
       python scripts/train_at_scale.py --arm echo4   --steps N       the steps that the first call has printed
                                        [--results docs/results] [KEY=VALUE …]

The study qwen3_0p6b of scripts/training_study.py at P = all GPUs. The first call times a few 16-bit steps, chooses the
number of steps and writes it into --out; later calls with the same --out take that number, so that the arms can be
compared. Losses go to RESULTS/train_qwen3_0p6b_GPUxP_runs, and with the second arm the comparison and its figure beside
them. A call that is cut goes on from its last checkpoint when it is made again. Exit status: 0 the arm is trained, 1
it is not, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # sources that are not installed

from echo_megatron.bench.bounded import STOP_S, Ended, run_bounded
from echo_megatron.bench.paper_parts import ROOT, Place, environment_of
from echo_megatron.bench.paper_tables import find_place
from echo_megatron.run_folder import write_atomic

ARMS = ("16bit", "echo4", "echo4_paper", "echo4_paper_lr3.5e-4", "none")
TIMED_STEPS, FIRST_STEPS = 30, 10  # of the timing run; the first are slow
MULTIPLE = 50
USED = 0.95  # of the time: validation and checkpoints on the way


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--ranks", type=int, metavar="P", help="default all GPUs")
    parser.add_argument("--steps", type=int, help="of the run; default as above")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of this call; default %(default)g")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu with overrides tries it out")
    parser.add_argument("--out", type=Path, default=Path("runs/train_at_scale"), help="runs and checkpoints")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results", help="default docs/results")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of every run")
    options = parser.parse_intermixed_args(arguments)
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps: expected at least 1, got {options.steps}")
    if options.budget_s <= STOP_S:
        parser.error(f"--budget-s: expected over {STOP_S:g}, got {options.budget_s:g}")
    options.out, options.results = options.out.resolve(), options.results.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains one arm; returns the exit status."""
    begin = time.monotonic()
    options = parse_arguments(arguments)
    try:
        place = find_place(options)
        options.out.mkdir(parents=True, exist_ok=True)
        steps = options.steps or chosen_steps(options, place, begin)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = place.name("train_qwen3_0p6b")
    print(f"{options.arm}: {steps} steps at P = {place.ranks}; results: {options.results / name}", flush=True)
    where = ["--results", str(options.results), "--results-name", name]
    ended = train(options, place, options.arm, options.out / "runs", steps, left_s(options, begin), where)
    if ended.status is None:
        print(f"cut after {ended.seconds:.0f} s; the same command goes on from the last checkpoint")
    elif ended.status:
        print(f"failed with exit status {ended.status}: {ended.last_line()}")
    return 0 if ended.status == 0 else 1


def train(
    options: argparse.Namespace,
    place: Place,
    arm: str,
    out: Path,
    steps: int,
    limit_s: float,
    more: Sequence[str] = (),
) -> Ended:
    """A run of the study, stopped after `limit_s` seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks)]
    command += [str(ROOT / "scripts" / "training_study.py"), "--study", "qwen3_0p6b", "--arms", arm]
    command += ["--out", str(out), *more, f"trainer.tensor_parallel={place.ranks}", *options.overrides]
    command += [f"trainer.max_steps={steps}"]
    return run_bounded(command, limit_s, environment_of("train", place, os.environ), f"{arm}: ", ROOT)


def chosen_steps(options: argparse.Namespace, place: Place, begin: float) -> int:
    """What an earlier call chose for this number of ranks and these overrides, or what a timing run says.

    Raises:
        ValueError: the timing run failed, or nothing fits.
    """
    path = options.out / f"steps_{place.key}x{place.ranks}.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["overrides"] != options.overrides:
            raise ValueError(
                f"{path}: expected the overrides {found['overrides']}, for which the steps were chosen, got "
                f"{options.overrides}; pass another --out, or --steps"
            )
        return int(found["steps"])
    timing = options.out / "timing"
    ended = train(
        options, place, "16bit", timing, TIMED_STEPS, left_s(options, begin), [f"optim.warmup_steps={FIRST_STEPS}"]
    )
    if ended.status != 0:
        raise ValueError(f"the timing run did not end well (exit status {ended.status}): {ended.last_line()}")
    step_s = seconds_a_step(timing / "16bit" / "metrics.jsonl")
    shutil.rmtree(timing)  # its checkpoint is as large as a run's
    overhead_s = max(0.0, ended.seconds - TIMED_STEPS * step_s)
    steps = steps_that_fit(left_s(options, begin) - overhead_s, step_s)
    write_atomic(path, json.dumps({"steps": steps, "step_s": step_s, "overrides": options.overrides}) + "\n")
    return steps


def seconds_a_step(metrics: Path) -> float:
    """Median of a run's steps, the first ones left out."""
    lines = (json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines())
    seconds = {line["step"]: line["seconds"] for line in lines if line["kind"] == "train"}
    return statistics.median(value for step, value in seconds.items() if step > FIRST_STEPS)


def steps_that_fit(seconds: float, step_s: float) -> int:
    """A multiple of 50 steps, or fewer than 50.

    Raises:
        ValueError: not even two fit.
    """
    steps = int(USED * seconds / step_s) if seconds > 0 else 0
    if steps < 2:
        raise ValueError(f"--budget-s: a step takes {step_s:.2f} s, and {seconds:.0f} s are left; give it more")
    return steps - steps % MULTIPLE if steps >= MULTIPLE else steps


def left_s(options: argparse.Namespace, begin: float) -> float:
    """Seconds of this call that are left, being stopped set aside."""
    return options.budget_s - STOP_S - (time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(main())
