"""Runs in a row in the same processes are the runs that processes of their own would make."""

import argparse
import importlib
import json
from pathlib import Path

import pytest
from pretrain_runs import log_path, losses, make_config, train
from synthetic_runs import losses_of, write_run

from echo_megatron.pretrain.series import run_series

ARMS = {
    "nccl": ["tp_comm.bits=16"],
    "consensus": ["tp_comm.bits=4", "tp_comm.min_bytes=0", "tp_comm.residual=consensus"],
    "local": ["tp_comm.bits=4", "tp_comm.min_bytes=0"],
}


def configs_in(folder, data, *overrides):
    return [make_config(folder, data, name, *own, *overrides) for name, own in ARMS.items()]


def in_series(configs, budget_s=None):
    """Exit status of each process: the number of runs that are left."""
    return train(configs[0], work=lambda config: len(run_series(configs, "test", budget_s)))


def test_a_run_in_a_series_is_the_run_by_itself(tmp_path: Path, data):
    together, alone = configs_in(tmp_path / "together", data), configs_in(tmp_path / "alone", data)
    assert in_series(together) == [0, 0], log_path(together[0]).read_text()
    for one, other in zip(together, alone, strict=True):
        assert train(other) == [0, 0], log_path(other).read_text()
        assert losses(one) == losses(other), one.name
        assert json.loads((one.run_dir / "run.json").read_text())["status"] == "finished"
    assert losses(together[0]) != losses(together[1]) != losses(together[2])
    finished = [(config.run_dir / "run.json").stat().st_mtime_ns for config in together]
    assert in_series(together, budget_s=0.0) == [0, 0], "nothing is left to do"
    assert [(config.run_dir / "run.json").stat().st_mtime_ns for config in together] == finished


def test_what_does_not_fit_into_the_time_is_left_and_a_failed_run_does_not_end_the_others(tmp_path: Path, data):
    configs = configs_in(tmp_path, data, "trainer.max_steps=4")
    assert in_series(configs, budget_s=0.0) == [3, 3]
    assert not any((config.run_dir / "run.json").exists() for config in configs)
    configs[0].optim.lr = configs[0].optim.min_lr = 1e30
    configs[0].trainer.max_nonfinite_steps = 1
    assert in_series(configs) == [1, 1], log_path(configs[0]).read_text()
    statuses = [json.loads((config.run_dir / "run.json").read_text())["status"] for config in configs]
    assert statuses == ["stopped", "finished", "finished"]


def test_runs_that_cannot_share_processes_are_refused(tmp_path: Path, data):
    configs = configs_in(tmp_path, data)
    configs[1].trainer.tensor_parallel = 1
    with pytest.raises(ValueError, match=r"expected trainer\.tensor_parallel=2 in every run, consensus has 1"):
        run_series(configs, "test")
    with pytest.raises(ValueError, match="a name of its own"):
        run_series([configs[0], configs[0]], "test")
    with pytest.raises(ValueError, match="expected at least one run"):
        run_series([], "test")


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
    return importlib.import_module("training_study")


def test_the_studies_arms_compose(study):
    for name, chosen in study.STUDIES.items():
        options = argparse.Namespace(arms=list(chosen.arms), seeds=[1, 2], out=Path("runs/x"), overrides=[])
        runs = study.configs_of(chosen, options)
        assert [run.seed for run in runs] == [1] * len(chosen.arms) + [2] * len(chosen.arms)
        baseline, *arms = runs[: len(chosen.arms)]
        assert not baseline.tp_comm.quantizes, name
        described = {repr((run.tp_comm, run.optim.lr, run.trainer.sequence_parallel)) for run in arms}
        assert len(described) == len(arms), name
        assert all(run.tp_comm.quantizes or run.trainer.sequence_parallel for run in arms), name
        for run in arms:
            run.trainer.sequence_parallel = baseline.trainer.sequence_parallel
            for part in ("model", "data", "trainer", "seed"):
                assert getattr(run, part) == getattr(baseline, part), (name, run.name)


def test_overrides_may_follow_a_list(tmp_path: Path, study, capsys):
    """`--seeds 3 KEY=VALUE` does not take the override for a seed."""
    options = ["--results", str(tmp_path), "--render", "--seeds", "3", "trainer.max_steps=200"]
    assert study.main(options) == 2, "there is nothing to render"
    assert "expected runs of nccl" in capsys.readouterr().err


def test_arms_may_come_one_after_the_other_in_any_order_and_of_any_seed(tmp_path: Path, study, capsys):
    """Nothing is compared before the baseline is there; a seed that the study does not name is as good."""
    chosen = study.STUDIES["feedback"]
    results = tmp_path / "results"
    for count, (arm, tp_comm) in enumerate((("local", "echo4"), ("nccl_sp", "nccl"), ("nccl", "nccl"))):
        name = study.run_name(chosen, arm, 77)
        options = argparse.Namespace(arms=[arm], seeds=[77], out=tmp_path / "runs", results=results, render=False)
        config = {"trainer": {"sequence_parallel": arm == "nccl_sp"}}
        write_run(options.out / name, tp_comm, seed=77, config=config, sequence_parallel=arm == "nccl_sp")
        study.write_results(chosen, options, unfinished=())
        waits = "no comparison yet: expected runs of nccl and of another arm, got local" in capsys.readouterr().out
        assert waits == (count < 2) == (not (results / "training_study.json").exists())
    report = json.loads((results / "training_study.json").read_text())
    assert [arm["runs"] for arm in report["arms"]] == [["nccl_seed77"], ["local_seed77"], ["nccl_sp_seed77"]]


def test_kept_runs_are_compared_again_without_training(tmp_path: Path, study, capsys):
    chosen = study.STUDIES["qwen3_0p6b"]
    kept = tmp_path / f"{chosen.results}_runs"
    render = ["--study", "qwen3_0p6b", "--results", str(tmp_path), "--out", str(tmp_path / "out"), "--render"]
    assert study.main(render) == 2
    assert "expected runs of 16bit and of another arm" in capsys.readouterr().err
    facts = {"num_steps": 1000, "seed": 1234}
    for arm, tp_comm, lr in (
        ("16bit", "nccl", 3e-4),
        ("echo4_paper", "echo4_paper", 3e-4),
        ("echo4_paper_lr3.5e-4", "echo4_paper", 3.5e-4),
    ):
        write_run(tmp_path / "runs" / arm, tp_comm, **facts, lr=lr)
        study.keep([tmp_path / "runs" / arm], kept)
    assert study.main(render) == 0
    report = json.loads((tmp_path / f"{chosen.results}.json").read_text())
    rows = report["rows"]
    arms = [("16bit", 3e-4), ("echo4_paper", 3e-4), ("echo4_paper", 3.5e-4)]
    assert [(row["arm"], row["lr"]) for row in rows] == arms
    losses_16bit = losses_of("nccl", 1234, 1000)
    assert rows[0]["tail100"] == pytest.approx(losses_16bit[-100:].mean())
    assert rows[0]["step1000"] == losses_16bit[-1] and rows[0]["delta_percent"] == 0
    assert rows[1]["delta_percent"] == pytest.approx(100 * (rows[1]["tail100"] / rows[0]["tail100"] - 1))
    assert f"![loss curves]({chosen.results}.png)" in (tmp_path / f"{chosen.results}.md").read_text()
    assert (tmp_path / f"{chosen.results}.png").is_file()
    write_run(kept / "an_arm_of_before", "echo4", **facts, lr=3e-4)
    assert study.main(render) == 0
    assert json.loads((tmp_path / f"{chosen.results}.json").read_text())["rows"][-1]["arm"] == "an_arm_of_before"
