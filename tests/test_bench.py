"""The bench: rows, formulas, tables, figure, tuning's decisions; and whole runs on gloo."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_megatron.bench import all_reduce, figures, runs, tables, targets, tune, two_collective
from echo_megatron.bench.critical_path import MODELS, Matmuls
from echo_megatron.bench.rows import (
    LARGE_SIZES,
    MIB,
    SMALL_SIZES,
    SMOOTH_SIZES,
    Row,
    all_rows,
    parse_size,
    select,
    smooth_sizes,
)
from echo_megatron.bench.timing import Inputs, Timer
from echo_megatron.bench.traffic import Ceilings, bound_ms, traffic
from echo_megatron.config import Algorithm, Direction, Policy
from echo_megatron.tuning import Choice, Entry, Table

ROOT = Path(__file__).resolve().parent.parent
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
        assert [parse_size(text) for text in ("4096", "64K", "16M", "1G")] == [4096, 1 << 16, 1 << 24, 1 << 30]
        for text in ("", "3", "0", "1.5M", "M", "-2"):
            with pytest.raises(ValueError, match="expected an even number of bytes"):
                parse_size(text)
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


def made_up_entries() -> list[dict[str, Any]]:
    """Entries of all rows at all sizes as a run notes them, NCCL's twice."""
    entries = []
    for row in [*all_rows(), all_rows()[0]]:
        for size in (*SMALL_SIZES, *LARGE_SIZES):
            if not row.times(size):
                continue
            ms = 0.02 + size / 1e9 / (1 if row.bits == 16 else 16 / row.bits)
            for model in MODELS if row.critical else (None,):
                entries.append(
                    {
                        "row": row.name,
                        "policy": row.policy,
                        "state_dtype": row.state_dtype,
                        "transport": None,
                        "algorithm": "two_shot" if row.config else None,
                        "bytes": size,
                        "ms": ms,
                        "call_ms": None,
                        "wire_fraction": 0.5,
                        "hbm_fraction": None if row.bits == 8 else 0.25,
                        "iterations": 80,
                        **({"matmuls": model} if model else {}),
                    }
                )
    return entries


def made_up_results() -> dict[str, Any]:
    entries = all_reduce.with_ratios(made_up_entries())
    return runs.of_one_run(one_run(entries))


def one_run(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"gpu": "NVIDIA H200"},
        "versions": {"torch": "2.11.0"},
        "commit": "abc",
        "command": "torchrun x",
        "date": "2026-01-01",
        "world_size": 2,
        "method": "Medians.",
        "ceilings": {"wire_gb_per_s": 390.0, "hbm_gb_per_s": 4188.0},
        "left_out": {"flashinfer_fp8": "not installed"},
        "rough_places": [],
        "rows": entries,
    }


class TestTables:
    def test_ratios_are_to_the_faster_nccl_of_the_size(self) -> None:
        entries = [
            {"row": "nccl16", "bytes": 1024, "ms": 1.0},
            {"row": "nccl16", "bytes": 4096, "ms": 4.0},
            {"row": "echo4", "bytes": 1024, "ms": 0.25},
            {"row": "echo4", "bytes": 4100, "ms": 1.0, "beside": True},
            {"row": "critical", "bytes": 1024, "ms": -0.1},
            {"row": "nccl16", "bytes": 1024, "ms": 0.5},
            {"row": "nccl16", "bytes": 4096, "ms": 5.0},
        ]
        found = {(e["row"], e["bytes"]): e for e in all_reduce.with_ratios(entries)}
        assert len(found) == 5
        assert found["nccl16", 1024]["ms"] == 0.5 and found["nccl16", 4096]["ms"] == 4.0
        assert found["nccl16", 4096]["drift"] == pytest.approx(0.25)
        ratios = {key: entry["nccl_ratio"] for key, entry in found.items()}
        assert ratios == {
            ("nccl16", 1024): 1.0,
            ("nccl16", 4096): 1.0,
            ("echo4", 1024): 2.0,
            ("echo4", 4100): 4.0,
            ("critical", 1024): None,
        }

    def test_rough_places(self) -> None:
        def entry(size: int, ms: float, row: str = "echo4") -> dict[str, Any]:
            return {"row": row, "bytes": size, "ms": ms}

        assert tables.rough_places([entry(1000, 1.0), entry(1004, 1.09), entry(1200, 2.0)]) == []
        assert tables.rough_places([entry(1000, 1.0), entry(1004, 2.0, "echo8")]) == []
        [place] = tables.rough_places([entry(1000, 1.2), entry(1004, 1.0), entry(996, 1.15)])[:1]
        assert place.startswith("echo4: 996 B 1.1500 ms, 1,004 B 1.0000 ms")

    def test_paper_table_has_the_paper_s_rows_and_ours_beside(self) -> None:
        lines = tables.paper_table(made_up_results()["rows"])
        assert (
            "| + fused compensator | paper | 0.44 (1.59) | 0.75 (1.69) | 1.19 (2.06) | 2.15 (2.14) | 4.30 (2.09) |"
            in lines
        )
        ours = [line for line in lines if "| ours" in line]
        assert len(ours) == 6 + len(MODELS)
        assert "| Echo 4-bit | ours | 0.037 (" in "\n".join(ours)

    def test_markdown_and_overview(self) -> None:
        results = made_up_results()
        text = tables.markdown(results)
        for expected in ("## Ratios to NCCL", "flashinfer_fp8: not installed", "wire_gb_per_s 390", "torchrun x"):
            assert expected in text
        lines = tables.overview_table(results["rows"], ["echo4", "nccl16"], LARGE_SIZES[:2])
        assert lines[0] == "| row | 64 MiB | 128 MiB |"
        assert [line.split(" | ")[0] for line in lines[2:]] == ["| echo4 (rotated)", "| echo4 (zero_aware)", "| nccl16"]

    def test_figure(self, tmp_path: Path) -> None:
        path = tmp_path / "all_reduce.json"
        path.write_text(json.dumps(made_up_results()))
        assert all_reduce.main(["--render", str(path)]) == 0
        assert path.with_suffix(".png").stat().st_size > 20_000
        assert path.with_suffix(".md").read_text().startswith("# One all-reduce at P = 2")
        assert {*figures.COLOURS, *figures.SMALL_COLOURS} <= {row.name for row in all_rows()}

    def test_targets_are_of_rows_that_exist(self) -> None:
        assert {*targets.TARGETS, *targets.BOUNDED} <= {row.name for row in all_rows()}
        assert all(len(of) == len(LARGE_SIZES) for _, of in targets.TARGETS.values())

    def test_small_messages_have_symm_mem_s_time_as_limit_where_it_is_a_tenth_less(self) -> None:
        def entry(row: str, size: int, ms: float) -> dict[str, Any]:
            return {"row": row, "bytes": size, "ms": ms, "nccl_ratio": 0.017 / ms}

        entries = [entry("symm_mem_one_shot", 4096, 0.017), entry("symm_mem_one_shot", 16384, 0.012)]
        entries += [entry("auto", 4096, 0.0175), entry("auto", 16384, 0.013), entry("auto", 1 << 20, 0.001)]
        lines = targets.small_table(entries)
        assert "| target | 18.0 | 12.0 |  |" in lines and "| auto | **17.5** | 13.0 | 1.0 |" in lines
        assert targets.slower_than_nccl(entries) == "Slower than NCCL: auto at 4 KiB (0.97)."


class TestOnto:
    """Rows of a new run within the results of earlier ones."""

    @staticmethod
    def new_run(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
        rows = [{"policy": None, "state_dtype": None, **entry} for entry in entries]
        return runs.of_one_run({**one_run(all_reduce.with_ratios(rows)), "left_out": {}, "commit": "def", **fields})

    def test_rows_are_replaced_by_series_and_size_and_keep_their_ratio(self) -> None:
        base = made_up_results()
        echo4 = {"row": "echo4", "policy": "rotated", "ms": 0.01, "bytes": 64 * MIB}
        critical = {"row": "echo4_paper_critical", "policy": "zero_aware", "state_dtype": "bf16", "bytes": 64 * MIB}
        new = self.new_run(
            {"row": "nccl16", "bytes": 64 * MIB, "ms": 0.04},
            echo4,
            {**echo4, "bytes": 64 * MIB + 4, "beside": True},
            {**critical, "matmuls": "llama3_8b", "ms": 0.02},
            method="Another.",
        )
        result = runs.merged(base, new, ["echo4 rotated"])
        before, after = ({(tables.key_of(row), row["bytes"]): row for row in of["rows"]} for of in (base, result))
        changed = {place for place in after if after[place] != before.get(place)}
        assert len(after) == len(before) + 1 and len(result["rows"]) == len(after)
        assert {(key[0], key[3], size) for key, size in changed} == {
            ("echo4", None, 64 * MIB),
            ("echo4", None, 64 * MIB + 4),
            ("echo4_paper_critical", "llama3_8b", 64 * MIB),
        }
        assert {after[place]["run"] for place in changed} == {1}
        ratios = {place[0][0]: after[place]["nccl_ratio"] for place in changed}
        assert ratios == {"echo4": 4.0, "echo4_paper_critical": 2.0}
        assert [run["commit"] for run in result["runs"]] == ["abc", "def"]
        assert result["runs"][1]["nccl16_ms"] == {str(64 * MIB): 0.04}, "NCCL's row stays the base's"
        assert result["commit"] == "abc" and result["left_out"] == base["left_out"]
        first, second = tables.provenance(result)
        assert "commit abc" in first and "commit def" in second and "Method: Another." in second
        assert second.startswith("echo4 (rotated), echo4_paper_critical (zero_aware, bf16, llama3_8b): 2026-01-01.")
        assert tables.markdown(result).count("commit def") == 1

    def test_a_run_without_rows_left_is_dropped(self) -> None:
        echo4 = {"row": "echo4", "policy": "rotated", "bytes": 64 * MIB}
        result = made_up_results()
        for commit in ("def", "ghi"):
            result = runs.merged(result, self.new_run({**echo4, "ms": 0.01}, commit=commit), [])
        assert [run["commit"] for run in result["runs"]] == ["abc", "ghi"]
        assert {row["run"] for row in result["rows"]} == {0, 1}

    def test_why_a_row_was_left_out_counts_until_it_is_tried_again(self) -> None:
        base = {**made_up_results(), "left_out": {"echo4 rotated": "late", "echo8 rotated": "late"}}
        new = self.new_run(left_out={"echo4_paper zero_aware bf16": "failed"})
        result = runs.merged(base, new, ["echo4 rotated", "echo4_paper zero_aware bf16"])
        assert result["left_out"] == {"echo8 rotated": "late", "echo4_paper zero_aware bf16": "failed"}
        assert len(result["rows"]) == len(base["rows"]), "what a run did not measure stays"

    def test_refuses_other_results(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        with pytest.raises(ValueError, match="expected results of this bench; got FileNotFoundError"):
            runs.load(path, None, 2)
        path.write_text(json.dumps({"rows": []}))
        with pytest.raises(ValueError, match="expected results of this bench; got KeyError"):
            runs.load(path, None, 2)
        results = made_up_results()
        path.write_text(json.dumps(results))
        assert runs.load(path, "NVIDIA H200", 2) == results
        for gpu, world_size in ((None, 2), ("NVIDIA H200", 4)):
            with pytest.raises(ValueError, match="as here; got 2 × NVIDIA H200; write to a file of its own"):
                runs.load(path, gpu, world_size)
        del results["rows"][0]["run"]
        path.write_text(json.dumps(results))
        with pytest.raises(ValueError, match="expected runs with command"):
            runs.load(path, "NVIDIA H200", 2)


class TestTimer:
    def test_added_time_alternates_and_work_left_behind_leads_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("echo_megatron.bench.timing.agree_max", lambda value, device: value)
        order: list[str] = []
        timer = Timer(torch.device("cpu"), 2, 8, 1e9, lambda: order.append("|"))
        for leads_in, period in ((False, "|a|b"), (True, "a|ab|b")):
            order.clear()
            assert timer.added(lambda: order.append("a"), lambda: order.append("b"), leads_in).iterations == 8
            assert "".join(order).endswith(period * 10)


class TestTune:
    def test_candidates_are_legal_entries(self) -> None:
        for size, multiprocessors in itertools.product(tune.SIZES, (132, 64, 20)):
            choices = tune.candidates(size, multiprocessors)
            assert len(set(choices)) == len(choices)
            assert max(choice.num_blocks for choice in choices) == multiprocessors
            assert all(Entry.from_json(Entry(choice).to_json()).choice == choice for choice in choices)

    def test_the_smallest_grid_among_the_as_good(self) -> None:
        def choice(blocks: int, depth: int = 1) -> Choice:
            return Choice(Algorithm.one_shot, blocks, depth)

        times = {choice(16): 1.2, choice(32, 2): 1.02, choice(32): 1.01, choice(132): 1.0}
        assert tune.fastest(times) == choice(32, 2)
        assert tune.fastest({**times, choice(132): 0.9}) == choice(132)

    def test_thresholds_lie_between_sizes_and_equal_neighbours_are_one(self) -> None:
        one, two = Choice(Algorithm.one_shot, 16, 1), Choice(Algorithm.two_shot, 132, 2)
        key = Entry(one, 2, Policy.rotated, 4, Direction.forward)
        entries = tune.thresholds(key, {1024: one, 4096: one, 16384: two, 65536: two})
        assert [(entry.choice, entry.below_bytes) for entry in entries] == [(one, 8192), (two, None)]
        table = Table(tuple(entries), {})
        assert table.choose(4096, 2, Policy.rotated, 4, Direction.forward) == one
        assert table.choose(1 << 40, 2, Policy.rotated, 4, Direction.forward) == two

    def test_exact_below_has_no_gaps_and_holds_for_all(self) -> None:
        first, second, third = tune.SIZES[:3]
        assert tune.exact_below([{first, second}, {first, second, third}]) == math.isqrt(second * third)
        assert tune.exact_below([{first, third}]) == math.isqrt(first * second)
        assert tune.exact_below([{second}]) == 0

    def test_the_written_table_is_read(self, tmp_path: Path) -> None:
        table = Table((Entry(Choice(Algorithm.one_shot, 16, 1)), Entry(Choice(Algorithm.two_shot, 2, 1))), {2: 4096})
        text = tune.dump({**table.to_json(), "made_by": {"commit": "abc"}})
        assert Table.from_json(json.loads(text), "x") == Table(table.entries, table.exact_below, ("x",))
        assert text.count("num_blocks") == 2 and '"depth": 1},\n  {' in text, "one entry a line"


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


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo_megatron.cli", "bench", *arguments]
    folders = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": folders, "ECHO_COMMIT": "abc"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


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
