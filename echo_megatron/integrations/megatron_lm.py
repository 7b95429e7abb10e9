"""Megatron-LM: `--tp-comm echo4` for `pretrain_gpt.py` and every other script that trains through `megatron.training`.

    torchrun --nproc-per-node 2 -m echo_megatron.integrations.megatron_lm /path/to/Megatron-LM/pretrain_gpt.py \
        --tp-comm echo4 …

runs the script as it is; `with echo_training():` does the same inside a script of your own. Both wrap six functions of
`megatron.training` while the block runs, and no file of Megatron-LM changes:

- `parse_args` gets Echo's arguments;
- `setup_model_and_optimizer` refuses what can't be combined before the model is built, and installs Echo after it: the
  only place in all releases where every virtual pipeline chunk of the rank is at hand, wrapped and loaded
  (a model provider sees one chunk, and post-wrap hooks exist only for models from a model config);
- `train_step` and `evaluate` end with the check for failed calls, `save_checkpoint` begins with it, and `train_step`
  writes the measured errors;
- `check_checkpoint_args` says when a checkpoint comes from a run with other communication.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import runpy
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron.config import EchoConfig
from echo_megatron.diagnostics import Inspector, gather
from echo_megatron.integrations.megatron import Installation, install
from echo_megatron.integrations.megatron_lm_args import (
    FLAG,
    ArgsProvider,
    add_echo_args,
    check_args,
    describe_difference,
    echo_config,
    inspect_every,
    with_echo_args,
)

__all__ = ["EchoTraining", "add_echo_args", "echo_config", "echo_training", "main", "with_echo_args"]


class EchoTraining:
    """Echo's part in a run of Megatron-LM: one model at a time, from its arguments to the end of training.

    Attributes:
        config: the options, once the arguments are parsed.
        installation: what is installed, once the model is built.
    """

    def __init__(self) -> None:
        self.config: EchoConfig | None = None
        self.installation: Installation | None = None
        self._inspector: Inspector | None = None
        self._every = 0

    def parse_args(
        self,
        original: Callable[..., Namespace],
        extra_args_provider: ArgsProvider | None = None,
        *rest: Any,
        **named: Any,
    ) -> Namespace:
        """Adds Echo's arguments to those of the script, and refuses contradictions before anything is started."""
        args = original(with_echo_args(extra_args_provider), *rest, **named)
        self._configure(args)
        return args

    def setup_model_and_optimizer(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """Installs Echo in the model that Megatron built, wrapped and loaded. Collective."""
        from megatron.training import get_args
        from megatron.training.utils import print_rank_0

        args = get_args()
        config = self._configure(args)
        self.uninstall()  # of a model that this one replaces
        built = original(*rest, **named)
        self.installation = install(built[0], config)
        print_rank_0(self.installation.report())
        self._every = inspect_every(args)
        if self._every:
            self._inspector = Inspector(self.installation, every=self._every)
        return built

    def train_step(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """One iteration; raises CommunicationError if a call of it failed on the device."""
        if self.installation is None:
            return original(*rest, **named)
        from megatron.training import get_args

        iteration = get_args().curr_iteration + 1  # as Megatron logs it
        if self._inspector is not None:
            self._inspector.begin_step(iteration)
        result = original(*rest, **named)
        self.installation.check()
        if self._inspector is not None:
            metrics = self._inspector.end_step()
            if iteration % self._every == 0:
                _write_metrics(metrics, iteration)
        return result

    def evaluate(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """One evaluation; raises CommunicationError if a call of it failed on the device."""
        result = original(*rest, **named)
        if self.installation is not None:
            self.installation.check()
        return result

    def save_checkpoint(self, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """Saves no weights that a failed call may have had a part in."""
        if self.installation is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # calls may be under way, and the check knows of those that ended
            self.installation.check()
        return original(*rest, **named)

    def check_checkpoint_args(
        self, original: Callable[..., Any], checkpoint_args: Namespace, *rest: Any, **named: Any
    ) -> Any:
        """Says when the checkpoint comes from a run with other communication."""
        from megatron.training import get_args
        from megatron.training.utils import print_rank_0

        result = original(checkpoint_args, *rest, **named)
        difference = describe_difference(checkpoint_args, get_args())
        if difference is not None:
            print_rank_0(difference)
        return result

    def uninstall(self) -> None:
        """Gives the model its own communication back. Collective; twice is harmless.

        A script may have destroyed the process groups, and with them what there is to give back.
        """
        if self.installation is not None and dist.is_initialized():
            self.installation.uninstall()
        self.installation = self._inspector = None

    def _configure(self, args: Namespace) -> EchoConfig:
        self.config = echo_config(args)
        check_args(args, self.config)
        return self.config


_active: EchoTraining | None = None


@contextlib.contextmanager
def echo_training() -> Iterator[EchoTraining]:
    """Everything that `megatron.training` does inside this block obeys `--tp-comm`; nested blocks are one.

    Raises:
        ValueError: at its begin if this Megatron-LM lacks one of these functions; at its end if `--tp-comm` asked
            for Echo and no model was built through `megatron.training`; between, what is refused.
    """
    global _active
    if _active is not None:
        yield _active
        return
    run = EchoTraining()
    with contextlib.ExitStack() as stack:
        for module_name, name, method in (
            ("arguments", "parse_args", run.parse_args),
            ("training", "setup_model_and_optimizer", run.setup_model_and_optimizer),
            ("training", "train_step", run.train_step),
            ("training", "evaluate", run.evaluate),
            ("training", "save_checkpoint", run.save_checkpoint),
            ("checkpointing", "check_checkpoint_args", run.check_checkpoint_args),
        ):
            stack.callback(_wrap(module_name, name, method))
        _active = run
        stack.callback(_deactivate)
        try:
            yield run
        except SystemExit as exit_:
            # Megatron ends a run early by sys.exit(0) on every rank. Any other exit may be this rank's alone, and
            # uninstall would wait for the others.
            if not exit_.code:
                run.uninstall()
            raise
        if run.config is not None and run.config.quantizes and run.installation is None:
            raise ValueError(
                f"echo: {FLAG} asked for quantized communication, but the script built no model through "
                "megatron.training.pretrain, so that nothing was installed; call echo_megatron.install(model_chunks, "
                "config) in a training loop of your own"
            )
        run.uninstall()


def _deactivate() -> None:
    global _active
    _active = None


def _wrap(module_name: str, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Puts `method` around the function, wherever `megatron.training` calls it by name; returns what undoes it."""
    owner = importlib.import_module(f"megatron.training.{module_name}")
    original = getattr(owner, name, None)
    if original is None:
        raise ValueError(
            f"echo: expected Megatron-LM with megatron.training.{module_name}.{name}, and this one has none; use a "
            "release that docs/megatron_lm.md names, or echo_megatron.install in a training loop of your own"
        )

    @functools.wraps(original)
    def wrapped(*rest: Any, **named: Any) -> Any:
        return method(original, *rest, **named)

    # Until 0.17 megatron.training.initialize imports parse_args by name and parses there.
    owners = [owner, importlib.import_module("megatron.training.initialize")]
    owners = [module for module in owners if getattr(module, name, None) is original]
    for module in owners:
        setattr(module, name, wrapped)

    def restore() -> None:
        for module in owners:
            setattr(module, name, original)

    return restore


def _write_metrics(metrics: dict[str, float], iteration: int) -> None:
    """Writes the measured errors of all pipeline stages where Megatron logs: on the last rank. Collective."""
    from megatron.core import parallel_state
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    stages = parallel_state.get_pipeline_model_parallel_group()
    if stages.size() > 1:
        device = torch.device("cpu" if dist.get_backend(stages) == "gloo" else "cuda")
        metrics = gather(metrics, stages, device)
    if not metrics:
        return  # a tensor-parallel size of 1
    if (writer := get_tensorboard_writer()) is not None:
        for tag, value in metrics.items():
            writer.add_scalar(tag, value, iteration)
    if (wandb_writer := get_wandb_writer()) is not None:
        wandb_writer.log(metrics, iteration)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the script that `argv` begins with under `echo_training`, as `python SCRIPT ARGUMENT …` would."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        sys.exit(0 if arguments else 2)
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"{script}: no such file; expected a training script such as /path/to/Megatron-LM/pretrain_gpt.py")
    sys.argv = arguments
    # Where Python puts it for a script; Megatron-LM's own `megatron` then comes before an installed one.
    sys.path.insert(0, str(script.resolve().parent))
    with echo_training():
        runpy.run_path(str(script), run_name="__main__")


def _help() -> str:
    """Of this command; not the script's, which Megatron-LM 0.19.2 fails to print for a percent sign in a text."""
    parser = ArgumentParser(
        prog="python -m echo_megatron.integrations.megatron_lm",
        usage="%(prog)s SCRIPT [ARGUMENT …]",
        description="Runs SCRIPT, such as Megatron-LM's pretrain_gpt.py, with these among its arguments.",
        add_help=False,
    )
    return add_echo_args(parser).format_help()


if __name__ == "__main__":
    # Under its own name: as __main__ this module would exist twice, once without the block that main entered.
    from echo_megatron.integrations import megatron_lm

    megatron_lm.main()
