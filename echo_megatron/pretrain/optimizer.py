"""Megatron's AdamW (FP32 master weights under bf16) and its parameter scheduler, from `optim`."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from echo_megatron.pretrain.schema import OptimConfig


def build_optimizer(
    optim: OptimConfig, max_steps: int, chunks: list[DistributedDataParallel], dtype: torch.dtype
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW without weight decay on norms, and warm-up plus cosine decay to `min_lr` at `max_steps`.

    Args:
        optim: learning rate and AdamW's constants.
        max_steps: steps of the whole run; the scheduler counts steps, not samples.
        chunks: the model.
        dtype: of the parameters; under bf16 the optimizer keeps FP32 copies.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            min_lr=optim.min_lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=False,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    return optimizer, OptimizerParamScheduler(optimizer, **scheduler_options(optim, max_steps))


def scheduler_options(optim: OptimConfig, max_steps: int) -> dict[str, Any]:
    """Megatron's scheduler counted in steps: linear warm-up from 0, cosine decay to `min_lr` at `max_steps`."""
    return {
        "init_lr": 0.0,
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": optim.warmup_steps,
        "lr_decay_steps": max_steps,
        "lr_decay_style": "cosine",
        "start_wd": optim.weight_decay,
        "end_wd": optim.weight_decay,
        "wd_incr_steps": max_steps,
        "wd_incr_style": "constant",
    }


def step_if_finite(optimizer: MegatronOptimizer) -> float | None:
    """Clip and update; nothing is changed where a gradient is not finite.

    Returns:
        The gradient norm before clipping, the same on every rank, or None where it is NaN or infinite.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return None
    optimizer.step()
    return norm
