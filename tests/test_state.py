"""How state is stored: the compact codes' bytes, their error, and that a poisoned block stays alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron.config import StateDtype
from echo_megatron.state import BLOCK_VALUES, CompactState, make_state

CPU = torch.device("cpu")
shapes = st.lists(st.integers(1, 4), max_size=2).flatmap(
    lambda leading: st.integers(1, 200).map(lambda n: torch.Size((*leading, n)))
)
common = settings(max_examples=100, deadline=None)


def draw(shape: torch.Size, seed: int, exponent: int = 0) -> torch.Tensor:
    """Normal values of 2^exponent, every block of another magnitude, and some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    spread = torch.randint(-4, 5, shape, generator=generator).float().exp2()
    zero = torch.rand(shape, generator=generator) < 0.1
    return (values * spread * 2.0**exponent).masked_fill(zero, 0.0)


def stored(correction: torch.Tensor, average: torch.Tensor) -> CompactState:
    state = CompactState(correction.shape, CPU)
    state.store(correction, average)
    return state


@common
@given(shapes, st.integers(0, 2**31), st.integers(-140, 115))
def test_compact_error_is_at_most_half_a_step(shape, seed, exponent):
    """Half a stored step, end of the grid included: a scale that BF16 rounds down clips by 127 * 2^-9 of a step."""
    correction, average = draw(shape, seed, exponent), draw(shape, seed + 1, exponent)
    state = stored(correction, average)
    for values, read, scale, highest in (
        (correction, state.correction(), state.correction_scale, 127),
        (average, state.average(), state.average_scale, 7),
    ):
        assert read.shape == shape and read.dtype is torch.float32
        steps = scale.float().repeat_interleave(BLOCK_VALUES, dim=-1)[..., : shape[-1]]
        assert ((read - values).abs() <= 0.5001 * steps).all()
        assert read[values == 0].eq(0).all()
        amax = values.abs().amax(-1, keepdim=True)
        assert (scale.float() <= torch.maximum(amax / highest * (1 + 2.0**-8), torch.tensor(2.0**-126))).all()


@common
@given(shapes, st.integers(0, 2**31))
def test_compact_values_are_on_their_grid(shape, seed):
    """Values are whole multiples of the scale; a block whose amax over 127 is a BF16 number comes back exactly."""
    state = stored(draw(shape, seed), draw(shape, seed + 1))
    codes = state.correction() / state.correction_scale.float().repeat_interleave(32, dim=-1)[..., : shape[-1]]
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 127
    ones = torch.full(shape, 127.0)
    assert torch.equal(stored(ones, ones).correction(), ones)


@common
@given(st.integers(1, 200), st.integers(0, 2**31), st.data())
def test_a_non_finite_value_reads_back_as_a_block_of_nan_alone(num_values, seed, data):
    values = draw(torch.Size((3, num_values)), seed)
    row, idx = data.draw(st.integers(0, 2)), data.draw(st.integers(0, num_values - 1))
    clean = stored(values, values)
    poisoned = values.clone()
    poisoned[row, idx] = data.draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    state = stored(poisoned, poisoned)
    block = slice(idx // BLOCK_VALUES * BLOCK_VALUES, (idx // BLOCK_VALUES + 1) * BLOCK_VALUES)
    for read, expected in ((state.correction(), clean.correction()), (state.average(), clean.average())):
        assert read[row, block].isnan().all()
        expected[row, block] = math.nan
        assert torch.equal(read.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@common
@given(shapes, st.integers(0, 2**31))
def test_rows_are_streams_of_their_own(shape, seed):
    correction, average = draw(shape, seed).view(-1, shape[-1]), draw(shape, seed + 1).view(-1, shape[-1])
    together = stored(correction, average)
    rows = [stored(c, m2) for c, m2 in zip(correction, average, strict=True)]
    assert torch.equal(together.correction(), torch.stack([row.correction() for row in rows]))
    assert torch.equal(together.average(), torch.stack([row.average() for row in rows]))
    assert together.num_bytes() == sum(row.num_bytes() for row in rows)


def test_compact_bytes():
    """One block by hand: amax 127 and 7 make the scales one; halves round to even; the rest of the block is zeros."""
    state = stored(torch.tensor([127.0, -127.0, 2.5, 3.5, -0.4]), torch.tensor([7.0, -7.0, 2.5, 3.5, -0.4]))
    assert state.correction_scale.tolist() == state.average_scale.tolist() == [1.0]
    assert state.correction_codes[0].tolist() == [127, -127, 2, 4] + [0] * 28
    assert state.average_codes[0].tolist() == [15 | 1 << 4, 10 | 12 << 4] + [8 | 8 << 4] * 14


def test_tiny_blocks_use_the_smallest_scale():
    values = torch.tensor([2.0**-149, -(2.0**-126), 0.0, 3 * 2.0**-126])
    state = stored(values, values)
    assert state.correction_scale.tolist() == [2.0**-126]
    assert state.correction().tolist() == state.average().tolist() == [0.0, -(2.0**-126), 0.0, 3 * 2.0**-126]


@pytest.mark.parametrize(
    ("dtype", "num_bytes"),
    [(StateDtype.bf16, 4096 * 4), (StateDtype.fp32, 4096 * 8), (StateDtype.compact, 4096 * 1.625)],
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
