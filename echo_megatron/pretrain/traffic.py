"""Counts the bytes that this rank sends for tensor parallelism: one instrument for every kind of communication."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers, mappings


class TrafficMeter:
    """Wraps torch.distributed's collectives, where they are called by name, and adds up what this rank sends.

    Counted on every group whose ranks are those of the tensor-parallel group, in bytes of payload:

    - all-reduce as a ring: 2 (P-1) / P of the tensor, whatever the backend does;
    - all-gather: (P-1) times the input; reduce-scatter: the (P-1) / P of the input that others reduce;
    - all-to-all: what goes to other ranks.

    Calls on an `EchoProcessGroup` are not counted: the calls that it makes on the real group are.

    Args:
        group: the tensor-parallel group. With one rank nothing is counted and nothing is wrapped.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._ranks = dist.get_process_group_ranks(group)
        self._size = len(self._ranks)
        self._rank = dist.get_rank(group)
        self._same_ranks: dict[int, tuple[Any, bool]] = {}
        self._originals: dict[tuple[Any, str], Callable[..., Any]] = {}
        # Autograd's thread adds the backward pass's calls.
        self._lock = threading.Lock()
        self._num_bytes = 0

    def take(self) -> int:
        """Bytes since the last call, and zero the count."""
        with self._lock:
            num_bytes, self._num_bytes = self._num_bytes, 0
        return num_bytes

    def __enter__(self) -> TrafficMeter:
        if self._size > 1:
            gather, scatter = self._all_gather, self._reduce_scatter
            for name, count in (
                ("all_reduce", self._all_reduce),
                ("all_gather_into_tensor", gather),
                ("_all_gather_base", gather),
                ("reduce_scatter_tensor", scatter),
                ("all_to_all_single", self._all_to_all),
            ):
                self._wrap(dist, name, count)
            for module in (layers, mappings):  # where Megatron keeps sequence parallelism's calls
                self._wrap(module, "dist_all_gather_func", gather)
                self._wrap(module, "dist_reduce_scatter_func", scatter)
        return self

    def __exit__(self, *exception: object) -> None:
        for (module, name), original in self._originals.items():
            setattr(module, name, original)
        self._originals.clear()

    def _wrap(self, module: Any, name: str, count: Callable[..., int]) -> None:
        original = getattr(module, name)
        self._originals[module, name] = original

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._add(count, args, kwargs)
            return original(*args, **kwargs)

        setattr(module, name, counted)

    def _add(self, count: Callable[..., int], args: tuple, kwargs: dict[str, Any]) -> None:
        num_bytes = count(*args, **kwargs)
        with self._lock:
            self._num_bytes += num_bytes

    def _counts(self, group: Any) -> bool:
        from echo_megatron.process_group import EchoProcessGroup

        if isinstance(group, EchoProcessGroup):
            return False
        known = self._same_ranks.get(id(group))
        if known is None:  # the group is kept with the answer: an id may be used again
            known = self._same_ranks[id(group)] = (group, dist.get_process_group_ranks(group) == self._ranks)
        return known[1]

    def _all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> int:
        return 2 * (self._size - 1) * tensor.nbytes // self._size if self._counts(group) else 0

    def _all_gather(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> int:
        return (self._size - 1) * input_tensor.nbytes if self._counts(group) else 0

    def _reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> int:
        return (self._size - 1) * input.nbytes // self._size if self._counts(group) else 0

    def _all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> int:
        if not self._counts(group):
            return 0
        if not input_split_sizes:
            return (self._size - 1) * input.nbytes // self._size
        row_bytes = input.nbytes // max(input.size(0), 1)
        return (sum(input_split_sizes) - input_split_sizes[self._rank]) * row_bytes
