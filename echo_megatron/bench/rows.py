"""The rows of the bench: which all-reduce, with which options, at which sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from echo_megatron.config import NATIVE_BITS, Algorithm, Direction, EchoConfig, Policy, Residual, StateDtype

KIB, MIB = 1 << 10, 1 << 20
LARGE_SIZES = tuple(mib * MIB for mib in (64, 128, 256, 512, 1024))
SMALL_SIZES = tuple(kib * KIB for kib in (4, 16, 64, 256, 1024, 4096, 16384, 32768))
SMOOTH_SIZES = (64 * KIB, 4 * MIB, 64 * MIB)
QUICK_SIZES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
CROSSING = 64 * MIB  # largest message of the rows that show from which size two-shot is faster than one-shot
FORCED = (Algorithm.one_shot, Algorithm.two_shot)
ITEMSIZE = 2  # BF16
EXACT, NATIVE = "exact", "native"  # algorithms of messages that are not quantized: p2p's own, the group's


class Kind(Enum):
    """What a row calls."""

    nccl = "the process group's own 16-bit all-reduce"
    nccl_reduce_scatter = "the process group's own 16-bit reduce-scatter"
    nccl_all_gather = "the process group's own 16-bit all-gather"
    symm_mem_one_shot = "torch.ops.symm_mem.one_shot_all_reduce"
    symm_mem_two_shot = "torch.ops.symm_mem.two_shot_all_reduce_"
    two_collective = "quantized all-to-all, sum, quantized all-gather (ZeRO++)"
    flashinfer = "flashinfer.comm.quantized_all_reduce"
    echo = "Communicator.all_reduce"
    reduce_scatter = "Communicator.reduce_scatter"
    all_gather = "Communicator.all_gather"
    unfused = "Communicator.all_reduce without compensation, the compensator as PyTorch operations"
    auto = "what a site calls: exact under min_bytes, else quantized"


BASELINES = (Kind.nccl, Kind.nccl_reduce_scatter, Kind.nccl_all_gather)


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: what the results call it.
        kind: what it calls.
        bits: bits of a code; 16 for what does not quantize.
        config: of Echo's rows.
        critical: the time added between two matmuls instead of the whole call.
        smallest: bytes of the smallest message that is timed.
        largest: bytes of the largest one.
        smooth: also timed at sizes a little beside others.
    """

    name: str
    kind: Kind
    bits: int = 16
    config: EchoConfig | None = None
    critical: bool = False
    smallest: int = 0
    largest: int = LARGE_SIZES[-1]
    smooth: bool = False

    @property
    def policy(self) -> str | None:
        return self.config.policy.name if self.config else None

    @property
    def state_dtype(self) -> str | None:
        """None for rows without compensation."""
        if self.kind is Kind.unfused:
            return StateDtype.bf16.name
        return self.config.state_dtype_of(Direction.forward).name if self.config and self.config.compensates else None

    @property
    def key(self) -> str:
        """Unique among the rows."""
        return " ".join(filter(None, (self.name, self.policy, self.state_dtype)))

    @property
    def is_baseline(self) -> bool:
        """Whether others are compared with this row."""
        return self.kind in BASELINES and not self.critical

    def times(self, num_bytes: int) -> bool:
        """Whether the row is timed at this size."""
        return self.smallest <= num_bytes <= self.largest


def all_rows() -> list[Row]:
    """Every row; NCCL, what the others are compared with, is the first."""
    return [
        Row("nccl16", Kind.nccl),
        Row("symm_mem_one_shot", Kind.symm_mem_one_shot, largest=64 * MIB),
        Row("symm_mem_two_shot", Kind.symm_mem_two_shot),
        *(Row(f"two_collective_{bits}", Kind.two_collective, bits) for bits in (8, 4)),
        Row("flashinfer_fp8", Kind.flashinfer, 8),
        *(row for policy in (Policy.rotated, Policy.zero_aware) for row in _echo_rows(policy)),
        Row("echo4_paper", Kind.echo, 4, EchoConfig.preset("echo4_paper", gather_bits=NATIVE_BITS)),
        Row("echo8_paper", Kind.echo, 8, EchoConfig.preset("echo8_paper", gather_bits=NATIVE_BITS)),
        *(Row(f"echo4_{algorithm.name}", Kind.echo, 4, _crossing(algorithm), largest=CROSSING) for algorithm in FORCED),
        Row("nccl16_critical", Kind.nccl, critical=True, smallest=LARGE_SIZES[0]),
        _critical("echo4_paper_critical", EchoConfig.preset("echo4_paper", gather_bits=NATIVE_BITS)),
    ]


def select(rows: Sequence[Row], names: Sequence[str] | None) -> list[Row]:
    """The rows of these names, or of these keys, what they are compared with always among them.

    Raises:
        ValueError: there is no row of a name or key.
    """
    if names is None:
        return list(rows)
    known = list(dict.fromkeys(row.name for row in rows))
    if unknown := sorted(set(names) - set(known) - {row.key for row in rows}):
        raise ValueError(f"--rows: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    return [row for row in rows if row.is_baseline or {row.name, row.key} & set(names)]


def smooth_sizes(base: int) -> list[int]:
    """Sizes close to `base`, in bytes: two values less, two more, and five per cent more as an odd number of values."""
    values = base // ITEMSIZE
    return [ITEMSIZE * close for close in (values - 2, values + 2, (values * 21 // 20) | 1)]


def _echo_rows(policy: Policy) -> list[Row]:
    echo4 = EchoConfig(policy=policy, group_size=32 if policy is Policy.rotated else 128, gather_bits=NATIVE_BITS)
    echo8 = echo4.replace(bits=8)
    # As in the paper's Table 2; the tuning tables are for compensated calls.
    none = {"eta": 0.0, "algorithm": Algorithm.two_shot}
    consensus = echo4.replace(residual=Residual.consensus)
    rows = [
        Row("echo8", Kind.echo, 8, echo8.replace(**none)),
        Row("echo4", Kind.echo, 4, echo4.replace(**none), smooth=True),
        Row("echo4_unfused", Kind.unfused, 4, echo4.replace(**none)),
    ]
    for state_dtype in (StateDtype.bf16, StateDtype.compact):
        local = echo4.replace(state_dtype=state_dtype)
        rows += [
            Row("echo4_local", Kind.echo, 4, local, smooth=state_dtype is StateDtype.compact),
            Row("echo8_local", Kind.echo, 8, echo8.replace(state_dtype=state_dtype)),
            _critical("echo4_local_critical", local),
        ]
    return [
        *rows,
        Row("echo4_consensus", Kind.echo, 4, consensus),
        _critical("echo4_consensus_critical", consensus),
        Row("auto", Kind.auto, 4, echo4, largest=SMALL_SIZES[-1], smooth=True),
    ]


def _crossing(algorithm: Algorithm) -> EchoConfig:
    """The default options with one algorithm at every size."""
    return EchoConfig(algorithm=algorithm, gather_bits=NATIVE_BITS)


def _critical(name: str, config: EchoConfig) -> Row:
    return Row(name, Kind.echo, config.bits, config, critical=True, smallest=LARGE_SIZES[0])
