"""What reports call a run's communication."""

from __future__ import annotations

from enum import Enum

from echo_megatron.config import PRESETS, Direction, EchoConfig
from echo_megatron.pretrain.schema import PretrainConfig


def tp_comm_name(config: EchoConfig) -> str:
    """What reports call a communication: the nearest preset and what differs from it, e.g. `echo4 eta=0.0`."""
    if not config.quantizes:
        return "nccl"
    config = _without_given_defaults(config)

    def differences(preset: str) -> list[str]:
        other = vars(EchoConfig.preset(preset))
        return [name for name, value in vars(config).items() if value != other[name]]

    nearest = min((name for name in PRESETS if name != "nccl"), key=lambda name: len(differences(name)))
    values = (f"{name}={_text(getattr(config, name))}" for name in differences(nearest))
    return " ".join((nearest, *values))


def _without_given_defaults(config: EchoConfig) -> EchoConfig:
    """Coefficients that are given as they would be without are left out."""
    names = ("eta", "beta1", "beta2")
    defaults = config.replace(**dict.fromkeys(names))
    given = [
        name
        for name in names
        if all(getattr(defaults.feedback_of(direction), name) == getattr(config, name) for direction in Direction)
    ]
    return config.replace(**dict.fromkeys(given))


def communication_name(config: PretrainConfig) -> str:
    """What reports call the tensor-parallel communication of a run: `echo4`, or `echo4 sequence_parallel`."""
    words = (tp_comm_name(config.tp_comm), *(["sequence_parallel"] if config.trainer.sequence_parallel else []))
    return " ".join(words)


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):
        return "+".join(_text(item) for item in value)
    return str(value)
