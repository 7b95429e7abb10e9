"""The options of a pretraining run as Hydra structured configs; names, types, ranges and combinations are checked.

Misspelt keys and wrong types fail in Hydra, against these dataclasses; ranges in `__post_init__`; what concerns several
groups in `schema_checks.validate`. `register_configs` puts the schemas and the `tp_comm` presets into Hydra's
ConfigStore.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from echo_megatron.config import PRESETS, EchoConfig


class Device(Enum):
    """`auto`: CUDA where there are enough GPUs for the parallel sizes, else CPU with a line that says so."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """`auto`: bf16 on CUDA and fp32 on CPU. `bf16` keeps FP32 master weights, gradients and optimizer state."""

    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


class Resume(Enum):
    """`auto`: go on from the run folder's latest checkpoint, if any. `never`: refuse a folder that holds a run."""

    auto = "auto"
    never = "never"


class Recompute(Enum):
    """`full`: every layer's activations are recomputed in the backward pass. `none`: they are kept."""

    none = "none"
    full = "full"


class Layers(Enum):
    """`transformer_engine`: Transformer Engine's fused layers. `local`: Megatron-core's own, of PyTorch operations.

    `auto`: Transformer Engine's on CUDA where it is installed, else local; the log and run.json say which.
    """

    auto = "auto"
    local = "local"
    transformer_engine = "transformer_engine"


@dataclass
class ModelConfig:
    """A dense GPT with Qwen3's layer: RMSNorm, QK norm, SwiGLU, rotary positions, no biases, tied embeddings."""

    name: str = "qwen3"
    num_layers: int = 28
    hidden_size: int = 1024
    ffn_hidden_size: int = 3072
    num_attention_heads: int = 16
    num_query_groups: int = 8
    kv_channels: int = 128
    sequence_length: int = 2048
    rotary_base: int = 1_000_000
    layernorm_epsilon: float = 1e-6
    init_std: float = 0.02
    tie_embeddings: bool = True
    layers: Layers = Layers.auto
    recompute: Recompute = Recompute.none

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "rotary_base",
        ):
            _require_at_least(f"model.{name}", getattr(self, name), 1)
        _require_at_least("model.sequence_length", self.sequence_length, 2)
        _require_between("model.layernorm_epsilon", self.layernorm_epsilon, 0, 1, lower_open=True)
        _require_between("model.init_std", self.init_std, 0, 1, lower_open=True)
        _require_at_least("model.kv_channels", self.kv_channels, 2)
        if self.kv_channels % 2:
            raise ValueError(f"model.kv_channels: expected an even number (rotary positions), got {self.kv_channels}")
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"model.num_query_groups: expected a divisor of num_attention_heads={self.num_attention_heads}, "
                f"got {self.num_query_groups}"
            )


@dataclass
class DataConfig:
    """The tokens: a prepared folder, or Megatron indexed datasets by their prefixes; and the vocabulary they come from.

    Attributes:
        name: what reports call the data.
        folder: what `echo_megatron.data` prepared, with its manifest.json; or null.
        train: without `folder`: prefixes (paths without .bin and .idx), mixed in proportion to their tokens.
        validation: prefixes of held-out tokens, or empty.
        split: where `validation` is empty: Megatron's "train,validation" weights over the documents, e.g. "99,1".
        vocab_size: tokens of the tokenizer.
        padded_vocab_size: rows of the embedding; at least vocab_size and divisible by the tensor-parallel size.
        eod_id: id of the token that ends a document.
        cache_dir: where the sample indices are kept; null: beside the tokens.
        prepare: command that makes the tokens, shown where they are missing.
    """

    name: str = "tokens"
    folder: str | None = None
    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    split: str | None = None
    vocab_size: int = 151_669
    padded_vocab_size: int = 151_936
    eod_id: int = 151_643
    cache_dir: str | None = None
    prepare: str = ""

    def __post_init__(self) -> None:
        _require_at_least("data.vocab_size", self.vocab_size, 2)
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"data.padded_vocab_size: expected at least vocab_size={self.vocab_size}, got {self.padded_vocab_size}"
            )
        _require_between("data.eod_id", self.eod_id, 0, self.vocab_size - 1)


@dataclass
class OptimConfig:
    """AdamW with linear warm-up and cosine decay over the whole run, in steps."""

    lr: float = 3.0e-4
    min_lr: float = 3.0e-5
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-5
    weight_decay: float = 0.1
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        _require_between("optim.lr", self.lr, 0, math.inf, lower_open=True)
        _require_between("optim.min_lr", self.min_lr, 0, self.lr)
        _require_at_least("optim.warmup_steps", self.warmup_steps, 0)
        _require_between("optim.beta1", self.beta1, 0, 1, upper_open=True)
        _require_between("optim.beta2", self.beta2, 0, 1, upper_open=True)
        _require_between("optim.eps", self.eps, 0, 1, lower_open=True)
        _require_between("optim.weight_decay", self.weight_decay, 0, math.inf)
        _require_between("optim.clip_grad", self.clip_grad, 0, math.inf, lower_open=True)


@dataclass
class TrainerConfig:
    """How the run is cut into steps, processes, checkpoints and reports.

    Attributes:
        max_steps: optimizer steps of the run; the learning rate decays over all of them.
        micro_batch_size: sequences of one forward pass on one data-parallel rank.
        global_batch_size: sequences of one optimizer step; the rest is gradient accumulation.
        tensor_parallel, pipeline_parallel, data_parallel: ranks of each kind; their product is the number of processes.
        sequence_parallel: norms and residuals work on a share of the sequence on each tensor-parallel rank.
        deterministic: deterministic kernels: a resumed run equals the uninterrupted one bit for bit on GPUs too.
        val_interval: steps between validation losses; 0: none. There is always one after the last step.
        val_batches: global batches of one validation loss, the same ones each time.
        save_interval: steps between checkpoints; 0: only the last one. A stopped run saves one as well.
        keep_checkpoints: how many of the newest checkpoints stay.
        log_interval: steps between printed lines where the output is not a terminal.
        inspect_every: steps between steps whose quantized all-reduces are measured (`diagnostics.Inspector`); 0: none.
        max_nonfinite_steps: consecutive steps with a non-finite loss or gradient, skipped, after which the run fails.
        resume: see Resume.
        accept_changes: settings (or their leading parts, e.g. `tp_comm`) that a resumed run may change.
        timeout_s: seconds that a process waits for the others before it fails.
    """

    max_steps: int = 12_716
    micro_batch_size: int = 24
    global_batch_size: int = 384
    tensor_parallel: int = 4
    pipeline_parallel: int = 1
    data_parallel: int = 1
    sequence_parallel: bool = False
    device: Device = Device.auto
    precision: Precision = Precision.auto
    deterministic: bool = True
    val_interval: int = 500
    val_batches: int = 4
    save_interval: int = 500
    keep_checkpoints: int = 2
    log_interval: int = 10
    inspect_every: int = 0
    max_nonfinite_steps: int = 3
    resume: Resume = Resume.auto
    accept_changes: list[str] = field(default_factory=list)
    timeout_s: int = 600

    def __post_init__(self) -> None:
        for name in (
            *(
                "max_steps",
                "micro_batch_size",
                "global_batch_size",
                "tensor_parallel",
                "pipeline_parallel",
                "data_parallel",
            ),
            *("val_batches", "keep_checkpoints", "log_interval", "max_nonfinite_steps", "timeout_s"),
        ):
            _require_at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("val_interval", "save_interval", "inspect_every"):
            _require_at_least(f"trainer.{name}", getattr(self, name), 0)
        rows = self.micro_batch_size * self.data_parallel
        if self.global_batch_size % rows:
            raise ValueError(
                f"trainer.global_batch_size: expected a multiple of micro_batch_size * data_parallel = "
                f"{self.micro_batch_size} * {self.data_parallel} = {rows}, got {self.global_batch_size}; "
                f"the next above is {-(-self.global_batch_size // rows) * rows}"
            )

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def num_microbatches(self) -> int:
        """Forward passes of one data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)


@dataclass
class PretrainConfig:
    """One pretraining run; its folder is `runs_dir`/`name`."""

    name: str = "pretrain"
    runs_dir: str = "runs"
    seed: int = 1234
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tp_comm: EchoConfig = field(default_factory=EchoConfig)

    def __post_init__(self) -> None:
        _require_between("seed", self.seed, 0, 2**31 - 1)
        if not self.name or Path(self.name).is_absolute() or ".." in Path(self.name).parts:
            raise ValueError(f"name: expected a folder name under runs_dir, got {self.name!r}")

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.runs_dir) / self.name


def from_composed(composed: Any) -> PretrainConfig:
    """The run of a composed configuration.

    Raises:
        ValueError: a key that no schema has (Hydra lets `+key=value` add one), or a value out of range.
    """
    _refuse_unknown(composed, PretrainConfig, "")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, PretrainConfig)
    return config


def _refuse_unknown(node: Any, schema: type, prefix: str) -> None:
    known = {f.name: f.default_factory for f in fields(schema)}
    for key in node:
        if key not in known:
            raise ValueError(f"{prefix}{key}: unknown key; expected one of {', '.join(known)}")
        if is_dataclass(factory := known[key]):
            _refuse_unknown(node[key], factory, f"{prefix}{key}.")


def register_configs() -> None:
    """Register the schemas and the `tp_comm` presets with Hydra; the YAML files under configs/ start from them."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    store.store(name="schema", node=PretrainConfig)
    store.store(group="model", name="schema", node=ModelConfig)
    store.store(group="data", name="schema", node=DataConfig)
    store.store(group="optim", name="schema", node=OptimConfig)
    store.store(group="trainer", name="schema", node=TrainerConfig)
    for name in PRESETS:
        store.store(group="tp_comm", name=f"preset_{name}", node=EchoConfig.preset(name))


def _require_at_least(name: str, value: int, lower: int) -> None:
    if value < lower:
        raise ValueError(f"{name}: expected at least {lower}, got {value}")


def _require_between(
    name: str, value: float, lower: float, upper: float, *, lower_open: bool = False, upper_open: bool = False
) -> None:
    inside = (lower < value if lower_open else lower <= value) and (value < upper if upper_open else value <= upper)
    if not inside or not math.isfinite(value):
        interval = f"{'(' if lower_open else '['}{lower}, {upper}{')' if upper_open or upper == math.inf else ']'}"
        raise ValueError(f"{name}: expected a number in {interval}, got {value}")
