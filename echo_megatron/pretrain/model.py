"""Qwen3-shaped GPT of Megatron-core's local layers or Transformer Engine's, in Megatron's data-parallel class."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from echo_megatron.pretrain.attention import SdpaCoreAttention
from echo_megatron.pretrain.norm import TorchNorm
from echo_megatron.pretrain.schema import Layers, ModelConfig, PretrainConfig, Recompute


def num_parameters(model: ModelConfig, padded_vocab_size: int) -> int:
    """Parameters of the whole model, from its sizes alone."""
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    attention = model.hidden_size * (query + key_value) + query * model.hidden_size + 2 * model.kv_channels
    mlp = 3 * model.hidden_size * model.ffn_hidden_size
    norms = 2 * model.hidden_size
    embeddings = padded_vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return embeddings + model.num_layers * (attention + mlp + norms) + model.hidden_size


def transformer_config(config: PretrainConfig, dtype: torch.dtype, layers: Layers = Layers.local) -> TransformerConfig:
    """Megatron's configuration of the model.

    Args:
        config: the run.
        dtype: torch.bfloat16 or torch.float32, of parameters and activations.
        layers: local or Transformer Engine's.
    """
    model, trainer = config.model, config.trainer
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        layernorm_epsilon=model.layernorm_epsilon,
        qk_layernorm=True,
        init_method=partial(torch.nn.init.normal_, mean=0.0, std=model.init_std),
        output_layer_init_method=partial(
            torch.nn.init.normal_, mean=0.0, std=model.init_std / math.sqrt(2 * model.num_layers)
        ),
        init_method_std=model.init_std,
        # On GPUs too: initial weights then do not depend on the tensor-parallel size or the device.
        use_cpu_initialization=True,
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        sequence_parallel=trainer.sequence_parallel,
        deterministic_mode=trainer.deterministic,
        **dense_options(dtype, layers),
        **(recompute if model.recompute is Recompute.full else {}),
    )


def dense_options(dtype: torch.dtype, layers: Layers) -> dict[str, Any]:
    """What every dense model here has of TransformerConfig's options: RMSNorm, SwiGLU, no biases, no dropout.

    Args:
        dtype: torch.bfloat16 or torch.float32, of parameters and activations.
        layers: local or Transformer Engine's, whose fused operations are then used.
    """
    fused = layers is Layers.transformer_engine
    return {
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bias_activation_fusion": fused,
        "apply_rope_fusion": fused,
        # Otherwise the loss goes over FP32 logits of the whole vocabulary several times.
        "cross_entropy_loss_fusion": fused,
        "cross_entropy_fusion_impl": "te" if fused else "native",
        # Kernels of Apex, which is not installed.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }


def layer_spec(layers: Layers, qk_layernorm: bool = True) -> ModuleSpec:
    """Transformer Engine's layer, or Megatron's local one with `SdpaCoreAttention` and `TorchNorm`."""
    if layers is Layers.transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SdpaCoreAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = TorchNorm
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchNorm
    return spec


def block_spec(config: TransformerConfig, layers: Layers, qk_layernorm: bool = True) -> Any:
    """What GPTModel takes: the layer, and for local layers the norm behind the last one, too."""
    spec = layer_spec(layers, qk_layernorm)
    if layers is Layers.transformer_engine:
        return spec
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=TorchNorm)


def build_gpt(config: PretrainConfig, dtype: torch.dtype, layers: Layers = Layers.local) -> GPTModel:
    """This rank's part of the model, on the CPU, freshly initialized. Model parallelism has to be initialized."""
    megatron_config = transformer_config(config, dtype, layers)
    gpt = GPTModel(
        config=megatron_config,
        transformer_layer_spec=block_spec(megatron_config, layers),
        vocab_size=config.data.padded_vocab_size,
        max_sequence_length=config.model.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=config.model.rotary_base,
        share_embeddings_and_output_weights=config.model.tie_embeddings,
    )
    for module in gpt.modules():
        if isinstance(module, VocabParallelEmbedding):
            # In its deterministic mode the embedding indexes its weight, whose gradient adds the tokens of other ranks,
            # all masked to one row, one after the other. The gradient of F.embedding sorts first and is deterministic
            # as well (tests/gpu/test_embedding.py).
            module.deterministic_mode = False
    return gpt


def build_model(
    config: PretrainConfig, dtype: torch.dtype, layers: Layers, device: torch.device
) -> list[DistributedDataParallel]:
    """The model chunks that Megatron's schedules take: one, on `device`, with FP32 gradients."""
    gpt = build_gpt(config, dtype, layers).to(device)
    megatron_config = gpt.config
    megatron_config.finalize_model_grads_func = finalize_model_grads
    module = Float16Module(megatron_config, gpt) if dtype is torch.bfloat16 else gpt
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    chunk = DistributedDataParallel(megatron_config, ddp_config, module)
    chunk.broadcast_params()
    return [chunk]
