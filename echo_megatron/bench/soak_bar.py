"""The soak's progress."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """Minutes, calls and mismatches so far: a bar on a terminal, else a line a minute; of rank 0 alone."""

    def __init__(self, minutes: float, is_shown: bool) -> None:
        self._start, self._next_line, self._is_shown = time.monotonic(), 60.0, is_shown
        console = Console(stderr=True)
        columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not is_shown or not console.is_terminal)
        self._task = self._bar.add_task("soak", total=60 * minutes, text="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, num_calls: int, num_mismatches: int) -> None:
        """So many are done and found by now."""
        seconds = time.monotonic() - self._start
        text = f"{num_calls:,} calls, {num_mismatches} mismatches"
        self._bar.update(self._task, completed=seconds, text=text)
        if self._is_shown and self._bar.disable and seconds >= self._next_line:
            print(f"{seconds / 60:.0f} min: {text}", file=sys.stderr, flush=True)
            self._next_line += 60.0
