"""Megatron-core's GPTModel of a Hugging Face configuration, and the check that a model is that of a configuration."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from echo_megatron.evaluate.hf_config import HfConfig
from echo_megatron.pretrain.model import dense_options, layer_spec
from echo_megatron.pretrain.schema import Layers


def check_parallel(config: HfConfig) -> int:
    """The tensor-parallel size.

    Raises:
        ValueError: model parallelism is not initialized, there are pipeline stages, or a size does not divide.
    """
    if not parallel_state.model_parallel_is_initialized():
        raise ValueError("model parallelism is not initialized; call parallel_state.initialize_model_parallel first")
    if (pp := parallel_state.get_pipeline_model_parallel_world_size()) != 1:
        raise ValueError(f"pipeline parallel size: expected 1, got {pp}; split a model over tensor-parallel ranks only")
    tp = int(parallel_state.get_tensor_model_parallel_world_size())
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % tp:
            raise ValueError(
                f"{name}: expected a multiple of the tensor parallel size {tp}, got {getattr(config, name)}; "
                "use a size that divides it"
            )
    return tp


def padded_vocab_size(vocab_size: int, vocab_multiple: int, tp: int) -> int:
    """Rows of the embedding: `vocab_size` rounded up to a multiple of vocab_multiple * tp."""
    if vocab_multiple < 1:
        raise ValueError(f"vocab_multiple: expected a positive integer, got {vocab_multiple}")
    step = vocab_multiple * tp
    return -(-vocab_size // step) * step


def rope_scaling_factor(config: HfConfig) -> float | None:
    """The one parameter of Llama-3's scaling that Megatron-core takes; None without scaling.

    Raises:
        ValueError: another parameter is not the constant that Megatron-core has for it.
    """
    if config.rope_scaling is None:
        return None
    constants = inspect.signature(RotaryEmbedding._apply_scaling).parameters
    for name, value in asdict(config.rope_scaling).items():
        if name != "factor" and value != constants[name].default:
            raise ValueError(
                f"rope_scaling.{name}: expected {constants[name].default}, which megatron-core fixes, got {value}; "
                "this model cannot be expressed"
            )
    return config.rope_scaling.factor


def build_gpt(config: HfConfig, dtype: torch.dtype, layers: Layers, vocab_multiple: int) -> GPTModel:
    """This rank's part of the model on the CPU; its parameters are allocated and hold nothing yet.

    Raises:
        ValueError: as `check_parallel` and `rope_scaling_factor`; Transformer Engine is asked for and not installed.
    """
    tp = check_parallel(config)
    factor = rope_scaling_factor(config)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype: expected torch.float32 or torch.bfloat16, got {dtype}; give dtype= to convert")
    if layers is Layers.auto:
        raise ValueError("layers: expected Layers.local or Layers.transformer_engine, got Layers.auto")
    if layers is Layers.transformer_engine and find_spec("transformer_engine") is None:
        raise ValueError(
            "layers=transformer_engine: transformer-engine is not installed; install it, or use Layers.local"
        )
    transformer_config = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.family.has_qk_norm,
        # Every value comes from the files; Megatron would draw the whole of each weight on every rank.
        perform_initialization=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        **dense_options(dtype, layers),
    )
    gpt = GPTModel(
        config=transformer_config,
        transformer_layer_spec=layer_spec(layers, config.family.has_qk_norm),
        vocab_size=padded_vocab_size(config.vocab_size, vocab_multiple, tp),
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        rope_scaling=factor is not None,
        **({} if factor is None else {"rope_scaling_factor": factor}),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    return gpt.to(dtype)  # PyTorch's norms are float32 otherwise


def check_model(model: GPTModel, config: HfConfig) -> None:
    """Refuse a model that computes something else than `config` says.

    Raises:
        ValueError: names what differs, what the configuration has and what the model has.
    """
    own = model.config
    rotary = model.rotary_pos_emb.inv_freq
    factor = rope_scaling_factor(config)
    expected = RotaryEmbedding(
        kv_channels=config.head_dim,
        rotary_percent=1.0,
        rotary_base=config.rope_theta,
        rope_scaling=factor is not None,
        **({} if factor is None else {"rope_scaling_factor": factor}),
        use_cpu_initialization=True,
    ).inv_freq
    differences = {
        "num_hidden_layers": (config.num_hidden_layers, own.num_layers),
        "hidden_size": (config.hidden_size, own.hidden_size),
        "intermediate_size": (config.intermediate_size, own.ffn_hidden_size),
        "num_attention_heads": (config.num_attention_heads, own.num_attention_heads),
        "num_key_value_heads": (config.num_key_value_heads, own.num_query_groups),
        "head_dim": (config.head_dim, own.kv_channels),
        "rms_norm_eps": (config.rms_norm_eps, own.layernorm_epsilon),
        "tie_word_embeddings": (config.tie_word_embeddings, model.share_embeddings_and_output_weights),
        "QK norm": (config.family.has_qk_norm, own.qk_layernorm),
        "gated MLP": (True, own.gated_linear_unit),
        "hidden_act": (F.silu, own.activation_func),
        "biases": (False, own.add_bias_linear or own.add_qkv_bias),
        "normalization": ("RMSNorm", own.normalization),
        "zero-centred norms": (False, own.layernorm_zero_centered_gamma),
        "interleaved rotary embeddings": (False, own.rotary_interleaved),
        "sliding window": (None, own.window_size),
        "experts": (None, own.num_moe_experts),
    }
    wrong = [f"{name}: expected {want}, got {got}" for name, (want, got) in differences.items() if want != got]
    # Not bit for bit: the model's may have been computed on a GPU.
    if rotary.shape != expected.shape or not torch.allclose(rotary.cpu(), expected.cpu(), rtol=1e-5, atol=0.0):
        wrong.append(
            f"rope_theta, rope_scaling: expected {config.rope_theta}, {config.rope_scaling}, got other frequencies"
        )
    if model.vocab_size < config.vocab_size:
        wrong.append(f"vocab_size: expected at least {config.vocab_size}, got {model.vocab_size}")
    if wrong:
        raise ValueError(f"the model is not that of the configuration: {'; '.join(wrong)}")
