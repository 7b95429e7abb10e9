"""What concerns several groups of a run's options, checked; single values are checked in the schema."""

from __future__ import annotations

from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.reference import check_scattered_residual


def validate(config: PretrainConfig) -> None:
    """Check what concerns several groups of options.

    Raises:
        ValueError: no data or too many, parallel sizes that do not divide the model, a warm-up longer than the run, or
            nothing to inspect.
    """
    model, data, trainer = config.model, config.data, config.trainer
    if (data.folder is None) == (not data.train):
        raise ValueError(
            "data: expected either data.folder (prepared tokens) or data.train (prefixes of indexed datasets), "
            f"got folder={data.folder!r} and train={data.train!r}"
        )
    if data.folder is not None and (data.validation or data.split is not None):
        raise ValueError("data.validation, data.split: expected neither with data.folder, which has its own")
    if data.folder is None and bool(data.validation) == (data.split is not None):
        raise ValueError(
            "data: expected either data.validation (prefixes) or data.split (e.g. '99,1') with data.train, "
            f"got validation={data.validation!r} and split={data.split!r}"
        )
    tp, pp = trainer.tensor_parallel, trainer.pipeline_parallel
    for name, value in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("model.num_query_groups", model.num_query_groups),
        ("model.ffn_hidden_size", model.ffn_hidden_size),
        ("data.padded_vocab_size", data.padded_vocab_size),
    ):
        if value % tp:
            raise ValueError(
                f"{name}: expected a multiple of trainer.tensor_parallel={tp}, got {value}; change one of the two"
            )
    if trainer.sequence_parallel:
        _check_sequence_parallel(config)
    if model.num_layers % pp:
        raise ValueError(
            f"model.num_layers: expected a multiple of trainer.pipeline_parallel={pp}, got {model.num_layers}; "
            "change one of the two"
        )
    if trainer.inspect_every and (tp == 1 or not config.tp_comm.quantizes):
        what = "trainer.tensor_parallel=1" if tp == 1 else "tp_comm=nccl"
        raise ValueError(
            f"trainer.inspect_every: expected 0 with {what}, got {trainer.inspect_every}: no all-reduce is quantized, "
            "so there is nothing to measure"
        )
    if config.optim.warmup_steps >= trainer.max_steps:
        raise ValueError(
            f"optim.warmup_steps: expected fewer than trainer.max_steps={trainer.max_steps}, "
            f"got {config.optim.warmup_steps}; shorten the warm-up or train longer"
        )


def _check_sequence_parallel(config: PretrainConfig) -> None:
    tp, length = config.trainer.tensor_parallel, config.model.sequence_length
    if tp == 1:
        raise ValueError(
            "trainer.sequence_parallel: expected false with trainer.tensor_parallel=1, got true: the ranks that would "
            "share a sequence are the tensor-parallel ones"
        )
    if length % tp:
        raise ValueError(
            f"model.sequence_length: expected a multiple of trainer.tensor_parallel={tp} with "
            f"trainer.sequence_parallel=true, got {length}; change one of the three"
        )
    if config.tp_comm.quantizes:
        for direction in config.tp_comm.directions:
            check_scattered_residual(config.tp_comm, direction)
