"""Two or more GPUs, one process each: reduce-scatter and all-gather over peer memory, against the reference."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from feedbacks import AVERAGES
from p2p_processes import P2P, contributions
from ranks import NUM_GPUS, run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig, Policy, Rescale, StateDtype, TransportName
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(400),
]
TIMEOUT_S = 2.0


def cases():
    for policy in Policy:
        yield EchoConfig(policy=policy, group_size=32 if "rotated" in policy.name else 128, **P2P)
    for options in (*({"state_dtype": dtype} for dtype in StateDtype), AVERAGES, {"bits": 8}, {"eta": 0.0}):
        yield EchoConfig(**options, **P2P)
    yield EchoConfig(rescale=Rescale.group, gather_bits=4, **P2P)


def shaped(world_size, rows, width, seed, dtype):
    return [x.view(rows, width) for x in contributions(world_size, rows * width, seed, dtype)]


def hold_the_reference_s_bits(rank, world_size):
    for config in cases():
        communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
        assert communicator.transport.name == "p2p"
        for rows, width, dtype in ((5, 33, torch.bfloat16), (77, 1_024, torch.float16), (301, 520, torch.float32)):
            for direction in Direction:
                for idx in range(3):
                    site, gather = (Site(idx, direction, bits=bits) for bits in (config.bits, config.gather_bits))
                    shards = shaped(world_size, rows, width, idx, dtype)
                    gathered = communicator.all_gather(shards[rank], gather)
                    assert torch.equal(gathered, simulated.all_gather(shards, gather.bits)), (config, rows, gather)
                    xs = shaped(world_size, world_size * rows, width, 10 + idx, dtype)
                    out = xs[rank].new_empty(rows, width) if idx == 1 else None
                    share = communicator.reduce_scatter(xs[rank], site, out=out)
                    assert out is None or share is out
                    assert torch.equal(share, simulated.reduce_scatter(xs, site)[rank]), (config, rows, site)
        torch.cuda.synchronize()
        communicator.check()
        communicator.destroy()


def test_ranks_hold_the_reference_s_bits():
    run_ranks(hold_the_reference_s_bits)


def take_turns(rank, world_size, num_calls):
    """All kinds of calls, from 1 k to 8 M values, a rank late at random; p2p's bits are the collective transport's."""
    draw = random.Random(0)
    over_memory = Communicator(dist.group.WORLD, EchoConfig(**P2P))
    over_nccl = Communicator(dist.group.WORLD, EchoConfig(transport=TransportName.collective))
    values = contributions(world_size, 8_400_000 * world_size, 0)[rank]
    torch.cuda._sleep(1)
    for number in range(num_calls):
        num_values, begin = int(2 ** draw.uniform(10, 23)), draw.randrange(0, 64)
        kind, late, is_compared = draw.choice(("reduce_scatter", "all_gather", "exact")), draw.random(), draw.random()
        num_values *= world_size if kind == "reduce_scatter" else 1
        x, site = values[begin : begin + num_values], Site(0, draw.choice(list(Direction)), bits=draw.choice((4, 8)))
        if late < 0.1 and draw.randrange(world_size) == rank:
            torch.cuda._sleep(2_000_000)
        if kind == "exact":
            over_memory.exact_all_reduce(x, site)
            continue
        y = getattr(over_memory, kind)(x, site)
        if is_compared < 0.1:
            assert torch.equal(y, getattr(over_nccl, kind)(x, site)), (number, kind, num_values)
    torch.cuda.synchronize()
    over_memory.check()
    over_memory.destroy()
    over_nccl.destroy()


def test_calls_of_every_kind_back_to_back(request):
    num_calls = request.config.getoption("--num-calls", default=2000)
    run_ranks(take_turns, num_calls, timeout_s=150 + num_calls / 10)


def replay_graphs(rank, world_size):
    config = EchoConfig(state_dtype=StateDtype.compact, **P2P)
    communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
    communicator.prepare_capture()
    rows, width = 64, 1_000
    x = torch.zeros(world_size * rows, width, dtype=torch.bfloat16, device="cuda")

    def run():
        shares = [communicator.reduce_scatter(x, Site(idx, Direction.forward)) for idx in range(3)]
        return [communicator.all_gather(share, Site(0, Direction.forward, bits=8)) for share in shares]

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for replay in range(20):
        xs = shaped(world_size, world_size * rows, width, replay, torch.bfloat16)
        x.copy_(xs[rank])
        graph.replay()
        for idx, output in enumerate(outputs):
            shares = simulated.reduce_scatter(xs, Site(idx, Direction.forward))
            assert torch.equal(output, simulated.all_gather(shares, 8)), (replay, idx)
    torch.cuda.synchronize()
    communicator.check()


def test_replays_of_a_graph():
    run_ranks(replay_graphs)


def wait_for_the_dead(rank, world_size, kind):
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=TIMEOUT_S, **P2P))
    x, site = torch.ones(world_size * 5_000, device="cuda"), Site(3, Direction.backward, name="fc2")
    getattr(communicator, kind)(x, site)
    torch.cuda.synchronize()
    communicator.check()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    begin = time.monotonic()
    y = getattr(communicator, kind)(x, site)
    torch.cuda.synchronize()
    assert time.monotonic() - begin < TIMEOUT_S + 1
    with pytest.raises(CommunicationError, match=r"backward site 3 of chunk 0 \(fc2\)"):
        communicator.check()
    assert y.isnan().any()


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_killed_rank_ends_the_others(kind):
    run_ranks(wait_for_the_dead, kind, killed=[NUM_GPUS - 1])


def make_different_calls(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=TIMEOUT_S, **P2P))
    x, site = torch.ones(world_size * 5_000, device="cuda"), Site(0, Direction.forward)
    call = communicator.all_gather if rank else communicator.reduce_scatter
    call(x if rank == 0 else x[:5_000], site)
    torch.cuda.synchronize()
    with pytest.raises(CommunicationError, match=r"makes another call|gave up"):
        communicator.check()


def test_ranks_that_make_different_calls():
    run_ranks(make_different_calls)
