"""Two or more GPUs, one process each: how the transport is chosen, and communicators from creation to the end."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from p2p_processes import NEEDS_TWO_GPUS, P2P, communicate_and_compare, contribution, forward
from ranks import NUM_GPUS, run_ranks, visible_devices

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, EchoConfig
from echo_megatron.transports.protocol import CommunicationError

pytestmark = NEEDS_TWO_GPUS


# -- how the transport is chosen


def choose(rank, world_size, expected):
    communicator = communicate_and_compare(EchoConfig(algorithm=Algorithm.one_shot), world_size, rank)
    name, description = communicator.transport.name, communicator.describe()
    assert expected is None or name == expected, description
    assert name in description
    communicator.destroy()
    return name


def test_auto_takes_p2p():
    assert set(run_ranks(choose, "p2p")) == {"p2p"}


def test_expandable_segments():
    run_ranks(choose, "p2p", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


def test_reversed_visible_devices():
    run_ranks(choose, "p2p", env={"CUDA_VISIBLE_DEVICES": ",".join(reversed(visible_devices()[:NUM_GPUS]))})


def test_visible_devices_in_another_order_on_each_rank():
    """Rank r sees its own GPU first, then the others, and uses number 0."""
    names = visible_devices()[:NUM_GPUS]

    def rank_env(rank):
        return {"CUDA_VISIBLE_DEVICES": ",".join(names[rank:] + names[:rank])}

    used = run_ranks(choose, None, rank_env=rank_env, devices=[0] * NUM_GPUS)
    assert len(set(used)) == 1, "the ranks take the same transport"


def test_each_rank_sees_its_own_gpu_only():
    names = visible_devices()
    used = run_ranks(choose, None, rank_env=lambda rank: {"CUDA_VISIBLE_DEVICES": names[rank]}, devices=[0] * NUM_GPUS)
    assert len(set(used)) == 1, "the ranks take the same transport"


def fall_back_together(rank, world_size, where):
    """Rank 1 cannot: all ranks take the collective transport, or all raise where p2p is asked for."""
    from torch.distributed import _symmetric_memory

    from echo_megatron.transports import p2p_setup

    rendezvous = _symmetric_memory.rendezvous

    def failing_rendezvous(*args, **options):
        rendezvous(*args, **options)
        raise RuntimeError("mapping resources failed")

    if rank == 1 and where == "agree":
        p2p_setup.why_unavailable = lambda group: "no peer access (injected)"
    if rank == 1 and where == "map":
        _symmetric_memory.rendezvous = failing_rendezvous
    name = choose(rank, world_size, "collective")
    message = ""
    try:
        Communicator(dist.group.WORLD, EchoConfig(**P2P))
    except (ValueError, CommunicationError) as error:
        message = str(error)
    return name, message


@pytest.mark.parametrize("where", ["agree", "map"])
def test_a_rank_that_cannot_takes_all_to_the_collective_transport(where):
    for name, message in run_ranks(fall_back_together, where):
        assert name == "collective"
        assert "p2p" in message and "rank 1" in message, message


# -- from creation to the end


def resources():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    return len(list(Path("/proc/self/fd").iterdir())), torch.cuda.mem_get_info()[0]


def create_and_destroy(rank, world_size):
    x = contribution(rank, 10_000, 0)

    def cycle():
        communicator = Communicator(dist.group.WORLD, EchoConfig(**P2P))
        y = communicator.all_reduce(x, forward(0))
        torch.cuda.synchronize()
        communicator.check()
        communicator.destroy()
        return y

    for _ in range(10):
        y = cycle()
    before = resources()
    for _ in range(190):
        assert torch.equal(cycle(), y)
    return before, resources()


def test_two_hundred_communicators_leave_nothing_behind():
    for rank, (before, after) in enumerate(run_ranks(create_and_destroy, timeout_s=300)):
        assert after[0] <= before[0] + 2, f"rank {rank}: file descriptors went from {before[0]} to {after[0]}"
        lost = before[1] - after[1]
        assert lost < 32 * 2**20, f"rank {rank}: {lost / 2**20:.0f} MiB of device memory are gone after 190 cycles"


def end_in_any_order(rank, world_size, order):
    communicator = communicate_and_compare(EchoConfig(algorithm=Algorithm.one_shot, **P2P), world_size, rank)
    if order == "destroy, then collect":
        communicator.destroy()
        communicator.destroy()
        with pytest.raises(CommunicationError, match="destroyed"):
            communicator.all_reduce(contribution(rank, 100, 0), forward(0))
    if order == "abandoned by one rank":
        if rank == 0:
            communicator.abandon()
            communicator.abandon()
            with pytest.raises(CommunicationError, match="destroyed"):
                communicator.all_reduce(contribution(rank, 100, 0), forward(0))
        dist.barrier()
        if rank != 0:
            communicator.abandon()
    if order == "group destroyed, then collect":
        dist.destroy_process_group()
    del communicator
    gc.collect()
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "order", ["destroy, then collect", "group destroyed, then collect", "abandoned by one rank", "never destroyed"]
)
def test_the_end_does_not_hang(order):
    run_ranks(end_in_any_order, order, timeout_s=90)
