"""The plan's predictions beside what was measured on two H200: how far to trust it.

Calls: a measured size is left out of its curve and predicted from the others; and rows that the model never uses are
predicted from others by the ratio of their bounds, which is what it does for P above 2 and for reduce-scatters at 8
bits. Steps: every setting at load 0, by a calibration that the row's model is left out of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from echo_megatron.config import Algorithm, Collective, EchoConfig, Policy, StateDtype
from echo_megatron.plan_calibration import calibrate, config_of, measured_work
from echo_megatron.plan_calls import LARGE, CallTimes
from echo_megatron.plan_machine import Curve, Measured
from echo_megatron.plan_model import predict, speedups


@dataclass(frozen=True)
class Comparison:
    """One measured value and what the plan says.

    Attributes:
        what: row or model and setting.
        kind: how it was predicted: of `plan_tables.KINDS`.
        measured, predicted: milliseconds.
        measured_speedup, predicted_speedup: NCCL's time divided by it, where it has one.
        speedup_low, speedup_high: the plan's range; calls and the bound have none.
    """

    what: str
    kind: str
    measured: float
    predicted: float
    measured_speedup: float | None = None
    predicted_speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None

    @property
    def error(self) -> float:
        """Of the milliseconds; relative, positive where the prediction is too long."""
        return self.predicted / self.measured - 1

    @property
    def gain_error(self) -> float | None:
        """Of the gain, which is the speed-up less one; relative, positive where the plan promises too much."""
        if self.measured_speedup is None or self.predicted_speedup is None or self.measured_speedup <= 1:
            return None
        return (self.predicted_speedup - 1) / (self.measured_speedup - 1) - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error, "gain_error": self.gain_error}


_STATES: dict[str, dict[str, Any]] = {
    "compact state": {"state_dtype": StateDtype.compact},
    "bf16 state": {"state_dtype": StateDtype.bf16},
    "no compensation": {"eta": 0.0},
}
_SHARE_ROWS: dict[Collective, tuple[tuple[int, str | None], ...]] = {
    Collective.reduce_scatter: ((4, "compact"),),
    Collective.all_gather: ((8, None),),
}


def call_errors(measured: Measured) -> list[Comparison]:
    """Collectives of 1 MiB and more from their other sizes, and rows from other rows."""
    times = CallTimes(measured, measured.ceilings, measured.all_reduce["world_size"])
    nccl = measured.curve(measured.all_reduce["rows"], "nccl16", None, None)
    curves = {"nccl16": (nccl, nccl)}
    for bits in (4, 8):
        for dtype in (StateDtype.compact, StateDtype.bf16):
            config = EchoConfig(bits=bits, state_dtype=dtype)
            curves[f"echo{bits} ({dtype.name} state)"] = (times.curve_of(config), nccl)
    return [
        *_left_out(curves, "left_out"),
        *_transfers(measured, times, nccl),
        *_left_out(_share_curves(measured), "shares"),
        *_share_transfers(measured, times),
    ]


def _left_out(curves: dict[str, tuple[Curve, Curve]], kind: str) -> Iterator[Comparison]:
    """Of each name's curve and NCCL's beside it, the sizes between the smallest and the largest."""
    for name, (curve, nccl) in curves.items():
        for size in sorted(curve.ms)[1:-1]:
            if size >= 1 << 20:
                predicted = _from_the_others(curve, size)
                own = curve is nccl or size not in nccl.ms
                speedups = (
                    () if own else (nccl.ms[size] / curve.ms[size], _from_the_others(nccl, size) / predicted)
                )  # fmt: skip
                yield Comparison(f"{name}, {size >> 20} MiB", kind, curve.ms[size], predicted, *speedups)


def _from_the_others(curve: Curve, size: int) -> float:
    rest = curve.without(size)
    return rest.latency_ms + rest.work_ms(size)


def _transfers(measured: Measured, times: CallTimes, nccl: Curve) -> Iterator[Comparison]:
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
                yield _beside(label, "transfer", target.ms[size], predicted, nccl.ms[size])


def _share_curves(measured: Measured) -> dict[str, tuple[Curve, Curve]]:
    """What the plan takes of sequence parallelism's collectives, each beside NCCL's."""
    rows = measured.shares["rows"]
    found = {}
    for collective, settings in _SHARE_ROWS.items():
        nccl = measured.curve(rows, f"nccl_{collective.name}", None, None)
        found[f"nccl {collective.name}"] = (nccl, nccl)
        for bits, state in settings:
            curve = measured.curve(rows, f"echo{bits}_{collective.name}", "rotated", state)
            found[f"echo{bits} {collective.name}{f' ({state} state)' if state else ''}"] = (curve, nccl)
    return found


def _share_transfers(measured: Measured, times: CallTimes) -> Iterator[Comparison]:
    """All-gathers at 8 bits from those at 4."""
    rows, collective = measured.shares["rows"], Collective.all_gather
    nccl = measured.curve(rows, f"nccl_{collective.name}", None, None)
    source, target = (measured.curve(rows, f"echo{bits}_{collective.name}", "rotated", None) for bits in (4, 8))
    for size in sorted(target.ms):
        if size >= LARGE:
            ratio = times.share_bound_ms(EchoConfig(), collective, 8, size) / times.share_bound_ms(
                EchoConfig(), collective, 4, size
            )
            predicted = source.latency_ms + source.work_ms(size) * ratio
            label = f"echo8 {collective.name}, {size >> 20} MiB"
            yield _beside(label, "shares_transfer", target.ms[size], predicted, nccl.ms[size])


def _beside(what: str, kind: str, measured: float, predicted: float, nccl: float) -> Comparison:
    return Comparison(what, kind, measured, predicted, nccl / measured, nccl / predicted)


def step_errors(measured: Measured) -> list[Comparison]:
    """Steps and prefills of every model and setting without load, each model by a fit to the others.

    Empty where fewer than two models were measured.
    """
    rows = [row for row in measured.step["rows"] if row["load"] == 0]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if len(models) < 2:
        return []
    return [
        comparison
        for model in models
        for comparison in _model_errors(measured, model, [row for row in rows if row["model"] == model])
    ]


def _model_errors(measured: Measured, model: str, rows: list[dict[str, Any]]) -> Iterator[Comparison]:
    times = CallTimes(measured, measured.ceilings, measured.step["world_size"])
    work, calibration = measured_work(measured, model), calibrate(measured, without=model)
    nccl = next(row for row in rows if row["setting"] == "nccl16")
    base = predict(work, EchoConfig(bits=16), times, calibration)
    for row in rows:
        what, ratios = (
            f"{model}, {row['setting']}",
            {name: nccl[name] / row[name] for name in ("step_ms", "forward_ms")},
        )
        if row["setting"] == "skipped":
            bound = calibration.compute(work, times.ceilings)
            yield _one("step", what, row, bound.step, ratios, base.step_ms / bound.step)
            yield _one("forward", what, row, bound.forward, ratios, base.forward_ms / bound.forward)
            continue
        config = config_of(measured, row["setting"])
        prediction = predict(work, config, times, calibration)
        step, forward = speedups(work, config, times, calibration)
        yield _one("step", what, row, prediction.step_ms, ratios, step.value, step.low, step.high)
        yield _one("forward", what, row, prediction.forward_ms, ratios, forward.value, forward.low, forward.high)


def _one(
    kind: str, what: str, row: dict[str, Any], ms: float, measured_speedups: dict[str, float], *planned: float
) -> Comparison:
    return Comparison(what, kind, row[f"{kind}_ms"], ms, measured_speedups[f"{kind}_ms"], *planned)
