"""A tiny Qwen3-shaped GPTModel of the real megatron-core, trained with Megatron's schedules on gloo."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all

VOCAB, SEQUENCE, HIDDEN = 128, 16, 64


@dataclass
class Trainer:
    """Model chunks, optimizer and the trace of the sites that communicated."""

    config: object
    chunks: list
    optimizer: object
    schedule: object
    trace: list = field(default_factory=list)


def build_trainer(
    tp: int,
    pp: int = 1,
    vpp: int | None = None,
    num_layers: int = 4,
    cp: int = 1,
    model_options=None,
    adapt=None,
    adapt_spec=None,
    num_experts=None,
    shards_optimizer=False,
    **options,
) -> Trainer:
    """Initializes model parallelism over all ranks and builds everything with one seed.

    Args:
        tp, pp, vpp, num_layers, cp: sizes.
        model_options: of the config, gives further arguments of GPTModel.
        adapt: changes each GPTModel before it is wrapped.
        adapt_spec: changes the layer's spec.
        num_experts: of every layer; None: dense.
        shards_optimizer: Megatron's distributed optimizer.
        options: of TransformerConfig.
    """
    install_cpu_shims()
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
    )
    seed_all(1234)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=128,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        num_moe_experts=num_experts,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
        **options,
    )
    layer_spec = get_gpt_layer_local_spec(num_experts=num_experts, qk_layernorm=True, normalization="RMSNorm")
    if adapt_spec:
        adapt_spec(layer_spec)
    chunks = []
    for stage in range(vpp or 1):
        ends = {"vp_stage": stage if vpp else None}
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer_spec,
            vocab_size=VOCAB,
            max_sequence_length=4 * SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **ends),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **ends),
            **ends,
            **(model_options(config) if model_options else {}),
        )
        if adapt:
            adapt(model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=shards_optimizer
        )
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            params_dtype=torch.float32,
            clip_grad=1.0,
            use_distributed_optimizer=shards_optimizer,
        ),
        chunks,
    )
    return Trainer(config, chunks, optimizer, get_forward_backward_func())


def batches(step: int, count: int, batch_size: int, sequence: int):
    generator = torch.Generator().manual_seed(step)
    position = torch.arange(sequence).unsqueeze(0).expand(batch_size, sequence)
    mask = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1)
    for _ in range(count):
        tokens = torch.randint(0, VOCAB, (batch_size, sequence + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), position, mask, tokens[:, 1:].contiguous()


def _forward_step(fail, iterator, model):
    tokens, position, mask, labels = next(iterator)
    output = model(tokens, position, mask, labels=labels, loss_mask=torch.ones(labels.shape))
    if fail == "forward":
        raise RuntimeError("planted failure after the forward pass")
    if fail == "backward":
        output.register_hook(_raise)

    def loss(values):
        return values.mean(), {"loss": values.mean().detach()}

    return output, loss


def _raise(grad):
    raise RuntimeError("planted failure in the backward pass")


def run_step(
    trainer: Trainer,
    step: int,
    *,
    microbatches: int = 1,
    batch_size: int = 2,
    sequence: int = SEQUENCE,
    evaluate: bool = False,
    fail: str | None = None,
    update: bool = True,
) -> list[float]:
    """One optimizer step (or one evaluation); returns the losses of the microbatches on the last stage."""
    for chunk in trainer.chunks:
        chunk.train(not evaluate)
        if not evaluate:
            chunk.zero_grad_buffer()
    if not evaluate:
        trainer.optimizer.zero_grad()
    iterators = [iter(batches(step, microbatches, batch_size, sequence)) for _ in trainer.chunks]
    with torch.set_grad_enabled(not evaluate):
        losses = trainer.schedule(
            forward_step_func=functools.partial(_forward_step, fail),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=trainer.chunks if len(trainer.chunks) > 1 else trainer.chunks[0],
            num_microbatches=microbatches,
            seq_length=sequence,
            micro_batch_size=batch_size,
            forward_only=evaluate,
        )
    if not evaluate and update:
        trainer.optimizer.step()
    return [one["loss"].item() for one in losses]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Reduced gradients by parameter that is trained, after a step."""
    named = ((f"{i}.{n}", p) for i, chunk in enumerate(trainer.chunks) for n, p in chunk.named_parameters())
    return {name: parameter.main_grad.clone() for name, parameter in named if parameter.requires_grad}


def record_sites(trainer: Trainer, communicator) -> None:
    """Appends (direction, chunk, idx) of every call that communicates to `trainer.trace`."""
    original = communicator.transport.all_reduce

    def recording(x, site, *rest):
        trainer.trace.append((site.direction.name, site.chunk, site.idx))
        return original(x, site, *rest)

    communicator.transport.all_reduce = recording


def train(trainer, steps=2, **options):
    """Losses of every step, and the gradients of the last."""
    return [run_step(trainer, step, **options) for step in range(steps)], gradients(trainer)
