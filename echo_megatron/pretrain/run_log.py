"""What a run writes while it trains: metrics.jsonl, TensorBoard, log.txt; a progress bar or lines. On rank 0 only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from echo_megatron.run_folder import RunFolder


@dataclass
class StepResult:
    """One training step.

    Attributes:
        step: from 1.
        loss: cross-entropy averaged over the step's tokens, nats.
        lr: learning rate of the update.
        grad_norm: before clipping; NaN where the update was skipped.
        tokens: of the run so far.
        seconds: wall clock of the step.
        tp_bytes: bytes that rank 0 sent for tensor parallelism; None without tensor parallelism.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    tp_bytes: int | None


class RunLog:
    """Use as a context manager.

    Args:
        folder: the run folder; records after `first_step` - 1 have been dropped.
        first_step: the first step that will be logged.
        max_steps: steps of the whole run.
        tokens_per_step: tokens of one step.
        log_interval: steps between lines in log.txt and, where the output is not a terminal, on it.
    """

    def __init__(self, folder: RunFolder, first_step: int, max_steps: int, tokens_per_step: int, log_interval: int):
        self._folder = folder
        self._max_steps = max_steps
        self._tokens_per_step = tokens_per_step
        self._log_interval = log_interval
        self._console = Console()
        self._start = time.monotonic()
        self._num_logged = 0
        self._log_file = (Path(folder.path) / "log.txt").open("a", buffering=1)
        path = Path(folder.path) / "tensorboard"
        self._tensorboard = SummaryWriter(str(path), purge_step=first_step if first_step > 1 else None)
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
            )
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._task = self._progress.add_task("step", total=max_steps, completed=first_step - 1, status="")

    def __enter__(self) -> RunLog:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._tensorboard.close()
        self._log_file.close()
        self._folder.close()

    def say(self, text: str) -> None:
        """Print a line, which does not tear the progress bar, and write it to log.txt."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._write(text)

    def _write(self, text: str) -> None:
        self._log_file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")

    def step(self, result: StepResult) -> None:
        """Record one training step."""
        self._folder.append({"kind": "train", **vars(result)})
        rate = self._tokens_per_step / result.seconds
        scalars = {
            "lm loss": result.loss,
            "learning-rate": result.lr,
            "grad-norm": result.grad_norm,
            "tokens-per-second": rate,
        }
        if result.tp_bytes is not None:
            scalars["tp-bytes"] = result.tp_bytes
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, result.step)
        self._num_logged += 1
        status = f"loss {result.loss:.4f}  {rate:,.0f} tokens/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=result.step, status=status)
        if result.step % self._log_interval == 0 or result.step == self._max_steps:
            remaining = (time.monotonic() - self._start) / self._num_logged * (self._max_steps - result.step)
            show = self.say if self._progress is None else self._write
            show(
                f"step {result.step}/{self._max_steps}  {status}  lr {result.lr:.3e}  "
                f"grad norm {result.grad_norm:.3f}  remaining {_duration(remaining)}"
            )

    def inspection(self, step: int, metrics: dict[str, float]) -> None:
        """Record what `diagnostics.Inspector` measured; TensorBoard only."""
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def validation(self, step: int, loss: float) -> None:
        """Record one validation loss."""
        self._folder.append({"kind": "validation", "step": step, "loss": loss})
        self._tensorboard.add_scalar("lm loss validation", loss, step)
        self.say(f"step {step}/{self._max_steps}  validation loss {loss:.4f}")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def tokens_per_second(records: list[dict[str, Any]], tokens_per_step: int) -> float | None:
    """Median over the steps, which warm-up and checkpoints do not move; None before the first step."""
    seconds = sorted(record["seconds"] for record in records)
    return tokens_per_step / seconds[len(seconds) // 2] if seconds else None
