"""The communicator on real gloo groups: against the reference, bit for bit, and against what broke other systems."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from communicator_runs import NUM_SITES, CountedBytes, contribution
from distributed import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import group_size

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale, Residual
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site


def all_cases(sizes):
    """(config, bits, sizes, directions): every combination at one odd size, the presets at every size and direction."""
    combinations = itertools.product(Policy, (Algorithm.one_shot, Algorithm.two_shot), Residual, Rescale)
    for policy, algorithm, residual, rescale in combinations:
        config = EchoConfig(
            policy=policy, group_size=group_size(policy), algorithm=algorithm, residual=residual, rescale=rescale
        )
        yield config, 4, sizes[-1:], [Direction.forward]
    for preset in ("echo4", "echo8", "echo4_paper", "echo8_paper"):
        config = EchoConfig.preset(preset)
        yield config, config.bits, sizes, list(Direction)
    mixed = EchoConfig(residual=Residual.consensus, backward_residual=Residual.local)
    yield mixed, 4, sizes[-1:], list(Direction)


def run_cases(rank, world_size, cases):
    results = []
    for config, bits, sizes, directions in cases:
        communicator = Communicator(dist.group.WORLD, config)
        for num_values, dtype in sizes:
            for direction in directions:
                for idx in range(NUM_SITES):
                    x = contribution(rank, num_values, idx, dtype)
                    before = x.clone()
                    results.append(communicator.all_reduce(x, Site(idx, direction, bits=bits)))
                    assert torch.equal(x, before), "the input must be left alone"
    return results


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, [(1, torch.float32), (500, torch.bfloat16)]),
        (2, [(1, torch.bfloat16), (1000, torch.float32), (20_011, torch.float16), (1_001, torch.bfloat16)]),
        (3, [(2, torch.float32), (129, torch.bfloat16), (12_289, torch.bfloat16), (385, torch.float32)]),
        (4, [(3, torch.float32), (127, torch.float16), (16_384, torch.bfloat16), (509, torch.bfloat16)]),
        (5, [(4, torch.bfloat16), (641, torch.float32)]),
        (6, [(7, torch.bfloat16), (769, torch.float32)]),
        (7, [(6, torch.float32), (4_097, torch.bfloat16)]),
        (8, [(7, torch.float32), (1_025, torch.bfloat16)]),
    ],
)
def test_ranks_hold_the_reference_s_bits(world_size, sizes):
    """Every policy, algorithm, residual and rescaling; sizes of P-1, 128 P + 1 and others that don't divide."""
    cases = list(all_cases(sizes))
    if world_size > 4:
        cases = cases[:-4:4] + cases[-4:]
    ranks = run_ranks(run_cases, world_size, cases, timeout_s=120)
    position = 0
    for config, bits, case_sizes, directions in cases:
        simulated = SimulatedGroup(world_size, config)
        for num_values, dtype in case_sizes:
            for direction in directions:
                for idx in range(NUM_SITES):
                    xs = [contribution(rank, num_values, idx, dtype) for rank in range(world_size)]
                    expected = simulated.all_reduce(xs, Site(idx, direction, bits=bits))
                    assert expected.dtype is dtype
                    for results in ranks:
                        assert torch.equal(results[position], expected), (
                            config,
                            bits,
                            num_values,
                            dtype,
                            direction,
                            idx,
                        )
                    position += 1
    assert position == len(ranks[0])


def run_fuzz(rank, world_size, script):
    communicator = Communicator(dist.group.WORLD, script[0])
    return [
        communicator.all_reduce(contribution(rank, n, i, dtype), Site(i, direction))
        for n, i, dtype, direction in script[1]
    ]


calls = st.tuples(
    st.integers(1, 5000),
    st.integers(0, NUM_SITES - 1),
    st.sampled_from((torch.bfloat16, torch.float32)),
    st.sampled_from(list(Direction)),
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(2, 4),
    st.sampled_from(list(Policy)),
    st.sampled_from(list(Residual)),
    st.sampled_from((None, *Residual)),
    st.lists(calls, min_size=1, max_size=12),
)
def test_any_sequence_of_calls_equals_the_reference(world_size, policy, residual, backward_residual, sequence):
    """Shapes, dtypes, sites and directions in any order: state resets are the same everywhere."""
    residuals = {"residual": residual, "backward_residual": backward_residual}
    config = EchoConfig(policy=policy, group_size=group_size(policy), **residuals)
    ranks = run_ranks(run_fuzz, world_size, (config, sequence))
    simulated = SimulatedGroup(world_size, config)
    for position, (n, i, dtype, direction) in enumerate(sequence):
        xs = [contribution(rank, n, i, dtype) for rank in range(world_size)]
        expected = simulated.all_reduce(xs, Site(i, direction))
        assert all(torch.equal(results[position], expected) for results in ranks)


def count_bytes(rank, world_size, config, num_values):
    communicator = Communicator(dist.group.WORLD, config)
    with CountedBytes() as counted:
        communicator.all_reduce(torch.randn(num_values), Site(0, Direction.forward, bits=config.bits))
    return counted.sent


@pytest.mark.parametrize("preset", ["echo4", "echo4_paper", "echo8"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_packed_bytes_are_what_travels(preset, world_size):
    """At 4 bits 68 B for 128 values each way, plus tile headers under 1 %."""
    num_values = 1 << 20
    config = EchoConfig.preset(preset)
    bytes_of_128 = 68 if config.bits == 4 else 132
    # One-shot at P=2: everything to the one peer. Two-shot: (P-1)/P of the tensor in push and again in gather.
    expected = num_values / 128 * bytes_of_128 * (1 if world_size == 2 else 2 * (world_size - 1) / world_size)
    for sent in run_ranks(count_bytes, world_size, config, num_values):
        assert expected <= sent < 1.01 * expected


def strided_calls(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(rank))
    offset = torch.randn(6 * 1024 + 1, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)[1:]
    views = [x.t(), x[:, ::2], x[3:5].expand(7, 2, 96), x[:, 1:33], offset, x.t()[5]]
    return [
        (
            communicator.all_reduce(view, Site(0, Direction.forward)),
            communicator.all_reduce(view.contiguous(), Site(0, Direction.forward)),
        )
        for view in views
    ]


def test_strided_and_misaligned_inputs_equal_their_contiguous_copies():
    """A non-contiguous input came back unreduced from other systems: t(), [:, ::2], expand(), a 2-byte offset."""
    for pairs in run_ranks(strided_calls, 2):
        for strided, contiguous in pairs:
            assert torch.equal(strided, contiguous) and strided.is_contiguous()


def overwriting_calls(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    outputs = []
    for step in range(30):
        x = torch.full((3008,), float(rank + step))
        if rank == step % world_size:
            time.sleep(0.003)
        outputs.append(communicator.all_reduce(x, Site(0, Direction.forward)))  # 3,008 values: whole blocks of 32
        x.fill_(float("nan"))
    return outputs


def test_overwriting_the_input_after_the_call_harms_nobody():
    for outputs in run_ranks(overwriting_calls, 3):
        for step, output in enumerate(outputs):
            exact = 3.0 * step + 3
            assert (output - exact).abs().max() <= 0.15 * max(exact, 1.0)


def many_sizes(rank, world_size):
    communicator, simulated = Communicator(dist.group.WORLD, EchoConfig()), SimulatedGroup(world_size, EchoConfig())
    sizes = torch.randint(1, 20_000, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    for step, num_values in enumerate(sizes):
        if step % 13 == rank:
            time.sleep(0.002)
        site = Site(step % 2, Direction.forward)
        y = communicator.all_reduce(contribution(rank, num_values, 0, torch.float32), site)
        xs = [contribution(peer, num_values, 0, torch.float32) for peer in range(world_size)]
        assert torch.equal(y, simulated.all_reduce(xs, site))
    return True


def test_changing_sizes_back_to_back_with_a_slow_rank():
    assert all(run_ranks(many_sizes, 4, timeout_s=120))


def inference_then_training(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    xs = [contribution(rank, 1000, idx, torch.float32) for idx in range(3)]
    with torch.inference_mode():
        evaluated = [communicator.all_reduce(x, Site(idx, Direction.forward)) for idx, x in enumerate(xs)]
        evaluated = [y.clone() for y in evaluated]
    trained = [communicator.all_reduce(x, Site(idx, Direction.forward)) for idx, x in enumerate(xs)]
    return all(torch.equal(a, b) for a, b in zip(evaluated, trained, strict=True))


def test_a_pass_in_inference_mode_before_training():
    assert run_ranks(inference_then_training, 2) == [True] * 2


def large_odd_size(rank, world_size):
    xs = [contribution(peer, 10_000_019, 1, torch.bfloat16) for peer in range(world_size)]
    communicator, simulated = Communicator(dist.group.WORLD, EchoConfig()), SimulatedGroup(world_size, EchoConfig())
    site = Site(0, Direction.forward)
    return torch.equal(communicator.all_reduce(xs[rank], site), simulated.all_reduce(xs, site))


def test_ten_million_and_nineteen_elements():
    assert run_ranks(large_odd_size, 2, timeout_s=120) == [True] * 2


def wrong_dtype(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    with pytest.raises(ValueError, match=r"expected a tensor of bfloat16, float16 or float32, got torch\.float64"):
        communicator.all_reduce(torch.ones(4, dtype=torch.float64), Site(0, Direction.forward))
    empty = communicator.all_reduce(torch.ones(0, 4), Site(0, Direction.forward))
    return empty.shape


def test_wrong_dtype_is_refused_and_empty_tensors_pass():
    assert run_ranks(wrong_dtype, 2) == [(0, 4)] * 2


def quantizations(rank, world_size, algorithm):
    counts = torch.zeros(30_000)
    original = Quantizer.quantize
    values_seen = []

    def counting(self, values, exponent=None):
        values_seen.append(values.numel())
        return original(self, values, exponent)

    Quantizer.quantize = counting
    Communicator(dist.group.WORLD, EchoConfig(algorithm=algorithm)).all_reduce(counts, Site(0, Direction.forward))
    return sum(values_seen)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_quantizes_what_it_sends_and_its_sum_only(world_size):
    """Two-shot: (P-1)/P of the tensor pushed and 1/P gathered; summed over ranks, an element is quantized P times, P-1
    contributions once each and their sum once: at most two roundings on any path."""
    for total in run_ranks(quantizations, world_size, Algorithm.two_shot):
        assert total <= 30_000 + 32 * world_size
    assert run_ranks(quantizations, world_size, Algorithm.one_shot) == [30_016 - 30_016 % 32] * world_size
