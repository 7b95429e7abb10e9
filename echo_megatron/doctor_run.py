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

from echo_megatron.bench.step_models import MODELS, ModelShape
from echo_megatron.config import MAX_WORLD_SIZE, Collective, Direction, EchoConfig
from echo_megatron.doctor_facts import ask
from echo_megatron.plan_calibration import calibrate
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import Ceilings, Gpu, Measured, gpu_of_name, results_folder
from echo_megatron.plan_model import Times, Work, predict, speedups

MIB = 1 << 20
LARGEST = 256 * MIB  # of a message that is timed; a larger one takes its time in proportion
GRACE_S = 15.0  # between the processes' end by us and by themselves
CPU_SIZES = (64 << 10, MIB)
GPU_SIZES = (MIB, 16 * MIB)  # beside the model's own message
ECHO_ROWS = {"echo4": "echo4_local", "echo8": "echo8_local"}
_PRESETS = {name: EchoConfig.preset(name) for name in ("nccl", *ECHO_ROWS)}


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
        `{"none": why}`, or milliseconds and speed-ups of `echo4` and `echo8`.

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
        calls = _measured_calls(run, message)
        if calls is None:
            return {"none": "the measurement has no time of NCCL and echo4 at this size; give it more: --seconds"}
        times = _MeasuredTimes(ceilings, calls, message >= run["min_bytes"])
    calibration, work = calibrate(measured), Work(_shape(hidden, layers, tokens), world_size)
    predicted = {name: predict(work, _PRESETS[name], times, calibration, step_ms) for name in _PRESETS}
    gain = {name: speedups(work, _PRESETS[name], times, calibration, step_ms)[0] for name in ECHO_ROWS}
    calls = {
        name: times.ms(config, Collective.all_reduce, message, Direction.forward) for name, config in _PRESETS.items()
    }
    has_step = gpu is not None or step_ms is not None  # otherwise nothing is known of what a step computes
    return {
        "world_size": world_size,
        "message_bytes": message,
        "calls_from": "measured here" if is_measured else f"plan for {gpu.name if gpu else gpu_name}",
        "call_ms": calls,
        "step_from": "--step-ms" if step_ms is not None else "plan, Qwen3-shaped model" if has_step else None,
        **{
            name: {
                "call_speedup": calls["nccl"] / calls[name],
                "saved_forward_ms": predicted["nccl"].forward_ms - predicted[name].forward_ms,
                **{key: value if has_step else None for key, value in gain[name].fields("step").items()},
            }
            for name in ECHO_ROWS
        },
    }


@dataclass(frozen=True)
class _MeasuredTimes:
    """`plan_model.Times` of what was measured here: all-reduces of one size."""

    ceilings: Ceilings
    calls: Mapping[str, float]
    long_enough: bool  # for Echo to quantize them

    def quantizes(self, config: EchoConfig, _collective: Collective, _num_bytes: int, _direction: Direction) -> bool:
        return config.quantizes and self.long_enough

    def ms(self, config: EchoConfig, _collective: Collective, _num_bytes: int, _direction: Direction) -> float:
        return self.calls[next(name for name, preset in _PRESETS.items() if preset.bits == config.bits)]


def _ceilings(measured: Measured, gpu: Gpu, run: Mapping[str, Any]) -> Ceilings:
    """The GPU's, with this machine's wire and HBM where they were measured."""
    ceilings, here = measured.ceilings_of(gpu), run.get("ceilings") or {}
    return replace(
        ceilings, wire=here.get("wire_gb_per_s") or ceilings.wire, hbm=here.get("hbm_gb_per_s") or ceilings.hbm
    )


def _measured_calls(run: Mapping[str, Any], message: int) -> dict[str, float] | None:
    size = min(message, LARGEST)
    rows = {row["row"]: row["ms"] for row in run["rows"] if row["bytes"] == size}
    if not {"nccl16", *ECHO_ROWS.values()} <= rows.keys():
        return None
    calls = {"nccl": rows["nccl16"]}
    for name, row in ECHO_ROWS.items():
        calls[name] = rows["nccl16"] if size < run["min_bytes"] else rows[row]
    return {name: ms * message / size for name, ms in calls.items()}


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
