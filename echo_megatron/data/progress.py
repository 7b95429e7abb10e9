"""The progress bars of a preparation, narrow enough for 80 columns."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class TokenColumn(ProgressColumn):
    """Documents, tokens and tokens a second, from the task's fields `documents`, `tokens` and `rate`."""

    def render(self, task: Task) -> Text:
        documents, tokens, rate = (task.fields[name] for name in ("documents", "tokens", "rate"))
        return Text(f"{documents:,} docs {tokens / 1e6:,.1f} M tokens {rate / 1e3:,.0f} k/s")


def token_progress(console: Console) -> Progress:
    """A bar over the bytes of the input."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        TextColumn("{task.percentage:>3.0f}%"),
        TokenColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
        console=console,
    )


def count_progress(console: Console) -> Progress:
    """A bar over a number of files."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)
