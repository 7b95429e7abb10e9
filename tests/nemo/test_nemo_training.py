"""The real Trainer and MegatronStrategy at TP=2 on gloo: stock, pass-through and quantized runs; site by site."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from lightning.pytorch import Callback
from nemo.collections import llm
from nemo_runs import run_nemo, tiny
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from echo_megatron import EchoConfig
from echo_megatron.config import Direction
from echo_megatron.integrations.nemo import EchoTPComm
from echo_megatron.integrations.nemo_build import build
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import SimulatedGroup

STEPS = ("trainer.max_steps=3", "trainer.val_interval=2")


class Recorder(Callback):
    """Losses of the steps, and of every quantized call its site, what this rank gave and what it got."""

    def __init__(self, echo: EchoTPComm | None) -> None:
        self.echo = echo
        self.losses: list[float] = []
        self.calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self.evaluations: list[bool] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.echo is None or self.echo.installation is None:
            return
        transport = self.echo.installation.communicator.transport
        original = transport.all_reduce

        def recording(x: torch.Tensor, site: Any, *rest: Any) -> Any:
            given = x.clone()
            reduced = original(x, site, *rest)
            self.calls.append((site, given, reduced.output.clone()))
            self.evaluations.append(not trainer.training)
            return reduced

        transport.all_reduce = recording

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def trained(rank: int, world_size: int, arm: list[str] | None) -> dict[str, Any]:
    """One run; `arm` is None for NeMo without the callback."""
    config = tiny(*STEPS, *(arm or ["tp_comm=nccl"]))
    arguments = build(config)
    trainer = arguments["trainer"]
    echo = next(callback for callback in trainer.callbacks if isinstance(callback, EchoTPComm))
    if arm is None:
        trainer.callbacks.remove(echo)
    recorder = Recorder(None if arm is None else echo)
    trainer.callbacks.append(recorder)
    llm.pretrain(**arguments)
    assert echo.installation is None
    modules = trainer.strategy.megatron_parallel.modules()
    assert not any(isinstance(getattr(module, "tp_group", None), EchoProcessGroup) for module in modules)
    return {
        "losses": recorder.losses,
        "validation": float(trainer.callback_metrics["val_loss"]),
        "parameters": [parameter.detach().clone() for parameter in trainer.strategy.megatron_parallel.parameters()],
        "calls": recorder.calls,
        "evaluations": recorder.evaluations,
    }


@pytest.fixture(scope="module")
def stock() -> list[dict[str, Any]]:
    return run_nemo(trained, 2, None)


@pytest.fixture(scope="module")
def quantized() -> list[dict[str, Any]]:
    return run_nemo(trained, 2, ["tp_comm=echo4", "echo.min_bytes=0"])


@pytest.mark.parametrize("arm", [["tp_comm=nccl"], ["tp_comm=echo4", f"echo.min_bytes={2**40}"]])
def test_nccl_and_pass_through_are_stock_nemo_bit_for_bit(stock: list[dict[str, Any]], arm: list[str]) -> None:
    for expected, run in zip(stock, run_nemo(trained, 2, arm), strict=True):
        assert len(run["losses"]) == 3 and run["losses"] == expected["losses"]
        assert run["validation"] == expected["validation"]
        pairs = zip(run["parameters"], expected["parameters"], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_quantized_training_follows_stock_and_ranks_agree(
    stock: list[dict[str, Any]], quantized: list[dict[str, Any]]
) -> None:
    for expected, run in zip(stock, quantized, strict=True):
        assert run["losses"] != expected["losses"]
        assert max(abs(a - b) for a, b in zip(run["losses"], expected["losses"], strict=True)) < 0.03
        assert abs(run["validation"] - expected["validation"]) < 0.03
    assert quantized[0]["losses"] == quantized[1]["losses"]


def test_sequence_parallel_training_follows_stock(stock: list[dict[str, Any]]) -> None:
    runs = run_nemo(trained, 2, ["tp_comm=echo4", "echo.min_bytes=0", "trainer.sequence_parallel=true"])
    for expected, run in zip(stock, runs, strict=True):
        assert not run["calls"], "there are no all-reduces of activations"
        assert 0 < max(abs(a - b) for a, b in zip(run["losses"], expected["losses"], strict=True)) < 0.03
        assert abs(run["validation"] - expected["validation"]) < 0.03
    assert runs[0]["losses"] == runs[1]["losses"]


def test_every_call_is_the_reference_s_bit_for_bit(quantized: list[dict[str, Any]]) -> None:
    """The reference on what both ranks gave, state carried from site to site, gives what both ranks got."""
    group = SimulatedGroup(2, EchoConfig.preset("echo4", min_bytes=0))
    first, second = (rank["calls"] for rank in quantized)
    assert len(first) == len(second) > 0
    for (site, x0, y0), (other, x1, y1) in zip(first, second, strict=True):
        assert site == other and not torch.equal(x0, x1)
        expected = group.all_reduce([x0, x1], site)
        assert torch.equal(y0, expected) and torch.equal(y1, expected), site


def test_state_decides_what_the_calls_give(quantized: list[dict[str, Any]]) -> None:
    """The comparison above can fail: without the carried state the reference gives other bits at most sites."""
    first, second = (rank["calls"] for rank in quantized)
    differs = 0
    for (site, x0, y0), (_, x1, _) in zip(first, second, strict=True):
        fresh = SimulatedGroup(2, EchoConfig.preset("echo4", min_bytes=0))
        differs += not torch.equal(y0, fresh.all_reduce([x0, x1], site))
    assert differs >= len(first) // 2


def thin_loop_sites(rank: int, world_size: int) -> list[tuple[str, int, str]]:
    """The sites of one training pass of the thin loop's model of the same size, in the order of its calls."""
    import megatron.core.parallel_state as parallel_state

    from echo_megatron import install
    from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all
    from echo_megatron.pretrain.model import build_model
    from echo_megatron.pretrain.schema import DataConfig, Layers, ModelConfig, PretrainConfig, TrainerConfig

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    seed_all(1)
    nemo = tiny("tp_comm=echo4")
    model = {field.name: getattr(nemo.model, field.name) for field in dataclasses.fields(ModelConfig)}
    config = PretrainConfig(
        model=ModelConfig(**model),
        data=DataConfig(vocab_size=256, padded_vocab_size=256, eod_id=1),
        trainer=TrainerConfig(tensor_parallel=2, micro_batch_size=2, global_batch_size=4),
    )
    chunks = build_model(config, torch.float32, Layers.local, torch.device("cpu"))
    installation = install(chunks, EchoConfig.preset("echo4", min_bytes=0))
    assert installation.communicator is not None
    transport, sites = installation.communicator.transport, []
    original = transport.all_reduce

    def recording(x: torch.Tensor, site: Any, *rest: Any) -> Any:
        sites.append((site.direction.name, site.idx, site.name))
        return original(x, site, *rest)

    transport.all_reduce = recording  # type: ignore[method-assign]
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(32).expand(2, 32)
    chunks[0](tokens, positions, None, labels=tokens).mean().backward()
    return sites


def test_number_and_order_of_sites_are_the_thin_loop_s(quantized: list[dict[str, Any]]) -> None:
    one_pass = run_ranks(thin_loop_sites, 2)[0]
    assert len(one_pass) == 8
    calls = [(site.direction.name, site.idx, site.name) for site, _, _ in quantized[0]["calls"]]
    marked = list(zip(calls, quantized[0]["evaluations"], strict=True))
    training = [call for call, is_evaluation in marked if not is_evaluation]
    evaluation = [call for call, is_evaluation in marked if is_evaluation]
    # Three steps of two microbatches; one validation batch of two.
    assert training == one_pass * 3 * 2
    assert evaluation == [call for call in one_pass if call[0] == Direction.forward.name] * 2


def phases(rank: int, world_size: int) -> tuple[set[str], int]:
    """Which calls of a validation are quantized with phases=[train]: NeMo has to put the model into evaluation mode."""
    echo = EchoTPComm("echo4", min_bytes=0, phases=["train"])
    recorder = Recorder(echo)
    arguments = build(tiny(*STEPS, "tp_comm=nccl"))
    callbacks = arguments["trainer"].callbacks
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, EchoTPComm)] + [echo, recorder]
    llm.pretrain(**arguments)
    return {str(value) for value in recorder.evaluations}, len(recorder.calls)


def test_phases_are_nemo_s() -> None:
    for kinds, calls in run_nemo(phases, 2):
        assert kinds == {"False"} and calls == 8 * 3 * 2


def staged(rank: int, world_size: int, folder: str) -> tuple[list[float], list[tuple[str, int, str]]]:
    """TP=2 and two pipeline stages, with the errors of the first step written to TensorBoard."""
    pipeline = ("trainer.devices=4", "trainer.pipeline_parallel=2", "trainer.max_steps=2")
    logged = ("inspect_every=2", "log.tensorboard=true", f"log.dir={folder}")
    arguments = build(tiny("tp_comm=echo4", "echo.min_bytes=0", *pipeline, *logged))
    trainer = arguments["trainer"]
    recorder = Recorder(next(callback for callback in trainer.callbacks if isinstance(callback, EchoTPComm)))
    trainer.callbacks.append(recorder)
    llm.pretrain(**arguments)
    return recorder.losses, [(site.direction.name, site.idx, site.name) for site, _, _ in recorder.calls]


def test_pipeline_stages_have_sites_of_their_own_and_one_log(tmp_path: Path) -> None:
    ranks = run_nemo(staged, 4, str(tmp_path))
    for rank, (_, calls) in enumerate(ranks):
        layer = rank // 2  # one layer a stage; its sites are numbered from 0
        names = {name for _, _, name in calls}
        assert all(name.startswith(f"layers.{layer}.") for name in names) and len(names) == 4
        assert len(calls) >= 2 * 2 * 4
    scalars: set[str] = set()
    for file in tmp_path.rglob("events.out.tfevents*"):
        events = EventAccumulator(str(file))
        events.Reload()
        scalars.update(events.Tags()["scalars"])
    for layer in (0, 1):
        assert f"echo/backward/layers.{layer}.mlp.linear_fc1/relative_error" in scalars
