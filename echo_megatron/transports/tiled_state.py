"""Reads the compensator's correction out of the state that kernels keep: the layout of cuda/state.cuh, undone."""

from __future__ import annotations

import torch
from torch import Tensor

from echo_megatron.config import Algorithm, StateDtype
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import Segments
from echo_megatron.state import BLOCK_VALUES

TEAM_THREADS = TILE_VALUES // BLOCK_VALUES  # a thread holds a block
CHUNK_BYTES = 16
CODE_OFFSET = 128  # compact: c's codes are stored unsigned


def read_correction(
    state: Tensor, group_size: int, dtype: StateDtype, algorithm: Algorithm, world_size: int, num_values: int
) -> Tensor:
    """c in the order of the working basis.

    Args:
        state: uint8, every segment filled up to whole tiles (one segment for one_shot).
        group_size: values of a group.
        dtype: the state's.
        algorithm: of the calls that wrote the state.
        world_size: P.
        num_values: of the working basis.

    Returns:
        fp32 [num_values].
    """
    if algorithm is Algorithm.one_shot:
        num_segments, length = 1, num_values
    else:
        num_segments = world_size
        length = Segments.split(num_values, world_size, group_size).length
    tiles = state.view(num_segments, -(-length // TILE_VALUES), -1)
    values = tile_corrections(tiles, dtype).flatten(1)
    return values[:, :length].flatten()[:num_values]


def read_scattered_correction(state: Tensor, dtype: StateDtype, world_size: int, rank: int, num_values: int) -> Tensor:
    """c of a reduce-scatter, share by share in the order of the working basis.

    Args:
        state: uint8, the shares of the other ranks, each filled up to whole tiles.
        dtype: of the state.
        world_size: P.
        rank: whose state it is; it rounds nothing of its own share, which has none.
        num_values: of a share in the working basis.

    Returns:
        fp32 [P, num_values], zeros in the own share.
    """
    tiles = state.view(world_size - 1, -(-num_values // TILE_VALUES), -1)
    others = tile_corrections(tiles, dtype).flatten(1)[:, :num_values]
    return torch.cat((others[:rank], torch.zeros_like(others[:1]), others[rank:]))


def tile_corrections(tiles: Tensor, dtype: StateDtype) -> Tensor:
    """c of whole tiles: uint8 [..., bytes of a tile's state] to fp32 [..., 4,096]."""
    value_bytes = {StateDtype.bf16: 2, StateDtype.fp32: 4, StateDtype.compact: 1}[dtype]
    region = tiles[..., : TILE_VALUES * value_bytes]
    chunks = region.unflatten(-1, (-1, TEAM_THREADS, CHUNK_BYTES)).transpose(-3, -2).flatten(-3).contiguous()
    if dtype is not StateDtype.compact:
        return chunks.view(torch.bfloat16 if dtype is StateDtype.bf16 else torch.float32).to(torch.float32)
    scales = tiles[..., -4 * TEAM_THREADS :].contiguous().view(torch.float32)
    codes = chunks.to(torch.float32) - CODE_OFFSET
    return (codes.unflatten(-1, (TEAM_THREADS, BLOCK_VALUES)) * scales.unsqueeze(-1)).flatten(-2)
