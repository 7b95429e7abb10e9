"""Hugging Face checkpoints in Megatron and back: logits are transformers', files come back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from echo_megatron.evaluate.hf import load_hf, save_hf
from echo_megatron.evaluate.hf_config import read_config
from echo_megatron.pretrain.cpu_shims import install_cpu_shims
from echo_megatron.pretrain.schema import Layers

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def make_checkpoint(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "5GB", **changes: Any
) -> Any:
    """A small random model, saved by transformers. Weights are large enough for attention to be far from uniform."""
    options: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**options | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def initialize(world_size: int) -> None:
    from megatron.core import parallel_state

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)


def megatron_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of the padded vocabulary, from every rank's part."""
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with torch.no_grad():
        local = model(tokens, positions, None).contiguous()
    parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, local)
    return torch.cat(parts, -1)


def _converts(
    rank: int,
    world_size: int,
    folder: Path,
    tokens: torch.Tensor,
    expected: torch.Tensor,
    options: dict,
    saved: Path | None,
) -> float:
    initialize(world_size)
    model = load_hf(folder, **options)
    logits = megatron_logits(model, tokens)
    vocab_size = model.hf_config.vocab_size
    assert torch.count_nonzero(logits[..., vocab_size:]) == 0  # padded rows
    if saved is not None:
        save_hf(model, saved)
    difference = (logits[..., :vocab_size] - expected).abs().max() / expected.abs().max()
    return float(difference)


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = (
        {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for path in (one, other)
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype is second[name].dtype and tensor.shape == second[name].shape, name
        as_bytes = (t.contiguous().view(torch.uint8) for t in (tensor, second[name]))
        assert torch.equal(*as_bytes), name


CASES = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, every head its group": ("qwen3", {"num_key_value_heads": 4}),
    "llama": ("llama", {}),
    "llama tied and scaled": ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}}),
    "llama, every head its group": ("llama", {"num_key_value_heads": 4, "rope_theta": 500000.0}),
    "llama, a vocabulary that two do not divide": ("llama", {"vocab_size": 101}),
    "qwen3 tied, a vocabulary that two do not divide": ("qwen3", {"vocab_size": 101, "tie_word_embeddings": True}),
    "qwen3, other epsilon": ("qwen3", {"rms_norm_eps": 0.1, "num_hidden_layers": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_and_files_come_back(tmp_path: Path, case: str) -> None:
    family, changes = CASES[case]
    reference = make_checkpoint(tmp_path / "hf", family, **changes)
    tokens = torch.randint(reference.config.vocab_size, (2, 33))
    expected = logits_of(reference, tokens)
    for tp in (1, 2):
        saved = tmp_path / f"back{tp}"
        differences = run_ranks(_converts, tp, tmp_path / "hf", tokens, expected, {}, saved)
        assert max(differences) < 1e-4
        assert_same_tensors(tmp_path / "hf", saved)
        again = AutoModelForCausalLM.from_pretrained(saved)
        assert torch.equal(logits_of(again, tokens), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_group_of_query_heads(tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path / "hf", family, num_key_value_heads=1)
    tokens = torch.randint(100, (1, 33))
    expected = logits_of(reference, tokens)
    saved = tmp_path / "back"
    assert run_ranks(_converts, 1, tmp_path / "hf", tokens, expected, {}, saved)[0] < 1e-4
    assert_same_tensors(tmp_path / "hf", saved)
    with pytest.raises(
        AssertionError, match=r"num_key_value_heads: expected a multiple of the tensor parallel size 2, got 1"
    ):
        run_ranks(_converts, 2, tmp_path / "hf", tokens, expected, {}, None)


def test_rope_scaling_beyond_the_original_length(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2}
    reference = make_checkpoint(tmp_path / "hf", "llama", rope_scaling=LLAMA3_ROPE, **sizes)
    tokens = torch.randint(100, (1, 8300))
    expected = logits_of(reference, tokens)
    make_checkpoint(tmp_path / "unscaled", "llama", **sizes)
    assert max(run_ranks(_converts, 2, tmp_path / "hf", tokens, expected, {}, None)) < 1e-4
    # The scaling matters at this length: without it the same weights give other logits.
    assert min(run_ranks(_converts, 2, tmp_path / "unscaled", tokens, expected, {}, None)) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_and_several_files_come_back_bit_for_bit(tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path / "hf", family, torch.bfloat16, shard="20KB", vocab_size=101)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    tokens = torch.randint(101, (1, 20))
    # In float32 from the same bits; read again, because .to() rounds the rotary frequencies as well.
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    expected = logits_of(reference, tokens)
    wide = {"dtype": torch.float32, "vocab_multiple": 64}
    assert max(run_ranks(_converts, 2, tmp_path / "hf", tokens, expected, wide, tmp_path / "wide")) < 1e-4
    assert all(t.dtype is torch.float32 for t in load_file(tmp_path / "wide" / "model.safetensors").values())
    assert read_config(tmp_path / "wide" / "config.json").dtype is torch.float32
    run_ranks(_round_trip, 2, tmp_path / "hf", tmp_path / "back", 20_000)
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files] and len(files) > 2
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in reference.parameters())
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(2 * t.numel() for t in tensors.values()) <= 20_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype is torch.bfloat16
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert torch.equal(logits_of(again, tokens), expected)


def _round_trip(rank: int, world_size: int, folder: Path, saved: Path, max_shard_bytes: int) -> None:
    from megatron.core.transformer.module import Float16Module

    initialize(world_size)
    model = load_hf(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    save_hf([Float16Module(model.config, model)], saved, max_shard_bytes=max_shard_bytes)


def test_padding_that_leaves_a_rank_no_word(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path / "hf", "llama", vocab_size=7)
    tokens = torch.randint(7, (1, 9))
    expected = logits_of(reference, tokens)
    saved = tmp_path / "back"
    differences = run_ranks(_converts, 2, tmp_path / "hf", tokens, expected, {"vocab_multiple": 64}, saved)
    assert max(differences) < 1e-4
    assert_same_tensors(tmp_path / "hf", saved)


def test_a_tied_checkpoint_may_hold_the_embedding_twice(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    reference = make_checkpoint(folder, "qwen3", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    tokens = torch.randint(100, (1, 9))
    assert run_ranks(_converts, 1, folder, tokens, logits_of(reference, tokens), {}, None)[0] < 1e-4
    tensors["lm_head.weight"][99, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AssertionError, match=r"lm_head\.weight: expected model\.embed_tokens\.weight's values"):
        run_ranks(_converts, 1, folder, tokens, torch.zeros(()), {}, None)


def _fused(
    rank: int, world_size: int, folder: Path, saved: Path, tokens: torch.Tensor, expected: torch.Tensor
) -> float:
    """With Transformer Engine's parameter names, its fused linear standing in for on PyTorch's operations."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    from echo_megatron.evaluate import hf_model

    class NormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, *args: Any, config: Any, **kwargs: Any):
            super().__init__(input_size, *args, config=config, **kwargs)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = torch.nn.functional.rms_norm(
                x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon
            )
            return super().forward(normed, *args, **kwargs)

    local = hf_model.layer_spec

    def layer_spec(layers: Layers, has_qk_norm: bool) -> Any:
        spec = local(Layers.local, has_qk_norm)
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        layer.self_attention.submodules.linear_qkv = NormColumnParallelLinear
        mlp = getattr(layer.mlp, "submodules", None) or layer.mlp.keywords["submodules"]
        mlp.linear_fc1 = NormColumnParallelLinear
        return spec

    hf_model.layer_spec = layer_spec
    initialize(world_size)
    model = load_hf(folder)
    assert "decoder.layers.1.mlp.linear_fc1.layer_norm_weight" in dict(model.named_parameters())
    save_hf(model, saved)
    return float((megatron_logits(model, tokens) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_fused_into_linears(tmp_path: Path, family: str) -> None:
    reference = make_checkpoint(tmp_path / "hf", family)
    tokens = torch.randint(100, (1, 9))
    differences = run_ranks(_fused, 2, tmp_path / "hf", tmp_path / "back", tokens, logits_of(reference, tokens))
    assert max(differences) < 1e-4
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def _trains_alike(rank: int, world_size: int, folder: Path) -> tuple[float, dict[str, bool]]:
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    initialize(world_size)
    model = load_hf(folder)
    owned = {name: param_is_not_tensor_parallel_duplicate(parameter) for name, parameter in model.named_parameters()}
    tokens = torch.arange(12)[None] % 100
    loss = model(tokens, torch.arange(12)[None], None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return float(loss), owned


def test_a_loaded_model_can_be_trained(tmp_path: Path) -> None:
    """The marks by which Megatron counts a parameter once in the gradient's norm are there, and the loss is right."""
    reference = make_checkpoint(tmp_path / "hf", "llama")
    tokens = torch.arange(12)[None] % 100
    expected = torch.nn.functional.cross_entropy(logits_of(reference, tokens)[0], tokens.roll(-1, 1)[0])
    results = run_ranks(_trains_alike, 2, tmp_path / "hf")
    for loss, _ in results:
        assert loss == pytest.approx(float(expected), rel=1e-4)
    assert not [name for name, owned in results[0][1].items() if not owned]
    second = results[1][1]
    assert {name for name, owned in second.items() if not owned} == {name for name in second if "layernorm" in name}


def _replicas(rank: int, world_size: int, folder: Path, saved: Path) -> None:
    from megatron.core import parallel_state

    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    save_hf(load_hf(folder), saved)


def test_data_parallel_replicas_save_one_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3")
    run_ranks(_replicas, 4, tmp_path / "hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_transformer_engine_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from echo_megatron.evaluate import hf_model

    monkeypatch.setattr(hf_model, "find_spec", lambda name: None)
    make_checkpoint(tmp_path / "hf", "qwen3")
    options = {"layers": Layers.transformer_engine}
    with pytest.raises(AssertionError, match="transformer-engine is not installed"):
        run_ranks(_converts, 1, tmp_path / "hf", torch.zeros(()), torch.zeros(()), options, None)
