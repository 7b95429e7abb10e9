"""Predicted training step and prefill of one model: matmuls, memory traffic, and the sites' collectives.

    compute = operations / (peak * matmul_share) + bytes of the layers between the matmuls / (HBM * memory_share)
    forward = compute_forward + calls
    step    = forward + compute_backward + exposed * calls

The two shares are fitted to the measured steps and prefills whose sites' all-reduces were skipped. Forward calls block
the next matmul. Backward calls run beside the weight gradient: `exposed` is the share of their time by which they
lengthen the step, of NCCL's from steps with and without them, of ours from the profile. Launching is not modelled: the
GPU is taken to be what a step waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_megatron.bench.step_models import MODELS as BENCH_MODELS
from echo_megatron.bench.step_models import ModelShape
from echo_megatron.config import Collective, Direction, EchoConfig
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import Ceilings, Measured

ITEMSIZE = 2  # BF16
# Values that a token of one layer reads or writes between the matmuls, forward: two norms and two residual sums of the
# hidden size, which every rank does unless the sequence is split.
HIDDEN_PASSES = 10
QK_PASSES, QKV_PASSES, FFN_PASSES = 4, 2, 3  # QK norm and rotary positions; attention's input; SwiGLU
BACKWARD = 2  # times the forward's operations and bytes; attention 2.5
ATTENTION_BACKWARD = 2.5
LOGIT_PASSES = 8  # of the cross-entropy, forward and backward, in BF16 values
IDLE = 0.05  # a forward pass whose GPU idles longer than this share waits for its host


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


@dataclass(frozen=True)
class Calibration:
    """What was fitted to the measured steps.

    Attributes:
        matmul_share: of the peak.
        memory_share: of HBM's ceiling.
        exposed_nccl, exposed_echo: shares of the backward calls' time that lengthen the step.
        models: whose backward passes the last two are from: those that the GPU bounds.
    """

    matmul_share: float
    memory_share: float
    exposed_nccl: float
    exposed_echo: float
    models: tuple[str, ...]

    def compute_ms(self, work: Work, ceilings: Ceilings, trains: bool) -> float:
        """Of a prefill or of a step without the sites' collectives."""
        matmuls, memory = _compute_terms(work, ceilings, trains)
        return matmuls / self.matmul_share + memory / self.memory_share


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
    work: Work, config: EchoConfig, times: CallTimes, calibration: Calibration, nccl_step_ms: float | None = None
) -> Prediction:
    """Step and prefill of a setting.

    Args:
        work: model, P, sequence parallelism.
        config: the setting; `bits: 16` is NCCL.
        times: of the machine at that P.
        calibration: see `calibrate`.
        nccl_step_ms: a measured 16-bit step of this model on this machine, in place of the modelled compute.
    """
    forward, backward = (calls_ms(work, config, times, direction) for direction in Direction)
    compute = {trains: calibration.compute_ms(work, times.ceilings, trains) for trains in (False, True)}
    if nccl_step_ms is not None:
        nccl = EchoConfig(bits=16)
        own = [calls_ms(work, nccl, times, direction) for direction in Direction]
        measured = nccl_step_ms - own[0] - calibration.exposed_nccl * own[1]
        if measured <= 0:
            raise ValueError(
                f"--step-ms: expected more than the {own[0] + calibration.exposed_nccl * own[1]:.1f} ms that the "
                f"16-bit collectives take, got {nccl_step_ms:g}; check batch, sequence and model"
            )
        compute[False] *= measured / compute[True]
        compute[True] = measured
    exposed = calibration.exposed_echo if config.quantizes else calibration.exposed_nccl
    return Prediction(compute[True] + forward + exposed * backward, compute[False] + forward, forward, backward)


def calls_ms(work: Work, config: EchoConfig, times: CallTimes, direction: Direction) -> float:
    """The sites' collectives of one pass, one after the other."""
    size = work.message_bytes
    return sum(
        number * times.ms(config, collective, size, direction) for collective, number in work.calls(direction).items()
    )


def calibrate(measured: Measured) -> Calibration:
    """Fits the model to the measured steps.

    Raises:
        ValueError: they lack 16 bits, the bound or a profile at load 0.
    """
    times = CallTimes(measured, measured.ceilings, measured.step["world_size"])
    terms, found = [], []
    for row in _unloaded(measured.step):
        if row["setting"] == "skipped":
            for trains, name in ((True, "step_ms"), (False, "forward_ms")):
                terms.append(_compute_terms(measured_work(measured, row["model"]), measured.ceilings, trains))
                found.append(row[name])
    if len(found) < 2:
        raise ValueError("step results: expected rows of the setting skipped at load 0, got none; measure them anew")
    # Relative errors, so that a long step does not count for more.
    shares, *_ = np.linalg.lstsq(np.array(terms) / np.array(found)[:, None], np.ones(len(found)), rcond=None)
    models = tuple(
        row["model"]
        for row in measured.step["profiles"]
        if row["setting"] == "nccl16" and row["direction"] == "forward" and row["idle_ms"] < IDLE * row["span_ms"]
    )
    if not models or min(shares) <= 0:
        raise ValueError(
            "step results: expected a profile of a model whose forward pass the GPU bounds, and times that grow with "
            f"operations and bytes; got models {models}, terms {list(shares)}; measure a larger batch"
        )
    nccl = [_exposed_nccl(measured, times, model) for model in models]
    echo = [
        row["exposed_ms"] / row["sum_ms"]
        for row in measured.step["profiles"]
        if row["model"] in models and row["setting"].startswith("echo") and row["direction"] == "backward"
    ]
    if not echo:
        raise ValueError("step results: expected a profile of Echo's backward pass, got none; measure it anew")
    return Calibration(1 / float(shares[0]), 1 / float(shares[1]), _mean_share(nccl), _mean_share(echo), models)


def measured_work(measured: Measured, model: str) -> Work:
    """The work of a model of the step results.

    Raises:
        ValueError: the model is unknown.
    """
    if model not in BENCH_MODELS:
        raise ValueError(f"step results: expected a model of {', '.join(BENCH_MODELS)}, got {model}")
    done = measured.step["models"][model]
    values = {**vars(BENCH_MODELS[model]), "num_layers": done["layers"]}
    shape = ModelShape(**{**values, "batch": done["batch"], "sequence": done["sequence"]})
    return Work(shape, measured.step["world_size"])


def _unloaded(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if row["load"] == 0]


def _mean_share(values: list[float]) -> float:
    return min(max(sum(values) / len(values), 0.0), 1.0)


def _exposed_nccl(measured: Measured, times: CallTimes, model: str) -> float:
    rows = {row["setting"]: row for row in _unloaded(measured.step) if row["model"] == model}
    if not {"nccl16", "skipped"} <= rows.keys():
        raise ValueError(f"step results: expected nccl16 and skipped of {model} at load 0; measure them anew")
    nccl, skipped = rows["nccl16"], rows["skipped"]
    backward = nccl["step_ms"] - skipped["step_ms"] - (nccl["forward_ms"] - skipped["forward_ms"])
    return backward / calls_ms(measured_work(measured, model), EchoConfig(bits=16), times, Direction.backward)


def _compute_terms(work: Work, ceilings: Ceilings, trains: bool) -> tuple[float, float]:
    """Milliseconds of matmuls at the peak, and of the rest at HBM's ceiling."""
    return (
        work.operations(trains) / ceilings.gpu.tflops / 1e9,
        work.layer_bytes(trains) / ceilings.hbm / 1e6,
    )


def _layer_parameters(shape: ModelShape) -> int:
    attention = shape.hidden * shape.kv_channels * 2 * (shape.heads + shape.groups)
    return attention + 3 * shape.hidden * shape.ffn
