"""The plan's steps: its speed-ups against the measured ones, its fit, and what has to hold of any prediction."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from echo_megatron import plan_tables
from echo_megatron.bench.step_models import MODELS
from echo_megatron.config import Collective, Direction, EchoConfig, TransportName
from echo_megatron.plan_calibration import calibrate, config_of, measured_work
from echo_megatron.plan_calls import LARGE, CallTimes
from echo_megatron.plan_errors import Comparison, call_errors, step_errors
from echo_megatron.plan_machine import Ceilings, Measured, results_folder
from echo_megatron.plan_memory import sent_bytes
from echo_megatron.plan_model import Work, predict, speedups
from tests.plan_times import times_of

ROOT = Path(__file__).parent.parent
NCCL, ECHO4, ECHO8 = EchoConfig(bits=16), EchoConfig(), EchoConfig(bits=8)
TRAINED = ("qwen3_0p6b", "qwen3_8b", "llama3_8b")


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(results_folder())


@pytest.fixture(scope="module")
def steps(measured: Measured) -> list[Comparison]:
    return step_errors(measured)


def of_echo(steps: list[Comparison], kind: str) -> list[Comparison]:
    return [one for one in steps if one.kind == kind and ", echo" in one.what]


# -- against what was measured; a model's rows by a fit to the other models


def test_every_measured_setting_is_compared(measured: Measured, steps: list[Comparison]) -> None:
    found = {(one.what, one.kind): one for one in steps}
    rows = [row for row in measured.step["rows"] if row["load"] == 0]
    assert len(found) == 2 * len(rows)
    for row, kind in itertools.product(rows, ("step", "forward")):
        one = found[f"{row['model']}, {row['setting']}", kind]
        assert one.measured == row[f"{kind}_ms"]
        assert one.measured_speedup == pytest.approx(row[f"{kind}_speedup"])


@pytest.mark.parametrize(("kind", "ms", "speedup"), [("step", 0.05, 0.02), ("forward", 0.10, 0.05)])
def test_speedups_are_near_the_measured_ones(steps: list[Comparison], kind: str, ms: float, speedup: float) -> None:
    of_kind = [one for one in steps if one.kind == kind]
    for one in of_kind:
        assert one.measured_speedup is not None and one.predicted_speedup is not None
        assert abs(one.error) < ms, one
        assert abs(one.predicted_speedup - one.measured_speedup) < speedup, one
    echo = of_echo(steps, kind)
    gains = [(one.predicted_speedup or 0) - 1 for one in echo], [(one.measured_speedup or 0) - 1 for one in echo]
    assert sum(gains[0]) == pytest.approx(sum(gains[1]), rel=0.25)  # neither promises nor hides a gain throughout


def test_echo4_s_gain_in_a_step_is_within_a_quarter(steps: list[Comparison]) -> None:
    echo4 = [one for one in of_echo(steps, "step") if one.what.endswith(", echo4")]
    assert len(echo4) == len(TRAINED)
    assert all(one.gain_error is not None and abs(one.gain_error) < 0.25 for one in echo4), echo4


def test_ranges_hold_for_most_and_are_missed_by_little(steps: list[Comparison]) -> None:
    echo = [*of_echo(steps, "step"), *of_echo(steps, "forward")]
    outside = [
        max((one.speedup_low or 0) - (one.measured_speedup or 0), (one.measured_speedup or 0) - (one.speedup_high or 0))
        for one in echo
    ]
    assert sum(distance <= 0 for distance in outside) > len(outside) / 2
    assert max(outside) < 0.01


def test_calls_of_large_messages_are_predicted(measured: Measured) -> None:
    errors = call_errors(measured)
    assert {one.kind for one in errors} == {"left_out", "transfer", "shares", "shares_transfer"}
    sizes = [f" {size} MiB" for size in (1, 2, 4, 8, 16, 32)]
    for one in errors:
        if one.kind == "transfer" and "compact state" in one.what and one.what.endswith((" 64 MiB", " 128 MiB")):
            assert -0.3 < one.error < 0, one  # too short, as docs/plan.md says; where it no longer is, say so there
        elif not one.what.endswith(tuple(sizes)):
            limit = 0.3 if one.kind == "shares_transfer" else 0.15
            assert abs(one.error) < limit, one
            assert one.gain_error is None or -2 * limit < one.gain_error < limit, one
    assert LARGE == 64 << 20


def test_the_profile_agrees_with_what_comes_back_as_clock(measured: Measured) -> None:
    """By how much all other kernels of a forward pass took longer beside Echo's calls than beside NCCL's."""
    calibration = calibrate(measured)
    profiles = {
        (row["model"], row["setting"]): row for row in measured.step["profiles"] if row["direction"] == "forward"
    }
    for model in ("qwen3_8b", "llama3_8b"):  # the host does not keep these waiting
        calls = 2 * MODELS[model].num_layers
        call = times_of(measured, 2).nccl_ms(Collective.all_reduce, measured_work(measured, model).message_bytes)
        longer = profiles[model, "echo4"]["others_ms"] - profiles[model, "nccl16"]["others_ms"]
        assert longer / (calls * call) == pytest.approx(calibration.returned, abs=0.2)


# -- the fit


def test_the_summary_tells_the_worst_gains_and_the_range(steps: list[Comparison]) -> None:
    line = plan_tables.summary_line([one.to_json() for one in steps])
    gains = [one.gain_error for one in steps if one.kind == "forward" and one.gain_error is not None]
    assert f"prefills {min(gains):+.0%} to {max(gains):+.0%}" in line
    assert "of 18 speed-ups of steps and prefills lie in the plan's range" in line
    assert "sequence parallelism's calls not known" in line


def test_the_page_has_these_errors(steps: list[Comparison]) -> None:
    def said(rows: list[Comparison]) -> str:
        errors = [one.gain_error for one in rows if one.gain_error is not None]
        return f"{min(errors):+.0%} to {max(errors):+.0%}".replace("-", "−").replace("%", " %")

    page = (ROOT / "docs" / "plan.md").read_text()
    echo4, others = (
        [one for one in of_echo(steps, "step") if one.what.endswith("echo4") is is4] for is4 in (True, False)
    )
    assert f"| steps with `echo4` | {said(echo4)} |" in page
    assert f"| steps with `echo4_bf16`, `echo8` | {said(others)}:" in page
    assert f"| prefills with Echo | {said(of_echo(steps, 'forward'))};" in page
    assert f"| the bound | {said([one for one in steps if one.what.endswith('skipped')])} |" in page
    held = plan_tables.summary_line([one.to_json() for one in steps]).split(" speed-ups")[0].replace(" of ", " ")
    inside, number = held.split()
    assert f"Of these {number} speed-ups {inside} lie in the range" in page


def rewritten(measured: Measured, change: Any) -> Measured:
    found = copy.copy(measured)
    found.step = copy.deepcopy(measured.step)
    for row in found.step["rows"]:
        change(row)
    return found


def test_a_model_left_out_has_no_part_in_the_fit(measured: Measured) -> None:
    def slower(row: dict[str, Any]) -> None:
        if row["model"] == "llama3_8b":
            row["step_ms"], row["forward_ms"] = 2 * row["step_ms"], 3 * row["forward_ms"]

    other = rewritten(measured, slower)
    assert calibrate(other, without="llama3_8b") == calibrate(measured, without="llama3_8b")
    assert calibrate(other) != calibrate(measured)


def test_the_fit_finds_what_steps_were_made_with(measured: Measured) -> None:
    times = times_of(measured, 2)
    truth = replace(calibrate(measured), returned=0.3, covering=1.2, waiting=0.04, matmul_share=0.6, memory_share=0.8)

    def made(row: dict[str, Any]) -> None:
        work = measured_work(measured, row["model"])
        if row["setting"] == "skipped":
            compute = truth.compute(work, times.ceilings)
            row["step_ms"], row["forward_ms"] = compute.step, compute.forward
        else:
            prediction = predict(work, config_of(measured, row["setting"]), times, truth)
            row["step_ms"], row["forward_ms"] = prediction.step_ms, prediction.forward_ms

    made_up = rewritten(measured, made)
    found = calibrate(made_up)
    for name in ("returned", "covering", "waiting", "matmul_share", "memory_share"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert found.returned_range == pytest.approx((0.3, 0.3))
    assert all(abs(one.error) < 0.005 for one in step_errors(made_up))  # Echo's exposed share is of other profiles


def test_one_model_is_not_checked_against_itself(measured: Measured) -> None:
    single = rewritten(measured, lambda row: None)
    single.step["rows"] = [row for row in single.step["rows"] if row["model"] == "qwen3_8b"]
    assert step_errors(single) == []
    assert "steps not known" in plan_tables.summary_line([])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("step_mhz"), "expected clocks of every row"),
        (lambda row: row.update(load=50), "expected rows at load 0"),
        (lambda row: row.update(setting=row["setting"].replace("echo", "other")), "rows of Echo's settings"),
        (lambda row: row.update(forward_ms=9.0 if "echo" in row["setting"] else 99.0), "expected times that grow"),
    ],
)
def test_results_that_cannot_be_fitted_are_refused(measured: Measured, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(rewritten(measured, change))


# -- what holds of any prediction


def cases() -> Iterator[tuple[str, int, bool]]:
    yield from itertools.product(TRAINED, (2, 4, 8), (False, True))


@pytest.mark.parametrize("gpu", ["h200", "a100", "b200"])
def test_fewer_bits_are_fewer_bytes_and_never_more_time(measured: Measured, gpu: str) -> None:
    calibration = calibrate(measured)
    for model, world_size, sequence_parallel in cases():
        work, times = Work(MODELS[model], world_size, sequence_parallel), times_of(measured, world_size, gpu)
        sent = [sent_bytes(work, config, times, TransportName.p2p) for config in (ECHO4, ECHO8, NCCL)]
        assert sent == sorted(set(sent))
        found = [predict(work, config, times, calibration) for config in (ECHO4, ECHO8)]
        assert found[0].step_ms <= found[1].step_ms and found[0].forward_ms <= found[1].forward_ms
        bound = calibration.compute(work, times.ceilings)
        assert bound.step < found[0].step_ms and bound.forward < found[0].forward_ms
        for speedup in speedups(work, ECHO4, times, calibration):
            assert speedup.low <= speedup.value <= speedup.high


def test_more_work_and_a_slower_wire_take_longer(measured: Measured) -> None:
    calibration = calibrate(measured)
    for (model, world_size, sequence_parallel), config in itertools.product(cases(), (NCCL, ECHO4, ECHO8)):
        shape, times = MODELS[model], times_of(measured, world_size)
        work = Work(shape, world_size, sequence_parallel)
        own = predict(work, config, times, calibration)
        slow = CallTimes(measured, replace(times.ceilings, wire=times.ceilings.wire / 4), world_size)
        for other, where in (
            (replace(work, shape=replace(shape, batch=2 * shape.batch)), times),
            (replace(work, shape=replace(shape, num_layers=shape.num_layers + 1)), times),
            (work, slow),
        ):
            longer = predict(other, config, where, calibration)
            assert longer.step_ms > own.step_ms and longer.forward_ms > own.forward_ms


@dataclass(frozen=True)
class _Calls:
    """Every call takes `each` milliseconds."""

    ceilings: Ceilings
    each: float
    is_echo: bool

    def quantizes(self, config: EchoConfig, _collective: Collective, _num_bytes: int, _direction: Direction) -> bool:
        return self.is_echo and config.quantizes

    def ms(self, _config: EchoConfig, _collective: Collective, _num_bytes: int, _direction: Direction) -> float:
        return self.each


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_longer_call_never_shortens_a_pass(measured: Measured, sequence_parallel: bool) -> None:
    calibration, work = calibrate(measured), Work(MODELS["qwen3_8b"], 2, sequence_parallel)
    for one, is_echo in itertools.product(
        (calibration, calibration.lowest_gain, calibration.highest_gain), (False, True)
    ):
        found = [predict(work, ECHO4, _Calls(measured.ceilings, each / 20, is_echo), one) for each in range(200)]
        assert all(low.step_ms < high.step_ms for low, high in itertools.pairwise(found))
        assert all(low.forward_ms < high.forward_ms for low, high in itertools.pairwise(found))
        total = found[-1].calls_forward_ms + found[-1].calls_backward_ms
        assert found[-1].step_ms <= found[0].step_ms + total  # a call adds its own time at most


def test_nothing_is_returned_beyond_the_highest_clock(measured: Measured) -> None:
    """Calls that take most of a pass leave the other kernels no more to gain."""
    calibration, work = calibrate(measured), Work(MODELS["qwen3_8b"], 2)
    own = calibration.compute(work, measured.ceilings).forward
    short, long = (predict(work, NCCL, _Calls(measured.ceilings, each, False), calibration) for each in (10.0, 11.0))
    assert long.forward_ms - short.forward_ms == pytest.approx(2 * work.shape.num_layers)
    assert short.calls_forward_ms - (short.forward_ms - own * (1 + calibration.waiting)) == pytest.approx(
        calibration.clock_room * own
    )


def test_unquantized_messages_are_planned_as_nccl_s(measured: Measured) -> None:
    work, times = Work(replace(MODELS["qwen3_0p6b"], batch=1, sequence=256), 2), times_of(measured, 2)
    assert work.message_bytes < times.min_bytes(ECHO4)
    calibration = calibrate(measured)
    assert predict(work, ECHO4, times, calibration) == predict(work, NCCL, times, calibration)
    assert predict(work, ECHO4, times, calibration, 30.0).step_ms == pytest.approx(30.0)


def test_a_measured_step_is_met_at_any_length(measured: Measured) -> None:
    calibration, work, times = calibrate(measured), Work(MODELS["qwen3_8b"], 4), times_of(measured, 4)
    for step in (150.0, 200.0, 400.0, 4000.0):
        assert predict(work, NCCL, times, calibration, step).step_ms == pytest.approx(step)
    gains = [speedups(work, ECHO4, times, calibration, step)[0].value for step in (150.0, 200.0, 400.0, 4000.0)]
    assert gains == sorted(gains, reverse=True)
