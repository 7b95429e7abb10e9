"""How the compensator's tensors c and m2 are stored: the definition of every `StateDtype`.

`bf16` and `fp32` store both in that type. `compact` is for a compensator without memory of earlier sites
(beta1 = beta2 = 0), whose update reads neither: it stores c alone, in 8 bits, with one BF16 scale for a block of 32
consecutive values of a rank's stream (the last one filled up with zeros):

    B    = amax |c|                                         over the block
    s    = bf16(max(B / 127, 2^-126))                       bf16 rounds half-to-even
    code = clip(round(c * (1/s)), -127, 127)                c^ = s * code

Every operation is one FP32 rounding in the order written here, but c * (1/s), which is exact until it is rounded to a
whole number; round is half-to-even. |c| <= B, so a code is within the grid and clip changes nothing: bf16 rounds s down
by at most 2^-8, and 127 (1 + 2^-8) < 127.5. A block that holds NaN or Inf has a NaN scale and is read back as NaN,
whatever its codes; it touches no other block. A finite B of 2^119 or more (6.6e35) feeds nothing back: codes 0, the
smallest scale. Kernels read c as a sum of two products of 16-bit numbers with s, which would overflow.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_megatron.config import StateDtype
from echo_megatron.quantizer import divide

BLOCK_VALUES = 32
HIGHEST_CODE = 127
HIGHEST_BOUND = 2.0**119
SMALLEST_SCALE = 2.0**-126  # BF16's smallest normal number: its reciprocal is finite


class State(Protocol):
    """c, and m2 where it is kept, of one shape."""

    def store(self, correction: Tensor, average: Tensor) -> None:
        """Keeps c and m2; fp32, the state's shape."""
        ...

    def correction(self) -> Tensor:
        """c as it is read back, fp32."""
        ...

    def average(self) -> Tensor:
        """m2 as it is read back, fp32.

        Raises:
            NotImplementedError: it is not kept.
        """
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
    """c in 8 bits, a BF16 scale for a block of 32.

    Attributes:
        codes: int8 [..., blocks, 32].
        scale: fp32 [..., blocks]; BF16 numbers, in the four bytes that a kernel's thread copies at a time.
    """

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self.num_values = shape[-1]
        blocks = (*shape[:-1], -(-self.num_values // BLOCK_VALUES))
        self.codes = torch.empty(*blocks, BLOCK_VALUES, dtype=torch.int8, device=device)
        self.scale = torch.empty(blocks, dtype=torch.float32, device=device)

    def store(self, correction: Tensor, average: Tensor) -> None:
        blocks = F.pad(correction, (0, -self.num_values % BLOCK_VALUES)).unflatten(-1, (-1, BLOCK_VALUES))
        bound = blocks.abs().amax(-1)
        scale = divide(bound, HIGHEST_CODE).clamp_min(SMALLEST_SCALE).where(bound < HIGHEST_BOUND, SMALLEST_SCALE)
        scale = scale.where(bound < float("inf"), float("nan"))  # the comparison is False for NaN, too
        self.scale.copy_(scale.to(torch.bfloat16))
        factor = (1.0 / self.scale).where(bound < HIGHEST_BOUND, 0.0).unsqueeze(-1)
        codes = (blocks.to(torch.float64) * factor.to(torch.float64)).round_()  # FP64 holds the product exactly
        self.codes.copy_(codes.clamp_(-HIGHEST_CODE, HIGHEST_CODE).nan_to_num_(nan=0.0))

    def correction(self) -> Tensor:
        values = self.codes.to(torch.float32) * self.scale.unsqueeze(-1)
        return values.flatten(-2)[..., : self.num_values]

    def average(self) -> Tensor:
        raise NotImplementedError("state_dtype=compact keeps no average")

    def num_bytes(self) -> int:
        return _num_bytes(self.codes, self.scale)


def _num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
