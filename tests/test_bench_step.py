"""The step bench: statistics, shares of the time, kernels, tables, figure, copies, the skipped group; a run on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from echo_megatron.bench import step, step_figure, step_profile, step_tables, ttft
from echo_megatron.bench.clocks import Clock, ClockSampler
from echo_megatron.bench.step_load import Copied, Load, Loaded
from echo_megatron.bench.step_models import MODELS, Workload, fitting_layers
from echo_megatron.bench.step_profile import Kernel
from echo_megatron.bench.step_settings import all_settings, num_sites, skipping
from echo_megatron.bench.step_timing import Block, Ranks, Shares, Spread, fits, gained_share, spread, time_block
from echo_megatron.config import EchoConfig, StateDtype, TransportName

ROOT = Path(__file__).resolve().parent.parent


class OneRank:
    """The agreements of a rank that is alone, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def largest(self, values: list[float]) -> list[float]:
        return [self.now for _ in values]


class TestTiming:
    def test_quartiles_interpolate_and_one_round_has_none(self) -> None:
        assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
        assert spread([4.0, 1.0, 2.0, 3.0]) == Spread(2.5, 1.75, 3.25)

    def test_share_of_the_bound(self) -> None:
        assert gained_share(100.0, 92.0, 90.0) == pytest.approx(0.8)
        assert gained_share(100.0, 105.0, 90.0) == pytest.approx(-0.5)
        assert gained_share(100.0, 99.0, 99.5) is None  # nothing to gain
        assert gained_share(None, 92.0, 90.0) is None and gained_share(100.0, 92.0, None) is None

    def test_a_block_waits_for_every_step(self) -> None:
        pauses = iter([0.03, 0.01, 0.02])
        block = time_block(lambda: time.sleep(next(pauses)), 3, torch.device("cpu"))
        assert 20 <= block.ms < 30 and 20 <= block.wall_ms < 30  # median, and the mean of all

    def test_parts_leave_their_time_to_later_ones(self) -> None:
        rank = OneRank()
        shares = Shares(100.0, time.monotonic(), [1.0, 1.0, 2.0, 4.0], rank)  # type: ignore[arg-type]
        assert shares.next_deadline() == pytest.approx(12.5)
        rank.now = 30.0  # it took longer
        assert shares.next_deadline() == pytest.approx(30 + 70 / 7)
        rank.now = 31.0
        shares.drop(1)
        assert shares.next_deadline() == pytest.approx(100.0)

    def test_no_part_begins_after_the_budget(self) -> None:
        rank = OneRank()
        shares = Shares(10.0, time.monotonic(), [1.0, 1.0], rank)  # type: ignore[arg-type]
        rank.now = 10.0
        assert shares.next_deadline() is None

    def test_a_round_must_fit_but_the_first_always_does(self) -> None:
        assert fits(50.0, 40.0, [])
        assert fits(30.0, 40.0, [4.0, 10.0]) and not fits(31.0, 40.0, [4.0, 10.0])

    def test_layers_shrink_until_they_fit(self) -> None:
        tried: list[int] = []

        def attempt(num_layers: int) -> bool:
            tried.append(num_layers)
            return num_layers <= 20

        assert fitting_layers(36, attempt) == 20 and tried == [36, 27, 20]
        assert fitting_layers(3, lambda num_layers: False) == 0


class TestProfile:
    nccl = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    echo = "void echo::all_reduce_kernel<4, (echo::Policy)3, (echo::Algorithm)0>(echo::Arguments)"
    exact = "void echo::(anonymous namespace)::exact_kernel<(echo::Dtype)0>(echo::ExactArguments)"

    def test_kernels_are_known_by_their_names(self) -> None:
        for call in (self.nccl, self.echo, self.exact):
            first = Kernel(self.nccl, 0, 1)
            assert step_profile.site_calls([first, Kernel(call, 2, 3)], 1) == [Kernel(call, 2, 3)]
        for other in ("void echo::update_kernel<4>(echo::RecordArguments)", "ncclDevKernel_AllGather_RING", "gemm"):
            assert step_profile.site_calls([Kernel(other, 0, 1), Kernel(other, 2, 3)], 1) == []

    def test_the_sites_calls_of_nccl_follow_the_embeddings(self) -> None:
        kernels = [Kernel(self.nccl, 10 * idx, 10 * idx + idx + 1) for idx in range(7)]
        assert step_profile.site_calls(kernels, 4) == kernels[1:5]

    def test_all_of_echos_kernels_are_sites(self) -> None:
        ours = [Kernel(self.echo, 10, 12), Kernel(self.exact, 20, 21)]
        assert step_profile.site_calls([Kernel(self.nccl, 0, 5), *ours], 2) == ours

    def test_exposed_is_where_nothing_else_runs(self) -> None:
        kernels = [
            Kernel("gemm", 0, 1000),
            Kernel(self.nccl, 1000, 1500),  # the embedding's
            Kernel(self.nccl, 2000, 3000),  # hidden by the next from 2400 on
            Kernel("gemm", 2400, 3500),
            Kernel(self.nccl, 4000, 6000),  # alone
            Kernel("gemm", 6500, 7000),
        ]
        found = step_profile.summary(kernels, 2)
        assert found == {
            "calls": 2,
            "call_q1_ms": 1.25,
            "call_ms": 1.5,
            "call_q3_ms": 1.75,
            "sum_ms": 3.0,
            "exposed_ms": 2.4,
            "span_ms": 7.0,
            "idle_ms": 1.5,
            "others_ms": 3.1,
            "others": [
                {"name": "gemm", "count": 3, "sum_ms": 2.6},
                {"name": self.nccl, "count": 1, "sum_ms": 0.5},
            ],
        }
        assert step_profile.summary(kernels, 0)["others_ms"] == 5.5, "without sites every kernel is another"

    def test_nothing_recorded_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="recorded no kernel"):
            step_profile.summary([], 2)


def visit(step_ms: float, forward_ms: float, **memory: Any) -> dict[str, Any]:
    return {
        "step": Block(step_ms, step_ms + 1),
        "forward": Block(forward_ms, forward_ms + 1),
        "copied": Copied(200.0, 0.5),
        "clock": {"step": Clock(1500.0, 690.0), "forward": None},
        "loss": 12.0,
        "memory": {"state_bytes": 0, "workspace_bytes": 0, "transport": None, **memory},
    }


def synthetic() -> dict[str, Any]:
    """Results as a run on two GPUs would write them; the figures are made up."""
    rows = []
    for model in ("qwen3_0p6b", "llama3_8b"):
        for load in (0, 100):
            for setting, ms in (("nccl16", 500.0), ("echo4", 470.0), ("skipped", 460.0)):
                peaks = {"peak_allocated_bytes": 40 << 30, "peak_reserved_bytes": 44 << 30, "device_bytes": 46 << 30}
                own = {"state_bytes": 512 << 20, "workspace_bytes": 64 << 20} if setting == "echo4" else {}
                visits = [visit(ms + load, ms / 2 + load, **peaks, **own), visit(ms + load + 8, ms / 2 + load)]
                rows.append(step_tables.row_of(model, setting, load, visits))
    profile = step_profile.summary(
        [Kernel("gemm", 0, 900), Kernel(TestProfile.nccl, 900, 1000), Kernel(TestProfile.nccl, 1000, 1400)], 1
    )
    return {
        "world_size": 2,
        "method": "made up",
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"python": "3.12"},
        "commit": "0123abc",
        "command": "torchrun --nproc-per-node 2 scripts/bench_step.py",
        "date": "2026-01-01",
        "link_bytes": 1 << 30,
        "models": {
            "qwen3_0p6b": {
                "layers": 28,
                "layers_of_model": 28,
                "layers_kind": "transformer_engine",
                "batch": 32,
                "sequence": 2048,
                "parameters_a_rank": 298_000_000,
                "sites": {"forward": 56, "backward": 56},
                "message_bytes": 128 << 20,
            }
        },
        "echo": {"echo4": "echo: 4-bit"},
        "links": [
            {
                "load": load,
                "all_reduce_ms": 3.5 * slowdown,
                "slowdown": slowdown,
                "copy_alone_gb_per_s": 3.0 * load,
                "copy_gb_per_s": 2.0 * load,
                "busy": load / 100,
            }
            for load, slowdown in ((0, 1.0), (100, 2.0))
        ],
        "rows": step_tables.with_ratios(rows),
        "profiles": [{"model": "qwen3_0p6b", "setting": "nccl16", "direction": "forward", "sites": 1, **profile}],
        "left_out": {"llama3_8b, profile": "--budget-s 380"},
    }


class TestTables:
    def test_a_row_holds_the_median_of_its_visits(self) -> None:
        row = step_tables.row_of("m", "echo4", 50, [visit(10.0, 3.0, state_bytes=7), visit(14.0, 5.0)])
        assert (row["step_ms"], row["step_q1_ms"], row["step_q3_ms"]) == (12.0, 11.0, 13.0)
        assert (row["forward_ms"], row["forward_wall_ms"], row["rounds"]) == (4.0, 5.0, 2)
        assert row["state_bytes"] == 7 and row["copy_gb_per_s"] == 200.0

    def test_ratios_are_of_the_same_model_and_load(self) -> None:
        rows = {(row["model"], row["load"], row["setting"]): row for row in synthetic()["rows"]}
        loaded = rows["llama3_8b", 100, "echo4"]
        assert loaded["step_speedup"] == pytest.approx(604 / 574) and loaded["step_share"] == pytest.approx(0.75)
        assert rows["llama3_8b", 0, "nccl16"]["forward_speedup"] == 1

    def test_missing_rows_leave_cells_empty(self) -> None:
        rows = step_tables.with_ratios([step_tables.row_of("m", "echo4", 0, [visit(10.0, 3.0)])])
        assert rows[0]["step_speedup"] is None and rows[0]["step_share"] is None
        assert "| m | bound |  |" in step_tables.load_table(rows, "step")

    def test_the_page_has_every_part(self) -> None:
        page = step_tables.markdown(synthetic())
        assert "| llama3_8b | paper, speed-up | 1.090 | 1.380 |" in page  # training step, 0 and 100 %
        assert "| llama3_8b | paper, speed-up | 1.160 | 1.440 |" in page  # time to first token
        assert "P = 8; these are at P = 2 on NVIDIA H200" in page
        assert "| qwen3_0p6b | echo4 | 2 | 474.0 (472.0 to 476.0) | 1.063 | 75% |" in page
        assert "| 100 % (copying 100% of the time) | 300 | 7.00 | 2.000 | 200 |" in page
        assert "| qwen3_0p6b | nccl16 | forward | 1 of 1 | 0.400" in page
        assert "| qwen3_0p6b | echo4 | 40.00 (+0 MiB) | 44.00 (+0 MiB) | 46.00 (+0 MiB) | 512.0 | 64.0 |" in page
        assert "- left out: llama3_8b, profile: --budget-s 380" in page
        assert "| qwen3_0p6b | 100 % | echo4 | 1500 | 690 |  |  |" in page

    def test_clocks_are_sampled_or_it_is_said_why_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with ClockSampler(torch.device("cpu")) as sampler:
            assert sampler.unknown == "not a GPU"
        assert sampler.clock is None
        readings = iter([1980, *range(1200, 100_000, 100)])
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: next(readings))
        monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 700_000)
        sampler = ClockSampler(torch.device("cuda", 0))
        with sampler:
            while len(sampler._samples) < 3:
                time.sleep(0.001)
        clock = sampler.clock
        assert sampler.unknown is None and clock is not None
        assert 1200 < clock.mhz < 1980 and clock.watts == 700
        monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1 // 0)
        assert "ZeroDivisionError" in (ClockSampler(torch.device("cuda", 0)).unknown or "")

    def test_results_without_rows_still_make_a_page(self) -> None:
        empty = {**synthetic(), "rows": [], "links": [], "profiles": [], "models": {}}
        assert "## Made by" in step_tables.markdown(empty)

    def test_render_writes_page_and_figure(self, tmp_path: Path) -> None:
        path = tmp_path / "step.json"
        path.write_text(json.dumps(synthetic()))
        assert step.main(["--render", str(path)]) == 0
        assert path.with_suffix(".md").read_text() == step_tables.markdown(synthetic())
        assert path.with_suffix(".png").stat().st_size > 10_000

    def test_a_figure_of_nothing(self, tmp_path: Path) -> None:
        step_figure.draw(tmp_path / "empty.png", {**synthetic(), "rows": []})
        assert (tmp_path / "empty.png").is_file()


class TestOptions:
    def test_settings(self) -> None:
        settings = all_settings(60.0, TransportName.p2p)
        assert list(settings) == ["nccl16", "echo4", "echo4_bf16", "echo8", "skipped"]
        in_bf16 = settings["echo4_bf16"].config
        assert in_bf16 is not None and in_bf16.state_dtype is StateDtype.bf16
        assert in_bf16.timeout_s == 60 and in_bf16.transport is TransportName.p2p
        assert settings["nccl16"].config is None and settings["skipped"].config is None

    def test_loads(self) -> None:
        assert step.parse_arguments(["--load", "100", "0", "50"], "").loads == [0, 50, 100]
        for wrong in ("-1", "101", "half"):
            with pytest.raises(SystemExit):
                step.parse_arguments([f"--loads={wrong}"], "")

    def test_models_have_the_published_sizes(self) -> None:
        llama, qwen = MODELS["llama3_8b"], MODELS["qwen3_8b"]
        assert (llama.num_layers, llama.hidden, llama.ffn, llama.vocab) == (32, 4096, 14336, 128256)
        assert (qwen.num_layers, qwen.hidden, qwen.ffn, qwen.vocab) == (36, 4096, 12288, 151936)
        assert qwen.qk_layernorm and not llama.qk_layernorm

    def test_refuses_to_run_without_torchrun(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        assert step.main([]) == 2
        assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.slow
class TestLoad:
    def test_duty_cycle(self) -> None:
        cpu = torch.device("cpu")
        load = Load(cpu, cpu)
        try:
            load.wait_until_ready()
            found = {}
            for duty in (0.5, 1.0, 0.0):
                load.set_duty(duty)
                before = load.look()
                time.sleep(0.5)
                found[duty] = load.since(before)
            assert 0.3 < found[0.5].busy < 0.7 and found[1.0].busy > 0.85
            assert found[1.0].gb_per_s > found[0.5].gb_per_s > 0
            assert found[0.0] == Copied(0.0, 0.0)
        finally:
            load.close()
        with pytest.raises(RuntimeError, match="does not run"):
            load.wait_until_ready()


def _skip(rank: int, world_size: int) -> dict[str, Any]:
    from tiny_megatron import build_trainer, gradients, run_step

    from echo_megatron.integrations.linears import tensor_parallel_group
    from echo_megatron.integrations.megatron_sites import find_sites
    from echo_megatron.process_group import EchoProcessGroup

    trainer = build_trainer(world_size)
    [chunk] = trainer.chunks
    linears = [found.linear for found in find_sites([chunk], EchoConfig())]
    counts = num_sites(chunk)

    def step() -> list[float]:
        return run_step(trainer, 0, update=False)

    before, gradients_before = step(), gradients(trainer)
    with skipping(chunk) as communicator:
        inside = step()
        covered = sum(isinstance(tensor_parallel_group(linear), EchoProcessGroup) for linear in linears)
    after, gradients_after = step(), gradients(trainer)
    return {
        "sites": counts,
        "calls": communicator.num_skipped,
        "covered": covered,
        "left": sum(isinstance(tensor_parallel_group(linear), EchoProcessGroup) for linear in linears),
        "losses": (before, inside, after),
        "same_gradients": all(torch.equal(gradients_before[name], gradients_after[name]) for name in gradients_before),
    }


class TestSkipped:
    def test_the_sites_sums_are_left_out_and_nothing_else(self) -> None:
        for found in run_ranks(_skip, 2):
            assert found["sites"] == {"forward": 8, "backward": 8}
            assert found["calls"] == found["covered"] == 16 and found["left"] == 0
            before, inside, after = found["losses"]
            assert before == after != inside and found["same_gradients"]


def _work(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from echo_megatron.pretrain.cpu_shims import install_cpu_shims

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    small = {"hidden": 64, "ffn": 96, "heads": 4, "groups": 2, "kv_channels": 16, "vocab": 128}
    found = {}
    for name in ("qwen3_0p6b", "llama3_8b"):  # with and without norms of queries and keys, tied and not
        work = Workload(replace(MODELS[name], **small), 2, 3, 8, torch.device("cpu"))
        rows: list[int] = []
        work.model.output_layer.register_forward_hook(lambda head, given, got: rows.append(got[0].shape[0]))  # noqa: B023
        work.prefill()
        work.step()
        names = {name.rpartition("layernorm")[0] for name, _ in work.model.named_parameters()}
        grads = [parameter.grad for parameter in work.model.parameters()]
        work.prefill()
        found[name] = (rows, any("q_" in name for name in names), all(grad is not None for grad in grads), work.loss())
    return found


class TestWorkload:
    def test_a_step_needs_all_positions_and_a_prefill_the_last(self) -> None:
        [found] = run_ranks(_work, 1)
        for name, (rows, with_norms, with_grads, loss) in found.items():
            assert rows == [1, 8, 1] and with_grads and 4 < loss < 6, name  # ln 128 = 4.85
            assert with_norms == (name == "qwen3_0p6b")


def _fail_on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    from megatron.core import parallel_state

    from echo_megatron.bench import step_run
    from echo_megatron.integrations.megatron import Installation
    from echo_megatron.pretrain.cpu_shims import install_cpu_shims

    def failing(installation: Installation) -> None:
        raise RuntimeError("planted")

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size, distributed_timeout_minutes=1)
    options = step.parse_arguments(["--models", "tiny", "--settings", "echo8", "--loads", "0", "--rounds", "2"], "")
    if rank == 1:
        Installation.check = failing  # type: ignore[method-assign]
    ranks = Ranks(torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=60)))
    bench = step_run.StepBench(options, torch.device("cpu"), ranks, None, time.monotonic())
    status = bench.run()
    return {"status": status, **bench.results()}


class TestFailure:
    def test_of_one_rank_is_all_ranks(self) -> None:
        first, second = run_ranks(_fail_on_one_rank, 2, timeout_s=120.0)
        assert first["status"] == second["status"] == 1
        assert first["left_out"] == {"tiny, echo8": "failed on another rank"}
        assert second["left_out"] == {"tiny, echo8": "RuntimeError: planted"}
        for results in (first, second):
            assert [(row["setting"], row["rounds"]) for row in results["rows"]] == [("nccl16", 2)]

    def test_a_copier_that_has_ended_is_an_error(self) -> None:
        class Ended:
            duty = None

            def wait_until_ready(self) -> None:
                raise RuntimeError("does not run")

            def set_duty(self, duty: float) -> None:
                self.duty = duty

        class Alone:
            def any(self, flag: bool) -> bool:
                return flag

        load = Ended()
        with pytest.raises(RuntimeError, match="does not run"), Loaded(load, 50, Alone()):  # type: ignore[arg-type]
            pytest.fail("it began")
        assert load.duty == 0.0


@pytest.mark.parametrize("bench", [step, ttft], ids=["step", "ttft"])
def test_unknown_settings_are_refused(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything starts."""
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--models", "tiny", "--settings", "echo4", "echo5"])
    assert "--settings: expected some of nccl16, echo4" in capsys.readouterr().err


@pytest.mark.slow
class TestRun:
    def run(self, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        script = [str(ROOT / "scripts" / "bench_step.py"), "--models", "tiny", "--loads", "0", "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ECHO_COMMIT": "0123abc"}
        return subprocess.run(
            [*launcher, *script, *arguments], env=environment, capture_output=True, text=True, timeout=200
        )

    def test_every_setting_of_a_tiny_model(self, tmp_path: Path) -> None:
        ran = self.run(tmp_path, "--rounds", "1", "--steps", "1")
        assert ran.returncode == 0, ran.stderr
        results = json.loads((tmp_path / "step.json").read_text())
        rows = {row["setting"]: row for row in results["rows"]}
        assert list(rows) == ["nccl16", "echo4", "echo4_bf16", "echo8", "skipped"]
        assert all(min(row["step_ms"], row["forward_ms"]) > 0 and row["rounds"] == 1 for row in rows.values())
        assert rows["echo4_bf16"]["state_bytes"] > rows["echo4"]["state_bytes"] > rows["nccl16"]["state_bytes"] == 0
        native = rows["nccl16"]["loss"]
        assert 0 < abs(rows["echo4"]["loss"] - native) < 0.02  # it is quantized, and sums
        assert abs(rows["skipped"]["loss"] - native) > abs(rows["echo8"]["loss"] - native)
        assert results["commit"] == "0123abc" and results["left_out"] == {}
        assert results["command"].startswith("torchrun --nproc-per-node 2 scripts/bench_step.py --models tiny")
        assert results["models"]["tiny"]["sites"] == {"forward": 8, "backward": 8}
        [link] = results["links"]
        assert link["load"] == 0 and link["all_reduce_ms"] > 0 and link["slowdown"] == 1
        assert "## Every setting, load 0 %" in (tmp_path / "step.md").read_text()

    def test_what_does_not_fit_the_budget_is_named(self, tmp_path: Path) -> None:
        ran = self.run(tmp_path, "--settings", "echo4", "--budget-s", "0.01")
        assert ran.returncode == 1
        results = json.loads((tmp_path / "step.json").read_text())
        assert results["rows"] == [] and results["left_out"]["tiny"] == "--budget-s 0.01"

    def test_a_setting_that_fails_is_left_out_and_the_rest_goes_on(self, tmp_path: Path) -> None:
        ran = self.run(tmp_path, "--rounds", "1", "--settings", "echo4", "skipped", "--transport", "p2p")
        assert ran.returncode == 1
        results = json.loads((tmp_path / "step.json").read_text())
        assert [row["setting"] for row in results["rows"]] == ["nccl16", "skipped"]
        assert "transport p2p" in results["left_out"]["tiny, echo4"]
