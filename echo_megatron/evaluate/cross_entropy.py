"""Cross-entropy over a vocabulary split over ranks, added in rank order: real and simulated ranks give one result."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor


def split_vocabulary(logits: Tensor, world_size: int) -> list[Tensor]:
    """The ranks' parts [..., vocabulary / ranks] of whole logits; what is missing for equal parts is very negative."""
    missing = -logits.shape[-1] % world_size
    if missing:
        logits = F.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
    return list(logits.chunk(world_size, -1))


def vocabulary_terms(part: Tensor, targets: Tensor, first: int) -> Tensor:
    """What a rank knows of each loss.

    Args:
        part: logits [..., n] of the ids from `first` on.
        targets: int64 [...], ids of the whole vocabulary.
        first: the part's first id.

    Returns:
        fp32 [3, ...]: the highest logit; the sum of exp(logit - highest); the target's logit, 0 where another rank
        has it.
    """
    values = part.float().contiguous()  # in the same strides on a rank, which may decide the order of a sum
    highest = values.amax(-1)
    sums = (values - highest.unsqueeze(-1)).exp_().sum(-1)
    places = targets - first
    is_own = (places >= 0) & (places < values.shape[-1])
    own = values.gather(-1, places.clamp(0, values.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.stack((highest, sums, own.where(is_own, 0.0)))


def cross_entropy(terms: Sequence[Tensor]) -> Tensor:
    """fp32 [...] losses in nats from every rank's `vocabulary_terms`, in rank order."""
    highest = reduce(torch.maximum, (one[0] for one in terms))
    total = reduce(torch.add, (one[1] * (one[0] - highest).exp() for one in terms))
    own = reduce(torch.add, (one[2] for one in terms))
    return total.log() + highest - own
