"""Forward-only use of a tensor-parallel GPTModel: logits, generation with a KV cache, bytes on the wire.

Prefill and decode go through Megatron-core's static inference context and its GPTInferenceWrapper. Its own engines take
a model with Echo installed as it is (docs/inference.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig
from echo_megatron.evaluate.simulated_megatron import SimulatedMegatron
from echo_megatron.integrations.megatron import Installation, install
from echo_megatron.integrations.megatron_sites import transformer_layers
from echo_megatron.integrations.versions import require
from echo_megatron.pretrain.attention import SdpaCoreAttention
from echo_megatron.pretrain.schema import Layers
from echo_megatron.sites import Site

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the default is the most likely one.

    Attributes:
        temperature: divides the logits; above 0.
        top_k: choose among the k most likely; 1: the most likely, 0: among all.
        top_p: choose among the most likely whose probabilities add up to it; 0: among all. Not together with top_k.
        seed: of the choice; the same on all ranks.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature: expected a number above 0, got {self.temperature}; top_k=1 is greedy")
        if self.top_k < 0 or not 0 <= self.top_p <= 1:
            raise ValueError(f"expected top_k >= 0 and top_p in [0, 1], got {self.top_k} and {self.top_p}")
        if self.top_k and self.top_p:
            raise ValueError(f"expected top_k or top_p, got {self.top_k} and {self.top_p}; set the other one to 0")


GREEDY = Sampling()


class CachedAttention(nn.Module):
    """Core attention of whole sequences by `whole`; of one position after a KV cache by `SdpaCoreAttention`.

    Transformer Engine's makes a plan for every length of the cache, so that each token would wait for one.

    Args:
        whole: Transformer Engine's core attention.
        single: of the same layer.
    """

    def __init__(self, whole: nn.Module, single: SdpaCoreAttention) -> None:
        super().__init__()
        self.whole, self.single = whole, single

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        """As `SdpaCoreAttention.forward`."""
        attention = self.single if query.size(0) == 1 else self.whole
        return attention(query, key, value, *args, **options)


def use_cached_attention(gpt: nn.Module) -> None:
    """Gives every layer that has Transformer Engine's core attention a `CachedAttention`; call it once."""
    for layer in transformer_layers(gpt).values():
        attention = layer.self_attention
        if isinstance(attention.core_attention, SdpaCoreAttention):
            continue
        single = SdpaCoreAttention(
            attention.config, attention.layer_number, attention.attn_mask_type, attention.attention_type
        )
        attention.core_attention = CachedAttention(attention.core_attention, single)


class InferenceModel:
    """A tensor-parallel GPTModel in eval mode, with Echo installed; all ranks of the group make the same calls.

    Args:
        gpt: on its device; its attention has to serve a KV cache: of `load_model`, or with `use_cached_attention`.
        config: Echo's options; `bits: 16` leaves Megatron's communication.
        vocab_size: logits beyond it are padding and dropped; None: those of the model.
        simulated_ranks: P, where one process computes what P ranks would; every message is then quantized.

    Raises:
        ValueError: as `install`, or as `SimulatedMegatron`.
        ImportError: a version of megatron-core without the inference parts that are used here (0.19 has them).
    """

    def __init__(
        self, gpt: nn.Module, config: EchoConfig, vocab_size: int | None = None, simulated_ranks: int | None = None
    ) -> None:
        self._context_class = require("megatron.core.inference.contexts", "StaticInferenceContext")
        wrappers = "megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper"
        self._wrapper_class = require(wrappers, "GPTInferenceWrapper")
        self._mode = require("megatron.core.inference.utils", "InferenceMode")
        self._sample = require("megatron.core.inference.sampling.torch_sampling", "TorchSampling").sample_from_logits
        self.gpt = cast(Any, gpt.eval())
        self.vocab_size: int = self.gpt.vocab_size if vocab_size is None else vocab_size
        self._simulation = None
        if simulated_ranks is not None:
            self._simulation = SimulatedMegatron(gpt, simulated_ranks, config).__enter__()
            config = EchoConfig.preset("nccl")
        self.installation: Installation = install(gpt, config)

    def __enter__(self) -> InferenceModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._simulation is not None:
            self._simulation.__exit__(kind, error, traceback)
        if error is None:
            self.installation.uninstall()
        else:
            self.installation.abandon()

    @property
    def device(self) -> torch.device:
        return next(self.gpt.parameters()).device

    @torch.inference_mode()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [batch, sequence, vocabulary] of whole sequences [batch, sequence], causal, without a KV cache."""
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        return self.gpt(tokens, positions, None, runtime_gather_output=True)[..., : self.vocab_size]

    def generate(
        self,
        prompts: Prompts,
        max_new_tokens: int,
        *,
        stop_ids: Collection[int] = (),
        is_done: Callable[[Sequence[int]], bool] | None = None,
        sampling: Sampling = GREEDY,
        max_batch: int = 64,
    ) -> list[list[int]]:
        """New tokens of every prompt.

        Prompts of one length are served together, `max_batch` of them at most: no position is padding.

        Args:
            prompts: token ids; none of them empty.
            max_new_tokens: of each prompt, at least 1.
            stop_ids: a sequence ends with one of these, which is the last of its new tokens.
            is_done: of a sequence's new tokens: whether it ends with them.
            sampling: how tokens are chosen.
            max_batch: sequences at once, at least 1.

        Raises:
            ValueError: an empty prompt, a token out of the vocabulary, or a number below 1.
        """
        self._check(prompts, max_new_tokens, max_batch)
        generator = torch.Generator(self.device).manual_seed(sampling.seed)
        found: dict[int, list[int]] = {}
        for batch in _batches(prompts, max_batch):
            tokens = torch.tensor([list(prompts[idx]) for idx in batch], device=self.device)
            new: list[list[int]] = [[] for _ in batch]
            going = set(range(len(batch)))
            for logits in self._steps(tokens, max_new_tokens, new):
                chosen = self._sample(
                    logits, sampling.temperature, sampling.top_k, sampling.top_p, generator=generator
                ).tolist()
                for row, token in enumerate(chosen):
                    new[row].append(token)
                    if row in going and (token in stop_ids or (is_done is not None and is_done(new[row]))):
                        going.discard(row)
                        found[batch[row]] = list(new[row])
                if not going:
                    break
            found.update({batch[row]: new[row] for row in going})
        self.installation.check()
        return [found[idx] for idx in range(len(prompts))]

    def sent_bytes(self, batch: int, sequence: int) -> int:
        """Bytes that this rank sends at the sites in one forward pass: a prefill, or with `sequence` 1 a decode step.

        See `forward_sent_bytes`.
        """
        config = self.gpt.config
        x = torch.empty(sequence, batch, config.hidden_size, dtype=config.params_dtype, device="meta")
        return forward_sent_bytes(self.installation, x)

    def _steps(self, tokens: Tensor, max_new_tokens: int, new: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Logits [batch, vocabulary] after the prompt, and after each new token that the caller has added to `new`."""
        num_rows, length = tokens.shape
        context = self._context_class(num_rows, length + max_new_tokens)
        model = self._wrapper_class(self.gpt, context)
        model.prep_model_for_inference()
        start = 0
        while True:
            positions = torch.arange(start, start + tokens.size(1), device=tokens.device).expand_as(tokens)
            with self._mode.active():
                logits = model.run_one_forward_step(
                    {"tokens": tokens, "position_ids": positions, "attention_mask": None}
                )
            yield logits[:, -1, : self.vocab_size].float()
            if len(new[0]) == max_new_tokens:
                return
            start += tokens.size(1)
            context.enable_decode_mode()
            tokens = torch.tensor([row[-1:] for row in new], device=tokens.device)

    def _check(self, prompts: Prompts, max_new_tokens: int, max_batch: int) -> None:
        for name, value in (("max_new_tokens", max_new_tokens), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        for idx, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {idx}: expected at least one token, got none; begin with the model's BOS")
            if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
                raise ValueError(
                    f"prompt {idx}: expected tokens of 0 to {self.vocab_size - 1}, got {min(prompt)} to {max(prompt)}; "
                    "use the checkpoint's own tokenizer"
                )


def load_model(
    folder_or_name: str | Path,
    device: torch.device,
    *,
    layers: Layers = Layers.local,
    dtype: torch.dtype | None = None,
) -> tuple[Any, int]:
    """This rank's part of a checkpoint on `device`, with attention that serves a KV cache, and the vocabulary's size.

    Args:
        folder_or_name: folder or hub name of a Qwen3 or Llama-3 checkpoint of Hugging Face, or a run folder of
            `echo-megatron pretrain`. Model parallelism has to be initialized.
        device: this rank's.
        layers: local or Transformer Engine's.
        dtype: torch.float32 or torch.bfloat16; None: that of the checkpoint.

    Raises:
        ValueError: as `load_hf`, or as `find_checkpoint` and `load_run`.
    """
    # Here, because they import packages that a model which was built otherwise does not need.
    from echo_megatron.evaluate.checkpoint import find_checkpoint, is_run, load_run
    from echo_megatron.evaluate.hf import load_hf

    if is_run(Path(folder_or_name)):
        from megatron.core import parallel_state

        checkpoint = find_checkpoint(Path(folder_or_name))
        tp = parallel_state.get_tensor_model_parallel_world_size()
        gpt = load_run(checkpoint, tp, checkpoint.precision if dtype is None else dtype, layers, device)
        vocab_size = checkpoint.config.data.vocab_size
    else:
        gpt = load_hf(folder_or_name, layers=layers, dtype=dtype)
        vocab_size = gpt.hf_config.vocab_size
    gpt = gpt.to(device)
    use_cached_attention(gpt)
    return gpt, vocab_size


def forward_sent_bytes(installation: Installation, x: Tensor) -> int:
    """Bytes that this rank sends in a forward pass at the sites where Echo is installed, each with a tensor like `x`.

    What is too small to be quantized counts as a ring all-reduce, or as the p2p transport's exact sum.
    """
    communicator = installation.communicator
    if communicator is None:
        return 0
    forward = (site for site in installation.sites if site.direction is Direction.forward)
    return sum(_num_sent_bytes(communicator, site, x) for site in forward)


def _num_sent_bytes(communicator: Communicator, site: Site, x: Tensor) -> int:
    """Of one call at `site` with a tensor like `x`."""
    if x.nbytes >= communicator.min_bytes(x.dtype):
        return communicator.transport.num_sent_bytes(x, site)
    others = communicator.world_size - 1
    if x.nbytes < communicator.transport.exact_below_bytes(x.dtype):
        return others * x.nbytes
    return 2 * others * x.nbytes // communicator.world_size


def _batches(prompts: Prompts, max_batch: int) -> list[list[int]]:
    """Indices of prompts of one length each."""
    by_length: dict[int, list[int]] = {}
    for idx, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(idx)
    return [
        found[start : start + max_batch] for found in by_length.values() for start in range(0, len(found), max_batch)
    ]
