"""The folder every preparation leaves: datasets `train` and `validation`, a tokenizer, and `manifest.json`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_megatron.data.files import read_json, sha256_file, sha256_json
from echo_megatron.data.indexed import WrittenDataset, check_indexed_dataset, prefix_path

MANIFEST = "manifest.json"
FORMAT = 1
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class PreparedData:
    """A prepared data folder.

    Attributes:
        folder: where it is.
        name: "sample", "dolma_c4" or "tokens".
        train: dataset prefix (path without .bin/.idx).
        validation: dataset prefix, None where none was split off.
        tokenizer: tokenizer.json, None for packed token arrays that came without one.
        vocab_size: number of token ids.
        eod: id that ends each document.
        fingerprint: SHA-256 over the content; equal for equal data wherever the folder is.
        train_tokens, validation_tokens: token counts.
    """

    folder: Path
    name: str
    train: Path
    validation: Path | None
    tokenizer: Path | None
    vocab_size: int
    eod: int
    fingerprint: str
    train_tokens: int
    validation_tokens: int

    @classmethod
    def load(cls, folder: Path | str, verify_checksums: bool = False) -> "PreparedData":
        """Open a prepared folder and check that its files are the ones the manifest lists.

        Args:
            folder: the folder with `manifest.json`.
            verify_checksums: read every file and compare its SHA-256, not only its size.

        Raises:
            ValueError: no manifest, a file is missing or differs; the message names it with expected and actual values.
        """
        folder = Path(folder)
        if not (folder / MANIFEST).is_file():
            raise ValueError(
                f"{folder / MANIFEST}: not found; prepare the data first "
                "(scripts/prepare_dolma_c4.py, or echo_megatron.data.prepare_sample for the sample)"
            )
        manifest = read_json(folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise ValueError(
                f"{folder / MANIFEST}: expected format {FORMAT}, got {manifest.get('format')}; prepare it again"
            )
        for split in manifest["splits"].values():
            for name, facts in split["files"].items():
                _check_file(folder / name, facts, verify_checksums)
        tokenizer = manifest["tokenizer"]
        if tokenizer["file"] is not None:
            # Small, and ids mean nothing without it: always compared.
            _check_file(folder / tokenizer["file"], tokenizer, True)
        splits = manifest["splits"]
        return cls(
            folder=folder,
            name=manifest["name"],
            train=folder / TRAIN,
            validation=folder / VALIDATION if VALIDATION in splits else None,
            tokenizer=folder / tokenizer["file"] if tokenizer["file"] is not None else None,
            vocab_size=tokenizer["vocab_size"],
            eod=tokenizer["eod"],
            fingerprint=manifest["fingerprint"],
            train_tokens=splits[TRAIN]["tokens"],
            validation_tokens=splits[VALIDATION]["tokens"] if VALIDATION in splits else 0,
        )


def _check_file(path: Path, facts: dict[str, Any], verify_checksum: bool) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: listed in {MANIFEST} but not found; prepare the data again")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise ValueError(f"{path}: expected {facts['bytes']:,} bytes, got {size:,}; prepare the data again")
    if verify_checksum and (actual := sha256_file(path)) != facts["sha256"]:
        raise ValueError(f"{path}: expected SHA-256 {facts['sha256']}, got {actual}; prepare the data again")


def tokenizer_facts(vocab_size: int, eod: int, path: Path | None = None, name: str | None = None) -> dict[str, Any]:
    """The manifest's description of a tokenizer; `path` is the copy of tokenizer.json inside the data folder."""
    facts: dict[str, Any] = {"name": name, "file": None, "vocab_size": vocab_size, "eod": eod}
    if path is not None:
        facts |= {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    return facts


def build_manifest(
    name: str, tokenizer: dict[str, Any], splits: dict[str, WrittenDataset], **details: Any
) -> dict[str, Any]:
    """Assemble a manifest; it holds no time, path or machine, so equal data give equal manifests."""
    entries: dict[str, dict[str, Any]] = {
        split: {"documents": written.documents, "tokens": written.tokens, "files": written.files}
        for split, written in splits.items()
        if written.documents
    }
    content = {
        "vocab_size": tokenizer["vocab_size"],
        "eod": tokenizer["eod"],
        "files": {file: facts["sha256"] for entry in entries.values() for file, facts in entry["files"].items()},
    }
    return {
        "format": FORMAT,
        "name": name,
        "fingerprint": sha256_json(content),
        "tokenizer": tokenizer,
        "splits": entries,
        **details,
    }


def dataset_fingerprint(prefixes: Sequence[Path | str]) -> str:
    """Fingerprint of any indexed datasets: SHA-256 over each `.idx`, the size of each `.bin` and its first and last
    MiB.

    Cheap at any size. A prepared folder has the stronger `PreparedData.fingerprint`, over all of its content.

    Raises:
        ValueError: a dataset is missing or damaged.
    """
    digest = hashlib.sha256()
    edge = 1 << 20
    for prefix in prefixes:
        summary = check_indexed_dataset(prefix)
        digest.update(sha256_file(prefix_path(prefix, ".idx")).encode())
        digest.update(str(summary.bin_bytes).encode())
        with prefix_path(prefix, ".bin").open("rb") as stream:
            digest.update(stream.read(edge))
            stream.seek(max(0, summary.bin_bytes - edge))
            digest.update(stream.read(edge))
    return digest.hexdigest()
