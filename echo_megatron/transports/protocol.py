"""What every transport offers: one call that does a whole compensated collective, and what a replay needs of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Collective
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
    algorithm: Algorithm  # `auto`: by message

    def all_reduce(
        self,
        x: Tensor,
        site: Site,
        compensator: Compensator | None,
        out: Tensor | None = None,
        keep: bool = False,
    ) -> Reduced:
        """Sums `x` over the ranks; reads and updates the compensator's state when there is one.

        Args:
            x: this rank's contribution; left alone unless it is `out`.
            site: where in the pass the call is.
            compensator: whose state is used.
            out: where the sum goes; may be x itself.
            keep: the caller will ask for the sum again: `codes` and `restore` are needed.

        Raises:
            CommunicationError: another rank is missing, late beyond `timeout_s`, or makes a different call.
        """
        ...

    def reduce_scatter(
        self, x: Tensor, site: Site, compensator: Compensator | None, out: Tensor | None = None
    ) -> Tensor:
        """This rank's share of the sum of `x` over the ranks (`reference.SimulatedGroup.reduce_scatter`).

        Args:
            x: [P * rows, ...], this rank's contribution, of any strides; left alone.
            site: where in the pass the call is.
            compensator: whose state is used; its residual is `local`.
            out: where the share of the sum goes, contiguous memory apart from x.

        Returns:
            `out`, or a new contiguous tensor [rows, ...] of x's dtype.

        Raises:
            CommunicationError: as `all_reduce`.
        """
        ...

    def all_gather(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """The ranks' `x` as all of them decode it, one behind the other (`reference.SimulatedGroup.all_gather`).

        Args:
            x: [rows, ...] of this rank, of any strides; left alone.
            site: which linear's; `site.bits` are those of the codes. Nothing is fed back.
            out: where the result goes, contiguous memory apart from x.

        Returns:
            `out`, or a new contiguous tensor [P * rows, ...] of x's dtype: the same bits on every rank and, for the
            same x, in every call.

        Raises:
            CommunicationError: as `all_reduce`.
        """
        ...

    def correction(
        self, x: Tensor, site: Site, compensator: Compensator, collective: Collective = Collective.all_reduce
    ) -> Tensor | None:
        """c that this call of `all_reduce` or `reduce_scatter` is going to add to x, for diagnostics.

        Returns:
            fp32 [values of the working basis], for a reduce-scatter [P, values of a share's working basis], ordered on
            the current stream; None where nothing is added.
        """
        ...

    def num_sent_bytes(self, x: Tensor, site: Site, collective: Collective = Collective.all_reduce) -> int:
        """Bytes of wire records that this call sends to other ranks; x is the call's."""
        ...

    def exact_below_bytes(self, dtype: torch.dtype) -> int:
        """Messages of fewer bytes are better summed by `exact_all_reduce`; 0 where it is not offered."""
        ...

    def min_bytes(self, dtype: torch.dtype, collective: Collective = Collective.all_reduce) -> int:
        """Messages of fewer bytes gain nothing by being quantized.

        A message is the larger of the call's two tensors: what goes into a reduce-scatter, what comes out of an
        all-gather.
        """
        ...

    def exact_all_reduce(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """The sum in FP32 in rank order, rounded once (`reference.exact_sum`)."""
        ...

    def check(self) -> None:
        """Raises CommunicationError for a failure that calls since the last one met on the device."""
        ...

    def num_bytes(self) -> int:
        """Device memory that the transport keeps between calls."""
        ...

    def take_sent_bytes(self) -> int:
        """Bytes that calls wrote into other ranks' memory, not through torch.distributed, since this was last asked."""
        ...

    def prepare_capture(self) -> None:
        """CUDA graphs are going to capture calls and to replay them between calls that they do not hold.

        Raises:
            ValueError: a graph can't capture this transport's calls.
        """
        ...

    def destroy(self) -> None:
        """Gives its memory back; collective, and the last call."""
        ...

    def abandon(self) -> None:
        """In place of `destroy`, where the other ranks may not come: waits for nobody and keeps its memory."""
        ...
