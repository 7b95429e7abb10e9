"""What Echo refuses in a Megatron-core model, by name, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from echo_megatron.config import EchoConfig
from echo_megatron.reference import check_scattered_residual


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
    _Refusal("tp_comm_overlap", _on, "False", "userbuffers replace the all-reduce that Echo replaces"),
    _Refusal("symmetric_ar_type", _on, "None", "it replaces the all-reduce that Echo replaces"),
    _Refusal(
        "mlp_chunks_for_training", lambda n: n > 1, "1", "fc2 would run several times a pass on slices of the batch"
    ),
    _Refusal(
        "mlp_chunks_for_prefill", lambda n: n > 1, "1", "fc2 would run several times a pass on slices of the batch"
    ),
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
        "use_transformer_engine_op_fuser",
        _on,
        "False",
        "its fused MLP communicates by operations of its own, on the group that all modules share",
    ),
    _Refusal(
        "inference_fuse_tp_communication", _on, "False", "it replaces the all-reduce that Echo replaces by multicast"
    ),
)


def check_config(config: Any, echo: EchoConfig) -> None:
    """Raises ValueError naming the first option of a TransformerConfig that is not supported.

    Args:
        config: a TransformerConfig, or what has its attributes; those that a version lacks are not checked.
        echo: the options of the communication.
    """
    for refusal in _REFUSALS:
        if hasattr(config, refusal.option) and refusal.is_refused(value := getattr(config, refusal.option)):
            raise ValueError(
                f"echo: {refusal.option}={value!r} is not supported: {refusal.why}. "
                f"Expected {refusal.option}={refusal.expected}, or tp_comm=nccl"
            )
    if getattr(config, "sequence_parallel", False):
        for direction in echo.directions:
            check_scattered_residual(echo, direction)


def check_model(chunk: nn.Module, echo: EchoConfig) -> None:
    """Raises ValueError naming the first option of the chunk's TransformerConfigs, or module, that is not supported."""
    configs = {id(config): config for config in (getattr(module, "config", None) for module in chunk.modules())}
    megatron = [config for config in configs.values() if hasattr(config, "hidden_size")]
    if not megatron:
        raise ValueError(
            f"echo: expected a Megatron-core model, got {type(chunk).__name__} without a TransformerConfig"
        )
    for config in megatron:
        check_config(config, echo)
    for name, module in chunk.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule":
            raise ValueError(
                f"echo: torch.compile of {name or type(module).__name__} is not supported: Dynamo replaces the "
                "all-reduce on a module's own process group. Install Echo on an uncompiled model, or use tp_comm=nccl"
            )


def uses_cuda_graphs(config: Any) -> bool:
    """Whether a TransformerConfig asks for CUDA graphs, by the option of any version of megatron-core."""
    deprecated = any(getattr(config, option, False) for option in ("enable_cuda_graph", "external_cuda_graph"))
    return deprecated or getattr(config, "cuda_graph_impl", None) not in (None, "none")
