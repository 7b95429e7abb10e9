"""Comparisons of runs: statistics against plain loops, the table against hand-computed numbers, every refusal."""

import json
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_runs import ARMS, write_run
from torch.utils.tensorboard import SummaryWriter

from echo_megatron import provenance
from echo_megatron.event_files import load_event_folder
from echo_megatron.figures import arm_colours
from echo_megatron.loss_runs import FACTS, ComparisonRefused, load_run
from echo_megatron.loss_statistics import T95, Windows, _t95, group_arms, moving_average, tail_difference, tail_loss
from echo_megatron.report import compare, main

PNG = b"\x89PNG\r\n\x1a\n"


def arm_entry(report: dict, label: str) -> dict:
    return next(arm for arm in report["arms"] if arm["label"] == label)


# --- statistics ---


@given(
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    window=st.integers(1, 60),
    data=st.data(),
)
def test_moving_average_equals_the_plain_loop(gaps: list[int], window: int, data: st.DataObject) -> None:
    steps = np.cumsum(gaps)
    values = st.floats(-20, 20) | st.sampled_from([math.nan, math.inf, -math.inf])
    losses = np.array(data.draw(st.lists(values, min_size=len(steps), max_size=len(steps))))
    mean, spread = moving_average(steps, losses, window)
    for place, step in enumerate(steps):
        inside = losses[(steps > step - window) & (steps <= step)]
        if np.isfinite(inside).all():
            assert mean[place] == pytest.approx(inside.mean(), abs=1e-9)
            assert spread[place] == pytest.approx(inside.std(), abs=1e-5)  # a root of a difference near 0
        else:
            assert math.isnan(mean[place])
            assert math.isnan(spread[place])


@given(end=st.integers(1, 20_000), panel=st.integers(2, 3000))
def test_windows_fit_the_run(end: int, panel: int) -> None:
    windows = Windows.of(end, panel)
    assert 1 <= windows.curve <= max(1, end // 20)
    assert 1 <= windows.tail <= max(1, end // 3)
    assert 1 <= windows.band <= max(1, windows.panel // 5)
    assert windows.panel <= max(2, min(panel, end // 3))


def test_windows_of_a_long_run_are_the_papers() -> None:
    assert Windows.of(12_716) == Windows(end=12_716, curve=50, tail=100, panel=1500, band=100)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (10, 2.228), (11, 2.201), (15, 2.131), (30, 2.042)])
def test_t_quantiles(freedom: int, quantile: float) -> None:
    assert len(T95) == 10
    assert _t95(freedom) == pytest.approx(quantile, rel=1e-3)


def test_tail_loss_is_the_mean_of_the_window(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", losses=np.arange(1.0, 31.0)))
    assert tail_loss(run, Windows.of(30)) == np.mean(range(21, 31))
    assert tail_loss(run, Windows.of(12)) == np.mean([9, 10, 11, 12])


def test_paired_difference_by_hand(tmp_path: Path) -> None:
    offsets = {1: 0.01, 2: 0.03, 3: 0.02}  # mean 0.02, sd 0.01, standard error 0.01 / sqrt(3), bound 4.303 of it
    runs = []
    for seed, offset in offsets.items():
        runs.append(write_run(tmp_path / f"n{seed}", "nccl", seed, losses=np.full(30, 4.0 + seed)))
        runs.append(write_run(tmp_path / f"e{seed}", "echo4", seed, losses=np.full(30, 4.0 + seed + offset)))
    nccl, echo4 = group_arms([load_run(run) for run in runs])
    assert (nccl.label, nccl.seeds, echo4.label) == ("nccl", [1, 2, 3], "echo4")
    difference = tail_difference(echo4, nccl, Windows.of(30))
    assert difference.mean == pytest.approx(0.02)
    assert difference.error == pytest.approx(0.01 / math.sqrt(3))
    assert difference.bound == pytest.approx(4.303 * 0.01 / math.sqrt(3))
    assert (difference.n, difference.paired, difference.exceeds_noise) == (3, True, False)
    assert "drowns in the noise of seeds" in difference.sentence()


@pytest.mark.parametrize("seeds", [(2,), (1, 3), (3,), (1, 2, 3)])
@pytest.mark.parametrize("fewer", ["nccl", "echo4"])
def test_a_difference_is_of_the_seeds_that_both_arms_have(tmp_path: Path, seeds: tuple[int, ...], fewer: str) -> None:
    """Seeds' levels lie far apart, the arms 0.02: a run of a further seed must not move the difference."""
    runs = [
        load_run(write_run(tmp_path / f"{arm}{seed}", arm, seed, losses=np.full(30, 4.0 + seed + offset)))
        for arm, offset in (("nccl", 0.0), ("echo4", 0.02))
        for seed in ((1, 2, 3) if arm != fewer else seeds)
    ]
    nccl, echo4 = group_arms(runs)
    difference = tail_difference(echo4, nccl, Windows.of(30))
    assert difference.mean == pytest.approx(0.02)
    assert (difference.n, difference.paired) == (len(seeds), True)
    assert (difference.exceeds_noise is None) == (len(seeds) == 1)


def test_unpaired_difference_by_hand(tmp_path: Path) -> None:
    """Welch: 4.0, 4.2 against 5.0, 5.4: difference 1.1, error sqrt(0.02/2 + 0.08/2), freedom 1.47, taken as 1."""
    losses = {("nccl", 1): 4.0, ("nccl", 2): 4.2, ("echo4", 3): 5.0, ("echo4", 4): 5.4}
    runs = [
        load_run(write_run(tmp_path / f"{arm}{seed}", arm, seed, losses=np.full(30, loss)))
        for (arm, seed), loss in losses.items()
    ]
    nccl, echo4 = group_arms(runs)
    difference = tail_difference(echo4, nccl, Windows.of(30))
    assert difference.mean == pytest.approx(1.1)
    assert difference.error == pytest.approx(math.sqrt(0.05))
    assert difference.bound == pytest.approx(12.706 * math.sqrt(0.05))
    assert (difference.paired, difference.exceeds_noise) == (False, False)


# --- the table ---


def test_table_against_hand_computed_numbers(tmp_path: Path) -> None:
    base = np.linspace(8, 4, 1200)
    nccl = write_run(tmp_path / "nccl", "nccl", num_steps=1200, losses=base, lr=3.0e-4)
    echo4 = write_run(tmp_path / "echo4", "echo4", num_steps=1200, losses=base * 1.01, lr=3.5e-4)
    result = compare([nccl, echo4], tmp_path / "out")
    report = json.loads(result.json.read_text())
    assert report["windows"] == {"end": 1200, "curve": 50, "tail": 100, "panel": 400, "band": 80}
    first, second = report["arms"]
    tail = base[1100:].mean()
    assert first["tail"]["mean"] == pytest.approx(tail)
    assert (first["lr"], second["lr"]) == (3.0e-4, 3.5e-4)
    assert second["step_1000"]["mean"] == pytest.approx(1.01 * base[999])
    assert second["delta"] == pytest.approx(0.01 * tail)
    assert second["delta_percent"] == pytest.approx(1.0)
    assert second["validation"]["mean"] == pytest.approx(1.01 * 4 + 0.05)
    assert report["validation_step"] == 1200
    assert (first["tp_bytes"], second["tp_bytes"]) == (1200 * 4.0e6, 1200 * 0.54e6)
    assert second["tp_bytes_ratio"] == pytest.approx(0.135)
    assert second["tokens_per_s"] == 4096
    markdown = result.markdown.read_text()
    cells = f"| echo4 | 1 | 0.00035 | 1200 | {1.01 * base[999]:.4f} | {1.01 * tail:.4f} | {0.01 * tail:+.4f} | +1.00 |"
    assert cells in markdown
    assert "| 648 MB | 0.135 | 4,096 |" in markdown
    assert "steps 1,101 to 1,200" in markdown
    assert "standing in for the paper's Dolma C4" in markdown
    assert "sends 32 bits a value" in markdown  # fp32
    assert result.figure.read_bytes().startswith(PNG)


def test_short_runs_have_no_step_1000_and_say_so(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / arm, arm, num_steps=60) for arm in ("nccl", "echo4")]
    result = compare(runs, tmp_path / "out")
    assert all(arm["step_1000"] is None for arm in result.report["arms"])
    markdown = result.markdown.read_text()
    assert "| tail-20 |" in markdown
    assert "shrunk from 100 steps" in markdown
    assert "| echo4 | 1 | 0.001 | 60 | n/a |" in markdown


def test_provenance_of_each_run_is_in_the_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", "nccl"), write_run(tmp_path / "b", "echo4", commit="fff", machine={"cpu": "64"})]
    result = compare(runs, tmp_path / "out")
    entry = json.loads(result.json.read_text())["runs"][1]
    assert entry["commit"] == "fff"
    assert entry["machine"] == {"cpu": "64"}
    assert entry["versions"]["torch"] == "2.11.0"
    assert entry["command"].startswith("echo-megatron pretrain")
    remarks = "\n".join(result.report["remarks"])
    assert "differ in machine, so tokens/s do not compare" in remarks
    assert "differ in commit" in remarks
    assert "differ in versions" not in remarks


def test_seeds_are_grouped_and_paired(tmp_path: Path) -> None:
    arms = [arm for arm in ARMS if arm != "echo4_paper"]
    runs = [write_run(tmp_path / f"{arm}-{seed}", arm, seed) for arm in arms for seed in (1, 2, 3)]
    report = compare(runs, tmp_path / "out").report
    assert [arm["label"] for arm in report["arms"]] == ["nccl", "echo4", "echo4 without compensation"]
    assert [arm["tail"]["n"] for arm in report["arms"]] == [3, 3, 3]
    assert len(report["differences"]) == 3
    assert all(difference["paired"] and difference["n"] == 3 for difference in report["differences"])
    markdown = (tmp_path / "out" / "comparison.md").read_text()
    assert "paired over 3 seeds" in markdown
    assert "± of a loss is the standard deviation over seeds" in markdown


def test_one_seed_cannot_tell_noise(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / arm, arm) for arm in ("nccl", "echo4")]
    (difference,) = compare(runs, tmp_path / "out").report["differences"]
    assert difference["exceeds_noise"] is None
    assert "one seed, so its noise is not known" in difference["sentence"]


def test_options_make_arms_and_tell_labels_apart(tmp_path: Path) -> None:
    rates = [write_run(tmp_path / f"lr{rate}", "echo4", lr=rate) for rate in (2.0e-4, 3.5e-4)]
    labels = [arm.label for arm in group_arms([load_run(run) for run in rates])]
    assert labels == ["echo4 lr=0.0002", "echo4 lr=0.00035"]
    repeats = [write_run(tmp_path / name, "nccl") for name in ("first", "again")]
    assert [arm.label for arm in group_arms([load_run(run) for run in repeats])] == ["nccl (first)", "nccl (again)"]


def test_an_option_of_every_echo_arm_is_said_once(tmp_path: Path) -> None:
    """Labels stay short enough for a figure's legend."""
    names = (
        "nccl",
        "echo4 min_bytes=16384",
        "echo4 eta=0.0 min_bytes=16384",
        "echo4 min_bytes=16384 sequence_parallel",
    )
    runs = [write_run(tmp_path / str(idx), tp_comm=name) for idx, name in enumerate(names)]
    report = compare(runs, tmp_path / "out").report
    labels = [arm["label"] for arm in report["arms"]]
    assert labels == ["nccl", "echo4", "echo4 without compensation", "echo4 with SP"]
    assert "Every Echo arm has min_bytes=16384." in report["remarks"]
    (one,) = group_arms([load_run(runs[1])])
    assert one.label == "echo4 min_bytes=16384"


def test_runs_of_several_versions_are_told_apart_by_what_was_in_effect(tmp_path: Path) -> None:
    """Averages were the default once and nobody named them; 16 bits are the same whatever else is recorded."""
    averages = {"eta": 0.75, "a": 0.35, "beta1": 0.7, "beta2": 0.3}
    then = {"residual": "local", **averages, "state_dtype": "compact"}  # refused by now, but read
    now = {"residual": "local", "eta": None, "beta1": None, "beta2": None, "last_bits": None}

    def label(name: str, tp_comm: str, options: dict) -> str:
        run = write_run(tmp_path / name, tp_comm=tp_comm, config={"tp_comm": {"bits": 4, **options}})
        (arm,) = group_arms([load_run(run)])
        return arm.label

    assert label("then", "echo4", then) == "echo4 with averages"
    assert label("stored", "echo4 state_dtype=compact", then) == "echo4 with averages compact state"
    assert label("now", "echo4", now) == "echo4"
    assert label("chosen", "echo4 eta=0.75 beta1=0.7 beta2=0.3", now | averages) == "echo4 with averages"
    assert label("paper", "echo4_paper", averages | {"residual": "consensus"}) == "echo4_paper"
    pair = [
        write_run(tmp_path / f"nccl{seed}", seed=seed, config={"tp_comm": {"bits": 16, **options}})
        for seed, options in ((1, then), (2, now))
    ]
    assert len(group_arms([load_run(run) for run in pair])) == 1


def test_baseline_by_label_or_run_name(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run_{arm}", arm) for arm in ("echo4", "nccl")]
    for name in ("nccl", "run_nccl"):
        report = compare(runs, tmp_path / "out", baseline=name).report
        assert report["baseline"] == "nccl"
        assert arm_entry(report, "nccl")["delta"] == 0
        assert arm_entry(report, "echo4")["tp_bytes_ratio"] == pytest.approx(0.135)
    with pytest.raises(ValueError, match="baseline: expected one of echo4, nccl, got 'echo16'"):
        compare(runs, tmp_path / "out", baseline="echo16")


# --- refusals ---

DIFFERENCES: dict[str, dict] = {
    "data": {"data": {"name": "sample", "fingerprint": "beef", "tokens": 1}},
    "batch": {"global_batch_size": 32},
    "sequence": {"sequence_length": 256},
    "seed": {"seed": 2},
    "parameters": {"parameters": 5},
    "precision": {"precision": "bfloat16"},
    "tensor_parallel": {"tensor_parallel": 4},
    "optimizer": {"config": {"optim": {"lr": 1e-3, "beta1": 0.9, "min_lr": 5e-5}}},
}


@pytest.mark.parametrize("fact", DIFFERENCES)
def test_runs_that_differ_are_refused_by_name_and_value(tmp_path: Path, fact: str) -> None:
    runs = [write_run(tmp_path / "a", "nccl"), write_run(tmp_path / "b", "echo4", **DIFFERENCES[fact])]
    # the optimizer's options that agree are left out
    values = [str(load_run(run).fact(fact)).removeprefix("beta1=0.9 ") for run in runs]
    with pytest.raises(ComparisonRefused) as refusal:
        compare(runs, tmp_path / "out")
    message = str(refusal.value)
    assert f"different {FACTS[fact]}: a {values[0]}, b {values[1]}" in message
    assert f"--allow-different {fact}\n" in message + "\n"  # this one and no other
    assert not (tmp_path / "out").exists()
    remarks = compare(runs, tmp_path / "out", allow_different=[fact]).report["remarks"]
    assert f"Allowed to differ: {FACTS[fact]}: a {values[0]}, b {values[1]}" in remarks


def test_all_differences_are_named_at_once(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "echo4", seed=2, parameters=5, num_steps=40)]
    with pytest.raises(ComparisonRefused, match="--allow-different seed,parameters,steps"):
        compare(runs, tmp_path / "out")
    with pytest.raises(ComparisonRefused, match=r"--allow-different parameters$"):
        compare(runs, tmp_path / "out", allow_different=["seed", "steps"])


def test_different_seeds_of_two_arms_are_refused_even_when_several(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"n{seed}", "nccl", seed) for seed in (1, 2)]
    runs += [write_run(tmp_path / f"e{seed}", "echo4", seed) for seed in (1, 3)]
    with pytest.raises(ComparisonRefused, match="--allow-different seed"):
        compare(runs, tmp_path / "out")


def test_unfinished_runs_are_marked_and_compared_up_to_the_common_step(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", "nccl", losses=np.arange(1.0, 61.0)),
        write_run(tmp_path / "b", "echo4", losses=np.arange(1.0, 31.0), max_steps=60, status="stopped"),
    ]
    with pytest.raises(ComparisonRefused, match=r"different steps: a 60, b 30 of 60 \(stopped\)"):
        compare(runs, tmp_path / "out")
    report = compare(runs, tmp_path / "out", allow_different=["steps"]).report
    assert report["windows"]["end"] == 30
    assert [arm["tail"]["mean"] for arm in report["arms"]] == [25.5, 25.5]
    assert arm_entry(report, "echo4")["steps"] == ["30 of 60 (stopped)"]
    assert arm_entry(report, "nccl")["tp_bytes"] == 30 * 4.0e6
    assert "b is not finished: 30 of 60 (stopped)." in report["remarks"]


def test_losses_that_are_not_finite_are_shown(tmp_path: Path) -> None:
    losses = np.linspace(5, 4, 60)
    losses[[10, 54]] = math.nan
    runs = [write_run(tmp_path / "a", "nccl"), write_run(tmp_path / "b", "echo4", losses=losses)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = compare(runs, tmp_path / "out")
    report = json.loads(result.json.read_text())
    assert report["runs"][1]["nonfinite_steps"] == [11, 55]
    assert arm_entry(report, "echo4")["tail"]["mean"] is None
    assert "b: 2 losses are not finite, the first at step 11." in report["remarks"]
    assert "| echo4 | 1 | 0.001 | 60 | n/a | nan | +nan | +nan |" in result.markdown.read_text()
    assert "the tail loss is not finite" in report["differences"][0]["sentence"]


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        compare([run], tmp_path / "out")
    with pytest.raises(ValueError, match=r"different runs, got .* twice"):
        compare([run, tmp_path / "." / "a"], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="expected a run folder"):
        compare([run, tmp_path / "none"], tmp_path / "out")
    other = write_run(tmp_path / "b", "echo4")
    with pytest.raises(ValueError, match=r"allow-different: expected some of data, batch.* got sed"):
        compare([run, other], tmp_path / "out", allow_different=["sed"])
    empty = write_run(tmp_path / "c", "echo4", losses=np.array([]))
    with pytest.raises(ValueError, match="no training loss yet"):
        compare([run, empty], tmp_path / "out")


# --- event folders ---


def write_megatron_events(
    folder: Path, losses: np.ndarray, seed: int = 1, first: int = 1, arguments: bool = True
) -> Path:
    """What Megatron-LM's training_log, evaluate_and_print_results and write_args_to_tensorboard write."""
    with SummaryWriter(str(folder)) as writer:
        values: dict[str, object] = {
            "seed": seed,
            "seq_length": 128,
            "train_iters": 60,
            "tensor_model_parallel_size": 2,
        }
        values |= {"bf16": False, "fp16": False, "optimizer": "adam", "min_lr": 1e-4, "lr_warmup_iters": 5}
        values |= {"lr_decay_style": "cosine", "weight_decay": 0.1, "clip_grad": 1.0}
        for name, value in values.items() if arguments else ():
            writer.add_text(name, str(value), global_step=0)
        for step, loss in enumerate(losses, start=first):
            writer.add_scalar("lm loss", loss, step)
            writer.add_scalar("learning-rate", 1e-3 * min(1, step / 5), step)
            writer.add_scalar("batch-size", 16, step)
        writer.add_scalar("lm loss validation", 4.5, first + len(losses) - 1)
    return folder


def write_nemo_events(folder: Path, losses: np.ndarray, every: int = 1) -> Path:
    """Lightning logs at the 0-based step, every `every` steps at (step + 1) % every == 0."""
    with SummaryWriter(str(folder / "version_0")) as writer:
        for step, loss in enumerate(losses):
            if (step + 1) % every == 0:
                writer.add_scalar("reduced_train_loss", loss, step)
                writer.add_scalar("lr", 1e-3, step)
                writer.add_scalar("global_batch_size", 16, step)
        writer.add_scalar("val_loss", 4.25, len(losses) - 1)
    return folder


def test_megatron_events(tmp_path: Path) -> None:
    run = load_event_folder(write_megatron_events(tmp_path / "lm", np.arange(1.0, 61.0), seed=7))
    assert run.source == "Megatron-LM events"
    assert run.steps.tolist() == list(range(1, 61))
    assert run.losses.tolist() == list(range(1, 61))
    assert run.validation == {60: 4.5}
    assert run.lr == pytest.approx(1e-3)
    assert (run.max_steps, run.finished) == (60, True)
    facts = {"batch": 16, "sequence": 128, "seed": 7, "tensor_parallel": 2, "precision": "fp32"}
    assert {name: run.facts[name] for name in facts} == facts
    assert run.facts["data"] is None


def test_nemo_events_count_steps_from_one(tmp_path: Path) -> None:
    run = load_event_folder(write_nemo_events(tmp_path / "nemo", np.arange(1.0, 61.0), every=10))
    assert run.source == "NeMo events"
    assert run.steps.tolist() == [10, 20, 30, 40, 50, 60]
    assert run.losses.tolist() == [10, 20, 30, 40, 50, 60]
    assert run.validation == {60: 4.25}
    assert tail_loss(run, Windows.of(60)) == 55  # the steps 41 to 60, of which 50 and 60 were logged


def test_steps_logged_again_after_a_resume_count_once(tmp_path: Path) -> None:
    folder = write_megatron_events(tmp_path / "lm", np.full(40, 9.0))
    write_megatron_events(folder, np.full(30, 5.0), first=31)
    run = load_event_folder(folder)
    assert run.steps.tolist() == list(range(1, 61))
    assert run.losses.tolist() == [9.0] * 30 + [5.0] * 30


def test_event_folders_need_leave_for_what_they_do_not_record(tmp_path: Path) -> None:
    losses = np.linspace(8, 4, 60)
    runs = [
        write_megatron_events(tmp_path / "lm", losses, arguments=False),
        write_nemo_events(tmp_path / "nemo", losses + 0.5),
    ]
    with pytest.raises(ComparisonRefused) as refusal:
        compare(runs, tmp_path / "out")
    message = str(refusal.value)
    assert "not recorded by lm, nemo: data fingerprint, sequence length (tokens), seed, model parameters" in message
    assert "global batch" not in message  # both record it, and it agrees
    assert message.endswith("--allow-unverified")
    report = compare(runs, tmp_path / "out", allow_unverified=True).report
    assert [arm["label"] for arm in report["arms"]] == ["lm", "nemo"]
    assert arm_entry(report, "nemo")["delta"] == pytest.approx(0.5)
    assert arm_entry(report, "nemo")["tp_bytes"] is None
    assert report["remarks"][0].startswith("Not checked, not recorded by lm, nemo: data fingerprint, sequence length")


def test_folders_of_equal_names_are_called_by_where_their_paths_differ(tmp_path: Path) -> None:
    losses = np.linspace(8, 4, 60)
    runs = [write_megatron_events(tmp_path / run / "tensorboard", losses) for run in ("nccl", "echo4")]
    report = compare(runs, tmp_path / "out", allow_unverified=True).report
    assert [arm["label"] for arm in report["arms"]] == ["nccl", "echo4"]


def test_unverified_does_not_excuse_what_is_known_to_differ(tmp_path: Path) -> None:
    losses = np.linspace(8, 4, 60)
    lm = write_megatron_events(tmp_path / "lm", losses, seed=2)
    with pytest.raises(ComparisonRefused, match="different seed: a 1, lm 2"):
        compare([write_run(tmp_path / "a", "nccl"), lm], tmp_path / "out", allow_unverified=True)


def test_event_folders_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("accuracy", 1.0, 1)
    with pytest.raises(ValueError, match=r"'lm loss' .* or 'reduced_train_loss' .* got accuracy"):
        load_event_folder(tmp_path / "other")
    write_megatron_events(tmp_path / "both" / "a", np.ones(3))
    write_megatron_events(tmp_path / "both" / "b", np.ones(3))
    with pytest.raises(ValueError, match="event files of 2 runs below it"):
        load_event_folder(tmp_path / "both")


# --- figure and command line ---


def test_arms_keep_their_colours_whatever_they_are_shown_with() -> None:
    few, many = arm_colours(["nccl", "echo4"]), arm_colours(["other", "echo4", "echo4_paper", "nccl", "another"])
    assert all(many[label] == colour for label, colour in few.items())
    assert len(set(many.values())) == 5


def test_script(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / arm, arm, num_steps=30)) for arm in ("nccl", "echo4")]
    script = Path(__file__).parents[1] / "scripts" / "compare_loss.py"
    done = subprocess.run(
        [sys.executable, str(script), *runs, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert "echo4 − nccl" in done.stdout
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(PNG)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"loss.png", "comparison.md", "comparison.json"}


def test_command_line_reports_refusals_and_passes_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / "a", "echo4")), str(write_run(tmp_path / "b", "nccl", seed=2))]
    out = ["--out", str(tmp_path / "out")]
    assert main([*runs, *out]) == 2
    assert "compare: these runs cannot be compared" in capsys.readouterr().err
    options = ["--allow-different", "seed", "--baseline", "nccl", "--title", "A title", "--tail-panel", "10"]
    assert main([*runs, *out, *options]) == 0
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert (report["baseline"], report["title"], report["windows"]["panel"]) == ("nccl", "A title", 10)


def test_commands_are_recorded_without_this_machine_s_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(provenance.__file__).parent
    for program, recorded in (
        (package / "quickstart.py", "python -m echo_megatron.quickstart --seeds 1 2"),
        (Path("/somewhere/bin/echo-megatron"), "echo-megatron --seeds 1 2"),
    ):
        monkeypatch.setattr(sys, "argv", [str(program), "--seeds", "1", "2"])
        assert provenance.command() == recorded
