"""The p2p transport's memory: one symmetric buffer a rank, mapped by every peer, from allocation to a collective end.

The buffer's layout is cuda/layout.cuh. Its size depends on the config and the GPU alone, never on a message.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.config import QUANTIZED_BITS, EchoConfig
from echo_megatron.ops import index_of
from echo_megatron.transports.protocol import CommunicationError
from echo_megatron.tuning import MAX_DEPTH

NUM_FAILURE_FIELDS = 16
TEAMS_A_BLOCK = 4  # cuda/layout.cuh, kTeams


class Workspace:
    """Slots and flags of one rank, and where its peers' are.

    Args:
        rank: of this process in its group.
        buffer: uint8, this rank's workspace, zeroed before any peer writes to it.
        peers: device addresses of every rank's workspace, this rank's own included.
        num_teams: teams that have rings.
        ring: slots of a ring.
        slot_bytes: size of a slot.
    """

    def __init__(
        self, rank: int, buffer: Tensor, peers: Sequence[int], num_teams: int, ring: int, slot_bytes: int
    ) -> None:
        self.rank, self.world_size = rank, len(peers)
        self.buffer = buffer
        self.peers = list(peers)
        self.num_teams, self.ring, self.slot_bytes = num_teams, ring, slot_bytes
        # Kernels write what failed here; the host looks without a synchronization.
        self.failure = torch.zeros(NUM_FAILURE_FIELDS, dtype=torch.int64).pin_memory()
        self._failure = self.failure.numpy()

    @property
    def max_blocks(self) -> int:
        """Thread blocks that the rings serve."""
        return self.num_teams // TEAMS_A_BLOCK

    def num_bytes(self) -> int:
        """Device memory of this rank's workspace."""
        return self.buffer.numel()

    @property
    def has_failed(self) -> bool:
        """A kernel gave up a wait, here or on a peer that said so."""
        return bool(self._failure[0])

    def failure_fields(self) -> list[int]:
        """The record of cuda/arguments.cuh: code, peer, stage, row, expected, seen, site index, direction, chunk."""
        return [int(field) for field in self._failure]


_abandoned: list[object] = []  # memory that peers may still write to


class SymmetricWorkspace(Workspace):
    """A workspace in PyTorch symmetric memory, which maps the peers' buffers.

    Collective: every rank of the group creates it together, and destroys it together.

    Args:
        group: the tensor-parallel group; all ranks on one host.
        device: this rank's GPU.
        config: bits, policy and group size decide the slots.

    Raises:
        CommunicationError: a rank could not allocate or map; all ranks raise.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: EchoConfig) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.group, self.device = group, device
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        num_teams = TEAMS_A_BLOCK * min(gather_numbers(group, multiprocessors))
        ring = torch.ops.echo_megatron.ring_size(MAX_DEPTH)
        slot_bytes = slot_bytes_for(config)
        size = torch.ops.echo_megatron.workspace_bytes(group.size(), num_teams, ring, slot_bytes)
        buffer = all_or_none(
            group,
            f"allocate {size / 2**20:.1f} MiB of symmetric memory",
            lambda: symmetric_memory.empty(size, dtype=torch.uint8, device=device),
        )
        self._handle: Any = all_or_none(
            group, "map the peers' memory", lambda: symmetric_memory.rendezvous(buffer, group)
        )
        buffer.zero_()
        torch.cuda.synchronize(device)
        gather_numbers(group, 0)  # no rank writes before every rank has zeroed
        super().__init__(group.rank(), buffer, self._handle.buffer_ptrs, num_teams, ring, slot_bytes)

    def destroy(self) -> None:
        """Gives the memory back; collective. After a failed call it does not wait for the other ranks."""
        if self._handle is None:
            return
        torch.cuda.synchronize(self.device)
        if not self.has_failed:
            gather_numbers(self.group, 0)  # a peer's kernel may still write here
        self._handle = None
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self.peers = []

    def abandon(self) -> None:
        """Ends without waiting for the other ranks; the memory stays theirs to write to until the process ends."""
        if self._handle is None:
            return
        _abandoned.append((self.buffer, self._handle))
        self._handle = None
        self.peers = []


def slot_bytes_for(config: EchoConfig) -> int:
    """The largest slot that a site of this config needs, or an all-gather."""
    bits = {config.bits, config.early_bits, config.last_bits, config.gather_bits} & set(QUANTIZED_BITS)
    return max(torch.ops.echo_megatron.slot_bytes(b, index_of(config.policy), config.group_size) for b in bits)


def gather_numbers(group: dist.ProcessGroup, number: int) -> list[int]:
    """`number` of every rank; a host synchronization."""
    on_cuda = "nccl" in dist.get_backend_config(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    numbers = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(numbers, mine, group=group)
    return numbers.tolist()


def all_or_none(group: dist.ProcessGroup, what: str, action: Callable[[], Any]) -> Any:
    """The action's result where it succeeded on every rank; otherwise all ranks raise."""
    result, reason = None, None
    try:
        result = action()
    except Exception as error:
        reason = error
    failed = [rank for rank, bad in enumerate(gather_numbers(group, int(reason is not None))) if bad]
    if failed:
        here = f": {reason}" if reason else ""
        raise CommunicationError(f"p2p transport: could not {what} on rank {', '.join(map(str, failed))}{here}")
    return result


def host_number() -> int:
    """Equal on two ranks when they run on one booted machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    identity = f"{socket.gethostname()} {boot.read_text() if boot.is_file() else ''}"
    return int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "little")
