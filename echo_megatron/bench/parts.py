"""A bench in parts, on all ranks of a run: deadlines, results written after each part, copies, memory given back."""

from __future__ import annotations

import argparse
import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from echo_megatron.bench.step_load import Copied, Load
from echo_megatron.bench.step_timing import Ranks, Shares
from echo_megatron.result_files import made_by, write_results

UNRECORDED = ("render",)  # options that say nothing about the results
FAILURES = (RuntimeError, ValueError, AssertionError)


class PartedBench(ABC):
    """One rank of a run.

    A part that fails is named in `left_out`, and the next one runs; a rank that waits in vain ends, by NCCL's time-out.

    Args:
        options: of the command line; `out`, `name` and `budget_s` among them.
        device: this rank's.
        ranks: their agreements.
        load: this rank's copier; None where no load above 0 is asked for.
        shares: of the run's time.
    """

    script: str  # its path in the repository

    def __init__(
        self, options: argparse.Namespace, device: torch.device, ranks: Ranks, load: Load | None, shares: Shares
    ) -> None:
        self.options, self.device, self.ranks, self.load, self.shares = options, device, ranks, load, shares
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.left_out: dict[str, str] = {}

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """The content of the JSON."""

    @abstractmethod
    def markdown(self, results: Mapping[str, Any]) -> str:
        """The page beside it."""

    def made(self) -> dict[str, Any]:
        """Machine, versions, commit, command, date and number of ranks of the results."""
        options = {name: value for name, value in vars(self.options).items() if name not in UNRECORDED}
        packages = ("torch", "megatron-core", "transformer-engine", "triton")
        made = made_by(self.script, options, self.device, *packages)
        made["command"] = made["command"].replace("python", f"torchrun --nproc-per-node {self.world_size}", 1)
        return {**made, "date": datetime.now(UTC).date().isoformat(), "world_size": self.world_size}

    def guarded(self, part: str, run: Callable[[float], str | None]) -> bool:
        """Runs a part with its deadline and writes what there is; returns whether it did not fail on any rank."""
        start, deadline = time.monotonic(), self.shares.next_deadline()
        error, words = None, None
        if deadline is None:
            self.left_out[part] = f"--budget-s {self.options.budget_s:g}"
        else:
            try:
                words = run(deadline)
            except FAILURES as caught:
                error = f"{type(caught).__name__}: {caught}"
        if failed := self.ranks.any(error is not None):
            self.left_out[part] = error or "failed on another rank"
        if self.rank == 0:
            now = time.monotonic()
            said = self.left_out.get(part) or words
            print(f"{self.shares.elapsed_here(now):6.1f} s  {part}: {said}  ({now - start:.1f} s)", flush=True)
            if self.options.out:
                results = self.results()
                write_results(self.options.out, self.options.name, results, self.markdown(results))
        return not failed

    def look(self) -> tuple[float, float, float]:
        """See `Load.look`."""
        return (time.perf_counter(), 0.0, 0.0) if self.load is None else self.load.look()

    def copied(self, before: tuple[float, float, float]) -> Copied:
        """What this rank's copier did since."""
        return Copied(0.0, 0.0) if self.load is None else self.load.since(before)

    def mean(self, value: float) -> float:
        """Of the ranks' values."""
        return self.ranks.sum(value) / self.world_size

    def free(self, model: nn.Module | None = None) -> None:
        """Drops gradients and gives cached memory back."""
        if model is not None:
            model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
