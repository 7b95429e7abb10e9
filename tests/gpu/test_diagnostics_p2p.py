"""Two or more GPUs: the inspector beside the kernels, whose state it reads, on the streams of asynchronous calls."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from feedbacks import AVERAGES
from ranks import NUM_GPUS, run_ranks
from test_diagnostics import measured_pass

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual, StateDtype, TransportName
from echo_megatron.diagnostics import QUANTITIES, Inspector
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import num_sent_bytes
from echo_megatron.sites import Site

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(400),
]
HIDDEN, ROWS, NUM_SITES, NUM_MICROBATCHES = 256, 301, 6, 3
BASE = EchoConfig(transport=TransportName.p2p, min_bytes=0, algorithm=Algorithm.two_shot)
CONFIGS = {
    "two_shot": BASE,
    "one_shot, fp32": BASE.replace(algorithm=Algorithm.one_shot, state_dtype=StateDtype.fp32),
    "averages": BASE.replace(**AVERAGES),
    "consensus": BASE.replace(residual=Residual.consensus, state_dtype=StateDtype.fp32),
    "paper": EchoConfig.preset("echo4_paper", transport=TransportName.p2p, min_bytes=0),
    "uncompensated": BASE.replace(eta=0.0),
}


def contribution(rank, site, microbatch):
    seed = 1000 * rank + 100 * microbatch + 10 * site.idx + site.numbers[1]
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def step(groups, rank, inspector, number):
    """Forward passes on the current stream, backward passes asynchronous, as Megatron's linears call them."""
    inputs = [
        [contribution(rank, group.site, microbatch) for group in groups] for microbatch in range(NUM_MICROBATCHES)
    ]
    torch.cuda.synchronize()
    is_measured = inspector.begin_step(number)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for xs in inputs:
            for group, x in zip(groups, xs, strict=True):
                is_async = group.site.direction is Direction.backward
                work = dist.all_reduce(x, group=group, async_op=is_async)
                if is_async:
                    torch.mm(x.new_ones(2048, 2048), x.new_ones(2048, 2048))  # the weight gradient's place
                    work.wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return inputs, inspector.end_step(), is_measured


def measured_steps(rank, world_size, config):
    communicator = Communicator(dist.group.WORLD, config)
    assert communicator.transport.name == "p2p"
    sites = [Site(idx, direction, f"layers.{idx}") for direction in Direction for idx in range(NUM_SITES)]
    groups = [EchoProcessGroup(communicator, site, HIDDEN, lambda: True) for site in sites]
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 2)
    dist.all_reduce(torch.zeros(8, device="cuda"))  # NCCL's communicator is made
    step(groups, rank, inspector, 1)
    sent = communicator.transport.take_sent_bytes()
    outputs, metrics = [], []
    for number in (2, 3):
        sums, measured, is_measured = step(groups, rank, inspector, number)
        assert is_measured == (number == 2)
        assert communicator.transport.take_sent_bytes() == sent, "as in a step that is not measured"
        outputs.append(sums)
        metrics.append(measured)
    communicator.check()
    same = all(torch.equal(a, b) for x, y in zip(*outputs, strict=True) for a, b in zip(x, y, strict=True))
    expected = expected_numbers(config, world_size, sites) if rank == 0 else None
    communicator.destroy()
    return metrics, same, expected


def expected_numbers(config, world_size, sites):
    """Relative and injected error (mean), accumulated error and bound (largest) of the reference's passes."""
    numbers = {}
    for direction in Direction:
        own = [site for site in sites if site.direction is direction]
        passes = [
            [[contribution(rank, site, microbatch).flatten() for rank in range(world_size)] for site in own]
            for microbatch in range(NUM_MICROBATCHES)
        ]
        rows = torch.tensor([[row for _, _, row in measured_pass(config, world_size, xs)[1]] for xs in passes])
        for idx, site in enumerate(own):
            means, largest = rows[:, idx].mean(0), rows[:, idx].amax(0)
            values = (*means[:2].tolist(), *largest[2:].tolist())
            names = ("relative_error", "injected_error", "accumulated_error", "accumulated_bound")
            numbers |= {f"echo/{direction.name}/{site.name}/{name}": v for name, v in zip(names, values, strict=True)}
    return numbers


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_numbers_are_the_reference_s_and_outputs_and_bytes_those_without_it(config):
    """No host synchronization between `begin_step` and `end_step`: `set_sync_debug_mode` raises at one."""
    ranks = run_ranks(measured_steps, config)
    expected = ranks[0][2]
    for (measured, unmeasured), same, _ in ranks:
        assert same and unmeasured == {} and measured == ranks[0][0][0]
        assert len(measured) == 2 * NUM_SITES * len(QUANTITIES)
        for tag, value in expected.items():
            assert measured[tag] == pytest.approx(value, rel=1e-3), tag
        world_size = len(ranks)
        sent = [
            num_sent_bytes(config, config.bits, config.algorithm, world_size, rank, ROWS * HIDDEN)
            for rank in range(world_size)
        ]
        for tag, value in measured.items():
            if tag.endswith("/bytes"):
                assert value == pytest.approx(sum(sent) / world_size)
            if tag.endswith("/bound_used"):
                assert 0 < value < 1.01


def exact_step(rank, world_size):
    communicator = Communicator(dist.group.WORLD, BASE.replace(min_bytes=2**40))
    group = EchoProcessGroup(communicator, Site(0, Direction.forward, "layers.0"), HIDDEN, lambda: True)
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 1)
    inspector.begin_step(1)
    for rows in (1, 4096):  # summed by the kernel, and by NCCL
        dist.all_reduce(torch.ones(rows, HIDDEN, device="cuda", dtype=torch.bfloat16), group=group)
    metrics = inspector.end_step()
    communicator.destroy()
    return metrics


def test_a_step_of_exact_calls_only():
    for metrics in run_ranks(exact_step):
        assert set(metrics) == {"echo/forward/layers.0/bytes", "echo/forward/layers.0/exact_calls"}
        assert metrics["echo/forward/layers.0/exact_calls"] == 2 and metrics["echo/forward/layers.0/bytes"] > 0
