"""Which communication trains best: several arms and seeds of a small Qwen3, for the presets' defaults.

usage: torchrun --nproc-per-node P scripts/training_study.py [--arms …] [--seeds 1 2 3] [--out runs/training_study]
                                                             [--results docs/results] [KEY=VALUE …]

Every arm of a seed sees the same data and initialization. A run that is finished is not repeated; the same command
goes on after an interruption, and `--budget-s` ends it in time. With all runs there, the comparison is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir

from echo_megatron.cli import config_dir
from echo_megatron.pretrain.schema import PretrainConfig, from_composed, register_configs
from echo_megatron.pretrain.series import run_series
from echo_megatron.report import compare

# The first is what the others are compared with.
ARMS = {
    "nccl": ("tp_comm=nccl",),
    "uncompensated": ("tp_comm=echo4", "tp_comm.eta=0.0"),
    "local": ("tp_comm=echo4", "tp_comm.residual=local"),
    "consensus": ("tp_comm=echo4", "tp_comm.residual=consensus"),
    "local_consensus": ("tp_comm=echo4", "tp_comm.residual=local", "tp_comm.backward_residual=consensus"),
    "consensus_local": ("tp_comm=echo4", "tp_comm.residual=consensus", "tp_comm.backward_residual=local"),
    "compact": ("tp_comm=echo4", "tp_comm.residual=local", "tp_comm.state_dtype=compact"),
    "paper": ("tp_comm=echo4_paper",),
}


def configs_of(options: argparse.Namespace) -> list[PretrainConfig]:
    """The runs, seed by seed, so that an interrupted study has whole comparisons."""
    register_configs()
    runs = []
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for seed in options.seeds:
            for arm in options.arms:
                places = [f"name={arm}_seed{seed}", f"runs_dir={options.out}", f"seed={seed}"]
                overrides = [f"experiment={options.experiment}", *ARMS[arm], *places, *options.overrides]
                runs.append(from_composed(compose("pretrain", overrides)))
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and compares; returns the exit status: 0 done, 1 runs are left, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="default: all of them")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--experiment", default="gutenberg_small", help="of configs/experiment (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/training_study"), help="folder of the runs (%(default)s)"
    )
    parser.add_argument("--results", type=Path, help="folder that gets training_study.json, .md and .png")
    parser.add_argument("--budget-s", type=float, help="seconds after which no further run starts")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for every run, e.g. trainer.max_steps=200")
    options = parser.parse_intermixed_args(arguments)
    if "nccl" not in options.arms:
        parser.error("--arms: expected nccl among them, which the others are compared with")
    try:
        runs = configs_of(options)
        unfinished = run_series(runs, " ".join(sys.argv), options.budget_s)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if int(os.environ["RANK"]) != 0:
        return int(bool(unfinished))
    if unfinished:
        print(f"left: {', '.join(unfinished)}; the same command goes on with them", flush=True)
        return 1
    made = compare([run.run_dir for run in runs], options.out / "comparison", baseline="nccl")
    made.show()
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        for source, name in (("comparison.json", ".json"), ("comparison.md", ".md"), ("loss.png", ".png")):
            shutil.copyfile(options.out / "comparison" / source, options.results / f"training_study{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
