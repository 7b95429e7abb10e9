"""Activation recompute: a forward site that runs again inside a backward pass returns what the first run decoded.

The codes of the first run are kept and decoded again: the same bits, no communication, and the compensator's state is
not touched twice. Two-shot keeps the codes of the sum (4.25 bits an element at 4 bits), one-shot those of every rank
or, where it is smaller, the sum itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo_megatron.sites import Site
from echo_megatron.transports.protocol import Reduced


def inside_backward() -> bool:
    """True while autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class _KeptPass:
    """Codes of one forward pass of one chunk, by site."""

    codes: dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]] = field(default_factory=dict)
    replay_began: bool = False


class ReplayCache:
    """Kept codes of the forward passes whose backward is still to come, first in, first out for each chunk.

    Megatron's schedules run the backward passes of a chunk in the order of its forward passes.

    Args:
        max_passes: passes of a chunk that can wait for their backward at once; an older one was abandoned and is
            dropped. 1 without pipeline parallelism; None where the schedule sets no limit.
    """

    def __init__(self, max_passes: int | None = None) -> None:
        self.max_passes = max_passes
        self._passes: dict[int, deque[_KeptPass]] = {}

    def begin_pass(self, chunk: int) -> None:
        """A forward pass of `chunk` begins."""
        if any(kept.replay_began for passes in self._passes.values() for kept in passes):
            # No schedule starts a forward pass in the middle of a backward pass: that backward was aborted.
            self.clear()
        passes = self._passes.setdefault(chunk, deque())
        if passes and not passes[-1].codes:
            passes.pop()  # nothing of it was recomputed
        passes.append(_KeptPass())
        while self.max_passes is not None and len(passes) > self.max_passes:
            passes.popleft()

    def keep(self, site: Site, reduced: Reduced) -> None:
        """Keeps what the site's replay needs; the caller may overwrite `reduced.output` afterwards."""
        codes = reduced.codes.clone() if reduced.codes is reduced.output else reduced.codes
        self._passes[site.chunk][-1].codes[site.idx] = (codes, reduced.restore)

    def replay(self, site: Site) -> Tensor:
        """The site's output of the oldest pass, once.

        Raises:
            RuntimeError: no codes were kept, so the sum can't be had without communication that the forward never made.
        """
        passes = self._passes.get(site.chunk) or deque()
        if not passes or site.idx not in passes[0].codes:
            raise RuntimeError(
                f"{site} ran inside a backward pass, but its forward pass kept no codes to replay. Expected: "
                "activation recompute by a reentrant checkpoint of Megatron or Transformer Engine, one backward pass a "
                "forward pass, in the same order. Use that checkpoint, or switch recompute off for this module."
            )
        kept = passes[0]
        kept.replay_began = True
        codes, restore = kept.codes.pop(site.idx)
        if not kept.codes:
            passes.popleft()
        return restore(codes)

    def clear(self) -> None:
        """Drops everything kept, e.g. after a pass that was given up."""
        self._passes.clear()

    def num_bytes(self) -> int:
        """Device memory that the kept codes hold."""
        kept = (codes for passes in self._passes.values() for one in passes for codes, _ in one.codes.values())
        return sum(codes.numel() * codes.element_size() for codes in kept)
