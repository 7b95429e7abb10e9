"""The progress bars of an evaluation: settings done, and tokens, tokens/s and running perplexity of the present one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich import progress as rich_progress
from rich.console import Console

from echo_megatron.evaluate.perplexity import Measurement
from echo_megatron.evaluate.tables import perplexity_of


class Progress:
    """Bars on a terminal, a line for each setting that is done; nothing where `is_shown` is False.

    Args:
        is_shown: on the rank that prints.
        num_rows: measurements in all.
        num_done: of them, those that are there already.
    """

    def __init__(self, is_shown: bool, num_rows: int, num_done: int) -> None:
        self._is_shown = is_shown
        self._console = Console(stderr=True)
        self._bars = rich_progress.Progress(
            rich_progress.TextColumn("{task.description}"),
            rich_progress.BarColumn(bar_width=16),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[text]}"),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("left"),
            rich_progress.TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not is_shown or not self._console.is_terminal,
        )
        self._all = self._bars.add_task("settings", total=num_rows, completed=num_done, text="")
        self._row: rich_progress.TaskID | None = None
        self._start = 0.0
        if num_done:
            self.say(f"{num_done} of {num_rows} settings are there and kept")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """A line above the bars."""
        if self._is_shown:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, title: str, num_tokens: int) -> None:
        """A setting starts."""
        self._row = self._bars.add_task(title, total=num_tokens, text="")
        self._start = time.monotonic()

    def update(self, so_far: Measurement) -> None:
        """A pass is done."""
        assert self._row is not None
        count = sum(so_far.window_tokens)
        rate = count / max(time.monotonic() - self._start, 1e-9)
        self._bars.update(self._row, completed=count, text=f"{rate:,.0f} tok/s, perplexity {so_far.perplexity:.3f}")

    def end(self, row: dict[str, Any]) -> None:
        """A setting is done."""
        assert self._row is not None
        self._bars.remove_task(self._row)
        self._bars.advance(self._all)
        delta = "" if row["delta_percent"] is None else f" ({row['delta_percent']:+.2f} %)"
        self.say(
            f"{row['setting']} P={row['P']} {row['ranks']}: perplexity {perplexity_of(row)}{delta}, bytes "
            f"{row['bytes_relative']:.3f}, {row['tokens'] / max(row['seconds'], 0.05):,.0f} tok/s"
        )
