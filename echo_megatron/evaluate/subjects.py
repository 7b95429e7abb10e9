"""What an evaluation measures: a model, its sites, and how a communication setting is applied to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from echo_megatron.config import Direction, EchoConfig
from echo_megatron.evaluate.cross_entropy import cross_entropy, split_vocabulary, vocabulary_terms
from echo_megatron.evaluate.settings import bits_a_value
from echo_megatron.evaluate.simulated_megatron import SimulatedMegatron
from echo_megatron.integrations.megatron import install
from echo_megatron.reference import choose_algorithm, num_sent_bytes
from echo_megatron.simulation import SimulatedTensorParallel, find_linears
from echo_megatron.sites import Site

ROW_PARALLEL = ("o_proj", "down_proj")  # of transformers' Llama, Qwen, Mistral, Gemma and their relatives
BYTES_AT_16_BITS = 2


@dataclass(frozen=True)
class Applied:
    """A setting that is in force.

    Attributes:
        algorithm: one_shot or two_shot; None at 16 bits.
        transport: how the codes move; None in a simulation and at 16 bits.
        bits_a_value: bits on the wire, scales and headers included, mean over the sites.
        bytes_relative: bytes that a rank sends at the sites, as a fraction of a 16-bit ring all-reduce's.
    """

    algorithm: str | None
    transport: str | None
    bits_a_value: float
    bytes_relative: float


class Subject(Protocol):
    """A model whose row-parallel linears sum under a setting.

    Attributes:
        facts: what the results say about it; equal facts, equal model.
        vocab_size: ids below it are legal.
        device: where its inputs go.
    """

    facts: dict[str, Any]
    vocab_size: int
    device: torch.device

    def losses(self, tokens: Tensor) -> Tensor:
        """Summed cross-entropy of each row of tokens [rows, length + 1]: float64 [rows], in nats."""
        ...

    def applied(self, config: EchoConfig, world_size: int, num_tokens: int) -> AbstractContextManager[Applied]:
        """The setting in force at `world_size` ranks for passes of `num_tokens` tokens."""
        ...


def relative_bytes(config: EchoConfig, sites: Sequence[Site], world_size: int, num_values: int) -> float:
    """Bytes sent by all ranks at the sites relative to 16-bit ring all-reduces of the same values."""
    if not config.quantizes or world_size == 1:
        return 1.0
    algorithm = choose_algorithm(config, world_size)
    sent = sum(
        num_sent_bytes(config, site.bits, algorithm, world_size, rank, num_values)
        for site in sites
        for rank in range(world_size)
    )
    return sent / (len(sites) * ring_bytes(world_size, num_values) * world_size)


def ring_bytes(world_size: int, num_values: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of 16-bit values."""
    return 2 * (world_size - 1) / world_size * num_values * BYTES_AT_16_BITS


def sha256_of(tensors: Iterable[Tensor]) -> str:
    """Of the tensors' values in fp32."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


class MegatronSubject:
    """A GPTModel, alone on its device or one of the tensor-parallel ranks.

    Args:
        model: of `load_run` or `load_hf`, on its device.
        vocab_size: without padding; the logits of padded rows are left out.
        facts: of the checkpoint.
        is_simulated: whether ranks are simulated; the model is then whole.
    """

    def __init__(self, model: Any, vocab_size: int, facts: dict[str, Any], is_simulated: bool) -> None:
        self.model, self.vocab_size = model.eval(), vocab_size
        weight = model.decoder.final_layernorm.weight
        self.device = weight.device
        self._is_simulated, self._num_simulated = is_simulated, 1
        # Small, whole on every rank, and no two trainings end with the same one.
        self.facts = {**facts, "final_norm_sha256": sha256_of([weight])}

    def logits(self, tokens: Tensor) -> Tensor:
        """[rows, length, padded vocabulary / ranks] of tokens [rows, length]; padded rows are very negative."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = self.model(tokens, positions, None)
        first = dist.get_rank(_tensor_parallel_group()) * logits.shape[-1]
        padded = max(0, self.vocab_size - first)
        if padded < logits.shape[-1]:
            logits[..., padded:] = torch.finfo(logits.dtype).min
        return logits

    def losses(self, tokens: Tensor) -> Tensor:
        """See `Subject.losses`; the same on every rank, and the same bits of as many simulated ranks."""
        logits, targets = self.logits(tokens[:, :-1]), tokens[:, 1:]
        if self._is_simulated:
            parts = split_vocabulary(logits, self._num_simulated)
            terms = [vocabulary_terms(part, targets, idx * part.shape[-1]) for idx, part in enumerate(parts)]
        else:
            group = _tensor_parallel_group()
            own = vocabulary_terms(logits, targets, dist.get_rank(group) * logits.shape[-1])
            terms = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(terms, own, group=group)
        return cross_entropy(terms).double().sum(-1)

    @contextmanager
    def applied(self, config: EchoConfig, world_size: int, num_tokens: int) -> Iterator[Applied]:
        """See `Subject.applied`.

        Raises:
            ValueError: P does not divide the model; on real ranks, messages so small that Echo would not quantize them.
        """
        num_values = num_tokens * self.model.config.hidden_size
        if self._is_simulated:
            with SimulatedMegatron(self.model, world_size, config) as simulation:
                self._num_simulated = world_size
                relative = relative_bytes(config, simulation.sites, world_size, num_values)
                yield Applied(
                    _algorithm(config, world_size), None, bits_a_value(config, self.model.config.num_layers), relative
                )
            return
        if not config.quantizes:
            yield Applied(None, None, float(config.bits), 1.0)
            return
        installation = install(self.model, config.replace(directions=[Direction.forward]))
        try:
            communicator = installation.communicator
            assert communicator is not None
            transport = communicator.transport
            like = torch.empty(1, dtype=self.model.config.params_dtype, device=self.device).expand(num_values)
            if like.nbytes < (limit := communicator.min_bytes(like.dtype)):
                raise ValueError(
                    f"messages of {like.nbytes:,} bytes stay at full precision (min_bytes {limit:,}), so there is "
                    "nothing to evaluate; give a larger --batch or --context, or the setting with min_bytes=0"
                )
            sent = sum(transport.num_sent_bytes(like, site) for site in installation.sites)
            relative = sent / (len(installation.sites) * ring_bytes(world_size, num_values))
            bits = bits_a_value(config, self.model.config.num_layers)
            yield Applied(transport.algorithm.name, transport.name, bits, relative)
            installation.check()
        except BaseException:
            installation.abandon()
            raise
        installation.uninstall()


class TransformersSubject:
    """A model of transformers whose linears of `ROW_PARALLEL` are simulated ranks'.

    Args:
        model: on its device.
        facts: of the checkpoint.

    Raises:
        ValueError: it has no such linears.
    """

    def __init__(self, model: nn.Module, facts: dict[str, Any]) -> None:
        self.model = model.eval()
        self._linears = find_linears(model, ROW_PARALLEL)
        weights = [linear.weight for _, linear in self._linears]
        self.device = weights[0].device
        self.vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        self.facts = {**facts, "num_sites": len(weights), "weights_sha256": sha256_of(weights)}

    def losses(self, tokens: Tensor) -> Tensor:
        """See `Subject.losses`."""
        logits = self.model(tokens[:, :-1], use_cache=False).logits.float()
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return losses.double().sum(-1)

    @contextmanager
    def applied(self, config: EchoConfig, world_size: int, num_tokens: int) -> Iterator[Applied]:
        """See `Subject.applied`."""
        with SimulatedTensorParallel(self._linears, world_size, config) as simulation:
            relative = relative_bytes(
                config, simulation.sites, world_size, num_tokens * self._linears[0][1].out_features
            )
            bits = bits_a_value(config, simulation.num_layers)
            yield Applied(_algorithm(config, world_size), None, bits, relative)


def _algorithm(config: EchoConfig, world_size: int) -> str | None:
    return choose_algorithm(config, world_size).name if config.quantizes and world_size > 1 else None


def _tensor_parallel_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()
