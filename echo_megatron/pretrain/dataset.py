"""Batches from Megatron's GPTDataset over indexed datasets; a batch is a function of the step alone, so resuming needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from echo_megatron.pretrain.schema import DataConfig, PretrainConfig

Batch = dict[str, torch.Tensor]


def check_data(data: DataConfig) -> None:
    """Raise where a prefix has no tokens, and say how to make them.

    Raises:
        FileNotFoundError: `PREFIX.bin` or `PREFIX.idx` is missing.
    """
    for name in ("train_prefix", "validation_prefix"):
        prefix = getattr(data, name)
        missing = [f"{prefix}{suffix}" for suffix in (".bin", ".idx") if prefix and not Path(f"{prefix}{suffix}").is_file()]
        if missing:
            hint = f"; make it with `{data.prepare}`" if data.prepare else "; see docs/data.md"
            raise FileNotFoundError(f"data.{name}: expected a Megatron indexed dataset, {' and '.join(missing)} missing{hint}")


def describe_data(data: DataConfig) -> dict[str, Any]:
    """What reports compare runs by: name, tokens, and a fingerprint of the index and of the tokens at both ends."""
    digest = hashlib.sha256()
    for prefix in filter(None, (data.train_prefix, data.validation_prefix)):
        digest.update(Path(f"{prefix}.idx").read_bytes())
        with Path(f"{prefix}.bin").open("rb") as file:
            digest.update(file.read(1 << 20))
            size = file.seek(0, 2)
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    tokens = int(IndexedDataset(data.train_prefix).sequence_lengths.sum())
    return {"name": data.name, "fingerprint": digest.hexdigest()[:16], "tokens": tokens}


class BatchSource:
    """Training and validation batches of this data-parallel rank.

    Args:
        config: the run.
        device: where batches go.
    """

    def __init__(self, config: PretrainConfig, device: torch.device):
        self._device = device
        self._trainer = config.trainer
        self._dp_rank = parallel_state.get_data_parallel_rank()
        train_samples = config.trainer.max_steps * config.trainer.global_batch_size
        validation_samples = config.trainer.val_batches * config.trainer.global_batch_size
        prefixes = (config.data.train_prefix, config.data.validation_prefix)
        splits = BlendedMegatronDatasetBuilder(
            GPTDataset,
            [train_samples, validation_samples if prefixes[1] else 0, 0],
            lambda: True,
            GPTDatasetConfig(
                random_seed=config.seed,
                sequence_length=config.model.sequence_length,
                blend_per_split=[([prefix], None) if prefix else None for prefix in (*prefixes, None)],
                path_to_cache=config.data.cache_dir,
                tokenizer=_vocabulary(config.data),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
            ),
        ).build()
        self._train, self._validation = splits[0], splits[1]

    @property
    def has_validation(self) -> bool:
        """Whether there are held-out tokens."""
        return self._validation is not None

    def train(self, step: int) -> Iterator[Batch]:
        """The micro-batches of training step `step` (from 1)."""
        return self._microbatches(self._train, step - 1)

    def validation(self, idx: int) -> Iterator[Batch]:
        """The micro-batches of validation batch `idx` (from 0)."""
        return self._microbatches(self._validation, idx)

    def _microbatches(self, dataset: Any, global_batch_idx: int) -> Iterator[Batch]:
        """Megatron's order: a micro-batch of every data-parallel rank, then the next of every rank."""
        size = self._trainer.micro_batch_size
        for microbatch_idx in range(self._trainer.num_microbatches):
            start = global_batch_idx * self._trainer.global_batch_size
            start += (microbatch_idx * self._trainer.data_parallel + self._dp_rank) * size
            samples = [dataset[sample_idx] for sample_idx in range(start, start + size)]
            keys = ("tokens", "labels", "loss_mask", "position_ids")
            yield {key: torch.stack([sample[key] for sample in samples]).to(self._device) for key in keys}


def _vocabulary(data: DataConfig) -> Any:
    """What GPTDataset asks a tokenizer for: ids, and an identity for its index cache.

    The tokens are part of the identity: Megatron's cache goes by path alone and would serve the old index for new tokens.
    """
    identity = {"vocab_size": data.vocab_size, "eod": data.eod_id, "tokens": describe_data(data)["fingerprint"]}
    return SimpleNamespace(vocab_size=data.vocab_size, eod=data.eod_id, pad=-1, unique_identifiers=identity)
