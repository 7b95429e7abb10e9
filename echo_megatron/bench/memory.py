"""The memory that inputs are cut from: symmetric where GPUs reach each other's, so that every baseline can use it."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.bench.rows import ITEMSIZE
from echo_megatron.bench.timing import ALIGNED_VALUES, POOL_BYTES


class Memory:
    """BF16 values on every rank of a group.

    Args:
        num_bytes: of the largest message.
        group: the ranks.
        device: this rank's.
    """

    def __init__(self, num_bytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        largest = max(num_bytes, POOL_BYTES if device.type == "cuda" else 0)
        # The largest message may have a few more values beside it, see `rows.smooth_sizes`.
        num_values = -(-largest * 21 // 20 // ITEMSIZE // ALIGNED_VALUES) * ALIGNED_VALUES + ALIGNED_VALUES
        self.group = group
        self._handle: Any = None
        self._signals: Any = None
        if device.type == "cuda":
            self._one = torch.zeros(1, device=device)
            try:
                self._allocate_symmetric(num_values, device)
                return
            except RuntimeError as error:
                print(f"rank {group.rank()}: no symmetric memory: {error}", file=sys.stderr)
        self.values = torch.empty(num_values, dtype=torch.bfloat16, device=device)

    @property
    def is_symmetric(self) -> bool:
        """Whether `peer` works, and PyTorch's symmetric-memory kernels on `values`."""
        return self._handle is not None

    def peer(self, rank: int) -> Tensor:
        """The values of a rank."""
        assert self._handle is not None
        return self._handle.get_buffer(rank, self.values.shape, self.values.dtype)

    def barrier(self) -> None:
        """A barrier of the ranks: of their current streams on GPUs."""
        if self._signals is not None:
            self._signals.barrier()
        elif self.values.is_cuda:
            dist.all_reduce(self._one, group=self.group)
        else:
            dist.barrier(self.group)

    def _allocate_symmetric(self, num_values: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.values = symmetric_memory.empty(num_values, dtype=torch.bfloat16, device=device)
        self._handle = symmetric_memory.rendezvous(self.values, self.group)
        # Memory of its own: PyTorch's kernels use the signals of the other.
        self._aligned = symmetric_memory.empty(ALIGNED_VALUES, dtype=torch.bfloat16, device=device)
        self._signals = symmetric_memory.rendezvous(self._aligned, self.group)
