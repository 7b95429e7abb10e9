"""Where the communicator's sums go on real gloo groups: replays of recomputed sites, and outputs that are given."""

import pytest
import torch
import torch.distributed as dist
from communicator_runs import NUM_SITES, contribution
from distributed import run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site


def replaying(rank, world_size, algorithm, keep):
    communicator = Communicator(
        dist.group.WORLD, EchoConfig(algorithm=algorithm), is_recomputed=lambda: keep, max_passes=None
    )
    first = [communicator.all_reduce(torch.randn(3000), Site(i, Direction.forward)).clone() for i in range(3)]
    second = [communicator.all_reduce(torch.randn(3000), Site(i, Direction.forward)).clone() for i in range(3)]
    held = communicator.num_state_bytes()
    replayed = []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            for i in (2, 0, 1):
                replayed.append(communicator.all_reduce(torch.full((3000,), float("nan")), Site(i, Direction.forward)))
            return grad

    for _ in range(2):
        Recompute.apply(torch.ones(1, requires_grad=True)).sum().backward()
    order = [first[i] for i in (2, 0, 1)] + [second[i] for i in (2, 0, 1)]
    return all(torch.equal(a, b) for a, b in zip(order, replayed, strict=True)), held, communicator.replays.num_bytes()


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_return_the_first_run_s_bits_first_in_first_out(algorithm, world_size):
    for equal, held, left in run_ranks(replaying, world_size, algorithm, True):
        assert equal and left == 0
        # Two-shot keeps about 4.25 bits an element, one-shot P times that or, where it is smaller, the FP32 sum itself.
        state = 1.125 * 3008
        per_site = (held - state) / 6
        one_shot_bytes = min(world_size * 3008 * 4.25 / 8, 3000 * 4)
        expected = one_shot_bytes if algorithm is Algorithm.one_shot else 3008 * 4.25 / 8
        assert expected <= per_site < expected * 1.1 + 200


def test_a_replay_without_kept_codes_says_what_is_expected():
    with pytest.raises(AssertionError, match=r"kept no codes to replay\. Expected: activation recompute"):
        run_ranks(replaying, 2, Algorithm.one_shot, False)


# -- outputs that are given


SHAPE = (94, 64)


def given_outs(x):
    """Name -> (contribution of x's values, `out`, storage around `out`)."""
    nan = float("nan")
    yield "none", x.clone(), None, None
    yield "x itself", (same := x.clone()), same, None
    yield "another tensor", x.clone(), (other := torch.full_like(x, nan)), other
    turned = torch.full((SHAPE[1], SHAPE[0]), nan, dtype=x.dtype)
    yield "transposed", x.clone(), turned.t(), turned
    wide = torch.full((SHAPE[0], 2 * SHAPE[1]), nan, dtype=x.dtype)
    yield "every other", x.clone(), wide[:, ::2], wide
    own = x.t().contiguous()
    yield "x itself, transposed", own.t(), own.t(), own
    wide = torch.full((SHAPE[0], 2 * SHAPE[1]), nan, dtype=x.dtype)
    wide[:, 1::2] = x
    yield "x itself, every other", wide[:, 1::2], wide[:, 1::2], wide


def calls_with_out(rank, world_size, config, dtype):
    """One pass whose sums go to every kind of place."""
    communicator = Communicator(dist.group.WORLD, config)
    sums = {}
    for idx in range(7):
        x = contribution(rank, 94 * 64, idx % NUM_SITES, dtype).view(SHAPE)
        name, given, out, storage = list(given_outs(x))[idx]
        y = communicator.all_reduce(given, Site(idx, Direction.forward), out=out)
        assert out is None or y is out, name
        assert "itself" in name or torch.equal(given, x), f"{name}: the input must be left alone"
        assert storage is None or storage.isnan().sum() == storage.numel() - x.numel(), (
            f"{name}: nothing else is written"
        )
        sums[name] = y.clone()
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["echo4", "echo4_paper"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sum_goes_where_it_is_asked_to(world_size, preset, dtype):
    config = EchoConfig.preset(preset)
    ranks = run_ranks(calls_with_out, world_size, config, dtype)
    simulated = SimulatedGroup(world_size, config)
    for idx, name in enumerate(ranks[0]):
        xs = [contribution(rank, 94 * 64, idx % NUM_SITES, dtype).view(SHAPE) for rank in range(world_size)]
        expected = simulated.all_reduce(xs, Site(idx, Direction.forward))
        for sums in ranks:
            assert torch.equal(sums[name], expected), name


def out_without_a_sum(rank, world_size):
    """One rank, and no elements: `out` is filled as well."""
    group = dist.new_group([rank], use_local_synchronization=True)
    x, out = torch.randn(3, 5), torch.zeros(5, 3).t()
    alone = Communicator(group, EchoConfig())
    assert alone.all_reduce(x, Site(0, Direction.forward), out=out) is out and torch.equal(out, x)
    assert alone.all_reduce(x, Site(1, Direction.forward), out=x) is x
    empty = torch.empty(0, 5)
    pair = Communicator(dist.group.WORLD, EchoConfig())
    assert pair.all_reduce(empty, Site(0, Direction.forward), out=empty) is empty
    return True


def test_out_of_one_rank_and_of_no_elements():
    assert run_ranks(out_without_a_sum, 2) == [True] * 2


def replaying_into_out(rank, world_size, algorithm):
    """Sums and replays in place, each overwritten by its caller as soon as it has it."""
    config = EchoConfig(algorithm=algorithm)
    communicator = Communicator(dist.group.WORLD, config, is_recomputed=lambda: True)
    first, replayed = [], []
    for idx in range(3):
        x = contribution(rank, 3000, idx, torch.bfloat16)
        first.append(communicator.all_reduce(x, Site(idx, Direction.forward), out=x).clone())
        x.zero_()

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            for idx in range(3):
                x = torch.full((3000,), float("nan"), dtype=torch.bfloat16)
                assert communicator.all_reduce(x, Site(idx, Direction.forward), out=x) is x
                replayed.append(x.clone())
                x.zero_()
            return grad

    Recompute.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return all(torch.equal(a, b) for a, b in zip(first, replayed, strict=True)) and len(replayed) == 3


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_in_place_of_sums_in_place(algorithm, world_size):
    """One-shot at four ranks keeps the sum itself, which its caller overwrites."""
    assert run_ranks(replaying_into_out, world_size, algorithm) == [True] * world_size
