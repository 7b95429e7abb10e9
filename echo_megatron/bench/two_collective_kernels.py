"""Triton kernels of the two-collective baseline: quantize, sum and quantize again, dequantize; each one pass.

A program handles `GROUPS` groups of 128 values. Segment s of the record buffer begins at s * record; a group's codes at
group * 128 bits/8 bytes, its FP16 scale behind the segment's codes. Imported where there is a GPU: Triton is part of
PyTorch's CUDA wheels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
GROUPS = 16  # groups a program: 16 B a thread and load at four warps


@triton.jit
def _store(values, codes_ptr, scales_ptr, group, mask, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Encode fp32 [GROUPS, 128] as the groups `group` of one segment."""
    HIGHEST: tl.constexpr = 2 ** (BITS - 1) - 1
    scale = (tl.max(tl.abs(values), axis=1) * (1.0 / HIGHEST)).to(tl.float16)
    wide = scale.to(tl.float32)
    reciprocal = tl.where(wide > 0, 1.0 / wide, 0.0)
    scaled = values * reciprocal[:, None]
    # To nearest even: adding 1.5 * 2^23 leaves the rounded integer in the low mantissa bits.
    rounded = (scaled + 12582912.0) - 12582912.0
    codes = (tl.minimum(tl.maximum(rounded, -HIGHEST), HIGHEST) + 2 ** (BITS - 1)).to(tl.int32)
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, (GROUPS, 64, 2)))
        codes = low | (high << 4)
    WIDTH: tl.constexpr = 128 * BITS // 8
    offsets = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(codes_ptr + offsets, codes.to(tl.uint8), mask=mask[:, None])
    tl.store(scales_ptr + group, scale, mask=mask)


@triton.jit
def _load(codes_ptr, scales_ptr, group, mask, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Decode the groups `group` of one segment to fp32 [GROUPS, 128]."""
    WIDTH: tl.constexpr = 128 * BITS // 8
    offsets = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    codes = tl.load(codes_ptr + offsets, mask=mask[:, None], other=0).to(tl.int32)
    if BITS == 4:
        codes = tl.reshape(tl.join(codes & 15, codes >> 4), (GROUPS, 128))
    scale = tl.load(scales_ptr + group, mask=mask, other=0.0).to(tl.float32)
    return (codes - 2 ** (BITS - 1)).to(tl.float32) * scale[:, None]


@triton.jit
def _quantize(x_ptr, codes_ptr, scales_ptr, num_values, groups, record, BITS: tl.constexpr, GROUPS: tl.constexpr):
    segment = tl.program_id(1).to(tl.int64)
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    mask = group < groups
    at = (segment * groups + group)[:, None] * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x_ptr + at, mask=mask[:, None] & (at < num_values), other=0.0).to(tl.float32)
    _store(values, codes_ptr + segment * record, scales_ptr + segment * (record // 2), group, mask, BITS, GROUPS)


@triton.jit
def _reduce(
    codes_ptr, scales_ptr, to_codes_ptr, to_scales_ptr, groups, record, P: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    mask = group < groups
    total = tl.zeros((GROUPS, 128), dtype=tl.float32)
    for rank in tl.static_range(P):
        total += _load(codes_ptr + rank * record, scales_ptr + rank * (record // 2), group, mask, BITS, GROUPS)
    _store(total, to_codes_ptr, to_scales_ptr, group, mask, BITS, GROUPS)


@triton.jit
def _dequantize(codes_ptr, scales_ptr, y_ptr, num_values, groups, record, BITS: tl.constexpr, GROUPS: tl.constexpr):
    segment = tl.program_id(1).to(tl.int64)
    group = (tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)).to(tl.int64)
    mask = group < groups
    values = _load(codes_ptr + segment * record, scales_ptr + segment * (record // 2), group, mask, BITS, GROUPS)
    at = (segment * groups + group)[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(y_ptr + at, values.to(y_ptr.dtype.element_ty), mask=mask[:, None] & (at < num_values))


def quantize(x: Tensor, world_size: int, length: int, record: int, bits: int) -> Tensor:
    """[n] to uint8 [P, record]."""
    records = torch.empty(world_size, record, dtype=torch.uint8, device=x.device)
    groups = length // GROUP
    grid = (-(-groups // GROUPS), world_size)
    _launch(_quantize, grid, x, *_parts(records, length, bits), x.numel(), groups, record, BITS=bits)
    return records


def reduce(records: Tensor, length: int, bits: int) -> Tensor:
    """uint8 [P, record] to [record]."""
    result = torch.empty_like(records[0])
    groups = length // GROUP
    parts = (*_parts(records, length, bits), *_parts(result, length, bits))
    _launch(_reduce, (-(-groups // GROUPS),), *parts, groups, records.shape[1], P=records.shape[0], BITS=bits)
    return result


def dequantize(records: Tensor, like: Tensor, length: int, bits: int) -> Tensor:
    """uint8 [P, record] to a tensor like `like`."""
    y = torch.empty_like(like)
    groups = length // GROUP
    grid = (-(-groups // GROUPS), records.shape[0])
    _launch(_dequantize, grid, *_parts(records, length, bits), y, y.numel(), groups, records.shape[1], BITS=bits)
    return y


def _parts(records: Tensor, length: int, bits: int) -> tuple[Tensor, Tensor]:
    """Where codes and scales of the first segment begin; both types' strides from segment to segment are `record`."""
    flat = records.view(-1)
    return flat, flat[length * bits // 8 :].view(torch.float16)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    kernel[grid](*arguments, **constants, GROUPS=GROUPS, num_warps=4)
