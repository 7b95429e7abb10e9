"""One Dolma shard (`*.json.gz`, one {"id", "text", …} a line) to one pair of indexed datasets.

A document is a line. What cannot be read is reported with its place (file:line) and counted; it never disappears
silently.
"""

import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from tokenizers import Tokenizer

from echo_megatron.data.files import CHUNK_BYTES, read_json, write_json
from echo_megatron.data.indexed import IndexedWriter
from echo_megatron.data.manifest import TRAIN, VALIDATION
from echo_megatron.data.tokenizer import encode_documents

PART_FILE = "part.json"
BATCH_CHARACTERS = 1 << 20
MAX_LINE_BYTES = 1 << 28
LISTED_BAD_LINES = 20  # places kept a shard; all are counted

Report = Callable[[int, int, int], None]  # documents, tokens, compressed bytes read since the last call


class TooManyBadLinesError(ValueError):
    """A shard alone has more bad lines than the run may have."""


@dataclass
class ShardCounts:
    """What one shard held. `corrupt` is None or says where and why reading stopped before its end."""

    name: str
    bytes: int = 0
    sha256: str = ""
    lines: int = 0
    documents: int = 0
    tokens: int = 0
    empty_documents: int = 0
    bad_lines: int = 0
    bad_line_places: list[str] = field(default_factory=list)
    truncated: bool = False
    corrupt: str | None = None

    def bad(self, reason: str) -> None:
        self.bad_lines += 1
        if len(self.bad_line_places) < LISTED_BAD_LINES:
            self.bad_line_places.append(f"{self.name}:{self.lines}: {reason}")


class _CountedFile:
    """A binary file that hashes and counts what passes, for gzip to read from."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()
        self.bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.digest.update(data)
        self.bytes += len(data)
        return data

    def drain(self) -> None:
        while self.read(CHUNK_BYTES):
            pass


def _lines(source: _CountedFile, counts: ShardCounts, max_line_bytes: int) -> Iterator[bytes]:
    """The shard's lines, numbered in `counts.lines`; they end where the gzip stream breaks, see `counts.corrupt`."""
    with gzip.GzipFile(fileobj=cast(BinaryIO, source), mode="rb") as stream:
        try:
            while line := stream.readline(max_line_bytes):
                counts.lines += 1
                if len(line) == max_line_bytes and not line.endswith(b"\n"):
                    counts.bad(f"line longer than {max_line_bytes:,} bytes")
                    while (rest := stream.readline(max_line_bytes)) and not rest.endswith(b"\n"):
                        pass
                    continue
                yield line
        except EOFError:
            counts.truncated = True
            counts.corrupt = (
                f"{counts.name}:{counts.lines + 1}: gzip stream ends early (truncated file, {source.bytes:,} bytes)"
            )
        except (gzip.BadGzipFile, zlib.error) as error:
            counts.corrupt = f"{counts.name}:{counts.lines + 1}: damaged gzip stream ({error})"
    source.drain()
    if source.bytes == 0:
        counts.truncated, counts.corrupt = True, f"{counts.name}:1: empty file, no gzip stream"


def _parse(line: bytes) -> tuple[str | None, str]:
    """(id or None, text) of a line.

    Raises:
        ValueError: the reason why the line is no document.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    if "text" not in value:
        raise ValueError('no "text"')
    text, identity = value["text"], value.get("id")
    if not isinstance(text, str):
        raise ValueError(f'"text" is {type(text).__name__}, expected a string')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'"text" has half of a surrogate pair at character {error.start}') from error
    return identity if isinstance(identity, str) else None, text


def is_validation(identity: str, every: int) -> bool:
    """Whether a document goes to the validation split: one in `every`, by the hash of its id; never for `every` 0."""
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
    return every > 0 and int.from_bytes(digest[:8], "big") % every == 0


def _documents(lines: Iterator[bytes], counts: ShardCounts, max_bad_lines: int) -> Iterator[tuple[str, str]]:
    for line in lines:
        try:
            identity, text = _parse(line)
        except ValueError as error:
            counts.bad(str(error))
            if counts.bad_lines > max_bad_lines:
                raise TooManyBadLinesError(
                    f"{counts.name}: {counts.bad_lines} bad lines in this shard alone, at most {max_bad_lines} "
                    f"are allowed "
                    f"(--max-bad-lines). First: " + "; ".join(counts.bad_line_places[:5])
                ) from error
            continue
        if not text.strip():
            counts.empty_documents += 1
            continue
        yield identity if identity is not None else f"{counts.name}:{counts.lines}", text


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def tokenize_shard(
    shard: Path,
    part: Path,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    eod: int,
    validation_every: int,
    max_bad_lines: int,
    report: Report,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> ShardCounts:
    """Tokenize one shard into the folder `part`, which appears whole or not at all.

    Args:
        shard: the `.json.gz` file.
        part: folder to create: train and validation .bin/.idx and part.json.
        tokenizer: see `load_tokenizer`.
        vocab_size: number of ids.
        eod: id appended to each document.
        validation_every: see `is_validation`.
        max_bad_lines: more of them raise.
        report: called after each batch with documents, tokens and compressed bytes since the last call.
        max_line_bytes: a longer line counts as bad.

    Returns:
        The counts; a broken gzip stream is noted there, and what came before it is kept.

    Raises:
        TooManyBadLinesError: more than `max_bad_lines`.
        OSError: the shard cannot be opened or the part not written.
    """
    counts = ShardCounts(shard.name)
    status = shard.stat()
    temporary = part.with_name(f".tmp-{part.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with (
            shard.open("rb") as stream,
            IndexedWriter(temporary / TRAIN, vocab_size) as train,
            IndexedWriter(temporary / VALIDATION, vocab_size) as validation,
        ):
            source = _CountedFile(stream)
            reported = 0
            lines = _lines(source, counts, max_line_bytes)
            for batch in _batches(_documents(lines, counts, max_bad_lines)):
                arrays: list[np.ndarray] = encode_documents(tokenizer, [text for _, text in batch], eod)
                for (identity, _), ids in zip(batch, arrays, strict=True):
                    (validation if is_validation(identity, validation_every) else train).add_document(ids)
                tokens = sum(ids.size for ids in arrays)
                counts.documents += len(batch)
                counts.tokens += tokens
                report(len(batch), tokens, source.bytes - reported)
                reported = source.bytes
            report(0, 0, source.bytes - reported)
            train.finish()
            validation.finish()
        counts.bytes, counts.sha256 = source.bytes, source.digest.hexdigest()
        write_json(temporary / PART_FILE, {"mtime_ns": status.st_mtime_ns, "counts": asdict(counts)})
        temporary.replace(part)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return counts


def finished_part(shard: Path, part: Path) -> ShardCounts | None:
    """The counts of a part that an earlier run finished, or None where it is missing or its shard has changed since."""
    if not (part / PART_FILE).is_file():
        return None
    facts: dict[str, Any] = read_json(part / PART_FILE)
    status = shard.stat()
    if facts["mtime_ns"] != status.st_mtime_ns or facts["counts"]["bytes"] != status.st_size:
        shutil.rmtree(part)
        return None
    return ShardCounts(**facts["counts"])
