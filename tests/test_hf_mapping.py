"""Rows of Hugging Face tensors take turns in Megatron's parameters: a bijection, on any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_megatron.evaluate.hf_config import HfConfig
from echo_megatron.evaluate.hf_mapping import deinterleave, hf_shapes, interleave, num_blocks, parameters

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}


@st.composite
def attentions(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Query groups, query heads of a group, channels of a head, tensor-parallel size."""
    tp = draw(st.sampled_from([1, 2, 4]))
    return tp * draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6)), tp


def numbered(*counts: int) -> list[torch.Tensor]:
    """Tensors of `counts` rows of two values; no value twice."""
    return list(torch.arange(2 * sum(counts)).view(-1, 2).split(list(counts)))


@settings(max_examples=200, deadline=None)
@given(attentions())
def test_query_key_value_is_a_bijection_in_megatrons_order(attention: tuple[int, int, int, int]) -> None:
    groups, heads, channels, tp = attention
    counts = [groups * heads * channels, groups * channels, groups * channels]
    q, k, v = parts = numbered(*counts)
    whole = interleave(parts, groups)
    assert sorted(whole[:, 0].tolist()) == sorted(torch.cat(parts)[:, 0].tolist())
    for actual, expected in zip(deinterleave(whole, counts, groups), parts, strict=True):
        assert torch.equal(actual, expected)
    for group in range(groups):
        rows = whole.view(groups, -1, 2)[group]
        assert torch.equal(rows[: heads * channels], q.view(groups, -1, 2)[group])
        assert torch.equal(rows[heads * channels : -channels], k.view(groups, -1, 2)[group])
        assert torch.equal(rows[-channels:], v.view(groups, -1, 2)[group])
    # A rank's part is made of the ranks' slices, and is the slice of the whole.
    slices = [part.chunk(tp) for part in parts]
    for rank, expected in enumerate(whole.chunk(tp)):
        assert torch.equal(interleave([part[rank] for part in slices], groups // tp), expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12))
def test_any_number_of_parts(num_parts: int, blocks: int) -> None:
    counts = [blocks * (index + 1) for index in range(num_parts)]
    parts = numbered(*counts)
    back = deinterleave(interleave(parts, blocks), counts, blocks)
    assert all(torch.equal(one, other) for one, other in zip(back, parts, strict=True))


def test_gate_and_up_lie_behind_each_other_on_every_rank() -> None:
    config = HfConfig("llama", **SIZES)
    entry = next(e for e in parameters(config) if "linear_fc1" in e.name)
    assert [tensor.name.split(".")[-2] for tensor in entry.tensors] == ["gate_proj", "up_proj"]
    gate, up = numbered(48, 48)
    assert torch.equal(interleave([gate, up], num_blocks(entry, config, 1)), torch.cat([gate, up]))
    assert torch.equal(interleave([gate[:24], up[:24]], num_blocks(entry, config, 2)), torch.cat([gate[:24], up[:24]]))


def test_tensors_of_a_family() -> None:
    for tied in (True, False):
        llama, qwen = (hf_shapes(HfConfig(name, tie_word_embeddings=tied, **SIZES)) for name in ("llama", "qwen3"))
        assert ("lm_head.weight" in llama) is not tied
        assert len(llama) == 2 * 9 + 2 + (not tied)
        norms = {f"model.layers.{layer}.self_attn.{name}_norm.weight": (16,) for layer in (0, 1) for name in "qk"}
        assert dict(qwen.items() - llama.items()) == norms
    assert llama["model.layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert llama["model.layers.1.self_attn.k_proj.weight"] == (32, 32)
    assert llama["model.layers.1.self_attn.o_proj.weight"] == (32, 64)
    assert llama["model.layers.1.mlp.down_proj.weight"] == (32, 48)
