"""The memory of several ranks on one GPU: workspaces, flags, failure records, streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

# Read when CUDA is initialized. One hardware queue a stream: two ranks in one queue would wait for each other. All
# kernels loaded then: loading one at its first use waits for the ranks' kernels that run, which wait for that rank.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch

from echo_megatron import ops
from echo_megatron.config import Policy
from echo_megatron.workspace import MAX_DEPTH, TEAMS_A_BLOCK

# Of cuda/layout.cuh and cuda/arguments.cuh.
CONTROL_BYTES = 4096
SLOT_ALIGNMENT = 128
FLAG_BYTES = 8
NUM_STAGES = 2
FAILURE_CODES = ("none", "timeout", "mismatch", "peer")
STAGES = ("push", "gather", "rescale")
SPARE_MULTIPROCESSORS = 4  # for what else runs: fills, a sleeping rank, the consensus update


def resident_blocks(world_size: int) -> int:
    """Thread blocks a rank so that the kernels of all ranks are resident together, one block a multiprocessor."""
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return max(1, (multiprocessors - SPARE_MULTIPROCESSORS) // world_size)


@dataclass
class Failure:
    """A rank's failure record, read."""

    code: str
    peer: int
    stage: str
    row: int
    expected: int
    seen: int
    site: tuple[int, int, int]


class VirtualWorkspaces:
    """The memory of P ranks: workspaces, failure records, streams.

    Args:
        world_size: P, 2 to 8.
        num_blocks: thread blocks of a rank's kernel; None for all that fit.
        workspace_teams: teams that have rings in the workspace; None for those of `num_blocks`.
        timeout_s: bound of a wait on the device.
    """

    def __init__(
        self,
        world_size: int,
        num_blocks: int | None = None,
        workspace_teams: int | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        ops.load()
        torch.cuda._sleep(1)  # loads the kernel that delays a rank
        self.world_size = world_size
        self.num_blocks = resident_blocks(world_size) if num_blocks is None else num_blocks
        self.num_teams = TEAMS_A_BLOCK * self.num_blocks if workspace_teams is None else workspace_teams
        self.timeout_s = timeout_s
        library = torch.ops.echo_megatron
        self.ring = library.ring_size(MAX_DEPTH)
        self.slot_bytes = library.slot_bytes(8, ops.index_of(Policy.zero_aware), 32)  # the largest of all
        num_bytes = library.workspace_bytes(world_size, self.num_teams, self.ring, self.slot_bytes)
        assert num_bytes == self.slots_at().stop, "the layout here is not that of cuda/layout.cuh"
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
        self.peers = [buffer.data_ptr() for buffer in self.buffers]
        self.failure_records = [torch.zeros(16, dtype=torch.int64).pin_memory() for _ in range(world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        torch.cuda.synchronize()

    def fork(self) -> None:
        """Orders every rank behind the current stream."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Orders the current stream behind every rank."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def failures(self) -> list[Failure | None]:
        """Every rank's failure; waits for the GPU."""
        torch.cuda.synchronize()
        failures: list[Failure | None] = []
        for record in self.failure_records:
            code, peer, stage, row, expected, seen, *site = record.tolist()[:9]
            failure = Failure(FAILURE_CODES[code], peer, STAGES[stage], row, expected, seen, tuple(site))
            failures.append(failure if code else None)
        return failures

    def check(self) -> None:
        """Fails with every rank's failure if there is one; waits for the GPU."""
        failures = self.failures()
        assert not any(failures), f"failures by rank: {failures}"

    @property
    def epochs_at(self) -> slice:
        """Bytes of a workspace that hold the teams' epochs."""
        return slice(CONTROL_BYTES, CONTROL_BYTES + 4 * self.num_teams)

    def flags_at(self, *stages: int) -> slice:
        """Bytes of a workspace that hold the flags of these stages, which follow each other; of all unless told."""
        return self._stages_at(aligned(self.epochs_at.stop), FLAG_BYTES, stages)

    def slots_at(self, *stages: int) -> slice:
        """Bytes of a workspace that hold the slots of these stages."""
        return self._stages_at(aligned(self.flags_at().stop), self.slot_bytes, stages)

    def _stages_at(self, begin: int, slot_bytes: int, stages: Sequence[int]) -> slice:
        num_bytes = (self.world_size - 1) * self.num_teams * self.ring * slot_bytes  # of one stage
        first, last = (min(stages), max(stages)) if stages else (0, NUM_STAGES - 1)
        return slice(begin + first * num_bytes, begin + (last + 1) * num_bytes)

    def set_epochs(self, epoch: int) -> None:
        """Makes the workspaces look as if every team had done `epoch` tiles, each slot written by its last tile."""
        last_tiles = [epoch - 1 - (epoch - 1 - slot) % self.ring for slot in range(self.ring)]
        # Exponent and signature, in the upper half of a flag, are only looked at where the tile number is the expected.
        flags = torch.tensor([(tile + 1) % 2**32 for tile in last_tiles], dtype=torch.int64, device="cuda")
        for buffer in self.buffers:
            buffer[self.epochs_at].view(torch.int32).fill_(_as_int32(epoch))
            buffer[self.flags_at()].view(torch.int64).view(-1, self.ring).copy_(flags)
        torch.cuda.synchronize()

    def epochs(self, rank: int) -> list[int]:
        """Tiles that each team of a rank has done, modulo 2^32; waits for the GPU."""
        torch.cuda.synchronize()
        words = self.buffers[rank][self.epochs_at].view(torch.int32)
        return [word % 2**32 for word in words.tolist()]

    def set_amax_epoch(self, epoch: int) -> None:
        """The number of calls with `rescale: group` so far; at least two calls before it wraps."""
        for buffer in self.buffers:
            buffer[:4].view(torch.int32).fill_(_as_int32(epoch))
        torch.cuda.synchronize()


def aligned(offset: int) -> int:
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _as_int32(word: int) -> int:
    word %= 2**32
    return word - 2**32 if word >= 2**31 else word
