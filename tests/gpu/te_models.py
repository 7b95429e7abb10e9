"""Small Megatron models of Transformer Engine's layers (or of local ones), with Megatron's DDP and optimizer.

`te_cases.py` and `te_graph_cases.py` build them; the same code runs on the CPU with local layers, for development.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echo_megatron.config import TransportName

TP = 2
HYBRID_PATTERN = "*-*-"


@dataclass(frozen=True)
class Setting:
    """Where the cases run and the models' sizes; FP8 wants every GEMM dimension divisible by 16."""

    layers: str = "te"
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    hidden: int = 512
    heads: int = 8
    head_size: int = 64
    ffn: int = 1024
    vocab: int = 1024
    sequence: int = 128
    batch: int = 2
    num_layers: int = 4

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def transport(self) -> TransportName:
        return TransportName.p2p if self.on_gpu else TransportName.collective


GPU = Setting()
CPU = Setting("local", "cpu", torch.float32, 64, 4, 16, 128, 128, 16, 2, 4)


@dataclass
class Trainer:
    setting: Setting
    config: Any
    chunk: nn.Module
    optimizer: Any
    schedule: Callable[..., Any]
    mask: Tensor | None = None
    after_backward: Callable[[], None] = lambda: None

    @property
    def model(self) -> nn.Module:
        """The bare model."""
        module = self.chunk
        while type(module).__name__ in ("DistributedDataParallel", "Float16Module"):
            module = module.module
        return module


# -- building


def transformer_config(setting: Setting, **options: Any) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments: dict[str, Any] = {
        "num_layers": setting.num_layers,
        "hidden_size": setting.hidden,
        "num_attention_heads": setting.heads,
        "num_query_groups": setting.heads // 2,
        "kv_channels": setting.head_size,
        "ffn_hidden_size": setting.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,  # it would be compiled first, in every process
        "apply_rope_fusion": False,
        "masked_softmax_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": not setting.on_gpu,
        "tensor_model_parallel_size": TP,
        "gradient_accumulation_fusion": False,
        "bf16": setting.dtype is torch.bfloat16,
        "params_dtype": setting.dtype,
        "pipeline_dtype": setting.dtype,
        "finalize_model_grads_func": finalize_model_grads,
    }
    return TransformerConfig(**{**arguments, **options})


def layer_spec(setting: Setting, qk_layernorm: bool) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if setting.layers == "te":
        return specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
    return specs.get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")


def seed_everything(setting: Setting, graphs: bool) -> None:
    """One seed for every model, and the random-number tracker that CUDA graphs need where they are asked for."""
    from megatron.core.tensor_parallel import random

    torch.manual_seed(1234)
    if setting.on_gpu:
        random.model_parallel_cuda_manual_seed(1234, te_rng_tracker=graphs, force_reset_rng=True)
    else:
        from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all

        install_cpu_shims()
        seed_all(1234)


def experts(setting: Setting, config: Any) -> nn.Module:
    """Every MLP is a layer of experts."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    chosen = {"num_experts": config.num_moe_experts, "qk_layernorm": config.qk_layernorm}
    if setting.layers == "te":
        spec = specs.get_gpt_layer_with_transformer_engine_spec(**chosen)
    else:
        spec = specs.get_gpt_layer_local_spec(**chosen, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=setting.vocab,
        max_sequence_length=4 * setting.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def gpt(setting: Setting, config: Any, *, tied: bool = False) -> nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    spec, mtp = layer_spec(setting, config.qk_layernorm), None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=setting.layers == "te")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=setting.vocab,
        max_sequence_length=4 * setting.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=mtp,
    )


def hybrid(setting: Setting, config: Any) -> nn.Module:
    """Attention and MLP layers in turn; Mamba layers need a package of their own and have no sites."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config=config,
        hybrid_stack_spec=_hybrid_stack_spec(setting),
        vocab_size=setting.vocab,
        max_sequence_length=4 * setting.sequence,
        hybrid_layer_pattern=HYBRID_PATTERN,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def _hybrid_stack_spec(setting: Setting) -> Any:
    if setting.layers == "te":
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    from dataclasses import replace

    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer

    hybrid_block.TENorm = WrappedTorchNorm  # the final norm, which is Transformer Engine's without asking
    whole = layer_spec(setting, qk_layernorm=False).submodules
    no_mlp = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    no_attention = {
        "input_layernorm": IdentityOp,
        "self_attention": IdentityOp,
        "self_attn_bda": IdentityFuncOp,
    }
    return ModuleSpec(
        module=hybrid_block.HybridStack,
        submodules=hybrid_block.HybridStackSubmodules(
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=replace(whole, **no_mlp)),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=replace(whole, **no_attention)),
        ),
    )


def build(
    setting: Setting,
    *,
    model: Callable[..., nn.Module] = gpt,
    prepare: Callable[[nn.Module], None] | None = None,
    with_mask: bool = False,
    delay_wgrad: bool = False,
    **options: Any,
) -> Trainer:
    """A model with Megatron's DDP and optimizer, the same weights every time.

    Args:
        setting: where and how large.
        model: builds the bare model from setting and config.
        prepare: changes the bare model before it is wrapped.
        with_mask: batches carry the attention mask as a tensor, as Megatron's data loader gives it.
        delay_wgrad: DDP takes a delayed weight gradient when its linear computes it.
        options: of TransformerConfig; `graphable` asks for the random-number tracker of a model with CUDA graphs.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.full_cuda_graph import get_shared_capture_stream
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    graphs = options.pop("graphable", False) or options.get("cuda_graph_impl", "none") != "none"
    forget_fp8()
    seed_everything(setting, graphs)
    config = transformer_config(setting, **options)
    bare = model(setting, config)
    if setting.on_gpu:
        bare.cuda()
    if prepare:
        prepare(bare)
    wrapped = Float16Module(config, bare) if config.bf16 else bare
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, delay_wgrad_compute=delay_wgrad
    )
    if config.cuda_graph_impl == "full_iteration":
        # Megatron's training loop does so: gradients must be accumulated on the stream that is captured.
        stream = get_shared_capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            chunk = DistributedDataParallel(config, ddp, wrapped)
        torch.cuda.current_stream().wait_stream(stream)
    else:
        chunk = DistributedDataParallel(config, ddp, wrapped)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=config.bf16, params_dtype=setting.dtype, clip_grad=1.0), [chunk]
    )
    trainer = Trainer(setting, config, chunk, optimizer, get_forward_backward_func())
    if with_mask or not setting.on_gpu:
        length = setting.sequence
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        trainer.mask = mask.expand(setting.batch, 1, length, length).contiguous().to(setting.device)
    return trainer


def forget_fp8() -> None:
    """FP8's amax buffers are process-wide and would keep those of the models before."""
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:
        return
    FP8GlobalStateManager.reset()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
