"""One tensor-parallel group: its transport, both directions' compensators, the pass clock and the replay cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, TransportName
from echo_megatron.reference import check_dtype, check_group
from echo_megatron.replay import ReplayCache, inside_backward
from echo_megatron.sites import PassClock, Site
from echo_megatron.transports.collective import CollectiveTransport
from echo_megatron.transports.protocol import CommunicationError, Transport

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


def _never() -> bool:
    return False


class Communicator:
    """The compensated, quantized all-reduce of one tensor-parallel group.

    Args:
        group: the process group; 1 to 8 ranks.
        config: the options.
        is_recomputed: tells, during a forward pass, whether it will run again inside the backward pass.
        max_passes: see `ReplayCache`.

    Collective: every rank of the group creates it together, and `destroy`s it together.

    Raises:
        ValueError: the group's size is out of range, the config does not quantize, or `transport: p2p` can't be had.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: EchoConfig,
        is_recomputed: Callable[[], bool] = _never,
        max_passes: int | None = None,
    ) -> None:
        check_group(group.size(), config)
        self.group = group
        self.world_size = group.size()
        self.config = config
        self.transport, self._why = _make_transport(group, config)
        self.replays = ReplayCache(max_passes)
        self.site_groups: list[Any] = []  # the `EchoProcessGroup`s that send their sums here
        self._is_recomputed = is_recomputed
        self._clocks = {direction: PassClock() for direction in Direction}
        self._compensators = {direction: Compensator(config) for direction in Direction}
        if group.rank() == 0:
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """One line: transport, algorithm, thresholds, and why."""
        config = self.config
        by_message = self.transport.algorithm is Algorithm.auto
        why = "chosen by message" if by_message else f"at {self.group.size()} ranks"
        compensation = (
            f"{_residuals(config)}, eta {config.eta:g}, {config.state_dtype.name} state"
            if config.compensates
            else "no compensation"
        )
        return (
            f"echo: {config.bits}-bit {config.policy.name} (groups of {config.group_size}), "
            f"{self.transport.name} transport ({self._why}), algorithm {self.transport.algorithm.name} ({why}), "
            f"{compensation}, rescale {config.rescale.name}; "
            f"messages under {self.min_bytes()} bytes stay at full precision; "
            f"{self.transport.num_bytes() / 2**20:.1f} MiB of workspace"
        )

    def min_bytes(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Messages in `dtype` of fewer bytes are not quantized: the config's `min_bytes`, or what was measured."""
        return self.transport.min_bytes(dtype) if self.config.min_bytes is None else self.config.min_bytes

    def all_reduce(self, x: Tensor, site: Site, *, out: Tensor | None = None) -> Tensor:
        """The sum of `x` over the ranks of the group.

        Args:
            x: any shape and strides; bf16, fp16 or fp32; left alone unless it is `out`. With `residual: consensus` it
                must stay as it is until the direction's next call, unless it is `out`.
            site: where in the pass the call is; the same on all ranks.
            out: where the sum goes, of x's shape and dtype; may be x itself.

        Returns:
            `out`, or a new contiguous tensor of x's shape and dtype; the same bits on every rank.

        Raises:
            ValueError: x has another dtype.
            CommunicationError: a rank is missing, late, or makes another call.
        """
        check_dtype(x)
        if self.world_size == 1 or x.numel() == 0:
            return _copied(x, out)
        forward = site.direction is Direction.forward
        if forward and inside_backward():
            replayed = self.replays.replay(site)
            return replayed if out is None else out.copy_(replayed)
        compensator = self._compensators[site.direction]
        is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._clocks[site.direction].tick(site, is_captured):
            compensator.reset()
            if forward:
                self.replays.begin_pass(site.chunk)
        keep = forward and self._is_recomputed()
        with _without_grad():
            reduced = self.transport.all_reduce(x, site, compensator if self.config.compensates else None, out, keep)
        if keep:
            self.replays.keep(site, reduced)
        return reduced.output

    def exact_all_reduce(self, x: Tensor, site: Site, *, out: Tensor | None = None) -> Tensor:
        """The sum in FP32 in rank order, rounded once; for messages too small to gain from quantization (p2p only)."""
        check_dtype(x)
        if self.world_size == 1 or x.numel() == 0:
            return _copied(x, out)
        with _without_grad():
            return self.transport.exact_all_reduce(x, site, out)

    def sums_exactly(self, x: Tensor) -> bool:
        """Whether `exact_all_reduce` serves a message that is not quantized in less time than the group's own."""
        return x.is_cuda and x.numel() * x.element_size() < self.transport.exact_below_bytes(x.dtype)

    def prepare_capture(self) -> None:
        """CUDA graphs are going to capture calls and to replay them between calls that they do not hold.

        Raises:
            ValueError: the transport's calls can't be captured; the message says why this transport was taken.
        """
        try:
            self.transport.prepare_capture()
        except ValueError as error:
            raise ValueError(f"echo: {error} ({self._why})") from error

    def check(self) -> None:
        """Raises CommunicationError if a call so far failed on the device. Synchronize first to know of all of them.

        A call of the p2p transport returns before it ran; what it met is raised by the next call, or here.
        """
        self.transport.check()

    def destroy(self) -> None:
        """Gives the transport's memory back; collective. No call may follow."""
        self.replays.clear()
        self.transport.destroy()

    def abandon(self) -> None:
        """In place of `destroy`, after an error that may be this rank's alone: not collective, and no call may follow.

        The transport's memory is kept until the process ends, because other ranks may still write to it.
        """
        self.replays.clear()
        self.transport.abandon()

    def reset(self) -> None:
        """Forgets every pass under way: for a caller that gave up a step and goes on."""
        for clock in self._clocks.values():
            clock.invalidate()
        self.replays.clear()

    def num_state_bytes(self) -> int:
        """Device memory of the compensators' state and the kept codes; the transport's is `transport.num_bytes`."""
        return sum(c.num_bytes() for c in self._compensators.values()) + self.replays.num_bytes()


def _without_grad() -> AbstractContextManager[None]:
    """`torch.no_grad()`, which costs as much as the rest of this class's part in a call, where it changes something."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def _residuals(config: EchoConfig) -> str:
    forward, backward = (config.residual_of(direction).name for direction in Direction)
    return f"{forward} residual" if forward == backward else f"{forward} residual forward and {backward} backward"


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


def _make_transport(group: dist.ProcessGroup, config: EchoConfig) -> tuple[Transport, str]:
    """The transport, the same kind on every rank, and why. Collective where there are GPUs."""
    if config.transport is TransportName.collective:
        return CollectiveTransport(group, config), "asked for"
    if group.size() == 1:
        return CollectiveTransport(group, config), "one rank"
    asked = config.transport is TransportName.p2p
    if not asked and not (torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)):
        return CollectiveTransport(group, config), "no GPUs in this group"
    from echo_megatron.transports import p2p

    reason = p2p.agree(group)
    if reason is None:
        try:
            return p2p.connect(group, config), "asked for" if asked else "all ranks reach each other's memory"
        except CommunicationError as error:
            reason = str(error)
    if asked:
        raise ValueError(f"transport p2p: {reason}; remove the cause, or use transport: auto or collective")
    return CollectiveTransport(group, config), f"p2p is not possible: {reason}"
