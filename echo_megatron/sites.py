"""A site: one sum of a pass; and the clock that tells where a pass begins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from echo_megatron.config import Direction


@dataclass(frozen=True)
class Site:
    """One quantized sum of a pass: an all-reduce, or a reduce-scatter under sequence parallelism.

    An all-gather of the same linear is named by the site, with bits of its own.

    Attributes:
        idx: position in the order in which the pass of its direction visits the sites of its chunk, from 0.
        direction: the pass.
        name: what errors and tables call it, e.g. `decoder.layers.3.mlp.linear_fc2`.
        bits: bits of a code.
        chunk: the model chunk (virtual pipeline stage) it belongs to.
    """

    idx: int
    direction: Direction
    name: str = ""
    bits: int = 4
    chunk: int = 0

    @cached_property
    def numbers(self) -> tuple[int, int, int]:
        """The site as kernels and their failure records know it: index, direction's index, chunk."""
        return self.idx, list(Direction).index(self.direction), self.chunk

    def __str__(self) -> str:
        return f"{self.direction.name} site {self.idx} of chunk {self.chunk}{f' ({self.name})' if self.name else ''}"


class PassClock:
    """Tells the first call of a pass from the order of the calls alone: no hooks on layers.

    On one rank, passes of one direction never overlap in any schedule of Megatron-core, so a pass begins when the site
    index does not increase or the model chunk changes, and always at site 0. An aborted pass is thus left behind by the
    next one.
    """

    def __init__(self) -> None:
        self._chunk: int | None = None
        self._last_idx = -1

    def tick(self, site: Site, is_captured: bool = False) -> bool:
        """Notes the call and returns whether it begins a pass.

        Args:
            site: of the call.
            is_captured: the call is recorded into a CUDA graph. A layer's graph is captured after warm-up calls of that
                layer alone, and replayed behind the layers before it: there, site 0 alone begins a pass.
        """
        begins = site.idx == 0 or (not is_captured and (site.chunk != self._chunk or site.idx <= self._last_idx))
        self._chunk, self._last_idx = site.chunk, site.idx
        return begins

    def invalidate(self) -> None:
        """The next call begins a pass, whatever its site."""
        self._chunk, self._last_idx = None, -1
