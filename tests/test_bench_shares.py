"""The bench of sequence parallelism's collectives: rows, formulas, tables, figure, and a whole run on gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import bench

from echo_megatron.bench import all_reduce, figures, shares
from echo_megatron.bench.rows import MIB, Row, select
from echo_megatron.bench.traffic import share_traffic
from echo_megatron.config import Collective, Direction
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site

NAMES = {"nccl_reduce_scatter", "nccl_all_gather", "echo4_reduce_scatter", "echo8_all_gather", "echo4_all_gather"}
RECORD = 1 / 32 + 16 / 4096  # bytes a value of a record beside its codes, rotated


def row_of(name: str, policy: str | None = None, state_dtype: str | None = None) -> Row:
    [row] = [r for r in shares.all_rows() if (r.name, r.policy, r.state_dtype) == (name, policy, state_dtype)]
    return row


def test_rows() -> None:
    rows = shares.all_rows()
    assert {row.name for row in rows} == NAMES and len({row.key for row in rows}) == len(rows)
    assert {row.state_dtype for row in rows if row.name == "echo4_reduce_scatter"} == {None, "bf16", "compact"}
    for row in rows:
        assert row.is_baseline == row.name.startswith("nccl")
        if row.config is not None and "gather" in row.name:
            assert row.config.gather_bits == row.bits and row.state_dtype is None
    assert {row.name for row in select(rows, ["echo8_all_gather"])} == {*shares.BASELINES.values(), "echo8_all_gather"}
    assert {shares.collective_of(name) for name in NAMES} == {Collective.reduce_scatter, Collective.all_gather}
    assert {name for name, _ in shares.TARGETS} < NAMES


@pytest.mark.parametrize(
    ("row", "wire", "hbm"),  # bytes a value of the larger tensor, at two ranks
    [
        (("nccl_reduce_scatter",), 1, 3),
        (("nccl_all_gather",), 1, 3),
        (("echo4_reduce_scatter", "rotated"), 0.25 + RECORD / 2, 3),
        (("echo4_reduce_scatter", "rotated", "bf16"), 0.25 + RECORD / 2, 3 + 3),
        (("echo4_reduce_scatter", "rotated", "compact"), 0.25 + RECORD / 2, 3 + 1.125),
        (("echo8_all_gather", "rotated"), 0.5 + RECORD / 2, 3),
        (("echo4_all_gather", "zero_aware"), 0.25 + RECORD / 2, 3),
    ],
)
def test_bytes(row: tuple[str, ...], wire: float, hbm: float) -> None:
    num_values = 1 << 24
    moved = share_traffic(row_of(*row), num_values, 2)
    assert moved.wire / num_values == pytest.approx(wire, rel=1e-6)
    assert moved.hbm / num_values == pytest.approx(hbm, rel=1e-6)


def entry(row: str, ms: float, size: int = 64 * MIB, state_dtype: str | None = None) -> dict[str, Any]:
    policy = None if row.startswith("nccl") else "rotated"
    fractions = {"wire_fraction": 0.5, "hbm_fraction": 0.25}
    return {"row": row, "policy": policy, "state_dtype": state_dtype, "bytes": size, "ms": ms, **fractions, "run": 0}


def measured() -> dict[str, Any]:
    entries = [
        *(entry(row, ms, size) for row, ms in (("nccl_reduce_scatter", 4.0), ("nccl_all_gather", 2.0))
          for size in (64 * MIB, 1024 * MIB)),
        entry("nccl_all_gather", 1.7),
        entry("echo4_reduce_scatter", 1.0, 1024 * MIB, "compact"),
        entry("echo4_reduce_scatter", 2.0, state_dtype="bf16"),
        entry("echo8_all_gather", 1.0),
    ]  # fmt: skip
    rows = all_reduce.with_ratios(entries, lambda name: shares.BASELINES[shares.collective_of(name)])
    machine = {"gpu": "NVIDIA H200", "device": "cuda"}
    run = {"command": "c", "commit": "abc", "date": "2026-01-01", "machine": machine, "versions": {}, "method": "m"}
    return {**run, "ceilings": None, "runs": [run], "world_size": 2, "rows": rows, "left_out": {}, "collectives": []}


def test_ratios_are_to_the_same_collective_of_nccl() -> None:
    ratios = {(row["row"], row["bytes"] // MIB): row["nccl_ratio"] for row in measured()["rows"]}
    assert ratios["echo4_reduce_scatter", 1024] == 4.0 and ratios["echo4_reduce_scatter", 64] == 2.0
    assert ratios["echo8_all_gather", 64] == pytest.approx(1.7), "NCCL's faster measurement"


def test_page_and_figure(tmp_path: Path) -> None:
    results = measured()
    page = shares.markdown(results)
    assert "| echo4_reduce_scatter (rotated, bf16) | 2.8 | 2.00 |  |" in page
    assert "| echo4_reduce_scatter (rotated, compact) | 2.8 |  | **4.00** |" in page
    assert "| echo8_all_gather (rotated) | 1.7 | **1.70** |  |" in page
    assert "| echo4_reduce_scatter (rotated, compact) | 1.000 | 0.500 (50%) | 0.250 (25%) | 8.00 |" in page
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(results))
    all_reduce.render(path)
    assert path.with_suffix(".md").read_text() == page
    assert path.with_suffix(".png").stat().st_size > 10_000
    figures.draw_shares(tmp_path / "empty.png", {**results, "rows": []})


class Calls:
    """Stands in for a row's call on rank 1 of 2: the reference's outputs, or with `change` others."""

    def __init__(self, row: Row, change: float = 0.0) -> None:
        self.row, self.change, self.num_calls = row, change, 0
        self.simulated = None if row.config is None else SimulatedGroup(2, row.config)
        generator = torch.Generator().manual_seed(0)
        self.xs = [torch.randn(1_000 if "gather" in row.name else 2_000, generator=generator).bfloat16()
                   for _ in range(2 * shares.CHECKED_SITES)]  # fmt: skip

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        xs = self.xs[2 * self.num_calls : 2 * self.num_calls + 2]
        site = Site(self.num_calls, Direction.forward, bits=self.row.bits)
        self.num_calls += 1
        assert torch.equal(x, xs[1])
        if self.simulated is None:
            found = torch.cat(xs) if "gather" in self.row.name else (xs[0] + xs[1]).view(2, -1)[1]
        elif "gather" in self.row.name:
            found = self.simulated.all_gather(xs, site.bits)
        else:
            found = self.simulated.reduce_scatter(xs, site)[1]
        return found + self.change

    def check(self) -> None:
        pass


@pytest.mark.parametrize("row", shares.all_rows(), ids=lambda row: row.key)
def test_a_row_that_gives_other_values_is_refused(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "agree_max", lambda value, device: value)
    options = {"rank": 1, "world_size": 2, "device": torch.device("cpu"), "num_share_values": 1_000}
    shares.check(Calls(row), row, **options)
    with pytest.raises(AssertionError, match=r"other values on one rank"):
        shares.check(Calls(row, change=0.125), row, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="small sizes on gloo")
def test_a_run_on_cpu(tmp_path: Path) -> None:
    options = ["--sizes", "64K", "--warmup", "1", "--iterations", "8", "--max-s", "0.05", "--policies", "rotated"]
    rows = ["--rows", "echo4_reduce_scatter", "echo4_all_gather", "--no-check", "--out", str(tmp_path)]
    done = bench("--sequence-parallel", "--num-ranks", "2", *options, *rows)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "sequence_parallel.json").read_text())
    assert results["command"].startswith("torchrun --nproc-per-node 2 scripts/bench_sequence_parallel.py --rows")
    assert not results["left_out"] and results["collectives"] == ["reduce_scatter", "all_gather"]
    assert {row["row"] for row in results["rows"]} == NAMES - {"echo8_all_gather"}
    assert len(results["rows"]) == 2 + 3 + 1
    assert all(row["ms"] > 0 and row["nccl_ratio"] > 0 for row in results["rows"])


def test_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        all_reduce.main(["--sequence-parallel", "--tune"])
    assert "expected none of --tune" in capsys.readouterr().err
