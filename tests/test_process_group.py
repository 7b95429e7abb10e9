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
