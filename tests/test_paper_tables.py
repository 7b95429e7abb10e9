"""The paper's tables by one command: time shared out, parts that fail, and the page from results that exist."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echo_megatron.bench import bounded, paper_combine, paper_page, paper_parts, paper_tables
from echo_megatron.bench.bounded import Ended, run_bounded
from echo_megatron.bench.paper_parts import CUT, DONE, FAILED, TESTS, Budget, Part, Place
from echo_megatron.bench.rows import LARGE_SIZES, all_rows, select
from echo_megatron.bench.step_models import MODELS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
GPUS = Place("cuda", "NVIDIA H200", "h200", 4)
CPU = Place("cpu", None, "cpu", 2)


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def options(*arguments: str, place: Place = GPUS) -> Any:
    parsed = paper_tables.parse_arguments(arguments, "paper_tables.py")
    paper_tables.complete(parsed, place)
    return parsed


class TestBudget:
    def test_what_a_part_leaves_over_the_later_ones_have(self) -> None:
        now = [100.0]
        budget = Budget(212.0, [1.0, 1.0, 2.0], lambda: now[0])
        assert budget.next_limit() == pytest.approx(50 - paper_parts.STOP_S)
        now[0] += 10
        assert budget.next_limit() == pytest.approx(190 / 3 - paper_parts.STOP_S)
        now[0] += 300
        assert budget.next_limit() < 0

    def test_parts_end_by_themselves_before_they_are_stopped_and_all_within_the_budget(self) -> None:
        now, parts = [0.0], list(paper_parts.WEIGHTS)
        budget = Budget(540.0, [paper_parts.WEIGHTS[name] for name in parts], lambda: now[0])
        for name in parts:
            limit = budget.next_limit()
            assert paper_parts.inner_budget(limit, "cuda") < limit - 10, name
            now[0] += limit + paper_parts.STOP_S  # stopped at its limit, and slow to end
        assert now[0] == pytest.approx(540 - paper_parts.SPARE_S)

    def test_a_part_without_time_is_not_started(self, tmp_path: Path) -> None:
        part = paper_parts.run_part("step", GPUS, options("--out", str(tmp_path)), 3.0)
        assert part.status == CUT and part.why == "3 s of --budget-s 540 were left for it"


class TestCommands:
    def test_rows_models_and_tests_exist(self) -> None:
        rows = select(all_rows(), paper_parts.ROWS)
        for line in paper_combine.LINES:
            assert any((row.name, row.policy, row.state_dtype) == (line.row, line.policy, line.state) for row in rows)
        assert {*paper_parts.MODELS["cuda"], *paper_parts.MODELS["cpu"]} <= set(MODELS)
        for test in TESTS:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), test

    def test_of_every_part(self) -> None:
        made = options("--out", "here")
        for part in paper_parts.WEIGHTS:
            command = paper_parts.command_of(part, GPUS, made, 100.0)
            if part == "tests":
                assert command[3:5] == ["-v", "-p"] and set(TESTS) < set(command)
                continue
            assert command[: command.index("4") + 1] == [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
            ]
            assert Path(command[command.index("4") + 1]).is_file()
            for name, value in (("--name", f"{part}_h200x4"), ("--transport", "p2p"), ("--budget-s", "75")):
                assert command[command.index(name) + 1] == value
        assert made.models == ["llama3_8b", "qwen3_8b"] and made.loads == [0, 50, 75, 100] and made.ttft_batch == 64
        assert options("--ranks", "2", place=Place("cuda", "NVIDIA H200", "h200", 2)).ttft_batch == 16

    def test_environments(self) -> None:
        outside = {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "3,5,1,0,2", "NCCL_NVLS_ENABLE": "1", "HOME": "h"}
        found = paper_parts.environment_of("all_reduce", GPUS, outside)
        assert (found["NCCL_ALGO"], found["NCCL_NVLS_ENABLE"]) == ("Ring", "0")
        assert found["CUDA_VISIBLE_DEVICES"] == "3,5,1,0" and found["PYTHONPATH"] == str(ROOT)
        defaults = paper_parts.environment_of("nccl_defaults", GPUS, outside)
        assert {key: value for key, value in defaults.items() if key.startswith("NCCL_")} == {"NCCL_NVLS_ENABLE": "0"}
        assert paper_parts.environment_of("step", CPU, outside)["CUDA_VISIBLE_DEVICES"] == ""

    def test_what_is_set_of_nccl(self, tmp_path: Path) -> None:
        path = tmp_path / "nccl.conf"
        path.write_text("# a comment\nNCCL_DEBUG=WARN\n")
        found = paper_parts.nccl_variables({"NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "X": "1"}, [str(path)])
        assert found == {"NCCL_ALGO": "Tree", f"NCCL_DEBUG ({path})": "WARN"}


def test_the_gpu_tests_are_collected_where_there_is_no_xdist() -> None:
    """As on a machine that has what docs/paper_tables.md asks for."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


class TestJudging:
    def judged(self, status: int | None, left_out: dict[str, str] | None, folder: Path, *lines: str) -> Part:
        path = folder / "x.json"
        if left_out is not None:
            path.write_text(json.dumps({"left_out": left_out}))
        part = Part("step")
        paper_parts.judge_bench(part, Ended(status, 12.0, list(lines)), None if left_out is None else path)
        return part

    def test_benches(self, tmp_path: Path) -> None:
        assert self.judged(0, {}, tmp_path).status == DONE
        missing = self.judged(0, {"flashinfer_fp8": "Unavailable: no module"}, tmp_path)
        assert missing.status == DONE and missing.left_out and missing.results == "x.json"
        cut = self.judged(0, {"qwen3_8b, load 75": "--budget-s 100"}, tmp_path)
        assert (cut.status, cut.why) == (CUT, "its time was over before qwen3_8b, load 75")
        stopped = self.judged(None, {}, tmp_path)
        assert (stopped.status, stopped.why) == (CUT, "stopped after 12 s")
        failed = self.judged(1, {"echo4 rotated": "AssertionError: other bits"}, tmp_path)
        assert failed.status == FAILED and failed.why == "exit status 1; failed: echo4 rotated"
        silent = self.judged(1, None, tmp_path, "RuntimeError: no kernels", "torchrun's summary")
        assert silent.why == "exit status 1; RuntimeError: no kernels" and silent.results is None
        assert self.judged(0, None, tmp_path).status == FAILED, "it ended well but wrote nothing"

    def test_tests(self) -> None:
        def judged(status: int | None, outcomes: list[str], device: str = "cuda") -> Part:
            part = Part("tests")
            lines = [f"{test} {how} [ 10%]" for test, how in zip(TESTS, outcomes, strict=False)]
            paper_parts.judge_tests(part, Ended(status, 9.0, lines), device)
            return part

        everything = judged(0, ["PASSED"] * len(TESTS))
        assert everything.status == DONE and everything.tests
        assert everything.tests == {"passed": len(TESTS), "failed": 0, "skipped": 0, "not_run": 0, "others": {}}
        one_failed = judged(1, ["PASSED", "FAILED", *["PASSED"] * (len(TESTS) - 2)])
        assert one_failed.status == FAILED and one_failed.tests and one_failed.tests["others"] == {TESTS[1]: "failed"}
        stopped = judged(None, ["PASSED"])
        assert stopped.status == CUT and stopped.tests and stopped.tests["not_run"] == len(TESTS) - 1
        assert judged(0, ["SKIPPED"] * len(TESTS)).status == FAILED, "skipped on GPUs is not passed"
        assert judged(0, ["SKIPPED"] * len(TESTS), "cpu").status == DONE


def test_a_command_that_hangs_is_stopped_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "STOP_S", 0.5)
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun')\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(60)"
    )
    start = time.monotonic()
    ended = run_bounded([sys.executable, "-uc", parent], 2.0, dict(os.environ), "", tmp_path)
    assert ended.status is None and ended.lines == ["begun"] and time.monotonic() - start < 15
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":  # killed, but not yet scheduled
        assert time.monotonic() - start < 20, "its child lives"
        time.sleep(0.05)


def test_the_line_that_says_what_is_wrong() -> None:
    torchrun = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "  error_file: <N/A>", "====="]
    for line in ("error: no data", "[rank1]: RuntimeError: no kernels", "a.b.OutOfMemoryError: full", "KeyError: 'x'"):
        assert Ended(1, 0.0, ["Traceback", f" {line}", *torchrun]).last_line() == line
    assert Ended(1, 0.0, ["no Error here", "", "at last"]).last_line() == "at last"
    assert Ended(1, 0.0, []).last_line() == "no message"


class TestPage:
    @pytest.fixture
    def page(self) -> dict[str, Any]:
        """As if two GPUs' results had been measured on four."""
        found = {"all_reduce": read("all_reduce_h200x2"), "step": read("step_h200x2"), "ttft": {}, "nccl_defaults": {}}
        part = Part("ttft", FAILED, "exit status 1; RuntimeError: broken", 3.0, 60.0).to_json()
        run = {**paper_combine.source_of(found["step"]), "parts": [part]}
        head = {"world_size": 4, "machine_key": "h200", "gpu": "NVIDIA H200", "runs": [run]}
        head |= {"nccl": {"set": {"NCCL_ALGO": "Ring"}, "multicast": "off"}}
        return paper_combine.combine(head, found, read("plan_p4_p8"), "plan_p4_p8.json")

    def test_table_2_has_the_papers_rows_in_its_order_with_ours_and_the_bounds(self, page: dict[str, Any]) -> None:
        cells = {(cell["line"], cell["bytes"]): cell for cell in page["table2"]}
        nccl, echo4 = (cells[line, LARGE_SIZES[-1]] for line in ("NCCL 16-bit", "4-bit"))
        assert (nccl["paper_ms"], echo4["paper_ms"]) == (9.00, 3.40)
        assert echo4["paper_ratio"] == pytest.approx(9.00 / 3.40)
        measured = {(row["row"], row["policy"], row["bytes"]): row for row in read("all_reduce_h200x2")["rows"]}
        own = measured["echo4", "zero_aware", LARGE_SIZES[-1]]
        assert echo4["ms"] == own["ms"] and echo4["wire_ms"] == pytest.approx(own["wire_fraction"] * own["ms"])
        with_paper = dict.fromkeys(cell["line"] for cell in page["table2"] if cell.get("paper_ms"))
        assert [line.words for line in paper_combine.LINES if line.paper] == list(with_paper)
        assert len(with_paper) == 7
        text = paper_page.markdown(page)
        assert f"| 4-bit | here | {cells['4-bit', LARGE_SIZES[0]]['ms']:.3f} (" in text
        assert "| 4-bit | paper | 0.360 (1.94) |" in text and "NCCL_ALGO=Ring" in text

    def test_table_3_has_the_papers_loads_and_speed_ups(self, page: dict[str, Any]) -> None:
        rows = {(row["model"], row["what"], row["load"]): row for row in page["table3"]}
        row = rows["qwen3_8b", "step", 100]
        assert row["paper_speedup"] == 1.34 and row["echo4_speedup"] and row["bound_speedup"] > row["echo4_speedup"]
        assert rows["qwen3_8b", "forward", 0]["bench"] == "bench_step", "bench_ttft has no rows here"
        assert page["table3"][0]["what"] == "forward"
        assert {link["load"]: link["paper_slowdown"] for link in page["links"]} == {
            0: 1.00,
            50: 1.80,
            75: 2.07,
            100: 2.73,
        }

    def test_prefills_of_the_ttft_bench_come_first(self, page: dict[str, Any]) -> None:
        row = {"model": "qwen3_8b", "load": 0, "sequence": 2048}
        times = {"nccl16": (1.0, 12.0), "echo4": (0.5, 10.0), "skipped": (0.1, 8.0)}
        prefill = [
            {**row, "setting": setting, "batch": batch, "ms": ms}
            for setting, found in times.items()
            for batch, ms in zip((1, 64), found, strict=True)
        ]
        [first, *_] = paper_combine.table3(read("step_h200x2"), {"prefill": prefill})
        assert (first["bench"], first["batch"], first["paper_speedup"]) == ("bench_ttft", "64 x 2048", 1.09)
        assert first["echo4_speedup"] == pytest.approx(1.2) and first["bound_speedup"] == pytest.approx(1.5)

    def test_predictions_are_compared(self, page: dict[str, Any]) -> None:
        rows = {(row["what"], row["bytes"], row["unit"]): row for row in page["plan"]["rows"]}
        [call] = [
            call
            for call in read("plan_p4_p8")["calls"]
            if (call["world_size"], call["collective"], call["bytes"]) == (4, "all_reduce", LARGE_SIZES[-1])
        ]
        row = rows["NCCL 16-bit", LARGE_SIZES[-1], "ms"]
        assert row["predicted"] == call["nccl_ms"]
        assert row["error"] == pytest.approx(call["nccl_ms"] / row["measured"] - 1)
        assert any(what.startswith("qwen3_0p6b, training step, echo4") for what, _, unit in rows if unit == "speed-up")
        assert not paper_combine.compare_plan(read("plan_p4_p8"), 4, "NVIDIA A100", [], {}), "of another machine"

    def test_a_step_with_another_batch_is_compared_by_its_speed_up_alone(self) -> None:
        plan, step = read("plan_p4_p8"), read("step_h200x2")
        for shape in step["models"].values():
            shape["message_bytes"] *= 2
        units = {row["unit"] for row in paper_combine.compare_plan(plan, 4, "NVIDIA H200", [], step)}
        assert units == {"speed-up"}

    def test_aims_are_met_or_missed(self) -> None:
        def entry(name: str, ratio: float, policy: str | None = None, state: str | None = None) -> dict[str, Any]:
            place = {"row": name, "policy": policy, "state_dtype": state, "bytes": paper_combine.AIM_SIZES[0]}
            return {**place, "nccl_ratio": ratio, "ms": 1.0}

        entries = [entry("echo4", 3.0, "rotated"), entry("echo4_local", 2.59, "rotated", "compact")]
        found = {(aim["what"], aim["bytes"]): aim["met"] for aim in paper_combine.aims(entries)}
        small, large = paper_combine.AIM_SIZES
        assert found["4-bit, rotated", small] is True and found["4-bit, rotated", large] is None
        assert found["compensated 4-bit (echo4)", small] is False and found["4-bit", small] is None

    def test_crossover_is_where_two_shot_stays_faster(self) -> None:
        def crossing(one: list[float], two: list[float]) -> int | None:
            entries = [
                {"row": f"echo4_{name}", "bytes": 4 << idx, "ms": ms}
                for name, times in (("one_shot", one), ("two_shot", two))
                for idx, ms in enumerate(times)
            ]
            found = paper_combine.crossover(entries)
            assert len(found["rows"]) == len(one)
            start: int | None = found["two_shot_from"]
            return start

        assert crossing([1, 2, 4, 8], [2, 1.5, 4.5, 7]) == 32, "its win at the second size does not last"
        assert crossing([1, 2], [3, 4]) is None and crossing([2, 3], [1, 2]) == 4

    def test_a_failed_part_is_named(self, page: dict[str, Any]) -> None:
        assert "| ttft | **failed** | exit status 1; RuntimeError: broken | 3 of 60 |" in paper_page.markdown(page)


class TestRun:
    @pytest.fixture
    def commands(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """In place of the benches: one that works, one that fails after it has written, one that hangs."""
        step = read("step_h200x2")
        (tmp_path / "source.json").write_text(json.dumps({**step, "left_out": {"llama3_8b": "RuntimeError: no layer"}}))
        (tmp_path / "good.json").write_text(json.dumps({**read("all_reduce_h200x2"), "left_out": {}}))

        def command(part: str, place: Place, options: Any, limit_s: float) -> list[str]:
            copy = "import shutil, sys; shutil.copyfile(*sys.argv[1:3]); sys.exit(int(sys.argv[3]))"
            target = str(options.out / f"{place.name(part)}.json")
            return {
                "all_reduce": [sys.executable, "-c", copy, str(tmp_path / "good.json"), target, "0"],
                "step": [sys.executable, "-c", copy, str(tmp_path / "source.json"), target, "1"],
                "ttft": [sys.executable, "-c", "import time; time.sleep(60)"],
            }[part]

        monkeypatch.setattr(paper_parts, "command_of", command)
        monkeypatch.setattr(paper_parts, "START_S", {"cpu": 0.1})
        monkeypatch.setattr(paper_parts, "STOP_S", 0.2)
        monkeypatch.setattr(paper_parts, "SPARE_S", 0.0)
        monkeypatch.setattr(paper_tables, "draw", lambda folder, name: False)

    @pytest.mark.usefixtures("commands")
    def test_what_fails_or_hangs_is_named_and_the_rest_is_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out"
        arguments = ["--device", "cpu", "--out", str(out), "--budget-s", "6"]
        assert paper_tables.main([*arguments, "--parts", "all_reduce", "step", "ttft"]) == 1
        page = json.loads((out / "paper_tables_cpux2.json").read_text())
        parts = {part["name"]: part for part in page["runs"][0]["parts"]}
        assert [part["status"] for part in parts.values()] == [DONE, FAILED, CUT]
        assert parts["step"]["why"] == "exit status 1; failed: llama3_8b" and "stopped after" in parts["ttft"]["why"]
        assert page["table2"] and page["table3"], "what was measured is there"
        text = (out / "paper_tables_cpux2.md").read_text()
        assert "step, left out: llama3_8b: RuntimeError: no layer" in text and "rehearsal" in text
        assert "failed: step: exit status 1" in capsys.readouterr().out

        before = {path.name: path.read_text() for path in out.iterdir()}
        assert paper_tables.main([*arguments, "--parts", "step"]) == 2, "it would write over results"
        assert "without step_cpux2.json; pass another one, or --replace" in capsys.readouterr().err
        assert {path.name: path.read_text() for path in out.iterdir()} == before
        (out / "paper_tables_cpux2.md").unlink()
        assert paper_tables.main(["--render", "--out", str(out)]) == 0
        assert {path.name: path.read_text() for path in out.iterdir()} == before

        assert paper_tables.main([*arguments, "--parts", "all_reduce", "--replace"]) == 0, "of this run all is there"
        page = json.loads((out / "paper_tables_cpux2.json").read_text())
        assert len(page["runs"]) == 2 and "**failed**" in paper_page.markdown(page), "the earlier run's are still told"

    def test_refusals(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def gpus(count: int) -> Callable[..., dict[str, Any]]:
            return lambda question, limit_s: {"gpus": [{"name": "NVIDIA H200"}] * count}

        monkeypatch.setattr(paper_tables, "probe", gpus(1))
        assert paper_tables.main(["--out", str(tmp_path)]) == 2
        assert "expected at least 2 GPUs, got 1 here; --device cpu is a rehearsal" in capsys.readouterr().err
        monkeypatch.setattr(paper_tables, "probe", gpus(4))
        assert paper_tables.find_place(options("--out", "x")).name("step") == "step_h200x4"
        assert paper_tables.main(["--ranks", "8", "--out", str(tmp_path)]) == 2
        assert paper_tables.main(["--render", "--out", str(tmp_path)]) == 2
        assert "expected paper_tables_GPUxP.json" in capsys.readouterr().err
        for arguments in (["--ranks", "9"], ["--budget-s", "0"], ["--loads", "101"], ["--parts", "bench"]):
            with pytest.raises(SystemExit):
                paper_tables.main(arguments)

    def test_the_command_passes_its_options_on(self, tmp_path: Path) -> None:
        command = [str(ROOT / "scripts" / "paper_tables.sh"), "--ranks", "4"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHON": "echo"}
        )
        assert done.returncode == 0 and done.stdout == "scripts/paper_tables.py --ranks 4\n", done.stderr


class TestTrainAtScale:
    @pytest.fixture
    def script(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        return importlib.import_module("train_at_scale")

    def test_steps_that_fit(self, script: ModuleType) -> None:
        assert script.steps_that_fit(500.0, 0.35) == 1350
        assert script.steps_that_fit(10.0, 1.0) == 9
        with pytest.raises(ValueError, match=r"a step takes 8\.00 s, and 10 s are left"):
            script.steps_that_fit(10.0, 8.0)

    def test_the_first_call_chooses_the_steps_and_later_ones_take_them(
        self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[list[str]] = []

        def run(command: list[str], limit_s: float, environment: Any, prefix: str, folder: Path) -> Ended:
            calls.append(command)
            out = Path(command[command.index("--out") + 1])
            if out.name == "timing":
                (out / "16bit").mkdir(parents=True)
                lines = [{"kind": "train", "step": n, "seconds": 9.0 if n < 10 else 0.5} for n in range(1, 31)]
                text = "\n".join(map(json.dumps, [*lines, {"kind": "validation", "step": 30}]))
                (out / "16bit" / "metrics.jsonl").write_text(text)
            return Ended(0, 40.0, [])

        monkeypatch.setattr(script, "run_bounded", run)
        monkeypatch.setattr(script, "find_place", lambda options: GPUS)
        arguments = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path), "data.folder=d"]
        assert script.main(["--arm", "16bit", *arguments]) == 0
        # 95 % of 540 s less 6 for being stopped and 25 of the timing run that were no steps; the call took no time here
        assert [command[-1] for command in calls] == ["trainer.max_steps=30", "trainer.max_steps=950"]
        assert script.main(["--arm", "echo4", *arguments]) == 0
        assert len(calls) == 3 and calls[2][-1] == "trainer.max_steps=950"
        for words in (["--arms", "echo4"], ["--results-name", "train_qwen3_0p6b_h200x4"]):
            assert calls[2][calls[2].index(words[0]) + 1] == words[1]
        assert {"trainer.tensor_parallel=4", "data.folder=d"} <= set(calls[2])
        assert script.main(["--arm", "echo4", *arguments[:-1], "data.folder=other"]) == 2, "not the same run"

    def test_a_cut_run_is_told(
        self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(script, "find_place", lambda options: GPUS)
        arguments = ["--arm", "16bit", "--steps", "9", "--out", str(tmp_path), "--results", str(tmp_path)]
        for ended, words in (
            (Ended(None, 534.0, []), "cut after 534 s; the same command goes on from the last checkpoint"),
            (Ended(1, 3.0, ["ValueError: no data"]), "failed with exit status 1: ValueError: no data"),
        ):
            monkeypatch.setattr(script, "run_bounded", lambda *ignored, ended=ended: ended)
            assert script.main(arguments) == 1 and words in capsys.readouterr().out
