"""The command line as a user starts it: subcommands, errors, whole runs through torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from echo_megatron import cli, quickstart
from tests.pretrain_runs import write_tokens

COMMAND = [sys.executable, "-m", "echo_megatron.cli"]
ROOT = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def small_run(folder: Path, *overrides: str) -> list[str]:
    data = write_tokens(folder)
    listed = {key: value for key, value in data.items() if key != "name"}
    return [
        "data=tokens",
        *(f"data.{key}={value}" for key, value in listed.items()),
        *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.kv_channels=8"),
        *("model.sequence_length=16", "trainer.device=cpu", "optim.warmup_steps=2", "trainer.val_batches=1"),
        f"runs_dir={folder}/runs",
        *overrides,
    ]


def test_usage_and_unknown_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "pretrain" in capsys.readouterr().out
    assert cli.main([]) == 2
    assert cli.main(["pretrian"]) == 2
    error = capsys.readouterr().err
    assert "expected a command, one of pretrain, compare" in error
    assert "'pretrian'" in error


def test_cfg_job_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pretrain", "--cfg", "job", "experiment=quickstart", "tp_comm=echo8"]) == 0
    printed = capsys.readouterr().out
    assert "bits: 8" in printed
    assert "name: quickstart" in printed
    with pytest.raises(SystemExit) as ended:  # by Hydra
        cli.main(["pretrain", "--help"])
    assert ended.value.code == 0
    assert "tp_comm: echo4" in capsys.readouterr().out


def test_refusals_have_status_2_and_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [f"data.folder={tmp_path}/none", f"runs_dir={tmp_path}"]
    assert cli.main(["pretrain", "trainer.global_batch_size=12", *missing]) == 2
    assert "global_batch_size: expected a multiple" in capsys.readouterr().err
    assert cli.main(["pretrain", *missing]) == 2
    error = capsys.readouterr().err
    assert "manifest.json: not found" in error
    assert "prepare_sample" in error
    many = ["trainer.data_parallel=100", "trainer.global_batch_size=800"]
    assert cli.main(["pretrain", *small_run(tmp_path, *many, "trainer.device=cuda")]) == 2
    assert "expected at least 200 GPUs on this machine" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["pretrain", *small_run(tmp_path, f"runs_dir={tmp_path}/file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_misspelt_key_ends_the_program(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "pretrain", "tp_comm.etta=1"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Key 'etta' not in 'EchoConfig'" in done.stderr


def test_multirun_starts_one_run_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from echo_megatron.pretrain import launch

    seen: list[tuple[str, float]] = []

    def record(config: Any) -> int:
        seen.append((config.name, config.optim.lr))
        return 0

    monkeypatch.setattr(launch, "launch", record)
    arguments = ["pretrain", "experiment=lr_ablation", f"runs_dir={tmp_path}"]
    assert cli.main(arguments) == 0
    names = [f"lr_ablation/{lr}" for lr in (2.0e-4, 2.5e-4, 3.0e-4, 3.5e-4)]
    assert seen == list(zip(names, (2.0e-4, 2.5e-4, 3.0e-4, 3.5e-4), strict=True))
    seen.clear()
    assert cli.main(["pretrain", "-m", "seed=1,2", "name=run_${seed}", f"runs_dir={tmp_path}"]) == 0
    assert [name for name, _ in seen] == ["run_1", "run_2"]
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["pretrain", "-m", "seed=1,2", f"runs_dir={tmp_path}"]) == 2


def test_plain_start_stops_on_sigint_with_status_0_and_resumes(tmp_path: Path) -> None:
    arguments = [*COMMAND, "pretrain", *small_run(tmp_path, "name=run", "trainer.max_steps=2000", "tp_comm=echo4")]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            arguments, env=environment(), cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
        metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 200
        while not metrics.exists() or not metrics.read_text():
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0, (tmp_path / "output").read_text()
    run = json.loads((tmp_path / "runs" / "run" / "run.json").read_text())
    assert run["status"] == "stopped"
    assert run["command"].startswith("echo-megatron pretrain data=tokens")
    assert (tmp_path / "runs" / "run" / "checkpoints" / "latest.json").exists()
    printed = (tmp_path / "output").read_text()
    assert "stopping after this step" in printed
    assert "goes on from the last checkpoint" in printed
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["cache", "runs"]  # nothing of Hydra's


def test_quickstart_plans_the_arms() -> None:
    options = quickstart.parse_arguments(["--ablation", "--steps", "5", "--seeds", "1", "2", "--out", "o", "a=b"])
    runs = quickstart.plan(options)
    arms = ["nccl", "echo4", "echo4_uncompensated", "echo4_paper"]
    assert list(runs) == [f"{arm}_seed{seed}" for seed in (1, 2) for arm in arms]
    command = quickstart.command(options, "x", ["tp_comm=nccl", "seed=1"])
    assert command[4:] == [
        *("experiment=quickstart", "name=x", "runs_dir=o", "data.folder=data/sample"),
        *("tp_comm=nccl", "seed=1", "trainer.max_steps=5", "a=b"),
    ]
    assert list(quickstart.plan(quickstart.parse_arguments([]))) == ["nccl", "echo4"]
    parallel = quickstart.plan(quickstart.parse_arguments(["--sequence-parallel"]))
    assert list(parallel) == ["nccl", "echo4", "nccl_sequence_parallel", "echo4_sequence_parallel"]
    assert "trainer.sequence_parallel=true" in parallel["nccl_sequence_parallel"]


@pytest.mark.slow
def test_quickstart_from_data_to_figure(tmp_path: Path) -> None:
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.kv_channels=8"]
    tiny += ["model.sequence_length=16", "trainer.val_batches=1", "optim.warmup_steps=1", "trainer.device=cpu"]
    arguments = ["--out", str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--steps", "4", *tiny]
    command = [sys.executable, "-m", "echo_megatron.quickstart", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("loss.png", "comparison.md", "comparison.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert "nccl" in done.stdout
    again = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280)
    assert again.returncode == 0
    assert again.stdout.count("finished already") == 2
