"""The doctor's self-test and measurement, in processes that a limit of time ends; and what to expect of a model."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_megatron.bench.rows import MIB
from echo_megatron.bench.step_models import MODELS, ModelShape
from echo_megatron.config import MAX_WORLD_SIZE, Collective, Direction, EchoConfig
from echo_megatron.doctor_facts import ask
from echo_megatron.plan_calibration import calibrate
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import Ceilings, Gpu, Measured, gpu_of_name, results_folder
from echo_megatron.plan_model import Times, Work, predict, speedups

LARGEST = 256 * MIB  # of a message that is timed; a larger one takes its time in proportion
GRACE_S = 15.0  # between the processes' end by us and by themselves
CPU_SIZES = (64 << 10, MIB)
GPU_SIZES = (MIB, 16 * MIB)  # beside the model's own message
# Rows of the measurement, by collective and preset. Of sequence parallelism's reduce-scatters 8 bits are not timed.
ROWS = {
    Collective.all_reduce: {"nccl": "nccl16", "echo4": "echo4_local", "echo8": "echo8_local"},
    Collective.reduce_scatter: {"nccl": "nccl_reduce_scatter", "echo4": "echo4_reduce_scatter"},
    Collective.all_gather: {"nccl": "nccl_all_gather", "echo4": "echo8_all_gather"},
}
HALVES = (Collective.reduce_scatter, Collective.all_gather)
SEQUENCE_PARALLEL = "echo4 with sequence parallelism"
# What is expected of which preset, and whether with sequence parallelism.
SETTINGS = {"echo4": ("echo4", False), "echo8": ("echo8", False), SEQUENCE_PARALLEL: ("echo4", True)}
_PRESETS = {name: EchoConfig.preset(name) for name in ROWS[Collective.all_reduce]}


def message_bytes(hidden: int, tokens: int) -> int:
    """Of one site, BF16."""
    return 2 * hidden * tokens


def self_test(num_gpus: int, message: int, seconds: float, limit_s: float) -> dict[str, Any]:
    """Checks and times the collectives, one process a GPU, or two processes on the CPU.

    Args:
        num_gpus: that PyTorch can use; fewer than 2 means the CPU.
        message: bytes of the message that is asked about.
        seconds: of timing, about.
        limit_s: seconds after which the processes are stopped.

    Returns:
        What `doctor_ranks` found, or `{"error": …}`.
    """
    on_gpus = num_gpus > 1
    count = min(num_gpus, MAX_WORLD_SIZE) if on_gpus else 2
    sizes = sorted({*GPU_SIZES, min(message, LARGEST)}) if on_gpus else CPU_SIZES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += ["-m", "echo_megatron.doctor_ranks", "--out", str(path), "--seconds", f"{seconds:g}"]
        command += ["--limit-s", f"{limit_s + GRACE_S:g}"]
        command += ["--sizes", *map(str, sizes)]
        environment = {"OMP_NUM_THREADS": "1", **({} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""})}
        answer = ask(command, limit_s, environment)
        if answer.status is None:
            return {"error": f"{count} processes did not end within {limit_s:g} s and were stopped"}
        if answer.status or not path.is_file():
            return {"error": f"exit status {answer.status}: {_cause(answer.errors)}"}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def _cause(errors: str) -> str:
    """The first error that a rank printed; torchrun's own report comes after it."""
    named = re.findall(r"^(?:\[rank\d+\]:)?\s*([\w.]*Error: .*)", errors, re.MULTILINE)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in named if "ChildFailedError" not in line), lines[-1] if lines else "no message")


def expectation(
    run: Mapping[str, Any],
    gpu_name: str | None,
    hidden: int,
    layers: int,
    tokens: int,
    world_size: int,
    step_ms: float | None,
) -> dict[str, Any]:
    """What a model's step and prefill gain by the preset echo4 and echo8.

    Times of a call are this machine's where it measured that P, otherwise the plan's for this kind of GPU. What a step
    computes is the plan's for a Qwen3-shaped model, unless a measured 16-bit step is given; on an unknown GPU that step
    is divided as on the H200. How much of a call a step feels is the plan's, and the H200's, everywhere.

    Returns:
        `{"none": why}`, or milliseconds and speed-ups of `SETTINGS`; of one that nothing is known of, `{"none": why}`.
        `calls_ms` are of an all-reduce, with sequence parallelism of a reduce-scatter and an all-gather.

    Raises:
        ValueError: the measured step is shorter than its all-reduces.
    """
    gpu = gpu_of_name(gpu_name) if gpu_name else None
    message = message_bytes(hidden, tokens)
    is_measured = run.get("device") == "cuda" and run["world_size"] == world_size
    if not is_measured and gpu is None:
        where = gpu_name or "no GPU here"
        return {"none": f"{where}: nothing was measured at P = {world_size}; echo-megatron plan predicts known GPUs"}
    measured = Measured(results_folder())
    ceilings = measured.ceilings if gpu is None else _ceilings(measured, gpu, run)
    times: Times = CallTimes(measured, ceilings, world_size)
    if is_measured:
        times = _MeasuredTimes(ceilings, _measured_calls(run, message), message >= run["min_bytes"])
    calibration, has_step = calibrate(measured), gpu is not None or step_ms is not None  # of a step, all or nothing
    found: dict[str, Any] = {}
    for name, (preset, shares) in SETTINGS.items():
        collectives = HALVES if shares else (Collective.all_reduce,)
        if is_measured and any(preset not in _measured_calls(run, message)[one] for one in collectives):
            found[name] = {"none": f"no time of NCCL and {preset} at this size; give it more: --seconds"}
            continue
        work = Work(_shape(hidden, layers, tokens), world_size, sequence_parallel=shares)
        nccl, ours = (predict(work, _PRESETS[one], times, calibration, step_ms) for one in ("nccl", preset))
        gain = speedups(work, _PRESETS[preset], times, calibration, step_ms)[0]
        calls = {
            one: sum(times.ms(_PRESETS[one], half, message, Direction.forward) for half in collectives)
            for one in ("nccl", preset)
        }
        found[name] = {
            "calls_ms": calls[preset],
            "nccl_calls_ms": calls["nccl"],
            "call_speedup": calls["nccl"] / calls[preset],
            "saved_forward_ms": nccl.forward_ms - ours.forward_ms,
            **{key: value if has_step else None for key, value in gain.fields("step").items()},
        }
    if all("none" in one for one in found.values()):
        return found["echo4"]
    return {
        "world_size": world_size,
        "message_bytes": message,
        "calls_from": "measured here" if is_measured else f"plan for {gpu.name if gpu else gpu_name}",
        "step_from": "--step-ms" if step_ms is not None else "plan, Qwen3-shaped model" if has_step else None,
        **found,
    }


@dataclass(frozen=True)
class _MeasuredTimes:
    """`plan_model.Times` of what was measured here: messages of one size."""

    ceilings: Ceilings
    calls: Mapping[Collective, Mapping[str, float]]
    long_enough: bool  # for Echo to quantize them

    def quantizes(self, config: EchoConfig, _collective: Collective, _num_bytes: int, _direction: Direction) -> bool:
        return config.quantizes and self.long_enough

    def ms(self, config: EchoConfig, collective: Collective, _num_bytes: int, _direction: Direction) -> float:
        return self.calls[collective][next(name for name, preset in _PRESETS.items() if preset.bits == config.bits)]


def _ceilings(measured: Measured, gpu: Gpu, run: Mapping[str, Any]) -> Ceilings:
    """The GPU's, with this machine's wire and HBM where they were measured."""
    ceilings, here = measured.ceilings_of(gpu), run.get("ceilings") or {}
    return replace(
        ceilings, wire=here.get("wire_gb_per_s") or ceilings.wire, hbm=here.get("hbm_gb_per_s") or ceilings.hbm
    )


def _measured_calls(run: Mapping[str, Any], message: int) -> dict[Collective, dict[str, float]]:
    """Milliseconds of a message by collective and preset; of a collective that lacks NCCL's time, none."""
    size = min(message, LARGEST)
    times = {row["row"]: row["ms"] * message / size for row in run["rows"] if row["bytes"] == size}
    calls: dict[Collective, dict[str, float]] = {}
    for collective, rows in ROWS.items():
        found = {name: times[row] for name, row in rows.items() if row in times}
        if size < run["min_bytes"] and "nccl" in found:
            found = dict.fromkeys(found, found["nccl"])
        calls[collective] = found if "nccl" in found else {}
    return calls


def _shape(hidden: int, layers: int, tokens: int) -> ModelShape:
    """Qwen3-0.6B's proportions at another size."""
    base = MODELS["qwen3_0p6b"]
    batch = max(1, tokens // base.sequence)
    values = {
        **vars(base),
        "num_layers": layers,
        "hidden": hidden,
        "ffn": hidden * base.ffn // base.hidden,
        "heads": max(1, hidden * base.heads // base.hidden),
        "groups": max(1, hidden * base.groups // base.hidden),
        "batch": batch,
        "sequence": tokens // batch,
    }
    return ModelShape(**values)
