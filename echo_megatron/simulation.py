"""Tensor parallelism of any model, simulated on one device: its row-parallel linears run as P ranks would run them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echo_megatron.config import Direction, EchoConfig
from echo_megatron.reference import SimulatedGroup, sum_in_rank_order
from echo_megatron.sites import Site


class SimulatedTensorParallel:
    """While it is entered, every linear is P slices of its input dimension whose partial outputs are all-reduced.

    For evaluation: the all-reduce has no gradient. A pass visits the linears in the given order; the compensator
    starts anew at the first.

    Args:
        linears: name and module of each site, in the order in which a forward pass visits them.
        world_size: P, 1 to 8; it divides every linear's input dimension.
        config: the options; with `bits: 16` the partial outputs are added as they are. `min_bytes`, `directions` and
            `phases` are not looked at. `early_fraction` is of the layers, by the first number in a linear's name; of
            the linears where a name has none.
        rank_order: which slice each rank holds, a permutation of 0 to P-1; default their own order. Other orders round
            elsewhere and mean the same model, so their spread is the noise of a result.

    Raises:
        ValueError: there is no linear, or an input dimension that P does not divide, P is out of range, or
            `rank_order` is no permutation.
    """

    def __init__(
        self,
        linears: Sequence[tuple[str, nn.Linear]],
        world_size: int,
        config: EchoConfig,
        rank_order: Sequence[int] | None = None,
    ) -> None:
        if not linears:
            raise ValueError("simulated tensor parallelism: expected at least one row-parallel linear, got none")
        for name, linear in linears:
            if linear.in_features % world_size:
                raise ValueError(
                    f"{name}: expected an input dimension divisible by {world_size} ranks, got {linear.in_features}"
                )
        self.rank_order = list(range(world_size) if rank_order is None else rank_order)
        if sorted(self.rank_order) != list(range(world_size)):
            raise ValueError(f"rank_order: expected a permutation of 0 to {world_size - 1}, got {rank_order}")
        self.world_size = world_size
        self.config = config
        self._group = SimulatedGroup(world_size, config) if config.quantizes else None
        layers = _layers([name for name, _ in linears])
        self.num_layers = num_layers = len(set(layers))
        self._linears = [
            (linear, Site(idx, Direction.forward, name, config.site_bits(Direction.forward, layer, num_layers)))
            for idx, ((name, linear), layer) in enumerate(zip(linears, layers, strict=True))
        ]

    @property
    def sites(self) -> list[Site]:
        """In the order of a pass."""
        return [site for _, site in self._linears]

    def __enter__(self) -> SimulatedTensorParallel:
        for linear, site in self._linears:
            linear.forward = partial(self._forward, linear, site)  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for linear, _ in self._linears:
            del linear.forward  # the class's own is behind it

    def _forward(self, linear: nn.Linear, site: Site, x: Tensor) -> Tensor:
        slices = split_linear(linear, x, self.world_size)
        output = sum_partial_outputs(self._group, [slices[idx] for idx in self.rank_order], site)
        return output if linear.bias is None else output + linear.bias


def sum_partial_outputs(group: SimulatedGroup | None, partial_outputs: Sequence[Tensor], site: Site) -> Tensor:
    """The ranks' partial outputs added: by the group's all-reduce, or without one as they are, in rank order."""
    if group is None:
        return sum_in_rank_order(torch.stack(list(partial_outputs)))
    return group.all_reduce(partial_outputs, site)


def _layers(names: Sequence[str]) -> list[int]:
    """Zero-based layer of each linear: where its number comes among the numbers; its own place without numbers."""
    numbers = [re.search(r"(?:^|\.)(\d+)\.", name) for name in names]
    if not all(numbers):
        return list(range(len(names)))
    found = [int(number[1]) for number in numbers if number]
    places = {number: place for place, number in enumerate(dict.fromkeys(found))}
    return [places[number] for number in found]


def split_linear(linear: nn.Linear, x: Tensor, world_size: int) -> list[Tensor]:
    """What each rank of a row-parallel `linear` contributes, without the bias: P tensors [..., out_features]."""
    shards = zip(x.chunk(world_size, -1), linear.weight.chunk(world_size, 1), strict=True)
    return [F.linear(inputs, weight) for inputs, weight in shards]


def find_linears(model: nn.Module, suffixes: Sequence[str]) -> list[tuple[str, nn.Linear]]:
    """The linears of `model` whose name ends with one of `suffixes`, in the order of definition.

    Raises:
        ValueError: there is none.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in suffixes
    ]
    if not found:
        raise ValueError(f"{type(model).__name__}: expected linears named {' or '.join(suffixes)}, found none")
    return found
