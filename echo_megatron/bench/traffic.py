"""Bytes that a row must move over the wire and through HBM, and what this machine's wire and HBM carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from echo_megatron.bench.memory import Memory
from echo_megatron.bench.rows import EXACT, ITEMSIZE, NATIVE, Kind, Row
from echo_megatron.bench.timing import Timer
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual, StateDtype
from echo_megatron.reference import Segments, make_quantizer

# Bytes a value of c and of m2; compact has a scale of four bytes for 32 values of c, and no m2.
STATE_BYTES = {
    StateDtype.bf16: (2.0, 2.0),
    StateDtype.fp32: (4.0, 4.0),
    StateDtype.compact: (1 + 4 / 32, 0.0),
}
UNFUSED_PASSES = 17  # c: 1r 1w + 2r 1w; x': 2r 1w; u: 2r 1w; m1 and m2: 2r 1w each
TWO_COLLECTIVE_GROUP = 128


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call on one rank.

    Attributes:
        wire: sent to other ranks.
        hbm: read and written in the rank's own memory.
    """

    wire: float
    hbm: float


@dataclass(frozen=True)
class Ceilings:
    """What the machine carries, GB/s (1e9 bytes).

    Attributes:
        wire: written into the next rank's memory while every rank does so, the better of the two below.
        wire_by_copy: by a device-to-device copy, which may use a copy engine.
        wire_by_kernel: by an elementwise kernel that writes the peer's memory.
        hbm: read plus written by a copy.
    """

    wire: float
    wire_by_copy: float
    wire_by_kernel: float
    hbm: float


def traffic(row: Row, num_values: int, world_size: int, algorithm: str | None) -> Traffic | None:
    """What a call cannot avoid, with B = 2n bytes of BF16, R(m) the wire record of m values, P ranks.

    wire, sent by a rank:
        16 bits: ring and two-shot 2 (P-1)/P B; one-shot (symm_mem, exact) (P-1) B
        quantized: two-shot 2 (P-1) R(n/P); one-shot (P-1) R(n)
        two-collective: as two-shot, its records being codes and one FP16 scale for 128 values
    hbm: x read and y written, 2 B; and
        compensator, local: c and m2 read and written once; without memory of earlier sites m2 is not read
        consensus: in the call c read; with the update also x and the codes of y read, and the state as above
        unfused: 17 passes of the tensor by PyTorch's operations
        two-collective: the codes written and read by each of its five steps, 6 R(n) + 2 R(n/P)
    Slots that codes arrive in are not counted: they are few and used again while still in L2. Nor are the codes that
    consensus keeps for its update where the update is beside the call (`critical`).

    Returns:
        None where it is not known: FlashInfer's.
    """
    size, share = ITEMSIZE * num_values, (world_size - 1) / world_size
    if row.kind is Kind.flashinfer:
        return None
    if row.kind in (Kind.nccl, Kind.symm_mem_two_shot) or algorithm == NATIVE:
        return Traffic(2 * share * size, 2 * size)
    if row.kind is Kind.symm_mem_one_shot or algorithm == EXACT:
        return Traffic((world_size - 1) * size, 2 * size)
    if row.kind is Kind.two_collective:
        record = num_values * (row.bits / 8 + 2 / TWO_COLLECTIVE_GROUP)
        return Traffic(2 * share * record, 2 * size + 6 * record + 2 * record / world_size)
    assert row.config is not None
    quantizer = make_quantizer(row.config, row.bits)
    if algorithm == Algorithm.one_shot.name:
        codes = quantizer.num_bytes(num_values)
        wire = (world_size - 1) * codes
        codes *= world_size  # what y is decoded from
    else:
        record = quantizer.num_bytes(Segments.split(num_values, world_size, quantizer.group_size).length)
        wire, codes = 2 * (world_size - 1) * record, world_size * record
    if row.kind is Kind.unfused:
        return Traffic(wire, (2 + UNFUSED_PASSES) * size)
    return Traffic(wire, 2 * size + _state_traffic(row.config, row.critical, num_values, codes))


def share_traffic(row: Row, num_values: int, world_size: int) -> Traffic:
    """What a reduce-scatter or an all-gather cannot avoid; `num_values` of the larger tensor, as in `traffic`.

    wire, sent by a rank: 16 bits (P-1)/P B; quantized (P-1) R(n/P)
    hbm: the larger tensor and a share of it, B + B/P; and, compensated, the state of the other ranks' shares as in
        `traffic`
    """
    size, others = ITEMSIZE * num_values, world_size - 1
    hbm = size + size / world_size
    if row.config is None:
        return Traffic(others * size / world_size, hbm)
    wire = others * make_quantizer(row.config, row.bits).num_bytes(num_values // world_size)
    if row.kind is Kind.reduce_scatter and row.config.compensates:
        hbm += _update_traffic(row.config, num_values) * others / world_size
    return Traffic(wire, hbm)


def _state_traffic(config: EchoConfig, critical: bool, num_values: int, codes: int) -> float:
    if not config.compensates:
        return 0.0
    if config.residual_of(Direction.forward) is Residual.local:
        return _update_traffic(config, num_values)
    correction = STATE_BYTES[config.state_dtype_of(Direction.forward)][0] * num_values
    if critical:
        return correction
    return correction + (ITEMSIZE * num_values + 2 * codes + _update_traffic(config, num_values))


def _update_traffic(config: EchoConfig, num_values: int) -> float:
    """The state read and written once; m2 is read where it has a memory."""
    correction, average = STATE_BYTES[config.state_dtype_of(Direction.forward)]
    average_passes = 1 if config.feedback_of(Direction.forward).is_memoryless else 2
    return (2 * correction + average_passes * average) * num_values


def bound_ms(moved: Traffic, ceilings: Ceilings) -> tuple[float, float]:
    """Least milliseconds by the wire, and by HBM."""
    return moved.wire / ceilings.wire / 1e6, moved.hbm / ceilings.hbm / 1e6


def measure_ceilings(memory: Memory, timer: Timer) -> Ceilings | None:
    """The ceilings of this machine, with all of `memory` moved by halves; None on CPU."""
    values = memory.values
    if not values.is_cuda:
        return None
    half = values.numel() // 2
    source, size = values[:half].normal_(), half * values.element_size()
    target = torch.empty_like(source)
    hbm = 2 * size / timer.measure(lambda: target.copy_(source)).ms / 1e6
    if not memory.is_symmetric:
        return Ceilings(float("nan"), float("nan"), float("nan"), hbm)
    peer = memory.peer((dist.get_rank() + 1) % dist.get_world_size())[half : 2 * half]
    by_copy = size / timer.measure(lambda: peer.copy_(source)).ms / 1e6
    by_kernel = size / timer.measure(lambda: torch.neg(source, out=peer)).ms / 1e6
    return Ceilings(max(by_copy, by_kernel), by_copy, by_kernel, hbm)


def as_json(ceilings: Ceilings | None) -> dict[str, float] | None:
    """For the results' file."""
    return None if ceilings is None else {f"{name}_gb_per_s": value for name, value in asdict(ceilings).items()}
