"""`echo-megatron plan`: what it predicts follows the definitions, what was measured, and common sense."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from echo_megatron import cli, plan
from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, StateDtype, TransportName
from echo_megatron.plan_calibration import calibrate
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import RESULTS, Measured, gpu_of_name, gpus, results_folder
from echo_megatron.plan_memory import kept_bytes, memory_of, sent_bytes, slot_bytes, state_bytes, workspace_bytes
from echo_megatron.plan_model import Work, predict
from echo_megatron.reference import choose_algorithm, num_sent_bytes, num_sent_share_bytes
from echo_megatron.sites import Site
from tests.distributed import run_ranks
from tests.plan_times import times_of

ROOT = Path(__file__).parent.parent
ECHO4, ECHO8, NCCL = EchoConfig(), EchoConfig(bits=8), EchoConfig(bits=16)
SHAPE = plan.model_shapes()["qwen3_0p6b"]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(results_folder())


# -- bytes and memory against what really is sent and held

REAL_CASES = [
    (config, shape)
    for config in (
        ECHO4,
        EchoConfig(state_dtype=StateDtype.bf16, algorithm=Algorithm.two_shot),
        EchoConfig(bits=8, residual="consensus"),  # type: ignore[arg-type]
        EchoConfig(bits=8, state_dtype=StateDtype.fp32, algorithm=Algorithm.one_shot),
        EchoConfig(eta=0.0),
    )
    for shape in ((6, 1001), (12, 128))
]


def _really(rank: int, world_size: int) -> list[dict[str, int]]:
    """State, kept and sent bytes of one forward site: of all-reduces, then of reduce-scatters."""
    found = []
    for config, shape in REAL_CASES:
        for collective in (Collective.all_reduce, Collective.reduce_scatter):
            if collective is Collective.reduce_scatter and config.residual.name == "consensus":
                continue
            x, site = torch.randn(shape, dtype=torch.bfloat16), Site(0, Direction.forward, bits=config.bits)
            communicator = Communicator(dist.group.WORLD, config, is_recomputed=lambda: True)  # type: ignore[arg-type]
            getattr(communicator, collective.name)(x, site)
            found.append(
                {
                    "held": communicator.num_state_bytes(),
                    "kept": communicator.replays.num_bytes(),
                    "sent": communicator.transport.num_sent_bytes(x, site, collective),
                }
            )
            communicator.destroy()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_what_communicators_hold(world_size: int) -> None:
    real = iter(run_ranks(_really, world_size)[0])
    for config, shape in REAL_CASES:
        for collective in (Collective.all_reduce, Collective.reduce_scatter):
            if collective is Collective.reduce_scatter and config.residual.name == "consensus":
                continue
            held = next(real)
            call = (config, world_size, shape[0] * shape[1], collective, choose_algorithm(config, world_size))
            state = state_bytes(*call, Direction.forward, TransportName.collective)
            kept = kept_bytes(*call, TransportName.collective)
            assert (state + kept, kept) == (held["held"], held["kept"]), (config, shape, collective)


def test_sent_bytes_are_the_transports(measured: Measured) -> None:
    shape = plan.model_shapes()["tiny"]
    for world_size, config, sequence_parallel in itertools.product(
        (2, 4), (ECHO4.replace(min_bytes=0), ECHO8.replace(min_bytes=0)), (False, True)
    ):
        work, times = Work(shape, world_size, sequence_parallel), times_of(measured, world_size)
        num_values = work.message_bytes // 2
        if sequence_parallel:
            scattered, gathered = (
                num_sent_share_bytes(config, bits, world_size, num_values // world_size)
                for bits in (config.bits, config.gather_bits)
            )
            expected = shape.num_layers * (4 * scattered + 6 * gathered)
        else:
            algorithm = choose_algorithm(config, world_size)
            one = num_sent_bytes(config, config.bits, algorithm, world_size, 0, num_values)
            expected = 4 * shape.num_layers * one
        assert sent_bytes(work, config, times, TransportName.p2p) == expected
    nccl = sent_bytes(Work(SHAPE, 4), NCCL, times_of(measured, 4), TransportName.p2p)
    assert nccl == 4 * SHAPE.num_layers * 2 * 3 * Work(SHAPE, 4).message_bytes // 4


def test_workspace_is_that_of_the_kernels_layout() -> None:
    """docs/how_it_works.md has the sizes, which tests/test_readme_sizes.py holds to cuda/layout.cuh."""
    lines = (ROOT / "docs" / "how_it_works.md").read_text().splitlines()
    start = next(idx for idx, line in enumerate(lines) if line.startswith("| workspace, MiB"))
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    assert len(rows) == 4
    for row in rows:
        name, slot, *sizes = (cell.strip(" `").replace(",", "") for cell in row.strip("|").split("|"))
        config = EchoConfig.preset(name, gather_bits=16)
        assert slot_bytes(config, config.bits) == int(slot)
        found = [f"{workspace_bytes(config, size, 132) / 2**20:.1f}" for size in (2, 4, 8)]
        assert found == sizes
    assert workspace_bytes(ECHO4, 2, 132) == workspace_bytes(ECHO8, 2, 132)  # the gathers are of 8 bits


def test_p2p_state_is_what_the_measured_runs_held(measured: Measured) -> None:
    for row in measured.step["rows"]:
        if row["state_bytes"]:
            said = measured.step["echo"][row["setting"]]
            config = EchoConfig(state_dtype=StateDtype.bf16 if "bf16 state" in said else StateDtype.compact)
            num_values = measured.step["models"][row["model"]]["message_bytes"] // 2
            call = (config, 2, num_values, Collective.all_reduce, Algorithm.one_shot)
            assert sum(state_bytes(*call, d, TransportName.p2p) for d in Direction) == row["state_bytes"]


# -- times


def test_measured_sizes_come_back_as_measured(measured: Measured) -> None:
    times = times_of(measured, 2)
    for name, config in (("nccl16", NCCL), ("echo4_local", ECHO4), ("echo8_local", ECHO8)):
        rows = [
            row
            for row in measured.all_reduce["rows"]
            if row["row"] == name and row["policy"] in (None, "rotated") and row["state_dtype"] in (None, "compact")
        ]
        sizes = {row["bytes"]: row["ms"] for row in rows if not row.get("beside") and row["bytes"] >= 1 << 26}
        assert sizes
        for size, ms in sizes.items():
            assert times.ms(config, Collective.all_reduce, size, Direction.forward) == pytest.approx(ms, rel=1e-9)


@pytest.mark.parametrize("gpu", list(gpus()))
def test_times_grow_with_bytes_and_ranks_and_fall_with_the_machine(measured: Measured, gpu: str) -> None:
    sizes = [1 << shift for shift in range(22, 31)]  # beyond min_bytes, where a call is another one
    for config, collective in itertools.product((NCCL, ECHO4, ECHO8), Collective):
        by_ranks = []
        for world_size in (2, 4, 8):
            times = times_of(measured, world_size, gpu)
            found = [times.ms(config, collective, size, Direction.forward) for size in sizes]
            assert all(0 < low <= high for low, high in itertools.pairwise(found)), (config.bits, collective, found)
            by_ranks.append(found[-1])
        assert by_ranks == sorted(by_ranks)
    ceilings = measured.ceilings_of(gpus()["h100"])
    slower = CallTimes(measured, ceilings, 4).nccl_ms(Collective.all_reduce, 1 << 30)
    assert slower >= times_of(measured, 4).nccl_ms(Collective.all_reduce, 1 << 30)
    assert times_of(measured, 4, "b200").nccl_ms(Collective.all_reduce, 1 << 30) < slower


def test_small_messages_take_nccls_time_and_no_memory(measured: Measured) -> None:
    times = times_of(measured, 2)
    size = times.min_bytes(ECHO4)
    below = times.ms(ECHO4, Collective.all_reduce, size - 2, Direction.forward)
    assert below == times.nccl_ms(Collective.all_reduce, size - 2)
    assert times.ms(ECHO4, Collective.all_reduce, size, Direction.forward) != times.nccl_ms(Collective.all_reduce, size)
    token = Work(replace(SHAPE, batch=1, sequence=1), 2)
    memory = memory_of(token, ECHO4, times, TransportName.p2p, recompute=True)
    assert (memory.state, memory.workspace, memory.kept_codes) == (0, 0, 0)


def test_steps_gain_more_with_more_ranks_and_never_beyond_the_calls(measured: Measured) -> None:
    calibration = calibrate(measured)
    assert 0 < calibration.matmul_share < 1
    assert 0 < calibration.memory_share < 1.5
    gains = []
    for world_size in (2, 4, 8):
        work, times = Work(SHAPE, world_size), times_of(measured, world_size)
        nccl, echo4 = (predict(work, config, times, calibration) for config in (NCCL, ECHO4))
        bound = calibration.compute(work, times.ceilings).step
        assert bound < echo4.step_ms < nccl.step_ms
        gains.append(nccl.step_ms / echo4.step_ms)
    assert gains == sorted(gains)
    doubled = predict(Work(replace(SHAPE, num_layers=56), 2), ECHO4, times_of(measured, 2), calibration)
    assert doubled.calls_forward_ms == pytest.approx(
        2 * predict(Work(SHAPE, 2), ECHO4, times_of(measured, 2), calibration).calls_forward_ms
    )


# -- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["plan", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_command_prints_plain_tables_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wanted = ["--ranks", "4", "8", "--sequence-parallel", "both", "--sizes", "1G", "--out", str(tmp_path)]
    status, out, _ = run(capsys, *wanted, "--name", "p", "--errors")
    assert status == 0
    assert "\x1b" not in out
    assert "| qwen3_0p6b | 8 | echo4 SP |" in out
    saved = json.loads((tmp_path / "p.json").read_text())
    assert {(row["world_size"], row["setting"]) for row in saved["rows"]} == {
        (size, f"{name}{sp}") for size in (4, 8) for name in plan.SETTINGS for sp in ("", " SP")
    }
    assert saved["commit"] and saved["versions"] and saved["machine"] and saved["command"]
    for row in saved["rows"]:
        for name in ("step_speedup", "forward_speedup"):
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]
    page = (tmp_path / "p.md").read_text()
    assert "Predictions, not measurements" in page
    assert "The model's error on measured points" in page
    status, out, _ = run(capsys, "--ranks", "2", "--json", "--gpu", "a100", "--wire-gb-per-s", "200")
    content: dict[str, Any] = json.loads(out)
    assert content["planned_machine"]["wire_gb_per_s"] == 200
    assert not content["planned_machine"]["is_measured"]
    _, out, _ = run(capsys, "--ranks", "2", "--gpu", "a100")
    assert "All of these are the NVIDIA H200's: no step was measured on NVIDIA A100" in out
    assert "Errors of the gain (the speed-up less one): steps -" in out


def test_a_measured_step_takes_the_place_of_the_modelled_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--ranks", "2", "--json", "--step-ms", "500")
    rows = {row["setting"]: row for row in json.loads(out)["rows"]}
    assert rows["nccl"]["step_ms"] == pytest.approx(500)
    _, out, _ = run(capsys, "--ranks", "2", "--json", "--transport", "collective")
    rows = {row["setting"]: row for row in json.loads(out)["rows"]}
    assert rows["echo4"]["step_ms"] is None  # its times were not measured by size
    assert rows["echo4"]["workspace_bytes"] == 0 < rows["echo4"]["state_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "--model: expected one of"),
        (["--ranks", "3"], "expected heads divisible by 3, got 16"),
        (["--step-ms", "500"], "--step-ms: expected one model, one P"),
        (["--step-ms", "5", "--ranks", "2"], "--step-ms: expected more than the"),
        (["--results", "/nowhere"], "expected measured results"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    status, _, error = run(capsys, *arguments)
    assert status == 2
    assert message in error


def test_what_was_not_measured_is_refused(measured: Measured, tmp_path: Path) -> None:
    times = times_of(measured, 2)
    for config, message in (
        (EchoConfig.preset("echo4_paper"), "residual: expected local"),
        (EchoConfig(policy="symmetric"), "policy: expected rotated or zero_aware"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            times.ms(config, Collective.all_reduce, 1 << 30, Direction.forward)
    for name in RESULTS:
        (tmp_path / f"{name}.json").write_bytes((results_folder() / f"{name}.json").read_bytes())
    step = json.loads((tmp_path / "step_h200x2.json").read_text())
    step["rows"] = [row for row in step["rows"] if row["setting"] != "skipped"]
    (tmp_path / "step_h200x2.json").write_text(json.dumps(step))
    with pytest.raises(ValueError, match="expected rows of the setting skipped"):
        calibrate(Measured(tmp_path))


def test_gpus_have_sources_and_are_found_by_cudas_names() -> None:
    assert all(gpu.source for gpu in gpus().values())
    for gpu in gpus().values():
        found = gpu_of_name(gpu.name)
        assert found is not None and found.key == gpu.key
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB"):
        assert gpu_of_name(name) is None
