"""What the inspector measures: the paper's identity and bound, and the same bits with and without it."""

import math
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from feedbacks import AVERAGES
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import group_size

from echo_megatron import EchoConfig
from echo_megatron.communicator import Communicator
from echo_megatron.compensator import remaining, source_bound
from echo_megatron.config import (
    LOCAL_FEEDBACK,
    PAPER_FEEDBACK,
    Algorithm,
    Direction,
    Policy,
    Rescale,
    Residual,
    StateDtype,
)
from echo_megatron.diagnostics import QUANTITIES, Inspector
from echo_megatron.diagnostics_errors import PassErrors, grid_use, norm
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup, make_quantizer, num_sent_bytes, num_sent_share_bytes
from echo_megatron.sites import Site
from echo_megatron.transports.tiled_state import read_correction

ECHO4 = EchoConfig.preset("echo4", min_bytes=0)
HIDDEN = 64

# -- the mathematics, on simulated ranks


def measured_pass(config, world_size, contributions):
    """`PassErrors` over one pass of a simulated group: (net error, injected error, numbers) of every site."""
    feedback = config.feedback_of(Direction.forward)
    group, errors, sites = SimulatedGroup(world_size, config), PassErrors(feedback), []
    compensator = group.compensators[Direction.forward]
    quantizer = make_quantizer(config, config.bits)
    for idx, xs in enumerate(contributions):
        num_values = xs[0].numel()
        shape = torch.Size((world_size, quantizer.num_basis_values(num_values)))
        corrections = compensator.correction(shape, xs[0].device)
        y = group.all_reduce(xs, Site(idx, Direction.forward, bits=config.bits)).float()
        exact = torch.stack(xs).float().sum(0)
        added = None if corrections is None else quantizer.from_basis(corrections.sum(0), num_values)
        is_lost = quantizer.rotates and config.compensates and xs[0].dtype is torch.bfloat16
        numbers = errors.add(exact, added, y, 2.0**-8 if is_lost else 0.0)
        sites.append((y - exact, y - exact - (0 if added is None else added), numbers.tolist()))
    return errors, sites


configs = st.builds(
    lambda bits, policy, algorithm, residual, rescale, eta, a, beta1, beta2: EchoConfig(
        bits=bits, policy=policy, group_size=group_size(policy), algorithm=algorithm, residual=residual,
        rescale=rescale, eta=eta, a=a, beta1=beta1, beta2=beta2, state_dtype=StateDtype.fp32,
    ),
    st.sampled_from((4, 8)), st.sampled_from(Policy), st.sampled_from((Algorithm.one_shot, Algorithm.two_shot)),
    st.sampled_from(Residual), st.sampled_from((Rescale.tile, Rescale.group)),
    st.sampled_from((None, 0.0, 0.75, 1.0)) | st.floats(0, 1), st.floats(0, 1),
    st.sampled_from((None, 0.0)) | st.floats(0, 0.95), st.sampled_from((None, 0.0)) | st.floats(0, 0.95),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(configs, st.integers(2, 8), st.integers(2, 24), st.integers(1, 300), st.floats(-20, 10), st.integers(0, 2**31))
def test_accumulated_error_is_the_paper_s_sum_and_within_its_bound(config, world_size, num_sites, size, scale, seed):
    """Eqn. 13 of the measured S_t and delta_s, and Eqn. 21 of their norms, with FP32 state and output.

    Contributions drift: errors of neighbouring sites are alike.
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(world_size, size, generator=generator)
    contributions = []
    for _ in range(num_sites):
        base = 0.9 * base + 0.5 * torch.randn(world_size, size, generator=generator)
        contributions.append(list(base * 2.0**scale))
    errors, sites = measured_pass(config, world_size, contributions)
    feedback = config.feedback_of(Direction.forward)
    deltas = [injected.double() for _, injected, _ in sites]
    # FP32 sums of P values of this size, at every site so far
    rounding = 2.0**-21 * num_sites * world_size * max(norm(torch.stack(xs)).item() for xs in contributions)
    accumulated, largest = torch.zeros(size, dtype=torch.float64), 0.0
    for t, (net, injected, (_, _, accumulated_norm, bound)) in enumerate(sites):
        accumulated += net.double()
        expected = sum(remaining(feedback, t - s) * deltas[s] for s in range(t + 1))
        assert norm(accumulated - expected) <= rounding
        assert accumulated_norm == pytest.approx(norm(accumulated).item(), abs=rounding)
        largest = max(largest, norm(injected).item())
        assert bound == pytest.approx(source_bound(feedback, t + 1, largest), rel=1e-9)
        assert accumulated_norm <= bound + rounding
    assert norm(errors.accumulated.double() - accumulated) <= rounding


@pytest.mark.parametrize(
    "feedback", [LOCAL_FEEDBACK, replace(PAPER_FEEDBACK, eta=1.0)], ids=["last residual", "averages"]
)
def test_the_bound_is_reached_by_errors_of_one_sign_and_broken_feedback_exceeds_it(feedback):
    """The bound measures the feedback: errors that return at full size leave it, as they would by the same test."""
    for works in (True, False):
        errors, used = PassErrors(feedback), []
        deltas = torch.zeros(60, 4, dtype=torch.float32)
        deltas[:, 0] = 1.0
        for t in range(60):
            weights = [remaining(feedback, m) - remaining(feedback, m + 1) for m in range(t)]
            correction = -sum((w * d for w, d in zip(weights, deltas[:t].flip(0), strict=True)), torch.zeros(4))
            exact = torch.full((4,), 3.0)
            added = correction if works else torch.zeros(4)
            _, _, accumulated, bound = errors.add(exact, added, exact + added + deltas[t]).tolist()
            used.append(accumulated / bound)
        assert (max(used) == pytest.approx(1, abs=1e-4)) if works else (used[-1] > 25)


def test_without_compensation_the_bound_grows_with_the_sites():
    config = EchoConfig(eta=0.0)
    xs = [[torch.randn(64, generator=torch.Generator().manual_seed(7)) for _ in range(2)]] * 5  # the same error again
    _, sites = measured_pass(config, 2, xs)
    norms = [numbers[2] for _, _, numbers in sites]
    assert norms == pytest.approx([norms[0] * (t + 1) for t in range(5)], rel=1e-3)
    assert all(numbers[2] == pytest.approx(numbers[3], rel=1e-3) for _, _, numbers in sites)
    assert all(numbers[0] == numbers[1] for _, _, numbers in sites), "nothing is added: net and injected are one"


def test_roundings_to_bf16_that_nobody_feeds_back_are_in_the_bound():
    """At 8 bits they outgrow the last site's error, which is all that full feedback leaves in the sum."""
    generator = torch.Generator().manual_seed(0)
    contributions = [[torch.randn(512, generator=generator).bfloat16() for _ in range(2)] for _ in range(40)]
    _, sites = measured_pass(EchoConfig(bits=8), 2, contributions)
    _, _, accumulated, bound = sites[-1][2]
    assert max(norm(injected).item() for _, injected, _ in sites) < accumulated < bound


def test_zero_sums_and_non_finite_ones():
    errors, zero = PassErrors(LOCAL_FEEDBACK), torch.zeros(8)
    assert errors.add(zero, None, zero).tolist() == [0, 0, 0, 0]
    assert errors.add(zero, None, zero + 1).tolist()[:2] == [math.inf, math.inf]
    assert all(math.isnan(value) for value in errors.add(zero * math.nan, None, zero * math.nan).tolist())
    errors.begin()
    tiny = torch.full((8,), 1e-30)
    assert errors.add(tiny, None, tiny * 1.5).tolist()[0] == pytest.approx(0.5), "squares would underflow in FP32"


def test_another_size_begins_a_pass():
    errors = PassErrors(PAPER_FEEDBACK)
    errors.add(torch.ones(8), None, torch.ones(8) * 2)
    _, _, accumulated, bound = errors.add(torch.ones(9), None, torch.ones(9) * 2).tolist()
    assert accumulated == pytest.approx(3) and bound == pytest.approx(source_bound(PAPER_FEEDBACK, 1, 3))


@pytest.mark.parametrize("policy", [Policy.symmetric, Policy.rotated])
@pytest.mark.parametrize("bits", [4, 8])
def test_grids_that_reach_their_ends_by_construction_are_not_saturated(policy, bits):
    quantizer = Quantizer(bits, policy, group_size(policy))
    values = quantizer.to_basis(torch.randn(10_007, generator=torch.Generator().manual_seed(0)))
    assert grid_use(quantizer, values, None).tolist() == [0, 0]


def test_values_outside_the_grid_and_groups_that_vanish():
    quantizer = Quantizer(4, Policy.rotated_asymmetric, 32)
    values = quantizer.to_basis(torch.randn(32 * 4096, generator=torch.Generator().manual_seed(0)))
    saturated, underflowed = grid_use(quantizer, values, None).tolist()
    decoded = quantizer.dequantize(quantizer.quantize(values))
    quantized = quantizer.quantize(values)
    position = values.view(-1, 32) / (quantized.scale * torch.exp2(quantized.exponent.float())[:, None]).view(-1, 1)
    position = position + quantized.zero.view(-1, 1)
    outside = ((position < -0.501) | (position > 15.501)).any(-1)
    assert 0 < saturated == pytest.approx(outside.double().mean().item(), abs=2e-3)
    assert underflowed == 0 and decoded.isfinite().all()

    plain = Quantizer(4, Policy.symmetric, 128, Rescale.none)
    groups = torch.ones(6, 128)
    groups[1] *= 1e-12  # its scale underflows FP16
    groups[2] *= 1e12  # its scale overflows FP16
    groups[3, 5], groups[4] = math.nan, 0.0  # neither
    assert grid_use(plain, groups.flatten(), None).tolist() == pytest.approx([1 / 6, 1 / 6])
    short = groups[:2].flatten()[:130]
    assert grid_use(plain, short, None).tolist() == [0, 0.5]
    tiny = torch.randn(128 * 50, generator=torch.Generator().manual_seed(1)) * 1e-9
    for policy in Policy:
        quantizer = Quantizer(4, policy, group_size(policy), Rescale.none)
        assert grid_use(quantizer, quantizer.to_basis(tiny), None).tolist() == [0, 1], "all below the smallest scale"
        quantizer = Quantizer(4, policy, group_size(policy), Rescale.tile)
        assert grid_use(quantizer, quantizer.to_basis(tiny), None).tolist()[1] == 0
    exponent = plain.call_exponent(torch.tensor(1.0))
    assert grid_use(plain, torch.full((128,), 2.0**17), exponent).tolist() == [1, 0]


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("num_values", [5, 4096, 40_003])
def test_corrections_are_read_out_of_tiles_by_segment(algorithm, num_values):
    """Two-shot fills every segment up to whole tiles; tests/test_cuda_host.py holds a tile's layout to the kernels."""
    world_size = 3
    expected = torch.arange(num_values, dtype=torch.float32) + 1
    rows = 1 if algorithm is Algorithm.one_shot else world_size
    length = num_values if rows == 1 else math.ceil(math.ceil(num_values / 32) / world_size) * 32
    filled = torch.nn.functional.pad(expected, (0, rows * length - num_values)).view(rows, length)
    filled = torch.nn.functional.pad(filled, (0, -length % 4096), value=math.nan)
    blocks = filled.view(rows, -1, 128, 8, 4).transpose(2, 3).reshape(rows, -1, 4096)  # chunk after chunk
    state = torch.cat((blocks, torch.full_like(blocks, math.nan)), dim=-1).view(torch.uint8).flatten()
    assert torch.equal(read_correction(state, 32, StateDtype.fp32, algorithm, world_size, num_values), expected)


# -- on process groups


ROWS = (9, 9, 7)  # of each microbatch


def contribution(rank, site, microbatch, dtype=torch.float32):
    seed = 1000 * rank + 100 * microbatch + 10 * site.idx + list(Direction).index(site.direction)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS[microbatch], HIDDEN, generator=generator) * 2**microbatch).to(dtype)


def sites_of(config, direction, num_sites=4):
    return [Site(idx, direction, f"layers.{idx}", config.bits) for idx in range(num_sites)]


def measured_calls(rank, world_size, config, dtype):
    """A measured step of three microbatches of in-place calls through process groups, then one that is not measured."""
    communicator = Communicator(dist.group.WORLD, config)
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 3)
    sites = [site for direction in Direction for site in sites_of(config, direction)]
    groups = [EchoProcessGroup(communicator, site, HIDDEN, lambda: True) for site in sites]
    outputs, metrics = [], []
    for step in (3, 4):
        communicator.reset()
        inspector.begin_step(step)
        for microbatch in range(len(ROWS)):
            for group in groups:
                x = contribution(rank, group.site, microbatch, dtype)
                dist.all_reduce(x, group=group)
                outputs.append(x)
        metrics.append(inspector.end_step())
        assert "all_reduce" not in vars(communicator.transport) and all("_call_for" not in vars(g) for g in groups)
    for group in groups:
        group.close()
    return metrics, outputs


def expected_numbers(config, world_size, dtype):
    """The same step on simulated ranks: the mean over its microbatches, or the largest."""
    expected, ranks = {}, range(world_size)
    algorithm = SimulatedGroup(world_size, config).algorithm
    for direction in Direction:
        sites = sites_of(config, direction)
        passes = [
            [[contribution(r, site, m, dtype).flatten() for r in ranks] for site in sites] for m in range(len(ROWS))
        ]
        own = config.replace(residual=config.residual_of(direction), backward_residual=None)
        numbers = [[site[2] for site in measured_pass(own, world_size, one)[1]] for one in passes]
        for idx, site in enumerate(sites):
            relative, injected, accumulated, bound = zip(*(one[idx] for one in numbers), strict=True)
            sent = [
                num_sent_bytes(config, site.bits, algorithm, world_size, rank, rows * HIDDEN)
                for rank in ranks
                for rows in ROWS
            ]
            values = {
                "relative_error": mean(relative),
                "injected_error": mean(injected),
                "accumulated_error": max(accumulated),
                "accumulated_bound": max(bound),
                "bound_used": max(a / b for a, b in zip(accumulated, bound, strict=True)),
                "amax": max(x.float().abs().max().item() for one in passes for x in one[idx]),
                "bytes": mean(sent),
                "exact_calls": 0,
            }
            expected |= {f"echo/{direction.name}/{site.name}/{quantity}": value for quantity, value in values.items()}
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        ECHO4,
        ECHO4.replace(algorithm="one_shot", **AVERAGES),
        ECHO4.replace(backward_residual="consensus"),
        ECHO4.replace(eta=0.0),
        EchoConfig.preset("echo8_paper", min_bytes=0),
    ],
    ids=["echo4", "averages", "mixed", "uncompensated", "paper"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_are_those_of_the_simulated_group_and_outputs_the_same_bits(world_size, config, dtype):
    ranks = run_ranks(measured_calls, world_size, config, dtype)
    expected = expected_numbers(config, world_size, dtype)
    for (measured, unmeasured), outputs in ranks:
        assert unmeasured == {}
        assert measured == ranks[0][0][0], "the same values on all ranks"
        assert {tag.rpartition("/")[2] for tag in measured} == set(QUANTITIES)
        for tag, value in expected.items():
            assert measured[tag] == pytest.approx(value, rel=1e-4, abs=1e-7), tag
        half = len(outputs) // 2
        assert all(torch.equal(a, b) for a, b in zip(outputs[:half], outputs[half:], strict=True))


def scattered(rank, world_size, config):
    """A measured step of reduce-scatters, the second microbatch of another size; then one that is not measured."""
    communicator = Communicator(dist.group.WORLD, config)
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 3)
    groups = [
        EchoProcessGroup(communicator, site, HIDDEN, lambda: True) for site in sites_of(config, Direction.backward)
    ]
    outputs, metrics = [], []
    for step in (3, 4):
        communicator.reset()
        inspector.begin_step(step)
        for microbatch, rows in enumerate((3, 3, 2)):
            for group in groups:
                x = scattered_contribution(rank, group.site, microbatch, rows * world_size)
                out = torch.empty(rows, HIDDEN)
                dist.reduce_scatter_tensor(out, x, group=group)
                outputs.append(out)
        small = torch.empty(1, HIDDEN)  # under min_bytes
        dist.reduce_scatter_tensor(small, torch.ones(world_size, HIDDEN), group=groups[0])
        metrics.append(inspector.end_step())
        assert "reduce_scatter" not in vars(communicator.transport) and "_scatters" not in vars(groups[0])
    return metrics, outputs


def scattered_contribution(rank, site, microbatch, rows):
    generator = torch.Generator().manual_seed(1000 * rank + 100 * microbatch + site.idx)
    return torch.randn(rows, HIDDEN, generator=generator)


@pytest.mark.parametrize("rescale", ["tile", "group"])
def test_reduce_scatters_are_measured_as_the_simulated_group_s(rescale):
    world_size, config = 2, EchoConfig(min_bytes=3 * HIDDEN * 4, rescale=rescale, state_dtype="fp32")
    group, errors = SimulatedGroup(world_size, config), PassErrors(config.feedback_of(Direction.backward))
    compensator, quantizer = group.compensators[Direction.backward], make_quantizer(config, 4)
    sites, calls = sites_of(config, Direction.backward), {}
    for microbatch, rows in enumerate((3, 3, 2)):
        errors.begin()
        for site in sites:
            xs = [scattered_contribution(rank, site, microbatch, rows * world_size) for rank in range(world_size)]
            shape = torch.Size((world_size, world_size, rows * HIDDEN))
            correction = compensator.correction(shape, xs[0].device) if site.idx else None
            y = torch.cat(group.reduce_scatter(xs, site)).flatten()
            added = None if correction is None else quantizer.from_basis(correction.sum(0), rows * HIDDEN).flatten()
            numbers = errors.add(torch.stack(xs).sum(0).flatten(), added, y).tolist()
            calls.setdefault(site.name, []).append(numbers)
    ranks = run_ranks(scattered, world_size, config)
    for (measured, unmeasured), outputs in ranks:
        assert unmeasured == {} and measured == ranks[0][0][0]
        half = len(outputs) // 2
        assert all(torch.equal(a, b) for a, b in zip(outputs[:half], outputs[half:], strict=True))
        for site in sites:
            relative, injected, accumulated, bound = zip(*calls[site.name], strict=True)
            tag = f"echo/backward/{site.name}"
            assert measured[f"{tag}/relative_error"] == pytest.approx(mean(relative), rel=1e-4)
            assert measured[f"{tag}/injected_error"] == pytest.approx(mean(injected), rel=1e-4)
            assert measured[f"{tag}/accumulated_error"] == pytest.approx(max(accumulated), rel=1e-4)
            assert measured[f"{tag}/accumulated_bound"] == pytest.approx(max(bound), rel=1e-4)
            assert measured[f"{tag}/bound_used"] <= 1 + 1e-6, "reached by full feedback, and FP32's rounding"
            assert measured[f"{tag}/exact_calls"] == (site.idx == 0)
            sent = [num_sent_share_bytes(config, 4, world_size, rows * HIDDEN) for rows in (3, 3, 2)]
            sent += [HIDDEN * 4] if site.idx == 0 else []
            assert measured[f"{tag}/bytes"] == pytest.approx(mean(sent))


def exact_and_foreign_calls(rank, world_size):
    """Messages under min_bytes are counted; other collectives, other shapes and inactive phases are not."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(min_bytes=8 * HIDDEN * 4 + 1))
    site, active = Site(0, Direction.forward, "layers.0.mlp.linear_fc2"), [True]
    group = EchoProcessGroup(communicator, site, HIDDEN, lambda: active[0])
    assert [own is group for own in communicator.site_groups] == [True]
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 10)
    tags = []
    for rows in ((8,), (9, 8, 8)):
        inspector.begin_step(20)
        for count in rows:
            dist.all_reduce(torch.ones(count, HIDDEN), group=group)
        dist.all_reduce(torch.ones(9, HIDDEN), dist.ReduceOp.MAX, group=group)
        dist.all_reduce(torch.ones(9, HIDDEN + 1), group=group)
        active[0] = False
        dist.all_reduce(torch.ones(9, HIDDEN), group=group)
        active[0] = True
        tags.append({tag.rpartition("/")[2]: value for tag, value in inspector.end_step().items()})
    inspector.begin_step(21)
    dist.all_reduce(torch.ones(9, HIDDEN), group=group)
    tags.append(inspector.end_step())
    inspector.begin_step(30)
    tags.append(inspector.end_step())
    return tags


def test_exact_messages_are_counted_and_foreign_ones_are_not():
    ring = 8 * HIDDEN * 4  # 2 (P-1) / P of the message at P=2
    for small, mixed, not_due, empty in run_ranks(exact_and_foreign_calls, 2):
        assert small == {"bytes": ring, "exact_calls": 1}
        assert set(mixed) == set(QUANTITIES) and mixed["exact_calls"] == 2
        quantized = num_sent_bytes(EchoConfig(), 4, Algorithm.one_shot, 2, 0, 9 * HIDDEN)
        assert mixed["bytes"] == pytest.approx((2 * ring + quantized) / 3)
        assert not_due == {} and empty == {}
