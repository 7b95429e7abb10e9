"""Symbols of megatron-core and Transformer Engine that Echo needs, with an error that says which version lacks them."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MEGATRON_VERSIONS = "0.15.3 to 0.19.2"  # what the tests ran with


def require(module: str, symbol: str) -> Any:
    """`module.symbol` of megatron-core.

    Raises:
        ImportError: megatron-core is missing, or is a version without it; the message names the symbol and the versions
            that have it.
    """
    try:
        return getattr(import_module(module), symbol)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"echo: megatron-core {installed('megatron-core')} has no {module}.{symbol} ({error}). Expected "
            f"megatron-core {MEGATRON_VERSIONS}; install one of these, or a newer echo-megatron"
        ) from error


def installed(distribution: str) -> str:
    """The installed version of a distribution, or `(not installed)`."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def transformer_engine(module: str) -> Any:
    """A module of Transformer Engine, e.g. `pytorch.distributed`, or None where nothing has imported it.

    A model whose layers are Transformer Engine's has imported it before; Echo never does.
    """
    return sys.modules.get(f"transformer_engine.{module}")
