"""What `bench_ttft` times: prefills and decode steps of a model through Megatron-core's static inference context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from echo_megatron.bench.step_models import ModelShape, build
from echo_megatron.bench.step_settings import NCCL, SKIPPED, Setting
from echo_megatron.config import EchoConfig, TransportName
from echo_megatron.evaluate.inference import use_cached_attention

ECHO, EARLY8, ALL4 = "echo4", "echo4_early8", "echo4_min0"


def serving_settings(timeout_s: float, transport: TransportName) -> dict[str, Setting]:
    """Every setting by name; the group's own all-reduce, what the others are compared with, is the first."""
    echo4 = EchoConfig.preset("echo4", timeout_s=timeout_s, transport=transport)
    settings = [
        Setting(NCCL),
        Setting(ECHO, echo4),
        Setting(EARLY8, echo4.replace(early_bits=8, early_fraction=0.5)),
        Setting(ALL4, echo4.replace(min_bytes=0)),
        Setting(SKIPPED),
    ]
    return {setting.name: setting for setting in settings}


class Serving:
    """One model with KV caches; nothing of it needs a gradient.

    Args:
        shape: the model.
        num_layers: transformer layers to build.
        device: this rank's. Megatron's model parallelism has to be initialized.
        max_sequence: tokens of a sequence at most, new ones included.
    """

    def __init__(self, shape: ModelShape, num_layers: int, device: torch.device, max_sequence: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.device, self._shape, self._max_sequence = device, shape, max_sequence
        self._new_context = StaticInferenceContext
        self.model = build(shape, num_layers, max_sequence, device).eval().requires_grad_(False)
        use_cached_attention(self.model)
        self._contexts: dict[int, Any] = {}

    def message(self, batch: int, sequence: int) -> Tensor:
        """A tensor like a site's, without memory."""
        dtype = next(self.model.parameters()).dtype
        return torch.empty(sequence, batch, self._shape.hidden, dtype=dtype, device="meta")

    def prefill(self, batch: int, sequence: int) -> Callable[[], Tensor]:
        """A prefill of `batch` prompts into their cache; it returns their first new tokens [batch]."""
        tokens, context = self._tokens(batch, sequence), self._context(batch)

        def run() -> Tensor:
            context.reset()
            return self._forward(tokens, 0, context)

        return run

    def decode(self, batch: int, length: int) -> Decoding:
        """Decoding behind `length` tokens a sequence."""
        return Decoding(self, batch, length)

    def forget(self) -> None:
        """Drops the caches."""
        self._contexts.clear()

    def _context(self, batch: int) -> Any:
        """The caches of a batch, allocated by its first pass and then kept."""
        if batch not in self._contexts:
            self._contexts[batch] = self._new_context(batch, self._max_sequence)
        return self._contexts[batch]

    def _tokens(self, batch: int, sequence: int) -> Tensor:
        generator = torch.Generator().manual_seed(5)  # the same on all ranks
        return torch.randint(0, self._shape.vocab, (batch, sequence), generator=generator).to(self.device)

    def _forward(self, tokens: Tensor, offset: int, context: Any) -> Tensor:
        from megatron.core.inference.utils import InferenceMode

        context.sequence_len_offset = offset
        positions = torch.arange(offset, offset + tokens.size(1), device=self.device).expand_as(tokens)
        with torch.inference_mode(), InferenceMode.active():
            logits = self.model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
            return logits[:, -1].argmax(-1)


class Decoding:
    """A batch that is decoded.

    Args:
        serving: the model.
        batch: sequences.
        length: tokens of each in the cache. Their keys and values are drawn: what they are costs no time.
    """

    def __init__(self, serving: Serving, batch: int, length: int) -> None:
        self._serving, self._length = serving, length
        self._context = serving._context(batch)
        self._tokens = serving._tokens(batch, 1)
        self._next = 0
        is_new = not self._context.key_value_memory_dict
        self._context.enable_decode_mode()
        self.step()
        if is_new:
            with torch.inference_mode():
                for caches in self._context.key_value_memory_dict.values():
                    for cache in caches:
                        cache.normal_()
        self.restart()

    def restart(self) -> None:
        """The next step decodes the first token again."""
        self._next = 0

    def step(self) -> Tensor:
        """One more token of each sequence, behind the last one's place; it returns them [batch]."""
        self._context.enable_decode_mode()
        chosen = self._serving._forward(self._tokens, self._length + self._next, self._context)
        self._next += 1
        return chosen

    @contextmanager
    def graph(self) -> Iterator[Callable[[], Tensor]]:
        """The first step as a CUDA graph; every replay decodes the same place again, into the same tensor."""
        stream = torch.cuda.Stream(self._serving.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.restart()
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize(self._serving.device)
        graph = torch.cuda.CUDAGraph()
        self.restart()
        # Of this thread: NCCL's own watches the collectives of others.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            chosen = self.step()

        def replay() -> Tensor:
            graph.replay()
            return chosen

        try:
            yield replay
        finally:
            torch.cuda.synchronize(self._serving.device)
            graph.reset()
