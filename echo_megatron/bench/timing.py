"""Time of a call: medians by CUDA events with the host ahead of the GPU, the slowest rank's.

A timed call follows, on its stream: a wait that lets the host get ahead, so that launching is not timed (a training
step is in that state); work that is not timed; a barrier of the ranks. `call_ms` is the other way: the GPU is idle, the
host launches, launching included. On CPU both are wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

SPIN_HZ = 1.98e9  # clock of torch.cuda._sleep; more than it is only makes the wait shorter
MAX_SPIN_S = 2e-3
POOL_BYTES = 256 << 20  # well over twice any L2
MAX_GROWTH_BITS = 100  # BF16 ends at 2^128
ALIGNED_VALUES = 128

Step = Callable[[], object]
Pair = tuple[Step, Step]  # what runs untimed, and the timed step after it


def nothing() -> None:
    """The step that does nothing."""


def agree_max(value: float, device: torch.device) -> float:
    """The largest of the ranks' values."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


class Inputs:
    """Buffers that the calls of a row take in turn: an input that was used is out of L2 before its turn comes again.

    In-place sums grow by P at each use. They are refilled by `fill`, and scaled down in between by `before`, untimed,
    where the calls of one row would overflow.

    Args:
        memory: BF16, what the buffers are cut from.
        num_values: values of a message.
        calls: calls of a row.
        world_size: P.
    """

    def __init__(self, memory: Tensor, num_values: int, calls: int, world_size: int) -> None:
        stride = -(-num_values // ALIGNED_VALUES) * ALIGNED_VALUES
        wanted = min(calls, -(-POOL_BYTES // (stride * memory.element_size())))
        count = max(1, min(wanted, memory.numel() // stride))
        self.buffers = [memory[idx * stride : idx * stride + num_values] for idx in range(count)]
        self._used = memory[: count * stride]
        self._scale = 1.0 / world_size if (calls / count) * (world_size - 1).bit_length() > MAX_GROWTH_BITS else None
        self._next = 0

    def fill(self) -> None:
        self._used.normal_()

    def before(self) -> None:
        """Untimed work before a call."""
        if self._scale is not None:
            self.buffers[self._next].mul_(self._scale)

    def next(self) -> Tensor:
        buffer = self.buffers[self._next]
        self._next = (self._next + 1) % len(self.buffers)
        return buffer


@dataclass(frozen=True)
class Timing:
    """Medians of a call on the slowest rank.

    Attributes:
        ms: milliseconds on the GPU.
        call_ms: with launching, on an idle GPU; None where it was not measured.
        iterations: calls that the median is of.
    """

    ms: float
    call_ms: float | None
    iterations: int


class Timer:
    """Measures steps.

    Args:
        device: where they run.
        warmup: calls before the timed ones.
        iterations: timed calls.
        max_s: a measurement that would take longer has fewer calls, but at least eight.
        barrier: enqueues a barrier of the ranks.
    """

    def __init__(self, device: torch.device, warmup: int, iterations: int, max_s: float, barrier: Step) -> None:
        self.device = device
        self.warmup, self.iterations, self.max_s = warmup, iterations, max_s
        self.barrier = barrier

    @property
    def calls(self) -> int:
        """Calls of one measurement at most."""
        return self.warmup + self.iterations

    def measure(self, step: Step, before: Step = nothing, with_call: bool = False) -> Timing:
        """Times `step`, each time after the untimed `before`."""
        (ms,), iterations = self._medians([(before, step)])
        call_ms = self._call_median(step, before) if with_call and self.device.type == "cuda" else None
        return Timing(self._slowest(ms), call_ms, iterations)

    def added(self, step: Step, without: Step, leads_in: bool = False) -> Timing:
        """What `step` takes more than `without`; the two alternate, so that a drifting clock meets both.

        Args:
            step: what is timed.
            without: what of it is not counted.
            leads_in: `step` leaves work behind, on another stream, that its next call waits for. Each of the two then
                follows itself, untimed, and does not begin before all else is done: `without` must not run beside what
                `step` left, which would count for `step` as time saved.
        """
        pairs = [(step, step), (without, without)] if leads_in else [(nothing, step), (nothing, without)]
        (ms, ms_without), iterations = self._medians(pairs, settle=leads_in)
        return Timing(self._slowest(ms) - self._slowest(ms_without), None, iterations)

    def _medians(self, pairs: Sequence[Pair], settle: bool = False) -> tuple[list[float], int]:
        share = self._share(pairs)
        warmup, iterations = max(2, int(self.warmup * share)), max(8, int(self.iterations * share))
        loop = self._cuda_loop if self.device.type == "cuda" else self._cpu_loop
        times = loop(pairs, warmup, iterations, settle)
        return [statistics.median(of_step) for of_step in times], iterations

    def _share(self, pairs: Sequence[Pair]) -> float:
        """How much of the calls fits into `max_s`; the same on all ranks."""
        for before, step in pairs:  # compiles, allocates
            before()
            step()
        self._synchronize()
        start = time.perf_counter()
        for _ in range(2):
            for before, step in pairs:
                before()
                step()
        self._synchronize()
        seconds = agree_max((time.perf_counter() - start) / 2, self.device)
        return min(1.0, self.max_s / max(seconds * self.calls, 1e-9))

    def _cuda_loop(self, pairs: Sequence[Pair], warmup: int, iterations: int, settle: bool) -> list[list[float]]:
        events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in pairs]
        spin_s, least = MAX_SPIN_S / 4, MAX_SPIN_S
        for iteration in range(warmup + iterations):
            host_s = 0.0
            for idx, (before, step) in enumerate(pairs):
                if settle:
                    torch.cuda.synchronize()
                host_start = time.perf_counter()
                torch.cuda._sleep(int(spin_s * SPIN_HZ))
                before()
                self.barrier()
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step()
                end.record()
                events[idx].append((begin, end))
                host_s += time.perf_counter() - host_start
            if iteration < warmup:  # the least of them: a full queue of launches makes the host wait
                least = min(least, host_s / len(pairs))
                spin_s = min(MAX_SPIN_S, 1.5 * least + 2e-5)
        torch.cuda.synchronize()
        return [[begin.elapsed_time(end) for begin, end in of_step[warmup:]] for of_step in events]

    def _call_median(self, step: Step, before: Step) -> float:
        times = []
        for iteration in range(self.calls):
            before()
            self.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
            end.synchronize()
            if iteration >= self.warmup:
                times.append(begin.elapsed_time(end))
        return self._slowest(statistics.median(times))

    def _cpu_loop(self, pairs: Sequence[Pair], warmup: int, iterations: int, settle: bool) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in pairs]  # nothing to settle: a step is done when it returns
        for _ in range(warmup + iterations):
            for idx, (before, step) in enumerate(pairs):
                before()
                self.barrier()
                start = time.perf_counter()
                step()
                times[idx].append((time.perf_counter() - start) * 1e3)
        return [of_step[warmup:] for of_step in times]

    def _slowest(self, ms: float) -> float:
        return agree_max(ms, self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
