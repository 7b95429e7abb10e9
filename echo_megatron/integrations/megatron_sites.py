"""Where the sites are in a Megatron-core model: of every transformer layer the four linears that communicate.

Modules are found by what they are, not by the model's class: in each stack of `TransformerLayer`s (GPTModel's decoder,
HybridModel's attention and MLP layers, an encoder, a vision tower) the self-attention projection and MLP fc2
(row-parallel: forward sites), qkv and fc1 (column-parallel: backward sites). With sequence parallelism each of them
also gathers: a column-parallel linear its input, in the forward pass and again for the weight gradient, a row-parallel
one its output's gradient. Of a layer with experts it is the attention's two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from echo_megatron.config import NATIVE_BITS, Collective, Direction, EchoConfig
from echo_megatron.integrations.linears import check_linear, is_tensor_parallel, unwrapped
from echo_megatron.integrations.versions import require
from echo_megatron.sites import Site

# In the order in which a pass visits them inside one layer; a backward pass visits the layers last to first.
_SITES_OF_LAYER = {
    Direction.forward: ("self_attention.linear_proj", "mlp.linear_fc2"),
    Direction.backward: ("mlp.linear_fc1", "self_attention.linear_qkv"),
}


@dataclass(frozen=True)
class FoundSite:
    """A site and its place in the model.

    Attributes:
        site: the site.
        linear: the linear whose sum it is.
        layer: zero-based layer of the whole model, pipeline stages included.
        module: the stack and the linear without the layer's number, e.g. `mlp.linear_fc2`.
        layer_config: the layer's TransformerConfig.
        sums: whether its sums are quantized, in passes of the site's direction.
        gather: the site with the bits of the linear's all-gathers; None where it makes none that are quantized.
    """

    site: Site
    linear: Any
    layer: int
    module: str
    layer_config: Any
    sums: bool = True
    gather: Site | None = None

    @property
    def hidden_size(self) -> int:
        return self.layer_config.hidden_size

    @property
    def collective(self) -> Collective:
        """What its sum is."""
        return Collective.reduce_scatter if self.layer_config.sequence_parallel else Collective.all_reduce


def find_sites(chunks: Sequence[nn.Module], config: EchoConfig) -> Iterator[FoundSite]:
    """Every site that communicates in a direction of the config's, in the order in which its pass visits it.

    Each stack of layers is a chunk of its own to the communicator: passes of an encoder and of a decoder never share a
    compensator's state, and either may run first.

    Raises:
        ValueError: a linear in the place of a site is of another kind.
    """
    stacks = [(path if len(own) > 1 else "", layers) for own in map(_stacks, chunks) for path, layers in own.items()]
    for chunk_idx, (path, layers) in enumerate(stacks):
        for direction in Direction:
            ordered = layers if direction is Direction.forward else layers[::-1]
            places = ((layer, module) for layer in ordered for module in _SITES_OF_LAYER[direction])
            idx = 0
            for layer, module in places:
                layer_idx = layer.layer_number - 1
                name = f"{path or 'layers'}.{layer_idx}.{module}"
                linear = _linear(layer, module, name)
                if linear is None:
                    continue  # a layer without attention or without MLP (hybrid and heterogeneous models)
                bits = config.site_bits(direction, layer_idx, layer.config.num_layers)
                site = Site(idx, direction, name, bits, chunk_idx)
                sums, gather = direction in config.directions, _gather_site(site, layer.config, config)
                idx += 1
                if sums or gather is not None:
                    check_linear(linear, name, direction)
                    place = f"{path}.*.{module}" if path else module
                    yield FoundSite(site, linear, layer_idx, place, layer.config, sums, gather)


def gather_direction(site: Site) -> Direction:
    """The pass whose activations the site's linear gathers: the one in which it does not sum.

    A column-parallel linear gathers its input again in the backward pass. That has to be what the forward pass had.
    """
    return Direction.backward if site.direction is Direction.forward else Direction.forward


def _gather_site(site: Site, layer_config: Any, config: EchoConfig) -> Site | None:
    is_quantized = gather_direction(site) in config.directions and config.gather_bits != NATIVE_BITS
    return replace(site, bits=config.gather_bits) if layer_config.sequence_parallel and is_quantized else None


def transformer_layers(chunk: nn.Module) -> dict[str, Any]:
    """The chunk's TransformerLayers by name, without those of multi-token prediction."""
    kind = require("megatron.core.transformer.transformer_layer", "TransformerLayer")
    predictor = require("megatron.core.transformer.multi_token_prediction", "MultiTokenPredictionLayer")
    modules = dict(chunk.named_modules())
    apart = tuple(f"{name}." for name, module in modules.items() if isinstance(module, predictor))
    return {name: m for name, m in modules.items() if isinstance(m, kind) and not name.startswith(apart or "\0")}


def exact_modules(chunks: Sequence[nn.Module], covered: set[int]) -> list[str]:
    """Tensor-parallel modules that keep their communication, by name, with `*` for numbers.

    Args:
        chunks: the model.
        covered: `id` of each linear that has a site.
    """
    names = {
        re.sub(r"\.\d+\.", ".*.", _without_wrappers(name))
        for chunk in chunks
        for name, module in chunk.named_modules()
        if id(module) not in covered and is_tensor_parallel(module)
    }
    return sorted(names)


def _stacks(chunk: nn.Module) -> dict[str, list[Any]]:
    """The layers of each stack, by the stack's name, in the order of the model."""
    stacks: dict[str, list[Any]] = {}
    for name, layer in transformer_layers(chunk).items():
        stacks.setdefault(_without_wrappers(name).rpartition(".")[0], []).append(layer)
    return stacks


def _without_wrappers(name: str) -> str:
    """A module's name without the `module.` of data parallelism and of Float16Module."""
    return re.sub(r"^(module\.)+", "", name)


def _linear(layer: nn.Module, path: str, name: str) -> nn.Module | None:
    no_module = require("megatron.core.transformer.identity_op", "IdentityOp")
    module: Any = layer
    for part in path.split("."):
        module = getattr(module, part, None)
        if module is None or isinstance(module, no_module):
            return None
    return unwrapped(module, name)
