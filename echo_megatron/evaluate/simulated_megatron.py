"""Tensor parallelism of a Megatron-core model, simulated on one device: the arithmetic of P ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_megatron.config import Direction, EchoConfig
from echo_megatron.integrations.megatron_sites import find_sites
from echo_megatron.reference import SimulatedGroup
from echo_megatron.simulation import sum_partial_outputs
from echo_megatron.sites import Site


class SimulatedMegatron:
    """While it is entered, the linears of a model built at tensor-parallel size 1 compute as P ranks would.

    The sites are those of `install`, and each is the all-reduce of P partial outputs. With local layers the
    column-parallel linears and the output layer are computed in the ranks' slices as well, and an MLP runs once for
    each rank, so that every matrix product and every activation has the shape that it has on a rank: with the same
    kernels the bits are those of P ranks. With Transformer Engine's they are computed whole, because their norm is
    fused into them.

    For evaluation: the all-reduce has no gradient.

    Args:
        model: a GPTModel of one process, unwrapped.
        world_size: P, 1 to 8; it divides heads, query groups and MLP width.
        config: the options; with `bits: 16` the partial outputs are added as they are. `min_bytes`, `directions` and
            `phases` are not looked at.

    Raises:
        ValueError: the model has no sites, is split over ranks already, or P does not divide it.
    """

    def __init__(self, model: Any, world_size: int, config: EchoConfig) -> None:
        self.world_size = world_size
        self._group = SimulatedGroup(world_size, config) if config.quantizes else None
        found = find_sites([model], config.replace(directions=[Direction.forward]))
        sites = [(one.linear, one.site) for one in found]
        if not sites:
            raise ValueError(
                f"{type(model).__name__}: expected transformer layers with row-parallel linears, found none"
            )
        if (size := model.config.tensor_model_parallel_size) != 1:
            raise ValueError(f"simulation: expected a model of one rank, got one of {size}")
        _check_sizes(model, world_size)
        self.sites = [site for _, site in sites]
        mlps = _local_mlps(model, sites) if world_size > 1 else []
        columns = _local_columns(model) if world_size > 1 else []
        covered = {id(linear) for mlp, *_ in mlps for linear in (mlp.linear_fc1, mlp.linear_fc2)}
        self._forwards: list[tuple[Any, Callable[..., Any]]] = [
            *((linear, partial(self._row, linear, site)) for linear, site in sites if id(linear) not in covered),
            *((linear, partial(self._column, linear, num)) for linear, num in columns if id(linear) not in covered),
            *((mlp, partial(self._mlp, mlp, num, site)) for mlp, num, site in mlps),
        ]

    def __enter__(self) -> SimulatedMegatron:
        for module, forward in self._forwards:
            module.forward = forward
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for module, _ in self._forwards:
            del module.forward  # the class's own is behind it

    def _row(self, linear: Any, site: Site, x: Tensor) -> tuple[Tensor, Tensor | None]:
        shards = zip(x.chunk(self.world_size, -1), linear.weight.chunk(self.world_size, 1), strict=True)
        # Contiguous, as on a rank: a matrix product may choose its kernel by the strides.
        partial_outputs = [F.linear(inputs.contiguous(), weight.contiguous()) for inputs, weight in shards]
        return self._summed(linear, site, partial_outputs)

    def _summed(self, linear: Any, site: Site, partial_outputs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        output = sum_partial_outputs(self._group, partial_outputs, site)
        bias = linear.bias if isinstance(linear.bias, Tensor) and linear.bias.numel() else None
        if bias is None:
            return output, None
        return (output, bias) if _returns_bias(linear) else (output + bias, None)

    def _column(
        self,
        linear: Any,
        num_parts: int,
        x: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        weight = linear.weight if weight is None else weight
        outputs = [F.linear(x, part) for part in split_rows(weight, num_parts, self.world_size)]
        output = join_columns(outputs, num_parts)[..., : weight.shape[0]]
        if linear.bias is None:
            return output, None
        return (output, linear.bias) if linear.skip_bias_add else (output + linear.bias, None)

    def _mlp(self, mlp: Any, num_parts: int, site: Site, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Once for each rank: an exponential's last bit depends on where in a row its value lies, on a CPU."""
        first, second = mlp.linear_fc1, mlp.linear_fc2
        biases: list[Tensor] | list[None] = [None] * self.world_size
        if first.bias is not None:
            biases = split_rows(first.bias, num_parts, self.world_size)
        parts = zip(
            split_rows(first.weight, num_parts, self.world_size),
            biases,
            second.weight.chunk(self.world_size, 1),
            strict=True,
        )
        partial_outputs = []
        for up, bias, down in parts:
            of_rank = partial(_linear, up, bias, first.skip_bias_add), partial(_linear, down.contiguous(), None, False)
            with _replaced(first, of_rank[0]), _replaced(second, of_rank[1]):
                output, _ = type(mlp).forward(mlp, *args, **options)
            partial_outputs.append(output)
        return self._summed(second, site, partial_outputs)


def _linear(weight: Tensor, bias: Tensor | None, skips_bias: bool, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """A rank's part of a local linear."""
    output = F.linear(x, weight)
    if bias is None or skips_bias:
        return output, bias
    return output + bias, None


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def split_rows(weight: Tensor, num_parts: int, world_size: int) -> list[Tensor]:
    """Each rank's rows of a column-parallel weight [rows, in] or of its bias [rows].

    Args:
        weight: of one rank.
        num_parts: matrices that lie one above the other in it and are split one by one: 2 for gate and up.
        world_size: P. It divides all of them but a vocabulary, which ranks pad with rows of zeros.
    """
    if weight.dim() == 2 and num_parts == 1 and (missing := -weight.shape[0] % world_size):
        weight = F.pad(weight, (0, 0, 0, missing))
    by_part = [part.chunk(world_size) for part in weight.chunk(num_parts)]
    return [torch.cat(rows) if num_parts > 1 else rows[0] for rows in zip(*by_part, strict=True)]


def join_columns(outputs: Sequence[Tensor], num_parts: int) -> Tensor:
    """The output of the whole weight from those of `split_rows`: [..., rows]."""
    by_part = zip(*(output.chunk(num_parts, -1) for output in outputs), strict=True)
    return torch.cat([output for part in by_part for output in part], -1)


def _returns_bias(linear: Any) -> bool:
    """Local linears call it skip_bias_add, Transformer Engine's te_return_bias."""
    return bool(getattr(linear, "te_return_bias", getattr(linear, "skip_bias_add", False)))


def _check_sizes(model: Any, world_size: int) -> None:
    config = model.config
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if getattr(config, name) % world_size:
            raise ValueError(
                f"{name}: expected a multiple of {world_size} simulated ranks, got {getattr(config, name)}; "
                "leave that size out"
            )


def _local_columns(model: Any) -> list[tuple[Any, int]]:
    """Megatron's local column-parallel linears and how many matrices lie in each; also the output layer."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    found = []
    for name, module in model.named_modules():
        if isinstance(module, ColumnParallelLinear):
            is_gated = name.endswith(".linear_fc1") and model.config.gated_linear_unit
            found.append((module, 2 if is_gated else 1))
    return found


def _local_mlps(model: Any, sites: Sequence[tuple[Any, Site]]) -> list[tuple[Any, int, Site]]:
    """Megatron's MLPs of local linears whose second one is a site, and how many matrices lie in the first."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.mlp import MLP

    by_linear = {id(linear): site for linear, site in sites}
    num_parts = 2 if model.config.gated_linear_unit else 1
    return [
        (module, num_parts, by_linear[id(module.linear_fc2)])
        for module in model.modules()
        if type(module) is MLP
        and isinstance(module.linear_fc1, ColumnParallelLinear)
        and id(module.linear_fc2) in by_linear
    ]
