"""Where the sites' calls lie in a step: kernels of one profiled forward and one backward pass.

The passes are profiled apart, so that each kernel's direction is known. A call is one kernel: NCCL's all-reduce or
Echo's. Its time is in place: waiting for the other rank, and running beside other kernels, is in it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ECHO_CALL = re.compile(r"\becho::(\(anonymous namespace\)::)?(all_reduce|exact)_kernel\b")
ECHO_OTHER = re.compile(r"\becho::(\(anonymous namespace\)::)?\w+_kernel\b")
NCCL_CALL = re.compile(r"nccl\w*AllReduce", re.IGNORECASE)
SHOWN, NAME_LENGTH = 10, 120  # kernels that are not sites', by name
ANNOTATION = re.compile(r"^(nccl:|c10d::|gloo:)")  # ranges that older profilers list among the kernels


@dataclass(frozen=True)
class Kernel:
    """What ran on the GPU.

    Attributes:
        name: demangled.
        start, end: microseconds of one clock.
    """

    name: str
    start: float
    end: float


def record(run: Callable[[], object]) -> list[Kernel]:
    """What ran on this rank's GPU during `run`, copies included, by start."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.events() or []
    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and not ANNOTATION.match(event.name)
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def site_calls(kernels: Sequence[Kernel], num_sites: int) -> list[Kernel]:
    """The sites' calls among the kernels of one pass.

    Echo's kernels are sites'. Of NCCL's the first is not: the embedding's sum in a forward pass, the head's input
    gradient in a backward pass. The next `num_sites` are, and what follows belongs to the loss.
    """
    ours = [kernel for kernel in kernels if ECHO_CALL.search(kernel.name)]
    if ours:
        return ours
    native = [kernel for kernel in kernels if NCCL_CALL.search(kernel.name)]
    return native[1 : 1 + num_sites]


def summary(kernels: Sequence[Kernel], num_sites: int) -> dict[str, Any]:
    """One pass in milliseconds: its span, the sites' calls, and how much of them no other kernel hides.

    Returns:
        `calls`: how many were found, of `num_sites`. `call_ms`, `call_q1_ms`, `call_q3_ms`: of one. `sum_ms`: of all,
        with Echo's kernels beside the calls. `exposed_ms`: the part of that in which nothing else ran. `span_ms`: from
        the first kernel's start to the last one's end. `idle_ms`: the part of that in which nothing ran at all.
        `others_ms`: in which a kernel ran that is not a site's; whether these took as long as with other communication
        says if calls cost more than their own time. `others`: `name`, `count` and `sum_ms` of those that took most.
    """
    if not kernels:
        raise RuntimeError("the profiler recorded no kernel")
    calls = site_calls(kernels, num_sites)
    mine = set(calls) | {kernel for kernel in kernels if ECHO_OTHER.search(kernel.name)}
    sites = union(list(mine))
    rest = [kernel for kernel in kernels if kernel not in mine]
    others = union(rest)
    everything = union(kernels)
    span = max(kernel.end for kernel in kernels) - kernels[0].start
    times = [kernel.end - kernel.start for kernel in calls]
    quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else 3 * (times or [0.0])
    return {
        "calls": len(calls),
        "call_q1_ms": quartiles[0] / 1e3,
        "call_ms": quartiles[1] / 1e3,
        "call_q3_ms": quartiles[2] / 1e3,
        "sum_ms": sum(kernel.end - kernel.start for kernel in mine) / 1e3,
        "exposed_ms": (length(everything) - length(others)) / 1e3 if sites else 0.0,
        "span_ms": span / 1e3,
        "idle_ms": (span - length(everything)) / 1e3,
        "others_ms": length(others) / 1e3,
        "others": _slowest(rest),
    }


def _slowest(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {}
    for kernel in kernels:
        times.setdefault(kernel.name, []).append(kernel.end - kernel.start)
    slowest = sorted(times.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    return [{"name": name[:NAME_LENGTH], "count": len(spent), "sum_ms": sum(spent) / 1e3} for name, spent in slowest]


def union(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """The times in which at least one of them runs, as intervals apart from each other."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((kernel.start, kernel.end) for kernel in kernels):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """Their lengths together."""
    return sum(end - start for start, end in intervals)
