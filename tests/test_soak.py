"""The soak on gloo ranks: it ends in time, counts its calls, and finds what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

from echo_megatron.bench import soak
from echo_megatron.transports.collective import CollectiveTransport


def _soak(rank: int, world_size: int, out: Path, is_wrong: bool) -> int:
    """The exit status; where it is wrong, one of rank 1's results is off by one bit."""
    if is_wrong and rank == 1:
        all_gather = CollectiveTransport.all_gather

        def wrong(self: CollectiveTransport, *args: Any) -> torch.Tensor:
            y = all_gather(self, *args)
            y.view(-1).view(torch.uint8)[0] ^= 1
            return y

        CollectiveTransport.all_gather = wrong  # type: ignore[method-assign]  # in this process only
    arguments = ["--device", "cpu", "--minutes", "0.01", "--load", "0", "--out", str(out), "--name", "soak"]
    options = soak.parse(arguments)
    device = torch.device("cpu")
    return soak.report(soak.soak(device, options), device, options)


def test_calls_of_every_kind_agree_with_the_reference(tmp_path: Path) -> None:
    assert run_ranks(_soak, 2, tmp_path, False) == [0, 0]
    results = json.loads((tmp_path / "soak.json").read_text())
    assert [row["kind"] for row in results["rows"]] == ["all_gather", "all_reduce", "reduce_scatter"]
    assert results["mismatches"] == 0 and results["messages"] == []
    assert results["calls"] == sum(row["calls"] for row in results["rows"]) > 20
    assert all(0 < row["compared"] < row["calls"] for row in results["rows"])
    assert results["transport"] == "collective" and results["world_size"] == 2 and results["seconds"] < 30
    assert results["command"].startswith("python scripts/soak.py --minutes 0.01")
    assert results["peak"]["process_gib"] > 0 and results["commit"]
    assert "| all_reduce |" in (tmp_path / "soak.md").read_text()


def test_a_wrong_bit_is_found_and_named(tmp_path: Path) -> None:
    assert run_ranks(_soak, 2, tmp_path, True) == [1, 1]
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["mismatches"] > 0
    assert any("rank 1: all_gather of" in message and "differs" in message for message in results["messages"])
    assert any("the ranks hold different bits" in message for message in results["messages"])


def test_without_torchrun_it_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert soak.main(["--device", "cpu"]) == 2
    assert "torchrun --nproc-per-node 2 scripts/soak.py" in capsys.readouterr().err
