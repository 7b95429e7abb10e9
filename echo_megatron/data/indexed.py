"""Megatron's indexed dataset on disk: write it in a stream, join several, and check one before training trusts it.

Megatron-core's `IndexedDatasetBuilder` writes the same bytes (a test compares them). This writer exists because that
one
imports torch and all of Megatron-core into every tokenizing worker and keeps some 120 bytes of Python objects a
document,
which is gigabytes for Dolma's C4; this one keeps 4.

Layout of `.idx`, little endian: header 9 B, version 8 B, dtype code 1 B, sequences 8 B, documents + 1 8 B, then for
every
sequence its length (int32), for every sequence its byte offset in `.bin` (int64), for every document its first
sequence (int64).
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from echo_megatron.data.files import CHUNK_BYTES

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 1 << 20  # index entries handled at a time


def token_dtype(vocab_size: int) -> np.dtype:
    """dtype of the token ids: uint16 below 65,500 ids, else int32, as Megatron's `DType.optimal_dtype`."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def prefix_path(prefix: Path | str, suffix: str) -> Path:
    """The `.bin` or `.idx` file of a dataset prefix; a prefix may itself contain dots."""
    return Path(f"{prefix}{suffix}")


@dataclass(frozen=True)
class WrittenDataset:
    """What was written: counts, and for every file its size in bytes and SHA-256."""

    documents: int
    tokens: int
    files: dict[str, dict[str, int | str]]


class _HashedFile:
    """A file being written whose SHA-256 is kept along the way."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._stream: BinaryIO = path.open("wb")
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._bytes += len(data)

    def close(self) -> dict[str, int | str]:
        self._stream.close()
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _write_index(path: Path, dtype: np.dtype, blocks: Iterable[np.ndarray], sequences: int) -> dict[str, int | str]:
    """Write `.idx` for one sequence a document; `blocks` is iterated twice and holds int32 lengths."""
    blocks = list(blocks)
    index = _HashedFile(path)
    index.write(HEADER.pack(MAGIC, 1, CODES[dtype], sequences, sequences + 1))
    for lengths in blocks:
        index.write(np.ascontiguousarray(lengths, dtype="<i4").tobytes())
    offset = 0
    for lengths in blocks:
        ends = offset + np.cumsum(lengths, dtype="<i8") * dtype.itemsize
        index.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes() if len(ends) else b"")
        offset = int(ends[-1]) if len(ends) else offset
    for start in range(0, sequences + 1, BLOCK):
        index.write(np.arange(start, min(start + BLOCK, sequences + 1), dtype="<i8").tobytes())
    return index.close()


class IndexedWriter:
    """Writes documents to `<prefix>.bin` as they come and `<prefix>.idx` at the end.

    Args:
        prefix: path without suffix.
        vocab_size: number of ids; chooses the dtype and bounds what is accepted.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.tokens = 0
        self._lengths = array("i")
        self._bin = _HashedFile(prefix_path(prefix, ".bin"))

    def add_document(self, ids: np.ndarray) -> None:
        """Append one document.

        Args:
            ids: [tokens] integer ids, with the end-of-document id last.

        Raises:
            ValueError: the document is empty or an id is outside [0, vocab_size).
        """
        if ids.size == 0:
            raise ValueError(f"{self.prefix}: document {len(self._lengths)} is empty")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"{self.prefix}: document {len(self._lengths)} has token ids {low} to {high}, "
                f"expected 0 to {self.vocab_size - 1}"
            )
        self._bin.write(ids.astype(self.dtype).tobytes())
        self._lengths.append(ids.size)
        self.tokens += ids.size

    def finish(self) -> WrittenDataset:
        """Close `.bin`, write `.idx`."""
        files = {self._bin.name: self._bin.close()}
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        blocks = [lengths[start : start + BLOCK] for start in range(0, len(lengths), BLOCK)]
        index = prefix_path(self.prefix, ".idx")
        files[index.name] = _write_index(index, self.dtype, blocks, len(lengths))
        return WrittenDataset(len(lengths), self.tokens, files)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()


def _read_header(prefix: Path | str) -> tuple[np.dtype, int, int]:
    """dtype, sequences and documents + 1 of `<prefix>.idx`, whose size is checked against them."""
    index, data = prefix_path(prefix, ".idx"), prefix_path(prefix, ".bin")
    for path in (index, data):
        if not path.is_file():
            raise ValueError(f"{path}: not found; a dataset prefix names a .bin and an .idx file together")
    size = index.stat().st_size
    with index.open("rb") as stream:
        head = stream.read(HEADER.size)
    if len(head) < HEADER.size or head[:9] != MAGIC:
        raise ValueError(f"{index}: not an index of Megatron's indexed dataset (expected it to start with {MAGIC!r})")
    _, version, code, sequences, documents = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise ValueError(f"{index}: expected version 1 and a dtype code of 1 to 8, got version {version}, dtype {code}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):  # the latter has a mode byte a sequence
        raise ValueError(
            f"{index}: {sequences:,} sequences and {documents:,} document marks need {expected:,} bytes, the "
            f"file has {size:,}; "
            "it is truncated or damaged, prepare the data again"
        )
    return DTYPES[code], sequences, documents


def sequence_lengths(prefix: Path | str) -> np.ndarray:
    """Tokens of each sequence: int32 [sequences], mapped from `.idx`."""
    _, sequences, _ = _read_header(prefix)
    if sequences == 0:
        return np.zeros(0, dtype=np.int32)
    return np.memmap(prefix_path(prefix, ".idx"), "<i4", "r", HEADER.size, (sequences,))


@dataclass(frozen=True)
class IndexedSummary:
    """What a checked dataset holds."""

    prefix: str
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int
    bin_bytes: int


def check_indexed_dataset(prefix: Path | str, vocab_size: int | None = None) -> IndexedSummary:
    """Check that `.idx` and `.bin` belong together, before a run reads past the end of one.

    Args:
        prefix: path without suffix.
        vocab_size: when given, up to a million ids at either end of `.bin` must lie below it.

    Raises:
        ValueError: a file is missing, truncated or contradicts the other; the message names it with expected and
            actual sizes.
    """
    dtype, sequences, documents = _read_header(prefix)
    index, data = prefix_path(prefix, ".idx"), prefix_path(prefix, ".bin")
    if sequences == 0 or documents < 2:
        raise ValueError(f"{index}: no documents")
    base = HEADER.size
    lengths = sequence_lengths(prefix)
    pointers = np.memmap(index, "<i8", "r", base + 4 * sequences, (sequences,))
    marks = np.memmap(index, "<i8", "r", base + 12 * sequences, (documents,))
    if int(lengths.min()) < 0:
        raise ValueError(f"{index}: sequence {int(lengths.argmin())} has the negative length {int(lengths.min())}")
    tokens = int(lengths.sum(dtype=np.int64))
    bin_bytes = data.stat().st_size
    if bin_bytes != tokens * dtype.itemsize:
        raise ValueError(
            f"{data}: {index.name} lists {tokens:,} tokens of {dtype.itemsize} bytes = "
            f"{tokens * dtype.itemsize:,} bytes, "
            f"the file has {bin_bytes:,}; one of the two is truncated or belongs to another dataset, prepare "
            f"the data again"
        )
    offset = 0
    for start in range(0, sequences, BLOCK):
        ends = offset + np.cumsum(lengths[start : start + BLOCK], dtype=np.int64) * dtype.itemsize
        wrong = np.flatnonzero(pointers[start : start + BLOCK] != np.concatenate([[offset], ends[:-1]]))
        if wrong.size:
            raise ValueError(f"{index}: sequence {start + int(wrong[0])} does not start where the one before it ends")
        offset = int(ends[-1])
    if marks[0] != 0 or marks[-1] != sequences or bool(np.any(np.diff(marks) < 0)):
        raise ValueError(f"{index}: document marks must rise from 0 to {sequences:,}, got {marks[0]} to {marks[-1]}")
    if vocab_size is not None:
        _check_ids(data, dtype, vocab_size)
    return IndexedSummary(str(prefix), dtype, sequences, documents - 1, tokens, bin_bytes)


def _check_ids(data: Path, dtype: np.dtype, vocab_size: int, sample: int = 1_000_000) -> None:
    ids = np.memmap(data, dtype, "r")
    low, high = (
        min(int(ids[:sample].min()), int(ids[-sample:].min())),
        max(int(ids[:sample].max()), int(ids[-sample:].max())),
    )
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{data}: token ids {low} to {high}, but the vocabulary has {vocab_size:,}; the data were made with "
            f"another tokenizer"
        )


def join_indexed_datasets(prefixes: list[Path], out: Path) -> WrittenDataset:
    """Write the documents of several datasets one after another, each document one sequence, in constant memory."""
    headers = [_read_header(prefix) for prefix in prefixes]
    dtypes = {dtype for dtype, _, _ in headers}
    if len(dtypes) != 1:
        raise ValueError(f"{out}: cannot join datasets of different dtypes {sorted(map(str, dtypes))}")
    dtype = dtypes.pop()
    data = _HashedFile(prefix_path(out, ".bin"))
    lengths = [sequence_lengths(prefix) for prefix in prefixes]
    for prefix in prefixes:
        with prefix_path(prefix, ".bin").open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                data.write(chunk)
    index = prefix_path(out, ".idx")
    sequences = sum(len(part) for part in lengths)
    files = {data.name: data.close(), index.name: _write_index(index, dtype, lengths, sequences)}
    return WrittenDataset(sequences, sum(int(part.sum(dtype=np.int64)) for part in lengths), files)
