"""Bytes that Echo sends and holds on a rank, by the rules of the transports; asking needs no GPU and no kernels."""

from __future__ import annotations

from dataclasses import dataclass

from echo_megatron.bench.rows import ITEMSIZE
from echo_megatron.config import (
    NATIVE_BITS,
    QUANTIZED_BITS,
    Algorithm,
    Collective,
    Direction,
    EchoConfig,
    StateDtype,
    TransportName,
)
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_model import Work
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import Segments, choose_algorithm, make_quantizer, num_sent_bytes, num_sent_share_bytes
from echo_megatron.state import BLOCK_VALUES
from echo_megatron.tuning import MAX_DEPTH
from echo_megatron.workspace import TEAMS_A_BLOCK

# cuda/layout.cuh; tests hold the sums to it.
CONTROL_BYTES, SLOT_ALIGNMENT, HEADER_BYTES, NUM_STAGES = 4096, 128, 16, 2
COMPACT_BLOCK_BYTES = BLOCK_VALUES + 4  # codes and a scale


@dataclass(frozen=True)
class Memory:
    """Bytes on a rank.

    Attributes:
        state: of the compensators, both directions.
        workspace: of the p2p transport.
        kept_codes: of a forward pass under full activation recompute.
    """

    state: int
    workspace: int
    kept_codes: int


def memory_of(work: Work, config: EchoConfig, times: CallTimes, transport: TransportName, recompute: bool) -> Memory:
    """What a setting holds beyond 16 bits.

    Args:
        work: model and P.
        config: the setting.
        times: whose tuning table chooses algorithms.
        transport: p2p or collective.
        recompute: activations are recomputed in the backward pass.
    """
    if not config.quantizes or work.message_bytes < times.min_bytes(config):
        return Memory(0, 0, 0)
    collective = Collective.reduce_scatter if work.sequence_parallel else Collective.all_reduce
    num_values = work.tokens * work.shape.hidden
    if not work.sequence_parallel:
        config = config.replace(gather_bits=NATIVE_BITS)  # as `install` does: there is nothing to gather
    algorithms = {d: times.algorithm(config, work.message_bytes, d) for d in config.directions}
    if transport is TransportName.collective:
        algorithms = dict.fromkeys(algorithms, choose_algorithm(config, work.world_size))
    state = sum(
        state_bytes(config, work.world_size, num_values, collective, algorithm, direction, transport)
        for direction, algorithm in algorithms.items()
    )
    kept = 0
    if recompute and Direction.forward in algorithms:
        one = kept_bytes(config, work.world_size, num_values, collective, algorithms[Direction.forward], transport)
        kept = one * work.calls(Direction.forward)[collective]
    is_p2p = transport is TransportName.p2p
    multiprocessors = times.ceilings.gpu.multiprocessors
    return Memory(state, workspace_bytes(config, work.world_size, multiprocessors) if is_p2p else 0, kept)


def state_bytes(
    config: EchoConfig,
    world_size: int,
    num_values: int,
    collective: Collective,
    algorithm: Algorithm,
    direction: Direction,
    transport: TransportName,
) -> int:
    """The compensator's state of one direction, as `Compensator.num_bytes` says.

    Args:
        config: the options.
        world_size: P.
        num_values: of the message: what goes into an all-reduce or a reduce-scatter.
        collective: all_reduce or reduce_scatter.
        algorithm: of an all-reduce.
        direction: whose.
        transport: p2p, whose state lies in tiles, or collective.
    """
    if not config.compensates:
        return 0
    quantizer, dtype = make_quantizer(config, config.bits), config.state_dtype_of(direction)
    scatters = collective is Collective.reduce_scatter
    if transport is TransportName.p2p:
        tiles = _tiles(config, world_size, num_values, collective, algorithm, stores_own=False)
        return tiles * _state_bytes(dtype, TILE_VALUES)
    rows = world_size if scatters else 1
    return rows * _state_bytes(dtype, quantizer.num_basis_values(num_values // rows))


def kept_bytes(
    config: EchoConfig,
    world_size: int,
    num_values: int,
    collective: Collective,
    algorithm: Algorithm,
    transport: TransportName,
    itemsize: int = ITEMSIZE,
) -> int:
    """What one forward site keeps for its recompute: the records, or the output where that is smaller."""
    if collective is Collective.reduce_scatter:
        return num_values // world_size * itemsize
    quantizer, whole = make_quantizer(config, config.bits), num_values * itemsize
    if transport is TransportName.p2p:
        tiles = _tiles(config, world_size, num_values, collective, algorithm, stores_own=True)
        records = tiles * slot_bytes(config, config.bits)
    elif algorithm is Algorithm.one_shot:
        records = world_size * quantizer.num_bytes(quantizer.num_basis_values(num_values))
    else:
        basis = quantizer.num_basis_values(num_values)
        records = world_size * quantizer.num_bytes(Segments.split(basis, world_size, config.group_size).size(0))
    return min(records, whole)


def workspace_bytes(config: EchoConfig, world_size: int, multiprocessors: int) -> int:
    """The p2p transport's symmetric memory (cuda/layout.cuh, WorkspaceLayout)."""
    teams, ring = TEAMS_A_BLOCK * multiprocessors, 1
    while ring < 3 * MAX_DEPTH + 2:
        ring *= 2
    bits = {config.bits, config.early_bits, config.last_bits, config.gather_bits} & set(QUANTIZED_BITS)
    slots = NUM_STAGES * (world_size - 1) * teams * ring
    flags = CONTROL_BYTES + _round_up(4 * teams, SLOT_ALIGNMENT)
    slot = max(slot_bytes(config, width) for width in bits if width is not None)
    return flags + _round_up(8 * slots, SLOT_ALIGNMENT) + slots * slot


def slot_bytes(config: EchoConfig, bits: int) -> int:
    """A slot of the workspace (cuda/layout.cuh, SlotLayout)."""
    parameters = TILE_VALUES // config.group_size * make_quantizer(config, bits).param_bytes
    return _round_up(TILE_VALUES * bits // 8 + _round_up(parameters, 16) + HEADER_BYTES, SLOT_ALIGNMENT)


def sent_bytes(work: Work, config: EchoConfig, times: CallTimes, transport: TransportName) -> int:
    """Bytes that rank 0 sends to others for the sites of a training step; records alone, without flags.

    Args:
        work: model and P.
        config: the setting; `bits: 16` is a ring's.
        times: whose tuning table chooses p2p's algorithms.
        transport: p2p or collective.
    """
    total = 0
    for direction in Direction:
        for collective, number in work.calls(direction).items():
            algorithm = (
                times.algorithm(config, work.message_bytes, direction)
                if config.quantizes and transport is TransportName.p2p
                else choose_algorithm(config, work.world_size)
            )
            is_quantized = config.quantizes and times.quantizes(config, collective, work.message_bytes, direction)
            total += number * _call_bytes(work, config if is_quantized else None, collective, algorithm)
    return total


def _call_bytes(work: Work, config: EchoConfig | None, collective: Collective, algorithm: Algorithm) -> int:
    size, world_size = work.message_bytes, work.world_size
    num_values = size // ITEMSIZE
    if config is None:
        phases = 2 if collective is Collective.all_reduce else 1
        return phases * (world_size - 1) * size // world_size
    if collective is Collective.all_reduce:
        return num_sent_bytes(config, config.bits, algorithm, world_size, 0, num_values)
    bits = config.gather_bits if collective is Collective.all_gather else config.bits
    return num_sent_share_bytes(config, bits, world_size, num_values // world_size)


def _tiles(
    config: EchoConfig,
    world_size: int,
    num_values: int,
    collective: Collective,
    algorithm: Algorithm,
    stores_own: bool,
) -> int:
    """Tiles of a call's state, or of the records that its sum is decoded from (`stores_own`)."""
    quantizer = make_quantizer(config, config.bits)
    if collective is Collective.reduce_scatter:
        return (world_size - 1) * _ceil_div(quantizer.num_basis_values(num_values // world_size), TILE_VALUES)
    basis = quantizer.num_basis_values(num_values)
    if algorithm is Algorithm.two_shot:
        return world_size * _ceil_div(Segments.split(basis, world_size, config.group_size).length, TILE_VALUES)
    return _ceil_div(basis, TILE_VALUES) * (world_size if stores_own else 1)


def _state_bytes(dtype: StateDtype, num_values: int) -> int:
    if dtype is StateDtype.compact:
        return _ceil_div(num_values, BLOCK_VALUES) * COMPACT_BLOCK_BYTES
    return 2 * num_values * (4 if dtype is StateDtype.fp32 else 2)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _round_up(a: int, b: int) -> int:
    return _ceil_div(a, b) * b
