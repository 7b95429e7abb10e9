"""The two-collective baseline, in the style of ZeRO++: quantized all-to-all, sum, quantized all-gather.

Symmetric codes, one FP16 scale for 128 values, every rank's own segment quantized like the others. Triton kernels on
GPUs (`two_collective_kernels.py`); the same in PyTorch elsewhere.

Record of a segment of m values: codes (m bits/8 bytes; at 4 bits the even index in the low nibble), then the scales,
filled up to a multiple of 128 bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

GROUP = 128
RECORD_ALIGNMENT = 128


class TwoCollective:
    """One rank's part. Output and records are allocated by the call.

    Args:
        group: the process group.
        bits: 4 or 8.
    """

    def __init__(self, group: dist.ProcessGroup, bits: int) -> None:
        self.group, self.bits = group, bits
        self.world_size = group.size()

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over the ranks in x's dtype and shape, a new tensor; the same bits on every rank."""
        length = -(-x.numel() // (GROUP * self.world_size)) * GROUP
        sent = self.quantize(x, length)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        own = self.reduce(received, length)
        gathered = torch.empty_like(sent)
        dist.all_gather_into_tensor(gathered.view(-1), own, group=self.group)
        return self.dequantize(gathered, x, length)

    def quantize(self, x: Tensor, length: int) -> Tensor:
        """[n] to uint8 [P, record]."""
        if x.is_cuda:
            from echo_megatron.bench import two_collective_kernels as kernels

            return kernels.quantize(x, self.world_size, length, record_bytes(length, self.bits), self.bits)
        padded = torch.nn.functional.pad(x.reshape(-1).float(), (0, length * self.world_size - x.numel()))
        return encode(padded.view(self.world_size, length), self.bits)

    def reduce(self, records: Tensor, length: int) -> Tensor:
        """uint8 [P, record], a segment's contributions, to the record [record] of their sum."""
        if records.is_cuda:
            from echo_megatron.bench import two_collective_kernels as kernels

            return kernels.reduce(records, length, self.bits)
        return encode(decode(records, length, self.bits).sum(0, keepdim=True), self.bits)[0]

    def dequantize(self, records: Tensor, like: Tensor, length: int) -> Tensor:
        """uint8 [P, record] to a tensor like `like`."""
        if records.is_cuda:
            from echo_megatron.bench import two_collective_kernels as kernels

            return kernels.dequantize(records, like, length, self.bits)
        values = decode(records, length, self.bits).flatten()[: like.numel()]
        return values.to(like.dtype).view(like.shape)


def record_bytes(length: int, bits: int) -> int:
    """Bytes of the record of one segment of `length` values."""
    return -(-(length * bits // 8 + length // GROUP * 2) // RECORD_ALIGNMENT) * RECORD_ALIGNMENT


def encode(values: Tensor, bits: int) -> Tensor:
    """fp32 [rows, m] to uint8 [rows, record]."""
    highest = 2 ** (bits - 1) - 1
    groups = values.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1) * (1.0 / highest)).to(torch.float16)
    codes = (groups * _reciprocal(scale.float()).unsqueeze(-1)).round().clamp(-highest, highest).flatten(1)
    stored = (codes + 2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        stored = stored[:, 0::2] | (stored[:, 1::2] << 4)
    record = torch.cat((stored, scale.view(torch.uint8)), dim=1)
    return torch.nn.functional.pad(record, (0, record_bytes(values.shape[-1], bits) - record.shape[1]))


def decode(records: Tensor, length: int, bits: int) -> Tensor:
    """uint8 [rows, record] to fp32 [rows, m]."""
    num_codes = length * bits // 8
    stored, scales = records[:, :num_codes], records[:, num_codes : num_codes + length // GROUP * 2]
    if bits == 4:
        stored = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(1)
    codes = stored.float().unflatten(-1, (-1, GROUP)) - 2 ** (bits - 1)
    return (codes * scales.contiguous().view(torch.float16).float().unsqueeze(-1)).flatten(1)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
