"""A kernel that sends to itself: one GPU, one process, every step of a call but the wire. For a profiler to look at.

Both peers' addresses are this GPU's own workspace, so each record arrives where it is awaited. The sums are of no use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import QUANTIZED_BITS, Algorithm, Direction, EchoConfig, Policy, StateDtype
from echo_megatron.sites import Site
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.tuning import MAX_DEPTH, load_table
from echo_megatron.workspace import Workspace, slot_bytes_for

TEAMS_A_BLOCK = 4
_GROUP_SIZES = {Policy.rotated: 32, Policy.zero_aware: 128}


@dataclass(frozen=True)
class Variant:
    """One kernel to look at; `state_dtype` None is a call without compensation."""

    policy: Policy
    bits: int
    algorithm: Algorithm
    state_dtype: StateDtype | None

    @property
    def label(self) -> dict[str, Any]:
        """What results call it."""
        return {
            "policy": self.policy.name,
            "bits": self.bits,
            "algorithm": self.algorithm.name,
            "state_dtype": self.state_dtype.name if self.state_dtype else None,
        }

    def config(self) -> EchoConfig:
        state = {"eta": 0.0} if self.state_dtype is None else {"state_dtype": self.state_dtype}
        return EchoConfig(
            bits=self.bits,
            policy=self.policy,
            group_size=_GROUP_SIZES[self.policy],
            algorithm=self.algorithm,
            **state,
        )


def variants() -> Iterator[Variant]:
    """Everything left out one by one: compensation, then its wider state; both algorithms, widths and quantizers."""
    for policy in _GROUP_SIZES:
        for bits in QUANTIZED_BITS:
            for algorithm in (Algorithm.one_shot, Algorithm.two_shot):
                for state_dtype in (None, StateDtype.compact, StateDtype.bf16):
                    yield Variant(policy, bits, algorithm, state_dtype)


class LoopbackCall:
    """One variant, ready to be called in place on BF16 values.

    Args:
        variant: what is called.
        values: bf16 on the GPU; copied.
    """

    def __init__(self, variant: Variant, values: torch.Tensor) -> None:
        config, device = variant.config(), values.device
        ops.load()
        library = torch.ops.echo_megatron
        num_teams = TEAMS_A_BLOCK * torch.cuda.get_device_properties(device).multi_processor_count
        ring, slot_bytes = library.ring_size(MAX_DEPTH), slot_bytes_for(config)
        num_bytes = library.workspace_bytes(2, num_teams, ring, slot_bytes)
        self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        workspace = Workspace(0, self._buffer, [self._buffer.data_ptr()] * 2, num_teams, ring, slot_bytes)
        self._transport = P2PTransport(workspace, config, load_table(torch.cuda.get_device_name(device)))
        self._compensator = Compensator(config) if config.compensates else None
        self._site = Site(1, Direction.forward, bits=variant.bits)  # reads the state, as all sites but the first do
        self._values, self._x = values, values.clone()

    def prepare(self) -> None:
        """The input anew: the last call overwrote it."""
        self._x.copy_(self._values)

    def __call__(self) -> None:
        self._transport.all_reduce(self._x, self._site, self._compensator, self._x)

    def check(self) -> None:
        """Raises CommunicationError if a call failed."""
        self._transport.check()
