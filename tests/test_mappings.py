"""The autograd functions for models that are not Megatron's, and the documented example that uses them."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig
from echo_megatron.mappings import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site

FORWARD, BACKWARD = Site(0, Direction.forward), Site(0, Direction.backward)
EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "plain_mlp.py"


def tensor(rank, seed):
    return torch.randn(40, 32, generator=torch.Generator().manual_seed(100 * seed + rank))


def both_regions(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    x, grad = tensor(rank, 1).requires_grad_(), tensor(rank, 2)
    reduced = reduce_from_tensor_parallel_region(x, communicator, FORWARD)
    reduced.backward(grad)
    straight = x.grad.clone()
    x.grad = None
    copied = copy_to_tensor_parallel_region(x, communicator, BACKWARD)
    assert torch.equal(copied, x)
    copied.backward(grad)
    return reduced.detach(), torch.equal(straight, grad), x.grad


@pytest.mark.parametrize("world_size", [2, 3])
def test_regions_are_each_other_s_transpose_and_the_reference_s_sums(world_size):
    simulated = SimulatedGroup(world_size, EchoConfig())
    outputs = simulated.all_reduce([tensor(rank, 1) for rank in range(world_size)], FORWARD)
    gradient = simulated.all_reduce([tensor(rank, 2) for rank in range(world_size)], BACKWARD)
    for reduced, straight, grad in run_ranks(both_regions, world_size):
        assert torch.equal(reduced, outputs) and straight and torch.equal(grad, gradient)


def sequence_regions(rank, world_size, gather_bits):
    communicator = Communicator(dist.group.WORLD, EchoConfig(gather_bits=gather_bits))
    whole, share = tensor(rank, 1).requires_grad_(), tensor(rank, 2)[: 40 // world_size].requires_grad_()
    scattered = reduce_scatter_to_sequence_parallel_region(whole, communicator, FORWARD)
    scattered.backward(tensor(rank, 3)[: 40 // world_size])
    gathered = gather_from_sequence_parallel_region(share, communicator, BACKWARD)
    gathered.backward(tensor(rank, 4))
    same = tensor(0, 5).requires_grad_()
    own = scatter_to_sequence_parallel_region(same, communicator)
    own.backward(tensor(rank, 3)[: 40 // world_size])
    return [x.detach() for x in (scattered, whole.grad, gathered, share.grad, own, same.grad)]


@pytest.mark.parametrize("gather_bits", [4, 16])
def test_sequence_regions_are_each_other_s_transpose_and_the_reference_s(gather_bits):
    world_size, ranks = 2, range(2)
    simulated = SimulatedGroup(world_size, EchoConfig())
    shares = simulated.reduce_scatter([tensor(rank, 1) for rank in ranks], FORWARD)
    gradient = simulated.reduce_scatter([tensor(rank, 4) for rank in ranks], BACKWARD)
    inputs, grads = ([tensor(rank, seed)[:20] for rank in ranks] for seed in (2, 3))
    exact_inputs, exact_grads = torch.cat(inputs), torch.cat(grads)
    if gather_bits == 16:
        gathered, gathered_grad = exact_inputs, exact_grads
    else:
        gathered, gathered_grad = (simulated.all_gather(xs, gather_bits) for xs in (inputs, grads))
    for rank, results in enumerate(run_ranks(sequence_regions, world_size, gather_bits)):
        own = tensor(0, 5)[20 * rank : 20 * (rank + 1)]
        expected = (shares[rank], gathered_grad, gathered, gradient[rank], own, exact_grads)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def wrong_direction(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    with pytest.raises(ValueError, match="expected a forward site, got a backward one"):
        reduce_from_tensor_parallel_region(torch.ones(4), communicator, BACKWARD)
    with pytest.raises(ValueError, match="expected a backward site, got a forward one"):
        copy_to_tensor_parallel_region(torch.ones(4), communicator, FORWARD)
    with pytest.raises(ValueError, match="expected a forward site, got a backward one"):
        reduce_scatter_to_sequence_parallel_region(torch.ones(4), communicator, BACKWARD)
    with pytest.raises(ValueError, match="expected a backward site, got a forward one"):
        gather_from_sequence_parallel_region(torch.ones(4), communicator, FORWARD)
    return True


def test_sites_of_the_other_direction_are_refused():
    assert run_ranks(wrong_direction, 1) == [True]


def example(rank, world_size):
    train = runpy.run_path(str(EXAMPLE))["train"]
    exact = train(EchoConfig.preset("echo8"), 25)
    return exact, train(EchoConfig.preset("echo4"), 25), train(EchoConfig.preset("echo4", eta=0.0), 25)


def test_the_documented_example_trains_on_two_ranks():
    first, second = run_ranks(example, 2)
    assert first == second
    eight, four, plain = first
    assert eight[-1] < 0.8 * eight[0] and abs(four[-1] - eight[-1]) < 0.02
    assert four != plain
