"""The bench of inference: what it times is prefill and decoding, its tables and figure; a run on gloo ranks."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from echo_megatron.bench import ttft, ttft_figure, ttft_tables
from echo_megatron.bench.step_models import MODELS
from echo_megatron.bench.step_timing import Ranks

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS = ["--models", "tiny", "--loads", "0", "--batches", "1", "2", "--decode-batches", "1", "3", "--tokens", "2"]
SETTINGS = ["nccl16", "echo4", "echo4_early8", "echo4_min0", "skipped"]


def _initialize(world_size: int) -> None:
    from megatron.core import parallel_state

    from echo_megatron.pretrain.cpu_shims import install_cpu_shims

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size, distributed_timeout_minutes=1)


def _tokens(rank: int, world_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """First and second new tokens with the cache, and of passes over all tokens."""
    from echo_megatron.bench.ttft_models import Serving

    _initialize(world_size)
    serving = Serving(MODELS["tiny"], 2, torch.device("cpu"), 16)
    prompts = serving._tokens(2, 9)
    first = serving.prefill(2, 9)()
    decoding = serving.decode(2, 9)
    decoding._tokens = first.unsqueeze(1)
    cached = [first.tolist(), decoding.step().tolist()]
    decoding.restart()
    assert decoding.step().tolist() == cached[1]
    whole = []
    for _ in cached:
        positions = torch.arange(prompts.size(1)).expand_as(prompts)
        logits = serving.model(prompts, positions, None, runtime_gather_output=True)
        prompts = torch.cat([prompts, logits[:, -1].argmax(-1, keepdim=True)], 1)
        whole.append(prompts[:, -1].tolist())
    return cached, whole


def _run(rank: int, world_size: int, out: Path, fails: bool) -> dict[str, Any]:
    from echo_megatron.bench.ttft_run import TtftBench
    from echo_megatron.integrations.megatron import Installation

    def failing(installation: Installation) -> None:
        raise RuntimeError("planted")

    if fails and rank == 1:
        Installation.check = failing  # type: ignore[method-assign]
    _initialize(world_size)
    few = ["--settings", "echo4"] if fails else []
    options = ttft.parse_arguments([*ARGUMENTS, *few, "--rounds", "2", "--out", str(out), "--name", "run"], "")
    ranks = Ranks(torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=60)))
    bench = TtftBench(options, torch.device("cpu"), ranks, None, time.monotonic())
    status = bench.run()
    return {"status": status, **bench.results()}


def test_what_is_timed_is_prefill_and_decoding() -> None:
    ((cached, whole),) = run_ranks(_tokens, 1)
    assert cached == whole


def test_a_run_on_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_run, 2, tmp_path, False, timeout_s=120.0)
    assert first["status"] == second["status"] == 0 and not first["left_out"]
    results = json.loads((tmp_path / "run.json").read_text())
    assert results == json.loads(json.dumps({key: value for key, value in first.items() if key != "status"}))
    prefill = {(row["setting"], row["batch"]): row for row in results["prefill"]}
    decode = {(row["setting"], row["batch"]): row for row in results["decode"]}
    assert prefill.keys() == {(name, batch) for name in SETTINGS if name != "echo4_min0" for batch in (1, 2)}
    assert decode.keys() == {(name, batch) for name in SETTINGS for batch in (1, 3)}
    for row in prefill.values():
        assert row["rounds"] == 2 and row["q1_ms"] <= row["ms"] <= row["q3_ms"]
        assert row["message_bytes"] == row["batch"] * 64 * 64 * 4
        assert row["speedup"] == pytest.approx(prefill["nccl16", row["batch"]]["ms"] / row["ms"])
    for row in decode.values():
        assert "graph_ms" not in row and row["context"] == 64
        assert row["eager_tokens_per_s"] == pytest.approx(row["batch"] / row["eager_ms"] * 1e3)
    # 8 sites; of 16 KiB and more a message is quantized, so a decoded token is not, unless min_bytes says so.
    native, echo4, early8 = (prefill[name, 2]["sent_bytes"] for name in ("nccl16", "echo4", "echo4_early8"))
    assert native == 8 * prefill["nccl16", 2]["message_bytes"] and prefill["skipped", 2]["sent_bytes"] == 0
    assert echo4 < early8 < native / 4
    sent = {name: decode[name, 3]["sent_bytes"] for name in SETTINGS}
    assert sent["echo4"] == sent["echo4_early8"] == sent["nccl16"] > sent["echo4_min0"] > sent["skipped"] == 0
    _check_pages(tmp_path, results)


def _check_pages(folder: Path, results: dict[str, Any]) -> None:
    text = (folder / "run.md").read_text()
    assert ttft_tables.markdown(results) == text
    for part in ("# Inference at P = 2", "## Time to first token, load 0 %", "## Tokens a second, launched by Python"):
        assert part in text
    for row in results["decode"]:  # as with graphs
        row |= {"graph_ms": 1.0, "graph_speedup": 2.0, "graph_share": None, "graph_tokens_per_s": 5.0}
    assert "| tiny | echo4 | 5 (2.000) | 5 (2.000) |" in "\n".join(ttft_tables.decode_table(results["decode"], "graph"))
    (folder / "run.json").write_text(json.dumps(results))
    assert ttft.main(["--render", str(folder / "run.json")]) == 0
    assert "## Tokens a second, as a CUDA graph" in (folder / "run.md").read_text()
    assert (folder / "run.png").stat().st_size > 10_000


def test_a_failure_of_one_rank_leaves_the_setting_out(tmp_path: Path) -> None:
    first, second = run_ranks(_run, 2, tmp_path, True, timeout_s=120.0)
    assert first["status"] == second["status"] == 1
    assert first["left_out"] == {"tiny, prefill at load 0: echo4": "failed on another rank"}
    assert second["left_out"] == {"tiny, prefill at load 0: echo4": "RuntimeError: planted"}
    for results in (first, second):
        assert {row["setting"] for row in (*results["prefill"], *results["decode"])} == {"nccl16"}


def test_ratios_are_of_rows_in_one_place() -> None:
    rows = [
        {"model": "a", "batch": 1, "setting": "nccl16", "ms": 10.0},
        {"model": "a", "batch": 1, "setting": "echo4", "ms": 8.0},
        {"model": "a", "batch": 1, "setting": "skipped", "ms": 6.0},
        {"model": "a", "batch": 2, "setting": "echo4", "ms": 8.0},
    ]
    found = ttft_tables.with_ratios(rows, ("model", "batch"), ("ms",))
    assert [row["speedup"] for row in found] == [1.0, 1.25, pytest.approx(10 / 6), None]
    assert found[1]["share"] == pytest.approx(0.5) and found[3]["share"] is None


def test_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert ttft.main([]) == 2 and "torchrun --nproc-per-node 2 scripts/bench_ttft.py" in capsys.readouterr().err
    for arguments in (["--batches", "0"], ["--loads", "101"], ["--models", "gpt2"]):
        with pytest.raises(SystemExit):
            ttft.main(arguments)
    assert "scripts/bench_ttft.py" in (ROOT / "docs" / "bench_ttft.md").read_text()
    ttft_figure.draw(
        tmp_path / "empty.png", {"models": {}, "prefill": [], "decode": [], "world_size": 2, "machine": {"gpu": None}}
    )
