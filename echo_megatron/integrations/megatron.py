"""Megatron-core: gives the four linears of every transformer layer a process group of their own.

The linears may be Megatron's local ones or Transformer Engine's, with or without sequence parallelism. Everything else
keeps its communication: embedding, LM head, cross-entropy, norm gradients, experts and their routing, cross-attention,
multi-token prediction, adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from echo_megatron.communicator import Communicator
from echo_megatron.config import NATIVE_BITS, EchoConfig, Phase
from echo_megatron.integrations.linears import set_tensor_parallel_group, tensor_parallel_group
from echo_megatron.integrations.megatron_checks import check_model, uses_cuda_graphs
from echo_megatron.integrations.megatron_report import describe
from echo_megatron.integrations.megatron_sites import FoundSite, exact_modules, find_sites
from echo_megatron.integrations.recompute import recompute_test
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.sites import Site

logger = logging.getLogger(__name__)


@dataclass
class Installation:
    """What `install` changed; `uninstall` gives the model back as it was.

    Attributes:
        config: the options.
        communicator: of the tensor-parallel group; None where nothing is installed.
        uses_cuda_graphs: whether Megatron replays the model's layers as CUDA graphs: a replay runs no Python.
    """

    config: EchoConfig
    communicator: Communicator | None = None
    uses_cuda_graphs: bool = False
    _found: list[FoundSite] = field(default_factory=list)
    _exact: list[str] = field(default_factory=list)
    _group: dist.ProcessGroup | None = None

    @property
    def sites(self) -> list[Site]:
        """The sites whose sums are covered, pass by pass in the order of each pass."""
        return [found.site for found in self._found if found.sums]

    def uninstall(self) -> None:
        """Restores every linear's own process group and gives the communicator's memory back.

        Collective. Calling it twice does no harm.
        """
        self._restore()
        if self.communicator is not None:
            self.communicator.destroy()

    def abandon(self) -> None:
        """In place of `uninstall`, after an error that may be this rank's alone: waits for no other rank.

        The model is as it was; the communicator's memory is kept until the process ends.
        """
        self._restore()
        if self.communicator is not None:
            self.communicator.abandon()

    def _restore(self) -> None:
        for found in self._found:
            group = tensor_parallel_group(found.linear)
            if isinstance(group, EchoProcessGroup):
                group.close()
            assert self._group is not None
            set_tensor_parallel_group(found.linear, self._group)
        self._found.clear()

    def reset(self) -> None:
        """Forgets the passes under way: for a training loop that catches an error, drops the step and goes on."""
        if self.communicator is not None:
            self.communicator.reset()

    def check(self) -> None:
        """Raises CommunicationError if a call so far failed on the device; see `Communicator.check`."""
        if self.communicator is not None:
            self.communicator.check()

    def take_sent_bytes(self) -> int:
        """Bytes that calls wrote straight into other ranks' memory since this was last asked, without graph replays."""
        return 0 if self.communicator is None else self.communicator.transport.take_sent_bytes()

    def report(self) -> str:
        """A table of the covered sites and what keeps its communication; one string of several lines."""
        return describe(self.communicator, self._found, self._exact)


def install(model_chunks: nn.Module | Sequence[nn.Module], config: EchoConfig) -> Installation:
    """Quantizes the tensor-parallel communication of a Megatron-core model.

    That is its all-reduces, or with sequence parallelism its reduce-scatters and all-gathers.

    Call it once on every rank, after the chunks are built and before the first forward pass; wrapping in DDP, PEFT and
    loading a checkpoint may come before or after. Collective.

    Args:
        model_chunks: the model, or its virtual pipeline chunks in order, wrapped or not.
        config: the options; `bits: 16` installs nothing.

    Returns:
        The handle that reports and uninstalls.

    Raises:
        ValueError: the model uses an option that is not supported together with Echo, or has no site; the message names
            the option and what to do.
        ImportError: megatron-core lacks a symbol; the message names it and the versions that have it.
    """
    chunks = [model_chunks] if isinstance(model_chunks, nn.Module) else list(model_chunks)
    installation = Installation(config)
    if not config.quantizes:
        return installation
    for chunk in chunks:
        check_model(chunk, config)
    found = list(find_sites(chunks, config))
    if not found and _has_pipeline_stages(chunks):
        logger.info("echo: this pipeline stage has no transformer layer; nothing is installed in it")
        return installation
    if not found:
        raise ValueError(
            "echo: expected a model with transformer layers of row- and column-parallel linears (GPTModel, "
            f"HybridModel), found none in {', '.join(type(chunk).__name__ for chunk in chunks)}"
        )
    groups = {tensor_parallel_group(one.linear) for one in found}
    if len(groups) != 1:
        raise ValueError(f"echo: expected one tensor-parallel group for all layers, found {len(groups)}")
    (group,) = groups
    if group.size() == 1:
        logger.warning("echo: tensor parallel size 1: there is no communication to quantize, nothing is installed")
        return installation

    layer_config = found[0].layer_config
    # Without sequence parallelism nothing is gathered, and no workspace needs room for it.
    gathers = {} if layer_config.sequence_parallel else {"gather_bits": NATIVE_BITS}
    communicator = Communicator(group, config.replace(**gathers), recompute_test(), _max_passes(layer_config))
    if uses_cuda_graphs(layer_config):
        try:
            communicator.prepare_capture()
        except ValueError:
            communicator.destroy()
            raise
    for one in found:
        is_active = _phase_test(one.linear, config)
        site_group = EchoProcessGroup(
            communicator, one.site, one.hidden_size, is_active, sums=one.sums, gather=one.gather
        )
        set_tensor_parallel_group(one.linear, site_group)
    covered = {id(one.linear) for one in found}
    return Installation(
        config, communicator, uses_cuda_graphs(layer_config), found, exact_modules(chunks, covered), group
    )


def _phase_test(linear: nn.Module, config: EchoConfig) -> Callable[[], bool]:
    train, evaluate = Phase.train in config.phases, Phase.evaluate in config.phases
    return lambda: train if linear.training else evaluate


def _has_pipeline_stages(chunks: Sequence[nn.Module]) -> bool:
    """Whether another rank may have the layers that these chunks lack."""
    configs = (getattr(module, "config", None) for chunk in chunks for module in chunk.modules())
    return any(getattr(config, "pipeline_model_parallel_size", 1) > 1 for config in configs)


def _max_passes(layer_config: Any) -> int | None:
    """Without pipeline stages every forward pass is followed by its backward pass."""
    return 1 if layer_config.pipeline_model_parallel_size == 1 else None
