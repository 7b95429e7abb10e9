"""Batches of a run. A batch is a function of its step alone, so a resumed run needs no state of the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from echo_megatron.data import PreparedData
from echo_megatron.data.indexed import check_indexed_dataset
from echo_megatron.pretrain.schema import DataConfig, PretrainConfig

if TYPE_CHECKING:
    from echo_megatron.data.gpt import DatasetSource

Batch = dict[str, torch.Tensor]


@dataclass
class Data:
    """The tokens of a run, checked but not yet opened.

    Attributes:
        name: what reports call them.
        fingerprint: SHA-256 that names the content, wherever it lies.
        tokens: of training.
    """

    name: str
    fingerprint: str
    tokens: int


def check_data(data: DataConfig) -> Data:
    """Check that the tokens are there and are what the configuration says.

    Raises:
        ValueError: missing or damaged, with the command that makes them; or made with another vocabulary.
    """
    try:
        if data.folder is None:
            tokens = sum(check_indexed_dataset(prefix, data.vocab_size).tokens for prefix in data.train)
            return Data(data.name, _source(data).fingerprint, tokens)
        prepared = PreparedData.load(data.folder)
    except ValueError as error:
        hint = f". To make it: {data.prepare}" if data.prepare else ""
        raise ValueError(f"data: {error}{hint}") from error
    for name, expected in (("vocab_size", prepared.vocab_size), ("eod_id", prepared.eod)):
        if getattr(data, name) != expected:
            raise ValueError(
                f"data.{name}: expected {expected}, which {data.folder} was made with, got {getattr(data, name)}"
            )
    return Data(data.name, prepared.fingerprint, prepared.train_tokens)


def _source(data: DataConfig) -> DatasetSource:
    # Megatron-core takes seconds to import, which the launcher's checks need not pay for.
    from echo_megatron.data.gpt import DatasetSource
    from echo_megatron.data.tokenizer import DatasetTokenizer

    if data.folder is not None:
        return DatasetSource.from_prepared(PreparedData.load(data.folder))
    tokenizer = DatasetTokenizer(data.vocab_size, data.eod_id, data.name)
    return DatasetSource.from_prefixes(data.train, tokenizer, data.validation or None, data.split)


class BatchSource:
    """Training and validation batches of this data-parallel rank.

    Args:
        config: the run.
        device: where batches go.
    """

    def __init__(self, config: PretrainConfig, device: torch.device):
        from megatron.core import parallel_state

        from echo_megatron.data.gpt import build_datasets

        self._device = device
        self._trainer = config.trainer
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._train, self._validation = build_datasets(
            _source(config.data),
            sequence_length=config.model.sequence_length,
            seed=config.seed,
            num_train_samples=config.trainer.max_steps * config.trainer.global_batch_size,
            num_validation_samples=config.trainer.val_batches * config.trainer.global_batch_size,
            cache_dir=config.data.cache_dir,
        )

    def train(self, step: int) -> Iterator[Batch]:
        """The micro-batches of training step `step` (from 1)."""
        return self._microbatches(self._train, step - 1)

    def validation(self, idx: int) -> Iterator[Batch]:
        """The micro-batches of validation batch `idx` (from 0)."""
        return self._microbatches(self._validation, idx)

    def _microbatches(self, dataset: Any, global_batch_idx: int) -> Iterator[Batch]:
        """Megatron's order: one micro-batch of every data-parallel rank, then the next of every rank."""
        size = self._trainer.micro_batch_size
        for microbatch_idx in range(self._trainer.num_microbatches):
            start = global_batch_idx * self._trainer.global_batch_size
            start += (microbatch_idx * self._trainer.data_parallel + self._dp_rank) * size
            samples = [dataset[sample_idx] for sample_idx in range(start, start + size)]
            keys = ("tokens", "labels", "loss_mask", "position_ids")
            yield {key: torch.stack([sample[key] for sample in samples]).to(self._device) for key in keys}
