"""The autograd functions of tensor and sequence parallelism, under Megatron's names, for other models than its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.communicator import Communicator
from echo_megatron.config import NATIVE_BITS, Direction
from echo_megatron.reference import check_shares
from echo_megatron.sites import Site


class _ReduceFromTensorParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, site: Site) -> Tensor:
        return communicator.all_reduce(x, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _CopyToTensorParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, site: Site) -> Tensor:
        ctx.communicator, ctx.site = communicator, site
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicator.all_reduce(grads[0], ctx.site), None, None


class _ReduceScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, site: Site) -> Tensor:
        ctx.communicator, ctx.site = communicator, site
        return communicator.reduce_scatter(x, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.communicator, ctx.site), None, None


class _GatherFromSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator, site: Site) -> Tensor:
        ctx.communicator, ctx.site = communicator, site
        return _gather(x, communicator, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.communicator.reduce_scatter(grads[0], ctx.site), None, None


class _ScatterToSequenceParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, communicator: Communicator) -> Tensor:
        check_shares(x, communicator.world_size)
        ctx.communicator = communicator
        return x.chunk(communicator.world_size)[communicator.group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exact_gather(grads[0], ctx.communicator), None


def reduce_from_tensor_parallel_region(x: Tensor, communicator: Communicator, site: Site) -> Tensor:
    """Sums partial outputs in forward, hands the gradient through in backward: after a row-parallel linear.

    Args:
        x: this rank's partial output, bf16, fp16 or fp32.
        communicator: the group's communicator.
        site: a forward site; indices increase in the order in which a forward pass reaches the sites.

    Raises:
        ValueError: `site` is not a forward site.
    """
    _require_direction(site, Direction.forward)
    return _ReduceFromTensorParallelRegion.apply(x, communicator, site)


def copy_to_tensor_parallel_region(x: Tensor, communicator: Communicator, site: Site) -> Tensor:
    """Hands `x` through in forward, sums its gradient in backward: before a column-parallel linear.

    Args:
        x: the replicated input.
        communicator: the group's communicator.
        site: a backward site; indices increase in the order in which a backward pass reaches the sites.

    Raises:
        ValueError: `site` is not a backward site.
    """
    _require_direction(site, Direction.backward)
    return _CopyToTensorParallelRegion.apply(x, communicator, site)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, communicator: Communicator, site: Site) -> Tensor:
    """Hands each rank its share of the summed partial outputs; gathers the gradient in backward, at `gather_bits`.

    Args:
        x: this rank's partial output [P * rows, ...], bf16, fp16 or fp32.
        communicator: the group's communicator.
        site: a forward site; indices increase in the order in which a forward pass reaches the sites.

    Returns:
        [rows, ...].

    Raises:
        ValueError: `site` is not a forward site, or P does not divide the first dimension.
    """
    _require_direction(site, Direction.forward)
    return _ReduceScatterToSequenceParallelRegion.apply(x, communicator, site)


def gather_from_sequence_parallel_region(x: Tensor, communicator: Communicator, site: Site) -> Tensor:
    """Gathers the ranks' shares at `gather_bits`; hands each its share of the summed gradient in backward.

    Args:
        x: this rank's share [rows, ...] of what goes into a column-parallel linear.
        communicator: the group's communicator.
        site: a backward site; indices increase in the order in which a backward pass reaches the sites.

    Returns:
        [P * rows, ...], the same bits on every rank.

    Raises:
        ValueError: `site` is not a backward site.
    """
    _require_direction(site, Direction.backward)
    return _GatherFromSequenceParallelRegion.apply(x, communicator, site)


def scatter_to_sequence_parallel_region(x: Tensor, communicator: Communicator) -> Tensor:
    """Takes this rank's share of what all ranks have; gathers the gradient in backward, unquantized.

    It is no site: once a model, behind the embedding.

    Args:
        x: [P * rows, ...], the same on every rank.
        communicator: the group's communicator.

    Returns:
        [rows, ...].

    Raises:
        ValueError: P does not divide the first dimension.
    """
    return _ScatterToSequenceParallelRegion.apply(x, communicator)


def _gather(x: Tensor, communicator: Communicator, site: Site) -> Tensor:
    """All-gather at the config's `gather_bits`."""
    bits = communicator.config.gather_bits
    if bits == NATIVE_BITS:
        return _exact_gather(x, communicator)
    return communicator.all_gather(x, replace(site, bits=bits))


def _exact_gather(x: Tensor, communicator: Communicator) -> Tensor:
    whole = x.new_empty(communicator.world_size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=communicator.group)
    return whole


def _require_direction(site: Site, expected: Direction) -> None:
    if site.direction is not expected:
        raise ValueError(f"site {site}: expected a {expected.name} site, got a {site.direction.name} one")
