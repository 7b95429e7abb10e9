"""Error feedback: the recurrence against the paper's closed forms, and its bounds against adversaries."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from feedbacks import AVERAGES
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron.compensator import (
    Compensator,
    remaining,
    source_bound,
    source_variance,
    tail,
    tail_square_sum,
    tail_sum,
    weight,
)
from echo_megatron.config import LOCAL_FEEDBACK, PAPER_FEEDBACK, Direction, EchoConfig, Feedback, Residual, StateDtype
from echo_megatron.sites import PassClock, Site

decays = st.just(0.0) | st.floats(0, 0.95)
feedbacks = st.sampled_from((LOCAL_FEEDBACK, PAPER_FEEDBACK)) | st.builds(
    Feedback, st.floats(0.05, 1), st.floats(0, 1), decays, decays
)


def compensator_of(feedback: Feedback) -> Compensator:
    """With a state in FP32."""
    return Compensator(EchoConfig(**asdict(feedback), state_dtype=StateDtype.fp32))


def test_constants_of_the_paper_s_coefficients():
    assert tail_sum(PAPER_FEEDBACK) == pytest.approx(2.095, abs=5e-4)  # 1 + mu_w
    assert tail_square_sum(PAPER_FEEDBACK) == pytest.approx(1.280, abs=5e-4)  # tau_2
    assert source_variance(PAPER_FEEDBACK, 56) == pytest.approx(5.0, abs=0.02)
    assert source_variance(replace(PAPER_FEEDBACK, eta=0.0), 56) == 56


@pytest.mark.parametrize("num_sites", [1, 56, 1000])
def test_full_feedback_leaves_one_error_in_the_sum_after_any_number_of_sites(num_sites):
    assert LOCAL_FEEDBACK.is_memoryless and not PAPER_FEEDBACK.is_memoryless
    assert tail_sum(LOCAL_FEEDBACK) == tail_square_sum(LOCAL_FEEDBACK) == 1
    assert source_variance(LOCAL_FEEDBACK, num_sites) == source_bound(LOCAL_FEEDBACK, num_sites, 1.0) == 1
    assert [remaining(LOCAL_FEEDBACK, age) for age in (0, 1, num_sites)] == [1, 0, 0]


@settings(deadline=None)
@given(feedbacks)
def test_closed_forms_are_their_definitions(feedback):
    weights = [weight(feedback, age) for age in range(2000)]
    assert sum(weights) == pytest.approx(1, abs=1e-9)
    for age in (0, 1, 5, 30):
        assert tail(feedback, age) == pytest.approx(1 - sum(weights[:age]), abs=1e-9)
        assert remaining(feedback, age) == pytest.approx(1 - feedback.eta * sum(weights[:age]), abs=1e-9)
    tails = [tail(feedback, age) for age in range(2000)]
    assert tail_sum(feedback) == pytest.approx(sum(tails), rel=1e-9)
    assert tail_square_sum(feedback) == pytest.approx(sum(t * t for t in tails), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(feedbacks, st.integers(2, 40), st.integers(0, 2**31))
def test_corrections_unroll_to_eqn_12_and_sums_to_eqn_13(feedback, num_sites, seed):
    """With residuals u = -delta (one aggregate rank) the correction at site k is -eta sum w_{k-1-s} delta_s."""
    deltas = torch.randn(num_sites, 8, generator=torch.Generator().manual_seed(seed))
    compensator = compensator_of(feedback)
    total = torch.zeros(8)
    for k in range(num_sites):
        correction = compensator.apply(torch.zeros(8))
        expected = -feedback.eta * sum((weight(feedback, k - 1 - s) * deltas[s] for s in range(k)), torch.zeros(8))
        assert torch.allclose(correction, expected, atol=1e-5)
        total += deltas[k] + correction
        in_sum = sum((remaining(feedback, k - s) * deltas[s] for s in range(k + 1)), torch.zeros(8))
        assert torch.allclose(total, in_sum, atol=1e-4)
        compensator.update(-deltas[k])


@pytest.mark.parametrize(
    "feedback",
    [PAPER_FEEDBACK, LOCAL_FEEDBACK, Feedback(1.0, 1.0, 0.9, 0.0), Feedback(0.9, 0.0, 0.0, 0.5)],
    ids=["paper", "local", "slow alone", "fast alone"],
)
def test_state_is_the_paper_s_two_averages(feedback):
    compensator, m1, m2 = compensator_of(feedback), torch.zeros(64), torch.zeros(64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        x = torch.randn(64, generator=generator)
        c = feedback.eta * (feedback.a * m1 + (1 - feedback.a) * m2)
        assert torch.allclose(compensator.apply(x), x + c, atol=1e-6)
        u = torch.randn(64, generator=generator)
        m1 = feedback.beta1 * m1 + (1 - feedback.beta1) * u
        m2 = feedback.beta2 * m2 + (1 - feedback.beta2) * u
        compensator.update(u)
        assert torch.allclose(compensator.average, m2, atol=1e-6)


def test_a_direction_has_the_coefficients_of_its_residual():
    config = EchoConfig(backward_residual=Residual.consensus)
    forward, backward = (Compensator(config, direction) for direction in Direction)
    assert forward.coefficients == Compensator(EchoConfig()).coefficients == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert backward.coefficients == Compensator(EchoConfig(residual=Residual.consensus)).coefficients
    assert backward.coefficients == compensator_of(PAPER_FEEDBACK).coefficients
    assert (forward.dtype, backward.dtype) == (StateDtype.compact, StateDtype.bf16)
    assert (forward.is_memoryless, backward.is_memoryless) == (True, False)


@settings(max_examples=100, deadline=None)
@given(
    feedbacks,
    st.integers(1, 200),
    st.integers(0, 2**31),
    st.sampled_from(("signs", "constant", "alternating", "greedy", "bursts")),
)
def test_adversarial_errors_never_exceed_eqn_21(feedback, num_sites, seed, kind):
    """|S_t| <= (1-eta) N q + eta (1+mu_w) q for any |delta| <= q; `greedy` pushes the sum outwards at every site."""
    generator, q = torch.Generator().manual_seed(seed), 1.0
    compensator, total, worst = compensator_of(feedback), 0.0, 0.0
    for k in range(num_sites):
        correction = compensator.apply(torch.zeros(1)).item()
        ahead = total + correction
        delta = {
            "signs": q if torch.rand(1, generator=generator) < 0.5 else -q,
            "constant": q,
            "alternating": q * (-1) ** k,
            "greedy": math.copysign(q, ahead or 1.0),
            "bursts": q if k // 7 % 2 else 0.0,
        }[kind]
        total = ahead + delta
        worst = max(worst, abs(total))
        compensator.update(torch.tensor([-delta]))
    assert worst <= source_bound(feedback, num_sites, q) + 1e-4


@pytest.mark.parametrize("feedback", [PAPER_FEEDBACK, LOCAL_FEEDBACK], ids=["paper", "local"])
def test_a_constant_error_reaches_the_bound_so_it_is_tight(feedback):
    total = sum(remaining(feedback, age) for age in range(400))
    assert total == pytest.approx(source_bound(feedback, 400, 1.0), rel=1e-6)


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_first_site_reads_nothing_and_resets_forget(dtype):
    compensator = Compensator(EchoConfig(state_dtype=dtype))
    x = torch.randn(100)
    assert compensator.apply(x) is x
    compensator.update(torch.full((100,), math.nan))  # a poisoned pass
    assert compensator.apply(x).isnan().all()
    compensator.reset()
    assert compensator.apply(x) is x
    compensator.update(torch.ones(100))
    assert compensator.apply(x).isfinite().all()


def test_another_shape_starts_a_new_pass():
    compensator = Compensator(EchoConfig(state_dtype="bf16"))
    compensator.apply(torch.randn(10))
    compensator.update(torch.ones(10))
    x = torch.randn(12)
    assert compensator.apply(x) is x
    assert compensator.num_bytes() == 2 * 12 * 2  # two BF16 tensors of the contribution's size


def after_56_sites(**options):
    compensator, generator = Compensator(EchoConfig(**options)), torch.Generator().manual_seed(0)
    for _ in range(56):
        compensator.apply(torch.zeros(1000))
        compensator.update(torch.randn(1000, generator=generator))
    return compensator


def test_other_states_stay_close_to_fp32():
    """Measured: bf16 with averages 0.2 % of c and of m2, compact with the last residual alone 0.6 % of c."""
    bf16, fp32 = (after_56_sites(state_dtype=dtype, **AVERAGES) for dtype in (StateDtype.bf16, StateDtype.fp32))
    compact, last = (after_56_sites(state_dtype=dtype) for dtype in (StateDtype.compact, StateDtype.fp32))
    zeros = torch.zeros(1000)
    for rounded, exact, tolerance in (
        (bf16.apply(zeros), fp32.apply(zeros), 0.005),
        (bf16.average, fp32.average, 0.005),
        (compact.apply(zeros), last.apply(zeros), 0.01),
    ):
        assert 0 < (rounded - exact).norm() / exact.norm() < tolerance


@pytest.mark.parametrize(
    "options",
    [*({"state_dtype": dtype} for dtype in StateDtype), {"state_dtype": StateDtype.bf16, **AVERAGES}],
    ids=[*StateDtype.__members__, "averages"],
)
def test_simulated_ranks_are_single_ranks(options):
    together = Compensator(EchoConfig(**options))
    alone = [Compensator(EchoConfig(**options)) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, u = torch.randn(2, 3, 77, generator=generator)
        rows = torch.stack([one.apply(row) for one, row in zip(alone, x, strict=True)])
        assert torch.equal(together.apply(x), rows)
        together.update(u)
        for one, row in zip(alone, u, strict=True):
            one.update(row)
    assert together.num_bytes() == sum(one.num_bytes() for one in alone)


def test_raw_state_is_kept_through_a_pass():
    compensator, cpu = Compensator(EchoConfig()), torch.device("cpu")
    buffer = compensator.raw_state((12, 4), 100, cpu)
    assert (buffer.shape, buffer.dtype, compensator.is_fresh) == ((100,), torch.uint8, True)
    buffer.fill_(7)
    compensator.mark_updated()
    again = compensator.raw_state((12, 4), 100, cpu)
    assert not compensator.is_fresh and again.data_ptr() == buffer.data_ptr() and again.eq(7).all()
    assert compensator.num_bytes() == 100
    compensator.reset()
    assert compensator.raw_state((12, 4), 100, cpu).data_ptr() == buffer.data_ptr() and compensator.is_fresh


@pytest.mark.parametrize(
    ("key", "num_bytes", "device"), [((13, 4), 100, "cpu"), ((12, 4), 101, "cpu"), ((12, 4), 100, "meta")]
)
def test_another_raw_layout_starts_a_new_pass(key, num_bytes, device):
    compensator = Compensator(EchoConfig())
    first = compensator.raw_state((12, 4), 100, torch.device("cpu"))
    compensator.mark_updated()
    buffer = compensator.raw_state(key, num_bytes, torch.device(device))
    assert compensator.is_fresh and (buffer.numel(), buffer.device.type) == (num_bytes, device)
    assert (buffer is first) is (key != (12, 4)), "another key of the same size keeps the memory"
    assert compensator.num_bytes() == num_bytes


def test_a_pass_does_not_mix_raw_and_plain_state():
    compensator, x = Compensator(EchoConfig(state_dtype="bf16")), torch.randn(12)
    compensator.apply(x)
    compensator.update(torch.ones(12))
    compensator.raw_state((12,), 48, torch.device("cpu"))
    assert compensator.is_fresh and compensator.num_bytes() == 48
    compensator.mark_updated()
    assert compensator.apply(x) is x
    assert compensator.num_bytes() == 2 * 12 * 2


@pytest.mark.parametrize("dtype", list(StateDtype))
def test_state_made_in_inference_mode_serves_training(dtype):
    compensator, raw = Compensator(EchoConfig(state_dtype=dtype)), Compensator(EchoConfig())
    with torch.inference_mode():
        compensator.apply(torch.zeros(40))
        compensator.update(torch.ones(40))
        buffer = raw.raw_state((40,), 80, torch.device("cpu"))
    compensator.update(torch.ones(40))
    assert compensator.apply(torch.zeros(40)).gt(0).all()
    assert not buffer.is_inference()


def test_a_buffer_that_a_graph_captured_lives_on_and_serves_its_size():
    compensator = Compensator(EchoConfig())
    cpu = torch.device("cpu")
    captured = compensator.raw_state((64,), 256, cpu, is_captured=True)
    other = compensator.raw_state((128,), 512, cpu)  # an evaluation of another shape, outside the graph
    assert other.data_ptr() != captured.data_ptr() and compensator.is_fresh
    assert compensator.num_bytes() == 256 + 512
    assert compensator.raw_state((64,), 256, cpu).data_ptr() == captured.data_ptr(), "what the graph's calls read"
    assert compensator.raw_state((32,), 128, cpu).data_ptr() != captured.data_ptr()
    assert compensator.num_bytes() == 256 + 128, "only what was captured is kept"


def test_in_a_capture_only_site_0_begins_a_pass():
    """A layer's graph is captured after warm-up calls of that layer alone."""
    clock = PassClock()
    sites = [Site(idx, Direction.forward) for idx in range(4)]
    for site in (sites[2], sites[3]):
        clock.tick(site)
    assert [clock.tick(sites[idx], is_captured=True) for idx in (2, 3, 0, 1)] == [False, False, True, False]
    assert clock.tick(sites[1]), "without a capture an index that does not grow begins a pass"
