"""How the compensator's two tensors c and m2 are stored: the definition of every `StateDtype`.

`bf16` and `fp32` store them in that type. `compact` is 13 bits a value: c in 8 bits and m2 in 4, each with one BF16
scale for a block of 32 consecutive values of a rank's stream (the last one filled up with zeros):

    s    = bf16(max(amax |v| / highest, 2^-126))            highest = 127 for c, 7 for m2; bf16 rounds half-to-even
    code = clip(round(v * (1/s)), -highest, highest)        v^ = s * code

Every operation is one FP32 rounding in the order written here; round is half-to-even. m2's codes are stored as
code + 8, two a byte, the even index in the low nibble. A block that holds NaN or Inf has a NaN scale
and is read back as NaN, whatever its codes; it touches no other block.
"""

from __future__ import annotations

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
SMALLEST_SCALE = 2.0**-126  # BF16's smallest normal number: its reciprocal is finite


class State(Protocol):
    """c and m2 of one shape."""

    def store(self, correction: Tensor, average: Tensor) -> None:
        """Keeps c and m2; fp32, the state's shape."""
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


def make_state(dtype: StateDtype, shape: torch.Size, device: torch.device) -> State:
    """An uninitialized state.

    Args:
        dtype: how it is stored.
        shape: of c and of m2, [..., n]; every row is a stream of its own.
        device: where it lives.
    """
    if dtype is StateDtype.compact:
        return CompactState(shape, device)
    return PlainState(shape, torch.bfloat16 if dtype is StateDtype.bf16 else torch.float32, device)


class PlainState:
    """c and m2 as two tensors of one floating-point type."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self._correction = torch.empty(shape, dtype=dtype, device=device)
        self._average = torch.empty_like(self._correction)

    def store(self, correction: Tensor, average: Tensor) -> None:
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

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.num_values = shape[-1]
        blocks = (*shape[:-1], -(-self.num_values // BLOCK_VALUES))
        self.correction_codes = torch.empty(*blocks, BLOCK_VALUES, dtype=torch.int8, device=device)
        self.correction_scale = torch.empty(blocks, dtype=torch.bfloat16, device=device)
        self.average_codes = torch.empty(*blocks, BLOCK_VALUES // 2, dtype=torch.uint8, device=device)
        self.average_scale = torch.empty(blocks, dtype=torch.bfloat16, device=device)

    def store(self, correction: Tensor, average: Tensor) -> None:
        codes, scale = _encode(correction, HIGHEST_CORRECTION_CODE)
        self.correction_codes.copy_(codes)
        self.correction_scale.copy_(scale)
        codes, scale = _encode(average, HIGHEST_AVERAGE_CODE)
        stored = (codes + AVERAGE_CODE_OFFSET).to(torch.uint8)
        self.average_codes.copy_(stored[..., 0::2] | (stored[..., 1::2] << 4))
        self.average_scale.copy_(scale)

    def correction(self) -> Tensor:
        return _decode(self.correction_codes.to(torch.float32), self.correction_scale, self.num_values)

    def average(self) -> Tensor:
        stored = torch.stack((self.average_codes & 0xF, self.average_codes >> 4), dim=-1).flatten(-2)
        return _decode(stored.to(torch.float32) - AVERAGE_CODE_OFFSET, self.average_scale, self.num_values)

    def num_bytes(self) -> int:
        return _num_bytes(self.correction_codes, self.correction_scale, self.average_codes, self.average_scale)


def _encode(values: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """fp32 [..., n] to whole numbers in fp32 [..., blocks, 32] and the bf16 scale [..., blocks]."""
    blocks = F.pad(values, (0, -values.shape[-1] % BLOCK_VALUES)).unflatten(-1, (-1, BLOCK_VALUES))
    amax = blocks.abs().amax(-1)
    scale = divide(amax, highest).clamp_min(SMALLEST_SCALE)
    scale = scale.where(amax < float("inf"), float("nan")).to(torch.bfloat16)  # the comparison is False for NaN, too
    reciprocal = 1.0 / scale.to(torch.float32)
    codes = (blocks * reciprocal.unsqueeze(-1)).round_().clamp_(-highest, highest).nan_to_num_(nan=0.0)
    return codes, scale


def _decode(codes: Tensor, scale: Tensor, num_values: int) -> Tensor:
    return (codes * scale.to(torch.float32).unsqueeze(-1)).flatten(-2)[..., :num_values]


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
