"""The composed configurations: the paper's values (appendix B, Table 7), and refusals of what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from echo_megatron.cli import config_dir
from echo_megatron.config import PRESETS, EchoConfig, Policy
from echo_megatron.pretrain.model import num_parameters
from echo_megatron.pretrain.names import tp_comm_name
from echo_megatron.pretrain.schema import PretrainConfig, from_composed, register_configs
from echo_megatron.pretrain.schema_checks import validate


def composed(*overrides: str) -> PretrainConfig:
    register_configs()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return from_composed(compose("pretrain", list(overrides)))


def test_the_stand_in_s_arms_differ_in_communication_alone() -> None:
    arms = {name: composed(f"experiment=qwen3_gutenberg_{name}") for name in ("16bit", "echo4")}
    for name, config in arms.items():
        assert config.name == f"qwen3_gutenberg_{name}"
        assert config.trainer.world_size == config.trainer.tensor_parallel == 2
        assert config.trainer.global_batch_size * config.model.sequence_length == 65_536
        assert (config.optim.lr, config.optim.warmup_steps, config.trainer.max_steps) == (3.0e-4, 100, 1000)
    assert not arms["16bit"].tp_comm.quantizes and arms["echo4"].tp_comm == EchoConfig.preset("echo4")
    arms["16bit"].tp_comm, arms["16bit"].name = arms["echo4"].tp_comm, arms["echo4"].name
    assert arms["16bit"] == arms["echo4"]


@pytest.mark.parametrize(("experiment", "bits", "lr"), [("16bit", 16, 3.0e-4), ("echo4", 4, 3.5e-4)])
def test_paper_runs(experiment: str, bits: int, lr: float) -> None:
    config = composed(f"experiment=qwen3_dolma_c4_{experiment}")
    validate(config)
    assert config.name == f"qwen3_dolma_c4_{experiment}"
    model, data, optim, trainer = config.model, config.data, config.optim, config.trainer
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (28, 1024, 3072)
    assert (model.num_attention_heads, model.num_query_groups, model.kv_channels) == (16, 8, 128)
    assert (model.rotary_base, model.sequence_length) == (1_000_000, 2048)
    assert (data.name, data.vocab_size, data.padded_vocab_size) == ("dolma_c4", 151_669, 151_936)
    assert (optim.lr, optim.min_lr, optim.warmup_steps) == (lr, 3.0e-5, 100)
    assert (optim.beta1, optim.beta2, optim.eps) == (0.9, 0.95, 1.0e-5)
    assert (optim.weight_decay, optim.clip_grad) == (0.1, 1.0)
    assert (trainer.micro_batch_size, trainer.global_batch_size, trainer.max_steps) == (24, 384, 12_716)
    assert trainer.num_microbatches == 16
    assert (trainer.tensor_parallel, trainer.pipeline_parallel, trainer.data_parallel) == (4, 1, 1)
    tokens_per_step = trainer.global_batch_size * model.sequence_length
    assert tokens_per_step == 786_432
    assert tokens_per_step * trainer.max_steps == pytest.approx(10.0e9, rel=1e-3)
    assert config.tp_comm.bits == bits


def test_paper_model_as_megatron_gets_it() -> None:
    import torch
    import torch.nn.functional as F

    from echo_megatron.pretrain.model import transformer_config

    megatron = transformer_config(composed("experiment=qwen3_dolma_c4_16bit"), torch.bfloat16)
    assert (megatron.normalization, megatron.qk_layernorm, megatron.add_bias_linear) == ("RMSNorm", True, False)
    assert (megatron.hidden_dropout, megatron.attention_dropout) == (0.0, 0.0)
    assert (megatron.gated_linear_unit, megatron.activation_func) == (True, F.silu)
    assert (megatron.bf16, megatron.params_dtype) == (True, torch.bfloat16)
    assert not megatron.sequence_parallel


def test_parameters_of_the_paper_model() -> None:
    config = composed("experiment=qwen3_dolma_c4_16bit")
    # Qwen3-0.6B: 0.6B in all, 0.44B without embeddings.
    total = num_parameters(config.model, config.data.padded_vocab_size)
    assert total == 596_049_920
    assert total - 151_936 * 1024 == 440_467_456


def _count(rank: int, world_size: int) -> tuple[int, int]:
    import torch
    from megatron.core import parallel_state

    from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all
    from echo_megatron.pretrain.model import build_gpt

    config = composed("trainer.tensor_parallel=1")
    install_cpu_shims()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    seed_all(1)
    gpt = build_gpt(config, torch.float32)
    counted = sum(parameter.numel() for parameter in gpt.parameters())
    return counted, num_parameters(config.model, config.data.padded_vocab_size)


def test_parameter_formula_equals_a_built_model() -> None:
    from tests.distributed import run_ranks

    ((counted, computed),) = run_ranks(_count, 1)
    assert counted == computed


def test_learning_rate_of_the_paper_run() -> None:
    """Warm-up over 100 steps, the peak at its end, 3e-5 after the last step."""
    from types import SimpleNamespace

    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from echo_megatron.pretrain.optimizer import scheduler_options

    config = composed("experiment=qwen3_dolma_c4_echo4")
    group: dict[str, float] = {}
    options = scheduler_options(config.optim, config.trainer.max_steps)
    scheduler = OptimizerParamScheduler(SimpleNamespace(param_groups=[group]), **options)
    rates = [group["lr"]]
    for _ in range(config.trainer.max_steps):
        scheduler.step(1)
        rates.append(group["lr"])
    assert rates[50] == pytest.approx(1.75e-4)
    assert max(rates) == rates[100] == pytest.approx(3.5e-4)
    assert rates[-1] == pytest.approx(3.0e-5)
    assert group["weight_decay"] == 0.1


def test_lr_ablation() -> None:
    register_configs()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        raw = compose("pretrain", ["experiment=lr_ablation"], return_hydra_config=True)
    assert raw.hydra.mode.name == "MULTIRUN"
    rates = str(raw.hydra.sweeper.params["optim.lr"]).split(",")
    assert [float(rate) for rate in rates] == [2.0e-4, 2.5e-4, 3.0e-4, 3.5e-4]
    config = composed("experiment=lr_ablation", "optim.lr=2.5e-4")
    validate(config)
    assert (config.trainer.global_batch_size, config.trainer.max_steps) == (32, 4096)
    assert config.trainer.global_batch_size * 2048 * 4096 == pytest.approx(0.27e9, rel=0.01)
    assert config.run_dir == Path("runs/lr_ablation/0.00025")


@pytest.mark.parametrize("name", PRESETS)
def test_tp_comm_group_is_the_preset(name: str) -> None:
    config = composed(f"tp_comm={name}")
    assert config.tp_comm == EchoConfig.preset(name)
    assert tp_comm_name(config.tp_comm) == name


def test_tp_comm_name_says_what_differs() -> None:
    assert tp_comm_name(composed("tp_comm=echo4", "tp_comm.eta=0").tp_comm) == "echo4 eta=0.0"
    given = composed("tp_comm=echo4", "tp_comm.eta=1", "tp_comm.beta1=0")
    assert tp_comm_name(given.tp_comm) == "echo4", "the same by its default"
    assert tp_comm_name(composed("tp_comm=echo4_paper", "tp_comm.eta=0.75").tp_comm) == "echo4_paper"
    mixed = composed("tp_comm=echo4", "tp_comm.backward_residual=consensus", "tp_comm.eta=1").tp_comm
    assert tp_comm_name(mixed) == "echo4 backward_residual=consensus eta=1.0", "the default of one direction only"
    config = composed("tp_comm=echo4_paper", "tp_comm.policy=symmetric", "tp_comm.directions=[forward]").tp_comm
    assert config.policy is Policy.symmetric
    assert tp_comm_name(config) == "echo4_paper policy=symmetric directions=forward"


def test_every_experiment_and_option_composes() -> None:
    for group in ("model", "data", "optim", "trainer", "experiment", "tp_comm"):
        options = sorted((config_dir() / group).glob("*.yaml"))
        assert options
        for option in options:
            composed(f"{group}={option.stem}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=3", "max_step"),
        ("tp_comm.etta=0.5", "etta"),
        ("trainer.max_steps=many", "many"),
        ("tp_comm.policy=rotten", "rotten"),
        ("tp_comm=echo5", "echo5"),
    ],
)
def test_misspelt_keys_and_wrong_types_fail(override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed(override)
    assert message in str(caught.value) + str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.global_batch_size=12", r"multiple of micro_batch_size \* data_parallel = 8 \* 1 = 8, got 12"),
        ("trainer.tensor_parallel=3", r"num_attention_heads: expected a multiple of trainer\.tensor_parallel=3, got 4"),
        ("trainer.pipeline_parallel=3", r"num_layers: expected a multiple of trainer\.pipeline_parallel=3, got 8"),
        ("trainer.max_steps=5", r"warmup_steps: expected fewer than trainer\.max_steps=5, got 100"),
        ("+optim.momentum=0.9", r"optim\.momentum: unknown key; expected one of lr, min_lr"),
        ("trainer.max_steps=0", r"trainer\.max_steps: expected at least 1, got 0"),
        ("optim.min_lr=1", r"optim\.min_lr: expected a number in \[0, 0\.0003\], got 1"),
        ("optim.beta1=1", r"optim\.beta1: expected a number in \[0, 1\), got 1"),
        ("model.num_query_groups=3", r"num_query_groups: expected a divisor of num_attention_heads=4, got 3"),
        ("model.kv_channels=7", "even number"),
        ("data.padded_vocab_size=100", "at least vocab_size=1024, got 100"),
        ("data.train=[/data/a]", r"either data\.folder .* or data\.train"),
        ("data=tokens", r"either data\.folder .* or data\.train"),
        ("data.split='99,1'", r"expected neither with data\.folder"),
        ("name=../elsewhere", "name: expected a folder name under runs_dir"),
        ("tp_comm.bits=5", "bits: expected one of 4, 8, 16, got 5"),
        ("tp_comm.eta=1.5", r"eta: expected a number in \[0, 1\], got 1\.5"),
    ],
)
def test_ranges_and_combinations_fail_with_what_was_expected(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate(composed(override))


def test_every_key_of_the_configuration_is_documented() -> None:
    """A new option without a word in docs/pretrain.md fails here."""
    text = (Path(__file__).parent.parent / "docs" / "pretrain.md").read_text()
    config = OmegaConf.structured(PretrainConfig)
    for group in ("model", "data", "optim", "trainer"):
        for key in config[group]:
            assert f"`{key}`" in text, f"{group}.{key}"
