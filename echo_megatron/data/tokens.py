"""Ready token arrays to Megatron's indexed dataset: 16- or 32-bit ids, raw or .xz, or .npy; an id ends a document."""

import lzma
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from rich.console import Console

from echo_megatron.data.files import exclusive_lock, publish, read_json, sha256_file, write_json
from echo_megatron.data.indexed import IndexedWriter
from echo_megatron.data.manifest import MANIFEST, TRAIN, VALIDATION, PreparedData, build_manifest, tokenizer_facts
from echo_megatron.data.progress import token_progress
from echo_megatron.data.shards import is_validation
from echo_megatron.data.tokenizer import TOKENIZER_FILE, find_tokenizer, load_tokenizer, vocabulary_size

CHUNK_TOKENS = 1 << 22
RAW_DTYPES: dict[str, np.dtype] = {".u16": np.dtype("<u2"), ".u32": np.dtype("<u4")}
QWEN3_VOCABULARY, QWEN3_EOD = 151_669, 151_643


@dataclass
class TokenOptions:
    """Options of `pack_tokens`.

    Attributes:
        train: token files in order: `.u16`, `.u32` (raw little-endian), the same with `.xz`, or `.npy` (1-D, integers).
        out: folder to fill.
        validation: token files for validation; otherwise see `validation_every`.
        id_map: `.npy` of ids by rank; applied to every 16-bit file, 32-bit files hold ids already.
        eod: id that ends a document.
        vocab_size: number of ids.
        tokenizer: tokenizer.json to copy along; its vocabulary must have `vocab_size` ids.
        validation_every: one document in this many goes to validation where no validation files are given; 0 for none.
    """

    train: list[Path]
    out: Path
    validation: list[Path] = field(default_factory=list)
    id_map: Path | None = None
    eod: int = QWEN3_EOD
    vocab_size: int = QWEN3_VOCABULARY
    tokenizer: str | None = None
    validation_every: int = 0

    def validate(self) -> None:
        """Raises ValueError with what was expected and got."""
        for path in [*self.train, *self.validation, *([self.id_map] if self.id_map else [])]:
            if not path.is_file():
                raise ValueError(f"{path}: no such file")
        if not self.train:
            raise ValueError("no token files")
        if not 0 <= self.eod < self.vocab_size:
            raise ValueError(f"eod: expected an id from 0 to {self.vocab_size - 1}, got {self.eod}")
        if self.validation and self.validation_every:
            raise ValueError("give either validation files or validation_every, not both")
        if self.validation_every < 0:
            raise ValueError(f"validation_every: expected at least 0, got {self.validation_every}")


@dataclass
class _Counts:
    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    eods_added: int = 0


def pack_tokens(options: TokenOptions, console: Console | None = None) -> PreparedData:
    """Pack token files; a folder packed before from the same files and options is reused.

    Each document keeps its end-of-document id; a file whose last document lacks it gets one. Documents without tokens
    (two such ids in a row) are left out. Both are counted in the manifest.

    Raises:
        ValueError: a bad option, a damaged file, or an id outside the vocabulary; the message has the file and
            position.
        TimeoutError: another process works in `out`.
    """
    console = console or Console(stderr=True)
    options.validate()
    id_map = _load_id_map(options) if options.id_map else None
    options.out.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(options.out / ".lock", "preparing data in this folder"):
        recorded = _recorded(options)
        if (options.out / MANIFEST).is_file():
            if read_json(options.out / MANIFEST).get("options") != recorded:
                raise ValueError(
                    f"{options.out}: holds data of other files or options; choose another --out, or delete the folder"
                )
            return PreparedData.load(options.out)
        for stale in options.out.glob(".tmp-*"):
            shutil.rmtree(stale)
        if strange := sorted(entry.name for entry in options.out.iterdir() if entry.name != ".lock"):
            raise ValueError(
                f"{options.out}: not empty and without a manifest (has {', '.join(strange[:5])}); choose another --out"
            )
        temporary = options.out / f".tmp-{os.getpid()}"
        temporary.mkdir()
        try:
            _pack(options, id_map, temporary, recorded, console)
            publish(temporary, options.out, MANIFEST)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return PreparedData.load(options.out)


def _recorded(options: TokenOptions) -> dict[str, Any]:
    def facts(paths: list[Path]) -> list[dict[str, Any]]:
        return [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in paths]

    return {
        "train": facts(options.train),
        "validation": facts(options.validation),
        "id_map": facts([options.id_map])[0] if options.id_map else None,
        "eod": options.eod,
        "vocab_size": options.vocab_size,
        "tokenizer_sha256": sha256_file(find_tokenizer(options.tokenizer)) if options.tokenizer else None,
        "validation_every": options.validation_every,
    }


def _load_id_map(options: TokenOptions) -> np.ndarray:
    assert options.id_map is not None
    id_map = _load_npy(options.id_map)
    if id_map.size == 0 or int(id_map.min()) < 0 or int(id_map.max()) >= options.vocab_size:
        raise ValueError(
            f"{options.id_map}: expected ids from 0 to {options.vocab_size - 1}, got "
            + (f"{int(id_map.min())} to {int(id_map.max())}" if id_map.size else "none")
        )
    return np.asarray(id_map)


def _load_npy(path: Path) -> np.ndarray:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a readable .npy of numbers ({error})") from error
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: expected a 1-D array of integers, got {getattr(ids, 'dtype', type(ids))}, {np.shape(ids)}"
        )
    return ids


def read_tokens(path: Path, id_map: np.ndarray | None = None, chunk_tokens: int = CHUNK_TOKENS) -> Iterator[np.ndarray]:
    """The ids of a token file, in chunks of int64.

    Args:
        path: see `TokenOptions.train`.
        id_map: ids by rank, applied where the file is 16-bit.
        chunk_tokens: most ids at a time.

    Raises:
        ValueError: an unknown format, a truncated or damaged file, or a rank the map lacks.
    """
    position = 0
    for chunk, dtype in _raw_chunks(path, chunk_tokens):
        if id_map is not None and dtype.itemsize == 2:
            if int(chunk.max()) >= len(id_map):
                at = int(np.argmax(chunk >= len(id_map)))
                raise ValueError(
                    f"{path}: rank {int(chunk[at])} at token {position + at}, the id map has {len(id_map)}"
                )
            chunk = id_map[chunk]
        position += len(chunk)
        yield chunk.astype(np.int64)


def _raw_chunks(path: Path, chunk_tokens: int) -> Iterator[tuple[np.ndarray, np.dtype]]:
    if path.suffix == ".npy":
        ids = _load_npy(path)
        for start in range(0, len(ids), chunk_tokens):
            yield np.asarray(ids[start : start + chunk_tokens]), ids.dtype
        return
    compressed = path.suffix == ".xz"
    dtype = RAW_DTYPES.get(path.with_suffix("").suffix if compressed else path.suffix)
    if dtype is None:
        raise ValueError(f"{path}: expected a name ending in .u16, .u32, .u16.xz, .u32.xz or .npy")
    with cast(BinaryIO, lzma.open(path) if compressed else path.open("rb")) as stream:
        num_bytes = 0
        try:
            while data := _read_fully(stream, chunk_tokens * dtype.itemsize):
                num_bytes += len(data)
                if len(data) % dtype.itemsize:
                    raise ValueError(
                        f"{path}: {num_bytes:,} bytes are no whole number of {dtype.itemsize}-byte ids; truncated?"
                    )
                yield np.frombuffer(data, dtype), dtype
        except (lzma.LZMAError, EOFError) as error:
            raise ValueError(f"{path}: truncated or damaged .xz after {num_bytes:,} bytes of ids ({error})") from error


def _read_fully(stream: BinaryIO, size: int) -> bytes:
    """Up to `size` bytes, fewer only at the end: a decompressor may return less at a time."""
    parts = []
    while size and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def split_documents(chunks: Iterator[np.ndarray], eod: int) -> Iterator[np.ndarray]:
    """Cut a stream of ids after each `eod`; the last document may lack it, one that is only an `eod` is yielded too."""
    rest: list[np.ndarray] = []
    for chunk in chunks:
        start = 0
        for end in (np.flatnonzero(chunk == eod) + 1).tolist():
            yield np.concatenate([*rest, chunk[start:end]])
            rest, start = [], end
        if start < len(chunk):
            rest.append(chunk[start:])
    if rest:
        yield np.concatenate(rest)


def _pack(
    options: TokenOptions, id_map: np.ndarray | None, folder: Path, recorded: dict[str, Any], console: Console
) -> None:
    tokenizer = None
    if options.tokenizer:
        source = find_tokenizer(options.tokenizer)
        size = vocabulary_size(load_tokenizer(source))
        if size != options.vocab_size:
            raise ValueError(f"{source}: its vocabulary has {size:,} ids, --vocab-size says {options.vocab_size:,}")
        tokenizer = folder / TOKENIZER_FILE
        shutil.copyfile(source, tokenizer)
    counts = {TRAIN: _Counts(), VALIDATION: _Counts()}
    total = sum(path.stat().st_size for path in [*options.train, *options.validation])
    with (
        IndexedWriter(folder / TRAIN, options.vocab_size) as train,
        IndexedWriter(folder / VALIDATION, options.vocab_size) as validation,
        token_progress(console) as bar,
    ):
        writers = {TRAIN: train, VALIDATION: validation}
        row = bar.add_task("packing", total=total, documents=0, tokens=0, rate=0.0)
        for split, paths in ((TRAIN, options.train), (VALIDATION, options.validation)):
            for path in paths:
                for index, ids in enumerate(split_documents(read_tokens(path, id_map), options.eod)):
                    chosen = split
                    if split == TRAIN and is_validation(f"{path.name}:{index}", options.validation_every):
                        chosen = VALIDATION
                    _add(ids, options.eod, writers[chosen], counts[chosen])
                    documents = sum(found.documents for found in counts.values())
                    tokens = sum(found.tokens for found in counts.values())
                    elapsed = bar.tasks[row].elapsed or 1e-9
                    bar.update(row, documents=documents, tokens=tokens, rate=tokens / elapsed)
                bar.advance(row, path.stat().st_size)
        written = {split: writer.finish() for split, writer in writers.items()}
    if not written[TRAIN].documents:
        raise ValueError("no documents with tokens to train on")
    if not written[VALIDATION].documents:
        for name in written[VALIDATION].files:
            (folder / name).unlink()
    manifest = build_manifest(
        "tokens",
        tokenizer_facts(options.vocab_size, options.eod, tokenizer, None),
        written,
        options=recorded,
        counts={split: vars(found) for split, found in counts.items()},
    )
    write_json(folder / MANIFEST, manifest)


def _add(ids: np.ndarray, eod: int, writer: IndexedWriter, counts: _Counts) -> None:
    if ids[-1] != eod:
        ids = np.append(ids, eod)
        counts.eods_added += 1
    if len(ids) == 1:
        counts.empty_documents += 1
        return
    writer.add_document(ids)
    counts.documents += 1
    counts.tokens += len(ids)
