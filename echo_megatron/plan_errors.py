"""The plan's predictions beside what was measured on two H200: how far to trust it.

Calls: a measured size is left out of its curve and predicted from the others; and a two-shot row that the model never
uses is predicted from the preset's one-shot curve, which is what it does for P above 2. Steps: every setting at load 0;
the compute of `skipped` was fitted to these very rows, the rest was not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from echo_megatron.config import Algorithm, EchoConfig, Policy, StateDtype
from echo_megatron.plan_calls import LARGE, CallTimes
from echo_megatron.plan_machine import Curve, Measured
from echo_megatron.plan_model import Calibration, measured_work, predict


@dataclass(frozen=True)
class Comparison:
    """One measured value and what the plan says.

    Attributes:
        what: row or model and setting.
        kind: how it was predicted: left_out, transfer, step or forward.
        measured, predicted: milliseconds.
        measured_speedup, predicted_speedup: NCCL's time divided by it, where it has one.
    """

    what: str
    kind: str
    measured: float
    predicted: float
    measured_speedup: float | None = None
    predicted_speedup: float | None = None

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


_STATES: dict[str, dict[str, Any]] = {
    "compact state": {"state_dtype": StateDtype.compact},
    "bf16 state": {"state_dtype": StateDtype.bf16},
    "no compensation": {"eta": 0.0},
}


def call_errors(measured: Measured) -> list[Comparison]:
    """All-reduces of 1 MiB and more, and two-shot rows from the one-shot curve."""
    times = CallTimes(measured, measured.ceilings, measured.all_reduce["world_size"])
    curves = {"nccl16": measured.curve(measured.all_reduce["rows"], "nccl16", None, None)}
    for bits in (4, 8):
        for dtype in (StateDtype.compact, StateDtype.bf16):
            curves[f"echo{bits} ({dtype.name} state)"] = times.curve_of(EchoConfig(bits=bits, state_dtype=dtype))
    return [*_left_out(curves), *_transfers(measured, times)]


def _left_out(curves: dict[str, Curve]) -> Iterator[Comparison]:
    for name, curve in curves.items():
        for size in sorted(curve.ms)[1:-1]:
            if size >= 1 << 20:
                rest = curve.without(size)
                yield Comparison(
                    f"{name}, {size >> 20} MiB", "left_out", curve.ms[size], rest.latency_ms + rest.work_ms(size)
                )


def _transfers(measured: Measured, times: CallTimes) -> Iterator[Comparison]:
    """Rows of the other quantizer that ran two-shot, from the preset's curve and the ratio of the bounds.

    Rows that were not measured are left out.
    """
    for bits, (name, options) in product((4, 8), _STATES.items()):
        preset = EchoConfig(bits=bits, **options)
        other = preset.replace(policy=Policy.zero_aware, group_size=128)
        if not times.is_measured(other):
            continue
        target, source = times.curve_of(other), times.curve_of(preset)
        for size in sorted(target.ms):
            if size >= LARGE and target.algorithm[size] == Algorithm.two_shot.name:
                shown = times.bound_ms(other, size, Algorithm.two_shot)
                own = times.bound_ms(preset, size, Algorithm[source.algorithm[size] or "one_shot"])
                predicted = target.latency_ms + source.work_ms(size) * shown / own
                label = f"echo{bits} zero_aware two-shot ({name}), {size >> 20} MiB"
                yield Comparison(label, "transfer", target.ms[size], predicted)


def step_errors(measured: Measured, calibration: Calibration) -> list[Comparison]:
    """Steps and prefills of every model and setting without load."""
    times = CallTimes(measured, measured.ceilings, measured.step["world_size"])
    rows = [row for row in measured.step["rows"] if row["load"] == 0]
    nccl = {row["model"]: row for row in rows if row["setting"] == "nccl16"}
    compared = []
    for row in rows:
        work, setting = measured_work(measured, row["model"]), row["setting"]
        base = predict(work, EchoConfig(bits=16), times, calibration)
        if setting == "skipped":
            ms = {
                "step": calibration.compute_ms(work, times.ceilings, True),
                "forward": calibration.compute_ms(work, times.ceilings, False),
            }
        else:
            prediction = predict(work, _config_of(measured, setting), times, calibration)
            ms = {"step": prediction.step_ms, "forward": prediction.forward_ms}
        for kind, baseline in (("step", base.step_ms), ("forward", base.forward_ms)):
            name = f"{kind}_ms"
            compared.append(
                Comparison(
                    f"{row['model']}, {setting}",
                    kind,
                    row[name],
                    ms[kind],
                    nccl[row["model"]][name] / row[name],
                    baseline / ms[kind],
                )
            )
    return compared


def _config_of(measured: Measured, setting: str) -> EchoConfig:
    """The options of a setting, from what the results say of it."""
    if setting == "nccl16":
        return EchoConfig(bits=16)
    said = measured.step["echo"][setting]
    state = StateDtype.bf16 if "bf16 state" in said else StateDtype.compact
    return EchoConfig(bits=8 if "8-bit" in said else 4, state_dtype=state)
