"""The table that says once, at install, what is covered and what keeps its communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo_megatron.communicator import Communicator
from echo_megatron.config import Collective, Direction
from echo_megatron.integrations.megatron_sites import FoundSite, gather_direction

_TITLES = ("layers", "module", "direction", "collective", "shape", "bits", "transport")
# Sums of Megatron that are no module's.
_OTHER = ("cross-entropy", "norm gradients", "gradient norm")


def describe(communicator: Communicator | None, found: Sequence[FoundSite], exact: Iterable[str]) -> str:
    """The table as text.

    Args:
        communicator: what is installed, or None.
        found: the covered sites.
        exact: modules that keep their own communication.
    """
    if communicator is None:
        return "echo: nothing installed; tensor parallelism uses Megatron's own communication"
    layers: dict[tuple[str, ...], list[int]] = {}
    for one, direction, collective, bits in [*_sums(found), *_gathers(found)]:
        shape = f"[…, {one.hidden_size}]"
        row = (one.module, direction.name, _words(collective), shape, str(bits), communicator.transport.name)
        layers.setdefault(row, []).append(one.layer)
    rows = [_TITLES, *((_ranges(numbers), *row) for row, numbers in layers.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [
            communicator.describe(),
            *lines,
            f"not quantized: {', '.join((*exact, *_OTHER))}",
        ]
    )


_Row = tuple[FoundSite, Direction, Collective, int]


def _sums(found: Sequence[FoundSite]) -> list[_Row]:
    return [(one, one.site.direction, one.collective, one.site.bits) for one in found if one.sums]


def _gathers(found: Sequence[FoundSite]) -> list[_Row]:
    """In the order of a forward and of a backward pass."""
    rows = [
        (one, gather_direction(one.site), Collective.all_gather, one.gather.bits)
        for one in reversed(found)
        if one.gather is not None
    ]
    return sorted(rows, key=lambda row: list(Direction).index(row[1]))


def _words(collective: Collective) -> str:
    return collective.name.replace("_", "-")


def _ranges(numbers: Iterable[int]) -> str:
    """Layer numbers as `0-13, 15`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
