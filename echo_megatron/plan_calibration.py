"""Fits `plan_model` to the steps and prefills that two H200 took.

Every share but two is of times alone: NCCL's, Echo's and skipped calls', without load. Echo's exposed share is the
profile's; how far a clock can rise is by the clocks that were sampled. All models share one calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import numpy as np

from echo_megatron.bench.step_models import MODELS as BENCH_MODELS
from echo_megatron.bench.step_models import ModelShape
from echo_megatron.config import Direction, EchoConfig, StateDtype
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import Measured
from echo_megatron.plan_model import Calibration, Work, calls_ms, compute_terms, weight_gradient_ms

IDLE = 0.05  # a forward pass whose GPU idles longer than this share waits for its host
NCCL = EchoConfig(bits=16)
REMEDY = "measure them anew"


def calibrate(measured: Measured, without: str | None = None) -> Calibration:
    """Fits the model to the measured steps.

    Args:
        measured: results of two H200.
        without: a model whose rows are left out, to be predicted from the others.

    Raises:
        ValueError: they lack 16 bits, Echo, the bound, a profile or clocks at load 0.
    """
    rows = _Rows(measured, without)
    matmul_share, memory_share = _compute_shares(measured, rows)
    models = tuple(model for model in rows.models if _gpu_bounds(measured, model))
    if not models:
        raise ValueError(
            "step results: expected a profile of a model whose forward pass the GPU bounds, got none; measure a larger "
            "batch"
        )
    times = CallTimes(measured, measured.ceilings, measured.step["world_size"])
    exposed_echo = _exposed_echo(measured, models)
    returned, covering, waiting = [], [], []
    for model in models:
        work = measured_work(measured, model)
        matmul = weight_gradient_ms(work, measured.ceilings) / matmul_share
        nccl = calls_ms(work, NCCL, times, Direction.forward)  # as long as the backward's
        call = nccl / (2 * work.shape.num_layers)
        for setting in rows.echo(model):
            echo = calls_ms(work, config_of(measured, setting), times, Direction.forward)
            saved = rows.saved(model, setting, "forward_ms")
            saved_backward = rows.saved(model, setting, "step_ms") - saved
            returned.append(1 - (saved + echo) / nccl)
            added = (saved_backward + exposed_echo * echo) / nccl
            covering.append(added * matmul / call)
    for model in models:
        bound = rows.value(model, "skipped", "forward_ms")
        nccl = calls_ms(measured_work(measured, model), NCCL, times, Direction.forward)
        waiting.append((rows.saved(model, "skipped", "forward_ms") - (1 - fmean(returned)) * nccl) / bound)
    if min(matmul_share, memory_share, fmean(covering)) <= 0 or not 0 <= fmean(returned) < 1:
        raise ValueError(
            "step results: expected times that grow with operations, bytes and calls; got matmuls at "
            f"{matmul_share:.3g} of the peak, the rest at {memory_share:.3g} of HBM, {fmean(returned):.3g} of "
            f"forward calls returned, covering {fmean(covering):.3g}; measure a larger batch, and more rounds"
        )
    return Calibration(
        matmul_share=matmul_share,
        memory_share=memory_share,
        waiting=max(fmean(waiting), 0.0),
        returned=fmean(returned),
        clock_room=_clock_room(measured, rows),
        covering=fmean(covering),
        exposed_echo=exposed_echo,
        returned_range=_range(returned),
        covering_range=_range(covering),
        models=models,
    )


def measured_work(measured: Measured, model: str) -> Work:
    """The work of a model of the step results.

    Raises:
        ValueError: the model is unknown.
    """
    if model not in BENCH_MODELS:
        raise ValueError(f"step results: expected a model of {', '.join(BENCH_MODELS)}, got {model}")
    done = measured.step["models"][model]
    values = {**vars(BENCH_MODELS[model]), "num_layers": done["layers"]}
    shape = ModelShape(**{**values, "batch": done["batch"], "sequence": done["sequence"]})
    return Work(shape, measured.step["world_size"])


def config_of(measured: Measured, setting: str) -> EchoConfig:
    """The options of a setting, from what the results say of it."""
    if setting == "nccl16":
        return NCCL
    said = measured.step["echo"][setting]
    state = StateDtype.bf16 if "bf16 state" in said else StateDtype.compact
    return EchoConfig(bits=8 if "8-bit" in said else 4, state_dtype=state)


class _Rows:
    """Rows without load, by model and setting."""

    def __init__(self, measured: Measured, without: str | None) -> None:
        self._rows: dict[tuple[str, str], Mapping[str, Any]] = {
            (row["model"], row["setting"]): row
            for row in measured.step["rows"]
            if row["load"] == 0 and row["model"] != without
        }
        self.models = tuple(dict.fromkeys(model for model, _ in self._rows))
        if not self.models:
            raise ValueError(f"step results: expected rows at load 0, got none; {REMEDY}")

    def value(self, model: str, setting: str, name: str) -> float:
        return float(self.row(model, setting)[name])

    def row(self, model: str, setting: str) -> Mapping[str, Any]:
        if (model, setting) not in self._rows:
            raise ValueError(
                f"step results: expected rows of the setting {setting} at load 0, got none of {model}; {REMEDY}"
            )
        return self._rows[model, setting]

    def saved(self, model: str, setting: str, name: str) -> float:
        return self.value(model, "nccl16", name) - self.value(model, setting, name)

    def echo(self, model: str) -> list[str]:
        """The settings of Echo that were measured."""
        found = [setting for name, setting in self._rows if name == model and setting.startswith("echo")]
        if not found:
            raise ValueError(f"step results: expected rows of Echo's settings at load 0, got none of {model}; {REMEDY}")
        return found


def _compute_shares(measured: Measured, rows: _Rows) -> tuple[float, float]:
    """Of the peak and of HBM: what steps and prefills whose calls were skipped reached."""
    terms, found = [], []
    for model in rows.models:
        for trains, name in ((True, "step_ms"), (False, "forward_ms")):
            terms.append(compute_terms(measured_work(measured, model), measured.ceilings, trains))
            found.append(rows.value(model, "skipped", name))
    # Relative errors, so that a long step does not count for more.
    shares, *_ = np.linalg.lstsq(np.array(terms) / np.array(found)[:, None], np.ones(len(found)), rcond=None)
    return 1 / float(shares[0]), 1 / float(shares[1])


def _gpu_bounds(measured: Measured, model: str) -> bool:
    """Whether a profiled forward pass with NCCL keeps the GPU busy."""
    return any(
        row["idle_ms"] < IDLE * row["span_ms"]
        for row in measured.step["profiles"]
        if (row["model"], row["setting"], row["direction"]) == (model, "nccl16", "forward")
    )


def _exposed_echo(measured: Measured, models: tuple[str, ...]) -> float:
    shares = [
        row["exposed_ms"] / row["sum_ms"]
        for row in measured.step["profiles"]
        if row["model"] in models and row["setting"].startswith("echo") and row["direction"] == "backward"
    ]
    if not shares:
        raise ValueError(f"step results: expected a profile of Echo's backward pass, got none; {REMEDY}")
    return min(fmean(shares), 1.0)


def _clock_room(measured: Measured, rows: _Rows) -> float:
    """By how much prefills without calls would be shorter at the highest clock of any pass, loaded ones as well."""
    found = [row.get(name) for row in measured.step["rows"] for name in ("step_mhz", "forward_mhz")]
    if None in found:
        raise ValueError(f"step results: expected clocks of every row, got none of some; {REMEDY} with nvidia-ml-py")
    return 1 - fmean(rows.value(model, "skipped", "forward_mhz") for model in rows.models) / max(found)


def _range(values: list[float]) -> tuple[float, float]:
    return max(min(values), 0.0), max(max(values), 0.0)
