"""The section `echo` of a Megatron-Bridge configuration; needs no Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from echo_megatron.config import EchoConfig, plain
from echo_megatron.integrations.options import OPTION_NAMES, resolve


@dataclass
class EchoBridgeConfig:
    """The flag `tp_comm` and the options beside it, as overrides `echo.tp_comm=echo4 echo.eta=0.5` of a Bridge run.

    Values are checked by `resolve`, after the overrides. An undeclared name is refused at once, also where it is only
    asked for: Bridge's overrides ask with `hasattr` and would drop a misspelt key of a YAML file with a warning.

    Attributes:
        tp_comm: `echo4`, `echo8`, `echo4_paper`, `echo8_paper`, or `nccl`, which leaves Bridge as it is.
        inspect_every: log `echo/…` quantities of every site each so many training steps; 0: never, at no cost.

    The others are EchoConfig's options; None means as the preset `tp_comm` has it.
    """

    tp_comm: str = "nccl"
    inspect_every: int = 0
    bits: int | None = None
    policy: str | None = None
    group_size: int | None = None
    algorithm: str | None = None
    transport: str | None = None
    residual: str | None = None
    backward_residual: str | None = None
    rescale: str | None = None
    eta: float | None = None
    a: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    state_dtype: str | None = None
    min_bytes: int | None = None
    directions: list[str] | None = None
    phases: list[str] | None = None
    early_bits: int | None = None
    early_fraction: float | None = None
    last_bits: int | None = None
    last_layers: int | None = None
    gather_bits: int | None = None
    timeout_s: float | None = None

    def resolve(self) -> EchoConfig:
        """The options of the preset with those that are given.

        Raises:
            ValueError: an unknown flag, an illegal value, or an option that would do nothing; by its key.
        """
        try:
            config = resolve(self.tp_comm, {name: getattr(self, name) for name in OPTION_NAMES})
        except ValueError as error:
            raise ValueError(f"echo.{error}") from error
        every = self.inspect_every
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"echo.inspect_every: expected an integer >= 0 (training steps), got {every!r}")
        if every and not config.quantizes:
            raise ValueError(
                f"echo.inspect_every={every}: with echo.tp_comm={self.tp_comm} there is nothing to inspect, it would "
                "do nothing; set echo.tp_comm=echo4 or echo.inspect_every=0"
            )
        return config

    def finalize(self) -> None:
        """Bridge's name for checking a section after the overrides; raises what `resolve` raises."""
        self.resolve()

    def to_cfg_dict(self) -> dict[str, Any]:
        """What Bridge writes into run_config.yaml: what is given, in plain types, and the class to build again."""
        cls = type(self)
        given = {name: plain(value) for name, value in vars(self).items() if value is not None}
        return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **given}

    def __getattr__(self, name: str) -> NoReturn:
        # Only for names that are not there. Python itself asks for underscored ones (copy, pickle).
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _NAMES:
            self._refuse(name)
        super().__setattr__(name, value)

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(f"echo.{name}: unknown option; expected one of {', '.join(sorted(_NAMES))}")


_NAMES = frozenset(field.name for field in fields(EchoBridgeConfig))


def describe(section: Mapping[str, Any] | None) -> str:
    """A saved section `echo` in one line, `tp_comm=echo4 eta=0.5`; one that is missing is `tp_comm=nccl`.

    Args:
        section: from `to_cfg_dict`, or the like of another version; None where a run was made without Echo.
    """
    given = dict(section or {})
    tp_comm = given.pop("tp_comm", "nccl")
    options = sorted((name, value) for name, value in given.items() if name not in ("_target_", "inspect_every"))
    return " ".join(f"{name}={value}" for name, value in (("tp_comm", tp_comm), *options) if value is not None)
