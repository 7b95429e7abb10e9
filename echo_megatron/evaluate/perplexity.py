"""Perplexity of a subject on tokens: windows of the context's length, each predicted from its own beginning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_megatron.evaluate.subjects import Subject
from echo_megatron.evaluate.token_source import Tokens


@dataclass(frozen=True)
class Windows:
    """How tokens are cut.

    Attributes:
        context: tokens of a window, all of which are predicted, the first from one token.
        batch: windows of a forward pass.
    """

    context: int
    batch: int

    def batches(self, tokens: Tokens) -> Iterator[Tensor]:
        """int64 [windows, tokens of a window + 1]; the last one may be shorter, alone."""
        ids = torch.from_numpy(tokens.ids)
        num_whole, rest = divmod(tokens.num_tokens, self.context)
        whole = ids[: num_whole * self.context + 1].unfold(0, self.context + 1, self.context)
        yield from whole.split(self.batch) if num_whole else ()
        if rest:
            yield ids[num_whole * self.context :].unsqueeze(0)

    def num_tokens_a_pass(self, tokens: Tokens) -> int:
        """Of the first pass, which is as large as any."""
        first = next(self.batches(tokens))
        return first.shape[0] * (first.shape[1] - 1)


@dataclass(frozen=True)
class Measurement:
    """Losses of a setting.

    Attributes:
        window_losses: summed cross-entropy of each window, nats.
        window_tokens: tokens of each window.
    """

    window_losses: list[float]
    window_tokens: list[int]

    @property
    def loss(self) -> float:
        """Mean over tokens, nats."""
        return math.fsum(self.window_losses) / sum(self.window_tokens)

    @property
    def perplexity(self) -> float:
        """exp of the loss; inf where that is beyond a float, NaN where the model gave no number."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.no_grad()
def measure(
    subject: Subject, tokens: Tokens, windows: Windows, on_batch: Callable[[Measurement], None] = lambda so_far: None
) -> Measurement:
    """Losses of all tokens under the setting in force; every pass starts anew.

    Args:
        subject: the model.
        tokens: what it predicts.
        windows: how they are cut.
        on_batch: called after each pass with what there is.
    """
    so_far = Measurement([], [])
    for batch in windows.batches(tokens):
        losses = subject.losses(batch.to(subject.device))
        so_far.window_losses.extend(losses.tolist())
        so_far.window_tokens.extend([batch.shape[1] - 1] * batch.shape[0])
        on_batch(so_far)
    return so_far
