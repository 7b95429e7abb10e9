"""How state is stored: the compact codes' bytes, their error, and that a poisoned block stays alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron.compensator import Compensator
from echo_megatron.config import EchoConfig, StateDtype
from echo_megatron.state import BLOCK_VALUES, CompactState, make_state

CPU = torch.device("cpu")
shapes = st.lists(st.integers(1, 4), max_size=2).flatmap(
    lambda leading: st.integers(1, 200).map(lambda n: torch.Size((*leading, n)))
)
seeds = st.integers(0, 2**31)
common = settings(max_examples=100, deadline=None)


def draw(shape: torch.Size, seed: int, exponent: int = 0) -> torch.Tensor:
    """Normal values of 2^exponent, every block of another magnitude, and some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    spread = torch.randint(-4, 5, shape, generator=generator).float().exp2()
    zero = torch.rand(shape, generator=generator) < 0.1
    return (values * spread * 2.0**exponent).masked_fill(zero, 0.0)


def stored(values: torch.Tensor) -> CompactState:
    """c of `values`; what m2 is must not matter."""
    state = CompactState(values.shape, CPU)
    state.store(values, torch.full_like(values, math.nan))
    return state


def by_value(of_block: torch.Tensor, num_values: int) -> torch.Tensor:
    """A block's number for each of its values."""
    return of_block.repeat_interleave(BLOCK_VALUES, dim=-1)[..., :num_values]


def largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of every block."""
    blocks = torch.nn.functional.pad(values, (0, -values.shape[-1] % BLOCK_VALUES)).unflatten(-1, (-1, BLOCK_VALUES))
    return blocks.abs().amax(-1)


@common
@given(shapes, seeds, st.integers(-140, 110), st.booleans())
def test_every_value_is_within_half_a_step_of_its_code(shape, seed, exponent, all_at_the_end):
    """No code needs the clamp, which kernels leave out: a scale is rounded down by at most 2^-8, 0.496 of 127 steps."""
    values = draw(shape, seed, exponent)
    if all_at_the_end:
        values = torch.where(values < 0, -1.0, 1.0) * values.abs().amax()
    state = stored(values)
    read, scale, bound = state.correction(), state.scale, largest(values)
    assert read.shape == shape and read.dtype is scale.dtype is torch.float32
    assert torch.equal(scale, scale.bfloat16().float()), "a BF16 number"
    steps = by_value(scale, shape[-1])
    assert (values.double().abs() * (1 / steps).double()).max() < 127.5
    assert ((read - values).abs() <= 0.5001 * steps).all()
    smallest = torch.tensor(2.0**-126)
    assert (scale <= torch.maximum(bound / 127 * (1 + 2.0**-8), smallest)).all(), "no coarser than the block asks for"


@common
@given(shapes, seeds)
def test_compact_values_are_on_their_grid(shape, seed):
    """Values are whole multiples of the scale; a block whose bound over 127 is a BF16 number comes back exactly."""
    state = stored(draw(shape, seed))
    codes = state.correction() / by_value(state.scale, shape[-1])
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 127
    ends = torch.full(shape, 127.0)
    assert torch.equal(stored(ends).correction(), ends)


@common
@given(st.integers(1, 200), seeds, st.sampled_from((math.nan, math.inf, -math.inf)), st.data())
def test_a_non_finite_value_reads_back_as_a_block_of_nan_alone(num_values, seed, poison, data):
    """And at its site alone: what is stored next holds nothing of it."""
    first, second = draw(torch.Size((2, 3, num_values)), seed)
    row, idx = data.draw(st.integers(0, 2)), data.draw(st.integers(0, num_values - 1))
    block = slice(idx // BLOCK_VALUES * BLOCK_VALUES, (idx // BLOCK_VALUES + 1) * BLOCK_VALUES)
    poisoned = first.clone()
    poisoned[row, idx] = poison
    clean, state = (Compensator(EchoConfig()) for _ in range(2))
    for compensator, residual in ((clean, first), (state, poisoned)):
        compensator.apply(residual)
        compensator.update(residual)
    read, expected = (compensator.correction(first.shape, CPU) for compensator in (state, clean))
    assert read[row, block].isnan().all()
    expected[row, block] = math.nan
    assert torch.equal(read.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
    for compensator in (clean, state):
        compensator.update(second)
    assert torch.equal(state.correction(first.shape, CPU), clean.correction(first.shape, CPU))


@common
@given(shapes, seeds)
def test_rows_are_streams_of_their_own(shape, seed):
    values = draw(shape, seed).view(-1, shape[-1])
    together, rows = stored(values), [stored(row) for row in values]
    assert torch.equal(together.correction(), torch.stack([row.correction() for row in rows]))
    assert together.num_bytes() == sum(row.num_bytes() for row in rows)


def test_compact_bytes():
    """One block by hand: a largest value of 127 makes the scale one; halves round to even; the rest of it is zeros."""
    state = stored(torch.tensor([127.0, -127.0, 2.5, 3.5, -0.4]))
    assert state.scale.tolist() == [1.0]
    assert state.codes[0].tolist() == [127, -127, 2, 4] + [0] * 28


def test_a_product_is_rounded_once():
    """2.5390625 / s is above 2.5 by 2^-32, which FP32 has no room for: rounded to it first, the code would be 2."""
    scale, value = 1 + 2.0**-6, 2.5390625
    assert value * (1 / torch.tensor(scale)) == 2.5
    state = stored(torch.tensor([127 * scale, value]))
    assert state.scale.tolist() == [scale]
    assert state.codes[0, :2].tolist() == [127, 3]


def test_tiny_blocks_use_the_smallest_scale():
    state = stored(torch.tensor([2.0**-149, -(2.0**-126), 0.0, 3 * 2.0**-126]))
    assert state.scale.tolist() == [2.0**-126]
    assert state.correction().tolist() == [0.0, -(2.0**-126), 0.0, 3 * 2.0**-126]


@pytest.mark.parametrize("value", [2.0**119, 3.4e38])
def test_blocks_too_large_for_the_kernels_products_feed_nothing_back(value):
    values = torch.ones(2 * BLOCK_VALUES)
    values[5] = -value
    state = stored(values)
    assert state.scale[0] == 2.0**-126
    assert state.correction()[:BLOCK_VALUES].eq(0).all(), "of the whole block"
    assert torch.equal(state.correction()[BLOCK_VALUES:], stored(torch.ones(BLOCK_VALUES)).correction())
    assert stored(torch.tensor([2.0**119 * (1 - 2.0**-24)])).correction().abs() > 2.0**118


def test_the_compact_state_has_no_average_to_read():
    with pytest.raises(NotImplementedError, match="compact keeps no average"):
        stored(torch.ones(5)).average()


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [(StateDtype.bf16, 4096 * 4), (StateDtype.fp32, 4096 * 8), (StateDtype.compact, 4096 * 1.125)],
)
def test_sizes(dtype, num_bytes):
    state = make_state(dtype, torch.Size((4096,)), CPU)
    assert state.num_bytes() == num_bytes
    assert make_state(dtype, torch.Size((2, 4096)), CPU).num_bytes() == 2 * num_bytes
    held = sum(t.untyped_storage().nbytes() for t in vars(state).values() if isinstance(t, torch.Tensor))
    assert held == num_bytes, "nothing is held besides what is counted"


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [(StateDtype.bf16, torch.bfloat16), (StateDtype.fp32, torch.float32)]
)
def test_plain_states_are_rounded_to_their_type(dtype, torch_dtype):
    correction, average = draw(torch.Size((5, 77)), 0), draw(torch.Size((5, 77)), 1)
    state = make_state(dtype, correction.shape, CPU)
    state.store(correction, average)
    assert torch.equal(state.correction(), correction.to(torch_dtype).float())
    assert torch.equal(state.average(), average.to(torch_dtype).float())
