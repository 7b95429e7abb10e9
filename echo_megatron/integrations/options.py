"""The flag `tp_comm` and the options beside it, as every front end takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from echo_megatron.config import EchoConfig

OPTION_NAMES = tuple(field.name for field in fields(EchoConfig))


def resolve(tp_comm: str, options: Mapping[str, Any] | None = None) -> EchoConfig:
    """The options of the preset `tp_comm` with those of `options` that are not None.

    Args:
        tp_comm: `nccl`, `echo4`, `echo8`, `echo4_paper` or `echo8_paper`.
        options: EchoConfig's fields by name; None means not given.

    Raises:
        ValueError: an unknown flag or option, an illegal value, or options beside `nccl`, where they would do nothing.
    """
    if not isinstance(tp_comm, str):
        raise ValueError(f"tp_comm: expected the name of a preset such as echo4 or nccl, got {tp_comm!r}")
    given = {name: value for name, value in (options or {}).items() if value is not None}
    config = EchoConfig.preset(tp_comm, **given)
    if given and not EchoConfig.preset(tp_comm).quantizes:
        raise ValueError(
            f"tp_comm={tp_comm}: it is the framework's own communication, so {', '.join(sorted(given))} would do "
            "nothing; set tp_comm=echo4, or remove the option"
        )
    return config
