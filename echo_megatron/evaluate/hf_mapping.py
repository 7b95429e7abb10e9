"""Which Hugging Face tensors make up which Megatron parameter, once, as data; used in both directions.

A Megatron parameter is made of one or more Hugging Face tensors whose rows are cut into blocks that take turns. The
rows of `linear_qkv` are, for each query group, its query heads, its key and its value; those of `linear_fc1` are, for
each rank, its part of `gate_proj` and of `up_proj`. Rank r of P has the r-th P-th of every tensor, so a rank's
parameter is made of the ranks' slices alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from echo_megatron.evaluate.hf_config import HfConfig


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the checkpoint.

    Args:
        name: in the file.
        shape: by the names that `sizes` gives numbers to.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """A parameter of Megatron's model and the tensors it is made of.

    Args:
        name: with the local layers.
        tensors: whose blocks take turns.
        split: the dimension that tensor parallelism divides; None: every rank has the whole.
        fused_name: with Transformer Engine's layers, where it differs.
        has_block_per_group: the rows are cut into a block per query group (else: a block per rank).
        only: the option of the model without which there is no such parameter: qk_norm or untied.
    """

    name: str
    tensors: tuple[HfTensor, ...]
    split: int | None
    fused_name: str = ""
    has_block_per_group: bool = False
    only: str = ""


def _at(name: str, *shape: str) -> HfTensor:
    return HfTensor(f"model.{name}.weight", shape)


_LAYER = "decoder.layers.{layer}."
_HF = "layers.{layer}."
EMBEDDING = Parameter("embedding.word_embeddings.weight", (_at("embed_tokens", "vocab", "hidden"),), 0)
LAYER = (
    Parameter(
        _LAYER + "input_layernorm.weight",
        (_at(_HF + "input_layernorm", "hidden"),),
        None,
        _LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Parameter(
        _LAYER + "self_attention.linear_qkv.weight",
        (
            _at(_HF + "self_attn.q_proj", "query", "hidden"),
            _at(_HF + "self_attn.k_proj", "key", "hidden"),
            _at(_HF + "self_attn.v_proj", "key", "hidden"),
        ),
        0,
        has_block_per_group=True,
    ),
    Parameter(
        _LAYER + "self_attention.q_layernorm.weight", (_at(_HF + "self_attn.q_norm", "head"),), None, only="qk_norm"
    ),
    Parameter(
        _LAYER + "self_attention.k_layernorm.weight", (_at(_HF + "self_attn.k_norm", "head"),), None, only="qk_norm"
    ),
    Parameter(_LAYER + "self_attention.linear_proj.weight", (_at(_HF + "self_attn.o_proj", "hidden", "query"),), 1),
    Parameter(
        _LAYER + "pre_mlp_layernorm.weight",
        (_at(_HF + "post_attention_layernorm", "hidden"),),
        None,
        _LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    Parameter(
        _LAYER + "mlp.linear_fc1.weight",
        (_at(_HF + "mlp.gate_proj", "ffn", "hidden"), _at(_HF + "mlp.up_proj", "ffn", "hidden")),
        0,
    ),
    Parameter(_LAYER + "mlp.linear_fc2.weight", (_at(_HF + "mlp.down_proj", "hidden", "ffn"),), 1),
)
FINAL_NORM = Parameter("decoder.final_layernorm.weight", (_at("norm", "hidden"),), None)
OUTPUT = Parameter("output_layer.weight", (HfTensor("lm_head.weight", ("vocab", "hidden")),), 0, only="untied")


def sizes(config: HfConfig) -> dict[str, int]:
    """The sizes that the shapes name."""
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "head": config.head_dim,
        "query": config.num_attention_heads * config.head_dim,
        "key": config.num_key_value_heads * config.head_dim,
    }


def parameters(config: HfConfig) -> Iterator[Parameter]:
    """Every parameter of the model, layer by layer, names filled in."""
    has = {"": True, "qk_norm": config.family.has_qk_norm, "untied": not config.tie_word_embeddings}
    yield EMBEDDING
    for layer in range(config.num_hidden_layers):
        for entry in LAYER:
            if has[entry.only]:
                yield replace(
                    entry,
                    name=entry.name.format(layer=layer),
                    fused_name=entry.fused_name.format(layer=layer),
                    tensors=tuple(replace(t, name=t.name.format(layer=layer)) for t in entry.tensors),
                )
    for entry in (FINAL_NORM, OUTPUT):
        if has[entry.only]:
            yield entry


def hf_shapes(config: HfConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in the order in which they are written."""
    named = sizes(config)
    return {
        tensor.name: tuple(named[size] for size in tensor.shape)
        for entry in parameters(config)
        for tensor in entry.tensors
    }


def num_blocks(entry: Parameter, config: HfConfig, tp: int) -> int:
    """Into how many blocks a rank's rows of each tensor are cut."""
    return config.num_key_value_heads // tp if entry.has_block_per_group else 1


def interleave(parts: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Rows of several tensors, cut into `blocks` blocks each, that take turns.

    Args:
        parts: [rows_i, ...] each, `blocks` dividing rows_i.

    Returns:
        [sum of rows_i, ...]: block 0 of every part, block 1 of every part, …
    """
    if len(parts) == 1:
        return parts[0]
    cut = [part.unflatten(0, (blocks, part.size(0) // blocks)) for part in parts]
    return torch.cat(cut, 1).flatten(0, 1)


def deinterleave(whole: torch.Tensor, rows: Sequence[int], blocks: int) -> list[torch.Tensor]:
    """The parts that `interleave` made `whole` of.

    Args:
        whole: [sum of rows, ...].
        rows: of each part, divisible by `blocks`.
    """
    if len(rows) == 1:
        return [whole]
    cut = whole.unflatten(0, (blocks, whole.size(0) // blocks))
    return [part.flatten(0, 1) for part in cut.split([count // blocks for count in rows], 1)]
