"""Tensor-parallel linears of Megatron-core, local or Transformer Engine's: their process group, and what they must be.

Both kinds end in `torch.distributed.all_reduce(t, group=<the module's group>)`, or with sequence parallelism in
`reduce_scatter_tensor` and `all_gather_into_tensor`, and read the group from `tp_group`;
Transformer Engine's public way to set it is `set_tensor_parallel_group`. Their checkpoints do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from echo_megatron.config import Direction
from echo_megatron.integrations.versions import require, transformer_engine
from echo_megatron.process_group import EchoProcessGroup

# A wrapper of PEFT (NeMo, Megatron-Bridge) holds the wrapped linear there, beside an adapter with linears of its own.
_WRAPPED = "to_wrap"
_CLASSES = {Direction.forward: "RowParallelLinear", Direction.backward: "ColumnParallelLinear"}
_INFERENCE_LAYERS = "tensor_parallel.inference_layers"  # they subclass Transformer Engine's linears
_EMBEDDING = "VocabParallelEmbedding"
_MODES = {Direction.forward: "row", Direction.backward: "column"}


def unwrapped(module: nn.Module, name: str) -> nn.Module:
    """The linear inside wrappers of PEFT.

    Raises:
        ValueError: a wrapper that replaces the linear's own communication.
    """
    while isinstance(inner := getattr(module, _WRAPPED, None), nn.Module):
        if any(base.__name__ == "TEFusedLoRALinear" for base in type(module).__mro__):
            raise ValueError(
                f"echo: {name} is a TEFusedLoRALinear, which replaces the all-reduce that Echo replaces by operations "
                "of its own. Expected use_transformer_engine_op_fuser=False (plain LoRA), or tp_comm=nccl"
            )
        module = inner
    return module


def tensor_parallel_group(linear: Any) -> dist.ProcessGroup:
    """The group on which the linear sums."""
    return linear.tp_group


def set_tensor_parallel_group(linear: Any, group: dist.ProcessGroup) -> None:
    """Makes the linear sum on `group`."""
    if hasattr(linear, "set_tensor_parallel_group"):
        linear.set_tensor_parallel_group(group)
    else:
        linear.tp_group = group


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether it is one of Megatron-core's linears or embeddings that are split over the tensor-parallel ranks."""
    layers = [require("megatron.core.tensor_parallel.layers", name) for name in (*_CLASSES.values(), _EMBEDDING)]
    return isinstance(module, tuple(layers)) or (
        _is_transformer_engine(module) and getattr(module, "parallel_mode", None) in _MODES.values()
    )


def check_linear(linear: Any, name: str, direction: Direction) -> None:
    """Raises ValueError when `linear` is not a tensor-parallel linear whose own all-reduce makes the site."""
    if isinstance(getattr(linear, "tp_group", None), EchoProcessGroup):
        raise ValueError(f"echo: {name} has Echo installed already; call uninstall() of the first installation before")
    if any(base.__module__.endswith(_INFERENCE_LAYERS) for base in type(linear).__mro__):
        raise ValueError(
            f"echo: {name} is a {type(linear).__name__}, which outside training has communication of its own. "
            "Expected Megatron-core's local layers or Transformer Engine's (transformer_impl), or tp_comm=nccl"
        )
    if _is_transformer_engine(linear):
        _check_transformer_engine(linear, name, direction)
    else:
        _check_local(linear, name, direction)


def _is_transformer_engine(module: nn.Module) -> bool:
    """A Linear, LayerNormLinear or other module of Transformer Engine, or one of Megatron-core's made of it."""
    base = getattr(transformer_engine("pytorch.module.base"), "TransformerEngineBaseModule", None)
    return base is not None and isinstance(module, base)


def _check_transformer_engine(linear: Any, name: str, direction: Direction) -> None:
    kind = f"{type(linear).__module__}.{type(linear).__name__}"
    if not hasattr(linear, "set_tensor_parallel_group"):
        raise ValueError(
            f"echo: {name} is a {kind} without set_tensor_parallel_group; use Transformer Engine 1.13 to 2.20"
        )
    mode = getattr(linear, "parallel_mode", None)
    if mode != _MODES[direction]:
        raise ValueError(
            f"echo: {name} is a {kind} with parallel_mode={mode!r}, expected {_MODES[direction]!r}: the all-reduce is "
            "not its own; use tp_comm=nccl"
        )
    if value := getattr(linear, "symmetric_ar_type", None):
        raise ValueError(
            f"echo: {name} has symmetric_ar_type={value!r}, which replaces the all-reduce; use tp_comm=nccl"
        )
    if used := [option for option in vars(linear) if option.startswith("ub_overlap_") and getattr(linear, option)]:
        raise ValueError(
            f"echo: {name} has {', '.join(used)}: userbuffers replace the all-reduce; use tp_comm_overlap=False"
        )


def _check_local(linear: Any, name: str, direction: Direction) -> None:
    expected = require("megatron.core.tensor_parallel.layers", _CLASSES[direction])
    if not isinstance(linear, expected):
        raise ValueError(
            f"echo: {name} is a {type(linear).__module__}.{type(linear).__name__}, expected Megatron-core's "
            f"{expected.__name__} or Transformer Engine's; build the model with get_gpt_layer_local_spec or "
            "get_gpt_layer_with_transformer_engine_spec"
        )
    if not hasattr(linear, "tp_group"):
        raise ValueError(f"echo: {name} has no tp_group; expected megatron-core 0.15.3 or newer")
    if direction is Direction.forward and getattr(linear, "explicit_expert_comm", False):
        raise ValueError(f"echo: {name} has explicit_expert_comm: the all-reduce is not its own; use tp_comm=nccl")
    sums_dgrad = linear.tp_group.size() == 1 or direction is Direction.forward or linear.allreduce_dgrad
    if not (sums_dgrad or linear.sequence_parallel):
        raise ValueError(f"echo: {name} has disable_grad_reduce: it sums no input gradient; use directions: [forward]")
