"""`trainer.inspect_every` and `echo-megatron inspect`: what a run logs, and what is read and shown of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from echo_megatron import cli
from echo_megatron.diagnostics import QUANTITIES
from echo_megatron.diagnostics_report import load_inspection, remarks
from echo_megatron.pretrain.schema_checks import validate
from tests.pretrain_runs import log_path, losses, make_config, train

ECHO4 = ("tp_comm.bits=4", "tp_comm.min_bytes=0")
SITES = [
    f"forward/layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attention.linear_proj", "mlp.linear_fc2")
]
SITES += [
    f"backward/layers.{layer}.{name}" for layer in (1, 0) for name in ("mlp.linear_fc1", "self_attention.linear_qkv")
]


def write_events(folder: Path, steps: dict[int, dict[str, float]]) -> Path:
    """Events as a run logs them, backward sites of the last layer last, as from the second of two pipeline stages."""
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step, values in steps.items():
            writer.add_scalar("lm loss", 1.0, step)
            for site in [*SITES[:4], *SITES[6:], *SITES[4:6]]:
                for quantity in QUANTITIES:
                    if quantity in values:
                        writer.add_scalar(f"echo/{site}/{quantity}", values[quantity], step)
    return folder


HEALTHY = dict.fromkeys(QUANTITIES, 0.25) | {"underflowed": 0.0, "saturated": 0.0, "bytes": 2192, "exact_calls": 0}


def test_a_run_logs_its_measured_steps_and_trains_the_same_bits(data: dict[str, Any], tmp_path: Path) -> None:
    """With two pipeline stages, whose sites one process logs; two microbatches; a measured step is in the middle."""
    options = (*ECHO4, "trainer.pipeline_parallel=2", "trainer.max_steps=5", "trainer.save_interval=0")
    runs = [
        make_config(tmp_path, data, f"every{every}", *options, f"trainer.inspect_every={every}") for every in (0, 2)
    ]
    for config in runs:
        statuses = train(config)
        assert set(statuses) == {0}, log_path(config).read_text()
    plain, inspected = runs
    assert losses(inspected) == losses(plain)
    assert tp_bytes(inspected) == tp_bytes(plain), "measuring is not the run's traffic"
    with pytest.raises(ValueError, match=r"its events hold no measurements .* run it with inspect_every"):
        load_inspection(plain.run_dir)
    inspection = load_inspection(inspected.run_dir)
    assert list(inspection.steps) == [2, 4]
    for sites in inspection.steps.values():
        assert [f"{site.direction}/{site.site}" for site in sites] == SITES
        for site in sites:
            assert set(site.values) == set(QUANTITIES)
            assert 0 < site.values["bound_used"] < 1.01 and 0 < site.values["relative_error"] < 1
        assert remarks(sites) == []


def tp_bytes(config: Any) -> list[int]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record["tp_bytes"] for record in map(json.loads, lines) if record["kind"] == "train"]


def test_where_nothing_is_quantized_there_is_nothing_to_inspect(data: dict[str, Any], tmp_path: Path) -> None:
    validate(make_config(tmp_path, data, "a", *ECHO4, "trainer.inspect_every=5"))
    with pytest.raises(ValueError, match=r"trainer\.inspect_every: expected 0 with tp_comm=nccl, got 5"):
        validate(make_config(tmp_path, data, "a", "trainer.inspect_every=5"))
    with pytest.raises(ValueError, match=r"expected 0 with trainer\.tensor_parallel=1, got 5"):
        validate(make_config(tmp_path, data, "a", *ECHO4, "trainer.inspect_every=5", "trainer.tensor_parallel=1"))
    with pytest.raises(ValueError, match=r"trainer\.inspect_every: expected at least 0, got -1"):
        make_config(tmp_path, data, "a", "trainer.inspect_every=-1")


def test_table_json_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_events(tmp_path / "run", {10: HEALTHY, 20: HEALTHY | {"relative_error": 0.5}})
    assert cli.main(["inspect", str(run), "--figure", str(tmp_path / "errors.png")]) == 0
    printed = capsys.readouterr().out
    assert "run, step 20, forward" in printed and "run, step 20, backward" in printed
    assert "0.5000" in printed and "measured steps: 10, 20" in printed and "docs/inspect.md" not in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    order = [printed.index(row) for row in ("0 linear_proj", "1 linear_fc2", "1 linear_fc1", "0 linear_qkv")]
    assert order == sorted(order), "in the order of the passes"
    with Image.open(tmp_path / "errors.png") as picture:
        assert picture.size == (1650, 975) and len(picture.convert("L").getcolors() or []) > 10

    assert cli.main(["inspect", str(run), "--step", "10", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["step"] == 10 and content["measured_steps"] == [10, 20]
    assert [f"{site['direction']}/{site['site']}" for site in content["sites"]] == SITES
    assert content["sites"][0] | {"direction": 0, "site": 0} == {"direction": 0, "site": 0, **HEALTHY}


def test_what_is_out_of_its_range_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"relative_error": math.nan, "bound_used": 1.5, "underflowed": 0.1}
    run = write_events(tmp_path / "run", {1: HEALTHY | bad})
    assert cli.main(["inspect", str(run)]) == 0
    printed = capsys.readouterr().out
    for what in ("the sum is not finite", "the accumulated error exceeds its bound", "groups underflowed"):
        assert f"{what} at 8 of 8 sites: forward layers.0.self_attention.linear_proj" in printed
    assert "and 5 more; see docs/inspect.md" in printed
    assert cli.main(["inspect", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sites"][0]["relative_error"] is None


def test_sites_that_were_never_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_events(tmp_path / "run", {3: {"bytes": 64.0, "exact_calls": 2.0}})
    assert cli.main(["inspect", str(run), "--figure", str(tmp_path / "empty.png")]) == 0
    printed = capsys.readouterr().out
    assert "exact calls 2" in printed and "relative error" not in printed


def test_refusals_have_status_2_and_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(tmp_path / "none")]) == 2
    assert "no TensorBoard event files" in capsys.readouterr().err
    run = write_events(tmp_path / "run", {7: HEALTHY})
    assert cli.main(["inspect", str(run), "--step", "8"]) == 2
    assert "step 8 was not measured; expected one of 7" in capsys.readouterr().err
    assert cli.main(["inspect", str(run), "--figure", str(tmp_path / "none" / "a.png")]) == 2
    assert "none/a.png" in capsys.readouterr().err
