"""Megatron-LM front end: arguments, refusals, hooks, recipe and page; test_megatron_lm_training.py trains with it."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import megatron.training
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

from echo_megatron import EchoConfig
from echo_megatron.communicator import CommunicationError
from echo_megatron.config import PRESETS
from echo_megatron.integrations import megatron_lm, megatron_lm_args
from echo_megatron.integrations.megatron_lm import EchoTraining, add_echo_args, echo_config, echo_training
from echo_megatron.integrations.megatron_lm_args import describe_difference, option_flag, with_echo_args

ROOT = Path(__file__).resolve().parent.parent
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
    "last_bits": [4, 8],
    "last_layers": [1, 2],
    "gather_bits": [4, 8, 16],
    "timeout_s": [0.5, 300],
}


def members(kind: Any) -> list[str]:
    """The words of an enum or a list of them."""
    kind = get_args(kind)[0] if get_args(kind) else kind
    return list(kind.__members__) if isinstance(kind, type) and issubclass(kind, Enum) else []


def is_list(name: str) -> bool:
    return get_origin(KINDS[name]) is list


def values_of(name: str) -> st.SearchStrategy[Any]:
    kind = KINDS[name]
    if name in NUMBERS:
        return st.sampled_from(NUMBERS[name])
    if is_list(name):
        return st.lists(st.sampled_from(members(kind)), min_size=1, max_size=2, unique=True)
    return st.sampled_from(members(kind))


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def command_line(options: dict[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (option_flag(name), *map(str, as_list(value)))]


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
        for value in NUMBERS.get(name) or [[word] if is_list(name) else word for word in members(KINDS[name])]:
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
            for item in as_list(value):
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
        ("argument", "message"),
        [
            ("--tp-comm-overlap", "tp_comm_overlap=True is not supported: userbuffers"),
            ("--multi-latent-attention", "multi_latent_attention=True is not supported"),
            ("--inprocess-restart", "--inprocess-restart is not supported .*a restart aborts"),
            ("--perform-rl-step", "--perform-rl-step is not supported .*rollouts"),
        ],
    )
    def test_before_anything_is_started(self, monkeypatch: pytest.MonkeyPatch, argument: str, message: str) -> None:
        tensor_parallel = ["--tensor-model-parallel-size", "2"]
        with pytest.raises(ValueError, match=message):
            parse_under_echo(monkeypatch, argument, *tensor_parallel, "--tp-comm", "echo4")
        parse_under_echo(monkeypatch, argument, *tensor_parallel)
        parse_under_echo(monkeypatch, argument, "--tp-comm", "echo4")  # one rank: nothing to quantize

    def test_the_paper_s_residual_with_sequence_parallelism(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
        with pytest.raises(ValueError, match="residual: expected local with sequence parallelism, got consensus"):
            parse_under_echo(monkeypatch, *parallel, "--tp-comm", "echo4_paper")
        parse_under_echo(monkeypatch, *parallel, "--tp-comm", "echo4_paper", "--echo-residual", "local")
        args = parse_under_echo(monkeypatch, *parallel, "--tp-comm", "echo4", "--echo-gather-bits", "4")
        assert echo_config(args).gather_bits == 4

    def test_before_the_model_is_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the script parsed its arguments outside of `echo_training`."""
        args = parse("--tp-comm", "echo4")
        args.tensor_model_parallel_size, args.multi_latent_attention = 2, True
        monkeypatch.setattr(megatron.training, "get_args", lambda: args)
        with pytest.raises(ValueError, match="multi_latent_attention=True is not supported"):
            EchoTraining().setup_model_and_optimizer(lambda: pytest.fail("built a model"))

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

    def test_the_command_explains_the_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as exit_:
            megatron_lm.main(["--help"])
        shown = capsys.readouterr().out
        assert exit_.value.code == 0
        assert shown.startswith("usage: python -m echo_megatron.integrations.megatron_lm SCRIPT")
        assert all(option_flag(field.name) in shown for field in fields(EchoConfig))


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

    @pytest.mark.parametrize(
        ("end", "is_uninstalled"),
        [(None, True), (SystemExit(), True), (SystemExit(0), True), (SystemExit(16), False), (RuntimeError(), False)],
    )
    def test_uninstalls_where_all_ranks_do(
        self, monkeypatch: pytest.MonkeyPatch, end: BaseException | None, is_uninstalled: bool
    ) -> None:
        """Megatron exits with 0 on all ranks at once; of an error the other ranks may know nothing."""
        uninstalled: list[int] = []
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        with contextlib.suppress(SystemExit, RuntimeError), echo_training() as run:
            run.installation = Namespace(uninstall=lambda: uninstalled.append(1))  # type: ignore[assignment]
            if end is not None:
                raise end
        assert uninstalled == [1] * is_uninstalled
        assert megatron_lm._active is None

    def test_after_the_process_groups_there_is_nothing_to_give_back(self) -> None:
        assert not torch.distributed.is_initialized()
        with echo_training() as run:
            run.installation = Namespace(uninstall=lambda: pytest.fail("collective"))  # type: ignore[assignment]

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

    def test_measured_errors_go_where_megatron_logs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core import parallel_state
        from megatron.training import global_vars

        logged: list[Any] = []
        one_stage = Namespace(size=lambda: 1)
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: one_stage)
        monkeypatch.setattr(global_vars, "_GLOBAL_WANDB_WRITER", Namespace(log=lambda *words: logged.append(words)))
        megatron_lm._write_metrics({"echo/forward/a/bytes": 3.0}, 20)
        assert logged == [({"echo/forward/a/bytes": 3.0}, 20)]

    def test_a_checkpoint_of_the_other_arm(self) -> None:
        echo = parse("--tp-comm", "echo4", "--echo-phases", "train")
        assert describe_difference(echo, echo) is None
        assert describe_difference(Namespace(), parse()) is None, "a checkpoint of plain Megatron-LM"
        message = describe_difference(Namespace(), echo)
        assert message is not None
        assert "a run with --tp-comm nccl, this one has --tp-comm echo4 --echo-phases train" in message


RECIPE = ROOT / "recipes" / "megatron_lm_pretrain.sh"


def run_recipe(folder: Path, *arguments: str, **environment: str) -> list[str]:
    """What the recipe would start, word by word."""
    python = folder / "python with spaces"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    words = {"MEGATRON_LM": "/opt/Megatron LM", "DATA_PREFIX": "/data/my $(tokens)", "PYTHON": str(python)}
    shown = subprocess.run(
        [str(RECIPE), *arguments],
        env={"PATH": os.environ["PATH"], **words, **environment},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.split("\0")[:-1]


class TestRecipe:
    def test_the_flag_is_the_only_difference(self, tmp_path: Path) -> None:
        echo = run_recipe(tmp_path, OUT="/runs/a")
        nccl = run_recipe(tmp_path, OUT="/runs/a", TP_COMM="nccl")
        assert [(a, b) for a, b in zip(echo, nccl, strict=True) if a != b] == [("echo4", "nccl")]

    @pytest.mark.parametrize("transformer", ["transformer_engine", "local"])
    def test_megatron_takes_its_arguments(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transformer: str
    ) -> None:
        given = ["--echo-eta", "0.5", "--wandb-exp-name", "a 'b' $c"]
        words = run_recipe(tmp_path, *given, TRANSFORMER=transformer, TP="4")
        script = words.index("/opt/Megatron LM/pretrain_gpt.py")
        assert words[script - 2 : script] == ["-m", "echo_megatron.integrations.megatron_lm"]
        assert words[script - 4 : script - 2] == ["--nproc-per-node", "4"]
        args = parse_under_echo(monkeypatch, *words[script + 1 :])
        assert echo_config(args) == EchoConfig(eta=0.5)
        assert (args.data_path, args.wandb_exp_name) == (["/data/my $(tokens)"], "a 'b' $c")
        assert (args.transformer_impl, args.tensor_model_parallel_size) == (transformer, 4)
        model = yaml.safe_load((ROOT / "configs" / "model" / "qwen3_0p6b.yaml").read_text())
        for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
            assert getattr(args, name) == model[name]
        assert (args.kv_channels, args.seq_length) == (model["kv_channels"], model["sequence_length"])
        assert args.rotary_base == model["rotary_base"]
        optimizer = yaml.safe_load((ROOT / "configs" / "optim" / "adamw.yaml").read_text())
        assert (args.lr, args.min_lr, args.lr_warmup_iters) == tuple(
            float(optimizer[name]) for name in ("lr", "min_lr", "warmup_steps")
        )
        monkeypatch.setattr(args, "rank", 1, raising=False)
        assert vocab_size_with_padding(args.vocab_size, args) == 151_936

    @pytest.mark.parametrize("missing", ["MEGATRON_LM", "DATA_PREFIX"])
    def test_says_what_is_missing(self, missing: str) -> None:
        given = {"PATH": os.environ["PATH"], "MEGATRON_LM": "/m", "DATA_PREFIX": "/d", missing: ""}
        shown = subprocess.run([str(RECIPE)], env=given, capture_output=True, text=True)
        assert shown.returncode != 0
        assert f"{missing}: expected the" in shown.stderr


class TestDocs:
    def test_the_table_of_flags(self) -> None:
        """Flag, values and default of every option, as the parser and the dataclass have them."""
        text = (ROOT / "docs" / "megatron_lm.md").read_text()
        documented = re.findall(r"^\| `(--[a-z0-9-]+)` \| (.*?) \| (.*?) \|", text, re.MULTILINE)
        assert documented == [*flag_rows()]

    def test_the_messages_are_the_code_s(self) -> None:
        text = (ROOT / "docs" / "megatron_lm.md").read_text().split("## Messages")[1]
        rows = [row for row in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE) if not row.startswith("argument ")]
        assert len(rows) >= 7
        folder = ROOT / "echo_megatron" / "integrations"
        said = [
            text
            for name in ("megatron_lm", "megatron_lm_args", "megatron_checks", "options")
            for text in strings(folder / f"{name}.py")
        ]
        for row in rows:
            parts = [re.escape(part.strip()) for part in row.split("…") if part.strip()]
            assert any(re.search(".*".join(parts), text, re.DOTALL) for text in said), row


def strings(path: Path) -> Iterator[str]:
    """The f-strings of a file, flags filled in, other values as an ellipsis."""
    flags = {"FLAG": megatron_lm_args.FLAG, "INSPECT_FLAG": megatron_lm_args.INSPECT_FLAG}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else flags.get(getattr(part.value, "id", ""), "…")  # type: ignore[attr-defined]
                for part in node.values
            )


def flag_rows() -> Iterator[tuple[str, str, str]]:
    """The rows of the table in docs/megatron_lm.md, without the last column."""
    defaults = {f"echo_{field.name}": getattr(EchoConfig(), field.name) for field in fields(EchoConfig)}
    for action in add_echo_args(ArgumentParser(add_help=False))._actions:
        kinds = {int: "integer", float: "number"}
        values = " ".join(map(str, action.choices)) if action.choices else kinds.get(action.type, "integer")
        default = defaults.get(action.dest, action.default)
        shown = " ".join(item.name if isinstance(item, Enum) else str(item) for item in as_list(default))
        yield action.option_strings[0], values, "—" if default is None else shown
