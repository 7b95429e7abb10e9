"""Megatron-LM front end: arguments, refusals, and real training through `megatron.training` on gloo."""

from __future__ import annotations

import io
import re
import runpy
import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import megatron.training
import megatron_lm_cpu
import pytest
import torch
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron import EchoConfig
from echo_megatron.communicator import CommunicationError
from echo_megatron.config import PRESETS
from echo_megatron.integrations import megatron_lm
from echo_megatron.integrations.megatron_lm import EchoTraining, add_echo_args, echo_config, echo_training
from echo_megatron.integrations.megatron_lm_args import describe_difference, option_flag, with_echo_args

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("megatron_lm_script.py")
KINDS = get_type_hints(EchoConfig)
NUMBERS: dict[str, list[int | float]] = {
    "bits": [4, 8],
    "group_size": [32, 64, 128, 256],
    "eta": [0.0, 0.5, 1],
    "a": [0.0, 0.35],
    "beta1": [0.0, 0.9],
    "beta2": [0.0, 0.9],
    "min_bytes": [0, 65536],
    "early_bits": [4, 8],
    "early_fraction": [0.0, 0.25],
    "timeout_s": [0.5, 300],
}


def members(kind: Any) -> list[str]:
    """The words of an enum or a list of them."""
    kind = get_args(kind)[0] if get_args(kind) else kind
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def values_of(name: str) -> st.SearchStrategy[Any]:
    kind = KINDS[name]
    if name in NUMBERS:
        return st.sampled_from(NUMBERS[name])
    if kind in (list[get_args(kind)[0]] if get_args(kind) else None,):
        return st.lists(st.sampled_from(members(kind)), min_size=1, max_size=2, unique=True)
    return st.sampled_from(members(kind))


def words(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def command_line(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (option_flag(name), *words(value))]


def parse(*arguments: str) -> Namespace:
    return add_echo_args(ArgumentParser(allow_abbrev=False)).parse_args(arguments)


def parse_with_megatron(monkeypatch: pytest.MonkeyPatch, *arguments: str, provider: Any = None) -> Namespace:
    """As a script does: Megatron's own parser with all its arguments."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    return megatron.training.arguments.parse_args(provider)


def parse_under_echo(monkeypatch: pytest.MonkeyPatch, *arguments: str, provider: Any = None) -> Namespace:
    """The same inside `echo_training`."""
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
    return EchoTraining().parse_args(megatron.training.arguments.parse_args, provider)


class TestArguments:
    @pytest.mark.parametrize("name", [field.name for field in fields(EchoConfig)])
    def test_every_option_reaches_the_configuration(self, name: str) -> None:
        for value in NUMBERS.get(name) or [[word] if get_args(KINDS[name]) else word for word in members(KINDS[name])]:
            options = {name: value} if value != "compact" else {name: value, "residual": "local"}
            expected = EchoConfig.preset("echo8", **options)
            assert echo_config(parse("--tp-comm", "echo8", *command_line(options))) == expected, value

    @settings(deadline=None, max_examples=60)
    @given(
        preset=st.sampled_from([name for name in PRESETS if name != "nccl"]),
        options=st.fixed_dictionaries({}, optional={name: values_of(name) for name in KINDS}),
    )
    def test_the_command_line_says_what_the_dataclass_says(self, preset: str, options: dict[str, Any]) -> None:
        args = parse("--tp-comm", preset, *command_line(options))
        try:
            expected = EchoConfig.preset(preset, **options)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                echo_config(args)
        else:
            assert echo_config(args) == expected

    def test_without_the_flag_nothing_is_installed(self) -> None:
        assert not echo_config(parse()).quantizes

    def test_every_option_is_explained(self) -> None:
        parser = add_echo_args(ArgumentParser())
        helps = {action.dest: action.help for action in parser._actions}
        assert all(helps[f"echo_{field.name}"] for field in fields(EchoConfig)), helps

    def test_what_goes_into_a_checkpoint_is_plain(self) -> None:
        args = parse("--tp-comm", "echo4", "--echo-policy", "naive", "--echo-phases", "train", "--echo-eta", "0.5")
        for value in vars(args).values():
            for item in value if isinstance(value, list) else [value]:
                assert item is None or type(item) in (str, int, float)

    def test_beside_the_script_s_own_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def own(parser: ArgumentParser) -> ArgumentParser:
            parser.add_argument("--own", type=int)
            return parser

        args = parse_with_megatron(
            monkeypatch, "--own", "3", "--tp-comm", "echo4", "--echo-eta", "0.5", provider=with_echo_args(own)
        )
        assert (args.own, echo_config(args)) == (3, EchoConfig(eta=0.5))

    def test_adding_them_twice_does_no_harm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        args = parse_under_echo(monkeypatch, "--tp-comm", "echo8", provider=add_echo_args)
        assert echo_config(args).bits == 8

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--tp-comm", "echo5"], "invalid choice: 'echo5'"),
            (["--tp-comm", "echo4", "--echo-policy", "round"], "invalid choice: 'round'"),
            (["--tp-comm", "echo4", "--echo-eta", "much"], "invalid float value: 'much'"),
            (["--tp-comm", "echo4", "--echo-phases", "train", "sleep"], "invalid choice: 'sleep'"),
            (["--tp-comm", "echo4", "--echo-inspect-every", "-1"], "expected an integer >= 0, got -1"),
            (["--tp-comm", "echo4", "--echo-etta", "0.5"], "unrecognized arguments: --echo-etta"),
        ],
    )
    def test_what_argparse_refuses(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        message: str,
    ) -> None:
        with pytest.raises(SystemExit) as exit_:
            parse_with_megatron(monkeypatch, *arguments, provider=add_echo_args)
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--echo-eta", "0.5"], "eta would do nothing"),
            (["--echo-inspect-every", "10"], "quantizes nothing that could be measured"),
            (["--tp-comm", "echo4", "--echo-eta", "2"], r"eta: expected a number in \[0, 1\], got 2"),
            (["--tp-comm", "echo4", "--echo-bits", "5"], "bits: expected one of 4, 8, 16, got 5"),
        ],
    )
    def test_what_is_refused_when_it_is_parsed(
        self, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            parse_under_echo(monkeypatch, *arguments)

    def test_arguments_without_the_flag_are_refused(self) -> None:
        with pytest.raises(ValueError, match="extra_args_provider=add_echo_args"):
            echo_config(Namespace())

    def test_a_yaml_file_may_set_them(self) -> None:
        assert echo_config(Namespace(tp_comm="echo4", echo_phases=["train"])) == EchoConfig(phases=["train"])


class TestRefusals:
    @pytest.mark.parametrize(
        ("argument", "why"),
        [
            ("--sequence-parallel", "reduce-scatter"),
            ("--tp-comm-overlap", "userbuffers"),
            ("--inprocess-restart", "a restart aborts"),
            ("--perform-rl-step", "rollouts"),
        ],
    )
    def test_before_anything_is_started(self, monkeypatch: pytest.MonkeyPatch, argument: str, why: str) -> None:
        tensor_parallel = ["--tensor-model-parallel-size", "2"]
        with pytest.raises(ValueError, match=f"{argument} is not supported .*{why}"):
            parse_under_echo(monkeypatch, argument, *tensor_parallel, "--tp-comm", "echo4")
        parse_under_echo(monkeypatch, argument, *tensor_parallel)
        parse_under_echo(monkeypatch, argument, "--tp-comm", "echo4")  # one rank: nothing to quantize

    def test_a_script_that_never_trains_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="built no model through megatron"), echo_training():
            parse_with_megatron(monkeypatch, "--tp-comm", "echo4")

    def test_another_megatron_lm_is_told_what_it_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = megatron.training.arguments.parse_args
        monkeypatch.delattr(megatron.training.training, "train_step")
        with pytest.raises(ValueError, match=r"expected Megatron-LM with megatron.training.training.train_step"):
            echo_training().__enter__()
        assert megatron.training.arguments.parse_args is before

    @pytest.mark.parametrize("arguments", [[], ["/no/such/pretrain_gpt.py"]])
    def test_the_command_needs_a_script(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            megatron_lm.main(arguments)
        said = capsys.readouterr().out + str(exit_.value.code)
        assert ("no such file" if arguments else "usage:") in said


class TestHooks:
    def test_the_functions_are_back_afterwards(self) -> None:
        training, arguments = megatron.training.training, megatron.training.arguments
        places = [
            (arguments, "parse_args"),
            *((training, name) for name in ("setup_model_and_optimizer", "train_step", "evaluate", "save_checkpoint")),
            (megatron.training.checkpointing, "check_checkpoint_args"),
        ]
        before = [getattr(module, name) for module, name in places]
        with echo_training() as outer, echo_training() as inner:
            assert inner is outer
            assert not any(
                getattr(module, name) is function for (module, name), function in zip(places, before, strict=True)
            )
        assert [getattr(module, name) for module, name in places] == before

    def test_releases_that_parse_in_initialize(self, monkeypatch: pytest.MonkeyPatch) -> None:
        initialize, original = megatron.training.initialize, megatron.training.arguments.parse_args
        monkeypatch.setattr(initialize, "parse_args", original, raising=False)
        with echo_training():
            assert initialize.parse_args is megatron.training.arguments.parse_args is not original
        assert initialize.parse_args is original

    def test_a_failed_call_ends_the_step_and_saves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Failed:
            def check(self) -> None:
                raise CommunicationError("planted")

        run, saved = EchoTraining(), []
        run.installation = Failed()  # type: ignore[assignment]
        monkeypatch.setattr(megatron.training, "get_args", lambda: Namespace(curr_iteration=0))
        for method in (run.train_step, run.evaluate):
            with pytest.raises(CommunicationError):
                method(lambda: ())
        with pytest.raises(CommunicationError):
            run.save_checkpoint(lambda: saved.append(1))
        assert not saved

    def test_a_checkpoint_of_the_other_arm(self) -> None:
        echo = parse("--tp-comm", "echo4", "--echo-phases", "train")
        assert describe_difference(echo, echo) is None
        assert describe_difference(Namespace(), parse()) is None, "a checkpoint of plain Megatron-LM"
        message = describe_difference(Namespace(), echo)
        assert message is not None
        assert "a run with --tp-comm nccl, this one has --tp-comm echo4 --echo-phases train" in message


# -- training

MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --qk-layernorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-rope-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion"""
TRAINING = """--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-3
    --distributed-backend gloo --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
    --eval-iters 1 --eval-interval 100 --log-interval 1 --ckpt-format torch"""
ARGUMENTS = [*MODEL.split(), *TRAINING.split()]
NEVER = ["--echo-min-bytes", str(2**40)]  # every site installed, no message quantized
ALWAYS = ["--echo-min-bytes", "0"]


def train(rank: int, world_size: int, arguments: list[str], plain: bool = False) -> dict[str, Any]:
    """Runs the script in this process: as it is, or under Echo's command.

    Returns:
        losses of all microbatches this rank saw, the trained parameters, what was printed, and the installed sites.
    """
    megatron_lm_cpu.install()
    training = megatron.training.training
    seen: dict[str, Any] = {"sites": []}
    build, run_path = training.setup_model_and_optimizer, runpy.run_path

    def building(*rest: Any, **named: Any) -> Any:
        built = build(*rest, **named)
        seen["chunks"] = built[0]
        return built

    def running(*rest: Any, **named: Any) -> Any:
        namespace = run_path(*rest, **named)
        seen["losses"] = namespace["LOSSES"]
        if megatron_lm._active is not None:
            assert megatron_lm._active.installation is not None
            seen["sites"] = [(site.direction.name, site.chunk) for site in megatron_lm._active.installation.sites]
        return namespace

    training.setup_model_and_optimizer, runpy.run_path = building, running
    out = io.StringIO()
    with redirect_stdout(out):
        if plain:
            sys.argv = [str(SCRIPT), *ARGUMENTS, *arguments]
            runpy.run_path(str(SCRIPT), run_name="__main__")
        else:
            megatron_lm.main([str(SCRIPT), *ARGUMENTS, *arguments])
    return {
        "losses": seen["losses"],
        "sites": seen["sites"],
        "printed": out.getvalue(),
        "parameters": {
            f"{idx}.{name}": parameter.detach().clone()
            for idx, chunk in enumerate(seen["chunks"])
            for name, parameter in chunk.named_parameters()
        },
    }


def same_bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        a["losses"] == b["losses"]
        and a["parameters"].keys() == b["parameters"].keys()
        and all(torch.equal(value, b["parameters"][name]) for name, value in a["parameters"].items())
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Megatron-LM without Echo: results, and the checkpoint of its last iteration."""
    folder = tmp_path_factory.mktemp("stock")
    return run_ranks(train, 2, ["--save", str(folder), "--save-interval", "3"], True, timeout_s=120), folder


class TestTraining:
    def test_installed_without_quantizing_it_is_megatron_to_the_bit(self, stock: Any) -> None:
        echo = run_ranks(train, 2, ["--tp-comm", "echo4", *NEVER, "--test-model-provider"], timeout_s=120)
        assert len(stock[0][0]["losses"]) == 3 * 2 + 2 * 2
        assert len(echo[0]["sites"]) == 2 * 4
        assert same_bits(stock[0], echo)

    def test_echo4_trains_and_measures(self, stock: Any, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        inspect = ["--echo-inspect-every", "2", "--tensorboard-dir", str(tmp_path), "--save", str(tmp_path / "saved")]
        inspect += ["--save-interval", "3"]
        echo = run_ranks(train, 2, ["--tp-comm", "echo4", *ALWAYS, *inspect], timeout_s=120)
        assert not same_bits(stock[0], echo)
        assert echo[0]["losses"] == echo[1]["losses"], "all ranks see the same sums"
        reference = torch.tensor(stock[0][0]["losses"])
        assert (torch.tensor(echo[0]["losses"]) - reference).abs().max() < 0.02 * reference.max()

        assert echo[0]["printed"].count("at full precision:") == 1
        assert "at full precision:" not in echo[1]["printed"]

        events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("echo/")]
        assert {tag.split("/")[1] for tag in tags} == {"forward", "backward"}
        assert {event.step for tag in tags for event in events.Scalars(tag)} == {2}
        errors = [event.value for tag in tags if tag.endswith("/relative_error") for event in events.Scalars(tag)]
        assert len(errors) == 2 * 4 and all(0 < error < 0.5 for error in errors)

        # Megatron-LM without Echo goes on from there: what the checkpoint holds needs no Echo.
        back = ["--load", str(tmp_path / "saved"), "--train-iters", "4"]
        plain = run_ranks(train, 2, back, True, timeout_s=120)
        assert "iteration        4/       4" in plain[1]["printed"]

    def test_a_checkpoint_of_the_other_arm_is_loaded_and_named(self, stock: Any) -> None:
        results, folder = stock
        arguments = ["--tp-comm", "echo4", *ALWAYS, "--load", str(folder), "--train-iters", "4"]
        echo = run_ranks(train, 2, arguments, timeout_s=120)
        expected = f"comes from a run with --tp-comm nccl, this one has --tp-comm echo4 {' '.join(ALWAYS)}"
        assert echo[0]["printed"].count(expected) == 1
        assert len(echo[0]["losses"]) == 2 + 2 * 2
        assert abs(echo[0]["losses"][0] - results[0]["losses"][-1]) < 0.5

    @pytest.mark.slow
    def test_virtual_pipeline_chunks(self, tmp_path: Path) -> None:
        pipeline = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
        pipeline += ["--num-layers", "4", "--train-iters", "2"]
        plain = run_ranks(train, 4, pipeline, True, timeout_s=120)
        echo = run_ranks(train, 4, [*pipeline, "--tp-comm", "echo4", *NEVER], timeout_s=120)
        assert same_bits(plain, echo)
        for result in echo:
            assert {chunk for _, chunk in result["sites"]} == {0, 1}

        inspect = ["--echo-inspect-every", "1", "--tensorboard-dir", str(tmp_path)]
        quantized = run_ranks(train, 4, [*pipeline, "--tp-comm", "echo4", *ALWAYS, *inspect], timeout_s=120)
        reference, losses = torch.tensor(plain[3]["losses"]), torch.tensor(quantized[3]["losses"])
        assert not torch.equal(losses, reference)
        assert (losses - reference).abs().max() < 0.02 * reference.max()

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        layers = {tag.split(".")[1] for tag in events.Tags()["scalars"] if tag.startswith("echo/forward/layers.")}
        assert layers == {"0", "1", "2", "3"}, "the sites of every pipeline stage"
