"""Runs cases one after the other in one pair of processes and brings every case's results home, whatever fails.

Importing Transformer Engine and making NCCL's groups takes longer than a case. A case that raises on both ranks is
noted and the next one runs. One that raises on a single rank, or hangs, ends the processes; the rest run in new ones.
"""

from __future__ import annotations

import faulthandler
import json
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import te_models
import torch
import torch.distributed as dist
from ranks import run_ranks

AGREEMENT_S = 40  # a rank that failed waits so long for the other, which may be in the case still
CASE_S = 90  # a process that needs longer for a case says where it is and ends
ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's order of communication and weight gradients
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}


class Results:
    """What the ranks returned, by case."""

    def __init__(self) -> None:
        self.cases: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def of(self, name: str) -> list[dict[str, Any]]:
        """Results of both ranks.

        Raises:
            AssertionError: the case failed, hung or did not run.
        """
        assert name not in self.failures, f"case {name} failed:\n{self.failures[name]}"
        assert name in self.cases, f"case {name} did not run"
        return self.cases[name]

    def write(self, folder: Path) -> None:
        record = {"cases": self.cases, "failures": self.failures, "seconds": self.seconds}
        (folder / "megatron_te.json").write_text(json.dumps(record, indent=1))


def run_all(names: Sequence[str], budget_s: float, world_size: int = te_models.TP) -> Results:
    """Runs the cases on `world_size` GPUs within `budget_s` seconds."""
    results, rest, end = Results(), list(names), time.monotonic() + budget_s
    while rest and time.monotonic() < end:
        with tempfile.TemporaryDirectory() as name:
            folder, trouble = Path(name), ""
            try:
                seconds = max(end - time.monotonic(), 1.0)
                run_ranks(
                    run_cases, name, rest, te_models.GPU, world_size=world_size, env=ENVIRONMENT, timeout_s=seconds
                )
            except AssertionError as error:
                trouble = str(error)
            rest = _collect(folder, rest, world_size, trouble, results)
    for name in rest:
        results.failures.setdefault(name, f"did not run within {budget_s:g} s")
    return results


def _collect(folder: Path, names: list[str], world_size: int, trouble: str, results: Results) -> list[str]:
    """Reads what the ranks left and returns the cases that are still to run."""
    begun: set[str] = set()
    ended: list[dict[str, Any]] = []
    for rank in range(world_size):
        path = folder / f"cases{rank}"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        begun |= {entry["begins"] for entry in entries if "begins" in entry}
        ended.append({entry["case"]: entry for entry in entries if "case" in entry})
    for number, name in enumerate(names):
        if name not in begun and (begun or not trouble):
            return names[number:]  # the processes ended in good order after the failure of a case before
        own = [of_rank[name] for of_rank in ended if name in of_rank]
        errors = [f"rank {entry['rank']}:\n{entry['error']}" for entry in own if entry["error"]]
        if len(own) < world_size or errors:
            results.failures[name] = "\n".join(errors or [trouble])
        else:
            results.cases[name] = [entry["result"] for entry in own]
            results.seconds[name] = max(entry["seconds"] for entry in own)
        if name not in begun:
            results.failures.update(dict.fromkeys(names, trouble))
            return []  # no process came as far as its first case
    return []


def _ends_processes(name: str) -> bool:
    """Whether the failure of a case is the end of its process."""
    return name.startswith("graphs")


def run_cases(rank: int, world_size: int, folder: str, names: Sequence[str], setting: te_models.Setting) -> None:
    """One rank's part: appends a line of JSON for each case to `folder/cases{rank}`."""
    if setting.on_gpu:
        import transformer_engine.pytorch  # noqa: F401  # before Megatron looks for it
    import te_graph_cases  # noqa: F401  # adds its cases
    import te_sequence_cases  # noqa: F401
    from megatron.core import parallel_state
    from te_cases import CASES

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    agreement = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_S))
    with (Path(folder) / f"cases{rank}").open("a") as file:

        def note(**entry: Any) -> None:
            file.write(json.dumps(entry) + "\n")
            file.flush()

        for name in names:
            note(begins=name)
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            begin, result, error = time.monotonic(), None, ""
            try:
                result = CASES[name](setting)
                if setting.on_gpu:
                    torch.cuda.synchronize()
            except Exception:
                error = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            seconds = time.monotonic() - begin
            note(case=name, rank=rank, seconds=round(seconds, 2), result=result, error=error)
            outcomes: list[Any] = [None] * world_size
            dist.all_gather_object(outcomes, bool(error), group=agreement)
            if rank == 0:
                state = "failed" if any(outcomes) else "ok"
                print(f"{name:<28}{seconds:7.1f} s  {state}  {error.splitlines()[-1] if error else ''}", flush=True)
            if any(outcomes) and (not all(outcomes) or _ends_processes(name)):
                raise RuntimeError(f"case {name}: the ranks are apart, or CUDA is in an unknown state; see the case")
            result = None
            te_models.free()
