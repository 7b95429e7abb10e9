"""Megatron-core's inference engines in tests: stand-ins for flash-attn, for einops, and on a CPU for CUDA's events.

The engines, contexts and controllers are Megatron-core's own. Attention over the dynamic engine's paged cache is
flash-attn's alone there; here PyTorch computes it, for decoding in fixed shapes, so that a CUDA graph can capture it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Prompts = Sequence[Sequence[int]]
END = 99  # of the tiny checkpoints' vocabulary


class NumberTokenizer:
    """A token is a number in decimal."""

    bos, eod = None, END

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def as_text(prompts: Prompts) -> list[str]:
    return [" ".join(map(str, prompt)) for prompt in prompts]


class _Event:
    def __init__(self, *args: Any, **options: Any) -> None:
        self.time = 0.0

    def record(self, *args: Any) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other.time - self.time) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def wait(self, *args: Any) -> None: ...


class _Stream:
    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()


def install_stand_ins() -> None:
    """In this process, for good."""
    from megatron.core.inference.contexts import dynamic_context
    from megatron.core.transformer import attention

    attention.flash_attn_varlen_func = _varlen
    attention.flash_attn_with_kvcache = _with_cache
    attention.is_fa_min_version = lambda version: True
    attention.rearrange = lambda x, pattern: x.flatten(2)  # "s b h d -> s b (h d)" is the one that it is asked for
    if not torch.cuda.is_available():
        dynamic_context.triton_append_key_value_cache = None
        torch.cuda.Event = _Event  # type: ignore[misc, assignment]
        torch.cuda.Stream = _Stream  # type: ignore[misc, assignment]
        torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """flash_attn_varlen_func: q [tokens, heads, channels], a sequence behind the other; k and v as in `_paged`."""
    output = torch.zeros_like(q)
    num_q, num_k = cu_q.diff().tolist(), cu_k.diff().to(torch.int64)
    start = 0
    for row, count in enumerate(num_q):
        if count:
            one = slice(row, row + 1)
            part = q[start : start + count].unsqueeze(0)
            table = options["block_table"][one]
            output[start : start + count] = _paged(part, k, v, num_k[one], table, options["softmax_scale"])[0]
        start += count
    return output


def _with_cache(
    *, q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, softmax_scale: float, **options: Any
) -> Tensor:
    """flash_attn_with_kvcache: q [batch, positions, heads, channels]."""
    return _paged(q, k_cache, v_cache, cache_seqlens, options["block_table"], softmax_scale)


def _paged(q: Tensor, k: Tensor, v: Tensor, num_keys: Tensor, table: Tensor, scale: float) -> Tensor:
    """Causal attention of the last positions.

    Args:
        q: [batch, positions, heads, channels].
        k, v: [blocks, positions of a block, query groups, channels].
        num_keys: of each sequence, the queries' own included.
        table: int [batch, blocks of a sequence].
    """
    keys, values = (cache[table.long().clamp(min=0)].flatten(1, 2) for cache in (k, v))
    places = torch.arange(keys.size(1), device=q.device)
    last = num_keys.view(-1, 1, 1) - q.size(1) + torch.arange(q.size(1), device=q.device).view(1, -1, 1)
    mask = (places <= last.clamp(min=0)).unsqueeze(1)
    q, keys, values = (tensor.transpose(1, 2) for tensor in (q, keys, values))
    # What lies behind a sequence's end in its last block was never written, and may be NaN.
    unwritten = ~mask[:, :, -1].unsqueeze(-1)
    keys, values = keys.masked_fill(unwritten, 0.0), values.masked_fill(unwritten, 0.0)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


def run_static_engine(gpt: Any, prompts: Prompts, num_tokens: int, max_batch: int = 4) -> list[list[int]]:
    """Greedy tokens of the (legacy) static engine: one batch after the other, prompts of any lengths in it."""
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine
    from megatron.core.inference.utils import InferenceMode

    engine = StaticInferenceEngine(_controller(gpt, StaticInferenceContext(max_batch, 64)), legacy=True)
    requests = engine.generate(prompts=as_text(prompts), sampling_params=_greedy(num_tokens))
    InferenceMode.unset_active()
    return [request.generated_tokens.tolist() for request in requests]


def run_dynamic_engine(gpt: Any, prompts: Prompts, num_tokens: int, **options: Any) -> list[list[int]]:
    """Greedy tokens of a new dynamic engine; options as of `dynamic_engine`."""
    return generate(dynamic_engine(gpt, **options), prompts, num_tokens)


def dynamic_engine(gpt: Any, **options: Any) -> Any:
    """A dynamic engine, with its CUDA graphs where the model has them: those serve this engine alone.

    Args:
        options: of InferenceConfig.
    """
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines import DynamicInferenceEngine

    sizes: dict[str, Any] = {"max_sequence_length": 64, "buffer_size_gb": 0.01, "block_size_tokens": 16}
    config = InferenceConfig(**{**sizes, "max_requests": 4, "max_tokens": 64, **options})
    context = DynamicInferenceContext(model_config=gpt.config, inference_config=config)
    return DynamicInferenceEngine(controller=_controller(gpt, context), context=context)


def generate(engine: Any, prompts: Prompts, num_tokens: int) -> list[list[int]]:
    """Greedy tokens of a dynamic engine, which serves as often as it is asked to."""
    from megatron.core.inference.utils import InferenceMode

    with InferenceMode.active():  # an engine sets it when it is made, and leaves it on
        records = engine.generate(prompts=as_text(prompts), sampling_params=_greedy(num_tokens))
    return [list(record.merge().generated_tokens) for record in records]


def _controller(gpt: Any, context: Any) -> Any:
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

    return TextGenerationController(GPTInferenceWrapper(gpt, context), NumberTokenizer())


def _greedy(num_tokens: int) -> Any:
    from megatron.core.inference.sampling_params import SamplingParams

    return SamplingParams(top_k=1, num_tokens_to_generate=num_tokens, termination_id=-1)
