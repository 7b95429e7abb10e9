"""Background load: a process of its own for every rank that copies from the rank's GPU to the next one's.

Its own process, so that it neither holds the training process's interpreter nor waits for it. Copies between GPUs run
on copy engines, beside kernels of other processes. The duty cycle is of time: copies are under way for that share of
every period, whatever they carry meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from ctypes import c_double, c_int
from dataclasses import dataclass
from typing import Any

import torch

from echo_megatron.bench.step_timing import Ranks

PERIOD_S = 0.01
IDLE_S = 0.002  # how often an idle copier looks for work
SETTLE_S = 0.3  # after a change of the duty cycle
CHUNK_BYTES = {"cuda": 128 << 20, "cpu": 1 << 20}
START_S = 120.0
IN_FLIGHT = 2


@dataclass(frozen=True)
class Copied:
    """What a copier did between two looks.

    Attributes:
        gb_per_s: 1e9 bytes copied a second, pauses included.
        busy: share of the time in which copies were under way.
    """

    gb_per_s: float
    busy: float


class Load:
    """This rank's copier.

    Args:
        source: device that is copied from, this rank's.
        target: device that is copied to; on a CPU copies stay within its memory, which only tries the script out.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._duty: Any = context.Value(c_double, 0.0, lock=False)
        self._num_bytes: Any = context.Value(c_double, 0.0, lock=False)
        self._busy_s: Any = context.Value(c_double, 0.0, lock=False)
        self._state: Any = context.Value(c_int, 0, lock=False)  # 1: ready, -1: to end
        shared = (self._duty, self._num_bytes, self._busy_s, self._state)
        arguments = (str(source), str(target), os.getpid(), shared)
        self._process = context.Process(target=_copy_until_told, args=arguments, daemon=True)
        self._process.start()

    def wait_until_ready(self) -> None:
        """Waits for the process to have its buffers.

        Raises:
            RuntimeError: it has ended, or is not ready within two minutes.
        """
        end = time.monotonic() + START_S
        while self._process.is_alive() and not self._state.value and time.monotonic() < end:
            time.sleep(0.02)
        if not self._process.is_alive() or not self._state.value:
            raise RuntimeError(f"the copying process does not run (exit status {self._process.exitcode})")

    def set_duty(self, duty: float) -> None:
        """Copies for `duty`, 0 to 1, of the time from now on; returns when that is so."""
        self._duty.value = duty
        time.sleep(SETTLE_S if duty else 5 * PERIOD_S)

    def look(self) -> tuple[float, float, float]:
        """Time, bytes copied and seconds busy so far; two of them make a `Copied`."""
        return time.perf_counter(), self._num_bytes.value, self._busy_s.value

    def since(self, start: tuple[float, float, float]) -> Copied:
        """What was copied since `start`."""
        seconds, num_bytes, busy_s = (now - then for now, then in zip(self.look(), start, strict=True))
        return Copied(num_bytes / seconds / 1e9, busy_s / seconds)

    def close(self) -> None:
        """Ends the process."""
        self._state.value = -1
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Loaded:
    """The copies at a load within a `with`; nothing where there is no copier.

    Args:
        load: this rank's copier.
        percent: duty cycle.
        ranks: they begin together.

    Raises:
        RuntimeError: on entering, on all ranks: the copier of some rank has ended or did not start.
    """

    def __init__(self, load: Load | None, percent: int, ranks: Ranks) -> None:
        self._load, self._percent, self._ranks = load, percent, ranks

    def __enter__(self) -> None:
        if self._load is None or not self._percent:
            return
        error = None
        try:
            self._load.wait_until_ready()
            self._load.set_duty(self._percent / 100)
        except RuntimeError as caught:
            error = str(caught)
        if self._ranks.any(error is not None):
            self._load.set_duty(0.0)
            raise RuntimeError(error or "the copying process of another rank did not start")

    def __exit__(self, *error: object) -> None:
        if self._load is not None and self._percent:
            self._load.set_duty(0.0)


class _Copies:
    """Enqueues chunks one after the other; at most IN_FLIGHT of them are outstanding."""

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self.num_bytes = CHUNK_BYTES[source.type]
        self._source = torch.zeros(self.num_bytes, dtype=torch.uint8, device=source)
        self._target = torch.zeros(self.num_bytes, dtype=torch.uint8, device=target)
        self._on_gpu = source.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        if self._on_gpu:
            for device in (source, target):
                torch.cuda.set_stream(torch.cuda.Stream(device))
            torch.cuda.set_device(source)
            self._target.copy_(self._source)
            torch.cuda.synchronize(source)

    def next(self) -> None:
        """One more chunk; waits until fewer than IN_FLIGHT are outstanding."""
        self._target.copy_(self._source, non_blocking=True)
        if self._on_gpu:
            self._events.append(torch.cuda.current_stream(self._source.device).record_event())
            if len(self._events) >= IN_FLIGHT:
                self._events.pop(0).synchronize()

    def drain(self) -> None:
        while self._events:
            self._events.pop(0).synchronize()


def _copy_until_told(source: str, target: str, parent: int, shared: tuple[Any, Any, Any, Any]) -> None:
    duty, num_bytes, busy_s, state = shared
    torch.set_num_threads(1)
    copies = _Copies(torch.device(source), torch.device(target))
    state.value = 1
    while state.value > 0 and os.getppid() == parent:
        share = duty.value
        if share <= 0:
            copies.drain()
            time.sleep(IDLE_S)
            continue
        start, busy, before = time.perf_counter(), 0.0, busy_s.value
        while busy < share * PERIOD_S:
            copies.next()
            num_bytes.value += copies.num_bytes
            busy = time.perf_counter() - start
            busy_s.value = before + busy
        if share < 1:
            copies.drain()
            busy = time.perf_counter() - start
            busy_s.value = before + busy
            time.sleep(busy * (1 - share) / share)  # draining took its time, too: the share of busy time stays
    copies.drain()
