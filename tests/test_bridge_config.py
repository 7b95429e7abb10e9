"""The section `echo` of a Bridge configuration, without Bridge."""

import copy
import pickle
from dataclasses import fields

import pytest

from echo_megatron import EchoConfig
from echo_megatron.config import Direction, Policy
from echo_megatron.integrations.bridge_config import EchoBridgeConfig, describe
from echo_megatron.integrations.options import OPTION_NAMES


def test_has_every_option_of_echo_and_its_own_two():
    assert [field.name for field in fields(EchoBridgeConfig)] == ["tp_comm", "inspect_every", *OPTION_NAMES]


def test_default_is_nccl_and_given_options_change_the_preset():
    assert not EchoBridgeConfig().resolve().quantizes
    echo = EchoBridgeConfig(tp_comm="echo8", eta=0.5, policy="naive", directions=["backward"], inspect_every=10)
    assert echo.resolve() == EchoConfig.preset("echo8", eta=0.5, policy=Policy.naive, directions=[Direction.backward])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_comm": "echo5"}, r"echo\.tp_comm: expected one of nccl, echo4.*got 'echo5'"),
        ({"tp_comm": None}, r"echo\.tp_comm: expected the name of a preset.*got None"),
        ({"tp_comm": "echo4", "eta": 1.5}, r"echo\.eta: expected a number in \[0, 1\], got 1\.5"),
        ({"tp_comm": "echo4", "eta": "half"}, r"echo\.eta: expected a number"),
        ({"tp_comm": "echo4", "policy": "best"}, r"echo\.policy: expected one of symmetric.*got 'best'"),
        ({"eta": 0.5}, r"echo\.tp_comm=nccl: .*eta would do nothing"),
        ({"inspect_every": 10}, r"echo\.inspect_every=10: .*it would do nothing"),
        ({"tp_comm": "echo4", "inspect_every": -1}, r"echo\.inspect_every: expected an integer >= 0.*got -1"),
        ({"tp_comm": "echo4", "inspect_every": True}, r"echo\.inspect_every: expected an integer"),
    ],
)
def test_illegal_values_are_named_by_their_override(options, message):
    with pytest.raises(ValueError, match=message):
        EchoBridgeConfig(**options).finalize()


def test_undeclared_names_are_refused_when_read_asked_for_or_written():
    echo = EchoBridgeConfig()
    with pytest.raises(ValueError, match=r"echo\.etta: unknown option; expected one of a, algorithm"):
        hasattr(echo, "etta")
    with pytest.raises(ValueError, match=r"echo\.etta: unknown option"):
        echo.etta = 0.5
    assert hasattr(echo, "eta") and not hasattr(echo, "_private")


def test_copies_and_pickles():
    echo = EchoBridgeConfig(tp_comm="echo4", directions=["forward"])
    assert copy.deepcopy(echo) == copy.copy(echo) == pickle.loads(pickle.dumps(echo)) == echo  # noqa: S301


def test_yaml_section_holds_what_is_given_in_plain_types():
    echo = EchoBridgeConfig(tp_comm="echo4", policy=Policy.naive, directions=[Direction.forward], eta=0)
    section = echo.to_cfg_dict()
    assert section == {
        "_target_": "echo_megatron.integrations.bridge_config.EchoBridgeConfig",
        "tp_comm": "echo4",
        "inspect_every": 0,
        "policy": "naive",
        "directions": ["forward"],
        "eta": 0,
    }
    assert EchoBridgeConfig(**{k: v for k, v in section.items() if k != "_target_"}).resolve() == echo.resolve()
    reordered = dict(sorted(section.items()))  # as YAML files have it
    assert describe(section) == describe(reordered) == "tp_comm=echo4 directions=['forward'] eta=0 policy=naive"


def test_describe_a_run_without_echo():
    assert describe(None) == describe(EchoBridgeConfig().to_cfg_dict()) == "tp_comm=nccl"
