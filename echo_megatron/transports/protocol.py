"""What every transport offers: one call that does a whole compensated all-reduce, and what a replay needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm
from echo_megatron.sites import Site


class CommunicationError(RuntimeError):
    """A call failed on its way: the message names the rank, the site, the phase and what was waited for."""


@dataclass
class Reduced:
    """The result of a call.

    Attributes:
        output: the sum, the input's shape and dtype, the same bits on every rank.
        codes: what `restore` needs: the wire records that the sum was decoded from, or the sum where it is smaller.
        restore: gives the output back from `codes`, bit for bit, without communication.
    """

    output: Tensor
    codes: Tensor
    restore: Callable[[Tensor], Tensor]


class Transport(Protocol):
    """How codes move between the ranks of one group."""

    name: str
    algorithm: Algorithm  # never `auto`

    def all_reduce(self, x: Tensor, site: Site, compensator: Compensator | None) -> Reduced:
        """Sums `x` over the ranks; reads and updates the compensator's state when there is one.

        Raises:
            CommunicationError: another rank is missing, late beyond `timeout_s`, or makes a different call.
        """
        ...
