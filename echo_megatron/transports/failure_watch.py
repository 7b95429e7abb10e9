"""Says what a kernel met where the host can't raise it: blocked in a wait for the GPU.

With a rank gone, the kernels of the p2p transport give up after `timeout_s`, and the next call raises. NCCL's kernels
behind them on the stream wait for the dead rank on and on, and a host that synchronizes in between (a gradient norm, a
loss) makes no next call until NCCL's own time-out, minutes later by default, ends the process and names no rank.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
GRACE_S = 1.0  # in which the host mostly raises it by itself
BLOCKED_S = 5.0  # after which it does not


class Watched(Protocol):
    """A transport whose calls fail on the device."""

    is_raised: bool

    def failure(self) -> str | None:
        """What failed, in words, without a synchronization; None: nothing so far."""


class FailureWatch:
    """One thread a process looks at every transport; a failure that nobody raises is logged, once.

    It keeps no transport alive, and ends with the last one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports: weakref.WeakKeyDictionary[Watched, _Seen] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._end: Callable[[str], None] | None = None

    def add(self, transport: Watched) -> None:
        """Looks at it from now on."""
        with self._lock:
            self._transports[transport] = _Seen()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echo-failure-watch", daemon=True)
                self._thread.start()

    def remove(self, transport: Watched) -> None:
        """Looks at it no longer: it makes no further call."""
        with self._lock:
            self._transports.pop(transport, None)

    def close(self) -> None:
        """Looks at none any longer; returns when the thread has ended."""
        with self._lock:
            self._transports.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    @contextmanager
    def ending(self, end: Callable[[str], None]) -> Iterator[None]:
        """Within it, `end(failure)` is called once a failure is `BLOCKED_S` old and nobody has raised it.

        Args:
            end: ends the process, from the watch's thread; the main thread hangs in a wait that nobody can end.
        """
        before, self._end = self._end, end
        try:
            yield
        finally:
            self._end = before

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._transports:
                    self._thread = None
                    return
                transports = list(self._transports.items())
            for transport, seen in transports:
                self._look(transport, seen)
            del transports, transport  # no reference while it sleeps
            time.sleep(PERIOD_S)

    def _look(self, transport: Watched, seen: _Seen) -> None:
        failure = transport.failure()
        if failure is None:
            return
        if transport.is_raised:
            self.remove(transport)
            return
        now = time.monotonic()
        seen.at = now if seen.at is None else seen.at
        if now - seen.at >= GRACE_S and not seen.is_told:
            logger.error("error: %s", failure)
            seen.is_told = True
        if now - seen.at >= BLOCKED_S:
            self.remove(transport)
            if self._end is not None:
                self._end(failure)


@dataclass
class _Seen:
    """Of a transport's failure: when it was found, and whether it was logged."""

    at: float | None = None
    is_told: bool = False


watch = FailureWatch()
