"""The Hydra recipe in processes of its own, both arms; its refusals; nemo_run's factories and the paper's numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fiddle as fdl
import nemo_run as run
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from nemo.collections import llm
from nemo_runs import run_nemo, tiny, train
from omegaconf import OmegaConf
from pretrain_runs import write_tokens

from echo_megatron.cli import config_dir
from echo_megatron.data import prepare_sample
from echo_megatron.integrations import nemo_schema
from echo_megatron.integrations.nemo import EchoTPComm
from echo_megatron.integrations.nemo_build import PreparedDataModule
from echo_megatron.integrations.nemo_recipes import (
    qwen3_600m_echo,
    qwen3_600m_paper_16bit,
    qwen3_600m_paper_echo4,
)
from echo_megatron.integrations.options import OPTION_NAMES

ROOT = Path(__file__).resolve().parents[2]


def composed(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(config_dir() / "nemo"), version_base="1.3"):
        return compose(name, list(overrides))


def recipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The recipe as a user starts it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(ROOT / "recipes" / "nemo_pretrain.py"), "--config-name", "tiny_cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


# -- the Hydra recipe


@pytest.fixture(scope="module")
def both_arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the recipe printed, trained in both arms on tokens from a file, without a checkpoint."""
    folder = tmp_path_factory.mktemp("recipe")
    data = write_tokens(folder)
    tokens = [
        *("data.mock=false", f"data.train=[{data['train'][0]}]", f"data.validation=[{data['validation'][0]}]"),
        *("data.vocab_size=64", "data.padded_vocab_size=64", "data.eod_id=0", "trainer.max_steps=2"),
        *("log.save_interval=0", "log.tensorboard=false"),
    ]
    printed = {}
    for flag in ("echo4", "nccl"):
        shown = recipe(folder, f"tp_comm={flag}", *tokens)
        assert shown.returncode == 0, shown.stdout + shown.stderr
        printed[flag] = shown.stdout + shown.stderr
    return printed


def test_the_recipe_trains_in_both_arms(both_arms: dict[str, str]) -> None:
    losses = {}
    for flag, text in both_arms.items():
        losses[flag] = [float(value) for value in re.findall(r"reduced_train_loss: ([0-9.]+)", text)]
        assert len(losses[flag]) == 2 and "val_loss" in text
        assert ("echo: 4-bit" in text) == (flag == "echo4")
    assert all(abs(a - b) < 0.05 for a, b in zip(losses["echo4"], losses["nccl"], strict=True))


def test_the_arms_differ_in_one_line(both_arms: dict[str, str]) -> None:
    """Of what the recipe printed as its configuration, and of the composed files."""
    lines = {
        flag: set(re.search(r"^tp_comm:.*?^resume:", text, re.S | re.M)[0].splitlines())
        for flag, text in both_arms.items()
    }
    assert lines["echo4"] - lines["nccl"] == {"tp_comm: echo4"} and lines["nccl"] - lines["echo4"] == {"tp_comm: nccl"}
    for name in ("pretrain", "tiny_cpu"):
        arms = [OmegaConf.to_yaml(composed(name, f"tp_comm={flag}")).splitlines() for flag in ("echo4", "nccl")]
        assert sum(one != other for one, other in zip(*arms, strict=True)) == 1
        text = (config_dir() / "nemo" / f"{name}.yaml").read_text()
        assert text.count("\ntp_comm:") == 1 and "\ntp_comm: echo4\n" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tp_comm=echo5"], "tp_comm: expected one of nccl, echo4.*got 'echo5'"),
        (["tp_comm=echo4", "model.tp_comm=nccl"], "tp_comm=echo4 and model.tp_comm=nccl: they are the same flag"),
        (["tp_comm=null"], "tp_comm: not given"),
        (["tp_comm=nccl", "echo.eta=0.5"], "eta would do nothing"),
        (["echo.eta=3"], r"eta: expected a number in \[0, 1\]"),
        (["+model.speed=9"], "model.speed: unknown key"),
        (["+tpcomm=echo4"], "tpcomm: unknown key"),
        (["data.folder=data/dolma_c4"], "expected one of data.mock=true, data.folder"),
        (["data.mock=false"], "expected one of data.mock=true, data.folder"),
        (["trainer.tensor_parallel=3"], "expected a multiple of tensor_parallel=3"),
        (["trainer.global_batch_size=3"], "trainer.global_batch_size: expected a multiple of"),
        (["model.num_query_groups=1"], "model.num_query_groups: expected a multiple of trainer.tensor_parallel=2"),
        (["optim.warmup_steps=4"], "optim.warmup_steps: expected fewer than trainer.max_steps=4"),
    ],
)
def test_wrong_configurations_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nemo_schema.from_composed(composed("tiny_cpu", *overrides))


def test_misspelt_keys_are_hydra_s_errors() -> None:
    with pytest.raises(ConfigCompositionException, match="tpcomm"):
        composed("tiny_cpu", "tpcomm=echo4")
    with pytest.raises(ConfigCompositionException, match="etta"):
        composed("tiny_cpu", "echo.etta=0.5")


def test_the_flag_is_taken_from_the_model_too() -> None:
    for overrides in (["tp_comm=null", "model.tp_comm=echo8"], ["tp_comm=echo8", "model.tp_comm=echo8"]):
        assert nemo_schema.from_composed(composed("tiny_cpu", *overrides)).flag == "echo8"


def test_every_option_of_echo_is_a_key() -> None:
    assert tuple(composed("tiny_cpu").echo) == OPTION_NAMES
    config = nemo_schema.from_composed(composed("tiny_cpu", "echo.directions=[forward]", "echo.eta=0.5"))
    assert config.echo_options == {"directions": ["forward"], "eta": 0.5}


def test_pretrain_yaml_is_qwen3_600m() -> None:
    model, stock = nemo_schema.from_composed(composed("pretrain")).model, llm.Qwen3Config600M()
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (28, 1024, 3072)
    assert (stock.num_layers, stock.hidden_size, stock.ffn_hidden_size) == (28, 1024, 3072)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (16, 8, 128)
    assert (stock.num_attention_heads, stock.num_query_groups, stock.kv_channels) == (16, 8, 128)
    assert (model.rotary_base, model.layernorm_epsilon, model.tie_embeddings) == (1_000_000, 1e-6, True)
    assert (stock.rotary_base, stock.layernorm_epsilon, stock.share_embeddings_and_output_weights) == (1e6, 1e-6, True)


def single(rank: int, world_size: int) -> bool:
    one = ("trainer.devices=1", "trainer.tensor_parallel=1", "trainer.max_steps=2")
    trainer = train(tiny("tp_comm=echo4", *one))["trainer"]
    return trainer.global_step == 2


def test_tensor_parallel_one_trains_without_echo() -> None:
    assert run_nemo(single, 1) == [True]


def trained_on(rank: int, world_size: int, data: list[str]) -> float:
    one = ("tp_comm=nccl", "trainer.devices=1", "trainer.tensor_parallel=1", "trainer.max_steps=2", "data.mock=false")
    return float(train(tiny(*one, *data))["trainer"].callback_metrics["reduced_train_loss"])


def test_tokens_of_every_kind_are_read(tmp_path: Path) -> None:
    """Prefixes with a split, with no validation asked for; a folder that this project prepared, with validation."""
    prefix = write_tokens(tmp_path)["train"][0]
    sizes = ["data.vocab_size=64", "data.padded_vocab_size=64", "data.eod_id=0"]
    (loss,) = run_nemo(trained_on, 1, [f"data.train=[{prefix}]", "data.split='99,1'", *sizes])
    assert 3 < loss < 5  # log(64) = 4.2
    prepared = prepare_sample(tmp_path / "sample")
    sizes = [f"data.vocab_size={prepared.vocab_size}", "data.padded_vocab_size=1024", f"data.eod_id={prepared.eod}"]
    folder = [f"data.folder={prepared.folder}", "trainer.val_interval=2"]
    (loss,) = run_nemo(trained_on, 1, [*folder, *sizes])
    assert 6 < loss < 8  # log(1024) = 6.9
    with pytest.raises(ValueError, match="not found; prepare the data first"):
        PreparedDataModule(str(tmp_path))


# -- nemo_run's factories


def test_the_factory_is_nemo_s_recipe_and_the_callback() -> None:
    echo = qwen3_600m_echo(tp_comm="echo8", tensor_parallelism=2, num_gpus_per_node=4)
    assert echo.trainer.strategy.tensor_model_parallel_size == 2
    assert echo.trainer.devices == 4 and echo.trainer.strategy.sequence_parallel is False
    assert qwen3_600m_echo(sequence_parallelism=True).trainer.strategy.sequence_parallel is True
    callback = echo.trainer.callbacks[-1]
    assert fdl.get_callable(callback) is EchoTPComm and callback.tp_comm == "echo8"
    callback.eta = 0.5
    assert fdl.build(callback)._config.eta == 0.5
    with pytest.raises(ValueError, match="tp_comm: expected one of"):
        qwen3_600m_echo(tp_comm="echo5")
    stock = qwen3_600m_echo(tp_comm="nccl")
    assert fdl.get_callable(stock) is fdl.get_callable(llm.qwen3_600m.pretrain_recipe())


@pytest.mark.parametrize(
    ("factory", "tp_comm", "lr"), [(qwen3_600m_paper_16bit, "nccl", 3.0e-4), (qwen3_600m_paper_echo4, "echo4", 3.5e-4)]
)
def test_the_paper_s_recipes(factory: Any, tp_comm: str, lr: float) -> None:
    recipe = factory(data="data/dolma_c4")
    model, trainer, data = recipe.model.config, recipe.trainer, recipe.data
    built = fdl.build(model)
    assert (built.num_layers, built.hidden_size, built.ffn_hidden_size) == (28, 1024, 3072)
    assert (built.num_attention_heads, built.num_query_groups, built.kv_channels) == (16, 8, 128)
    assert (built.normalization, built.qk_layernorm, built.rotary_base) == ("RMSNorm", True, 1e6)
    assert (built.hidden_dropout, built.attention_dropout) == (0.0, 0.0)
    assert (built.vocab_size, built.seq_length) == (151_936, 2048)
    assert (data.seq_length, data.micro_batch_size, data.global_batch_size) == (2048, 24, 384)
    assert data.folder == "data/dolma_c4" and fdl.get_callable(data) is PreparedDataModule
    assert data.global_batch_size * data.seq_length == 786_432
    assert (trainer.max_steps, trainer.devices, trainer.num_nodes) == (12_716, 4, 1)
    assert trainer.strategy.tensor_model_parallel_size == 4
    assert trainer.strategy.pipeline_model_parallel_size == trainer.strategy.context_parallel_size == 1
    assert trainer.strategy.sequence_parallel is False
    assert (trainer.plugins.precision, trainer.plugins.grad_reduce_in_fp32) == ("bf16-mixed", True)
    optim, schedule = recipe.optim.config, recipe.optim.lr_scheduler
    assert (optim.lr, optim.adam_beta1, optim.adam_beta2, optim.adam_eps) == (lr, 0.9, 0.95, 1e-5)
    assert (optim.weight_decay, optim.clip_grad) == (0.1, 1.0)
    assert (schedule.warmup_steps, schedule.constant_steps, schedule.min_lr) == (100, 0, 3.0e-5)
    callback = trainer.callbacks[-1]
    assert fdl.get_callable(callback) is EchoTPComm and callback.tp_comm == tp_comm
    assert isinstance(fdl.build(callback), EchoTPComm)


def test_the_paper_s_arms_differ_in_flag_and_learning_rate_alone() -> None:
    names = {"name": "x", "dir": "y"}
    texts = [str(factory(**names)).splitlines() for factory in (qwen3_600m_paper_16bit, qwen3_600m_paper_echo4)]
    different = [pair for pair in zip(*texts, strict=True) if pair[0] != pair[1]]
    assert len(different) == 2
    assert any("3e-04" in one or "0.0003" in one for one, _ in different)
    assert any("nccl" in one and "echo4" in other for one, other in different)


def test_the_schedule_ends_where_the_paper_s_does() -> None:
    import torch
    from nemo.core.optim.lr_scheduler import CosineAnnealing

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.5e-4)
    schedule = CosineAnnealing(optimizer, max_steps=12_716, warmup_steps=100, constant_steps=0, min_lr=3.0e-5)
    rates = []
    for _ in range(12_716):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(3.5e-4) and rates.index(max(rates)) in (100, 101)
    assert rates[-1] == pytest.approx(3.0e-5, rel=1e-3)


def test_nemo_run_finds_the_factories() -> None:
    """By the entry point of the installed package, as `nemo llm pretrain --factory` looks for them."""
    from nemo_run.cli.api import list_factories

    names = {factory.__name__ for factory in list_factories(run.cli.api.get_type_namespace(llm.pretrain))}
    assert {"qwen3_600m_echo", "qwen3_600m_paper_16bit", "qwen3_600m_paper_echo4"} <= names


def test_nemo_llm_pretrain_composes_the_factory(tmp_path: Path) -> None:
    """`nemo llm pretrain --factory …` up to the launch, which `--dryrun` leaves out."""
    nemo = Path(sys.executable).with_name("nemo")
    factory = "qwen3_600m_paper_echo4(data='data/dolma_c4')"
    exported = tmp_path / "task.yaml"
    command = [str(nemo), "llm", "pretrain", "--factory", factory, "--to-yaml", str(exported), "--yes"]
    environment = {**os.environ, "NEMORUN_HOME": str(tmp_path)}
    shown = subprocess.run(
        [*command, "trainer.max_steps=7"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    text = exported.read_text()
    assert "echo_megatron.integrations.nemo.EchoTPComm" in text and "max_steps: 7" in text
