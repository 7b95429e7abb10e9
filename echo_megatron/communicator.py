"""One tensor-parallel group: its transport, both directions' compensators, the pass clock and the replay cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig
from echo_megatron.reference import check_dtype, check_group
from echo_megatron.replay import ReplayCache, inside_backward
from echo_megatron.sites import PassClock, Site
from echo_megatron.transports.collective import CollectiveTransport
from echo_megatron.transports.protocol import Transport

logger = logging.getLogger(__name__)


def _never() -> bool:
    return False


class Communicator:
    """The compensated, quantized all-reduce of one tensor-parallel group.

    Args:
        group: the process group; 1 to 8 ranks.
        config: the options.
        is_recomputed: tells, during a forward pass, whether it will run again inside the backward pass.
        max_passes: see `ReplayCache`.

    Raises:
        ValueError: the group's size is out of range, or the config does not quantize.
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
        self.config = config
        self.transport: Transport = CollectiveTransport(group, config)
        self.replays = ReplayCache(max_passes)
        self._is_recomputed = is_recomputed
        self._clocks = {direction: PassClock() for direction in Direction}
        self._compensators = {direction: Compensator(config) for direction in Direction}
        if group.rank() == 0:
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """One line: transport, algorithm, thresholds, and why."""
        config = self.config
        why = "chosen for" if config.algorithm is Algorithm.auto else "asked for at"
        compensation = (
            f"{config.residual.name} residual, eta {config.eta:g}" if config.compensates else "no compensation"
        )
        return (
            f"echo: {config.bits}-bit {config.policy.name} (groups of {config.group_size}), "
            f"{self.transport.name} transport, {self.transport.algorithm.name} ({why} {self.group.size()} ranks), "
            f"{compensation}, rescale {config.rescale.name}; "
            f"messages under {config.min_bytes} bytes stay at full precision"
        )

    def all_reduce(self, x: Tensor, site: Site) -> Tensor:
        """The sum of `x` over the ranks of the group.

        Args:
            x: any shape and strides; bf16, fp16 or fp32; left alone.
            site: where in the pass the call is; the same on all ranks.

        Returns:
            A new contiguous tensor of x's shape and dtype; the same bits on every rank.

        Raises:
            ValueError: x has another dtype.
            CommunicationError: a rank is missing, late, or makes another call.
        """
        check_dtype(x)
        if self.group.size() == 1 or x.numel() == 0:
            return x.clone(memory_format=torch.contiguous_format)
        forward = site.direction is Direction.forward
        if forward and inside_backward():
            return self.replays.replay(site)
        compensator = self._compensators[site.direction]
        if self._clocks[site.direction].tick(site):
            compensator.reset()
            if forward:
                self.replays.begin_pass(site.chunk)
        with torch.no_grad():
            reduced = self.transport.all_reduce(x, site, compensator if self.config.compensates else None)
        if forward and self._is_recomputed():
            self.replays.keep(site, reduced)
        return reduced.output

    def reset(self) -> None:
        """Forgets every pass under way: for a caller that gave up a step and goes on."""
        for clock in self._clocks.values():
            clock.invalidate()
        self.replays.clear()

    def num_state_bytes(self) -> int:
        """Device memory of the compensators' state and the kept codes."""
        return sum(c.num_bytes() for c in self._compensators.values()) + self.replays.num_bytes()
