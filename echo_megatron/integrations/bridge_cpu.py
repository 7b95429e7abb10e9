"""Everything that Megatron-Bridge needs in order to train a small model on a CPU, for trying it out and for tests.

Bridge imports Transformer Engine, which has no CPU kernels, and takes CUDA for granted. Found one at a time by running
without them, beyond what Megatron-core needs (`pretrain/cpu_shims.py`):

1. `initialize_megatron` asserts a GPU, seeds CUDA generators and compiles fused CUDA functions ahead of time.
2. DDP is built on a stream of its own; the log asks CUDA for memory; checkpoints hold the CUDA generator's state.
3. Where Transformer Engine is installed Megatron-core takes its norms, its Adam and its multi-tensor kernels.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch

from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all

# Overrides of a recipe that a CPU can run: local layers in FP32, PyTorch's kernels, gloo. Megatron's distributed
# optimizer can't load its checkpoints with PyTorch's Adam.
CPU_OVERRIDES = (
    "mixed_precision=null",
    "model.bf16=false",
    "model.params_dtype=torch.float32",
    "model.transformer_impl=local",
    "model.gradient_accumulation_fusion=false",
    "model.masked_softmax_fusion=false",
    "model.bias_dropout_fusion=false",
    "model.apply_rope_fusion=false",
    "model.cross_entropy_loss_fusion=false",
    "model.cross_entropy_fusion_impl=native",
    "optimizer.bf16=false",
    "optimizer.use_distributed_optimizer=false",
    "optimizer.overlap_param_gather=false",
    "ddp.use_distributed_optimizer=false",
    "ddp.overlap_param_gather=false",
    "dataset.create_attention_mask=true",
    "dataset.pin_memory=false",
    "dist.distributed_backend=gloo",
)

_installed = False


def install_bridge_cpu_shims() -> None:
    """Make Bridge train on the CPU in this process, for good. Call before the model is built; twice is harmless."""
    global _installed
    if _installed:
        return
    _installed = True
    install_cpu_shims()
    from megatron.bridge.training import initialize, setup

    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)  # (1)
    setup.set_jit_fusion_options = lambda *args, **kwargs: None
    initialize._set_random_seed = lambda seed, *args, **kwargs: seed_all(seed)
    torch.cuda.Stream = lambda *args, **kwargs: torch.cuda.current_stream()  # type: ignore[assignment, misc]  # (2)
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda *args: (0, 0)
    torch.cuda.max_memory_allocated = torch.cuda.max_memory_reserved = lambda *args, **kwargs: 0
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *args: None
    _take_torch_optimizers()


def _take_torch_optimizers() -> None:
    """What Megatron-core itself falls back to where Transformer Engine is not installed (3)."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    optimizer.Adam, optimizer.SGD = torch.optim.AdamW, torch.optim.SGD
    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.Adam = torch.optim.Adam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = False
    for module in (clip_grads, base):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


def local_layer_spec(config: Any) -> Any:
    """Megatron-core's local layers with a final norm that runs on a CPU, for `config.model.transformer_layer_spec`."""
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layers = [local_layer_spec(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
