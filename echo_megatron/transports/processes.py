"""A process as others on its host know it: whether it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = ("Z", "X")  # a zombie has ended; its parent has not asked how


@dataclass(frozen=True)
class Process:
    """A process of some host.

    Attributes:
        namespace: the booted kernel and the PID namespace: processes that share it know each other by their numbers.
            Empty where the system does not tell (it is not Linux).
        pid: its number.
        start: clock ticks from the boot to its start: numbers are given anew.
    """

    namespace: str
    pid: int
    start: int

    @classmethod
    def this(cls) -> Process:
        """The calling process."""
        try:
            namespace = f"{_BOOT_ID.read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
            return cls(namespace, os.getpid(), _state_and_start(os.getpid())[1])
        except (OSError, IndexError, ValueError):
            return cls("", os.getpid(), 0)

    def is_neighbour_of(self, other: Process) -> bool:
        """Whether the two see each other's numbers."""
        return self.namespace == other.namespace != ""

    def has_ended(self) -> bool:
        """Whether it has ended; asked by a neighbour."""
        try:
            os.kill(self.pid, 0)
            state, start = _state_and_start(self.pid)
        except (ProcessLookupError, FileNotFoundError):
            return True
        except (OSError, IndexError, ValueError):  # another user's: it is there, and no more is known
            return False
        return state in _ENDED or start != self.start


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/PID/stat (proc(5)), counted from behind the name, which may hold anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
