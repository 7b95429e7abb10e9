"""The command `echo-megatron` and its subcommands; `USAGE` lists them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echo_megatron.package_folders import package_folder

USAGE = """usage: echo-megatron COMMAND …

  pretrain [GROUP=OPTION] [KEY=VALUE] …   pretrain a GPT; e.g. experiment=quickstart tp_comm=echo4 trainer.max_steps=100
                                          --help lists groups and keys, --cfg job prints the composed configuration
  compare RUN…                            loss curves and table of run folders; --help lists its options
  inspect RUN                             errors of every quantized all-reduce in a run's measured steps, against their
                                          bound; --figure draws them; --help lists its options
  evaluate --model RUN                    perplexity of a checkpoint under a list of communication settings, at
                                          simulated ranks or, under torchrun, real ones; --help lists options
  lm-eval --model echo_megatron …         lm-evaluation-harness (extra eval) with checkpoints, communication settings
                                          and ranks as model arguments; --help is the harness's own
  bench                                   times all-reduces against NCCL on this machine's GPUs; --tune measures the
                                          transport's choices and writes the table that it reads; --help lists options
  doctor                                  is this machine ready: what is installed, a self-test of the collectives, a
                                          short measurement, what to expect; exit status 0 good, 1 degraded, 2 broken
  plan                                    predicted step time, bytes and memory of a model at 2 to 8 ranks, 16 bits
                                          beside Echo; needs no GPU; --help lists its options

Exit status: 0 finished, or stopped by a signal with a checkpoint saved; 2 refused, the message says why; 3 the loss was
not finite; anything else: a process failed. Of doctor: as above."""


def config_dir() -> Path:
    """The Hydra configuration: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    return package_folder("configs", "configs", ("pretrain.yaml",))


def pretrain(arguments: Sequence[str]) -> int:
    """Compose the configuration from `arguments` (Hydra overrides and flags) and train, once for each job."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from echo_megatron.pretrain.schema import from_composed, register_configs

    register_configs()
    statuses: list[int] = []
    under_torchrun = "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ

    def job(composed: Any) -> None:
        try:
            config = from_composed(composed)
            if not under_torchrun:
                from echo_megatron.pretrain.launch import launch

                statuses.append(launch(config))
                return
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise ValueError(
                    "--multirun: start echo-megatron plain, not under torchrun; it starts torchrun for each job"
                )
            from echo_megatron.pretrain.worker import run_worker

            statuses.append(run_worker(config, " ".join(sys.argv)))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            statuses.append(2)

    previous, sys.argv = sys.argv, ["echo-megatron pretrain", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="pretrain")(job)()
    finally:
        sys.argv = previous
    return max(statuses, key=abs, default=0)  # --help and --cfg run no job


def doctor(arguments: Sequence[str]) -> int:
    """Look at this machine; see `echo_megatron.doctor`."""
    from echo_megatron.doctor import main as doctor_main

    return doctor_main(list(arguments))


def plan(arguments: Sequence[str]) -> int:
    """Predict steps, bytes and memory; see `echo_megatron.plan`."""
    from echo_megatron.plan import main as plan_main

    return plan_main(list(arguments))


def compare(arguments: Sequence[str]) -> int:
    """Compare run folders; see `echo_megatron.report`."""
    from echo_megatron.report import main as report_main

    return report_main(list(arguments), prog="echo-megatron compare")


def inspect(arguments: Sequence[str]) -> int:
    """Show what a run measured of its all-reduces; see `echo_megatron.diagnostics_report`."""
    from echo_megatron.diagnostics_report import main as inspect_main

    return inspect_main(list(arguments), prog="echo-megatron inspect")


def evaluate(arguments: Sequence[str]) -> int:
    """Perplexity by communication setting; see `echo_megatron.evaluate.evaluate_cli`."""
    from echo_megatron.evaluate.evaluate_cli import main as evaluate_main

    return evaluate_main(list(arguments))


def lm_eval(arguments: Sequence[str]) -> int:
    """Tasks of lm-evaluation-harness; see `echo_megatron.evaluate.lm_eval`."""
    from echo_megatron.evaluate.lm_eval import main as lm_eval_main

    return lm_eval_main(list(arguments))


def bench(arguments: Sequence[str]) -> int:
    """Time all-reduces, or tune; see `echo_megatron.bench`."""
    from echo_megatron.bench.all_reduce import main as bench_main

    return bench_main(list(arguments))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "pretrain": pretrain,
    "compare": compare,
    "inspect": inspect,
    "evaluate": evaluate,
    "lm-eval": lm_eval,
    "bench": bench,
    "doctor": doctor,
    "plan": plan,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"error: expected a command, one of {', '.join(COMMANDS)}; got {command!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    return COMMANDS[command](rest)


if __name__ == "__main__":
    sys.exit(main())
