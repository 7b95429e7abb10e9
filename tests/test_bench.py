"""The bench: rows, formulas, inputs, timing, the two-collective baseline; and whole runs on gloo."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bench_runs import ROOT, bench

from echo_megatron.arguments import message_size
from echo_megatron.bench import all_reduce, two_collective
from echo_megatron.bench.critical_path import Matmuls
from echo_megatron.bench.rows import (
    LARGE_SIZES,
    MIB,
    SMALL_SIZES,
    SMOOTH_SIZES,
    Row,
    all_rows,
    select,
    smooth_sizes,
)
from echo_megatron.bench.timing import Inputs, Timer
from echo_megatron.bench.traffic import Ceilings, bound_ms, traffic

NAMES = {
    *("nccl16", "symm_mem_one_shot", "symm_mem_two_shot", "two_collective_8", "two_collective_4", "flashinfer_fp8"),
    *("echo8", "echo4", "echo4_unfused", "echo4_local", "echo8_local", "echo4_consensus", "echo4_consensus_critical"),
    *("echo4_local_critical", "echo4_paper", "echo8_paper", "echo4_paper_critical", "auto"),
    *("echo4_one_shot", "echo4_two_shot"),
}


def row_of(name: str, policy: str | None = None, state_dtype: str | None = None) -> Row:
    [row] = [r for r in all_rows() if (r.name, r.policy, r.state_dtype) == (name, policy, state_dtype)]
    return row


class TestRows:
    def test_names_and_quantizers(self) -> None:
        rows = all_rows()
        assert {row.name for row in rows} == {*NAMES, "nccl16_critical"}
        assert len({row.key for row in rows}) == len(rows) and rows[0].name == "nccl16"
        for name in ("echo8", "echo4", "echo4_unfused", "echo4_local", "echo4_consensus_critical", "auto"):
            assert {row.policy for row in rows if row.name == name} == {"rotated", "zero_aware"}
        for row in rows:
            if row.config is not None:
                assert row.config.bits == row.bits
                assert row.config.compensates == (row.name not in ("echo4", "echo8", "echo4_unfused")), row.name
        assert {row.state_dtype for row in rows if row.name == "echo4_local"} == {"bf16", "compact"}

    def test_selection_keeps_the_baseline(self) -> None:
        assert {row.name for row in select(all_rows(), ["echo4"])} == {"nccl16", "echo4"}
        with pytest.raises(ValueError, match=r"--rows: expected some of nccl16, .*; got echo5"):
            select(all_rows(), ["echo5"])

    def test_sizes(self) -> None:
        assert [message_size(text) for text in ("4096", "64K", "16M", "1G")] == [4096, 1 << 16, 1 << 24, 1 << 30]
        for text in ("", "3", "0", "1.5M", "M", "-2"):
            with pytest.raises(argparse.ArgumentTypeError, match="expected an even number of bytes"):
                message_size(text)
        assert set(SMOOTH_SIZES) <= {*SMALL_SIZES, *LARGE_SIZES}
        for base in SMOOTH_SIZES:
            less, more, larger = smooth_sizes(base)
            assert (base - less, more - base) == (4, 4)
            assert base * 1.04 < larger < base * 1.06 and larger // 2 % 2 == 1


class TestTraffic:
    n, P = 1 << 24, 2  # 32 MiB

    @pytest.mark.parametrize(
        ("row", "algorithm", "wire", "hbm"),  # bytes a value
        [
            (("nccl16",), None, 2, 4),
            (("symm_mem_one_shot",), None, 2, 4),
            (("two_collective_4",), None, 0.5 + 2 / 128, 4 + 7 * (0.5 + 2 / 128)),
            (("echo4", "rotated"), "one_shot", 0.5 + 1 / 32 + 16 / 4096, 4),
            (("echo4", "rotated"), "two_shot", 0.5 + 1 / 32 + 16 / 4096, 4),
            (("echo4", "zero_aware"), "two_shot", 0.5 + 4 / 128 + 16 / 4096, 4),
            (("echo4_local", "rotated", "bf16"), "two_shot", 0.5 + 1 / 32 + 16 / 4096, 4 + 6),
            (("echo4_local", "rotated", "compact"), "two_shot", 0.5 + 1 / 32 + 16 / 4096, 4 + 2.25),
            (("echo4_consensus_critical", "rotated", "bf16"), "two_shot", 0.5 + 1 / 32 + 16 / 4096, 4 + 2),
            (("echo8_local", "rotated", "bf16"), "two_shot", 1 + 1 / 32 + 16 / 4096, 4 + 6),
            (("echo4_unfused", "rotated", "bf16"), "one_shot", 0.5 + 1 / 32 + 16 / 4096, 38),
            (("auto", "rotated", "compact"), "exact", 2, 4),
            (("auto", "rotated", "compact"), "native", 2, 4),
        ],
    )
    def test_bytes(self, row: tuple[str, ...], algorithm: str | None, wire: float, hbm: float) -> None:
        moved = traffic(row_of(*row), self.n, self.P, algorithm)
        assert moved is not None
        assert moved.wire / self.n == pytest.approx(wire, rel=1e-6)
        assert moved.hbm / self.n == pytest.approx(hbm, rel=1e-6)

    def test_the_whole_consensus_call_moves_more_than_its_critical_path(self) -> None:
        whole, path = (
            traffic(row_of(name, "rotated", "bf16"), self.n, 4, "two_shot")
            for name in ("echo4_consensus", "echo4_consensus_critical")
        )
        assert whole and path and whole.wire == path.wire and whole.hbm > 2 * path.hbm

    def test_what_is_not_known_has_no_bound(self) -> None:
        assert traffic(row_of("flashinfer_fp8"), self.n, 2, None) is None

    def test_one_shot_grows_with_the_ranks_and_two_shot_hardly(self) -> None:
        row = row_of("echo4", "rotated")
        wires = {}
        for algorithm in ("one_shot", "two_shot"):
            moved = traffic(row, self.n, 8, algorithm)
            assert moved is not None
            wires[algorithm] = moved.wire
        assert wires["one_shot"] == pytest.approx(4 * wires["two_shot"], rel=1e-3)

    def test_bound(self) -> None:
        moved = traffic(row_of("nccl16"), 500_000_000, 2, None)
        assert moved is not None
        assert bound_ms(moved, Ceilings(1000, 1000, 1000, 4000)) == pytest.approx((1.0, 0.5))


class TestInputs:
    def test_buffers_are_taken_in_turn_and_do_not_overlap(self) -> None:
        inputs = Inputs(torch.zeros(1000), num_values=130, calls=110, world_size=2)
        assert len(inputs.buffers) == 3
        starts = [inputs.next().data_ptr() for _ in range(4)]
        assert starts[3] == starts[0] and len(set(starts)) == 3
        assert all((start - starts[0]) % (128 * 4) == 0 for start in starts)

    def test_in_place_sums_stay_finite(self) -> None:
        for world_size in (2, 8):
            inputs = Inputs(torch.zeros(300), num_values=200, calls=110, world_size=world_size)
            inputs.fill()
            for _ in range(110):
                inputs.before()
                inputs.next().mul_(world_size)
            assert inputs.buffers[0].bfloat16().isfinite().all()


class TestTimer:
    def test_added_time_alternates_and_work_left_behind_leads_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("echo_megatron.bench.timing.agree_max", lambda value, device: value)
        order: list[str] = []
        timer = Timer(torch.device("cpu"), 2, 8, 1e9, lambda: order.append("|"))
        for leads_in, period in ((False, "|a|b"), (True, "a|ab|b")):
            order.clear()
            assert timer.added(lambda: order.append("a"), lambda: order.append("b"), leads_in).iterations == 8
            assert "".join(order).endswith(period * 10)


class TestTwoCollective:
    @pytest.mark.parametrize("bits", [4, 8])
    def test_round_trip(self, bits: int) -> None:
        values = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
        values[1] = 0
        records = two_collective.encode(values, bits)
        assert records.shape == (3, two_collective.record_bytes(512, bits)) and records.shape[1] % 128 == 0
        decoded = two_collective.decode(records, 512, bits)
        step = values.abs().unflatten(-1, (-1, 128)).amax(-1).repeat_interleave(128, -1) / (2 ** (bits - 1) - 1)
        assert ((decoded - values).abs() <= 0.501 * step + 1e-3 * values.abs()).all()
        assert (decoded[1] == 0).all()

    def test_the_kernels_are_the_same_as_pytorch(self) -> None:
        """In Triton's interpreter, which has to be chosen before Triton is imported: a process of its own."""
        pytest.importorskip("triton")
        code = """
import torch
from echo_megatron.bench import two_collective as plain, two_collective_kernels as kernels
torch.manual_seed(0)
for world_size, num_values in ((2, 128 * 40 + 5), (3, 5000)):
    for bits in (4, 8):
        length = -(-num_values // (128 * world_size)) * 128
        x = torch.randn(num_values)
        x[130:300] = 0
        size, used = plain.record_bytes(length, bits), length * bits // 8 + length // 128 * 2
        records = kernels.quantize(x, world_size, length, size, bits)
        padded = torch.nn.functional.pad(x, (0, length * world_size - num_values)).view(world_size, length)
        expected = plain.encode(padded, bits)
        assert torch.equal(records[:, :used], expected[:, :used])
        summed = plain.encode(plain.decode(expected, length, bits).sum(0, keepdim=True), bits)[0]
        assert torch.equal(kernels.reduce(expected, length, bits)[:used], summed[:used])
        decoded = plain.decode(expected, length, bits).flatten()[:num_values]
        assert torch.equal(kernels.dequantize(expected, x, length, bits), decoded)
"""
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr


def test_matmuls_of_a_message() -> None:
    assert Matmuls.fits("llama3_8b", 64 * MIB, 2) and not Matmuls.fits("qwen3_0.6b", 1000, 2)
    matmuls = Matmuls("qwen3_0.6b", 4 * 2048, 2, torch.device("cpu"))
    seen: list[torch.Tensor] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    matmuls.around(call)()
    matmuls.alone()
    assert [tuple(x.shape) for x in seen] == [(4, 1024)]


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes on gloo")
CPU_ROWS = [
    "two_collective_4",
    "echo4",
    "echo4_unfused",
    "echo4_paper",
    "echo4_paper_critical",
    "auto",
    "flashinfer_fp8",
]


@pytest.fixture(scope="module")
def cpu_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two processes."""
    folder = tmp_path_factory.mktemp("bench")
    options = [
        "--sizes",
        "8K",
        "64K",
        "--warmup",
        "1",
        "--iterations",
        "8",
        "--models",
        "qwen3_0.6b",
        "--max-s",
        "0.05",
    ]
    out = ["--rows", *CPU_ROWS, "--policies", "zero_aware", "--out", str(folder), "--name", "cpu"]
    done = bench("--num-ranks", "2", *options, *out)
    assert done.returncode == 0, done.stderr
    return folder / "cpu.json"


@on_cpu
def test_a_run_on_cpu(cpu_results: Path) -> None:
    results = json.loads(cpu_results.read_text())
    assert results["world_size"] == 2 and results["ceilings"] is None and "date" in results
    assert results["command"].startswith("torchrun --nproc-per-node 2 scripts/bench_all_reduce.py --rows")
    assert results["commit"] == "abc"
    assert [run["commit"] for run in results["runs"]] == ["abc"] and {row["run"] for row in results["rows"]} == {0}
    assert list(results["left_out"]) == ["flashinfer_fp8"]
    entries = {(e["row"], e["bytes"]): e for e in results["rows"]}
    assert {name for name, _ in entries} == {"nccl16", *CPU_ROWS} - {"flashinfer_fp8"}
    assert entries["auto", 8192]["algorithm"] == "native" and entries["auto", 65536]["algorithm"] == "one_shot"
    assert entries["echo4_paper_critical", 65536]["matmuls"] == "qwen3_0.6b"
    assert all(e["ms"] > 0 and e["nccl_ratio"] > 0 for e in results["rows"] if not e.get("matmuls"))
    assert len([size for name, size in entries if name == "echo4"]) == 2 + 3, "sizes beside 64 KiB"


@on_cpu
def test_a_run_out_of_budget_onto_results(cpu_results: Path, tmp_path: Path) -> None:
    options = ["--rows", "echo4", "--sizes", "8K", "--budget-s", "0", "--no-check", "--out", str(tmp_path)]
    done = bench("--num-ranks", "2", *options, "--onto", str(cpu_results), "--name", "onto")
    assert done.returncode == 0 and "left out: echo4 rotated: --budget-s 0" in done.stdout, done.stderr
    before, after = (json.loads(path.read_text()) for path in (cpu_results, tmp_path / "onto.json"))
    assert after["rows"] == before["rows"] and after["runs"] == before["runs"], "nothing was measured, nothing changes"
    assert set(after["left_out"]) == {*before["left_out"], "nccl16", "echo4 rotated", "echo4 zero_aware"}


@on_cpu
def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert all_reduce.main(["--quick"]) == 2
    assert "--num-ranks: expected at least 2 ranks, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        all_reduce.main(["--sizes", "3"])
    assert "expected an even number of bytes" in capsys.readouterr().err
