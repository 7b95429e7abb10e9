"""The collectives as mathematics: identities of the error feedback, exactness, rescaling, and every rank the same."""

import itertools
import math

import pytest
import torch
from feedbacks import AVERAGES
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import group_size

from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale, Residual, StateDtype
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import Segments, SimulatedGroup, choose_algorithm, exact_sum
from echo_megatron.sites import PassClock, Site

common = settings(max_examples=30, deadline=None)
POLICIES, ALGORITHMS = list(Policy), [Algorithm.one_shot, Algorithm.two_shot]


def make_config(policy=Policy.rotated, **options) -> EchoConfig:
    return EchoConfig(**{"policy": policy, "group_size": group_size(policy), "state_dtype": StateDtype.fp32, **options})


def contributions(world_size: int, *shape: int, seed: int = 0, scale: float = 1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator) * scale).to(dtype) for _ in range(world_size)]


def forward_site(idx: int = 0, bits: int = 4) -> Site:
    return Site(idx, Direction.forward, bits=bits)


configs = st.builds(
    make_config,
    policy=st.sampled_from(POLICIES),
    algorithm=st.sampled_from(ALGORITHMS),
    residual=st.sampled_from(list(Residual)),
    rescale=st.sampled_from((Rescale.tile, Rescale.group)),
)


@common
@given(
    configs,
    st.integers(2, 8),
    st.integers(1, 9000),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.integers(0, 2**31),
)
def test_residuals_sum_to_the_injected_error(config, world_size, num_values, dtype, seed):
    """Sum over ranks of u is -delta (paper Eqn. 4): the group recovers exactly what the call added."""
    group = SimulatedGroup(world_size, config)
    xs = contributions(world_size, num_values, seed=seed, dtype=dtype)
    output = group.all_reduce(xs, forward_site())
    compensator, quantizer = group.compensators[Direction.forward], Quantizer(4, config.policy, config.group_size)
    residual_sum = compensator.average.sum(0) / compensator.average_from_residual
    exact = torch.stack([quantizer.to_basis(x) for x in xs]).sum(0)
    if quantizer.rotates:  # the identity holds for the quantizer's delta, before the inverse and the dtype's rounding
        residual_sum = quantizer.from_basis(residual_sum, num_values)
        delta = quantizer.from_basis(quantizer.to_basis(output) - exact, num_values)
        rounding = 2.0**-8 if dtype is torch.bfloat16 else 1e-6
        tolerance = output.abs().max().item() * rounding + 1e-5
    else:
        delta, tolerance = output.float() - exact, 1e-4
    assert torch.allclose(residual_sum, -delta, atol=tolerance)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_local_residual_is_at_most_half_a_step_and_consensus_as_large_as_x(policy, algorithm):
    xs = contributions(4, 20_000)
    norms = {}
    for residual in Residual:
        group = SimulatedGroup(4, make_config(policy, algorithm=algorithm, residual=residual))
        group.all_reduce(xs, forward_site())
        compensator = group.compensators[Direction.forward]
        residuals = compensator.average / compensator.average_from_residual
        basis = Quantizer(4, policy, group_size(policy)).to_basis(xs[0])
        norms[residual] = (residuals.norm(dim=1).mean() / basis.norm()).item()
    assert norms[Residual.local] < 0.3 and 0.7 < norms[Residual.consensus] < 1.3


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("forward", Residual)
@pytest.mark.parametrize("backward", Residual)
def test_a_direction_s_residual_is_its_own(forward, backward, algorithm):
    mixed = SimulatedGroup(3, EchoConfig(algorithm=algorithm, residual=forward, backward_residual=backward))
    apart = {
        direction: SimulatedGroup(3, EchoConfig(algorithm=algorithm, residual=residual))
        for direction, residual in ((Direction.forward, forward), (Direction.backward, backward))
    }
    generator = torch.Generator().manual_seed(7)
    for idx in range(4):
        for direction in Direction:
            xs, site = list(torch.randn(3, 500, generator=generator)), Site(idx, direction)
            assert torch.equal(mixed.all_reduce(xs, site), apart[direction].all_reduce(xs, site))


@pytest.mark.parametrize("policy", POLICIES)
def test_own_segment_enters_the_sum_exactly(policy):
    """With peers that send zeros, a rank's own segment is only rounded by the gather: one quantization, not two."""
    config = make_config(policy, algorithm=Algorithm.two_shot, eta=0.0)
    quantizer = Quantizer(4, policy, config.group_size)
    xs = contributions(4, 64 * 1024)
    segments = Segments.split(xs[0].numel(), 4, config.group_size)
    for owner in range(4):
        only = [x if rank == owner else torch.zeros_like(x) for rank, x in enumerate(xs)]
        output = SimulatedGroup(4, config).all_reduce(only, forward_site())
        for rank in range(4):
            bounds = segments.bounds(rank)
            values = quantizer.to_basis(xs[owner][bounds])
            once = quantizer.dequantize(quantizer.quantize(values))
            expected = once if rank == owner else quantizer.dequantize(quantizer.quantize(once))
            assert torch.equal(output[bounds], quantizer.from_basis(expected, values.numel()))


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_element_is_quantized_at_most_twice(monkeypatch, world_size, algorithm):
    """Counted: each rank quantizes what it sends and an owner its sum; P never multiplies an element's roundings."""
    counts = []
    original = Quantizer.quantize

    def counting(self, values, exponent=None):
        counts.append(values.shape)
        return original(self, values, exponent)

    monkeypatch.setattr(Quantizer, "quantize", counting)
    SimulatedGroup(world_size, make_config(algorithm=algorithm)).all_reduce(
        contributions(world_size, 4096), forward_site()
    )
    assert len(counts) == (1 if algorithm is Algorithm.one_shot else 2)


def test_one_shot_at_two_ranks_has_the_smaller_error():
    """Relative errors 0.1005 and 0.1233 at 4 bits on normal data with the paper's quantizer (spec 2)."""
    xs = contributions(2, 1 << 18)
    exact = xs[0] + xs[1]
    errors = {}
    for algorithm in ALGORITHMS:
        y = SimulatedGroup(2, make_config(Policy.zero_aware, algorithm=algorithm)).all_reduce(xs, forward_site())
        errors[algorithm] = ((y - exact).norm() / exact.norm()).item()
    assert errors[Algorithm.one_shot] == pytest.approx(0.1005, abs=0.001)
    assert errors[Algorithm.two_shot] == pytest.approx(0.1233, abs=0.001)


@common
@given(
    st.sampled_from(POLICIES), st.sampled_from(ALGORITHMS), st.sampled_from(list(Residual)), st.integers(2, 8),
    st.integers(1, 9000), st.integers(-30, 30), st.integers(0, 2**31),
)  # fmt: skip
def test_tile_and_group_rescaling_agree_bit_for_bit(
    policy, algorithm, residual, world_size, num_values, exponent, seed
):
    options = {"algorithm": algorithm, "residual": residual}
    groups = [
        SimulatedGroup(world_size, make_config(policy, rescale=r, **options)) for r in (Rescale.tile, Rescale.group)
    ]
    for k in range(3):
        xs = contributions(world_size, num_values, seed=seed + k, scale=2.0**exponent)
        ours, paper = (group.all_reduce(xs, forward_site(k)) for group in groups)
        assert torch.equal(ours, paper)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rescale", [Rescale.tile, Rescale.group])
@pytest.mark.parametrize("amplitude", [1e-7, 1e-12, 1e-20, 1e-30, 1e-37, 1e-38])
def test_tiny_gradients_survive(policy, rescale, amplitude):
    config = make_config(policy, rescale=rescale, algorithm=Algorithm.two_shot, eta=0.0)
    xs = contributions(4, 8192, scale=amplitude)
    exact = torch.stack(xs).double().sum(0)
    error = SimulatedGroup(4, config).all_reduce(xs, Site(0, Direction.backward)).double() - exact
    assert error.norm() / exact.norm() < 0.2


@pytest.mark.parametrize(("policy", "bits"), list(itertools.product(POLICIES, (4, 8))))
@pytest.mark.parametrize("rescale", [Rescale.tile, Rescale.group])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_quiet_site_behind_massive_activations_is_finite(policy, bits, rescale, algorithm):
    """What is fed back of one huge value, with the consensus residual most of it, meets small contributions."""
    config = make_config(policy, bits=bits, rescale=rescale, algorithm=algorithm, residual=Residual.consensus)
    group = SimulatedGroup(4, config)
    for k, (largest, scale) in enumerate([(2e4, 1.0), (0.0, 1.0), (0.0, 0.1), (2e4, 0.1), (0.0, 0.1)]):
        xs = contributions(4, 5000, seed=k, scale=scale)
        xs[k % 4][1234] += largest
        output = group.all_reduce(xs, forward_site(k, bits))
        assert output.isfinite().all(), k


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rescale", list(Rescale))
def test_zero_gradients_return_zeros(policy, rescale):
    """amax 0: Megatron's CUDA graph warm-up backpropagates zeros."""
    group = SimulatedGroup(3, make_config(policy, rescale=rescale))
    for k in range(3):
        assert group.all_reduce([torch.zeros(1000)] * 3, Site(k, Direction.backward)).eq(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("policy", "algorithm", "rescale"), list(itertools.product(POLICIES, ALGORITHMS, [Rescale.tile, Rescale.group]))
)
def test_non_finite_input_of_one_rank_is_nan_in_its_group_and_nowhere_else(bad, policy, algorithm, rescale):
    config = make_config(policy, algorithm=algorithm, rescale=rescale)
    xs = contributions(3, 3000)
    xs[1][1234] = bad
    output = SimulatedGroup(3, config).all_reduce(xs, forward_site())
    start = 1234 // config.group_size * config.group_size
    assert output[start : start + config.group_size].isnan().all()
    output[start : start + config.group_size] = 0
    assert output.isfinite().all()


def test_a_poisoned_pass_does_not_leak_into_the_next():
    group = SimulatedGroup(2, make_config())
    clean = [group.all_reduce(contributions(2, 500, seed=k), forward_site(k)) for k in range(3)]
    poisoned = contributions(2, 500)
    poisoned[0][:] = math.nan
    group.all_reduce(poisoned, forward_site(0))
    again = [group.all_reduce(contributions(2, 500, seed=k), forward_site(k)) for k in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))


def test_directions_and_shapes_share_no_state():
    def run(group, with_backward, with_other_shape):
        outputs = []
        for k in range(4):
            outputs.append(group.all_reduce(contributions(2, 700, seed=k), forward_site(k)))
            if with_backward:
                group.all_reduce(contributions(2, 700, seed=9), Site(k, Direction.backward))
        if with_other_shape:
            group.all_reduce(contributions(2, 200), forward_site(0))
            group.all_reduce(contributions(2, 200), forward_site(1))
        return outputs + [group.all_reduce(contributions(2, 700, seed=k), forward_site(k)) for k in range(4)]

    plain = run(SimulatedGroup(2, make_config()), False, False)
    for variant in ((True, False), (False, True), (True, True)):
        assert all(
            torch.equal(a, b) for a, b in zip(plain, run(SimulatedGroup(2, make_config()), *variant), strict=True)
        )


def test_compensation_shrinks_the_accumulated_error_as_the_theory_says():
    """Over 56 sites its variance is near q^2 with the default feedback, 5.0 q^2 with the paper's and 56 q^2 without."""
    sums = []
    for feedback in ({"eta": 0.0}, AVERAGES, {}):
        group = SimulatedGroup(2, make_config(Policy.zero_aware, algorithm=Algorithm.two_shot, **feedback))
        total = torch.zeros(4096)
        for k in range(56):
            xs = contributions(2, 4096, seed=k)
            total += group.all_reduce(xs, forward_site(k)) - (xs[0] + xs[1])
        sums.append(total.pow(2).mean().item())
    none, averages, default = sums
    assert 5.0 / 56 * 0.8 < averages / none < 5.0 / 56 * 1.35
    assert 1.0 / 56 * 0.8 < default / none < 1.0 / 56 * 1.35


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(POLICIES), st.sampled_from(ALGORITHMS), st.sampled_from(list(Rescale)), st.booleans(),
    st.sampled_from((StateDtype.fp32, StateDtype.compact)), st.integers(2, 8), st.integers(1, 20),
    st.integers(1, 400), st.integers(-12, 10), st.integers(0, 2**31),
)  # fmt: skip
def test_with_full_feedback_the_accumulated_error_is_the_last_site_s_alone(
    policy, algorithm, rescale, scatters, state_dtype, world_size, num_sites, num_rows, exponent, seed
):
    """After any number of sites the sum lacks just what is fed back next; a compact state adds its own half steps.

    All-reduces, or reduce-scatters of all ranks; contributions drift, so that errors of neighbouring sites are alike.
    """
    config = make_config(policy, algorithm=algorithm, rescale=rescale, state_dtype=state_dtype)
    group, generator = SimulatedGroup(world_size, config), torch.Generator().manual_seed(seed)
    compensator, quantizer = group.compensators[Direction.forward], Quantizer(4, policy, config.group_size)
    size = num_rows * (world_size if scatters else 1)
    num_basis_values = quantizer.num_basis_values(num_rows)
    shape = torch.Size((world_size, world_size, num_basis_values) if scatters else (world_size, num_basis_values))
    base = torch.randn(world_size, size, generator=generator)
    accumulated, tolerance, half_step = torch.zeros(size, dtype=torch.float64), 0.0, 0.502 / 127
    for k in range(num_sites):
        base = 0.9 * base + 0.5 * torch.randn(world_size, size, generator=generator)
        xs = list(base * 2.0**exponent)
        y = torch.cat(group.reduce_scatter(xs, forward_site(k))) if scatters else group.all_reduce(xs, forward_site(k))
        accumulated += y.double() - torch.stack(xs).double().sum(0)
        correction = compensator.correction(shape, y.device)
        returned = quantizer.from_basis(correction.sum(0), num_rows).flatten()
        tolerance += 2.0**-20 * world_size * torch.stack(xs).norm().item()
        if state_dtype is StateDtype.compact:
            tolerance += half_step * correction.abs().max().item() * correction.numel() ** 0.5 * world_size**0.5
        assert (accumulated + returned).norm() <= tolerance


@common
@given(
    st.sampled_from(POLICIES), st.integers(2, 8), st.integers(1, 5), st.sampled_from((1, 31, 128, 1000)),
    st.sampled_from((torch.float32, torch.bfloat16)), st.integers(0, 2**31),
)  # fmt: skip
def test_reduce_scatter_is_the_push_half(policy, world_size, rows, width, dtype, seed):
    """Own share exact, one quantization an element; local residuals sum to -delta over the ranks."""
    group = SimulatedGroup(world_size, make_config(policy))
    xs = contributions(world_size, world_size * rows, width, seed=seed, dtype=dtype)
    outputs = group.reduce_scatter(xs, forward_site())
    assert [tuple(y.shape) for y in outputs] == [(rows, width)] * world_size and outputs[0].dtype is dtype
    average = group.compensators[Direction.forward].average
    quantizer = Quantizer(4, policy, group_size(policy))
    residual_sum = average.sum(0) / group.compensators[Direction.forward].average_from_residual
    for rank, output in enumerate(outputs):
        exact = torch.stack([x[rank * rows : (rank + 1) * rows].float() for x in xs]).sum(0)
        delta = output.float() - exact
        share = quantizer.from_basis(residual_sum[rank], rows * width).view(rows, width)
        tolerance = 1e-4 + (output.float().abs().max().item() * 2**-8 if dtype is torch.bfloat16 else 0)
        assert torch.allclose(share, -delta, atol=tolerance)
        assert average[rank, rank].eq(0).all()


@common
@given(
    st.integers(1, 8), st.integers(1, 3000), st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.integers(0, 2**31),
)  # fmt: skip
def test_exact_sum_is_rounded_once(world_size, num_values, dtype, seed):
    """In fp32 from rank 0 upwards, then to the dtype: adding in the dtype itself would round at every rank."""
    xs = contributions(world_size, num_values, seed=seed, dtype=dtype)
    total = xs[0].float()
    for x in xs[1:]:
        total = total + x.float()
    output = SimulatedGroup(world_size, make_config()).exact_all_reduce(xs)
    assert output.dtype is dtype and torch.equal(output, total.to(dtype))
    assert torch.equal(output, exact_sum(torch.stack(xs)))
    in_double = torch.stack(xs).double().sum(0)
    bound = torch.finfo(dtype).eps / 2 * in_double.abs() + 1e-6 * torch.stack(xs).double().abs().sum(0) + 1e-7
    assert ((output.double() - in_double).abs() <= bound).all()


def test_exact_sum_keeps_infinities_and_overflows_only_at_the_end():
    xs = [torch.tensor([value, 1.0], dtype=torch.float16) for value in (60_000.0, 60_000.0, -60_000.0)]
    assert exact_sum(torch.stack(xs)).tolist() == [60_000.0, 3.0]
    assert exact_sum(torch.tensor([[math.inf, math.inf], [-math.inf, 1.0]])).isnan().tolist() == [True, False]


def test_reduce_scatter_refuses_a_ragged_first_dimension():
    with pytest.raises(ValueError, match=r"divisible by 4 ranks, got \(6, 3\)"):
        SimulatedGroup(4, make_config()).reduce_scatter(contributions(4, 6, 3), forward_site())


@pytest.mark.parametrize("policy", POLICIES)
def test_all_gather_returns_what_every_rank_decodes(policy):
    group = SimulatedGroup(3, make_config(policy))
    shards = contributions(3, 5, 77)
    gathered = group.all_gather(shards, bits=8)
    assert gathered.shape == (15, 77)
    exact = torch.cat(shards)
    assert 0 < (gathered - exact).norm() / exact.norm() < 0.01
    assert torch.equal(gathered, group.all_gather(shards, bits=8))


def test_one_rank_is_the_identity_and_bad_calls_are_refused():
    x = torch.randn(100)
    assert torch.equal(SimulatedGroup(1, make_config()).all_reduce([x], forward_site()), x)
    assert SimulatedGroup(2, make_config()).all_reduce([torch.empty(0, 4)] * 2, forward_site()).shape == (0, 4)
    with pytest.raises(ValueError, match="expected 1 to 8 ranks, got 9"):
        SimulatedGroup(9, make_config())
    with pytest.raises(ValueError, match="bits: expected 4 or 8"):
        SimulatedGroup(2, EchoConfig.preset("nccl"))
    with pytest.raises(ValueError, match="expected 2 tensors of one shape"):
        SimulatedGroup(2, make_config()).all_reduce([torch.ones(2), torch.ones(3)], forward_site())
    with pytest.raises(ValueError, match=r"bfloat16, float16 or float32, got torch\.int64"):
        SimulatedGroup(2, make_config()).all_reduce([torch.ones(2, dtype=torch.int64)] * 2, forward_site())


def test_auto_is_one_shot_at_two_ranks_only():
    config = EchoConfig.preset("echo4")
    assert [choose_algorithm(config, p) for p in (2, 3, 4, 8)] == [Algorithm.one_shot] + [Algorithm.two_shot] * 3


@common
@given(st.integers(1, 10_000), st.integers(1, 8), st.sampled_from((32, 128)))
def test_segments_cover_the_stream_on_group_boundaries(num_values, world_size, group):
    segments = Segments.split(num_values, world_size, group)
    bounds = [segments.bounds(rank) for rank in range(world_size)]
    assert bounds[0].start == 0 and bounds[-1].stop == num_values
    assert all(a.stop == b.start for a, b in itertools.pairwise(bounds))
    assert all(b.start % group == 0 or b.start == num_values for b in bounds)
    assert sum(segments.size(rank) for rank in range(world_size)) == num_values
    assert segments.size(0) == max(segments.size(rank) for rank in range(world_size))


@common
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5), st.booleans()), min_size=1, max_size=8))
def test_pass_clock_resets_at_every_pass_whatever_was_aborted(passes):
    """(chunk, sites reached, aborted): whatever came before, the first site of a pass is its beginning."""
    clock = PassClock()
    for chunk, reached, aborted in passes:
        ticks = [clock.tick(Site(idx, Direction.forward, chunk=chunk)) for idx in range(reached if aborted else 6)]
        assert ticks[0] and not any(ticks[1:])


def test_pass_clock_without_site_zero():
    clock = PassClock()
    assert clock.tick(Site(3, Direction.backward)) and not clock.tick(Site(5, Direction.backward))
    assert clock.tick(Site(3, Direction.backward)) and clock.tick(Site(3, Direction.backward))
    assert clock.tick(Site(4, Direction.backward, chunk=1)) and not clock.tick(Site(5, Direction.backward, chunk=1))
    clock.invalidate()
    assert clock.tick(Site(6, Direction.backward, chunk=1))
