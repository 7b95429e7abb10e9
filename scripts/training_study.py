"""Which communication trains how well: the arms of a study, trained on the same data and compared.

usage: torchrun --nproc-per-node P scripts/training_study.py [--study feedback | tiny | qwen3_0p6b] [--arms …]
                                   [--seeds 1 2 3] [--out runs/STUDY] [--results docs/results] [--results-name NAME]
                                   [--budget-s S] [KEY=VALUE …]
       python scripts/training_study.py --study qwen3_0p6b --results docs/results --render

feedback:    a small model with every form of feedback over several seeds, which the presets' defaults rest on.
tiny:        the same, and a quantizer and a gain more, with the quickstart's model: two CPU cores do.
qwen3_0p6b:  Qwen3-0.6B for 1,000 steps, 16-bit beside Echo: the paper's Fig. 3 and Table 7 on stand-in data.

Every arm of a seed sees the same data and initialization. A run that is finished is not repeated; the same command
goes on after an interruption, and `--budget-s` ends it in time. `--render` compares the runs that are there, without
training. `--results` keeps the runs' losses beside the comparison, so that arms can come one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from echo_megatron.cli import config_dir
from echo_megatron.config import PAPER_FEEDBACK
from echo_megatron.pretrain.schema import PretrainConfig, from_composed, register_configs
from echo_megatron.pretrain.series import run_series
from echo_megatron.report import FIGURE, MARKDOWN, compare
from echo_megatron.run_folder import finite, write_atomic

KEPT = ("run.json", "config.yaml", "metrics.jsonl")  # what a comparison reads


@dataclass(frozen=True)
class Study:
    """Runs that are compared.

    Attributes:
        experiment: of configs/experiment.
        results: name of the files in the results' folder.
        arms: overrides by arm; the first is what the others are compared with.
        seeds: of each arm.
        paper: the paper's values by arm, and where they are from; empty where it has none.
    """

    experiment: str
    results: str
    arms: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    paper: Mapping[str, Any]


# The forms of feedback; the averages are the paper's coefficients on the local residual, whose state is then in BF16.
FORMS: dict[str, tuple[str, ...]] = {
    "nccl": ("tp_comm=nccl",),
    "uncompensated": ("tp_comm=echo4", "tp_comm.eta=0.0"),
    "local": ("tp_comm=echo4",),
    "averages": ("tp_comm=echo4", *(f"tp_comm.{name}={value}" for name, value in vars(PAPER_FEEDBACK).items())),
    "consensus": ("tp_comm=echo4", "tp_comm.residual=consensus"),
    "local_consensus": ("tp_comm=echo4", "tp_comm.backward_residual=consensus"),
    "paper": ("tp_comm=echo4_paper",),
}
SMALL = "tp_comm.min_bytes=16384"  # the tiny model's messages would stay exact

STUDIES = {
    "feedback": Study(
        experiment="gutenberg_small",
        results="training_study",
        arms={
            **FORMS,
            "local_bf16": ("tp_comm=echo4", "tp_comm.state_dtype=bf16"),
            "nccl_sp": ("tp_comm=nccl", "trainer.sequence_parallel=true"),
            "local_sp": ("tp_comm=echo4", "trainer.sequence_parallel=true"),
        },
        seeds=(1, 2, 3),
        paper={},
    ),
    "tiny": Study(
        experiment="quickstart",
        results="training_study_tiny",
        arms={
            **{arm: overrides if arm == "nccl" else (*overrides, SMALL) for arm, overrides in FORMS.items()},
            "gain_0.75": ("tp_comm=echo4", "tp_comm.eta=0.75", SMALL),
            "zero_aware": ("tp_comm=echo4", "tp_comm.policy=zero_aware", "tp_comm.group_size=128", SMALL),
        },
        seeds=(1, 2, 3),
        paper={},
    ),
    "qwen3_0p6b": Study(
        experiment="qwen3_gutenberg_16bit",
        results="train_qwen3_0p6b_h200x2",
        arms={
            "16bit": ("tp_comm=nccl",),
            "echo4": ("tp_comm=echo4",),
            "echo4_paper": ("tp_comm=echo4_paper",),
            "echo4_paper_lr3.5e-4": ("tp_comm=echo4_paper", "optim.lr=3.5e-4"),
            "none": ("tp_comm=echo4", "tp_comm.eta=0.0"),
        },
        seeds=(1234,),
        paper={
            "source": "paper, Table 7: P=4, 786,432 tokens a step, 12,716 steps of Dolma C4",
            "rows": [
                {"arm": "16bit", "lr": 3.0e-4, "tail100": 3.197, "step1000": 4.095},
                {"arm": "echo4_paper", "lr": 3.5e-4, "tail100": 3.225, "step1000": 4.042},
            ],
        },
    ),
}


def run_name(study: Study, arm: str, seed: int) -> str:
    """The run's name, and its folder's."""
    return arm if len(study.seeds) == 1 else f"{arm}_seed{seed}"


def configs_of(study: Study, options: argparse.Namespace) -> list[PretrainConfig]:
    """The runs, seed by seed, so that an interrupted study has whole comparisons."""
    register_configs()
    runs = []
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        for seed in options.seeds:
            for arm in options.arms:
                places = [f"name={run_name(study, arm, seed)}", f"runs_dir={options.out}", f"seed={seed}"]
                overrides = [f"experiment={study.experiment}", *study.arms[arm], *places, *options.overrides]
                runs.append(from_composed(compose("pretrain", overrides)))
    return runs


def keep(runs: Sequence[Path], kept: Path) -> None:
    """Copies what a comparison reads of each run."""
    for run in runs:
        folder = kept / run.name
        folder.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            write_atomic(folder / name, (run / name).read_text(encoding="utf-8"))


def kept_runs(study: Study, folder: Path) -> tuple[list[Path], str | None]:
    """Runs that lie in `folder`, in the order of the study's arms, then others; and why they do not compare yet."""
    found = sorted(path.parent for path in folder.glob("*/run.json"))
    of_arms = {
        arm: [run for run in found if re.fullmatch(rf"{re.escape(arm)}(_seed\d+)?", run.name)] for arm in study.arms
    }
    runs = list(dict.fromkeys((*itertools.chain(*of_arms.values()), *found)))
    baseline, *_ = study.arms
    got = ", ".join(run.name for run in runs) or "none"
    lacks = f"expected runs of {baseline} and of another arm, got {got}"
    return runs, None if of_arms[baseline] and len(runs) > len(of_arms[baseline]) else lacks


def render(study: Study, folder: Path, results: Path, scratch: Path) -> None:
    """Compares the runs in `folder`; writes JSON, Markdown and figure of the study's name into `results`.

    The study's own arms come first. Others that lie there, such as those of an earlier form of the study, follow by
    name: options may be recorded in them that today's configuration refuses.

    Raises:
        ValueError: only one arm's runs are there, or not those that the others are compared with.
    """
    runs, lacks = kept_runs(study, folder)
    if lacks:
        raise ValueError(f"{folder}: {lacks}")
    # Of a study that is not whole some arms have fewer seeds; differences are then of the seeds that both arms have.
    made = compare(runs, scratch, baseline=runs[0].name, allow_different=("seed",))
    made.show()
    report = dict(made.report)
    if study.paper:
        report = {"rows": rows(report), "paper": study.paper, **report}
    results.mkdir(parents=True, exist_ok=True)
    stem = results / study.results
    text = json.dumps(finite(report), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(stem.with_suffix(".json"), text + "\n")
    table = (scratch / MARKDOWN).read_text(encoding="utf-8").replace(f"]({FIGURE})", f"]({study.results}.png)")
    write_atomic(stem.with_suffix(".md"), table)
    shutil.copyfile(scratch / FIGURE, stem.with_suffix(".png"))


def rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row an arm of one seed: the paper's Table 7's columns, and the loss on held-out text."""
    found = []
    for arm in report["arms"]:
        name = arm["runs"][0].partition("_lr")[0]
        mean = {key: None if arm[key] is None else arm[key]["mean"] for key in ("tail", "step_1000", "validation")}
        found.append(
            {
                "arm": name,
                "tp_comm": arm["tp_comm"],
                "lr": arm["lr"],
                "steps": int(arm["steps"][0].split()[0]),
                "tail100": mean["tail"],
                "step1000": mean["step_1000"],
                "val_loss": mean["validation"],
                "delta_percent": arm["delta_percent"],
            }
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and compares; returns the exit status: 0 done, 1 runs are left, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=list(STUDIES), default="feedback", help="default: %(default)s")
    parser.add_argument("--arms", nargs="+", help="default: all of the study's")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the study's")
    parser.add_argument("--out", type=Path, help="folder of the runs (runs/STUDY)")
    parser.add_argument("--results", type=Path, help="folder that gets the comparison and what it was made from")
    parser.add_argument("--results-name", metavar="NAME", help="of its files in there; default the study's")
    parser.add_argument("--render", action="store_true", help="train nothing; compare what --results has")
    parser.add_argument("--budget-s", type=float, help="seconds after which no further run starts")
    parser.epilog = "KEY=VALUE: for every run, e.g. trainer.max_steps=200"
    # Overrides apart: `--seeds 1 2 KEY=VALUE` would take them for seeds.
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args([word for word in given if not _is_override(word)])
    options.overrides = [word for word in given if _is_override(word)]
    study = STUDIES[options.study]
    if unknown := sorted(set(options.arms or ()) - set(study.arms)):
        parser.error(f"--arms: expected some of {', '.join(study.arms)}, got {', '.join(unknown)}")
    if options.render and options.results is None:
        parser.error("--render: expected --results FOLDER, which has the runs")
    options.arms = options.arms or list(study.arms)
    options.seeds = options.seeds or list(study.seeds)
    options.out = options.out or Path("runs") / options.study
    study = replace(study, results=options.results_name or study.results)
    try:
        unfinished = [] if options.render else train(study, options)
        if options.results is not None and int(os.environ.get("RANK", "0")) == 0:
            write_results(study, options, unfinished)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(bool(unfinished))


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-")


def train(study: Study, options: argparse.Namespace) -> list[str]:
    """Trains what is not finished; returns the names of the runs that are left."""
    unfinished = run_series(configs_of(study, options), " ".join(sys.argv), options.budget_s)
    if unfinished and int(os.environ["RANK"]) == 0:
        print(f"left: {', '.join(unfinished)}; the same command goes on with them", flush=True)
    return unfinished


def write_results(study: Study, options: argparse.Namespace, unfinished: Sequence[str]) -> None:
    """Keeps the finished runs beside the results, and compares all that are there, once the baseline is among them."""
    kept = options.results / f"{study.results}_runs"
    if not options.render:
        names = [run_name(study, arm, seed) for seed in options.seeds for arm in options.arms]
        keep([options.out / name for name in names if name not in unfinished], kept)
        if lacks := kept_runs(study, kept)[1]:
            print(f"{kept}: no comparison yet: {lacks}", flush=True)
            return
    render(study, kept, options.results, options.out / "comparison")


if __name__ == "__main__":
    sys.exit(main())
