"""Records and states as the kernels lay them out, read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from virtual_workspaces import aligned

from echo_megatron.config import StateDtype
from echo_megatron.quantizer import HEADER_BYTES, TILE_VALUES, Quantizer

# Of cuda/layout.cuh.
BLOCK_VALUES = 32
TEAM_THREADS = TILE_VALUES // BLOCK_VALUES


@dataclass
class Records:
    """Records in the parts of the wire record (quantizer.py).

    Attributes:
        codes: uint8 [rows, tiles, 4096], unsigned.
        params: uint8 [rows, tiles, groups, bytes a group].
        exponent: int32 [rows, tiles].
    """

    codes: Tensor
    params: Tensor
    exponent: Tensor


def unpack_records(slots: Tensor, quantizer: Quantizer, num_rows: int) -> Records:
    """Undoes the layout of slots (cuda/layout.cuh)."""
    num_code_bytes = TILE_VALUES * quantizer.bits // 8
    num_param_bytes = quantizer.groups_per_tile * quantizer.param_bytes
    header_at = num_code_bytes + -(-num_param_bytes // 16) * 16
    slot_bytes = aligned(header_at + HEADER_BYTES)
    tiles = slots.view(num_rows, -1, slot_bytes)
    # 16-byte chunk j of thread t lies at (j * 128 + t) * 16.
    packed = tiles[..., :num_code_bytes].unflatten(-1, (-1, TEAM_THREADS, 16)).transpose(-3, -2).flatten(-3)
    params = tiles[..., num_code_bytes : num_code_bytes + num_param_bytes]
    return Records(
        quantizer._unpack_codes(packed),
        params.unflatten(-1, (quantizer.groups_per_tile, quantizer.param_bytes)),
        tiles[..., header_at : header_at + 2].contiguous().view(torch.int16)[..., 0].to(torch.int32),
    )


def unpack_state(raw: Tensor, dtype: StateDtype) -> dict[str, Tensor]:
    """Undoes the layout of cuda/state.cuh.

    Args:
        raw: uint8 [rows, bytes].
        dtype: how the state is stored.

    Returns:
        c, and m2 unless the state is compact; fp32 [rows, values of whole tiles].
    """
    if dtype is StateDtype.compact:
        tiles = raw.unflatten(-1, (-1, TILE_VALUES + 4 * TEAM_THREADS))
        codes, scales = tiles.split((TILE_VALUES, 4 * TEAM_THREADS), dim=-1)
        # 16-byte chunk j of thread t lies at (j * 128 + t) * 16; then a scale a thread.
        codes = codes.unflatten(-1, (2, TEAM_THREADS, 16)).transpose(-3, -2).flatten(-2).to(torch.float32) - 128
        return {"c": (codes * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(1)}
    kind, chunk = (torch.bfloat16, 8) if dtype is StateDtype.bf16 else (torch.float32, 4)
    parts = raw.view(kind).unflatten(-1, (-1, 2, BLOCK_VALUES // chunk, TEAM_THREADS, chunk))
    parts = parts.transpose(-3, -2).flatten(-3).to(torch.float32)
    return {"c": parts[:, :, 0].flatten(1), "m2": parts[:, :, 1].flatten(1)}


def stacked(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every rank's tensors of a name as one, [P, ...]."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
