"""The real Megatron-Bridge: overrides, YAML, refusals, the hook's place, and training on gloo with TP=2."""

import copy
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch
import yaml

pytest.importorskip(
    "megatron.bridge", reason="Megatron-Bridge 0.6.2 is not installed here; docs/bridge.md says what it needs"
)
import bridge_runs
from bridge_runs import parameters, run, stock, tiny
from distributed import run_ranks
from megatron.bridge.recipes.qwen import qwen3_600m_pretrain_config
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer, InProcessRestartConfig
from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides
from megatron.bridge.utils.instantiate_utils import instantiate

from echo_megatron import EchoConfig
from echo_megatron.integrations.bridge import EchoCallback, EchoConfigContainer, with_echo

QUANTIZED = ("echo.tp_comm=echo4", "echo.min_bytes=0", "echo.eta=0.5")
PASS_THROUGH = ("echo.tp_comm=echo4", f"echo.min_bytes={2**62}")
ALL_SITES = 8  # two layers, two sites a layer and direction


@pytest.fixture(autouse=True)
def hf_config(tmp_path, monkeypatch):
    bridge_runs.write_hf_config(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config():
    return with_echo(qwen3_600m_pretrain_config())


def ranks(fn, *args, world_size=2):
    return run_ranks(fn, world_size, *args, timeout_s=120.0)


# -- configuration


def test_overrides_are_plain_and_nccl_is_the_default(config):
    assert config.echo.tp_comm == "nccl" and not config.echo.resolve().quantizes
    process_config_with_overrides(
        config, cli_overrides=["echo.tp_comm=echo4", "echo.eta=0.5", "echo.directions=[forward]", "train.train_iters=7"]
    )
    assert config.echo.resolve() == EchoConfig.preset("echo4", eta=0.5, directions=["forward"])
    assert config.train.train_iters == 7


def test_undeclared_keys_are_errors_on_the_command_line_and_in_a_yaml_file(config, tmp_path):
    with pytest.raises(OverridesError, match=r"echo\.etta"):
        process_config_with_overrides(config, cli_overrides=["echo.etta=0.5"])
    with pytest.raises(ValueError, match=r"echo\.etta: unknown option; expected one of a, algorithm"):
        process_config_with_overrides(config, cli_overrides=["+echo.etta=0.5"])
    (tmp_path / "run.yaml").write_text("echo: {tp_comm: echo4, etta: 0.5}\n")
    with pytest.raises(ValueError, match=r"echo\.etta: unknown option"):
        process_config_with_overrides(config, config_filepath=str(tmp_path / "run.yaml"))


def test_a_yaml_file_sets_options(config, tmp_path):
    (tmp_path / "run.yaml").write_text("echo: {tp_comm: echo8, policy: naive}\n")
    process_config_with_overrides(config, config_filepath=str(tmp_path / "run.yaml"), cli_overrides=["echo.eta=0"])
    assert config.echo.resolve() == EchoConfig.preset("echo8", policy="naive", eta=0.0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("echo.tp_comm=echo5", r"echo\.tp_comm: expected one of nccl"),
        ("echo.eta=2", r"echo\.eta: expected a number in \[0, 1\], got 2"),
        ("echo.group_size=abc", r"echo\.group_size: expected one of 32"),
    ],
)
def test_illegal_values_stop_validate_and_the_callback(config, override, message):
    process_config_with_overrides(config, cli_overrides=["echo.tp_comm=echo4", override])
    with pytest.raises(ValueError, match=message):
        config.validate()
    with pytest.raises(ValueError, match=message):
        EchoCallback(config)


def test_with_echo_takes_every_section_and_sets_options():
    recipe = qwen3_600m_pretrain_config()
    recipe._checkpoint_load_required = True
    config = with_echo(recipe, tp_comm="echo4", eta=0.5)
    assert all(getattr(config, f.name) is getattr(recipe, f.name) for f in fields(recipe) if f.name != "echo")
    assert config.echo.resolve() == EchoConfig.preset("echo4", eta=0.5) and config._checkpoint_load_required
    assert with_echo(config).echo.tp_comm == "nccl"
    with pytest.raises(ValueError, match=r"echo\.etta: unknown option"):
        with_echo(recipe, etta=0.5)
    with pytest.raises(ValueError, match=r"echo\.eta: expected a number"):
        with_echo(recipe, tp_comm="echo4", eta=7)


@dataclass(kw_only=True)
class _Derived(ConfigContainer):
    extra: int = 1


def test_with_echo_refuses_a_class_of_the_users_own(config):
    sections = {f.name: getattr(config, f.name) for f in fields(ConfigContainer) if f.init}
    with pytest.raises(
        ValueError, match=r"with_echo: expected megatron\.bridge's ConfigContainer, got .*_Derived; derive"
    ):
        with_echo(_Derived(**sections))


def test_yaml_of_a_run_round_trips(config, tmp_path):
    config.echo.tp_comm, config.echo.eta, config.echo.phases = "echo4", 0.5, ["train"]
    config.to_yaml(str(tmp_path / "run.yaml"))
    section = yaml.safe_load((tmp_path / "run.yaml").read_text())["echo"]
    assert {key: value for key, value in section.items() if key != "_target_"} == {
        **{"tp_comm": "echo4", "eta": 0.5, "phases": ["train"], "inspect_every": 0}
    }
    again = EchoConfigContainer.from_yaml(str(tmp_path / "run.yaml"))
    assert type(again) is EchoConfigContainer and again.echo == config.echo
    assert again.train == config.train and again.model.hidden_size == config.model.hidden_size == 1024


def test_a_copy_has_the_section_and_neither_callback_nor_hook(config):
    config.echo.tp_comm = "echo4"
    EchoCallback(config)
    twin = copy.deepcopy(config)
    twin.echo.eta = 0.25
    assert config.echo.eta is None and twin.echo.tp_comm == "echo4"
    EchoCallback(twin)


# -- refusals, before a model is built


def _set(config, path, value):
    *sections, name = path.split(".")
    target = config
    for section in sections:
        target = getattr(target, section)
    setattr(target, name, value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.multi_latent_attention", True, r"multi_latent_attention=True is not supported: .* or tp_comm=nccl"),
        ("model.tp_comm_overlap", True, r"tp_comm_overlap=True is not supported: userbuffers"),
        ("comm_overlap", CommOverlapConfig(tp_comm_overlap=True), r"comm_overlap\.tp_comm_overlap=True .*userbuffers"),
        ("model.use_transformer_engine_full_layer_spec", True, r"model\.use_transformer_engine_full_layer_spec=True"),
        ("model.use_transformer_engine_op_fuser", True, r"use_transformer_engine_op_fuser=True"),
        ("model.tensor_model_parallel_size", 16, r"model\.tensor_model_parallel_size: .*expected 1 to 8 ranks, got 16"),
        ("dist.use_megatron_fsdp", True, r"dist\.use_megatron_fsdp=True is not supported"),
        ("dist.use_torch_fsdp2", True, r"dist\.use_torch_fsdp2=True is not supported"),
        ("ddp.use_megatron_fsdp", True, r"ddp\.use_megatron_fsdp=True is not supported"),
        (
            "inprocess_restart",
            InProcessRestartConfig(enabled=True),
            r"inprocess_restart\.enabled=True is not supported",
        ),
        ("model.cuda_graph_impl", "local", r"inspect_every=10: a CUDA graph's replay runs no Python"),
        ("logger.tensorboard_dir", None, r"inspect_every=10: the run has no logger.*logger\.tensorboard_dir"),
        ("model.megatron_mimo_parallelism_config", object(), r"MegatronMIMOProvider is not supported"),
    ],
)
def test_what_the_configuration_shows_is_refused_by_name(config, path, value, message):
    config.model.tensor_model_parallel_size = 2
    config.echo.tp_comm, config.echo.inspect_every = "echo4", 10
    _set(config, path, value)
    with pytest.raises(ValueError, match=f"^echo.*{message}"):
        config.validate()
    with pytest.raises(ValueError, match=message):
        EchoCallback(config)
    config.echo.tp_comm, config.echo.inspect_every = "nccl", 0
    EchoCallback(config)  # the other arm runs all that Bridge runs


def test_sequence_parallelism_needs_the_local_residual(config):
    config.model.tensor_model_parallel_size, config.model.sequence_parallel = 2, True
    config.echo.tp_comm = "echo4_paper"
    with pytest.raises(ValueError, match="residual: expected local with sequence parallelism, got consensus"):
        EchoCallback(config)
    config.echo.tp_comm, config.echo.gather_bits = "echo4", 4
    EchoCallback(config)


def test_the_callback_belongs_to_one_configuration(config):
    with pytest.raises(ValueError, match=r"EchoCallback: expected .* section echo, got ConfigContainer; .*with_echo"):
        EchoCallback(qwen3_600m_pretrain_config())
    EchoCallback(config)
    with pytest.raises(ValueError, match=r"EchoCallback: this configuration has one already"):
        EchoCallback(config)


def test_metrics_go_to_every_logger_of_the_run():
    from echo_megatron.integrations.bridge_checks import log_metrics

    written = []

    class Logger:
        def add_scalar(self, tag, value, step):
            written.append((tag, value, step))

        def log(self, metrics, step):
            written.append((metrics, step))

        def log_metrics(self, metrics, step):
            written.append((metrics, step))

    names = ("tensorboard_logger", "wandb_logger", "mlflow_logger", "comet_logger")
    log_metrics(SimpleNamespace(**dict.fromkeys(names, Logger())), {"echo/a": 1.0}, 3)
    assert written == [("echo/a", 1.0, 3), *[({"echo/a": 1.0}, 3)] * 3]
    log_metrics(SimpleNamespace(**dict.fromkeys(names)), {"echo/a": 1.0}, 3)


# -- training


def trained(rank, world_size, make, overrides):
    recorder, printed = run(make(*overrides))
    left = [
        module for chunk in recorder.chunks for module in chunk.modules() if "Echo" in type(_group(module)).__name__
    ]
    return {
        "losses": recorder.losses,
        "grad_norms": recorder.grad_norms,
        "eval_losses": recorder.eval_losses,
        "num_sites": recorder.num_sites,
        "parameters": parameters(recorder),
        "printed": printed,
        "left": len(left),
    }


def _group(module):
    return getattr(module, "tp_group", None)


EVALUATING = ("validation.eval_iters=1", "validation.eval_interval=2")


@pytest.mark.slow
def test_the_baseline_and_a_pass_through_are_bridge_bit_for_bit():
    arms = [(stock, ()), (tiny, ()), (tiny, PASS_THROUGH)]
    expected, nccl, through = (ranks(trained, make, (*EVALUATING, *echo)) for make, echo in arms)
    for rank in range(2):
        for arm, sites in ((nccl, 0), (through, ALL_SITES)):
            for key in ("losses", "grad_norms", "eval_losses"):
                assert arm[rank][key] == expected[rank][key] and len(expected[rank][key]) >= 3
            assert arm[rank]["parameters"].keys() == expected[rank]["parameters"].keys()
            assert all(torch.equal(p, expected[rank]["parameters"][n]) for n, p in arm[rank]["parameters"].items())
            assert set(arm[rank]["num_sites"]) == {sites}
            assert arm[rank]["left"] == 0


@pytest.mark.slow
def test_echo4_trains_is_reported_once_and_leaves_the_model_as_it_was():
    expected = ranks(trained, tiny, EVALUATING)
    results = ranks(trained, tiny, (*EVALUATING, *QUANTIZED))
    for rank, result in enumerate(results):
        assert result["losses"] == results[0]["losses"] != expected[rank]["losses"]
        pairs = zip(result["losses"], expected[rank]["losses"], strict=True)
        assert max(abs(a - b) for a, b in pairs) < 0.01
        # Installed in each step and in every evaluation: those within the training, and the last on both kinds of data.
        assert result["num_sites"] == [ALL_SITES] * len(result["num_sites"]) and len(result["num_sites"]) >= 4 + 3
        assert result["printed"].count("self_attention.linear_proj") == (1 if rank == 0 else 0)
        assert result["left"] == 0
    replicated = [name for name in results[0]["parameters"] if "layernorm" in name]
    assert len(replicated) == 2 * 4 + 1
    assert all(torch.equal(results[0]["parameters"][n], results[1]["parameters"][n]) for n in replicated)


@pytest.mark.slow
def test_sequence_parallelism_trains_through_and_quantized():
    sequence = "model.sequence_parallel=true"
    arms = ((), PASS_THROUGH, QUANTIZED)
    expected, through, quantized = (ranks(trained, tiny, (sequence, *echo)) for echo in arms)
    for rank in range(2):
        assert through[rank]["losses"] == expected[rank]["losses"]
        assert through[rank]["grad_norms"] == expected[rank]["grad_norms"]
        assert set(through[rank]["num_sites"]) == set(quantized[rank]["num_sites"]) == {ALL_SITES}
        pairs = zip(quantized[rank]["losses"], expected[rank]["losses"], strict=True)
        assert 0 < max(abs(a - b) for a, b in pairs) < 0.01
        assert quantized[rank]["losses"] == quantized[0]["losses"]
    report = quantized[0]["printed"]
    assert report.count("  reduce-scatter  ") == report.count("  all-gather  ") == 4 and "all-reduce" not in report


def test_tensor_parallel_size_1_says_that_it_does_nothing():
    (result,) = ranks(trained, tiny, (*QUANTIZED, "model.tensor_model_parallel_size=1"), world_size=1)
    assert result["printed"].count("echo: model.tensor_model_parallel_size=1: ") == 1
    assert set(result["num_sites"]) == {0} and len(result["losses"]) == 4


def inspected(rank, world_size, folder):
    pipeline = ("model.pipeline_model_parallel_size=2", "model.pipeline_dtype=torch.float32")
    run(tiny(*QUANTIZED, *pipeline, "echo.inspect_every=2", f"logger.tensorboard_dir={folder}"))


@pytest.mark.slow
def test_inspected_steps_reach_tensorboard_from_every_pipeline_stage(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(inspected, str(tmp_path / "tb"), world_size=4)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("echo/") and tag.endswith("/relative_error")]
    assert {tag.split("/")[2].split(".")[1] for tag in tags} == {"0", "1"} and len(tags) == ALL_SITES
    for tag in tags:
        assert [event.step for event in events.Scalars(tag)] == [2, 4]
        assert all(0 < event.value < 0.5 for event in events.Scalars(tag))


# -- checkpoints


def saved(rank, world_size, folder):
    run(tiny(*QUANTIZED, f"checkpoint.save={folder}", "checkpoint.save_interval=2", "train.train_iters=2"))


def resumed(rank, world_size, folder, make, overrides):
    recorder, printed = run(make(f"checkpoint.load={folder}", "train.train_iters=3", *overrides))
    return len(recorder.losses), printed


def adapted(rank, world_size, folder):
    """LoRA over the checkpoint's weights: what the hook finds, and whose group is whose after it."""
    from megatron.bridge.peft.lora import LoRA
    from megatron.core.distributed import DistributedDataParallel

    config = tiny(*QUANTIZED, f"checkpoint.pretrained_checkpoint={folder}", "train.train_iters=3")
    config.peft = LoRA(dim=4)
    seen = []
    original = EchoCallback.install

    def recording(self, chunks):
        seen.append(type(chunks[0]) is DistributedDataParallel)
        original(self, chunks)
        groups = [(name, type(_group(m)).__name__) for name, m in chunks[0].named_modules() if _group(m) is not None]
        seen.append({name.rsplit(".layers.", 1)[-1] for name, group in groups if group == "EchoProcessGroup"})
        seen.append(sum(".adapter." in name for name, _ in groups))

    EchoCallback.install = recording
    recorder, _ = run(config)
    return seen, recorder.losses, recorder.num_sites


@pytest.mark.slow
def test_a_checkpoint_knows_its_arm_and_peft_comes_before_the_hook(tmp_path):
    folder = tmp_path / "checkpoints"
    ranks(saved, str(folder))
    run_config = folder / "iter_0000002" / "run_config.yaml"
    section = instantiate(yaml.safe_load(run_config.read_text())["echo"])  # Bridge can't build its own tokenizer again
    assert section.resolve() == EchoConfig.preset("echo4", min_bytes=0, eta=0.5)

    message = "written with tp_comm=echo4 eta=0.5 min_bytes=0, this run has tp_comm=nccl; the weights are compatible"
    for make, overrides, told in [(tiny, (), 1), (tiny, QUANTIZED, 0), (stock, (), 0)]:
        results = ranks(resumed, str(folder), make, overrides)
        assert [steps for steps, _ in results] == [1, 1]
        assert [printed.count("echo: the checkpoint of step 2 was") for _, printed in results] == [told, 0]
        assert results[0][1].count(message) == told

    linears = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    for (wrapped, with_echo_group, num_adapted), losses, num_sites in ranks(adapted, str(folder)):
        # Once, on the wrapped model with its adapters: the linears that LoRA wraps have Echo's group, no adapter has.
        assert wrapped and with_echo_group == {f"{idx}.{linear}.to_wrap" for idx in range(2) for linear in linears}
        assert num_adapted > 0 and num_sites == [ALL_SITES] * 3 and all(0 < loss < 10 for loss in losses)


def failed(rank, world_size, folder):
    from echo_megatron import Installation
    from echo_megatron.transports.protocol import CommunicationError

    calls = []

    def check(self):
        calls.append(1)
        if len(calls) == 2:
            raise CommunicationError("planted")

    Installation.check = check
    with pytest.raises(CommunicationError, match="planted"):
        run(tiny(*QUANTIZED, f"checkpoint.save={folder}", "checkpoint.save_interval=1"))


def test_a_step_with_a_failed_call_is_not_saved(tmp_path):
    ranks(failed, str(tmp_path / "checkpoints"))
    assert [path.name for path in (tmp_path / "checkpoints").glob("iter_*")] == ["iter_0000001"]


# -- mistakes that only a built model shows


def failing(rank, world_size, mistake):
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    run_before = tiny(*QUANTIZED)  # makes this a CPU process
    config = tiny(*QUANTIZED)
    bridge_runs.initialize.compile_helpers = lambda: None
    callbacks = [] if mistake == "no callback" else [EchoCallback(config)]
    if mistake == "two configurations":
        EchoCallback(run_before)
        run_before.model = config.model
        run_before.validate()
    if mistake == "registered twice":
        config.validate()
        config.validate()  # one hook all the same: see below
        (hook,) = config.model._post_wrap_hooks
        config.model.register_post_wrap_hook(hook)
    if mistake == "without validate":
        config.validate = lambda: super(type(config), config).validate()
    with pytest.raises(ValueError) as caught:
        pretrain(config, forward_step, callbacks=callbacks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "no callback",
            "there is no EchoCallback, which installs and watches it; call pretrain(config, forward_step, ",
        ),
        ("two configurations", "has Echo installed already"),
        ("registered twice", "the post-wrap hook runs a second time"),
        ("without validate", "the model was built without Echo's post-wrap hook"),
    ],
)
def test_a_missing_or_second_installation_is_refused(mistake, message):
    for text in ranks(failing, mistake):
        assert message in text


def built_from_model_config(rank, world_size):
    """Bridge's newer model section, ModelConfig with a builder, in place of a provider."""
    from megatron.bridge.models.gpt.gpt_builder import GPTModelConfig
    from megatron.bridge.models.transformer_config import TransformerConfig

    config = tiny(*QUANTIZED)
    provider = config.model
    transformer = TransformerConfig(**{f.name: getattr(provider, f.name) for f in fields(TransformerConfig) if f.init})
    spec = provider.transformer_layer_spec
    config.model = GPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=lambda model_config: spec(model_config.transformer),
        vocab_size=256,
        seq_length=32,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    recorder, printed = run(config)
    assert config._callback.installation is None  # without evaluation it ends with the training
    return recorder.losses, recorder.num_sites, printed.count("self_attention.linear_proj")


def test_a_model_config_with_a_builder_gets_the_hook_too():
    for rank, (losses, num_sites, reports) in enumerate(ranks(built_from_model_config)):
        assert num_sites == [ALL_SITES] * 4 and all(0 < loss < 10 for loss in losses)
        assert reports == (1 if rank == 0 else 0)


def recipe_main(rank, world_size, arguments):
    import contextlib
    import io
    import sys

    sys.argv = ["bridge_pretrain.py", *arguments]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            bridge_runs.recipe().main()
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def test_the_recipe_file_runs_from_its_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text("echo: {tp_comm: echo4}\n")
    arguments = ["--tiny", "--config", str(tmp_path / "run.yaml"), "echo.min_bytes=0", "logger.log_interval=1"]
    first, last = ranks(recipe_main, arguments)
    assert first[0] == last[0] == 0
    assert "self_attention.linear_proj" in first[1] and last[1].count("lm loss:") == 4


def test_the_recipe_says_what_is_wrong_in_one_line():
    for rank, (code, _, err) in enumerate(ranks(recipe_main, ["--tiny", "echo.tp_comm=echo5"])):
        assert code == 2
        assert err.count("error: echo.tp_comm: expected one of nccl") == (1 if rank == 0 else 0)
