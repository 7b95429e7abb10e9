"""Predicted training step and prefill of one model: matmuls, memory traffic, and what the sites' collectives add.

    compute = operations / (peak * matmul_share) + bytes of the layers between the matmuls / (HBM * memory_share)
    forward = compute_forward * (1 + waiting) + added(calls)
    step    = forward + compute_backward + added(backward calls)

What a call adds is not its time:

    NCCL, before the next matmul    call * (1 - returned)                         at most the clock's room is returned
    NCCL, beside a matmul           call * min(1, covering * call / matmul)
    Echo                            call, beside a matmul call * exposed_echo

GPUs run at their power limit. NCCL's call draws little, so the other kernels run at a higher clock for it: `returned`.
Echo's draws as much as they do. Backward all-reduces run beside the weight gradient: one that covers little of the
matmul is hidden, as far as the matmul's tiles find other multiprocessors; Echo's kernel takes all of them. Launching is
not modelled: the GPU is taken to be what a step waits for. `plan_calibration` fits the shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from echo_megatron.bench.rows import ITEMSIZE
from echo_megatron.bench.step_models import ModelShape
from echo_megatron.config import Collective, Direction, EchoConfig
from echo_megatron.plan_machine import Ceilings

# Values that a token of one layer reads or writes between the matmuls, forward: two norms and two residual sums of the
# hidden size, which every rank does unless the sequence is split.
HIDDEN_PASSES = 10
QK_PASSES, QKV_PASSES, FFN_PASSES = 4, 2, 3  # QK norm and rotary positions; attention's input; SwiGLU
BACKWARD = 2  # times the forward's operations and bytes; attention 2.5
ATTENTION_BACKWARD = 2.5
LOGIT_PASSES = 8  # of the cross-entropy, forward and backward, in BF16 values
BISECTIONS = 60


@dataclass(frozen=True)
class Work:
    """A model on one tensor-parallel group.

    Attributes:
        shape: the model.
        world_size: P.
        sequence_parallel: the ranks share the sequence between the linears.
    """

    shape: ModelShape
    world_size: int
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        return self.shape.batch * self.shape.sequence

    @property
    def message_bytes(self) -> int:
        """Of one site's message, BF16."""
        return ITEMSIZE * self.tokens * self.shape.hidden

    @property
    def num_parameters(self) -> int:
        """Of the whole model, norms left out."""
        tables = self.shape.vocab * self.shape.hidden * (1 if self.shape.tied else 2)
        return self.shape.num_layers * _layer_parameters(self.shape) + tables

    def calls(self, direction: Direction) -> dict[Collective, int]:
        """Collectives of the sites in one pass; see docs/sequence_parallel.md."""
        layers = self.shape.num_layers
        if not self.sequence_parallel:
            return {Collective.all_reduce: 2 * layers}
        gathers = 2 if direction is Direction.forward else 4  # again the inputs, for the weight gradients
        return {Collective.reduce_scatter: 2 * layers, Collective.all_gather: gathers * layers}

    def overlapped(self, direction: Direction) -> dict[Collective, int]:
        """Those of `calls` that run beside a matmul; the others are what the next matmul waits for."""
        layers = self.shape.num_layers
        if direction is Direction.forward:
            return {}
        if not self.sequence_parallel:
            return {Collective.all_reduce: 2 * layers}
        # Beside the weight gradient; the input again, beside its own gradient. The output's gradient is waited for.
        return {Collective.reduce_scatter: 2 * layers, Collective.all_gather: 2 * layers}

    def operations(self, trains: bool) -> float:
        """Of the matmuls on a rank: a forward pass with the last position's logits alone, or a step."""
        shape, linear = self.shape, 2.0 * _layer_parameters(self.shape) * self.tokens * self.shape.num_layers
        causal = shape.sequence / 2
        attention = 4.0 * self.tokens * causal * shape.heads * shape.kv_channels * shape.num_layers
        if not trains:
            return (linear + attention) / self.world_size
        head = 2.0 * shape.vocab * shape.hidden * self.tokens
        return ((1 + BACKWARD) * (linear + head) + (1 + ATTENTION_BACKWARD) * attention) / self.world_size

    def layer_bytes(self, trains: bool) -> float:
        """Read and written between the matmuls on a rank."""
        shape, shared = self.shape, self.world_size
        qk, qkv = (shape.heads + parts * shape.groups for parts in (1, 2))
        split = (QK_PASSES * qk + QKV_PASSES * qkv) * shape.kv_channels + FFN_PASSES * shape.ffn
        hidden = HIDDEN_PASSES * shape.hidden / (shared if self.sequence_parallel else 1)
        forward = ITEMSIZE * self.tokens * shape.num_layers * (hidden + split / shared)
        if not trains:
            return forward
        return (1 + BACKWARD) * forward + LOGIT_PASSES * ITEMSIZE * self.tokens * shape.vocab / shared


class Times(Protocol):
    """Times of single collectives on a machine, as `plan_calls.CallTimes` has them."""

    @property
    def ceilings(self) -> Ceilings:
        """Of the machine."""

    def quantizes(self, config: EchoConfig, collective: Collective, num_bytes: int, direction: Direction) -> bool:
        """Whether a site quantizes a message."""

    def ms(self, config: EchoConfig, collective: Collective, num_bytes: int, direction: Direction) -> float:
        """Milliseconds of a call of its own."""


@dataclass(frozen=True)
class Compute:
    """Milliseconds without the sites' collectives.

    Attributes:
        forward: of a prefill, whose logits are of the last position alone.
        step: of a forward and a backward pass.
        matmul: of the weight gradient beside a backward call, the mean over the sites.
    """

    forward: float
    step: float
    matmul: float

    def scaled(self, factor: float) -> Compute:
        return Compute(factor * self.forward, factor * self.step, factor * self.matmul)


@dataclass(frozen=True)
class Calibration:
    """What was fitted to the measured steps; see `plan_calibration.calibrate`.

    Attributes:
        matmul_share: of the peak.
        memory_share: of HBM's ceiling.
        waiting: share of a forward pass's compute by which ranks that wait for one another at its calls lengthen it.
        returned: share of the time of NCCL's blocking calls that the other kernels get back as a higher clock.
        clock_room: share of the compute's time that the highest clock would save: more is not returned.
        covering: times the share of a matmul that NCCL's call beside it covers, the share of the call that is added.
        exposed_echo: share of Echo's calls beside a matmul that is added.
        returned_range, covering_range: least and most of the points that they are the means of.
        models: whose steps and profiles they are from: those that the GPU bounds.
    """

    matmul_share: float
    memory_share: float
    waiting: float
    returned: float
    clock_room: float
    covering: float
    exposed_echo: float
    returned_range: tuple[float, float]
    covering_range: tuple[float, float]
    models: tuple[str, ...]

    @property
    def lowest_gain(self) -> Calibration:
        """With those ends of the ranges with which shorter calls gain least."""
        return replace(self, returned=self.returned_range[1], clock_room=1.0, covering=self.covering_range[0])

    @property
    def highest_gain(self) -> Calibration:
        """With those ends of the ranges with which shorter calls gain most."""
        return replace(self, returned=self.returned_range[0], covering=self.covering_range[1])

    def compute(self, work: Work, ceilings: Ceilings) -> Compute:
        """Of a model on a machine."""
        forward, step = (
            matmuls / self.matmul_share + memory / self.memory_share
            for matmuls, memory in (compute_terms(work, ceilings, trains) for trains in (False, True))
        )
        return Compute(forward, step, weight_gradient_ms(work, ceilings) / self.matmul_share)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of one setting.

    Attributes:
        step_ms, forward_ms: a training step without the optimizer, a prefill.
        calls_forward_ms, calls_backward_ms: the sites' collectives alone.
    """

    step_ms: float
    forward_ms: float
    calls_forward_ms: float
    calls_backward_ms: float


def predict(
    work: Work, config: EchoConfig, times: Times, calibration: Calibration, nccl_step_ms: float | None = None
) -> Prediction:
    """Step and prefill of a setting.

    Args:
        work: model, P, sequence parallelism.
        config: the setting; `bits: 16` is NCCL.
        times: of the machine at that P.
        calibration: see `plan_calibration.calibrate`.
        nccl_step_ms: a measured 16-bit step of this model on this machine: the modelled compute is scaled to it.

    Raises:
        ValueError: the measured step is shorter than its collectives.
    """
    compute = calibration.compute(work, times.ceilings)
    if nccl_step_ms is not None:
        compute = _compute_of(nccl_step_ms, work, times, calibration, compute)
    step, forward = _passes(work, config, times, calibration, compute)
    return Prediction(step, forward, *(calls_ms(work, config, times, direction) for direction in Direction))


@dataclass(frozen=True)
class Speedup:
    """How many times faster than the same with NCCL: by the means of the calibration, and by the ends of its ranges."""

    value: float
    low: float
    high: float

    def fields(self, name: str) -> dict[str, float]:
        """For JSON."""
        return {f"{name}_speedup": self.value, f"{name}_speedup_low": self.low, f"{name}_speedup_high": self.high}


def speedups(
    work: Work, config: EchoConfig, times: Times, calibration: Calibration, nccl_step_ms: float | None = None
) -> tuple[Speedup, Speedup]:
    """Of a step and of a prefill; arguments as of `predict`."""
    ratios = []
    for one in (calibration, calibration.lowest_gain, calibration.highest_gain):
        nccl, ours = (predict(work, c, times, one, nccl_step_ms) for c in (EchoConfig(bits=16), config))
        ratios.append((nccl.step_ms / ours.step_ms, nccl.forward_ms / ours.forward_ms))
    step, forward = zip(*ratios, strict=True)
    return Speedup(*step), Speedup(*forward)


def calls_ms(work: Work, config: EchoConfig, times: Times, direction: Direction) -> float:
    """The sites' collectives of one pass, one after the other."""
    size = work.message_bytes
    return sum(
        number * times.ms(config, collective, size, direction) for collective, number in work.calls(direction).items()
    )


def compute_terms(work: Work, ceilings: Ceilings, trains: bool) -> tuple[float, float]:
    """Milliseconds of matmuls at the peak, and of the rest at HBM's ceiling."""
    return (
        work.operations(trains) / ceilings.gpu.tflops / 1e9,
        work.layer_bytes(trains) / ceilings.hbm / 1e6,
    )


def weight_gradient_ms(work: Work, ceilings: Ceilings) -> float:
    """Milliseconds at the peak of a layer's weight gradients, halved: a layer has two sites a pass."""
    return _layer_parameters(work.shape) * work.tokens / work.world_size / ceilings.gpu.tflops / 1e9


def _passes(
    work: Work, config: EchoConfig, times: Times, calibration: Calibration, compute: Compute
) -> tuple[float, float]:
    """Step and prefill."""
    forward, backward = (_added_ms(work, config, times, calibration, compute, direction) for direction in Direction)
    forward += calibration.waiting * compute.forward
    return compute.step + forward + backward, compute.forward + forward


def _added_ms(
    work: Work, config: EchoConfig, times: Times, calibration: Calibration, compute: Compute, direction: Direction
) -> float:
    """By how much the collectives of a pass lengthen it."""
    added, blocking, size = 0.0, 0.0, work.message_bytes
    for collective, number in work.calls(direction).items():
        ms = times.ms(config, collective, size, direction)
        beside = work.overlapped(direction).get(collective, 0)
        if times.quantizes(config, collective, size, direction):
            added += (number - beside + beside * calibration.exposed_echo) * ms
        else:
            added += beside * ms * min(1.0, calibration.covering * ms / compute.matmul)
            blocking += (number - beside) * ms
    own = compute.forward if direction is Direction.forward else compute.step - compute.forward
    return added + blocking - min(calibration.returned * blocking, calibration.clock_room * own)


def _compute_of(step_ms: float, work: Work, times: Times, calibration: Calibration, modelled: Compute) -> Compute:
    """The modelled compute, scaled so that the 16-bit step takes `step_ms`."""
    nccl = EchoConfig(bits=16)
    calls = sum(calls_ms(work, nccl, times, direction) for direction in Direction)
    if step_ms <= calls:
        raise ValueError(
            f"--step-ms: expected more than the {calls:.1f} ms that the 16-bit collectives take, got {step_ms:g}; "
            "check batch, sequence and model"
        )
    low, high = 0.0, step_ms / modelled.step  # a longer compute hides more of the calls, but by less than its own time
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _passes(work, nccl, times, calibration, modelled.scaled(middle))[0] < step_ms:
            low = middle
        else:
            high = middle
    return modelled.scaled(high)


def _layer_parameters(shape: ModelShape) -> int:
    attention = shape.hidden * shape.kv_channels * 2 * (shape.heads + shape.groups)
    return attention + 3 * shape.hidden * shape.ffn
