"""Runs in a row in the same processes are the runs that processes of their own would make."""

import argparse
import importlib
import json
from pathlib import Path

import pytest
from pretrain_runs import log_path, losses, make_config, train, write_tokens

from echo_megatron.pretrain.series import run_series

ARMS = {
    "nccl": ["tp_comm.bits=16"],
    "consensus": ["tp_comm.bits=4", "tp_comm.min_bytes=0", "tp_comm.residual=consensus"],
    "local": ["tp_comm.bits=4", "tp_comm.min_bytes=0"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


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


def test_the_study_s_arms_compose(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "scripts"))
    study = importlib.import_module("training_study")
    options = argparse.Namespace(
        arms=list(study.ARMS), seeds=[1, 2], experiment="gutenberg_small", out=Path("runs/x"), overrides=[]
    )
    runs = study.configs_of(options)
    assert len({run.run_dir for run in runs}) == 2 * len(study.ARMS)
    arms = {run.name.rpartition("_seed")[0]: run for run in runs if run.seed == 2}
    assert not arms["nccl"].tp_comm.quantizes and not arms["uncompensated"].tp_comm.compensates
    for arm, run in arms.items():
        for name in ("model", "data", "optim", "trainer", "seed"):
            assert getattr(run, name) == getattr(arms["nccl"], name), arm
