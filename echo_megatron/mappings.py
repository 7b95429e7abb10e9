"""The two autograd functions of tensor parallelism, under Megatron's names, for models that are not Megatron's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction
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


def _require_direction(site: Site, expected: Direction) -> None:
    if site.direction is not expected:
        raise ValueError(f"site {site}: expected a {expected.name} site, got a {site.direction.name} one")
