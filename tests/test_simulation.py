"""Simulated tensor parallelism: exact at 16 bits, the reference's all-reduce otherwise, the model left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echo_megatron.config import Direction, EchoConfig
from echo_megatron.reference import SimulatedGroup
from echo_megatron.simulation import SimulatedTensorParallel, find_linears, split_linear
from echo_megatron.sites import Site


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48, bias=False))


def linears_of(model: nn.Sequential) -> list[tuple[str, nn.Linear]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_at_16_bits_the_parts_add_up_to_the_model(world_size: int) -> None:
    model, x = make_model(), torch.randn(5, 7, 48)
    if world_size == 3:  # 64 is not divisible by 3
        model[0] = nn.Linear(48, 96)
        model[2] = nn.Linear(96, 48)
    with torch.no_grad():
        exact = model(x)
        with SimulatedTensorParallel(linears_of(model), world_size, EchoConfig.preset("nccl")):
            simulated = model(x)
    torch.testing.assert_close(simulated, exact, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_parts_are_what_row_parallel_ranks_compute() -> None:
    linear, x = nn.Linear(48, 16), torch.randn(3, 48)
    parts = split_linear(linear, x, 4)
    assert len(parts) == 4
    torch.testing.assert_close(parts[1], x[:, 12:24] @ linear.weight[:, 12:24].T)
    torch.testing.assert_close(sum(parts) + linear.bias, linear(x), rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("preset", ["echo4", "echo4_paper"])
def test_sites_are_compensated_all_reduces_of_one_pass(preset: str) -> None:
    model, x, config = make_model(), torch.randn(40, 48), EchoConfig.preset(preset)
    with SimulatedTensorParallel(linears_of(model), 2, config):
        first, second = model(x), model(x)
    assert torch.equal(first, second), "a pass starts without the last one's state"

    group = SimulatedGroup(2, config)
    hidden = group.all_reduce(split_linear(model[0], x, 2), Site(0, Direction.forward)) + model[0].bias
    parts = split_linear(model[2], model[1](hidden), 2)
    # The two sites differ in shape here, so the second starts a state of its own, as on a real rank.
    assert torch.equal(first, group.all_reduce(parts, Site(1, Direction.forward)))
    assert not torch.equal(first, model(x))


@torch.no_grad()
def test_compensation_reaches_the_next_site() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(40, 64)
    outputs = []
    for eta in (0.0, None):
        with SimulatedTensorParallel(linears_of(model), 4, EchoConfig.preset("echo4", eta=eta)):
            outputs.append(model(x))
    assert not torch.equal(*outputs)


@torch.no_grad()
def test_another_rank_order_is_the_same_model_rounded_elsewhere() -> None:
    model, x = make_model(), torch.randn(40, 48)
    outputs = {}
    for preset in ("nccl", "echo4"):
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
            with SimulatedTensorParallel(linears_of(model), 4, EchoConfig.preset(preset), order):
                outputs[preset, order] = model(x)
    torch.testing.assert_close(outputs["nccl", (0, 1, 2, 3)], outputs["nccl", (2, 0, 3, 1)], rtol=0, atol=1e-5)
    first, second = outputs["echo4", (0, 1, 2, 3)], outputs["echo4", (2, 0, 3, 1)]
    assert 1e-3 < (first - second).abs().max() < 1


def test_early_sites_have_their_own_bits() -> None:
    simulation = SimulatedTensorParallel(
        linears_of(make_model()), 2, EchoConfig.preset("echo4", early_bits=8, early_fraction=0.5)
    )
    assert [site.bits for _, site in simulation._linears] == [8, 4]


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = make_model()
    with pytest.raises(RuntimeError), SimulatedTensorParallel(linears_of(model), 2, EchoConfig()):
        model(torch.randn(3, 47))
    assert all("forward" not in vars(linear) for _, linear in linears_of(model))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="0: expected an input dimension divisible by 5 ranks, got 48"):
        SimulatedTensorParallel(linears_of(make_model()), 5, EchoConfig())
    with pytest.raises(ValueError, match="at least one row-parallel linear"):
        SimulatedTensorParallel([], 2, EchoConfig())
    with pytest.raises(ValueError, match="rank_order: expected a permutation of 0 to 1, got"):
        SimulatedTensorParallel(linears_of(make_model()), 2, EchoConfig(), (1, 1))
    with pytest.raises(ValueError, match="expected linears named o_proj or down_proj, found none"):
        find_linears(make_model(), ("o_proj", "down_proj"))
