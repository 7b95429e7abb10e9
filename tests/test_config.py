"""Options: presets are what the spec says, and nothing wrong gets past start-up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from echo_megatron import PRESETS, EchoConfig
from echo_megatron.config import (
    LOCAL_FEEDBACK,
    PAPER_FEEDBACK,
    Algorithm,
    Direction,
    Feedback,
    Phase,
    Policy,
    Rescale,
    Residual,
    StateDtype,
    TransportName,
)


def test_presets_are_the_specs():
    assert list(PRESETS) == ["nccl", "echo4", "echo8", "echo4_paper", "echo8_paper"]
    assert not EchoConfig.preset("nccl").quantizes
    ours = EchoConfig.preset("echo4")
    assert (ours.bits, ours.policy, ours.group_size) == (4, Policy.rotated, 32)
    assert (ours.residual, ours.rescale, ours.algorithm) == (Residual.local, Rescale.tile, Algorithm.auto)
    paper = EchoConfig.preset("echo4_paper")
    assert (paper.bits, paper.policy, paper.group_size) == (4, Policy.zero_aware, 128)
    assert (paper.residual, paper.rescale, paper.algorithm) == (Residual.consensus, Rescale.group, Algorithm.two_shot)
    for name in ("echo4", "echo8", "echo4_paper", "echo8_paper"):
        config = EchoConfig.preset(name)
        assert (config.eta, config.a, config.beta1, config.beta2) == (None, 0.35, None, None)
        feedback = Feedback(0.75, 0.35, 0.7, 0.3) if "paper" in name else Feedback(1.0, 0.35, 0.0, 0.0)
        assert {config.feedback_of(direction) for direction in Direction} == {feedback}
        assert config.state_dtype is None and config.transport is TransportName.auto
        assert config.directions == list(Direction) and config.phases == list(Phase)
        assert config.bits == (8 if "8" in name else 4)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("bits", 5, "bits: expected one of 4, 8, 16, got 5"),
        ("bits", "4", "bits: expected one of 4, 8, 16, got '4'"),
        ("bits", True, "bits"),
        ("group_size", 48, "group_size: expected one of 32, 64, 128, 256, got 48"),
        ("policy", "rotate", "policy: expected one of symmetric, naive, zero_aware, rotated, rotated_asymmetric"),
        ("algorithm", "ring", "algorithm: expected one of auto, one_shot, two_shot, got 'ring'"),
        ("transport", "nvlink", "transport: expected one of auto, p2p, collective, got 'nvlink'"),
        ("residual", "both", "residual: expected one of local, consensus"),
        ("rescale", "tensor", "rescale: expected one of tile, group, none"),
        ("eta", 1.5, r"eta: expected a number in \[0, 1\], got 1.5"),
        ("eta", float("nan"), "eta"),
        ("eta", "0.75", "eta"),
        ("a", -0.1, "a: expected"),
        ("beta1", 1.0, r"beta1: expected a number in \[0, 1\), got 1.0"),
        ("beta2", -1e-9, "beta2"),
        ("state_dtype", "fp8", "state_dtype: expected one of bf16, fp32, compact"),
        ("min_bytes", -1, "min_bytes: expected an integer >= 0"),
        ("min_bytes", 1.5, "min_bytes"),
        ("directions", "forward", "directions: expected a list of forward, backward"),
        ("directions", ["sideways"], "directions: expected one of forward, backward, got 'sideways'"),
        ("phases", ["test"], "phases: expected one of train, evaluate"),
        ("early_bits", 16, "early_bits: expected one of 4, 8"),
        ("early_fraction", 1.1, "early_fraction"),
        ("last_bits", 16, "last_bits: expected one of 4, 8"),
        ("last_layers", 0, "last_layers: expected an integer >= 1, got 0"),
        ("gather_bits", 2, "gather_bits: expected one of 4, 8, 16, got 2"),
        ("timeout_s", 0, r"timeout_s: expected a number in \(0, inf\)"),
    ],
)
def test_wrong_values_are_refused_with_what_was_expected(option, value, message):
    with pytest.raises(ValueError, match=message):
        EchoConfig(**{option: value})


def test_unknown_names_are_refused():
    with pytest.raises(
        ValueError, match="tp_comm: expected one of nccl, echo4, echo8, echo4_paper, echo8_paper, got 'echo5'"
    ):
        EchoConfig.preset("echo5")
    with pytest.raises(ValueError, match="unknown option etta"):
        EchoConfig.preset("echo4", etta=0.5)
    for name in ("early_bits", "last_bits"):
        with pytest.raises(ValueError, match=f"{name}: expected None with bits=16"):
            EchoConfig.preset("nccl", **{name: 8})


def test_compact_state_needs_the_local_residual():
    assert EchoConfig(state_dtype="compact").state_dtype is StateDtype.compact
    message = "state_dtype: expected bf16 or fp32 with residual=consensus, got compact: .* set residual=local, or"
    with pytest.raises(ValueError, match=message):
        EchoConfig.preset("echo4_paper", state_dtype="compact")
    with pytest.raises(ValueError, match=message):
        EchoConfig(state_dtype="compact").replace(residual="consensus")


@pytest.mark.parametrize("options", [{"beta1": 0.7}, {"beta2": 0.3}, {"beta1": 0.7, "beta2": 0.3}, {"beta2": 1e-9}])
def test_compact_state_holds_no_averages(options):
    assert EchoConfig(**options).state_dtype_of(Direction.forward) is StateDtype.bf16
    message = (
        "state_dtype: expected bf16 or fp32 where beta1 or beta2 is not 0, got compact: it stores the last residual "
        "and no averages; set beta1=0 and beta2=0, or leave state_dtype out"
    )
    with pytest.raises(ValueError, match=message):
        EchoConfig(state_dtype="compact", **options)
    with pytest.raises(ValueError, match=message):
        EchoConfig(state_dtype="compact").replace(**options)


@pytest.mark.parametrize("options", [{}, {"eta": 0.5}, {"beta1": 0.0, "beta2": 0.0}, {"a": 1.0}, {"eta": 0.0}])
def test_the_last_residual_alone_is_stored_compactly(options):
    config = EchoConfig(**options)
    assert {config.state_dtype_of(direction) for direction in Direction} == {StateDtype.compact}
    assert config.replace(state_dtype="compact").state_dtype_of(Direction.forward) is StateDtype.compact


def test_coefficients_that_are_left_out_suit_the_residual_of_the_direction():
    mixed = EchoConfig(backward_residual="consensus")
    assert [mixed.feedback_of(direction) for direction in Direction] == [LOCAL_FEEDBACK, PAPER_FEEDBACK]
    other = EchoConfig(residual="consensus", backward_residual="local")
    assert [other.feedback_of(direction) for direction in Direction] == [PAPER_FEEDBACK, LOCAL_FEEDBACK]
    assert EchoConfig(residual="consensus").feedback_of(Direction.backward) == PAPER_FEEDBACK


@given(
    st.sampled_from(Residual), st.sampled_from((None, *Residual)), st.none() | st.floats(0, 1), st.floats(0, 1),
    st.none() | st.floats(0, 0.95), st.none() | st.floats(0, 0.95),
)  # fmt: skip
def test_a_coefficient_that_is_given_holds_in_both_directions(residual, backward_residual, eta, a, beta1, beta2):
    given_ones = {"eta": eta, "a": a, "beta1": beta1, "beta2": beta2}
    config = EchoConfig(residual=residual, backward_residual=backward_residual, **given_ones)
    for direction in Direction:
        default = LOCAL_FEEDBACK if config.residual_of(direction) is Residual.local else PAPER_FEEDBACK
        for name, value in given_ones.items():
            assert getattr(config.feedback_of(direction), name) == (getattr(default, name) if value is None else value)
    assert config.compensates == (eta is None or eta > 0)


def test_each_direction_has_its_residual():
    config = EchoConfig(backward_residual="consensus")
    assert [config.residual_of(direction) for direction in Direction] == [Residual.local, Residual.consensus]
    assert {EchoConfig().residual_of(direction) for direction in Direction} == {Residual.local}
    assert [config.state_dtype_of(direction) for direction in Direction] == [StateDtype.compact, StateDtype.bf16]
    assert {config.replace(state_dtype="fp32").state_dtype_of(direction) for direction in Direction} == {
        StateDtype.fp32
    }
    with pytest.raises(ValueError, match="backward_residual: expected one of local, consensus, got 'both'"):
        EchoConfig(backward_residual="both")
    with pytest.raises(ValueError, match="state_dtype: expected bf16 or fp32 with residual=consensus"):
        config.replace(state_dtype="compact")


def test_strings_become_enums_and_copies_are_validated():
    config = EchoConfig.preset("echo4", policy="zero_aware", directions=["backward"])
    assert config.policy is Policy.zero_aware and config.directions == [Direction.backward]
    with pytest.raises(ValueError, match="bits"):
        config.replace(bits=3)


def test_structured_config_of_hydra_refuses_at_composition():
    schema = OmegaConf.structured(EchoConfig)
    for key, value, error in (
        ("bitz", 4, ConfigKeyError),
        ("policy", "rotate", ValidationError),
        ("eta", "x", ValidationError),
        ("beta1", "x", ValidationError),
    ):
        with pytest.raises(error):
            OmegaConf.merge(schema, {key: value})
    merged = OmegaConf.merge(schema, {"policy": "zero_aware", "early_bits": 8, "eta": 0.5})
    assert OmegaConf.to_object(merged) == EchoConfig(policy=Policy.zero_aware, early_bits=8, eta=0.5)


def test_early_sites_cover_the_first_layers_of_the_forward_pass():
    config = EchoConfig.preset("echo4", early_bits=8, early_fraction=0.5)
    bits = [config.site_bits(Direction.forward, layer, 28) for layer in range(28)]
    assert bits == [8] * 14 + [4] * 14
    assert {config.site_bits(Direction.backward, layer, 28) for layer in range(28)} == {4}
    last = config.replace(early_bits=None, last_bits=8, last_layers=2)
    assert [last.site_bits(Direction.forward, layer, 28) for layer in range(28)] == [4] * 26 + [8] * 2
    assert {last.site_bits(Direction.backward, layer, 28) for layer in range(28)} == {4}
    both = EchoConfig(bits=8, early_bits=8, early_fraction=1.0, last_bits=4)
    assert [both.site_bits(Direction.forward, layer, 3) for layer in range(3)] == [8, 8, 4], "last_bits goes before"
    # About 1.5 times the bytes of uniform 4-bit (paper Sec. 7.2).
    from echo_megatron.reference import make_quantizer

    early, late = (make_quantizer(config, b).num_bytes(1 << 20) for b in (8, 4))
    assert (early + late) / (2 * late) == pytest.approx(1.5, abs=0.04)
    assert [EchoConfig(early_bits=8, early_fraction=f).site_bits(Direction.forward, 0, 3) for f in (0.0, 0.1)] == [4, 8]
