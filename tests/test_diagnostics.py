"""What the inspector measures: the paper's identity and bound, and the same bits with and without it."""

import logging
import math
from types import SimpleNamespace

import megatron.core.tensor_parallel.layers  # noqa: F401  # before the processes fork: they need not import it again
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from policies import group_size
from tiny_megatron import HIDDEN, SEQUENCE, build_trainer, gradients, run_step

from echo_megatron import EchoConfig, install
from echo_megatron.communicator import Communicator
from echo_megatron.compensator import remaining, source_bound
from echo_megatron.config import Algorithm, Direction, Policy, Rescale, Residual, StateDtype
from echo_megatron.diagnostics import QUANTITIES, Inspector, gather
from echo_megatron.diagnostics_errors import PassErrors, grid_use, norm
from echo_megatron.process_group import EchoProcessGroup, groups_of
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup, make_quantizer, num_sent_bytes
from echo_megatron.sites import Site
from echo_megatron.transports.tiled_state import read_correction

ECHO4 = EchoConfig.preset("echo4", min_bytes=0)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# -- the mathematics, on simulated ranks


def measured_pass(config, world_size, contributions):
    """`PassErrors` over one pass of a simulated group: (net error, injected error, numbers) of every site."""
    group, errors, sites = SimulatedGroup(world_size, config), PassErrors(config), []
    compensator = group.compensators[Direction.forward]
    quantizer = make_quantizer(config, config.bits)
    for idx, xs in enumerate(contributions):
        num_values = xs[0].numel()
        shape = torch.Size((world_size, quantizer.num_basis_values(num_values)))
        corrections = compensator.correction(shape, xs[0].device)
        y = group.all_reduce(xs, Site(idx, Direction.forward, bits=config.bits)).float()
        exact = torch.stack(xs).float().sum(0)
        added = None if corrections is None else quantizer.from_basis(corrections.sum(0), num_values)
        numbers = errors.add(exact, added, y)
        sites.append((y - exact, y - exact - (0 if added is None else added), numbers.tolist()))
    return errors, sites


configs = st.builds(
    lambda bits, policy, algorithm, residual, rescale, eta, a, beta1, beta2: EchoConfig(
        bits=bits, policy=policy, group_size=group_size(policy), algorithm=algorithm, residual=residual,
        rescale=rescale, eta=eta, a=a, beta1=beta1, beta2=beta2, state_dtype=StateDtype.fp32,
    ),
    st.sampled_from((4, 8)), st.sampled_from(Policy), st.sampled_from((Algorithm.one_shot, Algorithm.two_shot)),
    st.sampled_from(Residual), st.sampled_from((Rescale.tile, Rescale.group)),
    st.sampled_from((0.0, 0.75, 1.0)) | st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.95), st.floats(0, 0.95),
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
    deltas = [injected.double() for _, injected, _ in sites]
    # FP32 sums of P values of this size, at every site so far
    rounding = 2.0**-21 * num_sites * world_size * max(norm(torch.stack(xs)).item() for xs in contributions)
    accumulated, largest = torch.zeros(size, dtype=torch.float64), 0.0
    for t, (net, injected, (_, _, accumulated_norm, bound)) in enumerate(sites):
        accumulated += net.double()
        expected = sum(remaining(config, t - s) * deltas[s] for s in range(t + 1))
        assert norm(accumulated - expected) <= rounding
        assert accumulated_norm == pytest.approx(norm(accumulated).item(), abs=rounding)
        largest = max(largest, norm(injected).item())
        assert bound == pytest.approx(source_bound(config, t + 1, largest), rel=1e-9)
        assert accumulated_norm <= bound + rounding
    assert norm(errors.accumulated.double() - accumulated) <= rounding


def test_the_bound_is_reached_by_errors_of_one_sign_and_broken_feedback_exceeds_it():
    """The bound measures the feedback: errors that return at full size leave it, as they would by the same test."""
    config = EchoConfig(eta=1.0, state_dtype=StateDtype.fp32)
    for works in (True, False):
        errors, used = PassErrors(config), []
        deltas = torch.zeros(60, 4, dtype=torch.float32)
        deltas[:, 0] = 1.0
        for t in range(60):
            weights = [remaining(config, m) - remaining(config, m + 1) for m in range(t)]
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


def test_zero_sums_and_non_finite_ones():
    errors, zero = PassErrors(ECHO4), torch.zeros(8)
    assert errors.add(zero, None, zero).tolist() == [0, 0, 0, 0]
    assert errors.add(zero, None, zero + 1).tolist()[:2] == [math.inf, math.inf]
    assert all(math.isnan(value) for value in errors.add(zero * math.nan, None, zero * math.nan).tolist())
    errors.begin()
    tiny = torch.full((8,), 1e-30)
    assert errors.add(tiny, None, tiny * 1.5).tolist()[0] == pytest.approx(0.5), "squares would underflow in FP32"


def test_another_size_begins_a_pass():
    errors = PassErrors(ECHO4)
    errors.add(torch.ones(8), None, torch.ones(8) * 2)
    _, _, accumulated, bound = errors.add(torch.ones(9), None, torch.ones(9) * 2).tolist()
    assert accumulated == pytest.approx(3) and bound == pytest.approx(source_bound(ECHO4, 1, 3))


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
    exponent = plain.call_exponent(torch.tensor(1.0))
    assert grid_use(plain, torch.full((128,), 2.0**10), exponent).tolist() == [1, 0]


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("num_values", [5, 4096, 40_003])
def test_corrections_are_read_out_of_tiles_by_segment(algorithm, num_values):
    """Two-shot fills every segment up to whole tiles; tests/test_cuda_host.py holds a tile's layout to the kernels."""
    config, world_size = EchoConfig(state_dtype=StateDtype.fp32), 3
    expected = torch.arange(num_values, dtype=torch.float32) + 1
    rows = 1 if algorithm is Algorithm.one_shot else world_size
    length = num_values if rows == 1 else math.ceil(math.ceil(num_values / 32) / world_size) * 32
    filled = torch.nn.functional.pad(expected, (0, rows * length - num_values)).view(rows, length)
    filled = torch.nn.functional.pad(filled, (0, -length % 4096), value=math.nan)
    blocks = filled.view(rows, -1, 128, 8, 4).transpose(2, 3).reshape(rows, -1, 4096)  # chunk after chunk
    state = torch.cat((blocks, torch.full_like(blocks, math.nan)), dim=-1).view(torch.uint8).flatten()
    assert torch.equal(read_correction(state, config, algorithm, world_size, num_values), expected)


# -- on process groups


def contribution(rank, site, size, dtype=torch.float32):
    seed = 1000 * rank + 10 * site.idx + list(Direction).index(site.direction)
    return torch.randn(size, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def calls_of(config, num_sites=4):
    return [Site(idx, direction, f"layers.{idx}", config.bits) for direction in Direction for idx in range(num_sites)]


def measured_calls(rank, world_size, config, dtype):
    """One measured step of in-place calls through process groups, then one that is not measured."""
    communicator = Communicator(dist.group.WORLD, config)
    inspector = Inspector(SimpleNamespace(communicator=communicator, uses_cuda_graphs=False), 1)
    outputs, metrics = [], []
    for measured in (True, False):
        communicator.reset()
        if measured:
            inspector.begin_step(3)
        groups = []
        for site in calls_of(config):
            groups.append(EchoProcessGroup(communicator, site, HIDDEN, lambda: True))
        if measured:
            inspector.begin_step(3)  # again: the groups of this test are younger than the first measurement
        for group in groups:
            x = contribution(rank, group.site, 9, dtype)
            dist.all_reduce(x, group=group)
            outputs.append(x)
        metrics.append(inspector.end_step())
        assert "all_reduce" not in vars(communicator.transport) and all("_call_for" not in vars(g) for g in groups)
        for group in groups:
            group.unregister()
    return metrics, outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        ECHO4,
        ECHO4.replace(state_dtype="compact", algorithm="one_shot"),
        ECHO4.replace(eta=0.0),
        EchoConfig.preset("echo8_paper", min_bytes=0),
    ],
    ids=["echo4", "compact", "uncompensated", "paper"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_numbers_are_those_of_the_simulated_group_and_outputs_the_same_bits(world_size, config, dtype):
    ranks = run_ranks(measured_calls, world_size, config, dtype)
    expected = {}
    for direction in Direction:
        sites = [site for site in calls_of(config) if site.direction is direction]
        contributions = [[contribution(rank, site, 9, dtype).flatten() for rank in range(world_size)] for site in sites]
        _, numbers = measured_pass(config, world_size, contributions)
        quantities = ("relative_error", "injected_error", "accumulated_error", "accumulated_bound")
        for site, xs, (_, _, values) in zip(sites, contributions, numbers, strict=True):
            tag = f"echo/{direction.name}/{site.name}/"
            expected |= {tag + quantity: value for quantity, value in zip(quantities, values, strict=True)}
            expected[tag + "bound_used"] = values[2] / values[3]
            expected[tag + "amax"] = torch.stack(xs).float().abs().max().item()
            algorithm = SimulatedGroup(world_size, config).algorithm
            sent = [num_sent_bytes(config, site.bits, algorithm, world_size, r, 9 * HIDDEN) for r in range(world_size)]
            expected[tag + "bytes"] = sum(sent) / world_size
            expected[tag + "exact_calls"] = 0
    for (measured, unmeasured), outputs in ranks:
        assert unmeasured == {}
        assert measured == ranks[0][0][0], "the same values on all ranks"
        assert {tag.rpartition("/")[2] for tag in measured} == set(QUANTITIES)
        for tag, value in expected.items():
            assert measured[tag] == pytest.approx(value, rel=1e-4, abs=1e-7), tag
        half = len(outputs) // 2
        assert all(torch.equal(a, b) for a, b in zip(outputs[:half], outputs[half:], strict=True))


def exact_and_foreign_calls(rank, world_size):
    """Messages under min_bytes are counted; other collectives, other shapes and inactive phases are not."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(min_bytes=8 * HIDDEN * 4 + 1))
    site, active = Site(0, Direction.forward, "layers.0.mlp.linear_fc2"), [True]
    group = EchoProcessGroup(communicator, site, HIDDEN, lambda: active[0])
    assert groups_of(communicator) == [group]
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


# -- in a model


def inspected(rank, world_size, layout, microbatches, config):
    """The same training three times: not measured, measured at every second step, at every step."""
    from megatron.core import parallel_state

    results = []
    for every in (0, 2, 1):
        trainer = build_trainer(**layout)
        installation = install(trainer.chunks, config)
        inspector = Inspector(installation, every)
        losses, metrics = [], []
        for step in range(1, 4):
            inspector.begin_step(step)
            losses.append(run_step(trainer, step, microbatches=microbatches))
            metrics.append(inspector.end_step())
            losses.append(run_step(trainer, 50, evaluate=True, microbatches=microbatches))
        stages = gather(metrics[-1], parallel_state.get_pipeline_model_parallel_group(), torch.device("cpu"))
        results.append((losses, gradients(trainer), metrics, stages))
        parallel_state.destroy_model_parallel()
    return results


def sites_in(metrics):
    return list(dict.fromkeys(tag.rpartition("/")[0] for tag in metrics))


LAYOUTS = {
    "plain": ({"tp": 2}, 3),
    "recompute": ({"tp": 2, **FULL}, 2),
    "stages": ({"tp": 2, "pp": 2}, 4),
    "interleaved": ({"tp": 2, "pp": 2, "vpp": 2}, 4),
}


@pytest.mark.parametrize(("layout", "microbatches"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_measured_run_has_the_bits_of_one_that_is_not(layout, microbatches):
    stages = layout.get("pp", 1)
    ranks = run_ranks(inspected, 2 * stages, layout, microbatches, ECHO4, timeout_s=120)
    for rank, results in enumerate(ranks):
        (losses, grads, off, _), second, each = results
        assert off == [{}, {}, {}]
        assert [bool(metrics) for metrics in second[2]] == [False, True, False]
        for other_losses, other_grads, _, _ in (second, each):
            assert other_losses == losses
            assert all(torch.equal(other_grads[name], grads[name]) for name in grads)
        assert second[2][1] == each[2][1], "a measured step's numbers don't depend on the steps before"
        neighbour = ranks[rank ^ 1]  # of the same tensor-parallel group
        assert each[2] == neighbour[2][2]
        for metrics in each[2]:
            sites = sites_in(metrics)
            assert len(sites) == 16 // stages and len(metrics) == len(sites) * len(QUANTITIES)
            for site in sites:
                values = {quantity: metrics[f"{site}/{quantity}"] for quantity in QUANTITIES}
                assert 0.03 < values["injected_error"] < 0.3 and 0.03 < values["relative_error"] < 0.3
                assert 0 < values["bound_used"] < 1 and values["saturated"] == values["underflowed"] == 0
                assert 0 < values["accumulated_error"] < values["accumulated_bound"]
                assert values["amax"] > 0 and values["exact_calls"] == 0
                assert values["bytes"] == num_sent_bytes(ECHO4, 4, Algorithm.one_shot, 2, 0, 2 * SEQUENCE * HIDDEN)
        assert len(sites_in(results[2][3])) == 16, "all stages"
        assert results[2][3] == ranks[0][2][3] or rank % 2, "the same dictionary on all stages"


def only_what_is_covered(rank, world_size):
    from megatron.core import parallel_state

    trainer = build_trainer(tp=world_size)
    installation = install(trainer.chunks, ECHO4.replace(directions=["backward"], phases=["train"]))
    inspector = Inspector(installation, 1)
    inspector.begin_step(1)
    run_step(trainer, 1, evaluate=True)
    evaluated = inspector.end_step()
    inspector.begin_step(2)
    with pytest.raises(RuntimeError, match="planted failure"):
        run_step(trainer, 2, fail="backward", update=False)
    inspector.begin_step(3)
    run_step(trainer, 2)
    trained = inspector.end_step()
    installation.uninstall()
    inspector.begin_step(4)
    run_step(trainer, 3)
    after = inspector.end_step()
    parallel_state.destroy_model_parallel()

    trainer = build_trainer(tp=world_size)
    inspector = Inspector(install(trainer.chunks, ECHO4), 1)
    inspector.begin_step(1)
    run_step(trainer, 1, evaluate=True)
    return evaluated, trained, after, inspector.end_step()


def test_directions_phases_failures_and_uninstalling():
    for evaluated, trained, after, quantized_evaluation in run_ranks(only_what_is_covered, 2):
        assert evaluated == after == {}
        assert {site.split("/")[1] for site in sites_in(trained)} == {"backward"} and len(sites_in(trained)) == 8
        assert all(trained[tag] == 0 for tag in trained if tag.endswith("exact_calls"))
        assert {site.split("/")[1] for site in sites_in(quantized_evaluation)} == {"forward"}


# -- what is refused


def test_options_that_cannot_be(caplog):
    nothing = SimpleNamespace(communicator=None, uses_cuda_graphs=False)
    for every in (-1, 1.5, True, "10"):
        with pytest.raises(ValueError, match="inspect_every: expected a whole number of steps"):
            Inspector(nothing, every)
    with caplog.at_level(logging.INFO, "echo_megatron.diagnostics"):
        inspector = Inspector(nothing, 5)
    assert "nothing is installed" in caplog.text
    inspector.begin_step(5)
    assert inspector.end_step() == {}


def test_cuda_graphs_are_refused():
    installation = SimpleNamespace(communicator=SimpleNamespace(), uses_cuda_graphs=True)
    with pytest.raises(ValueError, match="inspect_every: expected 0 with CUDA graphs, got 3: a replay runs no Python"):
        Inspector(installation, 3)
    Inspector(installation, 0)


def test_a_capture_is_refused(monkeypatch):
    inspector = Inspector(SimpleNamespace(communicator=SimpleNamespace(), uses_cuda_graphs=False), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inspector.begin_step(1)
    with pytest.raises(RuntimeError, match="a step that a CUDA graph captures can't be measured"):
        inspector.begin_step(2)
