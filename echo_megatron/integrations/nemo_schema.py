"""The options of `recipes/nemo_pretrain.py` as Hydra structured configs; sections of the thin loop's where they fit.

Misspelt keys and wrong types fail in Hydra, against these dataclasses; ranges in `__post_init__`; what concerns several
sections in `from_composed`. Nothing here imports NeMo.
"""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf

from echo_megatron.config import EchoConfig
from echo_megatron.integrations.options import OPTION_NAMES, resolve
from echo_megatron.pretrain.schema import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    _refuse_unknown,
    _require_at_least,
)


class Accelerator(Enum):
    """`auto`: GPUs where there are any, else the CPU, on gloo."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"


@dataclass
class NemoModel(ModelConfig):
    """Qwen3 of any size; the default is Qwen3-0.6B. Layers are Transformer Engine's where it is installed, else local.

    Attributes:
        tp_comm: the same flag as the one at the top of the configuration; only one of them has to be given.
    """

    tp_comm: str | None = None


@dataclass
class NemoData(DataConfig):
    """Where samples come from: `folder` (prepared by this project), `train` and `validation` prefixes, or `mock`.

    Attributes:
        mock: random tokens, made as they are needed; then neither `folder` nor `train`.
        num_workers: processes a rank that read data.
        seed: of the sample order.
    """

    mock: bool = False
    num_workers: int = 4
    seed: int = 1234

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_at_least("data.num_workers", self.num_workers, 0)


@dataclass
class NemoTrainer:
    """How the run is cut into steps and processes.

    Attributes:
        max_steps: optimizer steps; the learning rate decays over all of them.
        micro_batch_size: sequences of one forward pass on one data-parallel rank.
        global_batch_size: sequences of one optimizer step.
        devices: processes on each machine.
        num_nodes: machines.
        tensor_parallel, pipeline_parallel, context_parallel: ranks of each kind; the rest is data parallel.
        virtual_pipeline: model chunks a pipeline rank, or null.
        sequence_parallel: norms and residuals work on a share of the sequence on each tensor-parallel rank.
        accelerator: see Accelerator.
        precision: see Precision; bf16 keeps FP32 master weights, gradients and optimizer state.
        val_interval: steps between validation losses; 0: none.
        val_batches: global batches of one validation loss.
        log_interval: steps between logged values.
    """

    max_steps: int = 1000
    micro_batch_size: int = 2
    global_batch_size: int = 32
    devices: int = 8
    num_nodes: int = 1
    tensor_parallel: int = 4
    pipeline_parallel: int = 1
    context_parallel: int = 1
    virtual_pipeline: int | None = None
    sequence_parallel: bool = False
    accelerator: Accelerator = Accelerator.auto
    precision: Precision = Precision.auto
    val_interval: int = 500
    val_batches: int = 4
    log_interval: int = 10

    def __post_init__(self) -> None:
        for name in ("max_steps", "micro_batch_size", "global_batch_size", "devices", "num_nodes", "log_interval"):
            _require_at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "val_batches"):
            _require_at_least(f"trainer.{name}", getattr(self, name), 1)
        _require_at_least("trainer.val_interval", self.val_interval, 0)
        parallel = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        world_size = self.devices * self.num_nodes
        if world_size % parallel:
            raise ValueError(
                f"trainer.devices * num_nodes: expected a multiple of tensor_parallel={self.tensor_parallel} x "
                f"pipeline_parallel={self.pipeline_parallel} x context_parallel={self.context_parallel} = {parallel}, "
                f"got {self.devices} * {self.num_nodes} = {world_size}"
            )
        rows = self.micro_batch_size * (world_size // parallel)
        if self.global_batch_size % rows:
            raise ValueError(
                f"trainer.global_batch_size: expected a multiple of micro_batch_size * data-parallel ranks = "
                f"{self.micro_batch_size} * {world_size // parallel} = {rows}, got {self.global_batch_size}"
            )


@dataclass
class NemoLog:
    """Where logs and checkpoints go: `dir`/`name`.

    Attributes:
        dir: of all runs.
        name: of this run.
        save_interval: steps between checkpoints; 0: none, not even the last.
        keep_checkpoints: how many of the newest stay.
        tensorboard: write scalars for TensorBoard.
    """

    dir: str = "runs/nemo"
    name: str = "qwen3_600m"
    save_interval: int = 500
    keep_checkpoints: int = 2
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _require_at_least("log.save_interval", self.save_interval, 0)
        _require_at_least("log.keep_checkpoints", self.keep_checkpoints, 1)


@dataclass
class NemoResume:
    """Which checkpoint to go on from.

    Attributes:
        if_exists: from the newest in `log.dir`/`log.name`, where there is one.
        path: from this one instead.
    """

    if_exists: bool = True
    path: str | None = None


# EchoConfig's options by name; null means not given. `resolve` checks the values and names the flag.
EchoOptions: Any = make_dataclass("EchoOptions", [(name, Any, field(default=None)) for name in OPTION_NAMES])


@dataclass
class NemoPretrain:
    """One pretraining run with NeMo.

    Attributes:
        tp_comm: echo4, echo8, echo4_paper, echo8_paper, or nccl for NeMo's own 16-bit communication.
        echo: options beside the flag.
        inspect_every: see `EchoTPComm`.
    """

    tp_comm: str | None = None
    echo: EchoOptions = field(default_factory=EchoOptions)
    inspect_every: int = 0
    model: NemoModel = field(default_factory=NemoModel)
    data: NemoData = field(default_factory=NemoData)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: NemoTrainer = field(default_factory=NemoTrainer)
    log: NemoLog = field(default_factory=NemoLog)
    resume: NemoResume = field(default_factory=NemoResume)

    @property
    def flag(self) -> str:
        """The flag, wherever it was given.

        Raises:
            ValueError: `tp_comm` and `model.tp_comm` say different things, or neither is given.
        """
        top, model = self.tp_comm, self.model.tp_comm
        if top is not None and model is not None and top != model:
            raise ValueError(
                f"tp_comm={top} and model.tp_comm={model}: they are the same flag; give one of them, or the same value"
            )
        flag = top if top is not None else model
        if flag is None:
            raise ValueError("tp_comm: not given; set tp_comm=echo4, or tp_comm=nccl for NeMo's own communication")
        return flag

    @property
    def echo_options(self) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in vars(self.echo).items() if value is not None}


def register() -> None:
    """Register the schema with Hydra; the YAML files under configs/nemo/ start from it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="nemo_schema", node=NemoPretrain)


def from_composed(composed: Any) -> NemoPretrain:
    """The run of a composed configuration.

    Raises:
        ValueError: a key that the schema lacks (Hydra lets `+key=value` add one), a value out of range, or options that
            do not go together.
    """
    _refuse_unknown(composed, NemoPretrain, "")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, NemoPretrain)
    _check_data(config.data)
    _check_sizes(config)
    resolve_tp_comm(config)
    return config


def resolve_tp_comm(config: NemoPretrain) -> EchoConfig:
    """The communication's options, checked.

    Raises:
        ValueError: see `NemoPretrain.flag` and `resolve`.
    """
    return resolve(config.flag, config.echo_options)


def _check_data(data: NemoData) -> None:
    given = [data.mock, data.folder is not None, bool(data.train)]
    if sum(given) != 1:
        raise ValueError(
            "data: expected one of data.mock=true, data.folder (prepared tokens) and data.train (prefixes of indexed "
            f"datasets), got mock={data.mock}, folder={data.folder!r} and train={data.train!r}"
        )
    if not data.train and (data.validation or data.split is not None):
        raise ValueError("data.validation, data.split: expected neither without data.train")
    if data.train and bool(data.validation) == (data.split is not None):
        raise ValueError(
            "data: expected either data.validation (prefixes) or data.split (e.g. '99,1') with data.train, "
            f"got validation={data.validation!r} and split={data.split!r}"
        )


def _check_sizes(config: NemoPretrain) -> None:
    model, tp = config.model, config.trainer.tensor_parallel
    for name, value in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.num_query_groups", model.num_query_groups),
        ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("data.padded_vocab_size", config.data.padded_vocab_size),
    ):
        if value % tp:
            raise ValueError(
                f"{name}: expected a multiple of trainer.tensor_parallel={tp}, got {value}; change one of the two"
            )
    if config.optim.warmup_steps >= config.trainer.max_steps:
        raise ValueError(
            f"optim.warmup_steps: expected fewer than trainer.max_steps={config.trainer.max_steps}, "
            f"got {config.optim.warmup_steps}; shorten the warm-up or train longer"
        )
