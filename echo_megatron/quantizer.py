"""The group quantizers (paper Sec. 4.3) and the wire record, in PyTorch: the definition that kernels match bit for bit.

A stream of FP32 values is cut into tiles of 4,096 values and groups of `group_size`. A tile has a power-of-two exponent
E, a group a scale s (and, for asymmetric policies, a zero-point z); value v becomes code q and is read back as v^:

    q  = clip(round((v * 2^-E) * (1/s) + z), lowest, highest)        v^ = (s * 2^E) * (q - z)

Every operation is one FP32 rounding in the order written here: no contraction, no approximate division; round is
half-to-even. s and z are the *stored* values, so sender and receivers mean the same grid. Codes are stored unsigned:
symmetric policies store q + 2^(bits-1).

Wire record of a stream, tile after tile, little-endian, every part 16-byte aligned:

    header   16 B   int16 E, 14 B zero
    params          per group: s fp16 [z fp16]  |  rotated: s in 8 bits [z in 8 bits]
    codes           4 bits: two a byte, the even index in the low nibble; 8 bits: one a byte

A group that holds NaN or Inf has a NaN scale and decodes to NaN; it touches no other group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_megatron.config import Policy, Rescale
from echo_megatron.quantizer_scales import (
    SCALE8_NAN,
    decode_scale8,
    encode_scale8,
    exponent_for,
    power_of_two,
    times_power_of_two,
)

TILE_VALUES = 4096
HEADER_BYTES = 16
ALIGNMENT_BYTES = 16
ROTATION_BLOCK = 32

# A tile's largest magnitude is brought into [2^14, 2^15): its scales fit FP16 and the 8-bit scale, with room around.
TILE_TARGET_EXPONENT = 14
# One exponent a call is chosen before contributions are summed (8 ranks: 3 bits) and compensated. A correction is not
# of this site's size: behind a site of massive activations it may be hundreds of times what the next one sums...
GROUP_HEADROOM_BITS = 12
# ...and before a block of 32 is rotated without scaling (5 bits).
ROTATION_HEADROOM_BITS = 5

FP16_SMALLEST = 2.0**-24
# A one-sided group's scale is at least 2^-10 of its largest magnitude: the FP16 zero-point is exact to half a step.
FARTHEST_ZERO_POINT = 2.0**-10


@dataclass
class Quantized:
    """A quantized stream of shape [..., n], its last tile padded.

    Attributes:
        codes: uint8 [..., tiles, groups, group_size], unsigned.
        scale: fp32 [..., tiles, groups], the stored scale in units of 2^exponent; NaN marks a non-finite group.
        zero: fp32 [..., tiles, groups], the stored zero-point in unsigned codes.
        params: uint8 [..., tiles, groups, bytes a group], scale and zero-point as they travel.
        exponent: int32 [..., tiles].
        num_values: n.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    params: Tensor
    exponent: Tensor
    num_values: int


class Quantizer:
    """One policy at one bit width and group size.

    Args:
        bits: 4 or 8.
        policy: the group quantizer.
        group_size: values a group; 32, 64, 128 or 256.
        rescale: `tile` chooses the exponent of each tile from its own range; otherwise `quantize` is given one.
    """

    def __init__(self, bits: int, policy: Policy, group_size: int, rescale: Rescale = Rescale.tile) -> None:
        self.bits = bits
        self.policy = policy
        self.group_size = group_size
        self.rescale = rescale
        self.rotates = policy in (Policy.rotated, Policy.rotated_asymmetric)
        self.is_symmetric = policy in (Policy.symmetric, Policy.rotated)
        self.param_bytes = (1 if self.rotates else 2) * (1 if self.is_symmetric else 2)
        self.groups_per_tile = TILE_VALUES // group_size
        self.highest_code = 2 ** (bits - 1) - 1 if self.is_symmetric else 2**bits - 1
        self.code_offset = 2 ** (bits - 1) if self.is_symmetric else 0
        # To nearest, 3 mantissa bits clip the ends of a 4-bit grid by less than a step and give the smaller mean error;
        # an 8-bit grid would lose 8 steps at its ends, so there the scale is rounded up.
        self.scale8_rounds_up = bits == 8
        # 8-bit zero-points: eighths over [-8, 24) at 4 bits, integers over [0, 256) at 8 bits.
        self.zero8_step, self.zero8_lowest = (0.125, -8.0) if bits == 4 else (1.0, 0.0)

    @property
    def error_bound_steps(self) -> float:
        """Largest |v^ - v| of a finite group in stored steps s * 2^E: half a step, plus what stored parameters cost.

        The scale is rounded to 11 bits (FP16) or 4 (8-bit, nearest), which clips the ends of the grid; the zero-point
        moves by half a step where it is made an integer and by half its own spacing where it is not.
        """
        span = 2**self.bits - 1
        if self.is_symmetric:
            return 0.5  # clipping stays below it: 7/16 of a step at 4 bits, 127/2048 at 8
        if self.rotates:
            return 0.5 + (0.0 if self.scale8_rounds_up else span / 16) + self.zero8_step / 2
        return 0.5 + span / 2048 + 1 / 16

    # -- sizes

    def num_basis_values(self, num_values: int) -> int:
        """Length of a tensor of `num_values` in the working basis: rotated policies fill the last block of 32."""
        return -(-num_values // ROTATION_BLOCK) * ROTATION_BLOCK if self.rotates else num_values

    def num_bytes(self, num_values: int) -> int:
        """Bytes of the wire record of a stream of `num_values` values of the working basis."""
        full, rest = divmod(num_values, TILE_VALUES)
        return full * self._tile_bytes(TILE_VALUES) + (self._tile_bytes(rest) if rest else 0)

    def _param_region_bytes(self, num_values: int) -> int:
        return _align(-(-num_values // self.group_size) * self.param_bytes)

    def _code_region_bytes(self, num_values: int) -> int:
        return _align(-(-num_values * self.bits // 8))

    def _tile_bytes(self, num_values: int) -> int:
        return HEADER_BYTES + self._param_region_bytes(num_values) + self._code_region_bytes(num_values)

    # -- working basis

    def to_basis(self, x: Tensor) -> Tensor:
        """Flattens `x` in contiguous order to FP32 in the basis where it is quantized, summed and compensated.

        Args:
            x: any shape and strides, bf16, fp16 or fp32; leading dimensions are not kept.
        """
        return self.rows_to_basis(x.reshape(1, -1))[0]

    def rows_to_basis(self, x: Tensor) -> Tensor:
        """As `to_basis` for every row of `x` [rows, n]."""
        values = x.to(torch.float32)
        if not self.rotates:
            return values
        values = F.pad(values, (0, self.num_basis_values(x.shape[-1]) - x.shape[-1]))
        return hadamard(values)

    def from_basis(self, values: Tensor, num_values: int) -> Tensor:
        """The inverse of `to_basis`, still FP32: [..., basis values] to [..., num_values]."""
        if not self.rotates:
            return values
        return (hadamard(values) * (1.0 / ROTATION_BLOCK))[..., :num_values]

    # -- quantize

    def call_exponent(self, amax: Tensor) -> Tensor:
        """The exponent of `rescale: group` from the largest finite |x| over the ranks (paper Sec. 5.4), int32."""
        headroom = GROUP_HEADROOM_BITS + (ROTATION_HEADROOM_BITS if self.rotates else 0)
        return exponent_for(amax, TILE_TARGET_EXPONENT - headroom)

    def quantize(self, values: Tensor, exponent: Tensor | None = None) -> Quantized:
        """Quantizes streams.

        Args:
            values: fp32 [..., n], n >= 1, in the working basis; every row is a stream of its own.
            exponent: int32 scalar for `rescale: group`; with None `tile` chooses by tile and `none` uses 0.
        """
        num_values = values.shape[-1]
        groups = _pad_to_tiles(values, self.group_size).unflatten(-1, (-1, self.groups_per_tile, self.group_size))
        lo, hi = torch.aminmax(groups, dim=-1)
        finite = torch.maximum(-lo, hi) < float("inf")  # False for NaN, too
        lo, hi = lo.where(finite, 0.0), hi.where(finite, 0.0)
        tile_exponent = self._tile_exponent(torch.maximum(-lo, hi), exponent)
        shift = -tile_exponent.unsqueeze(-1)
        lo, hi = times_power_of_two(lo, shift), times_power_of_two(hi, shift)
        scale, zero, params = self._parameters(lo, hi, finite)

        # 2^-E may exceed FP32's largest power of two when the tile is tiny: the rest of it goes into the reciprocal.
        first = shift.clamp(-126, 127)
        reciprocal = (1.0 / scale) * power_of_two(shift - first)
        codes = (groups * power_of_two(first).unsqueeze(-1)).mul_(reciprocal.unsqueeze(-1))
        lowest = 0 if not self.is_symmetric else -self.highest_code
        if not self.is_symmetric:
            codes.add_(zero.unsqueeze(-1))
        codes.round_().clamp_(lowest, self.highest_code).nan_to_num_(nan=lowest)
        stored = codes.add_(self.code_offset).to(torch.uint8)
        return Quantized(stored, scale, zero, params, tile_exponent, num_values)

    def dequantize(self, quantized: Quantized) -> Tensor:
        """fp32 [..., n] values that every holder of the record reads."""
        step = times_power_of_two(quantized.scale, quantized.exponent.unsqueeze(-1))
        values = quantized.codes.to(torch.float32).sub_(quantized.zero.unsqueeze(-1)).mul_(step.unsqueeze(-1))
        return values.flatten(-3)[..., : quantized.num_values]

    def _tile_exponent(self, amax: Tensor, exponent: Tensor | None) -> Tensor:
        tile_shape = amax.shape[:-1]
        if exponent is not None:
            return exponent.to(torch.int32).expand(tile_shape)
        if self.rescale is Rescale.tile:
            return exponent_for(amax.amax(-1), TILE_TARGET_EXPONENT)
        return torch.zeros(tile_shape, dtype=torch.int32, device=amax.device)

    def _parameters(self, lo: Tensor, hi: Tensor, finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        amax = torch.maximum(-lo, hi)
        if self.is_symmetric:
            scale, scale_bytes = self._store_scale(divide(amax, self.highest_code), finite)
            return scale, torch.full_like(scale, self.code_offset), scale_bytes
        if self.rotates:
            return self._parameters8(lo, hi, finite)
        scale = torch.maximum(divide(hi - lo, self.highest_code), amax * FARTHEST_ZERO_POINT)
        scale = scale.where(hi != lo, amax)  # a constant group: code 0 and zero-point -+1 give the constant itself
        scale, scale_bytes = self._store_scale(scale, finite)
        zero = self._blended_zero(lo, hi, scale).to(torch.float16)
        zero = zero.where(scale.isfinite(), torch.zeros_like(zero))
        return scale, zero.to(torch.float32), torch.cat((scale_bytes, _bytes_of(zero)), dim=-1)

    def _parameters8(self, lo: Tensor, hi: Tensor, finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """8-bit scale and zero-point; a group too far from zero for the zero-point's range is widened to reach zero."""
        highest_zero = self.zero8_lowest + 255 * self.zero8_step
        span = divide(hi - lo, self.highest_code)
        far = (-lo < span * self.zero8_lowest) | (-lo > span * highest_zero) | (hi == lo)
        lo, hi = lo.where(~far, lo.clamp_max(0.0)), hi.where(~far, hi.clamp_min(0.0))
        scale, scale_bytes = self._store_scale(divide(hi - lo, self.highest_code), finite)
        zero = self._blended_zero(lo, hi, scale)
        stored = ((zero - self.zero8_lowest) / self.zero8_step).round().clamp(0, 255).nan_to_num(nan=0.0)
        zero = stored * self.zero8_step + self.zero8_lowest
        return scale, zero, torch.cat((scale_bytes, stored.to(torch.uint8).unsqueeze(-1)), dim=-1)

    def _blended_zero(self, lo: Tensor, hi: Tensor, scale: Tensor) -> Tensor:
        """The real zero-point, moved to the integer as far as the group straddles zero; `naive` leaves it real."""
        reciprocal = 1.0 / scale
        zero = 0.0 - lo * reciprocal  # never -0, whichever zero the minimum was
        if self.policy is Policy.naive:
            return zero
        straddle = (torch.minimum(-lo, hi) * reciprocal).clamp(0.0, 1.0)
        return zero + straddle * (zero.round() - zero)

    def _store_scale(self, scale: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """The scale as stored, and its bytes [..., 1 or 2]; overflow, possible without rescaling only, becomes NaN."""
        nan = float("nan")
        if not self.rotates:
            half = scale.clamp_min(FP16_SMALLEST).to(torch.float16)
            half = half.where(finite & half.isfinite(), torch.full_like(half, nan))
            return half.to(torch.float32), _bytes_of(half)
        code = encode_scale8(scale, self.scale8_rounds_up)
        code = code.where(finite, torch.full_like(code, SCALE8_NAN))
        return decode_scale8(code), code.to(torch.uint8).unsqueeze(-1)

    # -- wire record

    def encode(self, values: Tensor, exponent: Tensor | None = None) -> Tensor:
        """`pack(quantize(values))`: fp32 [..., n] to uint8 [..., num_bytes(n)]."""
        return self.pack(self.quantize(values, exponent))

    def decode(self, record: Tensor, num_values: int) -> Tensor:
        """`dequantize(unpack(record))`: uint8 [..., num_bytes(n)] to fp32 [..., n]."""
        return self.dequantize(self.unpack(record, num_values))

    def pack(self, quantized: Quantized) -> Tensor:
        """The wire record, uint8 [..., num_bytes(n)]."""
        full, rest = divmod(quantized.num_values, TILE_VALUES)
        exponent = quantized.exponent
        header = torch.zeros(*exponent.shape, HEADER_BYTES // 2, dtype=torch.int16, device=exponent.device)
        header[..., 0] = exponent
        parts = (header.view(torch.uint8), quantized.params.flatten(-2), self._pack_codes(quantized.codes.flatten(-2)))
        record = torch.cat([part[..., :full, :] for part in parts], dim=-1).flatten(-2)
        if not rest:
            return record
        params, codes = parts[1][..., full, :], parts[2][..., full, :]
        num_params, num_codes = -(-rest // self.group_size) * self.param_bytes, -(-rest * self.bits // 8)
        short = (
            parts[0][..., full, :],
            _pad_bytes(params[..., :num_params]),
            _pad_bytes(codes[..., :num_codes]),
        )
        return torch.cat((record, *short), dim=-1)

    def unpack(self, record: Tensor, num_values: int) -> Quantized:
        """The inverse of `pack`.

        Raises:
            ValueError: the record's length is not that of `num_values` values.
        """
        expected = self.num_bytes(num_values)
        if record.dtype is not torch.uint8 or record.shape[-1] != expected:
            raise ValueError(
                f"wire record of {num_values} values at {self.bits} bits: expected {expected} bytes of uint8, "
                f"got {record.shape[-1]} of {record.dtype}"
            )
        full, rest = divmod(num_values, TILE_VALUES)
        tiles = record[..., : full * self._tile_bytes(TILE_VALUES)].unflatten(-1, (full, -1)) if full else None
        if rest:
            short = self._expand_short_tile(record[..., expected - self._tile_bytes(rest) :], rest).unsqueeze(-2)
            tiles = short if tiles is None else torch.cat((tiles, short), dim=-2)
        assert tiles is not None
        sizes = (HEADER_BYTES, self._param_region_bytes(TILE_VALUES), self._code_region_bytes(TILE_VALUES))
        header, params, codes = tiles.split(sizes, dim=-1)
        exponent = header[..., :2].contiguous().view(torch.int16)[..., 0].to(torch.int32)
        params = params.unflatten(-1, (self.groups_per_tile, self.param_bytes))
        scale, zero = self._read_parameters(params)
        codes = self._unpack_codes(codes).unflatten(-1, (self.groups_per_tile, self.group_size))
        return Quantized(codes, scale, zero, params, exponent, num_values)

    def _expand_short_tile(self, short: Tensor, num_values: int) -> Tensor:
        header, params, codes = short.split(
            (HEADER_BYTES, self._param_region_bytes(num_values), self._code_region_bytes(num_values)), dim=-1
        )
        params = F.pad(params, (0, self._param_region_bytes(TILE_VALUES) - params.shape[-1]))
        codes = F.pad(codes, (0, self._code_region_bytes(TILE_VALUES) - codes.shape[-1]))
        return torch.cat((header, params, codes), dim=-1)

    def _read_parameters(self, params: Tensor) -> tuple[Tensor, Tensor]:
        scale_bytes = params[..., : 1 if self.rotates else 2].contiguous()
        if self.rotates:
            scale = decode_scale8(scale_bytes[..., 0].to(torch.int32))
        else:
            scale = scale_bytes.view(torch.float16)[..., 0].to(torch.float32)
        if self.is_symmetric:
            return scale, torch.full_like(scale, self.code_offset)
        zero_bytes = params[..., 1 if self.rotates else 2 :].contiguous()
        if self.rotates:
            return scale, zero_bytes[..., 0].to(torch.float32) * self.zero8_step + self.zero8_lowest
        return scale, zero_bytes.view(torch.float16)[..., 0].to(torch.float32)

    def _pack_codes(self, codes: Tensor) -> Tensor:
        return codes if self.bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)

    def _unpack_codes(self, packed: Tensor) -> Tensor:
        if self.bits == 8:
            return packed
        return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def divide(values: Tensor, divisor: float) -> Tensor:
    """values / divisor, correctly rounded. PyTorch multiplies a CUDA tensor by the reciprocal of a Python number."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def hadamard(values: Tensor) -> Tensor:
    """Unnormalized Hadamard transform of every block of 32 values of the last dimension, butterflies of stride 1 to 16.

    Its own inverse up to a factor 32. The order is part of the definition: FP32 sums round.
    """
    blocks = values.unflatten(-1, (-1, ROTATION_BLOCK)).flatten(0, -2)
    lanes = blocks.t().contiguous()  # one row a position of the block: every butterfly works on whole rows
    stride = 1
    while stride < ROTATION_BLOCK:
        pairs = lanes.view(-1, 2, stride, lanes.shape[1])
        lanes = torch.empty_like(lanes)
        butterflies = lanes.view_as(pairs)
        torch.add(pairs[:, 0], pairs[:, 1], out=butterflies[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=butterflies[:, 1])
        stride *= 2
    return lanes.t().contiguous().view(values.shape)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _pad_bytes(part: Tensor) -> Tensor:
    return F.pad(part, (0, _align(part.shape[-1]) - part.shape[-1]))


def _bytes_of(half: Tensor) -> Tensor:
    return half.unsqueeze(-1).view(torch.uint8)


def fill_up(values: Tensor, length: int, group_size: int) -> Tensor:
    """[..., n] to [..., length]: the last group with its last value, which changes no group's range, then zeros.

    Whole groups of zeros change no tile's exponent, even where the last group is left out of it for a NaN.
    """
    num_values = values.shape[-1]
    in_group = min(-num_values % group_size, length - num_values)
    if in_group:
        values = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], in_group)), dim=-1)
    rest = length - values.shape[-1]
    return F.pad(values, (0, rest)) if rest else values


def _pad_to_tiles(values: Tensor, group_size: int) -> Tensor:
    return fill_up(values, -(-values.shape[-1] // TILE_VALUES) * TILE_VALUES, group_size)
