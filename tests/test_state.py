"""How state is stored: the compact codes' bytes, their error, and that a poisoned block stays alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron.compensator import Compensator
from echo_megatron.config import EchoConfig, StateDtype
from echo_megatron.state import BLOCK_VALUES, CompactState, _blocks, make_state

CPU = torch.device("cpu")
COEFFICIENTS = Compensator(EchoConfig()).coefficients
# All of the gain in one step, from the residual alone: a pass's first c is u, and so is m2.
IDENTITY = [0.0, 0.0, 1.0, 0.0, 1.0]
shapes = st.lists(st.integers(1, 4), max_size=2).flatmap(
    lambda leading: st.integers(1, 200).map(lambda n: torch.Size((*leading, n)))
)
seeds = st.integers(0, 2**31)
configs = st.builds(
    lambda eta, a, beta1, beta2: EchoConfig(eta=eta, a=a, beta1=beta1, beta2=beta2),
    st.floats(0.05, 1),
    st.floats(0, 1),
    st.floats(0, 0.95),
    st.floats(0, 0.95),
)
common = settings(max_examples=100, deadline=None)


def draw(shape: torch.Size, seed: int, exponent: int = 0) -> torch.Tensor:
    """Normal values of 2^exponent, every block of another magnitude, and some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    spread = torch.randint(-4, 5, shape, generator=generator).float().exp2()
    zero = torch.rand(shape, generator=generator) < 0.1
    return (values * spread * 2.0**exponent).masked_fill(zero, 0.0)


def stored(values: torch.Tensor) -> CompactState:
    """c and m2 both equal to `values`."""
    state = CompactState(values.shape, CPU, IDENTITY)
    state.store(values, values, values, fresh=True)
    return state


def next_values(state: CompactState, residual: torch.Tensor, k: list[float], fresh: bool) -> tuple[torch.Tensor, ...]:
    """c and m2 after a site, as `Compensator.update` makes them."""
    correction, average = residual * k[2], residual * k[4]
    if fresh:
        return correction, average
    kept = state.correction() * k[0] + state.average() * k[1]
    return kept + correction, state.average() * k[3] + average


def by_value(scale: torch.Tensor, num_values: int) -> torch.Tensor:
    """A block's scale, fp32, for each of its values."""
    return scale.float().repeat_interleave(BLOCK_VALUES, dim=-1)[..., :num_values]


@common
@given(shapes, seeds, st.integers(-140, 110), configs, st.integers(1, 6))
def test_every_value_of_a_pass_is_within_its_bound_and_half_a_step_of_its_code(
    shape, seed, exponent, config, num_sites
):
    """No code needs the clamp, which kernels leave out: a scale is rounded down by at most 2^-8, 0.496 of 127 steps."""
    coefficients = Compensator(config).coefficients
    state = CompactState(shape, CPU, coefficients)
    for site in range(num_sites):
        residual = draw(shape, seed + site, exponent)
        if site % 3 == 2:  # near the bound: every value of the same size, signs as the state's
            amax = residual.abs().amax()
            residual = torch.where(state.correction() < 0, -amax, amax)
        values = next_values(state, residual, coefficients, fresh=site == 0)
        bounds = state._bounds(_blocks(residual).abs().amax(-1), fresh=site == 0)
        state.store(*values, residual, fresh=site == 0)
        for exact, bound, read, scale, highest in (
            (values[0], bounds[0], state.correction(), state.correction_scale, 127),
            (values[1], bounds[1], state.average(), state.average_scale, 7),
        ):
            assert read.shape == shape and read.dtype is torch.float32
            steps = by_value(scale, shape[-1])
            assert (exact.abs() <= by_value(bound, shape[-1])).all()
            assert (exact.double().abs() * (1 / steps).double()).max() < highest + 0.5
            assert ((read - exact).abs() <= 0.5001 * steps).all()
            assert (scale.float() <= torch.maximum(bound / highest * (1 + 2.0**-8), torch.tensor(2.0**-126))).all()


@common
@given(seeds, st.integers(2, 60))
def test_scales_are_at_most_what_the_largest_residual_of_the_pass_asks_for(seed, num_sites):
    """A bound that is fed back does not grow over a pass; BF16 scales add up to 2^-8 a site to what they keep."""
    compensator = Compensator(EchoConfig(state_dtype=StateDtype.compact))
    beta1, from_average, from_residual, beta2, average_from_residual = compensator.coefficients
    residuals = draw(torch.Size((num_sites, 96)), seed)
    amax = residuals.abs().amax()
    rounding = 1 + 2.0**-8
    average = amax * average_from_residual * rounding / (1 - beta2 * rounding)
    correction = (average * abs(from_average) + amax * from_residual) * rounding / (1 - beta1 * rounding)
    compensator.apply(residuals[0])
    for residual in residuals:
        compensator.update(residual)
        state = compensator._state
        assert (state.average_scale.float() * 7 <= average * 1.001).all()
        assert (state.correction_scale.float() * 127 <= correction * 1.001).all()


@common
@given(shapes, seeds)
def test_compact_values_are_on_their_grid(shape, seed):
    """Values are whole multiples of the scale; a block whose bound over 127 is a BF16 number comes back exactly."""
    state = stored(draw(shape, seed))
    codes = state.correction() / by_value(state.correction_scale, shape[-1])
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 127
    ends = torch.full(shape, 127.0)
    assert torch.equal(stored(ends).correction(), ends)


@common
@given(st.integers(1, 200), seeds, st.data())
def test_a_non_finite_value_reads_back_as_a_block_of_nan_alone(num_values, seed, data):
    """At its site, and at every later one of the pass."""
    first, second = draw(torch.Size((2, 3, num_values)), seed)
    row, idx = data.draw(st.integers(0, 2)), data.draw(st.integers(0, num_values - 1))
    at_first = data.draw(st.booleans())
    clean, state = (Compensator(EchoConfig(state_dtype=StateDtype.compact)) for _ in range(2))
    block = slice(idx // BLOCK_VALUES * BLOCK_VALUES, (idx // BLOCK_VALUES + 1) * BLOCK_VALUES)
    for site, residual in enumerate((first, second)):
        clean.apply(residual)
        state.apply(residual)
        clean.update(residual)
        poisoned = residual.clone()
        if at_first == (site == 0):
            poisoned[row, idx] = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
        state.update(poisoned)
        if site == 0 and not at_first:
            continue
        for name in ("correction", "average"):
            read, expected = getattr(state._state, name)(), getattr(clean._state, name)()
            assert read[row, block].isnan().all()
            expected[row, block] = math.nan
            assert torch.equal(read.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@common
@given(shapes, seeds)
def test_rows_are_streams_of_their_own(shape, seed):
    residuals = [draw(shape, seed + site).view(-1, shape[-1]) for site in range(3)]

    def state_after(rows: list[torch.Tensor]) -> CompactState:
        state = CompactState(rows[0].shape, CPU, COEFFICIENTS)
        for site, residual in enumerate(rows):
            state.store(*next_values(state, residual, COEFFICIENTS, site == 0), residual, site == 0)
        return state

    together = state_after(residuals)
    rows = [state_after(list(streams)) for streams in zip(*residuals, strict=True)]
    assert torch.equal(together.correction(), torch.stack([row.correction() for row in rows]))
    assert torch.equal(together.average(), torch.stack([row.average() for row in rows]))
    assert together.num_bytes() == sum(row.num_bytes() for row in rows)


def test_compact_bytes():
    """One block by hand: bounds of 127 and 7 make the scales one; halves round to even; the rest of it is zeros."""
    state = CompactState(torch.Size((5,)), CPU, [0.0, 0.0, 127.0, 0.0, 7.0])
    correction, average = torch.tensor([127.0, -127.0, 2.5, 3.5, -0.4]), torch.tensor([7.0, -7.0, 2.5, 3.5, -0.4])
    state.store(correction, average, torch.tensor([0.0, 0.0, -1.0, 0.5, 0.0]), fresh=True)
    assert state.correction_scale.tolist() == state.average_scale.tolist() == [1.0]
    assert state.correction_codes[0].tolist() == [127, -127, 2, 4] + [0] * 28
    assert state.average_codes[0].tolist() == [15 | 1 << 4, 10 | 12 << 4] + [8 | 8 << 4] * 14


def test_the_bounds_by_hand():
    """Whole numbers and powers of two, so that no operation rounds; a second site in a block with other values."""
    state = CompactState(torch.Size((40,)), CPU, [0.5, -0.25, 127.0, 0.5, 7.0])
    ones = torch.ones(40)
    state.store(127 * ones, 7 * ones, ones, fresh=True)  # s_c = s_m = 1
    residual = torch.zeros(40)
    residual[3] = -2.0
    state.store(ones, ones, residual, fresh=False)
    correction_bounds = (127 * 0.5 + 7 * 0.25 + 2 * 127, 127 * 0.5 + 7 * 0.25)
    average_bounds = (7 * 0.5 + 2 * 7, 7 * 0.5)
    assert torch.equal(state.correction_scale, (torch.tensor(correction_bounds) / 127).bfloat16())
    assert torch.equal(state.average_scale, (torch.tensor(average_bounds) / 7).bfloat16())


def test_a_product_is_rounded_once():
    """2.5390625 / s is above 2.5 by 2^-32, which FP32 has no room for: rounded to it first, the code would be 2."""
    scale, value = 1 + 2.0**-6, 2.5390625
    assert value * (1 / torch.tensor(scale)) == 2.5
    state = stored(torch.tensor([127 * scale, value]))
    assert state.correction_scale.tolist() == [scale]
    assert state.correction_codes[0, :2].tolist() == [127, 3]


def test_tiny_blocks_use_the_smallest_scale():
    values = torch.tensor([2.0**-149, -(2.0**-126), 0.0, 3 * 2.0**-126])
    state = stored(values)
    assert state.correction_scale.tolist() == [2.0**-126]
    assert state.correction().tolist() == state.average().tolist() == [0.0, -(2.0**-126), 0.0, 3 * 2.0**-126]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [(StateDtype.bf16, 4096 * 4), (StateDtype.fp32, 4096 * 8), (StateDtype.compact, 4096 * 1.625)],
)
def test_sizes(dtype, num_bytes):
    state = make_state(dtype, torch.Size((4096,)), CPU, COEFFICIENTS)
    assert state.num_bytes() == num_bytes
    assert make_state(dtype, torch.Size((2, 4096)), CPU, COEFFICIENTS).num_bytes() == 2 * num_bytes
    held = sum(t.untyped_storage().nbytes() for t in vars(state).values() if isinstance(t, torch.Tensor))
    assert held == num_bytes, "nothing is held besides what is counted"


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [(StateDtype.bf16, torch.bfloat16), (StateDtype.fp32, torch.float32)]
)
def test_plain_states_are_rounded_to_their_type(dtype, torch_dtype):
    correction, average = draw(torch.Size((5, 77)), 0), draw(torch.Size((5, 77)), 1)
    state = make_state(dtype, correction.shape, CPU, COEFFICIENTS)
    state.store(correction, average, correction, fresh=True)
    assert torch.equal(state.correction(), correction.to(torch_dtype).float())
    assert torch.equal(state.average(), average.to(torch_dtype).float())
