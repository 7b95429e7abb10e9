"""What the p2p transport's calls of one kind share: worked out once, since the host's part is paid by every message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo_megatron.config import Algorithm, Collective, EchoConfig
from echo_megatron.ops import index_of
from echo_megatron.reference import make_quantizer, num_sent_bytes, num_sent_share_bytes
from echo_megatron.sites import Site
from echo_megatron.tuning import Choice


@dataclass(frozen=True, slots=True)
class Plan:
    """The all-reduces of one size, dtype, bits, direction and compensation.

    Attributes:
        options: the operator's keyword arguments that are the same in all of them.
        state_key: of `Compensator.raw_state`.
        num_state_bytes: size of that state.
        num_code_bytes: size of the records that the sum is decoded from.
        saves_codes: the records are smaller than the sum.
        num_sent_bytes: of the wire records that the rank sends to others.
        decode_options: of the operator `decode`.
        update_options: of the operator `consensus_update`, the same in all of them.
    """

    options: dict[str, Any]
    state_key: tuple[int, Algorithm]
    num_state_bytes: int
    num_code_bytes: int
    saves_codes: bool
    num_sent_bytes: int
    decode_options: dict[str, Any]
    update_options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SharePlan:
    """The reduce-scatters or the all-gathers of one size, dtype, bits, direction and compensation.

    Attributes:
        options: the operator's keyword arguments that are the same in all of them.
        state_key: of `Compensator.raw_state`; the first number is that of values in a share's working basis.
        num_state_bytes: size of that state; 0 in an all-gather, which has none.
        num_sent_bytes: of the wire records that the rank sends to others.
    """

    options: dict[str, Any]
    state_key: tuple[int, Collective]
    num_state_bytes: int
    num_sent_bytes: int


def plan_all_reduce(
    config: EchoConfig, memory: dict[str, Any], world_size: int, x: Tensor, site: Site, choice: Choice,
    coefficients: list[float],
) -> Plan:  # fmt: skip
    """The plan of an all-reduce.

    Args:
        config: the options.
        memory: the operator's arguments that tell of the workspace.
        world_size: P.
        x: a contribution.
        site: of a call.
        choice: algorithm, grid and depth.
        coefficients: of `Compensator`, zeros without one.
    """
    library, num_values = torch.ops.echo_megatron, x.numel()
    layout = {
        "policy": index_of(config.policy),
        "group_size": config.group_size,
        "algorithm": index_of(choice.algorithm),
    }
    records = {**layout, "bits": site.bits}
    state_dtype = index_of(config.state_dtype_of(site.direction))
    num_tiles = library.call_tiles(num_values, world_size, **layout)
    num_records = num_tiles * (world_size if choice.algorithm is Algorithm.one_shot else 1)
    num_basis_values = make_quantizer(config, config.bits).num_basis_values(num_values)
    num_code_bytes = num_records * library.slot_bytes(site.bits, layout["policy"], config.group_size)
    decode_options = {**records, "world_size": world_size}
    return Plan(
        options={
            **memory,
            **records,
            "residual": index_of(config.residual_of(site.direction)),
            "rescale": index_of(config.rescale),
            "state_dtype": state_dtype,
            "coefficients": coefficients,
            "num_blocks": choice.num_blocks,
            "depth": choice.depth,
        },
        state_key=(num_basis_values, choice.algorithm),
        num_state_bytes=num_tiles * library.state_tile_bytes(state_dtype),
        num_code_bytes=num_code_bytes,
        saves_codes=num_code_bytes < num_values * x.element_size(),
        num_sent_bytes=num_sent_bytes(config, site.bits, choice.algorithm, world_size, memory["rank"], num_values),
        decode_options=decode_options,
        update_options={**decode_options, "state_dtype": state_dtype, "coefficients": coefficients},
    )


def plan_shares(
    config: EchoConfig, memory: dict[str, Any], world_size: int, num_share_values: int, site: Site,
    collective: Collective, choice: Choice, coefficients: list[float],
) -> SharePlan:  # fmt: skip
    """The plan of a reduce-scatter or an all-gather of shares of `num_share_values` values; see `plan_all_reduce`.

    Raises:
        ValueError: the workspace was made for codes of fewer bits.
    """
    library = torch.ops.echo_megatron
    layout = {"policy": index_of(config.policy), "group_size": config.group_size}
    if library.slot_bytes(site.bits, layout["policy"], config.group_size) > memory["slot_bytes"]:
        raise ValueError(
            f"{collective.name}, {site}: expected bits among the config's when the communicator was made (bits "
            f"{config.bits}, early_bits {config.early_bits}, last_bits {config.last_bits}, gather_bits "
            f"{config.gather_bits}), got {site.bits}; set "
            f"gather_bits={site.bits}"
        )
    options: dict[str, Any] = {
        **memory,
        **layout,
        "bits": site.bits,
        "rescale": index_of(config.rescale),
        "num_blocks": choice.num_blocks,
        "depth": choice.depth,
    }
    num_state_bytes = 0
    if collective is Collective.reduce_scatter:
        state_dtype = index_of(config.state_dtype_of(site.direction))
        num_state_bytes = library.scatter_state_tiles(num_share_values, world_size, **layout)
        num_state_bytes *= library.state_tile_bytes(state_dtype)
        options |= {
            "residual": index_of(config.residual_of(site.direction)),
            "state_dtype": state_dtype,
            "coefficients": coefficients,
        }
    return SharePlan(
        options,
        state_key=(make_quantizer(config, config.bits).num_basis_values(num_share_values), collective),
        num_state_bytes=num_state_bytes,
        num_sent_bytes=num_sent_share_bytes(config, site.bits, world_size, num_share_values),
    )
