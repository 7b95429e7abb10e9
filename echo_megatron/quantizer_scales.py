"""Powers of two and the 8-bit scale of the quantizer, made of the bits of FP32 values: a part of the definition."""

from __future__ import annotations

import torch
from torch import Tensor

# The 8-bit scale: 5 exponent bits, 3 mantissa bits, 2^(e - 19) * (1 + m/8); the last code is NaN.
SCALE8_MANTISSA_BITS = 3
SCALE8_EXPONENT_BIAS = 19
SCALE8_NAN = 255


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP32, built from its bits; -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def times_power_of_two(values: Tensor, exponent: Tensor) -> Tensor:
    """values * 2^exponent for |exponent| up to 252, in two exact steps and at most one rounding."""
    half = exponent >> 1
    return values * power_of_two(half) * power_of_two(exponent - half)


def exponent_for(amax: Tensor, target: int) -> Tensor:
    """E such that amax * 2^-E lies in [2^target, 2^(target+1)); 0 for amax 0."""
    _, exponent = torch.frexp(amax)
    return torch.where(amax > 0, exponent - 1 - target, torch.zeros_like(exponent)).to(torch.int32)


def encode_scale8(scale: Tensor, round_up: bool) -> Tensor:
    """int32 code of the 8-bit scale: 3 mantissa bits to nearest-even or up; below the range 0, above it NaN's code."""
    dropped = 23 - SCALE8_MANTISSA_BITS
    bits = scale.contiguous().view(torch.int32)
    bias = (1 << dropped) - 1 if round_up else (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    code = ((bits + bias) >> dropped) - ((127 - SCALE8_EXPONENT_BIAS) << SCALE8_MANTISSA_BITS)
    return code.clamp(0, SCALE8_NAN)


def decode_scale8(code: Tensor) -> Tensor:
    """The FP32 scale of an int32 code."""
    dropped = 23 - SCALE8_MANTISSA_BITS
    bits = (code + ((127 - SCALE8_EXPONENT_BIAS) << SCALE8_MANTISSA_BITS)) << dropped
    scale = bits.view(torch.float32)
    return scale.where(code != SCALE8_NAN, torch.full_like(scale, float("nan")))
