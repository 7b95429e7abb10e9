"""config.json of Qwen3 and Llama-3 checkpoints; everything that is not understood is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Family:
    """What sets a model family apart, beyond its sizes."""

    architecture: str
    has_qk_norm: bool


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", has_qk_norm=True),
    "llama": Family("LlamaForCausalLM", has_qk_norm=False),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)

# The one value of a key that has no counterpart in the Megatron model; the key may also be missing, or null.
ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

# Say nothing about what the model computes; kept and written back.
CARRIED = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "is_llama_config",
    "layer_types",  # checked below
    "max_window_layers",  # of sliding windows, which use_sliding_window=False turns off
    "sliding_window",
    "tokenizer_class",
    "transformers.js_config",
    "use_cache",
    *ONLY_VALUES,
}

ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3's scaling of rotary frequencies, as config.json names its parameters."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class HfConfig:
    """Sizes and options of a checkpoint, by the names of config.json.

    Args:
        model_type: qwen3 or llama.
        dtype: of every tensor: torch.float32, torch.bfloat16 or torch.float16.
        rope_scaling: None or Llama-3's.
        carried: further keys of config.json that say nothing about what the model computes.

    Raises:
        ValueError: an unknown model_type, a size that is not a positive integer, or sizes that do not fit.
    """

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.bfloat16
    carried: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type: expected one of {', '.join(FAMILIES)}, got {self.model_type!r}")
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected a positive integer, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{name}: expected a positive number, got {value!r}")
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(f"tie_word_embeddings: expected true or false, got {self.tie_word_embeddings!r}")
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim: expected an even number, of which rotary embeddings turn pairs, got {self.head_dim}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype}")

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def to_json(self) -> dict[str, Any]:
        """config.json's content, in the keys that transformers 4 and 5 read."""
        scaling = None if self.rope_scaling is None else {"rope_type": "llama3"} | asdict(self.rope_scaling)
        return {
            **self.carried,
            "architectures": [self.family.architecture],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in SIZES},
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


def read_config(path: Path) -> HfConfig:
    """The configuration in the file `path`.

    Raises:
        ValueError: no JSON object, a key that is missing, or anything that is not understood; names file and key.
    """
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); a checkpoint has its config.json beside it"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error}); copy it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    try:
        return _parse({name: value for name, value in raw.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _parse(raw: dict[str, Any]) -> HfConfig:
    model_type = raw.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"model_type: expected one of {', '.join(FAMILIES)}, got {model_type!r}; no other is converted"
        )
    family = FAMILIES[model_type]
    architectures = raw.pop("architectures", [family.architecture])
    if architectures != [family.architecture]:
        raise ValueError(f"architectures: expected [{family.architecture!r}], got {architectures!r}")
    if "quantization_config" in raw:
        raise ValueError(
            f"quantization_config: expected none, got {raw['quantization_config']!r}; "
            "convert the checkpoint in 16 or 32 bits from which it was quantized"
        )
    for name, expected in ONLY_VALUES.items():
        if raw.get(name, expected) != expected:
            raise ValueError(f"{name}: expected {expected!r}, got {raw[name]!r}, which is not converted")
    kinds = raw.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"layer_types: expected full_attention in every layer, got {kinds!r}")
    for writer in ("transformers_version", "_name_or_path"):  # of the one who wrote the file
        raw.pop(writer, None)
    theta, scaling = _rope(raw)
    dtype = raw.pop("dtype", raw.pop("torch_dtype", None))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"torch_dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if "head_dim" not in raw and family.has_qk_norm:
        # transformers' default is a constant that no size of the model decides; a file without it is not Qwen3's.
        raise ValueError("head_dim: expected the size of a head, got none; add it to the file")
    if "head_dim" not in raw:
        # Llama-3's own files have none: it is the quotient.
        hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
            raise ValueError(
                f"head_dim: expected it where hidden_size={hidden} is no multiple of num_attention_heads={heads}, "
                "got none; add it to the file"
            )
        raw["head_dim"] = hidden // heads
    needed = [*SIZES, "rms_norm_eps"]
    if missing := [name for name in needed if name not in raw]:
        raise ValueError(f"{', '.join(missing)}: expected in the file, got none; copy the checkpoint's own config.json")
    values = {name: raw.pop(name) for name in needed}
    tied = raw.pop("tie_word_embeddings", False)
    if unknown := sorted(raw.keys() - CARRIED):
        raise ValueError(
            f"{', '.join(unknown)}: not understood; delete from the file what does not change what the model computes"
        )
    return HfConfig(
        model_type=model_type,
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=tied,
        dtype=DTYPES[dtype],
        carried=raw,
        **values,
    )


def _rope(raw: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_theta` and `rope_scaling` of transformers 4, or both in `rope_parameters` of 5."""
    given = {name: raw.pop(name) for name in ("rope_parameters", "rope_scaling") if name in raw}
    if len(given) == 2:
        raise ValueError(
            f"expected rope_parameters or rope_scaling, got both: {given}; delete the one that is not meant"
        )
    where, rope = next(iter(given.items()), ("rope_scaling", {}))
    if not isinstance(rope, dict):
        raise ValueError(f"{where}: expected an object, got {rope!r}")
    rope = dict(rope)
    bases = [source.pop("rope_theta") for source in (rope, raw) if "rope_theta" in source]
    if not bases or bases[0] != bases[-1]:
        raise ValueError(f"rope_theta: expected one value, got {bases or 'none'}")
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}.partial_rotary_factor: expected 1.0, got another value, which is not converted")
    if kind not in ("default", "llama3"):
        raise ValueError(f"{where}.rope_type: expected default or llama3, got {kind!r}, which is not converted")
    names = set(ROPE_SCALING) if kind == "llama3" else set()
    if rope.keys() != names:
        raise ValueError(f"{where}: expected {sorted(names)} beside rope_type={kind}, got {sorted(rope)}")
    for name, value in rope.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{where}.{name}: expected a positive number, got {value!r}")
    return bases[0], RopeScaling(**rope) if kind == "llama3" else None
