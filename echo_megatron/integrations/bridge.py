"""Megatron-Bridge: `echo.tp_comm=echo4` as an override of any recipe, installed after PEFT and DDP wrapping.

    config = with_echo(qwen3_600m_pretrain_config())
    process_config_with_overrides(config, cli_overrides=sys.argv[1:])     # echo.tp_comm=echo4 echo.eta=0.5
    pretrain(config, forward_step, callbacks=[EchoCallback(config)])

The flag and what the configuration shows is checked by `config.validate()`, which `pretrain` calls before it builds the
model; the rest by `install`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.utils.pg_utils import get_pg_collection
from megatron.bridge.utils.common_utils import print_rank_0
from megatron.bridge.utils.instantiate_utils import target_allowlist
from megatron.training.models.base import ModelConfig

from echo_megatron.integrations.bridge_checks import (
    check_container,
    log_metrics,
    tell_of_other_arm,
    tensor_parallel_size,
)
from echo_megatron.integrations.bridge_config import EchoBridgeConfig

if TYPE_CHECKING:
    from echo_megatron.diagnostics import Inspector
    from echo_megatron.integrations.megatron import Installation

# Bridge builds only classes that are on this list from the YAML of a run.
for _target in (f"{__name__}.EchoConfigContainer", f"{EchoBridgeConfig.__module__}.EchoBridgeConfig"):
    target_allowlist.add_exact(_target)


class _Wiring:
    """What a configuration holds beside its sections: no fields, so neither its YAML nor a copy of it has them."""

    _callback: EchoCallback | None = None
    _hooked_model: Any = None


@dataclass(kw_only=True)
class EchoConfigContainer(_Wiring, ConfigContainer):
    """Bridge's ConfigContainer with the section `echo`. Recipes that build one of their own may use it in its place."""

    echo: EchoBridgeConfig = field(default_factory=EchoBridgeConfig)

    def validate(self) -> None:
        """Bridge's validation, and Echo's before it; registers the post-wrap hook that installs Echo.

        Raises:
            ValueError: an unknown or illegal option of the section `echo`, or another option of the configuration that
                Echo can't be combined with; the message names it and says what to do.
        """
        check_container(self)
        super().validate()
        if self.echo.resolve().quantizes and self._hooked_model is not self.model:
            hook = _PostWrapHook(self)
            if isinstance(self.model, ModelConfig):
                self.model.post_wrap_hooks.append(hook)
            else:
                self.model.register_post_wrap_hook(hook)
            self._hooked_model = self.model


def with_echo(config: ConfigContainer, tp_comm: str = "nccl", **options: Any) -> EchoConfigContainer:
    """The configuration of any recipe with the section `echo`.

    Args:
        config: what a recipe returned; its sections are shared, not copied.
        tp_comm: the flag; an override `echo.tp_comm=…` may still change it.
        options: further fields of EchoBridgeConfig, e.g. `eta=0.5`.

    Raises:
        ValueError: an unknown or illegal option, or a configuration whose class is not Bridge's own.
    """
    if type(config) not in (ConfigContainer, EchoConfigContainer):
        raise ValueError(
            f"with_echo: expected megatron.bridge's ConfigContainer, got {type(config).__module__}."
            f"{type(config).__qualname__}; derive that class from EchoConfigContainer instead, it has the section echo"
        )
    echo = EchoBridgeConfig()
    for name, value in {"tp_comm": tp_comm, **options}.items():
        setattr(echo, name, value)
    echo.finalize()
    sections = {f.name: getattr(config, f.name) for f in fields(config) if f.init and f.name != "echo"}
    container = EchoConfigContainer(**sections, echo=echo)
    container._checkpoint_load_required = config._checkpoint_load_required
    return container


class EchoCallback(Callback):
    """Installs Echo in the model of a Bridge run, watches every step, and uninstalls it at the end.

    With `echo.tp_comm=nccl` it only tells of a checkpoint that was written with Echo.

    Args:
        config: the run's configuration; the same object that `pretrain` gets.

    Attributes:
        installation: what is installed now; None before the model is built, after the end, and where there is nothing
            to install.

    Raises:
        ValueError: another kind of configuration, one that has its callback already, or one that Echo refuses.
    """

    def __init__(self, config: EchoConfigContainer) -> None:
        if not isinstance(config, EchoConfigContainer):
            raise ValueError(
                f"EchoCallback: expected a configuration with the section echo, got {type(config).__name__}; make it "
                "with with_echo(config)"
            )
        if config._callback is not None:
            raise ValueError(
                "EchoCallback: this configuration has one already; give pretrain() that one, once: "
                "callbacks=[EchoCallback(config)]"
            )
        check_container(config)
        config._callback = self
        self.installation: Installation | None = None
        self._config = config
        self._inspector: Inspector | None = None
        self._is_due = False
        self._trains = not config.validation.skip_train

    def install(self, chunks: list[Any]) -> None:
        """Installs Echo in the built model; called by the post-wrap hook. Collective."""
        config = self._config.echo.resolve()
        if not config.quantizes:
            return
        if tensor_parallel_size(self._config) == 1:
            print_rank_0(
                f"echo: model.tensor_model_parallel_size=1: there is no communication to quantize, "
                f"echo.tp_comm={self._config.echo.tp_comm} does nothing"
            )
            return
        if self.installation is not None:
            raise ValueError(
                "echo: the post-wrap hook runs a second time for one EchoCallback, and Echo is installed already: a "
                "model was built twice from one configuration, or two configurations share a model section. Build the "
                "second model from a configuration of its own, or call callback.uninstall() first"
            )
        from echo_megatron import install

        self.installation = install(chunks, config)
        print_rank_0(self.installation.report())
        if self._config.echo.inspect_every:
            from echo_megatron.diagnostics import Inspector

            self._inspector = Inspector(self.installation, every=self._config.echo.inspect_every)

    def uninstall(self) -> None:
        """Gives the model back as it was. Collective; twice does no harm."""
        installation, self.installation, self._inspector = self.installation, None, None
        if installation is not None:
            installation.uninstall()

    # -- training

    def on_train_start(self, context: CallbackContext) -> None:
        """Tells of a checkpoint of the other arm; refuses to train without what the flag asks for."""
        wanted = self._config.echo.resolve().quantizes and tensor_parallel_size(self._config) > 1
        if wanted and self.installation is None:
            raise ValueError(
                f"echo: echo.tp_comm={self._config.echo.tp_comm}, but the model was built without Echo's post-wrap "
                "hook, which config.validate() registers; give pretrain() the configuration that EchoCallback has, and "
                "call config.validate() before you build a model yourself"
            )
        tell_of_other_arm(context.state)

    def on_train_step_start(self, context: CallbackContext) -> None:
        if self._inspector is not None:
            step = context.state.train_state.step + 1  # the step's number in Bridge's log
            self._is_due = step % self._config.echo.inspect_every == 0  # the same on a stage without sites
            self._inspector.begin_step(step)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Raises CommunicationError if a call of this step failed on the device: before a checkpoint could keep it."""
        if context.grad_norm is None and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a gradient norm, where there is one, has waited for all calls
        self._check()
        if self._inspector is not None:
            metrics = self._inspector.end_step()
            if self._is_due:
                self._log(context, metrics)

    def on_train_end(self, context: CallbackContext) -> None:
        self._trains = False
        state = context.state.train_state
        if not (state.do_valid or state.do_test):
            self.uninstall()

    # -- evaluation; Bridge evaluates a last time after the training, on validation and then on test data

    def on_eval_end(self, context: CallbackContext) -> None:
        self._check()
        state = context.state.train_state
        if not (self._trains and state.do_train) and not state.do_test:
            self.uninstall()

    def on_test_end(self, context: CallbackContext) -> None:
        self._check()
        self.uninstall()

    def _check(self) -> None:
        if self.installation is not None:
            self.installation.check()

    def _log(self, context: CallbackContext, metrics: dict[str, float]) -> None:
        """Of all pipeline stages; collective."""
        from echo_megatron.diagnostics import gather

        stages = get_pg_collection(context.model).pp
        if stages.size() > 1:
            metrics = gather(metrics, stages, next(context.model[0].parameters()).device)
        log_metrics(context.state, metrics, context.state.train_state.step + 1)


class _PostWrapHook:
    """Hands the wrapped model to the configuration's callback."""

    def __init__(self, config: EchoConfigContainer) -> None:
        self._config = config

    def __call__(self, chunks: list[Any]) -> list[Any]:
        if self._config._callback is None:
            raise ValueError(
                f"echo: echo.tp_comm={self._config.echo.tp_comm}, but there is no EchoCallback, which installs and "
                "watches it; call pretrain(config, forward_step, callbacks=[EchoCallback(config)])"
            )
        self._config._callback.install(chunks)
        return chunks

    def __deepcopy__(self, memo: dict[int, Any]) -> _PostWrapHook:
        return self  # Megatron copies model configurations; the callback and its process groups can't be
