"""What a linear calls all_reduce on, on gloo: the sum takes the place of the contribution, whatever its layout."""

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site

HIDDEN = 64
SHAPE = (5, 3, HIDDEN)
CONFIG = EchoConfig(min_bytes=0)


def share(rank, idx):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * rank + idx))


def strided(x):
    storage = torch.full((*SHAPE[:-1], 2 * HIDDEN), float("nan"))
    storage[..., ::2] = x
    return storage, storage[..., ::2]


def transposed(x):
    storage = x.transpose(0, 1).contiguous()
    return storage, storage.transpose(0, 1)


def part(x):
    storage = torch.full((SHAPE[0] + 2, *SHAPE[1:]), float("nan"))
    storage[1:-1] = x
    return storage, storage[1:-1]


LAYOUTS = {"contiguous": lambda x: (x, x), "strided": strided, "transposed": transposed, "part": part}


def site_sums(rank, world_size, is_async):
    """The all-reduces of one pass, as a linear makes them; the sums."""
    communicator = Communicator(dist.group.WORLD, CONFIG)
    sums = []
    for idx, make in enumerate(LAYOUTS.values()):
        group = EchoProcessGroup(communicator, Site(idx, Direction.backward), HIDDEN, lambda: True)
        storage, x = make(share(rank, idx))
        address = x.data_ptr()
        work = dist.all_reduce(x, group=group, async_op=is_async)
        if is_async:
            assert work.wait() and work.is_completed()
        group.close()
        sums.append(x.clone())
        assert x.data_ptr() == address
        assert storage.isnan().sum() == storage.numel() - x.numel(), "nothing beside x is written"
    return sums


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sum_takes_the_place_of_the_contribution(world_size, is_async):
    simulated = SimulatedGroup(world_size, CONFIG)
    ranks = run_ranks(site_sums, world_size, is_async)
    for idx, layout in enumerate(LAYOUTS):
        expected = simulated.all_reduce([share(rank, idx) for rank in range(world_size)], Site(idx, Direction.backward))
        for sums in ranks:
            assert torch.equal(sums[idx], expected), layout


def small_messages(rank, world_size):
    """Under `min_bytes` the real group sums, which a quantized sum of these values would not equal."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(min_bytes=4 * HIDDEN * 8 + 1))
    group = EchoProcessGroup(communicator, Site(0, Direction.forward), HIDDEN, lambda: True)
    sums = []
    for rows in (8, 9):
        x = share(rank, 0).view(-1, HIDDEN)[:rows].contiguous()
        sums.append((group.takes(x, dist.ReduceOp.SUM), x))
        dist.all_reduce(x, group=group)
    return sums


def test_small_messages_stay_the_real_group_s():
    ranks = run_ranks(small_messages, 2)
    exact = share(0, 0).view(-1, HIDDEN) + share(1, 0).view(-1, HIDDEN)
    for (takes_small, small), (takes_large, large) in ranks:
        assert not takes_small and torch.equal(small, exact[:8])
        assert takes_large and not torch.equal(large, exact[:9])


def known_to_torch(rank, world_size):
    """What asks `torch.distributed` about groups finds the real group: profilers, ranks, backends, the end."""
    from torch.distributed import distributed_c10d
    from torch.profiler import ProfilerActivity, profile

    real, other = (dist.new_group(list(range(world_size))) for _ in range(2))
    before = distributed_c10d._world.pg_config_info
    communicator = Communicator(real, CONFIG)
    groups = [EchoProcessGroup(communicator, Site(idx, Direction.forward), HIDDEN, lambda: True) for idx in range(3)]
    for group in groups:
        assert group == real and real == group and hash(group) == hash(real) and group != other
        assert dist.get_rank(group) == rank and dist.get_process_group_ranks(group) == list(range(world_size))
        assert dist.get_backend_config(group) == dist.get_backend_config(real)
    assert distributed_c10d._world.pg_config_info == before
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(share(rank, 0), group=groups[0])
    assert any("all_gather" in event.key for event in profiler.key_averages())
    groups[1].close()
    assert [group.site.idx for group in communicator.site_groups] == [0, 2]
    dist.destroy_process_group(real)
    return True


def test_torch_distributed_knows_the_group_as_the_real_one():
    assert run_ranks(known_to_torch, 2) == [True] * 2


# -- sequence parallelism


def sequence_share(rank, seed, rows, dtype=torch.float32):
    return torch.randn(rows, 3, HIDDEN, generator=torch.Generator().manual_seed(10 * seed + rank)).to(dtype)


def sequence_calls(rank, world_size):
    """Reduce-scatters and all-gathers as linears make them; the outputs by name, and what stays the real group's."""
    communicator = Communicator(dist.group.WORLD, CONFIG)
    site = Site(0, Direction.forward, "fc2")
    gather = Site(0, Direction.forward, "fc2", bits=8)
    active = [True]
    group = EchoProcessGroup(communicator, site, HIDDEN, lambda: active[0], gather=gather)
    sums_only = EchoProcessGroup(communicator, site, HIDDEN, lambda: True)
    gathers_only = EchoProcessGroup(communicator, site, HIDDEN, lambda: True, sums=False, gather=gather)
    whole, share = sequence_share(rank, 1, 4 * world_size), sequence_share(rank, 2, 4)
    results = {}

    def scatter(on, x=whole, is_async=False, op=dist.ReduceOp.SUM):
        out = torch.empty(x.shape[0] // world_size, *x.shape[1:], dtype=x.dtype)
        work = dist.reduce_scatter_tensor(out, x, op, group=on, async_op=is_async)
        assert (work.wait() and work.is_completed()) if is_async else work is None
        return out

    def gathered(on, x=share, is_async=False):
        out = torch.empty(x.shape[0] * world_size, *x.shape[1:], dtype=x.dtype)
        work = dist.all_gather_into_tensor(out, x, group=on, async_op=is_async)
        assert (work.wait() and work.is_completed()) if is_async else work is None
        return out

    for is_async in (False, True):
        results["scatter", is_async], results["gather", is_async] = scatter(group, is_async=is_async), gathered(group)
        assert torch.equal(gathered(group, is_async=True), results["gather", is_async]), "the same bits again"
    exact_scatter, exact_gather = scatter(communicator.group), gathered(communicator.group)
    assert torch.equal(scatter(sums_only), results["scatter", False])
    assert torch.equal(gathered(sums_only), exact_gather)
    assert torch.equal(scatter(gathers_only), exact_scatter)
    assert torch.equal(gathered(gathers_only), results["gather", False])

    outs = [torch.empty(4, 3, HIDDEN), torch.empty(4, 3, HIDDEN + 1)]
    wide = torch.ones(4 * world_size, 3, HIDDEN + 1)
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for out, x in zip(outs, (whole, wide), strict=True):
            dist.reduce_scatter_tensor(out, x, group=group)
    manager.wait()
    assert torch.equal(outs[0], results["scatter", False]) and outs[1].eq(world_size).all()
    outs = [torch.empty(4 * world_size, 3, HIDDEN), torch.empty(4 * world_size, dtype=torch.uint8)]
    with dist._coalescing_manager(group=group):
        for out, x in zip(outs, (share, torch.full((4,), rank, dtype=torch.uint8)), strict=True):
            dist.all_gather_into_tensor(out, x, group=group)
    assert torch.equal(outs[0], results["gather", False]) and outs[1].tolist() == [r for r in range(2) for _ in "abcd"]

    device_block = torch.empty(4 * world_size, 3, HIDDEN)
    group._is_coalescing = True  # what a block with a device sets, which gloo does not offer
    dist.all_gather_into_tensor(device_block, share, group=group)
    group._is_coalescing = False
    assert torch.equal(device_block, exact_gather)

    # Not activations: FP8 data, another width, another operation, a list, an inactive phase.
    foreign = [
        torch.equal(gathered(group, share.view(torch.uint8)), gathered(communicator.group, share.view(torch.uint8))),
        torch.equal(gathered(group, share[..., 1:].contiguous()), exact_gather[..., 1:]),
        torch.equal(scatter(group, op=dist.ReduceOp.MAX), scatter(communicator.group, op=dist.ReduceOp.MAX)),
    ]
    parts = [torch.empty(4, 3, HIDDEN) for _ in range(world_size)]
    dist.all_gather(parts, share, group=group)
    foreign += [torch.equal(torch.cat(parts), exact_gather)]
    active[0] = False
    foreign += [torch.equal(scatter(group), exact_scatter), torch.equal(gathered(group), exact_gather)]
    assert all(foreign), foreign
    return results, exact_scatter, exact_gather


def test_sequence_parallel_calls_are_the_reference_s_and_others_the_real_group_s():
    simulated = SimulatedGroup(2, CONFIG)
    site = Site(0, Direction.forward)
    shares = simulated.reduce_scatter([sequence_share(rank, 1, 8) for rank in range(2)], site)
    whole = simulated.all_gather([sequence_share(rank, 2, 4) for rank in range(2)], 8)
    for rank, (results, exact_scatter, exact_gather) in enumerate(run_ranks(sequence_calls, 2)):
        for (name, _), result in results.items():
            assert torch.equal(result, shares[rank] if name == "scatter" else whole)
        assert not torch.equal(exact_scatter, shares[rank]) and not torch.equal(exact_gather, whole)


def small_shares(rank, world_size):
    """`min_bytes` counts the larger tensor of a call, so that a model's calls are all on one side of it."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(min_bytes=8 * 3 * HIDDEN * 4))
    gather = Site(0, Direction.forward, bits=8)
    group = EchoProcessGroup(communicator, Site(0, Direction.forward), HIDDEN, lambda: True, gather=gather)
    return [
        (
            group._scatters(torch.empty(rows // 2, 3, HIDDEN), torch.empty(rows, 3, HIDDEN), dist.ReduceOp.SUM),
            group._gathers(torch.empty(rows, 3, HIDDEN), torch.empty(rows // 2, 3, HIDDEN)),
        )
        for rows in (6, 8)
    ]


def test_small_shares_stay_the_real_group_s():
    assert run_ranks(small_shares, 2) == [[(False, False), (True, True)]] * 2
