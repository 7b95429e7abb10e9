"""Sequence parallelism's reduce-scatter and all-gather on real gloo groups, against the reference, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from communicator_runs import CountedBytes
from distributed import run_ranks
from feedbacks import FEEDBACKS, state_dtypes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import group_size

from echo_megatron.communicator import Communicator
from echo_megatron.config import Collective, Direction, EchoConfig, Policy, Rescale, Residual, StateDtype
from echo_megatron.reference import SimulatedGroup, num_sent_share_bytes
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

LAYOUTS = ("contiguous", "strided", "transposed")
# The first example of a property is its simplest.
common = settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

configs = st.builds(
    lambda policy, rescale, feedback: EchoConfig(
        policy=policy, group_size=group_size(policy), rescale=rescale, **feedback
    ),
    st.sampled_from(Policy), st.sampled_from(Rescale), st.sampled_from(FEEDBACKS),
).flatmap(
    lambda config: st.sampled_from(state_dtypes(config)).map(lambda dtype: config.replace(state_dtype=dtype))
)  # fmt: skip
calls = st.tuples(
    st.sampled_from(list(Collective)),
    st.integers(1, 7),  # rows of a share
    st.sampled_from(((33,), (2, 64), (1, 5), (3, 160))),
    st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    st.builds(
        Site, st.integers(0, 2), st.sampled_from(Direction), bits=st.sampled_from((4, 8)), chunk=st.integers(0, 1)
    ),
    st.sampled_from(LAYOUTS),
)


def contribution(rank, position, shape, dtype):
    generator = torch.Generator().manual_seed(100 * position + rank)
    return (torch.randn(shape, generator=generator) * 10.0 ** (position % 3 - 1)).to(dtype)


def laid_out(x, layout):
    if layout == "strided":
        return torch.stack((x, x), dim=-1)[..., 0]
    return x.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else x


def shape_of(call, world_size):
    collective, rows, rest = call[:3]
    return (rows if collective is Collective.all_gather else rows * world_size, *rest)


def scripted_calls(rank, world_size, script):
    results = []
    for config, sequence in script:
        communicator = Communicator(dist.group.WORLD, config)
        for position, call in enumerate(sequence):
            collective, rows, rest, dtype, site, layout = call
            x = laid_out(contribution(rank, position, shape_of(call, world_size), dtype), layout)
            before = x.clone()
            out = None
            if position % 2 and collective is not Collective.all_reduce:
                num_rows = rows if collective is Collective.reduce_scatter else rows * world_size
                out = torch.full((num_rows, *rest), float("nan"), dtype=dtype)
            y = getattr(communicator, collective.name)(x, site, out=out)
            assert torch.equal(x, before), "the input is left alone"
            assert y.is_contiguous() and (out is None or y is out)
            if collective is Collective.all_gather:
                assert torch.equal(y, communicator.all_gather(x, site)), "gathered again: the same bits"
            results.append(y.clone())
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@common
@given(st.lists(st.tuples(configs, st.lists(calls, min_size=6, max_size=12)), min_size=5, max_size=8))
def test_any_sequence_of_calls_equals_the_reference(world_size, script):
    """All three collectives of one communicator in any order, site, chunk, shape and layout."""
    ranks = run_ranks(scripted_calls, world_size, script)
    position = 0
    for config, sequence in script:
        simulated = SimulatedGroup(world_size, config)
        for idx, call in enumerate(sequence):
            collective, _, _, dtype, site, _ = call
            xs = [contribution(rank, idx, shape_of(call, world_size), dtype) for rank in range(world_size)]
            if collective is Collective.reduce_scatter:
                expected = simulated.reduce_scatter(xs, site)
            elif collective is Collective.all_gather:
                expected = [simulated.all_gather(xs, site.bits)] * world_size
            else:
                expected = [simulated.all_reduce(xs, site)] * world_size
            for results, y in zip(ranks, expected, strict=True):
                assert torch.equal(results[position], y), (config, call)
            position += 1
    assert position == len(ranks[0])


@settings(max_examples=40, deadline=None)
@given(
    configs.filter(lambda config: config.compensates).map(lambda config: config.replace(state_dtype=StateDtype.fp32)),
    st.integers(2, 8), st.integers(1, 5), st.integers(2, 5), st.integers(-10, 10), st.integers(0, 2**31),
)  # fmt: skip
def test_local_residuals_sum_to_minus_the_injected_error_at_every_site(config, world_size, rows, sites, scale, seed):
    """Paper Eqn. 4 along a pass: m2 is linear in u, so its recurrence gives each site's residual back."""
    group, generator = SimulatedGroup(world_size, config), torch.Generator().manual_seed(seed)
    compensator = group.compensators[Direction.forward]
    shape, before = (world_size * rows, 64), 0.0
    for idx in range(sites):
        xs = [torch.randn(shape, generator=generator) * 2.0**scale for _ in range(world_size)]
        state_shape = torch.Size((world_size, world_size, rows * 64))
        correction = compensator.correction(state_shape, xs[0].device) if idx else None
        outputs = torch.cat(group.reduce_scatter(xs, Site(idx, Direction.forward)))
        average = compensator.average
        residuals = (average - before * compensator.average_decay) / compensator.average_from_residual
        before = average.clone()
        quantizer_basis = _basis(config)
        values = torch.stack([quantizer_basis(x.view(world_size, -1)) for x in xs])
        if correction is not None:
            values = values + correction
        delta = quantizer_basis(outputs.view(world_size, -1)) - values.sum(0)
        bound = 1e-5 * values.abs().max().item() * world_size
        assert torch.allclose(residuals.sum(0), -delta, atol=bound)
        own = residuals[range(world_size), range(world_size)]
        assert own.abs().max() <= 1e-6 * bound, "what a rank does not send is not rounded"


def _basis(config):
    from echo_megatron.reference import make_quantizer

    return make_quantizer(config, config.bits).rows_to_basis


def counted(rank, world_size):
    sent = []
    config = EchoConfig()
    communicator = Communicator(dist.group.WORLD, config)
    for collective, rows in ((Collective.reduce_scatter, world_size * 5), (Collective.all_gather, 5)):
        x = torch.randn(rows, 3, 1024)
        site = Site(0, Direction.forward, bits=4 if collective is Collective.reduce_scatter else 8)
        with CountedBytes() as counter:
            getattr(communicator, collective.name)(x, site)
        expected = num_sent_share_bytes(config, site.bits, world_size, 5 * 3 * 1024)
        assert counter.sent == expected == communicator.transport.num_sent_bytes(x, site, collective)
        sent.append(expected / ((world_size - 1) * 5 * 3 * 1024))
    return sent


def refused_and_disagreeing(rank, world_size):
    """Bad calls are refused by name on one rank alone; different calls fail on both, naming the difference."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=20))
    forward, backward = Site(0, Direction.forward, "layers.0.fc2"), Site(0, Direction.backward)
    with pytest.raises(ValueError, match=r"first dimension divisible by 2 ranks, got \(3, 4\)"):
        communicator.reduce_scatter(torch.ones(3, 4), forward)
    with pytest.raises(ValueError, match=r"expected a tensor of bfloat16, float16 or float32, got torch\.uint8"):
        communicator.all_gather(torch.ones(3, 4, dtype=torch.uint8), forward)
    paper = Communicator(dist.group.WORLD, EchoConfig.preset("echo4_paper"))
    with pytest.raises(ValueError, match="residual: expected local with sequence parallelism, got consensus"):
        paper.reduce_scatter(torch.ones(4, 4), forward)
    mixed = Communicator(dist.group.WORLD, EchoConfig(backward_residual=Residual.consensus))
    with pytest.raises(ValueError, match="backward_residual: expected local"):
        mixed.reduce_scatter(torch.ones(4, 4), backward)
    assert mixed.reduce_scatter(torch.ones(4, 4), forward).shape == (2, 4)
    free = Communicator(dist.group.WORLD, EchoConfig.preset("echo4_paper", eta=0.0))
    assert free.reduce_scatter(torch.ones(4, 4), forward).shape == (2, 4), "without compensation nothing is fed back"
    assert communicator.reduce_scatter(torch.ones(0, 4), forward).shape == (0, 4)
    assert communicator.all_gather(torch.ones(0, 4), forward).shape == (0, 4)
    messages = []
    other = Communicator(dist.group.WORLD, EchoConfig(timeout_s=20))
    calls = (other.reduce_scatter, other.all_gather)
    for mine, theirs in (calls, calls[::-1]):
        with pytest.raises(CommunicationError) as caught:
            (mine if rank == 0 else theirs)(torch.ones(4, 4), forward)
        messages.append(str(caught.value))
    return counted(rank, world_size), messages


def test_bytes_refusals_and_ranks_that_make_different_calls():
    for (scatter_bytes, gather_bytes), messages in run_ranks(refused_and_disagreeing, 2):
        assert scatter_bytes == pytest.approx(4.25 / 8, rel=0.01) and gather_bytes == pytest.approx(8.25 / 8, rel=0.01)
        assert all("forward site 0 of chunk 0 (layers.0.fc2)" in text and "has collective" in text for text in messages)
