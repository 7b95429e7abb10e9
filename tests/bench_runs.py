"""Results of the bench, made up, and the bench in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from echo_megatron.bench import all_reduce, runs
from echo_megatron.bench.critical_path import MODELS
from echo_megatron.bench.rows import LARGE_SIZES, SMALL_SIZES, all_rows

ROOT = Path(__file__).resolve().parent.parent


def made_up_entries() -> list[dict[str, Any]]:
    """Entries of all rows at all sizes as a run notes them, NCCL's twice."""
    entries = []
    for row in [*all_rows(), all_rows()[0]]:
        for size in (*SMALL_SIZES, *LARGE_SIZES):
            if not row.times(size):
                continue
            ms = 0.02 + size / 1e9 / (1 if row.bits == 16 else 16 / row.bits)
            for model in MODELS if row.critical else (None,):
                entries.append(
                    {
                        "row": row.name,
                        "policy": row.policy,
                        "state_dtype": row.state_dtype,
                        "transport": None,
                        "algorithm": "two_shot" if row.config else None,
                        "bytes": size,
                        "ms": ms,
                        "call_ms": None,
                        "wire_fraction": 0.5,
                        "hbm_fraction": None if row.bits == 8 else 0.25,
                        "iterations": 80,
                        **({"matmuls": model} if model else {}),
                    }
                )
    return entries


def made_up_results() -> dict[str, Any]:
    entries = all_reduce.with_ratios(made_up_entries())
    return runs.of_one_run(one_run(entries))


def one_run(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11.0"},
        "commit": "abc",
        "command": "torchrun x",
        "date": "2026-01-01",
        "world_size": 2,
        "method": "Medians.",
        "ceilings": {"wire_gb_per_s": 390.0, "hbm_gb_per_s": 4188.0},
        "left_out": {"flashinfer_fp8": "not installed"},
        "rough_places": [],
        "rows": entries,
    }


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo_megatron.cli", "bench", *arguments]
    folders = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders, "ECHO_COMMIT": "abc"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
