"""Commands with a limit of time: their output is passed on as it comes, and nothing that they started outlives them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_S = 6.0  # from SIGTERM, by which torchrun ends its ranks, to SIGKILL
TAIL = 2000  # lines that are kept
ERROR = re.compile(r"(\[rank\d+\]: ?)?(error:|([\w.]+\.)?\w*(Error|Exception|Unavailable)\b)")


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status; None where it was stopped at its limit.
        seconds: that it took.
        lines: the last `TAIL` lines that it printed.
    """

    status: int | None
    seconds: float
    lines: list[str]

    def last_line(self) -> str:
        """The last line that names an error, torchrun's own about its ranks left out; else the last line."""
        said = [line.strip() for line in self.lines if line.strip()]
        errors = [line for line in said if ERROR.match(line) and "ChildFailedError" not in line]
        return (errors or said or ["no message"])[-1]


def run_bounded(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], prefix: str, folder: Path
) -> Ended:
    """Runs a command for at most `limit_s` seconds, and `STOP_S` more until all of it has ended.

    Args:
        command: program and arguments.
        limit_s: seconds.
        environment: the whole of its environment.
        prefix: stands before each of its lines where they are passed on.
        folder: that it runs in.
    """
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=dict(environment), cwd=folder, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Ended(127, 0.0, [f"{command[0]}: {error}"])
    lines: deque[str] = deque(maxlen=TAIL)
    reader = threading.Thread(target=_pass_on, args=(process, lines, prefix), daemon=True)
    reader.start()
    status: int | None = None
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _stop(process)
    reader.join(1.0)  # a process that the driver holds keeps the pipe open
    return Ended(status, time.monotonic() - start, list(lines))


def _pass_on(process: subprocess.Popen[str], lines: deque[str], prefix: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        sys.stdout.write(f"{prefix}{line}")
        sys.stdout.flush()


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends what still runs. torchrun's ranks are sessions of their own, so all descendants are looked up first."""
    if process.poll() is not None:
        return
    started = [process.pid, *_descendants(process.pid)]
    _signal([process.pid], signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    _signal(started, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # held by the driver: left behind rather than waited for
        process.wait(1.0)


def _signal(pids: Sequence[int], kind: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, kind)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and those that these did; from /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent …; the name may hold spaces and brackets
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found, rest = [], [pid]
    while rest:
        new = children.get(rest.pop(), [])
        found += new
        rest += new
    return found
