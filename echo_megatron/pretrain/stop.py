"""Stopping a run between two steps: on SIGTERM or SIGINT, by a file STOP in its folder, or when its launcher ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

STOP_FILE = "STOP"


class StopRequest:
    """Notes that the run is to stop; the loop asks after each step, saves a checkpoint and leaves.

    Args:
        run_dir: the run folder, where a file named STOP asks for a stop as well.
        launcher_pid: process that started this one's torchrun, or None; when it is gone, the run stops.
    """

    def __init__(self, run_dir: Path, launcher_pid: int | None):
        self._file = run_dir / STOP_FILE
        self._launcher_pid = launcher_pid
        self._parent_pid = os.getppid()
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def reason(self) -> str | None:
        """Why the run is to stop, or None."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._file.exists():
            return f"file {self._file}"
        if self._launcher_pid is not None and not _is_alive(self._launcher_pid):
            return "the launcher is gone"
        if os.getppid() != self._parent_pid:
            return "torchrun is gone"
        return None

    def clear(self) -> None:
        """Remove the file, so that the next start goes on."""
        self._file.unlink(missing_ok=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
