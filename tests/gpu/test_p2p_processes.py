"""Two or more GPUs, one process each: the communicator over peer memory, against the reference and against faults."""

import math
import os
import random
import signal
import time

import torch
import torch.distributed as dist
from feedbacks import AVERAGES
from p2p_processes import (
    ALGORITHMS,
    DTYPES,
    NEEDS_TWO_GPUS,
    P2P,
    TIMEOUT_S,
    communicate_and_compare,
    contribution,
    contributions,
    forward,
)
from ranks import NUM_GPUS, run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Residual, StateDtype
from echo_megatron.reference import SimulatedGroup, exact_sum
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

pytestmark = NEEDS_TWO_GPUS


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


# -- graphs


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
    results = run_ranks(lose_a_rank, killed=[dead], timeout_s=90)[:dead]
    for result in results:
        assert result["seconds"] < TIMEOUT_S + 1, result
        assert "layers.1.linear_proj" in result["message"] and "site 3" in result["message"], result
        # One that waits for a survivor that gave up is told so.
        assert f"rank {dead}" in result["message"] or "gave up" in result["message"], result
        assert result["is_nan"] and result["refused"], result
    assert any(f"waited {TIMEOUT_S:g} s (timeout_s) for rank {dead}" in result["message"] for result in results), (
        results
    )


def die_in_the_middle(rank, world_size):
    """The last rank is killed while its kernels and those of the others are in the middle of a pass of large calls."""
    config = EchoConfig(timeout_s=TIMEOUT_S, **P2P)
    communicator = communicate_and_compare(config, world_size, rank)
    x, begin, message = contribution(rank, 64 << 20, 0), time.monotonic(), ""
    try:
        for idx in range(400):
            communicator.all_reduce(x, Site(idx, Direction.forward, name=f"layers.{idx}.linear_proj"))
            if rank == world_size - 1 and idx == 200:  # the GPU is many calls behind
                os.kill(os.getpid(), signal.SIGKILL)
        torch.cuda.synchronize()
        communicator.check()
    except CommunicationError as error:
        message = str(error)
    communicator.destroy()
    return {"seconds": time.monotonic() - begin, "message": message}


def test_a_rank_killed_in_the_middle_of_a_call_is_named_within_the_limit():
    dead = NUM_GPUS - 1
    results = run_ranks(die_in_the_middle, killed=[dead], timeout_s=90)[:dead]
    for result in results:
        assert result["seconds"] < TIMEOUT_S + 5, result
        assert "forward site" in result["message"] and "linear_proj" in result["message"], result
    assert any(f"for rank {dead}" in result["message"] for result in results), results


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
