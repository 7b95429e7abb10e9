"""Megatron-core: gives the four linears of every transformer layer a process group of their own.

Modules are covered by what they are: of every `TransformerLayer` the self-attention projection and MLP fc2
(row-parallel: forward sites), qkv and fc1 (column-parallel: backward sites). Everything else keeps its communication:
embedding, LM head, cross-entropy, norm gradients, cross-attention, multi-token prediction.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig, Phase
from echo_megatron.integrations.megatron_checks import check_linear, check_model
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.sites import Site

logger = logging.getLogger(__name__)

# In the order in which a pass visits them inside one layer; a backward pass visits the layers last to first.
_SITES_OF_LAYER = {
    Direction.forward: ("self_attention.linear_proj", "mlp.linear_fc2"),
    Direction.backward: ("mlp.linear_fc1", "self_attention.linear_qkv"),
}


@dataclass
class Installation:
    """What `install` changed; `uninstall` gives the model back as it was."""

    config: EchoConfig
    communicator: Communicator | None = None
    sites: list[Site] = field(default_factory=list)
    _originals: list[tuple[Any, dist.ProcessGroup]] = field(default_factory=list)

    def uninstall(self) -> None:
        """Restores every linear's own process group and gives the communicator's memory back.

        Collective. Calling it twice does no harm.
        """
        for linear, group in self._originals:
            if isinstance(linear.tp_group, EchoProcessGroup):
                linear.tp_group.unregister()
            linear.tp_group = group
        self._originals.clear()
        self.sites.clear()
        if self.communicator is not None:
            self.communicator.destroy()

    def reset(self) -> None:
        """Forgets the passes under way: for a training loop that catches an error, drops the step and goes on."""
        if self.communicator is not None:
            self.communicator.reset()

    def check(self) -> None:
        """Raises CommunicationError if a call so far failed on the device; see `Communicator.check`."""
        if self.communicator is not None:
            self.communicator.check()

    def take_sent_bytes(self) -> int:
        """Bytes that calls wrote straight into other ranks' memory since this was last asked."""
        return 0 if self.communicator is None else self.communicator.transport.take_sent_bytes()

    def report(self) -> str:
        """The covered sites by module, and what stays at full precision; one string of several lines."""
        if self.communicator is None:
            return "echo: nothing installed; tensor parallelism uses Megatron's own communication"
        rows = Counter((site.direction.name, site.name.split(".", 2)[-1], site.bits) for site in self.sites)
        lines = [self.communicator.describe(), f"{'direction':<10}{'module':<32}{'bits':>5}{'sites':>7}"]
        lines += [
            f"{direction:<10}{module:<32}{bits:>5}{count:>7}" for (direction, module, bits), count in rows.items()
        ]
        exact = "embedding, LM head, cross-entropy, norm gradients, cross-attention, multi-token prediction"
        lines.append(f"at full precision: {exact}")
        return "\n".join(lines)


def install(model_chunks: nn.Module | Sequence[nn.Module], config: EchoConfig) -> Installation:
    """Quantizes the tensor-parallel all-reduces of a Megatron-core model with local-spec layers.

    Call it once on every rank, after the chunks are built and before the first forward pass; wrapping in DDP, PEFT and
    loading a checkpoint may come before or after.

    Args:
        model_chunks: the model, or its virtual pipeline chunks in order, wrapped or not.
        config: the options; `bits: 16` installs nothing.

    Returns:
        The handle that reports and uninstalls.

    Raises:
        ValueError: the model uses an option that is not supported together with Echo, or has no site; the message names
            the option and what to do.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    installation = Installation(config)
    if not config.quantizes:
        return installation
    for chunk in chunks:
        check_model(chunk)
    found = list(_find_sites(chunks, config))
    if not found:
        raise ValueError(
            "echo: expected a model with transformer layers of row- and column-parallel linears (GPTModel with a local "
            f"layer spec), found none in {', '.join(type(chunk).__name__ for chunk in chunks)}"
        )
    groups = {linear.tp_group for _, linear, _ in found}
    if len(groups) != 1:
        raise ValueError(f"echo: expected one tensor-parallel group for all layers, found {len(groups)}")
    (group,) = groups
    if group.size() == 1:
        logger.info("echo: tensor parallel size 1, there is no communication to quantize; nothing installed")
        return installation

    communicator = Communicator(group, config, _is_recomputed, _max_passes(found[0][1]))
    installation.communicator = communicator
    for site, linear, hidden_size in found:
        if site.direction not in config.directions:
            continue
        installation._originals.append((linear, group))
        installation.sites.append(site)
        linear.tp_group = EchoProcessGroup(communicator, site, hidden_size, _phase_test(linear, config))
    return installation


def _find_sites(chunks: Sequence[nn.Module], config: EchoConfig) -> Iterator[tuple[Site, Any, int]]:
    """Every site with its linear and hidden size, in the order in which its pass visits it."""
    for chunk_idx, chunk in enumerate(chunks):
        layers = _transformer_layers(chunk)
        for direction, modules in _SITES_OF_LAYER.items():
            ordered = layers if direction is Direction.forward else layers[::-1]
            idx = 0
            for layer in ordered:
                layer_idx = layer.layer_number - 1
                bits = config.site_bits(direction, layer_idx, layer.config.num_layers)
                for path in modules:
                    linear = _submodule(layer, path)
                    if linear is None:
                        continue  # a layer without attention or without MLP (heterogeneous models)
                    name = f"layers.{layer_idx}.{path}"
                    check_linear(linear, name, direction)
                    yield Site(idx, direction, name, bits, chunk_idx), linear, layer.config.hidden_size
                    idx += 1


def _transformer_layers(chunk: nn.Module) -> list[Any]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    return [layer for layer in layers if not getattr(layer, "is_mtp_layer", False)]


def _submodule(layer: nn.Module, path: str) -> Any:
    from megatron.core.transformer.identity_op import IdentityOp

    module: nn.Module | None = layer
    for name in path.split("."):
        module = getattr(module, name, None)
        if module is None or isinstance(module, IdentityOp):
            return None
    return module


def _phase_test(linear: nn.Module, config: EchoConfig) -> Callable[[], bool]:
    train, evaluate = Phase.train in config.phases, Phase.evaluate in config.phases
    return lambda: train if linear.training else evaluate


def _is_recomputed() -> bool:
    """Inside the first forward of Megatron's reentrant checkpoint."""
    from megatron.core.tensor_parallel import random

    return random.is_checkpointing() and not torch.is_grad_enabled()


def _max_passes(linear: Any) -> int | None:
    """Without pipeline stages every forward pass is followed by its backward pass."""
    return 1 if linear.config.pipeline_model_parallel_size == 1 else None
