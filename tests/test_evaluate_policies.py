"""scripts/policy_errors.py: what it captures of a model's sites, how it rounds, and sums that stay exact at some."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pages import ROOT
from test_evaluate import VOCAB, make_ids, make_model

from echo_megatron.config import EchoConfig, Policy, Rescale
from echo_megatron.evaluate.perplexity import Windows, measure
from echo_megatron.evaluate.settings import parse_setting
from echo_megatron.evaluate.subjects import ROW_PARALLEL, TransformersSubject
from echo_megatron.evaluate.token_source import Tokens
from echo_megatron.quantizer import Quantizer
from echo_megatron.simulation import find_linears


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("policy_errors")


def test_sums_are_exact_where_they_are_said_to_be(tmp_path: Path, script: ModuleType) -> None:
    model = make_model(tmp_path)
    subject, linears = TransformersSubject(model, {}), find_linears(model, ROW_PARALLEL)
    tokens, windows = Tokens("ids", make_ids(65), ""), Windows(32, 1)
    config = parse_setting("echo4_paper").config
    messages = script.captured(subject, linears, next(windows.batches(tokens)))
    assert [message.shape for message in messages] == [(script.WORLD_SIZE, 32 * 64)] * 6
    with subject.applied(EchoConfig.preset("nccl"), script.WORLD_SIZE, 32):
        exact = measure(subject, tokens, windows).perplexity
    with subject.applied(config, script.WORLD_SIZE, 32):
        rounded = measure(subject, tokens, windows).perplexity
    found = [script.perplexity(subject, linears, tokens, windows, config, set(sites)) for sites in (range(6), [], [1])]
    assert found[:2] == [exact, rounded] and len({*found}) == 3
    assert model(torch.zeros(1, 2, dtype=torch.int64)).logits.shape[-1] == VOCAB, "the linears are their own again"


def test_errors_of_all_values_and_of_the_largest(script: ModuleType) -> None:
    """A group whose ends lie on the grid of every policy but zero_aware's, which moves them to have a zero."""
    group = torch.linspace(0, 1, 128) * 15.5 - 0.4
    by_policy = {
        policy: script.rounding(group.view(1, -1), Quantizer(4, policy, 128, Rescale.tile))
        for policy in script.POLICIES
    }
    assert script.span(group.view(1, -1), 128) == pytest.approx(15.5 / (2 * 15.1), rel=1e-5)
    step = 15.5 / 15
    for policy in (Policy.naive, Policy.zero_aware):
        rms = by_policy[policy][0] * float(group.square().mean().sqrt())
        assert rms == pytest.approx(step / 12**0.5, rel=0.1)
    assert by_policy[Policy.symmetric][0] > 1.9 * by_policy[Policy.naive][0], "half of its grid is not used"
    assert max(by_policy[policy][1] for policy in (Policy.naive, Policy.symmetric)) < 1e-3
    assert by_policy[Policy.zero_aware][1] > 5e-3, "its ends are not those of the group"
    for row in (
        {"bits": 8, "policy": "naive", "group_size": 256},
        {"bits": 4, "policy": "zero_aware", "group_size": 128},
    ):
        config = parse_setting(script.setting_of(row)).config
        assert (config.bits, config.policy.name, config.group_size) == tuple(row.values())
