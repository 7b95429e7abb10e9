"""Two or more GPUs, one process each: calls from several streams and of several communicators."""

import math
import time

import torch
import torch.distributed as dist
from p2p_processes import ALGORITHMS, NEEDS_TWO_GPUS, P2P, TIMEOUT_S, communicate_and_compare, contributions, forward
from ranks import run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

pytestmark = NEEDS_TWO_GPUS


def call_from_two_streams(rank, world_size):
    """The order of the calls is the same on all ranks, their streams are not."""
    config = EchoConfig(algorithm=Algorithm.one_shot, **P2P)
    communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [contributions(world_size, 200_003, idx) for idx in range(20)]
    torch.cuda.synchronize()
    outs = []
    for idx, xs in enumerate(inputs):
        with torch.cuda.stream(streams[(idx + rank) % 2]):
            outs.append(communicator.all_reduce(xs[rank], forward(idx)))
    torch.cuda.synchronize()
    communicator.check()
    for idx, xs in enumerate(inputs):
        assert torch.equal(outs[idx], simulated.all_reduce(xs, forward(idx))), idx
    communicator.destroy()


def test_rank_dependent_streams():
    run_ranks(call_from_two_streams)


def call_in_another_order(rank, world_size):
    """Rank 0 makes call A on one stream, then B on another; the others B first: an error, not a hang."""
    config = EchoConfig(algorithm=Algorithm.one_shot, timeout_s=TIMEOUT_S, **P2P)
    communicator = communicate_and_compare(config, world_size, rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [contributions(world_size, 50_003, idx) for idx in range(2)]
    torch.cuda.synchronize()
    begin, message = time.monotonic(), ""
    try:
        for which in (0, 1) if rank == 0 else (1, 0):
            with torch.cuda.stream(streams[which]):
                communicator.all_reduce(inputs[which][rank], Site(which, Direction.backward))
        torch.cuda.synchronize()
        communicator.check()
    except CommunicationError as error:
        message = str(error)
    assert time.monotonic() - begin < 2 * TIMEOUT_S + 1
    communicator.destroy()
    return message


def test_another_order_of_calls_on_one_rank_is_refused():
    messages = run_ranks(call_in_another_order)
    assert any("another call" in message for message in messages), messages


def alternate_communicators(rank, world_size, same_order):
    """Two communicators on two streams. Kernels that fill the GPU in another order on each rank may exclude each other:
    then the calls fail within the limit.
    """
    configs = [EchoConfig(algorithm=algorithm, timeout_s=TIMEOUT_S, **P2P) for algorithm in ALGORITHMS]
    both = [(Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)) for config in configs]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [[contributions(world_size, 150_001, 2 * idx + which) for idx in range(20)] for which in range(2)]
    torch.cuda.synchronize()
    outs = [[], []]
    try:
        for idx in range(20):
            for which in (0, 1) if same_order or (rank + idx) % 2 else (1, 0):
                with torch.cuda.stream(streams[which]):
                    outs[which].append(both[which][0].all_reduce(inputs[which][idx][rank], forward(idx)))
        torch.cuda.synchronize()
        for communicator, _ in both:
            communicator.check()
    except CommunicationError:
        if same_order:
            raise
        return "refused"
    for which, (communicator, simulated) in enumerate(both):
        for idx, out in enumerate(outs[which]):
            assert torch.equal(out, simulated.all_reduce(inputs[which][idx], forward(idx))), (which, idx)
        communicator.destroy()
    return "right"


def test_two_communicators_at_once():
    assert set(run_ranks(alternate_communicators, True)) == {"right"}


def test_two_communicators_in_another_order_on_each_rank_never_hang():
    assert len(set(run_ranks(alternate_communicators, False, timeout_s=90))) == 1


def overwrite_at_once(rank, world_size):
    config = EchoConfig(algorithm=Algorithm.one_shot, **P2P)
    communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
    inputs = [contributions(world_size, 300_007, idx) for idx in range(40)]
    outs = [torch.empty_like(xs[rank]) for xs in inputs]
    torch.cuda._sleep(1)
    for idx, xs in enumerate(inputs):
        if rank == idx % world_size:
            torch.cuda._sleep(1_500_000)
        x = xs[rank].clone()
        outs[idx].copy_(communicator.all_reduce(x, forward(idx), out=x))
        x.fill_(math.nan)
    torch.cuda.synchronize()
    communicator.check()
    for idx, xs in enumerate(inputs):
        assert torch.equal(outs[idx], simulated.all_reduce(xs, forward(idx))), idx
    communicator.destroy()


def test_the_input_may_be_overwritten_as_soon_as_the_call_is_done():
    run_ranks(overwrite_at_once)
