"""Tokenizers: load Hugging Face's `tokenizer.json`, and what Megatron-core's datasets need to know of one."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from echo_megatron.data.files import sha256_file

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"


def find_tokenizer(source: str) -> Path:
    """Locate a tokenizer.json.

    Args:
        source: a tokenizer.json, a folder that holds one (as transformers saves it), or the name of a model on the
            Hugging Face hub.

    Raises:
        ValueError: it is none of them, or the hub cannot be reached.
    """
    path = Path(source)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if path.is_file():
        return path
    if path.suffix == ".json" or path.is_absolute() or source.startswith(".") or source.count("/") > 1:
        raise ValueError(
            f"{path}: no such tokenizer; expected a {TOKENIZER_FILE}, a folder with one, or a hub name like "
            f"Qwen/Qwen3-0.6B"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, TOKENIZER_FILE, etag_timeout=20))
    except Exception as error:  # the hub client raises many unrelated types for "not reachable" and "not there"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"tokenizer {source!r}: no such local file or folder, and the Hugging Face hub did not give it ({reason}). "
            f"Where there is no network, pass the path of a {TOKENIZER_FILE} or of a folder that has one"
        ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json for plain text: special tokens spelled out in a text are text, not control ids.

    Raises:
        ValueError: the file is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A web page that quotes "<|endoftext|>" must not end a document.
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Highest id + 1, added tokens included (Qwen3: 151,669)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_id(tokenizer: Tokenizer, token: str, path: Path) -> int:
    """Id of a token.

    Raises:
        ValueError: the vocabulary lacks it.
    """
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"{path}: the vocabulary has no token {token!r} to end documents with; name one that it has")
    return int(found)


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], eod: int) -> list[np.ndarray]:
    """Token ids of each text with `eod` appended: arrays of int64, [tokens + 1]."""
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array([*encoding.ids, eod], dtype=np.int64) for encoding in encoded]


@dataclass(frozen=True)
class DatasetTokenizer:
    """What `GPTDatasetConfig.tokenizer` is asked for: vocabulary size, document end, padding, identity.

    Attributes:
        vocab_size: number of ids.
        eod: id that ends a document.
        identity: SHA-256 of tokenizer.json or a name; part of the key of Megatron's index cache.
        pad: id of padding; -1 is Megatron's value for "none in the data".
    """

    vocab_size: int
    eod: int
    identity: str = "token ids"
    pad: int = -1

    @classmethod
    def from_file(cls, path: Path | str, eod: str = END_OF_TEXT) -> "DatasetTokenizer":
        """Of a tokenizer.json whose documents end with the token `eod`."""
        tokenizer = load_tokenizer(Path(path))
        return cls(vocabulary_size(tokenizer), token_id(tokenizer, eod, Path(path)), sha256_file(Path(path)))

    @property
    def unique_identifiers(self) -> OrderedDict[str, str | int]:
        return OrderedDict(identity=self.identity, vocab_size=self.vocab_size, eod=self.eod)
