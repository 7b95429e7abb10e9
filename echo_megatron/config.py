"""Every option of Echo: legal values, defaults, presets. Validated here; after this file nobody compares strings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any


class Policy(Enum):
    """Group quantizer (paper Sec. 4.3; `rotated*` are ours)."""

    symmetric = "symmetric"
    naive = "naive"
    zero_aware = "zero_aware"
    rotated = "rotated"
    rotated_asymmetric = "rotated_asymmetric"


class Algorithm(Enum):
    """How codes travel: `two_shot` is the paper's (Sec. 4.1), `one_shot` sends every contribution to every rank."""

    auto = "auto"
    one_shot = "one_shot"
    two_shot = "two_shot"


class TransportName(Enum):
    """What moves the codes: CUDA kernels through the GPUs' peer memory, torch.distributed, or the first that can."""

    auto = "auto"
    p2p = "p2p"
    collective = "collective"


class Residual(Enum):
    """What the compensator feeds back: the rank's own rounding error, or the paper's x' - y/P (Sec. 5.1)."""

    local = "local"
    consensus = "consensus"


class Rescale(Enum):
    """Power-of-two factor that keeps scales in range: one a wire tile, one a call (paper Sec. 5.4), or none."""

    tile = "tile"
    group = "group"
    none = "none"


class StateDtype(Enum):
    """Storage of the compensator's state, see `state.py`; its arithmetic is always FP32."""

    bf16 = "bf16"
    fp32 = "fp32"
    compact = "compact"


class Direction(Enum):
    """`forward`: outputs of row-parallel linears. `backward`: input gradients of column-parallel linears."""

    forward = "forward"
    backward = "backward"


class Collective(Enum):
    """What a call does over the ranks; the last two are sequence parallelism's."""

    all_reduce = "all_reduce"
    reduce_scatter = "reduce_scatter"
    all_gather = "all_gather"


class Phase(Enum):
    """`train`: module.training is set. `evaluate`: it is not."""

    train = "train"
    evaluate = "evaluate"


@dataclass(frozen=True)
class Feedback:
    """What the compensator makes of the residuals of a pass (paper Eqns. 10 and 11).

    Attributes:
        eta: gain of the correction.
        a: weight of the slow average in it.
        beta1: decay of the slow average.
        beta2: decay of the fast one.
    """

    eta: float
    a: float
    beta1: float
    beta2: float

    @property
    def is_memoryless(self) -> bool:
        """The correction is of the last residual alone."""
        return self.beta1 == 0 and self.beta2 == 0


# A rank's own rounding error is returned whole at the next site: no more than one error is ever in the sum. The
# consensus residual also holds how far the rank's contribution is from the mean, which only averages keep bounded.
DEFAULT_A = 0.35
LOCAL_FEEDBACK = Feedback(eta=1.0, a=DEFAULT_A, beta1=0.0, beta2=0.0)
PAPER_FEEDBACK = Feedback(eta=0.75, a=DEFAULT_A, beta1=0.7, beta2=0.3)
# Options that do nothing with eta = 0.
IDLE_WITHOUT_GAIN = ("residual", "backward_residual", "a", "beta1", "beta2", "state_dtype")

QUANTIZED_BITS = (4, 8)
NATIVE_BITS = 16  # Megatron's own communication: nothing is installed
GROUP_SIZES = (32, 64, 128, 256)
MAX_WORLD_SIZE = 8


@dataclass
class EchoConfig:
    """Options of the compensated, quantized all-reduce. The defaults are the preset `echo4`.

    `min_bytes`, `directions`, `phases` and the early-site options act where sites are installed in a model; a caller of
    `Communicator` decides these itself.

    Attributes:
        bits: bits of a code, 4 or 8; 16 leaves Megatron's own communication in place (preset `nccl`).
        policy: the group quantizer.
        group_size: values that share a scale: 32, 64, 128 or 256.
        algorithm: one_shot, two_shot, or auto: by world size (`reference.choose_algorithm`), with the p2p transport by
            a measured table (`tuning.py`).
        transport: how codes move: p2p (CUDA, GPUs of one host that reach each other's memory), collective
            (torch.distributed on any process group), or auto: p2p where every rank can, otherwise collective.
        residual: what the compensator feeds back.
        backward_residual: what it feeds back in backward passes; None: as `residual`.
        rescale: where the power-of-two factor is chosen.
        eta: gain of the correction, 0 to 1; 0 switches compensation off (paper Eqn. 10). None: 1 for the local
            residual, the paper's 0.75 for consensus.
        a: weight of the slow average in the correction, 0 to 1.
        beta1: decay of the slow average, in [0, 1) (paper Eqn. 11). None: 0 for the local residual, the paper's 0.7
            for consensus.
        beta2: decay of the fast average, in [0, 1). None: 0 for the local residual, the paper's 0.3 for consensus.
        state_dtype: storage of the compensator's state: 4 bytes a value in bf16, 8 in fp32, 1.125 in compact, which
            holds no averages and rounds too coarsely for the consensus residual. None: compact for the local residual
            with beta1 = beta2 = 0, otherwise bf16.
        min_bytes: messages smaller than this many bytes stay at full precision: the group's own all-reduce, or the p2p
            transport's exact sum where that is faster. None: what was measured for the transport, with p2p on
            this GPU at this number of ranks; 4 MiB where nobody measured.
        directions: the passes whose all-reduces are quantized.
        phases: whether training passes, evaluation passes or both are quantized.
        early_bits: bits of the forward sites in the first `early_fraction` of the layers (paper Sec. 7.2), or None.
        early_fraction: fraction of the layers that `early_bits` covers, 0 to 1.
        last_bits: bits of the forward sites in the last `last_layers` layers, or None. No later site corrects what they
            round; it goes before `early_bits` where both cover a layer.
        last_layers: layers that `last_bits` covers, at least 1.
        gather_bits: bits of a code in sequence parallelism's all-gathers, 8 or 4; 16 leaves them to the group's own.
            `bits` and the early-site options are those of its reduce-scatters.
        timeout_s: seconds that a call may wait for another rank; with the collective transport on GPUs the process
            group's time-out counts.

    Raises:
        ValueError: an option has a wrong type or value; the message says what was expected and what was given.
    """

    bits: int = 4
    policy: Policy = Policy.rotated
    group_size: int = 32
    algorithm: Algorithm = Algorithm.auto
    transport: TransportName = TransportName.auto
    residual: Residual = Residual.local
    backward_residual: Residual | None = None
    rescale: Rescale = Rescale.tile
    eta: float | None = None
    a: float = DEFAULT_A
    beta1: float | None = None
    beta2: float | None = None
    state_dtype: StateDtype | None = None
    min_bytes: int | None = None
    directions: list[Direction] = field(default_factory=lambda: list(Direction))
    phases: list[Phase] = field(default_factory=lambda: list(Phase))
    early_bits: int | None = None
    early_fraction: float = 0.5
    last_bits: int | None = None
    last_layers: int = 1
    gather_bits: int = 8
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._require_int("bits", legal=(*QUANTIZED_BITS, NATIVE_BITS))
        self._require_int("group_size", legal=GROUP_SIZES)
        self._require_int("gather_bits", legal=(*QUANTIZED_BITS, NATIVE_BITS))
        for name in ("early_bits", "last_bits"):
            if getattr(self, name) is not None:
                self._require_int(name, legal=QUANTIZED_BITS)
        if not _is_int(self.last_layers) or self.last_layers < 1:
            raise ValueError(f"last_layers: expected an integer >= 1, got {self.last_layers!r}")
        if self.backward_residual is not None:
            self.backward_residual = Residual(_to_enum("backward_residual", Residual, self.backward_residual))
        if self.state_dtype is not None:
            self.state_dtype = StateDtype(_to_enum("state_dtype", StateDtype, self.state_dtype))
        for name, kind in _ENUM_FIELDS.items():
            setattr(self, name, _to_enum(name, kind, getattr(self, name)))
        for name, kind in (("directions", Direction), ("phases", Phase)):
            setattr(self, name, _to_enum_list(name, kind, getattr(self, name)))
        self._require_float("a", 0, 1)
        for name in ("eta", "beta1", "beta2"):
            if getattr(self, name) is not None:
                self._require_float(name, 0, 1, upper_open=name != "eta")
        self._require_float("early_fraction", 0, 1)
        self._require_float("timeout_s", 0, math.inf, lower_open=True)
        if self.min_bytes is not None and (not _is_int(self.min_bytes) or self.min_bytes < 0):
            raise ValueError(f"min_bytes: expected an integer >= 0 (bytes) or None, got {self.min_bytes!r}")
        for name in ("early_bits", "last_bits"):
            if getattr(self, name) is not None and self.bits == NATIVE_BITS:
                raise ValueError(f"{name}: expected None with bits=16, which quantizes nothing; set bits to 4 or 8")
        if self.state_dtype is StateDtype.compact:
            self._require_compact_state()

    def _require_compact_state(self) -> None:
        if Residual.consensus in map(self.residual_of, Direction):
            raise ValueError(
                "state_dtype: expected bf16 or fp32 with residual=consensus, got compact: that residual is as large as "
                "the contribution, and rounding its state that coarsely doubles or triples the accumulated error; set "
                "residual=local, or leave state_dtype out"
            )
        if not all(self.feedback_of(direction).is_memoryless for direction in Direction):
            raise ValueError(
                "state_dtype: expected bf16 or fp32 where beta1 or beta2 is not 0, got compact: it stores the last "
                "residual and no averages; set beta1=0 and beta2=0, or leave state_dtype out"
            )

    def feedback_of(self, direction: Direction) -> Feedback:
        """The coefficients of a direction: those given, else what suits its residual."""
        default = PAPER_FEEDBACK if self.residual_of(direction) is Residual.consensus else LOCAL_FEEDBACK
        return Feedback(
            eta=default.eta if self.eta is None else self.eta,
            a=self.a,
            beta1=default.beta1 if self.beta1 is None else self.beta1,
            beta2=default.beta2 if self.beta2 is None else self.beta2,
        )

    def state_dtype_of(self, direction: Direction) -> StateDtype:
        """How the state of a direction is stored."""
        if self.state_dtype is not None:
            return self.state_dtype
        is_small = self.residual_of(direction) is Residual.local and self.feedback_of(direction).is_memoryless
        return StateDtype.compact if is_small else StateDtype.bf16

    @property
    def quantizes(self) -> bool:
        """False for `bits: 16`: Megatron's own communication stays in place."""
        return self.bits != NATIVE_BITS

    @property
    def compensates(self) -> bool:
        """False for `eta: 0`: no state is allocated."""
        return self.eta is None or self.eta > 0

    def residual_of(self, direction: Direction) -> Residual:
        """What the compensator of a direction feeds back."""
        if direction is Direction.backward and self.backward_residual is not None:
            return self.backward_residual
        return self.residual

    def site_bits(self, direction: Direction, layer_idx: int, num_layers: int) -> int:
        """Bits of a site. In forward passes those of early layers (paper Sec. 7.2) and of last ones may differ.

        Args:
            direction: the site's pass.
            layer_idx: zero-based layer of the whole model, pipeline stages included.
            num_layers: layers of the whole model.
        """
        if direction is Direction.backward:
            return self.bits
        if self.last_bits is not None and layer_idx >= num_layers - self.last_layers:
            return self.last_bits
        if self.early_bits is not None and layer_idx < self.early_fraction * num_layers:
            return self.early_bits
        return self.bits

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> EchoConfig:
        """The preset `name` with single options overridden.

        Raises:
            ValueError: `name` is not a preset, or an override is not an option or has an illegal value.
        """
        if name not in PRESETS:
            raise ValueError(f"tp_comm: expected one of {', '.join(PRESETS)}, got {name!r}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(overrides) - known):
            raise ValueError(
                f"tp_comm {name}: unknown option {', '.join(unknown)}; expected one of {', '.join(sorted(known))}"
            )
        return cls(**{**PRESETS[name], **overrides})

    def replace(self, **changes: Any) -> EchoConfig:
        """A validated copy with `changes`."""
        return replace(self, **changes)

    def _require_int(self, name: str, legal: tuple[int, ...]) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value not in legal:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, legal))}, got {value!r}")

    def _require_float(
        self, name: str, lower: float, upper: float, *, lower_open: bool = False, upper_open: bool = False
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if (
            number
            and (lower < value if lower_open else lower <= value)
            and (value < upper if upper_open else value <= upper)
        ):
            setattr(self, name, float(value))
            return
        interval = f"{'(' if lower_open else '['}{lower}, {upper}{')' if upper_open or upper == math.inf else ']'}"
        raise ValueError(f"{name}: expected a number in {interval}, got {value!r}")


_ENUM_FIELDS: dict[str, type[Enum]] = {
    "policy": Policy,
    "algorithm": Algorithm,
    "transport": TransportName,
    "residual": Residual,
    "rescale": Rescale,
}

_PAPER: dict[str, Any] = {
    "policy": Policy.zero_aware,
    "group_size": 128,
    "algorithm": Algorithm.two_shot,
    "residual": Residual.consensus,
    "rescale": Rescale.group,
}

# Options of each preset that differ from EchoConfig's defaults.
PRESETS: dict[str, dict[str, Any]] = {
    "nccl": {"bits": NATIVE_BITS},
    "echo4": {},
    "echo8": {"bits": 8},
    "echo4_paper": _PAPER,
    "echo8_paper": {**_PAPER, "bits": 8},
}


def plain(value: Any) -> Any:
    """Enums by name, also in lists, so that a checkpoint or a file holds nothing but numbers, strings and lists."""
    if isinstance(value, Enum):
        return value.name
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _to_enum(name: str, kind: type[Enum], value: object) -> Enum:
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value in kind.__members__:
        return kind[value]
    raise ValueError(f"{name}: expected one of {', '.join(kind.__members__)}, got {value!r}")


def _to_enum_list(name: str, kind: type[Enum], value: object) -> list[Enum]:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name}: expected a list of {', '.join(kind.__members__)}, got {value!r}")
    return [_to_enum(name, kind, item) for item in value]
