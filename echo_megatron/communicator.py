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
from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, Feedback, TransportName
from echo_megatron.reference import check_dtype, check_group, check_scattered_residual, check_shares
from echo_megatron.replay import ReplayCache, inside_backward
from echo_megatron.sites import PassClock, Site
from echo_megatron.transports.collective import CollectiveTransport
from echo_megatron.transports.options import options_of
from echo_megatron.transports.peers import Peers
from echo_megatron.transports.protocol import CommunicationError, Reduced, Transport

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


def _never() -> bool:
    return False


class Communicator:
    """The compensated, quantized collectives of one tensor-parallel group.

    Args:
        group: the process group; 1 to 8 ranks.
        config: the options.
        is_recomputed: tells, during a forward pass, whether it will run again inside the backward pass.
        max_passes: see `ReplayCache`.

    Collective: every rank of the group creates it together, with the same options, and `destroy`s it together.

    Raises:
        ValueError: the ranks' options differ, the group's size is out of range, the config does not quantize, or
            `transport: p2p` can't be had.
        CommunicationError: a rank does not come within `timeout_s` to create it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: EchoConfig,
        is_recomputed: Callable[[], bool] = _never,
        max_passes: int | None = None,
    ) -> None:
        self.group = group
        self.world_size = group.size()
        self.config = config
        self.transport, self._why = _make_transport(group, config)
        self.replays = ReplayCache(max_passes)
        self.site_groups: list[Any] = []  # the `EchoProcessGroup`s that send their sums here
        self._is_recomputed = is_recomputed
        self._clocks = {direction: PassClock() for direction in Direction}
        self._compensators = {direction: Compensator(config, direction) for direction in Direction}
        if group.rank() == 0:
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """One line: transport, algorithm, thresholds, and why."""
        config = self.config
        by_message = self.transport.algorithm is Algorithm.auto
        why = "chosen by message" if by_message else f"at {self.group.size()} ranks"
        feedback = _by_direction(lambda direction: _feedback(config.feedback_of(direction)))
        state_dtypes = _by_direction(lambda direction: config.state_dtype_of(direction).name)
        compensation = (
            f"{_residuals(config)}, {feedback}, {state_dtypes} state" if config.compensates else "no compensation"
        )
        return (
            f"echo: {config.bits}-bit {config.policy.name} (groups of {config.group_size}), "
            f"{self.transport.name} transport ({self._why}), algorithm {self.transport.algorithm.name} ({why}), "
            f"{compensation}, rescale {config.rescale.name}; "
            f"messages under {self.min_bytes()} bytes stay at full precision; "
            f"{self.transport.num_bytes() / 2**20:.1f} MiB of workspace"
        )

    def min_bytes(self, dtype: torch.dtype = torch.bfloat16, collective: Collective = Collective.all_reduce) -> int:
        """Messages in `dtype` of fewer bytes are not quantized: the config's `min_bytes`, or what was measured.

        A message is the larger of the call's two tensors: what goes into a reduce-scatter, what comes out of an
        all-gather.
        """
        return self.transport.min_bytes(dtype, collective) if self.config.min_bytes is None else self.config.min_bytes

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
        if (replayed := self._replay(site)) is not None:
            return replayed if out is None else out.copy_(replayed)
        compensator, keep = self._begin(x, site)
        with _without_grad():
            reduced = self.transport.all_reduce(x, site, compensator, out, keep)
        if keep:
            self.replays.keep(site, reduced)
        return reduced.output

    def reduce_scatter(self, x: Tensor, site: Site, *, out: Tensor | None = None) -> Tensor:
        """This rank's share of the sum of `x` over the ranks of the group.

        Args:
            x: [P * rows, ...] of any strides; bf16, fp16 or fp32; left alone.
            site: where in the pass the call is; the same on all ranks.
            out: where the share goes: [rows, ...] of x's dtype, contiguous memory apart from x.

        Returns:
            `out`, or a new contiguous tensor [rows, ...] of x's dtype.

        Raises:
            ValueError: x has another dtype, P does not divide its first dimension, or the residual is consensus.
            CommunicationError: a rank is missing, late, or makes another call.
        """
        check_dtype(x)
        check_shares(x, self.world_size)
        check_scattered_residual(self.config, site.direction)
        if self.world_size == 1 or x.numel() == 0:
            return _copied(x[: x.shape[0] // self.world_size], out)
        if (replayed := self._replay(site)) is not None:
            return replayed if out is None else out.copy_(replayed)
        compensator, keep = self._begin(x, site)
        with _without_grad():
            output = self.transport.reduce_scatter(x, site, compensator, out)
        if keep:
            # A P-th of the tensor: the codes of the other ranks and the exact share that it is made of take more.
            self.replays.keep(site, Reduced(output, output, _same))
        return output

    def all_gather(self, x: Tensor, site: Site, *, out: Tensor | None = None) -> Tensor:
        """The ranks' `x`, one behind the other, as all of them decode it; no state is read or written.

        Args:
            x: [rows, ...] of any strides; bf16, fp16 or fp32; left alone.
            site: which linear's; its bits are those of the codes. The same on all ranks.
            out: where the result goes: [P * rows, ...] of x's dtype, contiguous memory apart from x.

        Returns:
            `out`, or a new contiguous tensor [P * rows, ...] of x's dtype: the same bits on every rank and, for the
            same x, in every call, so that an input that is gathered again for a weight gradient is the forward pass's.

        Raises:
            ValueError: x has another dtype.
            CommunicationError: a rank is missing, late, or makes another call.
        """
        check_dtype(x)
        if self.world_size == 1 or x.numel() == 0:
            return _copied(x.repeat(self.world_size, *[1] * (x.dim() - 1)), out)
        with _without_grad():
            return self.transport.all_gather(x, site, out)

    def _replay(self, site: Site) -> Tensor | None:
        """What the site gave in the pass that is being recomputed, or None: this is no recompute."""
        return self.replays.replay(site) if site.direction is Direction.forward and inside_backward() else None

    def _begin(self, x: Tensor, site: Site) -> tuple[Compensator | None, bool]:
        """Notes a call that sums; the compensator to use, and whether the result has to be kept for a replay."""
        compensator, forward = self._compensators[site.direction], site.direction is Direction.forward
        is_captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._clocks[site.direction].tick(site, is_captured):
            compensator.reset()
            if forward:
                self.replays.begin_pass(site.chunk)
        return compensator if self.config.compensates else None, forward and self._is_recomputed()

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


def _feedback(feedback: Feedback) -> str:
    averages = "" if feedback.is_memoryless else f" betas {feedback.beta1:g}, {feedback.beta2:g}"
    return f"eta {feedback.eta:g}{averages}"


def _by_direction(words: Callable[[Direction], str]) -> str:
    forward, backward = map(words, Direction)
    return forward if forward == backward else f"{forward} forward and {backward} backward"


def _copied(x: Tensor, out: Tensor | None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


def _same(output: Tensor) -> Tensor:
    return output


def _make_transport(group: dist.ProcessGroup, config: EchoConfig) -> tuple[Transport, str]:
    """The transport, the same kind on every rank, and why. Collective."""
    # Before anything that a rank may refuse or do alone: the others would wait for it.
    peers = Peers(group, options_of(config), config.timeout_s) if group.size() > 1 else None
    check_group(group.size(), config)
    if config.transport is TransportName.collective:
        return CollectiveTransport(group, config, peers), "asked for"
    if peers is None:
        return CollectiveTransport(group, config, peers), "one rank"
    asked = config.transport is TransportName.p2p
    if not asked and not (torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)):
        return CollectiveTransport(group, config, peers), "no GPUs in this group"
    from echo_megatron.transports import p2p_setup

    reason = p2p_setup.agree(group)
    if reason is None:
        try:
            return p2p_setup.connect(group, config), "asked for" if asked else "all ranks reach each other's memory"
        except CommunicationError as error:
            reason = str(error)
    if asked:
        raise ValueError(f"transport p2p: {reason}; remove the cause, or use transport: auto or collective")
    return CollectiveTransport(group, config, peers), f"p2p is not possible: {reason}"
