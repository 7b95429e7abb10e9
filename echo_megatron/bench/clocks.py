"""The GPU's clock and power while something is timed: at its power limit, calls that save time cost clock elsewhere."""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass
from types import TracebackType

import torch

INTERVAL_S = 0.01


@dataclass(frozen=True)
class Clock:
    """Of one timed stretch.

    Attributes:
        mhz: median clock of the multiprocessors.
        watts: mean power; the driver may average it over longer than the stretch.
    """

    mhz: float
    watts: float


class ClockSampler:
    """Samples a GPU's clock and power from a thread, through PyTorch's NVML functions.

    Args:
        device: whose; on a CPU nothing is sampled.

    Attributes:
        unknown: why nothing is sampled, e.g. that the package nvidia-ml-py is not installed; None where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[int, int]] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.unknown: str | None = None if device.type == "cuda" else "not a GPU"
        if self.unknown is None:
            try:
                self._sample()
            except Exception as error:  # NVML's own kinds are known only where it is installed
                self.unknown = f"{type(error).__name__}: {error}"

    def __enter__(self) -> ClockSampler:
        self._samples.clear()
        self._done.clear()
        if self.unknown is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def clock(self) -> Clock | None:
        """Of the last `with` block; None where nothing was sampled."""
        if not self._samples:
            return None
        mhz, milliwatts = zip(*self._samples, strict=True)
        return Clock(statistics.median(mhz), statistics.mean(milliwatts) / 1e3)

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            try:
                self._sample()
            except Exception as error:
                self.unknown = f"{type(error).__name__}: {error}"
                return

    def _sample(self) -> None:
        self._samples.append((torch.cuda.clock_rate(self._device), torch.cuda.power_draw(self._device)))
