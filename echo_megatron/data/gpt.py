"""Training and validation samples: Megatron-core's `GPTDataset` over indexed datasets, checked at start-up."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from echo_megatron.data.files import exclusive_lock
from echo_megatron.data.indexed import IndexedSummary, check_indexed_dataset, sequence_lengths
from echo_megatron.data.manifest import PreparedData, dataset_fingerprint
from echo_megatron.data.tokenizer import DatasetTokenizer

COMPLETE = "complete"
LOCK_TIMEOUT_S = 600.0


@dataclass
class DatasetSource:
    """Which indexed datasets to train on and to validate on.

    Attributes:
        train: dataset prefixes (paths without .bin/.idx), mixed in proportion to their tokens.
        tokenizer: what the ids mean.
        fingerprint: SHA-256 that names the content.
        validation: prefixes of their own, or None.
        split: where `validation` is None: Megatron's "train,validation" weights over the documents in file order, e.g.
            "99,1".
    """

    train: list[Path]
    tokenizer: DatasetTokenizer
    fingerprint: str
    validation: list[Path] | None = None
    split: str | None = None

    @classmethod
    def from_prepared(cls, data: PreparedData) -> "DatasetSource":
        """Of a folder that one of the preparations left.

        Raises:
            ValueError: it has no validation split.
        """
        if data.validation is None:
            raise ValueError(
                f"{data.folder}: has no validation split; prepare it with --validation-every or --validation-tokens"
            )
        identity = data.fingerprint if data.tokenizer is None else str(data.tokenizer.name)
        tokenizer = DatasetTokenizer(data.vocab_size, data.eod, identity)
        return cls([data.train], tokenizer, data.fingerprint, validation=[data.validation])

    @classmethod
    def from_prefixes(
        cls,
        train: Sequence[Path | str],
        tokenizer: DatasetTokenizer,
        validation: Sequence[Path | str] | None = None,
        split: str | None = None,
    ) -> "DatasetSource":
        """Of any indexed datasets, for instance those of Megatron-LM's `preprocess_data.py`.

        Raises:
            ValueError: a dataset is missing or damaged, or not exactly one of `validation` and `split` is given.
        """
        if (validation is None) == (split is None):
            raise ValueError("give either validation prefixes or a split such as '99,1', not both and not neither")
        if not train or (validation is not None and not validation):
            raise ValueError("expected at least one dataset prefix to train on and one to validate on")
        parts = [train, validation or []]
        facts = json.dumps([[dataset_fingerprint([prefix]) for prefix in part] for part in parts] + [split])
        fingerprint = hashlib.sha256(facts.encode()).hexdigest()
        paths = [[Path(prefix) for prefix in part] for part in parts]
        return cls(paths[0], tokenizer, fingerprint, paths[1] or None, split)


def build_datasets(
    source: DatasetSource,
    *,
    sequence_length: int,
    seed: int,
    num_train_samples: int,
    num_validation_samples: int,
    cache_dir: Path | str | None = None,
    create_attention_mask: bool = False,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> tuple[Any, Any]:
    """Build Megatron-core's training and validation datasets. Every rank calls it; rank 0 builds the indices first.

    Args:
        source: the data.
        sequence_length: tokens of a sample.
        seed: of the shuffling; equal seed and data give equal samples in equal order.
        num_train_samples: samples to draw; the data are repeated, each epoch shuffled, when they are too few.
        num_validation_samples: likewise.
        cache_dir: for the index files; by default `cache/` beside the first training dataset.
        create_attention_mask: also give the causal `attention_mask` [1, sequence_length, sequence_length], True where
            hidden.
        reset_position_ids, reset_attention_mask, eod_mask_loss: Megatron's treatment of document ends inside a sample.

    Returns:
        (train, validation). An item is a dict of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32),
        each
        [sequence_length], and `attention_mask` when asked for.

    Raises:
        ValueError: a dataset is missing, damaged, too small, or made with another tokenizer. On the other ranks
            RuntimeError,
            so that none of them waits for one that has stopped.
    """
    for name, value in (
        ("sequence_length", sequence_length),
        ("num_train_samples", num_train_samples),
        ("num_validation_samples", num_validation_samples),
    ):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    root = Path(cache_dir) if cache_dir is not None else source.train[0].parent / "cache"
    settings = {
        "fingerprint": source.fingerprint,
        "paths": [str(path) for path in [*source.train, *(source.validation or [])]],
        "split": source.split,
        "sequence_length": sequence_length,
        "seed": seed,
        "samples": [num_train_samples, num_validation_samples],
        "vocab_size": source.tokenizer.vocab_size,
    }
    # Megatron's own key has the path of the data, not its content: without the fingerprint, data prepared again
    # under the same name would be read through the old index.
    cache = root / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    blends = _together(lambda: _check_sources(source, sequence_length))
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        split=source.split,
        path_to_cache=str(cache),
        tokenizer=source.tokenizer,  # Megatron asks for these attributes only
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=create_attention_mask,
        **blends,
    )
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [num_train_samples, num_validation_samples, 0], lambda: True, config
    )
    train, validation = _build_with_cache(builder, cache)
    return train, validation


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _together(action: Any) -> Any:
    """Run `action` on every rank; when it fails on one, all raise: nobody waits for a rank that stopped."""
    error: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    if dist.is_initialized():
        device = (
            torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
        )
        failed = torch.tensor([int(error is not None)], device=device)
        dist.all_reduce(failed)
        if error is None and failed.item():
            raise RuntimeError(
                f"the data could not be opened on {int(failed.item())} other rank(s); their message says why"
            )
    if error is not None:
        raise error
    return result


def _check_sources(source: DatasetSource, sequence_length: int) -> dict[str, Any]:
    """Check every dataset; return the `blend` arguments of Megatron's configuration."""
    _require_helpers()

    def blend(prefixes: list[Path], what: str) -> tuple[list[str], list[float] | None]:
        summaries = [check_indexed_dataset(prefix, source.tokenizer.vocab_size) for prefix in prefixes]
        for summary in summaries:
            _require_tokens(summary, sequence_length, what)
        # Without weights Megatron draws one epoch at most; weighted by tokens it draws what is asked for.
        weights = [float(summary.tokens) for summary in summaries] if len(summaries) > 1 else None
        return [summary.prefix for summary in summaries], weights

    train = blend(source.train, "training")
    if source.split is None:
        return {"blend_per_split": [train, blend(source.validation or [], "validation"), None]}
    _require_split(source, sequence_length)
    return {"blend": train}


def _require_tokens(summary: IndexedSummary, sequence_length: int, what: str) -> None:
    if summary.tokens < sequence_length + 1:
        raise ValueError(
            f"{summary.prefix}: {summary.tokens:,} tokens to use for {what}, a sample needs sequence_length + 1 = "
            f"{sequence_length + 1:,}; use more data or shorter samples"
        )


def _require_split(source: DatasetSource, sequence_length: int) -> None:
    """Each part of `split` must hold a sample in every dataset: Megatron loops for ever over a part without tokens."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    parts = str(source.split).split(",")
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    if (
        len(weights) not in (2, 3)
        or any(weight < 0 for weight in weights)
        or min(weights[:2]) <= 0
        or sum(weights[2:]) > 0
    ):
        raise ValueError(f"split: expected positive weights 'train,validation' such as '99,1', got {source.split!r}")
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(str(source.split)))
    for prefix in source.train:
        lengths = sequence_lengths(prefix)
        for name, (begin, end) in zip(("training", "validation"), matrix[:2], strict=True):
            part = lengths[round(begin * len(lengths)) : round(end * len(lengths))]
            tokens = int(part.sum(dtype="int64"))
            if tokens < sequence_length + 1:
                raise ValueError(
                    f"{prefix}: split {source.split!r} leaves {len(part)} documents with {tokens:,} tokens for "
                    f"{name}, a sample "
                    f"needs {sequence_length + 1:,}; choose another split or separate validation data"
                )


def _require_helpers() -> None:
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"megatron-core's compiled dataset helpers cannot be imported ({error}). Its wheels for Linux "
            f"contain them; "
            "a build from source needs a C++ compiler and pybind11: pip install --force-reinstall megatron-core"
        ) from error


def _build_with_cache(builder: BlendedMegatronDatasetBuilder, cache: Path) -> tuple[Any, Any]:
    """Let Megatron build its index files, or read those that a finished build left.

    Megatron takes index files that exist as complete. A run that was killed while it wrote them would poison every
    later
    one, so a folder without the mark of a finished build is emptied, under a lock that other runs on the same data
    respect.
    """
    if _rank() != 0:
        _together(lambda: None)
        train, validation, _ = builder.build()
        return train, validation

    lock = exclusive_lock(cache.parent / f"{cache.name}.lock", "building the dataset index", LOCK_TIMEOUT_S)

    def acquire() -> None:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            lock.__enter__()
            if cache.exists() and not (cache / COMPLETE).exists():
                shutil.rmtree(cache)
        except PermissionError as error:
            raise PermissionError(
                f"{cache.parent}: the dataset index goes here ({error}); set another cache_dir"
            ) from error

    _together(acquire)
    try:
        train, validation, _ = builder.build()
        (cache / COMPLETE).touch()
    finally:
        lock.__exit__(None, None, None)
    return train, validation
