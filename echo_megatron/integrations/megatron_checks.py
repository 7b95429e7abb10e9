"""What Echo refuses in a Megatron-core model, by name, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from echo_megatron.config import Direction
from echo_megatron.process_group import EchoProcessGroup


@dataclass(frozen=True)
class _Refusal:
    """An option of TransformerConfig that can't be combined with Echo; one that a version lacks is not checked."""

    option: str
    is_refused: Callable[[Any], bool]
    expected: str
    why: str


def _on(value: Any) -> bool:
    return bool(value)


_REFUSALS = (
    _Refusal("sequence_parallel", _on, "False", "its reduce-scatter and all-gather are not quantized yet"),
    _Refusal("tp_comm_overlap", _on, "False", "userbuffers replace the all-reduce that Echo replaces"),
    _Refusal("symmetric_ar_type", _on, "None", "it replaces the all-reduce that Echo replaces"),
    _Refusal(
        "mlp_chunks_for_training", lambda n: n > 1, "1", "fc2 would run several times a pass on slices of the batch"
    ),
    _Refusal(
        "mlp_chunks_for_prefill", lambda n: n > 1, "1", "fc2 would run several times a pass on slices of the batch"
    ),
    _Refusal("num_moe_experts", _on, "None", "MoE layers communicate by expert; dense layers only"),
    _Refusal(
        "overlap_moe_expert_parallel_comm", _on, "False", "it interleaves forward and backward passes layer by layer"
    ),
    _Refusal("multi_latent_attention", _on, "False", "its projections are not among the sites"),
    _Refusal(
        "transformer_impl",
        lambda value: value == "inference_optimized",
        "local",
        "its layers communicate through their own multicast buffers",
    ),
    _Refusal(
        "cuda_graph_impl",
        lambda value: value not in (None, "none"),
        "none",
        "the collective transport checks on the host that the ranks agree, which a CUDA graph can't capture",
    ),
    _Refusal("enable_cuda_graph", _on, "False", "see cuda_graph_impl"),
    _Refusal("external_cuda_graph", _on, "False", "see cuda_graph_impl"),
)


def check_model(chunk: nn.Module) -> None:
    """Raises ValueError naming the first option of the chunk's TransformerConfig, or module, that is not supported."""
    config = next((m.config for m in chunk.modules() if hasattr(getattr(m, "config", None), "hidden_size")), None)
    if config is None:
        raise ValueError(
            f"echo: expected a Megatron-core model, got {type(chunk).__name__} without a TransformerConfig"
        )
    for refusal in _REFUSALS:
        if hasattr(config, refusal.option) and refusal.is_refused(value := getattr(config, refusal.option)):
            raise ValueError(
                f"echo: {refusal.option}={value!r} is not supported: {refusal.why}. "
                f"Expected {refusal.option}={refusal.expected}, or tp_comm=nccl"
            )
    for name, module in chunk.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"echo: torch.compile of {name or type(module).__name__} is not supported: Dynamo replaces the "
                "all-reduce on a module's own process group. Install Echo on an uncompiled model, or use tp_comm=nccl"
            )


def check_linear(linear: Any, name: str, direction: Direction) -> None:
    """Raises ValueError when `linear` is not a local tensor-parallel linear whose own all-reduce makes the site."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    expected = RowParallelLinear if direction is Direction.forward else ColumnParallelLinear
    if not isinstance(linear, expected):
        raise ValueError(
            f"echo: {name} is a {type(linear).__module__}.{type(linear).__name__}, expected Megatron-core's "
            f"{expected.__name__}; build the model with get_gpt_layer_local_spec"
        )
    if isinstance(linear.tp_group, EchoProcessGroup):
        raise ValueError(f"echo: {name} has Echo installed already; call uninstall() of the first installation before")
    if direction is Direction.forward and getattr(linear, "explicit_expert_comm", False):
        raise ValueError(f"echo: {name} has explicit_expert_comm: the all-reduce is not its own; use tp_comm=nccl")
    if direction is Direction.backward and linear.tp_group.size() > 1 and not linear.allreduce_dgrad:
        raise ValueError(f"echo: {name} has disable_grad_reduce: it sums no input gradient; use directions: [forward]")
