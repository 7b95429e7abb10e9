"""The tokens of an evaluation: prepared data, Megatron's indexed datasets, token arrays, or text with a tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echo_megatron.data.indexed import check_indexed_dataset, prefix_path
from echo_megatron.data.manifest import MANIFEST, PreparedData
from echo_megatron.data.tokenizer import find_tokenizer, load_tokenizer
from echo_megatron.data.tokens import read_tokens

ARRAY_ENDINGS = (".npy", ".u16", ".u32", ".u16.xz", ".u32.xz")
SPLITS = ("train", "validation")
CHARACTERS_A_TOKEN = 40  # more than any tokenizer needs: only the text's beginning is tokenized


@dataclass(frozen=True)
class Tokens:
    """Token ids to predict, in order.

    Attributes:
        name: what reports call them.
        ids: int64 [num_tokens + 1]; the first is only read.
        sha256: of `ids`.
    """

    name: str
    ids: np.ndarray
    sha256: str

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return len(self.ids) - 1


def read_source(
    source: str,
    num_tokens: int | None,
    *,
    vocab_size: int,
    split: str = "validation",
    tokenizer: str | None = None,
    id_map: Path | None = None,
) -> Tokens:
    """The first `num_tokens` + 1 tokens of `source`.

    Args:
        source: a folder that `echo_megatron.data` prepared; the prefix of an indexed dataset (`PREFIX.bin`, `.idx`); a
            token array ending in .npy, .u16, .u32, .u16.xz or .u32.xz; else a UTF-8 text.
        num_tokens: tokens to predict; None: all there are.
        vocab_size: of the model; larger ids are refused.
        split: of a prepared folder.
        tokenizer: for a text; see `data.tokenizer.find_tokenizer`.
        id_map: .npy of ids by rank, for 16-bit token arrays.

    Raises:
        ValueError: no such source, too few tokens, an id beyond the vocabulary, or an option that the source has no
            use for; the message says what to do.
    """
    if split not in SPLITS:
        raise ValueError(f"--split: expected one of {', '.join(SPLITS)}, got {split!r}")
    wanted = None if num_tokens is None else num_tokens + 1
    path = Path(source)
    is_text = False
    if path.is_dir():
        name, ids = _prepared(path, split, wanted)
    elif prefix_path(source, ".idx").is_file() or prefix_path(source, ".bin").is_file():
        name, ids = path.name, _indexed(source, wanted)
    elif not path.is_file():
        raise ValueError(
            f"--data {source}: expected a prepared folder, the prefix of an indexed dataset, a token array "
            f"({', '.join(ARRAY_ENDINGS)}) or a text, got nothing of that name"
        )
    elif path.name.endswith(ARRAY_ENDINGS):
        name, ids = path.name, _array(path, wanted, id_map)
    else:
        name, ids, is_text = path.name, _text(path, wanted, tokenizer), True
    if tokenizer is not None and not is_text:
        raise ValueError(f"--tokenizer: expected with a text alone; {source} holds token ids already")
    if id_map is not None and not path.name.endswith((".u16", ".u16.xz", ".npy")):
        raise ValueError(f"--id-map: expected with a 16-bit token array alone, got it with {source}")
    return _checked(source, name, ids, wanted, vocab_size)


def _checked(source: str, name: str, ids: np.ndarray, wanted: int | None, vocab_size: int) -> Tokens:
    if len(ids) < 2 or (wanted is not None and len(ids) < wanted):
        need = "at least 2" if wanted is None else f"{wanted:,} (one more than --tokens)"
        raise ValueError(f"--data {source}: expected {need} tokens, got {len(ids):,}; lower --tokens or give more text")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"--data {source}: expected ids from 0 to {vocab_size - 1}, the model's vocabulary, got {low} to {high}; "
            "the tokens are of another tokenizer"
        )
    ids = np.ascontiguousarray(ids, dtype=np.int64)
    return Tokens(name, ids, hashlib.sha256(ids.tobytes()).hexdigest())


def _prepared(folder: Path, split: str, wanted: int | None) -> tuple[str, np.ndarray]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"--data {folder}: expected a folder with a {MANIFEST}, as docs/data.md prepares it, got none")
    prepared = PreparedData.load(folder)
    prefix = prepared.train if split == "train" else prepared.validation
    if prefix is None:
        raise ValueError(f"--data {folder}: has no validation split; give --split train, or prepare it with one")
    return f"{folder.resolve().name} ({split})", _indexed(prefix, wanted)


def _indexed(prefix: Path | str, wanted: int | None) -> np.ndarray:
    summary = check_indexed_dataset(prefix)
    stream = np.memmap(prefix_path(prefix, ".bin"), summary.dtype, "r")
    return np.asarray(stream[:wanted])


def _array(path: Path, wanted: int | None, id_map: Path | None) -> np.ndarray:
    ids_by_rank = None if id_map is None else np.concatenate(list(read_tokens(id_map)))
    parts, count = [], 0
    for chunk in read_tokens(path, ids_by_rank):
        parts.append(chunk)
        count += len(chunk)
        if wanted is not None and count >= wanted:
            break
    return np.concatenate(parts)[:wanted] if parts else np.zeros(0, np.int64)


def _text(path: Path, wanted: int | None, tokenizer: str | None) -> np.ndarray:
    if tokenizer is None:
        raise ValueError(
            f"--data {path}: a text needs --tokenizer (a tokenizer.json, a folder with one, or a hub name); "
            f"token arrays end in {', '.join(ARRAY_ENDINGS)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path}: expected UTF-8 text, got bytes that are none ({error})") from error
    encoding = load_tokenizer(find_tokenizer(tokenizer)).encode(
        text if wanted is None else text[: CHARACTERS_A_TOKEN * wanted], add_special_tokens=False
    )
    return np.array(encoding.ids[:wanted], dtype=np.int64)
