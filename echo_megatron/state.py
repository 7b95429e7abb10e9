"""How the compensator's two tensors c and m2 are stored: the definition of every `StateDtype`.

`bf16` and `fp32` store them in that type. `compact` is 13 bits a value: c in 8 bits and m2 in 4, each with one BF16
scale for a block of 32 consecutive values of a rank's stream (the last one filled up with zeros):

    s    = bf16(max(B / highest, 2^-126))                   highest = 127 for c, 7 for m2; bf16 rounds half-to-even
    code = clip(round(v * (1/s)), -highest, highest)        v^ = s * code

B bounds what the recurrence can give, so that a kernel need not hold a block of new values to find their largest. With
U = amax |u| over the block, the old scales s_c and s_m, and the compensator's coefficients (compensator.py):

    B_m = (7 s_m) beta2 + U (1-beta2)
    B_c = ((127 s_c) beta1 + (7 s_m) |eta (1-a) (beta2-beta1)|) + U eta w_0             without the old terms at first

Every operation is one FP32 rounding in the order written here, but v * (1/s), which is exact until it is rounded to a
whole number; round is half-to-even. |v| <= B, so a code is within the grid and clip changes nothing: bf16 rounds s down
by at most 2^-8, and 127 (1 + 2^-8) < 127.5. m2's codes are stored as code + 8, two a byte, the even index in the low
nibble. A block that holds NaN or Inf has a NaN scale and is read back as NaN, whatever its codes; it touches no other
block. A finite B of 2^119 or more (6.6e35) feeds nothing back: codes 0, the smallest scale. Kernels read c as a sum of
two products of 16-bit numbers with s, which would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_megatron.config import StateDtype
from echo_megatron.quantizer import divide

BLOCK_VALUES = 32
HIGHEST_CORRECTION_CODE = 127
HIGHEST_AVERAGE_CODE = 7
AVERAGE_CODE_OFFSET = 8
HIGHEST_BOUND = 2.0**119
SMALLEST_SCALE = 2.0**-126  # BF16's smallest normal number: its reciprocal is finite


class State(Protocol):
    """c and m2 of one shape."""

    def store(self, correction: Tensor, average: Tensor, residual: Tensor, fresh: bool) -> None:
        """Keeps c and m2; fp32, the state's shape.

        Args:
            correction: c.
            average: m2.
            residual: u, from which they were made.
            fresh: whether they were made from u alone: at the first site, and at every one of a memoryless compensator.
        """
        ...

    def correction(self) -> Tensor:
        """c as it is read back, fp32."""
        ...

    def average(self) -> Tensor:
        """m2 as it is read back, fp32."""
        ...

    def num_bytes(self) -> int:
        """Device memory."""
        ...


def make_state(dtype: StateDtype, shape: torch.Size, device: torch.device, coefficients: Sequence[float]) -> State:
    """An uninitialized state.

    Args:
        dtype: how it is stored.
        shape: of c and of m2, [..., n]; every row is a stream of its own.
        device: where it lives.
        coefficients: the recurrence's (`Compensator.coefficients`).
    """
    if dtype is StateDtype.compact:
        return CompactState(shape, device, coefficients)
    return PlainState(shape, torch.bfloat16 if dtype is StateDtype.bf16 else torch.float32, device)


class PlainState:
    """c and m2 as two tensors of one floating-point type."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._correction = torch.empty(shape, dtype=dtype, device=device)
        self._average = torch.empty_like(self._correction)

    def store(self, correction: Tensor, average: Tensor, residual: Tensor, fresh: bool) -> None:
        self._correction.copy_(correction)
        self._average.copy_(average)

    def correction(self) -> Tensor:
        return self._correction.to(torch.float32)

    def average(self) -> Tensor:
        return self._average.to(torch.float32)

    def num_bytes(self) -> int:
        return _num_bytes(self._correction, self._average)


class CompactState:
    """c in 8 bits, m2 in 4, a BF16 scale each for a block of 32.

    Attributes:
        correction_codes: int8 [..., blocks, 32].
        correction_scale: bf16 [..., blocks].
        average_codes: uint8 [..., blocks, 16], two codes a byte.
        average_scale: bf16 [..., blocks].
    """

    def __init__(self, shape: torch.Size, device: torch.device, coefficients: Sequence[float]) -> None:
        self._coefficients = coefficients
        self.num_values = shape[-1]
        blocks = (*shape[:-1], -(-self.num_values // BLOCK_VALUES))
        self.correction_codes = torch.empty(*blocks, BLOCK_VALUES, dtype=torch.int8, device=device)
        self.correction_scale = torch.empty(blocks, dtype=torch.bfloat16, device=device)
        self.average_codes = torch.empty(*blocks, BLOCK_VALUES // 2, dtype=torch.uint8, device=device)
        self.average_scale = torch.empty(blocks, dtype=torch.bfloat16, device=device)

    def store(self, correction: Tensor, average: Tensor, residual: Tensor, fresh: bool) -> None:
        correction_bound, average_bound = self._bounds(_blocks(residual).abs().amax(-1), fresh)
        self.correction_scale.copy_(_scale(correction_bound, HIGHEST_CORRECTION_CODE))
        self.average_scale.copy_(_scale(average_bound, HIGHEST_AVERAGE_CODE))
        correction_factor = _factor(self.correction_scale, correction_bound)
        average_factor = _factor(self.average_scale, average_bound)
        self.correction_codes.copy_(_encode(correction, correction_factor, HIGHEST_CORRECTION_CODE))
        stored = (_encode(average, average_factor, HIGHEST_AVERAGE_CODE) + AVERAGE_CODE_OFFSET).to(torch.uint8)
        self.average_codes.copy_(stored[..., 0::2] | (stored[..., 1::2] << 4))

    def _bounds(self, amax: Tensor, fresh: bool) -> tuple[Tensor, Tensor]:
        """B_c and B_m of every block, fp32."""
        beta1, from_average, from_residual, beta2, average_from_residual = self._coefficients
        correction_bound, average_bound = amax * from_residual, amax * average_from_residual
        if fresh:
            return correction_bound, average_bound
        old_correction = self.correction_scale.to(torch.float32) * HIGHEST_CORRECTION_CODE
        old_average = self.average_scale.to(torch.float32) * HIGHEST_AVERAGE_CODE
        kept = old_correction * beta1 + old_average * abs(from_average)
        return kept + correction_bound, old_average * beta2 + average_bound

    def correction(self) -> Tensor:
        return _decode(self.correction_codes.to(torch.float32), self.correction_scale, self.num_values)

    def average(self) -> Tensor:
        stored = torch.stack((self.average_codes & 0xF, self.average_codes >> 4), dim=-1).flatten(-2)
        return _decode(stored.to(torch.float32) - AVERAGE_CODE_OFFSET, self.average_scale, self.num_values)

    def num_bytes(self) -> int:
        return _num_bytes(self.correction_codes, self.correction_scale, self.average_codes, self.average_scale)


def _blocks(values: Tensor) -> Tensor:
    """fp32 [..., n] to [..., blocks, 32]."""
    return F.pad(values, (0, -values.shape[-1] % BLOCK_VALUES)).unflatten(-1, (-1, BLOCK_VALUES))


def _scale(bound: Tensor, highest: int) -> Tensor:
    scale = divide(bound, highest).clamp_min(SMALLEST_SCALE).where(bound < HIGHEST_BOUND, SMALLEST_SCALE)
    return scale.where(bound < float("inf"), float("nan")).to(torch.bfloat16)  # the comparison is False for NaN, too


def _factor(scale: Tensor, bound: Tensor) -> Tensor:
    """What values are multiplied by, fp32."""
    return (1.0 / scale.to(torch.float32)).where(bound < HIGHEST_BOUND, 0.0)


def _encode(values: Tensor, factor: Tensor, highest: int) -> Tensor:
    """fp32 [..., n] to whole numbers in fp64 [..., blocks, 32]; FP64 holds the product exactly."""
    codes = (_blocks(values).to(torch.float64) * factor.to(torch.float64).unsqueeze(-1)).round_()
    return codes.clamp_(-highest, highest).nan_to_num_(nan=0.0)


def _decode(codes: Tensor, scale: Tensor, num_values: int) -> Tensor:
    return (codes * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)[..., :num_values]


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
