"""What is wrong with config.json or the files of a Hugging Face checkpoint is said by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from echo_megatron.evaluate import hf_files
from echo_megatron.evaluate.hf import load_hf
from echo_megatron.evaluate.hf_config import HfConfig, RopeScaling, read_config
from echo_megatron.evaluate.hf_files import INDEX, SINGLE, CheckpointReader, CheckpointWriter

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_config(folder: Path, raw: Any) -> Path:
    path = folder / "config.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


# config.json as it is published with Qwen3-0.6B, Llama-3.2-1B and SmolLM2-135M, a Llama by its architecture.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": SCALING | {"factor": 32.0},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "vocab_size": 49152,
    },
}


class TestConfig:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_published_ones_are_understood_and_keep_their_keys(self, tmp_path: Path, name: str) -> None:
        raw = PUBLISHED[name]
        written = read_config(write_config(tmp_path, raw)).to_json()
        changed = {"transformers_version", *(() if "head_dim" in raw else ("head_dim",))}
        lost = {key for key, value in raw.items() if value is not None and written.get(key) != value}
        assert lost <= changed and written["head_dim"] in (64, 128)

    def test_llama_without_head_dim_has_the_quotient(self, tmp_path: Path) -> None:
        config = read_config(write_config(tmp_path, LLAMA))
        assert (config.head_dim, config.dtype, config.rope_scaling) == (8, torch.bfloat16, None)
        assert not config.family.has_qk_norm and not config.tie_word_embeddings

    def test_both_ways_of_writing_rotary_embeddings(self, tmp_path: Path) -> None:
        old = read_config(write_config(tmp_path, LLAMA | {"rope_scaling": SCALING}))
        new = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
        new["rope_parameters"] = SCALING | {"rope_theta": 500000.0}
        assert read_config(write_config(tmp_path, new)) == old
        assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
        legacy = {name: value for name, value in SCALING.items() if name != "rope_type"} | {"type": "llama3"}
        assert read_config(write_config(tmp_path, LLAMA | {"rope_scaling": legacy})) == old

    @pytest.mark.parametrize("raw", [LLAMA, QWEN3 | {"rope_scaling": SCALING, "tie_word_embeddings": True}])
    def test_written_and_read_again_it_is_the_same(self, tmp_path: Path, raw: dict[str, Any]) -> None:
        kept = {"eos_token_id": [1, 2], "initializer_range": 0.02, "use_cache": True, "pad_token_id": None}
        config = read_config(write_config(tmp_path, raw | kept | {"transformers_version": "4.57.0"}))
        written = config.to_json()
        again = read_config(write_config(tmp_path, written))
        assert again.to_json() == written
        assert written["eos_token_id"] == [1, 2] and "transformers_version" not in written
        assert {name: written[name] for name in raw} == raw

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"model_type": "mistral"}, "model_type: expected one of qwen3, llama, got 'mistral'"),
            ({"model_type": None}, "model_type: expected one of qwen3, llama, got None"),
            ({"model_type": ["llama"]}, "model_type: expected one of"),
            ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures: expected \['LlamaForCausalLM'\]"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected none, got .*gptq"),
            ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
            ({"attention_bias": True}, "attention_bias: expected False, got True"),
            ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
            ({"attention_dropout": 0.1}, r"attention_dropout: expected 0\.0, got 0\.1"),
            ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: expected full_attention"),
            ({"layer_types": 3}, "layer_types: expected full_attention in every layer, got 3"),
            ({"pretraining_tp": 2}, "pretraining_tp: expected 1, got 2"),
            ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected 1\.0, got 0\.5"),
            ({"num_experts": 8, "moe_intermediate_size": 4}, "moe_intermediate_size, num_experts: not understood"),
            ({"logit_scale": 2.0}, "logit_scale: not understood"),
            ({"hidden_size": None}, "hidden_size"),
            ({"num_key_value_heads": None}, "num_key_value_heads: expected in the file, got none"),
            ({"rms_norm_eps": None}, "rms_norm_eps: expected in the file, got none"),
            ({"vocab_size": "100"}, "vocab_size: expected a positive integer, got '100'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer, got 0"),
            ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, got True"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a positive number, got 'small'"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
            ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads=4, got 3"),
            ({"hidden_size": 33}, "head_dim: expected it where hidden_size=33 is no multiple"),
            ({"hidden_size": "33"}, "head_dim: expected it where hidden_size=33 is no multiple"),
            ({"head_dim": 7}, "head_dim: expected an even number"),
            ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype: expected one of .*, got 'float8_e4m3fn'"),
            ({"torch_dtype": None}, "torch_dtype: expected one of .*, got None"),
            ({"rope_theta": None}, "rope_theta: expected one value, got none"),
            ({"rope_theta": -1}, "rope_theta: expected a positive number, got -1"),
            ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_theta: expected one value, got \[10000\.0, 500000\.0\]"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                "rope_type: expected default or llama3, got 'linear'",
            ),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "expected default or llama3, got 'yarn'"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: expected .*high_freq_factor"),
            ({"rope_scaling": SCALING | {"beta_fast": 1}}, "rope_scaling: expected .*, got .*beta_fast"),
            ({"rope_scaling": SCALING | {"factor": "8"}}, r"rope_scaling\.factor: expected a positive number, got '8'"),
            ({"rope_scaling": SCALING | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1"),
            ({"rope_scaling": "llama3"}, "rope_scaling: expected an object, got 'llama3'"),
            ({"rope_scaling": SCALING, "rope_parameters": SCALING}, "rope_parameters or rope_scaling, got both"),
        ],
    )
    def test_refuses_by_name_what_it_does_not_understand(
        self, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        path = write_config(tmp_path, LLAMA | changes)
        with pytest.raises(ValueError, match=message) as caught:
            read_config(path)
        assert str(path) in str(caught.value)

    def test_qwen3_needs_its_head_dim(self, tmp_path: Path) -> None:
        assert read_config(write_config(tmp_path, QWEN3)).head_dim == 16
        with pytest.raises(ValueError, match="head_dim: expected the size of a head, got none"):
            read_config(write_config(tmp_path, QWEN3 | {"head_dim": None}))

    def test_a_file_that_is_no_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
            read_config(tmp_path / "config.json")
        with pytest.raises(ValueError, match=r"config\.json: is not JSON"):
            read_config(write_config(tmp_path, "{"))
        with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, got list"):
            read_config(write_config(tmp_path, []))

    def test_made_by_hand_it_is_checked_as_well(self) -> None:
        sizes = {name: LLAMA[name] for name in LLAMA if name.startswith(("num", "hidden", "inter", "vocab", "max"))}
        options: dict[str, Any] = sizes | {"head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
        assert HfConfig("llama", **options).dtype is torch.bfloat16
        for changes, message in (({"head_dim": 0}, "head_dim"), ({"dtype": torch.int8}, "dtype: expected one of")):
            with pytest.raises(ValueError, match=message):
                HfConfig("llama", **options | changes)
        with pytest.raises(ValueError, match="model_type: expected one of"):
            HfConfig("gpt2", **options)


SHAPES = {"a": (4, 3), "b": (6,), "c": (2, 2)}


def make_files(folder: Path, max_shard_bytes: int = 10**9) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    tensors = {name: torch.randn(shape[::-1]).T for name, shape in SHAPES.items() if len(shape) == 2}  # not contiguous
    tensors = {name: tensors.get(name, torch.randn(shape)) for name, shape in SHAPES.items()}
    writer = CheckpointWriter(folder, SHAPES, torch.float32, max_shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    return tensors


def check(folder: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: Any = torch.float32) -> None:
    with CheckpointReader(folder) as reader:
        reader.check(shapes, dtype, [])


class TestFiles:
    @pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(10**9, 1), (88, 1), (87, 2), (72, 2), (1, 3)])
    def test_come_back_in_files_of_the_size_asked_for(
        self, tmp_path: Path, max_shard_bytes: int, num_files: int
    ) -> None:
        tensors = make_files(tmp_path, max_shard_bytes)
        assert len(list(tmp_path.glob("*.safetensors"))) == num_files
        assert (tmp_path / INDEX).exists() is (num_files > 1)
        with CheckpointReader(tmp_path) as reader:
            reader.check(SHAPES, torch.float32, [])
            for name, tensor in tensors.items():
                assert torch.equal(reader.read(name), tensor)
            assert torch.equal(reader.read("a", 0, 1, 3), tensors["a"][1:3])
            assert torch.equal(reader.read("a", 1, 1, 3), tensors["a"][:, 1:3])

    def test_tensors_that_are_not_those_of_the_configuration(self, tmp_path: Path) -> None:
        make_files(tmp_path)
        with pytest.raises(ValueError, match="expected the tensors d, which no file has"):
            check(tmp_path, SHAPES | {"d": (1,)})
        with pytest.raises(ValueError, match=r"model\.safetensors: unexpected tensor b"):
            check(tmp_path, {"a": (4, 3), "c": (2, 2)})
        with pytest.raises(ValueError, match=r"model\.safetensors: a: expected shape \[3, 4\] .*, got \[4, 3\]"):
            check(tmp_path, SHAPES | {"a": (3, 4)})
        with pytest.raises(ValueError, match=r"a: expected torch\.bfloat16 by config\.json, got torch\.float32"):
            check(tmp_path, dtype=torch.bfloat16)
        save_file(load_file(tmp_path / SINGLE) | {"b": torch.zeros(6, dtype=torch.float8_e4m3fn)}, tmp_path / SINGLE)
        with pytest.raises(ValueError, match=r"b: expected one of F32, BF16, F16, got F8_E4M3"):
            check(tmp_path, dtype=None)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 10**6), st.booleans())
    def test_a_truncated_file_is_named_wherever_it_is_cut(
        self, tmp_path_factory: pytest.TempPathFactory, where: int, sharded: bool
    ) -> None:
        folder = tmp_path_factory.mktemp("cut")
        make_files(folder, 60 if sharded else 10**9)
        path = sorted(folder.glob("*.safetensors"))[-1]
        content = path.read_bytes()
        path.write_bytes(content[: where % len(content)])
        with pytest.raises(ValueError, match=r"is truncated.*copy the file again") as caught:
            check(folder)
        assert str(path) in str(caught.value)

    def test_a_truncated_tensor_is_named(self, tmp_path: Path) -> None:
        make_files(tmp_path)
        path = tmp_path / SINGLE
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        order = sorted(SHAPES, key=lambda name: header[name]["data_offsets"][0])
        path.write_bytes(content[:-1])
        with pytest.raises(
            ValueError, match=rf"expected {len(content)} bytes, got {len(content) - 1}; {order[-1]} is the"
        ):
            check(tmp_path)
        path.write_bytes(content[: -88 + 1])
        with pytest.raises(ValueError, match=f"; {order[0]} is the first tensor that is not whole"):
            check(tmp_path)

    @pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 64, b"<html>" * 20, b"\x08" + b"\0" * 7 + b"[1,2,3] "])
    def test_a_file_of_something_else(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / SINGLE).write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors: is .*not a safetensors file"):
            CheckpointReader(tmp_path)
        (tmp_path / SINGLE).unlink()
        make_files(tmp_path)
        with (tmp_path / SINGLE).open("ab") as file:
            file.write(b"more")
        with pytest.raises(ValueError, match=r"model\.safetensors: is not a safetensors file that can be read"):
            CheckpointReader(tmp_path)

    def test_pickles_are_never_opened(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(ValueError, match=r"got pytorch_model\.bin; these are pickles, which run code"):
            CheckpointReader(tmp_path)

    def test_a_folder_without_files(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"expected model\.safetensors or .*, got nothing"):
            CheckpointReader(tmp_path)

    def test_an_index_that_does_not_fit(self, tmp_path: Path) -> None:
        make_files(tmp_path, 60)
        path = tmp_path / INDEX
        index = json.loads(path.read_text())
        files = index["weight_map"]
        first, second = files["a"], files["b"]

        def refused(content: Any, message: str) -> None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
            with pytest.raises(ValueError, match=message):
                CheckpointReader(tmp_path)

        refused("{", r"index\.json: expected JSON with a weight_map")
        refused({}, r"index\.json: expected JSON with a weight_map")
        refused({"weight_map": {}}, "expected a weight_map with tensors, got an empty one")
        refused(
            {"weight_map": files | {"a": f"../{first}"}}, r"a: expected a \.safetensors file of this folder, got '\.\./"
        )
        refused(
            {"weight_map": files | {"a": "a.bin"}}, r"a: expected a \.safetensors file of this folder, got 'a\.bin'"
        )
        refused({"weight_map": files | {"a": "x.safetensors"}}, r"x\.safetensors: is missing; .* expects the tensor a")
        refused({"weight_map": files | {"a": second}}, rf"{second}: expected the tensor a, as .* says, got none")
        refused({"weight_map": files | {"d": second}}, rf"{second}: expected the tensor d, as .* says, got none")
        refused({"weight_map": {"a": first, "c": second}}, rf"{second}: has the tensor b, which .* does not say")
        (tmp_path / second).unlink()
        refused(index, rf"{second}: is missing; .* expects the tensor")

    def test_what_cannot_be_read_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_files(tmp_path)

        def fails(path: str, framework: str) -> Any:
            raise OSError("no such device")

        monkeypatch.setattr(hf_files, "safe_open", fails)
        with pytest.raises(ValueError, match=r"model\.safetensors: .*no such device"):
            CheckpointReader(tmp_path)


class TestHub:
    def test_asks_for_configuration_and_tensors_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        asked = []

        def snapshot_download(name: str, **options: Any) -> str:
            asked.append((name, options))
            return str(tmp_path)

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
            load_hf("owner/name")
        assert asked == [("owner/name", {"allow_patterns": ["config.json", "model*.safetensors*"]})]

    def test_says_what_to_do_where_there_is_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        def snapshot_download(name: str, **options: Any) -> str:
            raise ConnectionError("unreachable")

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(
            ValueError, match=r"owner/name: is no folder, and .*\(ConnectionError: unreachable\); where"
        ):
            load_hf("owner/name")
        for name in ("name", "/there/is/none", Path("owner/name")):
            with pytest.raises(ValueError, match="expected a folder, or owner/name on the Hugging Face hub"):
                load_hf(name)


def test_without_model_parallelism(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    make_files(tmp_path)
    with pytest.raises(ValueError, match="model parallelism is not initialized"):
        load_hf(tmp_path)
    shutil.rmtree(tmp_path)
