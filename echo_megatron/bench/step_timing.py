"""Times of steps, their statistics over rounds, and how a run's time is shared among its parts."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Number = float | None


@dataclass(frozen=True)
class Block:
    """A few steps one after the other.

    Attributes:
        ms: median of a step, on the GPU, by events around each.
        wall_ms: of a step, from before the first is launched until the last is done, divided by their number.
    """

    ms: float
    wall_ms: float


def time_block(step: Callable[[], object], count: int, device: torch.device) -> Block:
    """Times `count` steps of this rank; on a CPU both times are wall time."""
    on_gpu = device.type == "cuda"
    marks: list[torch.cuda.Event] = []
    times: list[float] = []
    if on_gpu:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize(device)
        marks[0].record()
    start = time.perf_counter()
    for idx in range(count):
        before = time.perf_counter()
        step()
        if on_gpu:
            marks[idx + 1].record()
        else:
            times.append((time.perf_counter() - before) * 1e3)
    if on_gpu:
        torch.cuda.synchronize(device)
    wall_ms = (time.perf_counter() - start) * 1e3 / count
    if on_gpu:
        times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    return Block(statistics.median(times), wall_ms)


@dataclass(frozen=True)
class Spread:
    """Of the rounds' values.

    Attributes:
        median, q1, q3: with quartiles by linear interpolation; all the same value where there is one round.
    """

    median: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of one or more values."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


def gained_share(native: Number, ours: Number, bound: Number) -> Number:
    """How much of the time that skipping the all-reduces saves is saved: 1 is the bound.

    None where one was not measured, or where skipping saves under 1 % of the native time: a share of that is noise.
    """
    if native is None or ours is None or bound is None or native - bound < 0.01 * native:
        return None
    return (native - ours) / (native - bound)


class Ranks:
    """Agreements of the ranks, through a gloo group of their own: a rank that is stuck in NCCL makes them time out.

    Args:
        group: that group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of the ranks' values, for each of them."""
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on some rank."""
        return bool(self.largest([float(flag)])[0])

    def sum(self, value: float) -> float:
        """Of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.float64, device="cpu")
        self._all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor.item()

    def _all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        dist.all_reduce(tensor, op, group=self._group)


class Shares:
    """Divides the seconds of a run among its parts: what a part leaves over, the later ones have.

    Args:
        budget_s: seconds from `start` on.
        start: time.monotonic() of the run's beginning.
        weights: how long each part takes, relative to the others, in their order.
        ranks: the elapsed time is that of the rank for which it is longest, so that all decide alike.
    """

    def __init__(self, budget_s: float, start: float, weights: Sequence[float], ranks: Ranks) -> None:
        self.budget_s, self._start, self._ranks = budget_s, start, ranks
        self._rest = list(weights)

    def elapsed(self) -> float:
        """Seconds since the beginning, the same on all ranks."""
        return self._ranks.largest([time.monotonic() - self._start])[0]

    def elapsed_here(self, now: float) -> float:
        """Seconds from the beginning until `now`, a time.monotonic(), on this rank."""
        return now - self._start

    def next_deadline(self) -> float | None:
        """Begins the next part; returns the `elapsed` at which it should end, or None where no time is left."""
        elapsed, rest = self.elapsed(), sum(self._rest)
        weight = self._rest.pop(0)
        if elapsed >= self.budget_s:
            return None
        return elapsed + (self.budget_s - elapsed) * weight / rest

    def drop(self, count: int) -> None:
        """The next `count` parts do not take place."""
        del self._rest[:count]


def fits(elapsed: float, deadline: float, done: Sequence[float]) -> bool:
    """Whether one more round, as long as the longest so far, ends by the deadline; the first always does.

    Args:
        elapsed: now.
        deadline: of the part.
        done: seconds of the rounds so far.
    """
    return not done or elapsed + max(done) <= deadline
