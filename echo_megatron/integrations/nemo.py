"""NeMo: the callback `EchoTPComm` installs Echo in the model of a `nemo.lightning.Trainer` with `MegatronStrategy`."""
# No `from __future__ import annotations`: nemo_run's command line reads the annotations of `__init__`.

from collections.abc import Mapping
from typing import Any, Union

import numpy as np
from lightning.pytorch import Callback
from nemo.lightning.io.mixin import IOMixin
from nemo.lightning.pytorch.callbacks import JitTransform
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.lightning.pytorch.strategies import MegatronStrategy
from nemo.utils import logging

from echo_megatron import Installation, install
from echo_megatron.config import plain
from echo_megatron.integrations.megatron_checks import check_config
from echo_megatron.integrations.options import resolve
from echo_megatron.pretrain.names import tp_comm_name
from echo_megatron.reference import check_group

# megatron-core 0.15.3, which NeMo 2.7.3 needs, calls it when it writes a checkpoint; numpy 2 no longer has the name.
vars(np).setdefault("product", np.prod)

# Not Lightning's `state_dict`: two callbacks with one of those are refused before `setup` can say what is wrong.
CHECKPOINT_KEY = "echo_megatron"

# What nemo_run's command line can read, in the order in which it tries.
Option = Union[int, float, list[str], str, None]  # noqa: UP007


class EchoTPComm(Callback, IOMixin):
    """Quantizes the tensor-parallel all-reduces of the trainer's model for as long as the trainer runs.

        strategy = nl.MegatronStrategy(tensor_model_parallel_size=4)
        trainer = nl.Trainer(strategy=strategy, callbacks=[EchoTPComm("echo4")])

    Options and the model's configuration are checked in `setup`, before the model is built. Echo is installed before
    the first training, validation, test or prediction step, and uninstalled when the trainer ends, also by an
    exception. The table of covered sites is logged once on global rank 0.

    Args:
        tp_comm: `echo4`, `echo8`, `echo4_paper`, `echo8_paper`, or `nccl`, which leaves NeMo as it is.
        inspect_every: log `echo/…` quantities of every site through the trainer's loggers each so many training steps;
            0: never, at no cost.
        options: EchoConfig's fields by name, e.g. `eta=0.5`; None means not given.

    Raises:
        ValueError: an unknown flag or option, an illegal value, or an option that would do nothing.
    """

    def __init__(self, tp_comm: str = "echo4", inspect_every: int = 0, **options: Option) -> None:
        self._config = resolve(tp_comm, options)
        if not isinstance(inspect_every, int) or isinstance(inspect_every, bool) or inspect_every < 0:
            raise ValueError(f"inspect_every: expected an integer >= 0 (training steps), got {inspect_every!r}")
        if inspect_every and not self._config.quantizes:
            raise ValueError(
                f"tp_comm={tp_comm}: there is nothing to inspect, so inspect_every={inspect_every} would do nothing; "
                "set tp_comm=echo4, or inspect_every=0"
            )
        self.tp_comm = tp_comm
        self.inspect_every = inspect_every
        self._options = {name: plain(value) for name, value in options.items() if value is not None}
        self._installation: Installation | None = None
        self._inspector: Any = None
        self._step = 0

    @property
    def installation(self) -> Installation | None:
        """What is installed now; None before the first step, after the end, and where there is nothing to install."""
        return self._installation

    def io_transform_args(self, init_fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What NeMo writes into a checkpoint's context to build this callback again: options by their own names."""
        arguments = super().io_transform_args(init_fn, *args, **kwargs)
        return {**arguments.pop("options", {}), **arguments}

    # -- checks, before the model is built

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises ValueError for whatever Echo can't be combined with, by name."""
        others = sum(isinstance(callback, EchoTPComm) for callback in trainer.callbacks)
        if others > 1:
            raise ValueError(
                f"EchoTPComm: expected once among the trainer's callbacks, got {others} of them; remove all but one"
            )
        if not self._config.quantizes:
            return
        strategy = trainer.strategy
        if not isinstance(strategy, MegatronStrategy):
            raise ValueError(
                f"EchoTPComm: expected the trainer's strategy to be MegatronStrategy, got {type(strategy).__name__}: "
                "only Megatron's layers have tensor-parallel all-reduces; change the strategy or remove the callback"
            )
        _check_callbacks(trainer.callbacks)
        if getattr(strategy, "_fsdp", None):
            raise ValueError(
                f"EchoTPComm: fsdp={strategy._fsdp!r} is not supported: it was not tried together with Echo. "
                "Expected fsdp=None, or tp_comm=nccl"
            )
        check_config(pl_module.config, self._config)
        check_group(strategy.tensor_model_parallel_size, self._config)
        if strategy.tensor_model_parallel_size == 1 and trainer.is_global_zero:
            logging.info(
                "EchoTPComm: tensor_model_parallel_size=1, there is no communication to quantize; it does nothing"
            )

    # -- install before the first step, uninstall at the end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._install(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._uninstall()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Gives the model back without waiting for the other ranks: the exception may be this rank's alone."""
        installation, self._installation, self._inspector = self._installation, None, None
        if installation is not None:
            installation.abandon()

    def _install(self, trainer: Any) -> None:
        if self._installation is not None or not self._config.quantizes:
            return
        if trainer.strategy.tensor_model_parallel_size == 1:
            return
        self._installation = install(list(trainer.strategy.megatron_parallel), self._config)
        if trainer.is_global_zero:
            logging.info(self._installation.report())
        if self.inspect_every:
            from echo_megatron.diagnostics import Inspector

            self._inspector = Inspector(self._installation, every=self.inspect_every)

    def _uninstall(self) -> None:
        installation, self._installation, self._inspector = self._installation, None, None
        if installation is not None:
            installation.uninstall()

    # -- each step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._inspector is not None:
            self._step = trainer.global_step
            self._inspector.begin_step(self._step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._check()
        if self._inspector is not None:
            metrics = self._inspector.end_step()
            if self._step % self.inspect_every == 0:  # the same on all ranks, also on a stage without sites
                self._log(trainer, metrics)

    def _log(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Of all pipeline stages, through the trainer's loggers, which write on rank 0. Collective."""
        from megatron.core import parallel_state

        from echo_megatron.diagnostics import gather

        stages = parallel_state.get_pipeline_model_parallel_group()
        if stages.size() > 1:
            metrics = gather(metrics, stages, trainer.strategy.root_device)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._step)

    def on_validation_batch_end(self, *arguments: Any, **named: Any) -> None:
        self._check()

    def on_test_batch_end(self, *arguments: Any, **named: Any) -> None:
        self._check()

    def on_predict_batch_end(self, *arguments: Any, **named: Any) -> None:
        self._check()

    def _check(self) -> None:
        if self._installation is not None:
            self._installation.check()

    # -- checkpoints

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Notes the flag and its options; raises CommunicationError rather than save what a failed call left behind."""
        self._check()
        checkpoint[CHECKPOINT_KEY] = {
            "tp_comm": self.tp_comm,
            "options": self._options,
            "name": tp_comm_name(self._config),
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Says so where the checkpoint was written with another communication: its weights fit all the same."""
        saved, own = checkpoint.get(CHECKPOINT_KEY), tp_comm_name(self._config)
        name = saved["name"] if saved else "nccl"
        if name == own or not trainer.is_global_zero:
            return
        source = "" if saved else " (it was written without EchoTPComm)"
        logging.warning(
            f"EchoTPComm: the checkpoint was written with tp_comm={name}{source}, this run has tp_comm={own}; the "
            "weights are compatible, and training goes on with this run's communication"
        )


def _check_callbacks(callbacks: list[Any]) -> None:
    for callback in callbacks:
        if isinstance(callback, MegatronCommOverlapCallback) and callback.user_comm_overlap_cfg.tp_comm_overlap:
            raise ValueError(
                "EchoTPComm: MegatronCommOverlapCallback(tp_comm_overlap=True) is not supported: userbuffers replace "
                "the all-reduce that Echo replaces. Expected tp_comm_overlap=False (its other overlaps may stay), or "
                "tp_comm=nccl"
            )
        if isinstance(callback, JitTransform):
            configs = callback.config if isinstance(callback.config, list) else [callback.config]
            if any(config.use_torch or config.use_thunder for config in configs):
                raise ValueError(
                    "EchoTPComm: JitTransform is not supported: a compiled model does not call the all-reduce of a "
                    "module's own process group. Expected use_torch=False and use_thunder=False, or tp_comm=nccl"
                )
