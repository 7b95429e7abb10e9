"""Megatron-LM's command line: `--tp-comm`, one `--echo-…` for every field of EchoConfig, and what refuses them."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from echo_megatron.config import PRESETS, EchoConfig
from echo_megatron.integrations.megatron_checks import check_config
from echo_megatron.integrations.options import OPTION_NAMES, resolve

ArgsProvider = Callable[[ArgumentParser], ArgumentParser]

FLAG = "--tp-comm"
INSPECT_FLAG = "--echo-inspect-every"


def add_echo_args(parser: ArgumentParser) -> ArgumentParser:
    """Adds `--tp-comm`, the `--echo-…` options and `--echo-inspect-every`; an `extra_args_provider` of Megatron-LM.

    The values stay plain strings and numbers (None: not given), because Megatron writes its arguments into checkpoints,
    which have to load where Echo is not installed. A parser that has the flag already is left alone.
    """
    if FLAG in parser._option_string_actions:
        return parser
    group = parser.add_argument_group(
        "Echo", "4- and 8-bit tensor-parallel communication; the options override single values of the preset"
    )
    group.add_argument(
        FLAG,
        choices=list(PRESETS),
        default="nccl",
        help="tensor-parallel all-reduce; nccl is Megatron's own, untouched",
    )
    kinds, helps = get_type_hints(EchoConfig), _option_helps()
    for name in OPTION_NAMES:
        group.add_argument(option_flag(name), default=None, help=helps.get(name), **_argparse_kind(kinds[name]))
    group.add_argument(
        INSPECT_FLAG,
        type=_count,
        default=0,
        metavar="N",
        help="every N iterations, measure the error of each site and write it to TensorBoard and W&B; 0: never",
    )
    return parser


def with_echo_args(extra_args_provider: ArgsProvider | None) -> ArgsProvider:
    """Your own `extra_args_provider`, if any, with Echo's arguments added after it."""
    if extra_args_provider is None:
        return add_echo_args
    return lambda parser: add_echo_args(extra_args_provider(parser))


def option_flag(name: str) -> str:
    """The command line's name of the EchoConfig field `name`: `--echo-group-size` of `group_size`."""
    return "--echo-" + name.replace("_", "-")


def echo_config(args: Namespace) -> EchoConfig:
    """The configuration that Megatron's arguments ask for.

    Raises:
        ValueError: an illegal value, options beside `--tp-comm nccl`, or arguments without the flag.
    """
    if not hasattr(args, "tp_comm"):
        raise ValueError(
            f"echo: Megatron's arguments have no tp_comm: pass extra_args_provider=add_echo_args to the function that "
            f"parses them. With --yaml-cfg, which ignores {FLAG}, write tp_comm: echo4 (or nccl) into the YAML file, "
            "and options as echo_eta: 0.5"
        )
    config = resolve(args.tp_comm, {name: getattr(args, f"echo_{name}", None) for name in OPTION_NAMES})
    if inspect_every(args) and not config.quantizes:
        raise ValueError(
            f"{INSPECT_FLAG} {inspect_every(args)}: {FLAG} {args.tp_comm} quantizes nothing that could be measured; "
            f"set {FLAG} echo4, or remove the option"
        )
    return config


def inspect_every(args: Namespace) -> int:
    """`--echo-inspect-every`, iterations; 0 where a YAML file does not set it."""
    return getattr(args, "echo_inspect_every", None) or 0


_REFUSED_ARGS = {
    "inprocess_restart": "a restart aborts the process groups on which the communicators stand",
    "perform_rl_step": "rollouts run the model outside the training loop's steps",
}


def check_args(args: Namespace, config: EchoConfig) -> None:
    """Raises ValueError for an argument that can't be combined with Echo, before there is a model to check."""
    if not config.quantizes or args.tensor_model_parallel_size == 1:
        return
    for name, why in _REFUSED_ARGS.items():
        if getattr(args, name, False):
            raise ValueError(
                f"echo: --{name.replace('_', '-')} is not supported together with {FLAG} {args.tp_comm}: {why}. "
                f"Remove it, or use {FLAG} nccl"
            )
    check_config(args, config)  # what they have of a TransformerConfig's options has its names


def describe_difference(checkpoint_args: Namespace, args: Namespace) -> str | None:
    """One line if a checkpoint was written by a run with another `--tp-comm` or other options; None if it was not."""
    written, asked = _command_line(checkpoint_args), _command_line(args)
    if written == asked:
        return None
    return (
        f"echo: the checkpoint comes from a run with {written}, this one has {asked}. Weights and optimizer state are "
        "the same either way; the loss curve goes on under other communication"
    )


def _command_line(args: Namespace) -> str:
    """The flag and the options given, as they were typed. A checkpoint of plain Megatron-LM has neither."""
    words = [FLAG, getattr(args, "tp_comm", "nccl")]
    for name in OPTION_NAMES:
        value = getattr(args, f"echo_{name}", None)
        if value is not None:
            words += [option_flag(name), *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def _argparse_kind(kind: Any) -> dict[str, Any]:
    """`type`, `choices` and `nargs` for a field of the type `kind`; ranges are EchoConfig's to check."""
    if get_origin(kind) is UnionType:  # int | None: None is the option not given
        (kind,) = [member for member in get_args(kind) if member is not type(None)]
    if get_origin(kind) is list:
        (member,) = get_args(kind)
        return {"nargs": "+", **_argparse_kind(member)}
    if issubclass(kind, Enum):
        return {"choices": list(kind.__members__)}
    assert kind in (int, float), f"EchoConfig has a field of the type {kind}, which the command line does not know"
    return {"type": kind, "metavar": "N" if kind is int else "X"}


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected an integer >= 0, got {text}")
    return value


def _option_helps() -> dict[str, str]:
    """What EchoConfig's docstring says about each field; empty under `python -OO`, which drops docstrings."""
    return dict(_attributes(EchoConfig.__doc__ or ""))


def _attributes(docstring: str) -> Iterator[tuple[str, str]]:
    names = "|".join(field.name for field in fields(EchoConfig))
    for match in re.finditer(rf"^ {{8}}({names}): (.*(?:\n {{12}}\S.*)*)", docstring, re.MULTILINE):
        yield match[1], re.sub(r"\s+", " ", match[2]).replace("%", "%%")
