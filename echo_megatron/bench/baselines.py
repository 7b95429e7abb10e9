"""The all-reduces of others: NCCL, PyTorch's symmetric memory, FlashInfer. One class for each, called with a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.bench.rows import Kind, Row
from echo_megatron.bench.two_collective import TwoCollective


class Unavailable(RuntimeError):
    """A baseline does not run here; the message says why."""


class Baseline:
    """What the calls below share with Echo's."""

    algorithm: str | None = None
    transport: str | None = None
    leads_in = False

    def check(self) -> None:
        """Their errors are raised by the calls."""

    def close(self) -> None:
        """They hold nothing."""


class Native(Baseline):
    """The group's own all-reduce, in place."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x


class NativeShares(Baseline):
    """The group's own reduce-scatter or all-gather.

    Args:
        group: the process group.
        gathers: an all-gather.
        outputs: what the outputs are cut from.
    """

    def __init__(self, group: dist.ProcessGroup, gathers: bool, outputs: Tensor) -> None:
        self.group, self.outputs = group, outputs
        self._call = dist.all_gather_into_tensor if gathers else dist.reduce_scatter_tensor
        self._gathers = gathers

    def __call__(self, x: Tensor) -> Tensor:
        num_values = x.numel() * self.group.size() if self._gathers else x.numel() // self.group.size()
        out = self.outputs[:num_values]
        self._call(out, x, group=self.group)
        return out


class SymmetricMemory(Baseline):
    """PyTorch's own kernels over symmetric memory; the input must lie in it.

    Args:
        group: the process group.
        one_shot: out of place; otherwise two-shot in place.
    """

    def __init__(self, group: dist.ProcessGroup, one_shot: bool) -> None:
        name = "one_shot_all_reduce" if one_shot else "two_shot_all_reduce_"
        self._op: Any = getattr(torch.ops.symm_mem, name)
        self._group_name = group.group_name

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, "sum", self._group_name)


class QuantizedCollectives(TwoCollective, Baseline):
    """See `two_collective.py`."""

    algorithm = "all_to_all + all_gather"


class FlashInfer(Baseline):
    """FlashInfer's FP8 two-shot all-reduce.

    Raises:
        Unavailable: it is not installed, or too old to have it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            from flashinfer.comm import quantized_all_reduce
        except Exception as error:  # an installation that does not fit the machine fails in many ways
            raise Unavailable(f"flashinfer.comm.quantized_all_reduce: {type(error).__name__}: {error}") from error
        self._all_reduce, self.group = quantized_all_reduce, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._all_reduce(x, self.group)


def make_baseline(row: Row, group: dist.ProcessGroup, device: torch.device, symmetric: bool) -> Baseline:
    """The call of a row that is not Echo's.

    Raises:
        Unavailable: it does not run here.
    """
    if row.kind is Kind.nccl:
        return Native(group)
    if row.kind is Kind.two_collective:
        return QuantizedCollectives(group, row.bits)
    if device.type != "cuda":
        raise Unavailable(f"needs GPUs, runs on {device.type}")
    if row.kind is Kind.flashinfer:
        return FlashInfer(group)
    if not symmetric:
        raise Unavailable("needs GPUs that reach each other's memory")
    return SymmetricMemory(group, row.kind is Kind.symm_mem_one_shot)
