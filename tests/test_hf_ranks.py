"""Hugging Face checkpoints on ranks: what is read, what is refused, and that no rank is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
from test_hf import LLAMA3_ROPE, assert_same_tensors, initialize, make_checkpoint

from echo_megatron.evaluate.hf import load_hf, save_hf
from echo_megatron.evaluate.hf_config import read_config
from echo_megatron.evaluate.hf_files import SINGLE, CheckpointReader, CheckpointWriter
from echo_megatron.pretrain.cpu_shims import install_cpu_shims
from echo_megatron.pretrain.schema import Layers


def message_of(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """What the ValueError says; empty where there is none."""
    try:
        call(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def _loads(rank: int, world_size: int, folders: list[Path]) -> list[str]:
    initialize(world_size)
    return [message_of(load_hf, folder) for folder in folders]


def test_load_refuses_wrong_checkpoints_on_every_rank(tmp_path: Path) -> None:
    messages: dict[Path, str] = {}

    def case(name: str, message: str, config: dict | None = None, tensors: Callable[[dict], Any] | None = None) -> Path:
        folder = tmp_path / name
        make_checkpoint(folder, "qwen3" if config is None else "llama")
        if config is not None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if tensors is not None:
            content = load_file(folder / SINGLE)
            tensors(content)
            save_file(content, folder / SINGLE)
        messages[folder] = message
        return folder

    norm, key = "model.layers.1.self_attn.k_norm.weight", "model.layers.0.self_attn.k_proj.weight"
    case("whole", "")
    case("missing", f"expected the tensors {norm}, which no file has", None, lambda t: t.pop(norm))
    case("extra", "unexpected tensor model.bias", None, lambda t: t.update({"model.bias": torch.zeros(2)}))
    case("shape", f"{key}: expected shape [32, 32] by config.json, got [32, 31]", None, lambda t: _narrow(t, key))
    case("type", f"{key}: expected torch.float32 by config.json, got torch.bfloat16", None, lambda t: _round(t, key))
    case("tied", "unexpected tensor lm_head.weight", {"tie_word_embeddings": True, "head_dim": 16}, _other_head)
    case(
        "heads",
        "self_attn.o_proj.weight: expected shape [32, 128] by config.json, got [32, 64]",
        {"num_attention_heads": 8},
    )
    case(
        "odd", "intermediate_size: expected a multiple of the tensor parallel size 2, got 47", {"intermediate_size": 47}
    )
    case("family", "_norm.weight; config.json is another model's, or not understood")
    config = tmp_path / "family" / "config.json"
    config.write_text(config.read_text().replace("qwen3", "llama").replace("Qwen3", "Llama"))
    scaling = {"rope_theta": 1e4} | LLAMA3_ROPE
    for name, value, fixed in (
        ("low_freq_factor", 2.0, 1),
        ("high_freq_factor", 8.0, 4),
        ("original_max_position_embeddings", 4096, 8192),
    ):
        message = f"rope_scaling.{name}: expected {fixed}, which megatron-core fixes, got {value}"
        case(name, message, {"rope_parameters": scaling | {name: value}})
    cut = case("cut", "is truncated: expected") / SINGLE
    cut.write_bytes(cut.read_bytes()[:-100])
    half = case("half", "dtype: expected torch.float32 or torch.bfloat16, got torch.float16; give dtype= to convert")
    make_checkpoint(half, "qwen3", torch.float16)
    messages[tmp_path / "tied"] = "lm_head.weight: expected model.embed_tokens.weight's values"
    for got in run_ranks(_loads, 2, list(messages)):
        for (folder, message), text in zip(messages.items(), got, strict=True):
            assert message in text and bool(text) is bool(message), (folder, text)


def _narrow(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:, :-1].contiguous()


def _round(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].bfloat16()


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] += 1


def _counts(rank: int, world_size: int, folder: Path) -> tuple[int, int, int, int]:
    """Values read in all and at most at once; values of this rank's model and of its largest parameter."""
    initialize(world_size)
    counts = []
    read = CheckpointReader.read

    def counted(*args: Any) -> torch.Tensor:
        tensor = read(*args)
        counts.append(tensor.numel())
        return tensor

    CheckpointReader.read = counted  # type: ignore[method-assign]
    sizes = [parameter.numel() for parameter in load_hf(folder).parameters()]
    return sum(counts), max(counts), sum(sizes), max(sizes)


def test_a_rank_reads_its_own_slices_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", hidden_size=64, vocab_size=512)
    for read, most, size, largest in run_ranks(_counts, 2, tmp_path / "hf"):
        assert read == size and most == largest


def _saves(rank: int, world_size: int, folder: Path, out: Path) -> dict[str, str]:
    initialize(world_size)
    model = load_hf(folder)
    config = model.hf_config
    messages = {
        "exists": message_of(save_hf, model, folder),
        "no bytes": message_of(save_hf, model, out / "x", max_shard_bytes=0),
        "one rank": message_of(save_hf, model, out / "x", max_shard_bytes=rank),
        "heads": message_of(save_hf, model, out / "x", replace(config, num_attention_heads=8)),
        "vocabulary": message_of(save_hf, model, out / "x", replace(config, vocab_size=101)),
        "base": message_of(save_hf, model, out / "x", replace(config, rope_theta=1e5)),
        "head": message_of(save_hf, model, out / "x", replace(config, head_dim=8)),
        "tied": message_of(save_hf, model, out / "x", replace(config, tie_word_embeddings=True)),
        "family": message_of(save_hf, model, out / "x", replace(config, model_type="llama")),
        "not a model": message_of(save_hf, torch.nn.Linear(2, 2), out / "x"),
        "chunks": message_of(save_hf, [model, model], out / "x"),
        "a file above": message_of(save_hf, model, folder / SINGLE / "x"),
    }
    model.decoder.layers[0].adapter = torch.nn.Linear(2, 2)
    messages["adapter"] = message_of(save_hf, model, out / "x")
    del model.decoder.layers[0].adapter
    model.decoder.final_layernorm.double()
    messages["type"] = message_of(save_hf, model, out / "x")
    model.decoder.final_layernorm.float()
    add, calls = CheckpointWriter.add, []

    def fails(self: CheckpointWriter, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        add(self, *args)

    CheckpointWriter.add = fails  # type: ignore[method-assign]
    messages["full"] = message_of(save_hf, model, out / "x", max_shard_bytes=1)
    CheckpointWriter.add = add  # type: ignore[method-assign]
    assert len(calls) == (3 if rank == 0 else 0)
    del model.hf_config
    messages["no configuration"] = message_of(save_hf, model, out / "x")
    messages[""] = message_of(save_hf, model, out / "good", replace(config, dtype=torch.bfloat16))
    return messages


def test_save_refuses_on_every_rank_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    make_checkpoint(tmp_path / "hf", "qwen3")
    expected = {
        "exists": "hf: exists; name another folder, or delete it",
        "no bytes": "max_shard_bytes: expected a positive number, got 0",
        "one rank": "max_shard_bytes: expected a positive number, got 0",
        "heads": "num_attention_heads: expected 8, got 4",
        "vocabulary": "vocab_size: expected at least 101, got 100",
        "base": "rope_theta, rope_scaling: expected 100000.0, None, got other frequencies",
        "head": "head_dim: expected 8, got 16",
        "tied": "tie_word_embeddings: expected True, got False",
        "family": "QK norm: expected False, got True",
        "not a model": "expected a GPTModel, got Linear",
        "chunks": "model: expected one chunk, got 2",
        "a file above": "cannot be written",
        "adapter": "parameters decoder.layers.0.adapter.bias, decoder.layers.0.adapter.weight have no counterpart",
        "type": "decoder.final_layernorm.weight: expected torch.float32, the model's params_dtype, got torch.float64",
        "full": "cannot be written ([Errno 28] No space left on device)",
        "no configuration": "hf_config: expected one for a model that load_hf has not made, got none",
        "": "",
    }
    for rank, messages in enumerate(run_ranks(_saves, 2, tmp_path / "hf", out)):
        assert messages.keys() == expected.keys()
        for name, text in messages.items():
            assert expected[name] in text and bool(text) is bool(name), (rank, name, text)
        assert messages["one rank"].startswith("rank 0: ") is (rank == 1)
    assert [path.name for path in out.iterdir()] == ["good"]
    assert sorted(path.name for path in (out / "good").iterdir()) == ["config.json", SINGLE]
    assert_same_tensors(tmp_path / "hf", out / "good")
    assert read_config(out / "good" / "config.json").dtype is torch.float32  # the parameters'


def _pipeline(rank: int, world_size: int, folder: Path) -> list[str]:
    from megatron.core import parallel_state

    install_cpu_shims()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    return [message_of(load_hf, folder)]


def _options(rank: int, world_size: int, folder: Path) -> list[str]:
    initialize(world_size)
    wrong: list[dict[str, Any]] = [{"dtype": torch.int8}, {"vocab_multiple": 0}, {"layers": Layers.auto}]
    return [message_of(load_hf, folder, **options) for options in wrong]


def test_options_and_parallel_sizes_that_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "llama")
    for (text,) in run_ranks(_pipeline, 2, tmp_path / "hf"):
        assert "pipeline parallel size: expected 1, got 2" in text
    (texts,) = run_ranks(_options, 1, tmp_path / "hf")
    for text, message in zip(
        texts, ("dtype: expected torch", "vocab_multiple: expected", "layers: expected"), strict=True
    ):
        assert message in text


def test_save_without_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        save_hf(torch.nn.Linear(1, 1), tmp_path / "x")
