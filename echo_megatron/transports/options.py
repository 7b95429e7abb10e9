"""What has to be the same on all ranks of a group before they communicate: the options, and who speaks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum

from echo_megatron import __version__
from echo_megatron.config import EchoConfig

VERSION = "version of echo_megatron"
# How long a rank waits decides nothing that another rank sees; one whose peers do slow work may wait longer.
NOT_COMPARED = frozenset({"timeout_s"})


def options_of(config: EchoConfig) -> dict[str, str]:
    """Option -> its value in words, equal where two ranks make the same calls of it."""
    named = {field.name: _words(getattr(config, field.name)) for field in fields(config)}
    return {VERSION: __version__} | {name: value for name, value in named.items() if name not in NOT_COMPARED}


def differences(ranks: Sequence[Mapping[str, str]]) -> str:
    """Each option that differs, with the value of every rank; empty where all are the same.

    Args:
        ranks: `options_of` every rank, in rank order. Another version's may have other names.
    """
    names = dict.fromkeys(name for options in ranks for name in options)
    values = {name: [options.get(name, "no such option") for options in ranks] for name in names}
    return "; ".join(f"{name}: {_by_value(of_ranks)}" for name, of_ranks in values.items() if len(set(of_ranks)) > 1)


def numbered(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _by_value(values: Sequence[str]) -> str:
    ranks = {value: [rank for rank, its in enumerate(values) if its == value] for value in values}
    return " and ".join(f"{value} on {numbered(of_value)}" for value, of_value in ranks.items())


def _words(value: object) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list):  # of directions or phases: which ones counts, not their order
        return f"[{', '.join(sorted(set(map(_words, value))))}]"
    return "none" if value is None else repr(value)
