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
from collections.abc import Iterator
from typing import Protocol

logger = logging.getLogger(__name__)

PERIOD_S = 0.25
GRACE_S = 1.0  # in which the host mostly raises it by itself


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
        self._transports: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, transport: Watched) -> None:
        """Looks at it from now on."""
        with self._lock:
            self._transports.add(transport)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echo-failure-watch", daemon=True)
                self._thread.start()

    def remove(self, transport: Watched) -> None:
        """Looks at it no longer: it makes no further call."""
        with self._lock:
            self._transports.discard(transport)

    def close(self) -> None:
        """Looks at none any longer; returns when the thread has ended."""
        with self._lock:
            self._transports.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        seen: weakref.WeakKeyDictionary[Watched, float] = weakref.WeakKeyDictionary()
        while True:
            with self._lock:
                if not self._transports:
                    self._thread = None
                    return
                transports = list(self._transports)
            for transport in self._to_tell(transports, seen):
                logger.error("error: %s", transport.failure())
                self.remove(transport)
            del transports
            time.sleep(PERIOD_S)

    def _to_tell(self, transports: list[Watched], seen: weakref.WeakKeyDictionary[Watched, float]) -> Iterator[Watched]:
        now = time.monotonic()
        for transport in transports:
            if transport.is_raised:
                self.remove(transport)
            elif transport.failure() is not None and now - seen.setdefault(transport, now) >= GRACE_S:
                yield transport


watch = FailureWatch()
