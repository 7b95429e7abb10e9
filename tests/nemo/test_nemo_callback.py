"""EchoTPComm: what it refuses and says, exceptions, checkpoints of the other arm, diagnostics through the logger."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning import io
from nemo.lightning.pytorch.callbacks import JitTransform
from nemo.lightning.pytorch.callbacks.jit_transform import JitConfig
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo.utils import logging
from nemo_runs import run_nemo, tiny, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo_megatron.config import Direction, EchoConfig
from echo_megatron.integrations.nemo import CHECKPOINT_KEY, EchoTPComm
from echo_megatron.integrations.nemo_build import build
from echo_megatron.process_group import EchoProcessGroup


def trainer_with(*callbacks: Any, tp: int = 2, strategy: Any = None, **options: Any) -> Any:
    """What `setup` looks at: no trainer is started."""
    strategy = strategy or nl.MegatronStrategy(tensor_model_parallel_size=tp, **options)
    return SimpleNamespace(callbacks=list(callbacks), strategy=strategy, is_global_zero=True, loggers=[])


def module_with(**options: Any) -> Any:
    return SimpleNamespace(config=SimpleNamespace(hidden_size=64, **options))


class Lines:
    """What NeMo's logging was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        for level in ("info", "warning", "error"):
            monkeypatch.setattr(logging, level, lambda text, *rest, **named: self.lines.append(str(text)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_comm": "echo5"}, r"tp_comm: expected one of nccl, echo4.*got 'echo5'"),
        ({"tp_comm": "echo4", "etta": 0.5}, "unknown option etta"),
        ({"tp_comm": "echo4", "eta": 2}, r"eta: expected a number in \[0, 1\], got 2"),
        ({"tp_comm": "nccl", "eta": 0.5}, "eta would do nothing"),
        ({"tp_comm": "nccl", "inspect_every": 5}, "inspect_every=5 would do nothing"),
        ({"tp_comm": "echo4", "inspect_every": -1}, "inspect_every: expected an integer >= 0"),
        ({"tp_comm": "echo4", "inspect_every": True}, "inspect_every: expected an integer >= 0"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EchoTPComm(**arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tp_comm_overlap", True),
        ("multi_latent_attention", True),
        ("symmetric_ar_type", "two_shot"),
    ],
)
def test_options_of_the_model_are_refused_before_it_is_built(option: str, value: Any) -> None:
    echo = EchoTPComm("echo4")
    with pytest.raises(ValueError, match=rf"{option}={value!r} is not supported.*Expected {option}=.*tp_comm=nccl"):
        echo.setup(trainer_with(echo), module_with(**{option: value}), "fit")
    EchoTPComm("nccl").setup(trainer_with(), module_with(**{option: value}), "fit")


def test_sequence_parallelism_needs_the_local_residual() -> None:
    echo = EchoTPComm("echo4_paper")
    with pytest.raises(ValueError, match="residual: expected local with sequence parallelism, got consensus"):
        echo.setup(trainer_with(echo), module_with(sequence_parallel=True), "fit")
    echo = EchoTPComm("echo4_paper", residual="local", gather_bits=4)
    echo.setup(trainer_with(echo), module_with(sequence_parallel=True), "fit")


def test_a_second_one_is_refused() -> None:
    echo = EchoTPComm("echo4")
    with pytest.raises(ValueError, match="EchoTPComm: expected once among the trainer's callbacks, got 2"):
        echo.setup(trainer_with(echo, EchoTPComm("nccl")), module_with(), "fit")


def test_lightning_lets_the_message_through() -> None:
    """Two stateful callbacks are refused by the Trainer itself, with words that do not help."""
    trainer = nl.Trainer(callbacks=[EchoTPComm("echo4"), EchoTPComm("echo4")], accelerator="cpu", logger=False)
    assert sum(isinstance(callback, EchoTPComm) for callback in trainer.callbacks) == 2


def test_callbacks_that_replace_the_all_reduce_are_refused() -> None:
    echo = EchoTPComm("echo4")
    overlap = MegatronCommOverlapCallback(tp_comm_overlap=True)
    with pytest.raises(ValueError, match=r"MegatronCommOverlapCallback\(tp_comm_overlap=True\) is not supported"):
        echo.setup(trainer_with(echo, overlap), module_with(), "fit")
    with pytest.raises(ValueError, match="JitTransform is not supported"):
        echo.setup(trainer_with(echo, JitTransform(JitConfig(use_torch=True))), module_with(), "fit")
    harmless = MegatronCommOverlapCallback(overlap_grad_reduce=True), JitTransform(JitConfig())
    echo.setup(trainer_with(echo, *harmless), module_with(), "fit")


def test_strategies_are_refused_by_name() -> None:
    echo = EchoTPComm("echo4")
    with pytest.raises(ValueError, match="expected the trainer's strategy to be MegatronStrategy, got object"):
        echo.setup(trainer_with(echo, strategy=object()), module_with(), "fit")
    strategy = nl.MegatronStrategy(tensor_model_parallel_size=2)
    strategy._fsdp = "megatron"
    with pytest.raises(ValueError, match="fsdp='megatron' is not supported"):
        echo.setup(trainer_with(echo, strategy=strategy), module_with(), "fit")


def test_parallel_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    log, echo = Lines(monkeypatch), EchoTPComm("echo4")
    with pytest.raises(ValueError, match="expected 1 to 8 ranks, got 16"):
        echo.setup(trainer_with(echo, tp=16), module_with(), "fit")
    echo.setup(trainer_with(echo, tp=1), module_with(), "fit")
    (line,) = log.lines
    assert "tensor_model_parallel_size=1" in line and "does nothing" in line


def test_it_is_copied_and_built_again_from_its_arguments() -> None:
    """NeMo copies callbacks, and writes them into the context of every checkpoint."""
    echo = EchoTPComm("echo4", inspect_every=7, eta=0.5, directions=[Direction.forward])
    again = io.reinit(copy.deepcopy(echo))
    assert (again.tp_comm, again.inspect_every) == ("echo4", 7)
    assert again._config == echo._config == EchoConfig.preset("echo4", eta=0.5, directions=["forward"])


# -- checkpoints


@pytest.mark.parametrize(
    ("saved", "loaded", "names"),
    [
        (EchoTPComm("nccl"), EchoTPComm("echo4"), ("tp_comm=nccl,", "tp_comm=echo4;")),
        (EchoTPComm("echo4"), EchoTPComm("nccl"), ("tp_comm=echo4,", "tp_comm=nccl;")),
        (EchoTPComm("echo4"), EchoTPComm("echo4", eta=0.5), ("tp_comm=echo4,", "tp_comm=echo4 eta=0.5;")),
        (None, EchoTPComm("echo8"), ("tp_comm=nccl (it was written without EchoTPComm),", "tp_comm=echo8;")),
        (None, EchoTPComm("nccl"), None),
        (EchoTPComm("echo4", eta=0.5), EchoTPComm("echo4", eta=0.5), None),
        (EchoTPComm("echo4", eta=1.0), EchoTPComm("echo4"), None),  # the same by its default
    ],
)
def test_a_checkpoint_of_the_other_arm_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, saved: EchoTPComm | None, loaded: EchoTPComm, names: tuple[str, str] | None
) -> None:
    log, checkpoint = Lines(monkeypatch), dict[str, Any]()
    if saved is not None:
        saved.on_save_checkpoint(trainer_with(saved), None, checkpoint)
        assert checkpoint[CHECKPOINT_KEY]["tp_comm"] == saved.tp_comm
    loaded.on_load_checkpoint(trainer_with(loaded), None, checkpoint)
    if names is None:
        assert log.lines == []
        return
    (line,) = log.lines
    assert all(name in line for name in names) and "weights are compatible" in line


def resumed(rank: int, world_size: int, folder: str) -> tuple[list[str], list[int]]:
    """From the 16-bit run's last checkpoint, of step 4, on to step 6 under echo4, every second step measured."""
    lines: list[str] = []
    original = logging.warning
    logging.warning = lambda text, *rest, **named: (lines.append(str(text)), original(text, *rest, **named))[1]
    steps = StepsSeen()
    echo = ("tp_comm=echo4", "echo.min_bytes=0", "inspect_every=2")
    train(tiny(*echo, "trainer.max_steps=6", "log.save_interval=2", f"log.dir={folder}", "log.tensorboard=true"), steps)
    return lines, steps.seen


class StepsSeen(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(trainer.global_step)


def saved(rank: int, world_size: int, folder: str) -> None:
    train(tiny("tp_comm=nccl", "log.save_interval=2", f"log.dir={folder}"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("runs")
    run_nemo(saved, 2, str(folder))
    return folder, run_nemo(resumed, 2, str(folder))


def test_a_16_bit_checkpoint_goes_on_under_echo4(runs: tuple[Path, list[Any]]) -> None:
    told = []
    for lines, steps in runs[1]:
        assert steps == [4, 5]
        told += [line for line in lines if "the checkpoint was written with tp_comm=nccl" in line]
    (line,) = told  # by global rank 0
    assert "this run has tp_comm=echo4 min_bytes=0" in line


def test_the_checkpoint_holds_the_flag_and_its_context_the_callback(runs: tuple[Path, list[Any]]) -> None:
    last = sorted((runs[0] / "tiny_cpu" / "checkpoints").glob("*last*"))[-1]
    common = torch.load(last / "weights" / "common.pt", weights_only=False)
    assert common[CHECKPOINT_KEY] == {
        "tp_comm": "echo4",
        "options": {"min_bytes": 0},
        "name": "echo4 min_bytes=0",
    }
    assert "echo_megatron.integrations.nemo" in (last / "context" / "io.json").read_text()
    # Exports and fine-tuning start from the context: its reader, which lets few modules in, takes it.
    model = io.load_context(last / "context", subpath="model", build=False)
    assert model.config.num_layers == 2


def test_measured_steps_are_logged_by_the_trainer_s_own_logger(runs: tuple[Path, list[Any]]) -> None:
    tags: dict[str, list[int]] = {}
    for file in runs[0].rglob("events.out.tfevents*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            tags.setdefault(tag, []).extend(event.step for event in events.Scalars(tag))
    measured = {tag: steps for tag, steps in tags.items() if tag.startswith("echo/")}
    assert "echo/forward/layers.1.mlp.linear_fc2/relative_error" in measured
    assert all(steps == [4] for steps in measured.values())


# -- exceptions


class Failing(Callback):
    """Raises on every rank in the second step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            raise RuntimeError("planted failure in training")


def interrupted(rank: int, world_size: int) -> tuple[bool, bool]:
    arguments = build(tiny("tp_comm=echo4"))
    trainer = arguments["trainer"]
    echo = next(callback for callback in trainer.callbacks if isinstance(callback, EchoTPComm))
    trainer.callbacks.append(Failing())
    installed = []
    echo_install = echo._install
    echo._install = lambda trainer: (echo_install(trainer), installed.append(echo.installation))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="planted failure in training"):
        llm.pretrain(**arguments)
    modules = list(trainer.strategy.megatron_parallel.modules())
    left = any(isinstance(getattr(module, "tp_group", None), EchoProcessGroup) for module in modules)
    return installed[0] is not None and len(installed[0].sites) == 0, left or echo.installation is not None


def test_an_exception_in_training_uninstalls_and_comes_through() -> None:
    assert run_nemo(interrupted, 2) == [(True, False)] * 2
