"""Two or more GPUs, one process each: the communicator over peer memory, against the reference and against faults."""

import gc
import math
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from feedbacks import AVERAGES
from ranks import NUM_GPUS, run_ranks, visible_devices

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Residual, StateDtype, TransportName
from echo_megatron.reference import SimulatedGroup, exact_sum
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(400),
]
ALGORITHMS = (Algorithm.one_shot, Algorithm.two_shot)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
P2P = {"transport": TransportName.p2p}
TIMEOUT_S = 2.0


def contribution(rank, num_values, seed, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(num_values, generator=generator, device="cuda").to(dtype)


def contributions(world_size, num_values, seed, dtype=torch.bfloat16):
    return [contribution(rank, num_values, seed, dtype) for rank in range(world_size)]


def forward(idx, config=None):
    return Site(idx, Direction.forward, bits=config.bits if config else 4)


def communicate_and_compare(config, world_size, rank, num_sites=3, num_values=100_003):
    """A communicator of `config`, after a pass that was compared with the reference."""
    communicator = Communicator(dist.group.WORLD, config)
    simulated = SimulatedGroup(world_size, config)
    for idx in range(num_sites):
        xs = contributions(world_size, num_values, idx)
        y = communicator.all_reduce(xs[rank], forward(idx, config))
        assert torch.equal(y, simulated.all_reduce(xs, forward(idx, config))), f"{config} {idx}"
    torch.cuda.synchronize()
    communicator.check()
    return communicator


# -- the reference's bits


def cases():
    for preset in ("echo4", "echo8", "echo4_paper", "echo8_paper"):
        for algorithm in ALGORITHMS:
            for residual in Residual:
                yield EchoConfig.preset(preset, algorithm=algorithm, residual=residual, **P2P)
    for policy in Policy:
        yield EchoConfig(policy=policy, algorithm=Algorithm.two_shot, **P2P)
    for state_dtype in StateDtype:
        averages = {} if state_dtype is StateDtype.compact else AVERAGES
        yield EchoConfig(algorithm=Algorithm.one_shot, state_dtype=state_dtype, **averages, **P2P)
    yield EchoConfig(backward_residual=Residual.consensus, **P2P)  # other coefficients in the other direction
    yield EchoConfig(eta=0.0, algorithm=Algorithm.one_shot, **P2P)


def hold_the_reference_s_bits(rank, world_size):
    for config in cases():
        communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
        assert communicator.transport.name == "p2p"
        for num_values, dtype in zip((1, 1_000_003, 65_536, world_size - 1, 4_097), (*DTYPES, *DTYPES), strict=False):
            for direction in Direction:
                for idx in range(3):
                    site = Site(idx, direction, bits=config.bits)
                    xs = contributions(world_size, num_values, idx, dtype)
                    x = xs[rank].clone()
                    y = communicator.all_reduce(x, site, out=x if idx == 1 else None)
                    assert idx != 1 or y.data_ptr() == x.data_ptr()
                    assert torch.equal(y, simulated.all_reduce(xs, site)), (config, num_values, dtype, site)
        torch.cuda.synchronize()
        communicator.check()
        communicator.destroy()


def test_ranks_hold_the_reference_s_bits():
    run_ranks(hold_the_reference_s_bits)


def sum_exactly(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig(**P2P))
    for idx, num_values in enumerate((1, 7, 127, 4_096, 8_191, 100_001)):
        for dtype in DTYPES:
            xs = contributions(world_size, num_values, idx, dtype)
            x = xs[rank].clone()
            y = communicator.exact_all_reduce(x, forward(idx), out=x if idx % 2 else None)
            assert torch.equal(y, exact_sum(torch.stack(xs))), (num_values, dtype)
    torch.cuda.synchronize()
    communicator.check()
    communicator.destroy()


def test_exact_sums():
    run_ranks(sum_exactly)


def take_any_strides(rank, world_size):
    for residual in Residual:
        config = EchoConfig(algorithm=Algorithm.one_shot, residual=residual, **P2P)
        communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
        views = {
            "transposed": lambda x: x.view(60, -1).t(),
            "every second column": lambda x: x.view(60, -1)[:, ::2],
            "expanded": lambda x: x[:300].view(1, 300).expand(50, 300),
            "from the second element": lambda x: x[1:],
            "permuted": lambda x: x.view(4, 15, -1).permute(2, 0, 1),
        }
        for idx, (name, view) in enumerate(views.items()):
            xs = [view(x) for x in contributions(world_size, 60_000, idx)]
            y = communicator.all_reduce(xs[rank], forward(idx))
            expected = simulated.all_reduce([x.contiguous() for x in xs], forward(idx))
            assert y.is_contiguous() and torch.equal(y, expected), name
        whole = contributions(world_size, 60_000, 9)
        xs = [x.view(60, -1).t() for x in whole]
        expected = simulated.all_reduce([x.contiguous() for x in xs], forward(0))
        y = communicator.all_reduce(xs[rank], forward(0), out=xs[rank])
        assert torch.equal(y, expected) and torch.equal(xs[rank], expected), "a transposed input in place"
        torch.cuda.synchronize()
        communicator.check()
        communicator.destroy()


def test_non_contiguous_inputs():
    run_ranks(take_any_strides)


def run_back_to_back(rank, world_size, num_calls):
    """Sizes from 1 k to 32 M, a rank late at random; all ranks hold the same bits, some are compared."""
    draw = random.Random(0)
    config = EchoConfig(algorithm=Algorithm.one_shot, **P2P)
    communicator = Communicator(dist.group.WORLD, config)
    values = contributions(world_size, 33_000_000, 0)
    digest = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda._sleep(1)
    for number in range(num_calls):
        num_values, begin = int(2 ** draw.uniform(10, 25)) // 2 * 2 - draw.randint(0, 1), draw.randrange(0, 8192)
        late, is_late = draw.randrange(world_size), draw.random() < 0.1
        in_place, is_compared = draw.random() < 0.3, draw.random() < 0.02
        xs = [x[begin : begin + num_values] for x in values]
        if is_late and late == rank:
            torch.cuda._sleep(2_000_000)
        x = xs[rank].clone() if in_place else xs[rank]
        y = communicator.all_reduce(x, forward(0), out=x if in_place else None)
        digest = digest * 31 + y.view(torch.int16).sum(dtype=torch.int64)
        if is_compared:
            assert torch.equal(y, SimulatedGroup(world_size, config).all_reduce(xs, forward(0))), (number, num_values)
    torch.cuda.synchronize()
    communicator.check()
    communicator.destroy()
    return digest.item()


def test_calls_of_mixed_shapes_back_to_back(request):
    num_calls = request.config.getoption("--num-calls", default=2000)
    digests = run_ranks(run_back_to_back, num_calls, timeout_s=150 + num_calls / 20)
    assert len(set(digests)) == 1, "every rank holds the same bits on every call"


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

    from echo_megatron.transports import p2p

    rendezvous = _symmetric_memory.rendezvous

    def failing_rendezvous(*args, **options):
        rendezvous(*args, **options)
        raise RuntimeError("mapping resources failed")

    if rank == 1 and where == "agree":
        p2p.why_unavailable = lambda group: "no peer access (injected)"
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


# -- streams, graphs, several communicators


def capture(rank, world_size):
    """The communicator's first call is inside the capture; fifty replays on new data."""
    for residual in Residual:
        config = EchoConfig(algorithm=Algorithm.one_shot, residual=residual, **P2P)
        communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
        x = torch.zeros(3, 50_000, dtype=torch.bfloat16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [communicator.all_reduce(x[idx], forward(idx)) for idx in range(3)]
        for replay in range(50):
            inputs = contributions(world_size, (3, 50_000), replay)
            x.copy_(inputs[rank])
            for out in outs:
                out.fill_(math.nan)
            graph.replay()
            for idx, out in enumerate(outs):
                expected = simulated.all_reduce([values[idx] for values in inputs], forward(idx))
                assert torch.equal(out, expected), (residual, replay, idx)
        torch.cuda.synchronize()
        communicator.check()
        xs = contributions(world_size, 12_345, 1)
        y = communicator.all_reduce(xs[rank], Site(0, Direction.backward))
        assert torch.equal(y, simulated.all_reduce(xs, Site(0, Direction.backward))), "a call outside after the replays"
        communicator.destroy()


def test_fifty_replays_of_a_graph():
    run_ranks(capture)


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


# -- faults


def lose_a_rank(rank, world_size):
    """The last rank is killed after three calls; the others are told which rank and at which site."""
    config = EchoConfig(algorithm=Algorithm.two_shot, timeout_s=TIMEOUT_S, **P2P)
    communicator = communicate_and_compare(config, world_size, rank)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = contribution(rank, 100_003, 3)
    begin = time.monotonic()
    y = communicator.all_reduce(x, Site(3, Direction.forward, name="layers.1.linear_proj"))
    torch.cuda.synchronize()
    seconds, message = time.monotonic() - begin, ""
    try:
        communicator.check()
    except CommunicationError as error:
        message = str(error)
    refused = False
    try:
        communicator.all_reduce(x, forward(4))
    except CommunicationError:
        refused = True
    result = {"seconds": seconds, "message": message, "is_nan": y.isnan().any().item(), "refused": refused}
    communicator.destroy()  # must not wait for the dead
    return result


def test_a_killed_rank_is_named_within_the_limit():
    dead = NUM_GPUS - 1
    for rank, result in enumerate(run_ranks(lose_a_rank, killed=[dead], timeout_s=90)):
        if rank == dead:
            continue
        assert result["seconds"] < TIMEOUT_S + 1, result
        assert "layers.1.linear_proj" in result["message"] and "site 3" in result["message"], result
        assert f"rank {dead}" in result["message"] or NUM_GPUS > 2, result
        assert result["is_nan"] and result["refused"], result


def disagree(rank, world_size):
    """Rank 1 has another number of elements; then a new communicator goes on."""
    config = EchoConfig(algorithm=Algorithm.one_shot, timeout_s=TIMEOUT_S, **P2P)
    communicator, message = communicate_and_compare(config, world_size, rank), ""
    begin = time.monotonic()
    try:
        communicator.all_reduce(contribution(rank, 50_000 + 128 * (rank == 1), 0), forward(3))
        torch.cuda.synchronize()
        communicator.check()
    except CommunicationError as error:
        message = str(error)
    assert time.monotonic() - begin < TIMEOUT_S + 1
    dist.barrier()
    communicator.destroy()
    communicate_and_compare(config, world_size, rank).destroy()
    return message


def test_ranks_that_disagree_are_told_and_can_go_on():
    messages = run_ranks(disagree)
    assert all("site 3" in message for message in messages), messages
    assert any("another call" in message for message in messages), messages


def come_late(rank, world_size):
    """A rank that is late by less than the limit, on the host and on the device."""
    config = EchoConfig(algorithm=Algorithm.one_shot, timeout_s=5.0, **P2P)
    if rank == 0:
        time.sleep(1)
    communicator = communicate_and_compare(config, world_size, rank)
    if rank == 1:
        time.sleep(1.5)
        torch.cuda._sleep(1_700_000_000)
    xs = contributions(world_size, 30_000, 7)
    y = communicator.all_reduce(xs[rank], forward(0))
    assert torch.equal(y, SimulatedGroup(world_size, config).all_reduce(xs, forward(0)))
    torch.cuda.synchronize()
    communicator.check()
    communicator.destroy()


def test_a_late_rank_is_waited_for():
    run_ranks(come_late)


def use_cpu_tensor(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig(**P2P))
    message = ""
    try:
        communicator.all_reduce(torch.ones(100), forward(0))
    except ValueError as error:
        message = str(error)
    communicator.destroy()
    return message


def test_a_tensor_on_another_device_is_refused():
    assert all("cuda" in message for message in run_ranks(use_cpu_tensor))
