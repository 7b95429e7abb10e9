"""Dolma's C4 shards to Megatron's indexed dataset: in parallel, resumable, and the same bytes however it was run.

Each shard becomes a folder under `parts/`, complete or absent; an interrupted run continues with the missing ones. The
parts
are then joined in the order of the shards, so neither the number of workers nor interruptions show in the result.
"""

import os
import shutil
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_megatron.data.files import exclusive_lock, publish, read_json, sha256_file, write_json
from echo_megatron.data.indexed import join_indexed_datasets
from echo_megatron.data.manifest import MANIFEST, TRAIN, VALIDATION, PreparedData, build_manifest, tokenizer_facts
from echo_megatron.data.progress import token_progress
from echo_megatron.data.shards import ShardCounts, finished_part
from echo_megatron.data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    find_tokenizer,
    load_tokenizer,
    token_id,
    vocabulary_size,
)
from echo_megatron.data.workers import Counters, ShardTask, shard_futures

OPTIONS_FILE = "options.json"
PARTS = "parts"


@dataclass
class DolmaOptions:
    """Options of `prepare_dolma`.

    Attributes:
        shards: `.json.gz` files in the order of their documents in the result.
        out: folder to fill.
        tokenizer: tokenizer.json, a folder with one, or a hub name.
        eod: token appended to each document.
        validation_every: one document in this many, by the hash of its id, goes to validation; 0 for none.
        workers: processes.
        max_bad_lines: a run with more bad lines fails.
        allow_corrupt: finish although a shard's gzip stream is broken; otherwise that fails after all shards were read.
        keep_parts: keep `parts/` after joining (twice the disk space).
    """

    shards: list[Path]
    out: Path
    tokenizer: str = "Qwen/Qwen3-0.6B"
    eod: str = END_OF_TEXT
    validation_every: int = 1000
    workers: int = 1
    max_bad_lines: int = 100
    allow_corrupt: bool = False
    keep_parts: bool = False

    def validate(self) -> None:
        """Raises ValueError with what was expected and got."""
        if not self.shards:
            raise ValueError("no shards; give *.json.gz files, patterns or --urls")
        for shard in self.shards:
            if not shard.is_file():
                raise ValueError(f"{shard}: no such file")
        repeated = [path for path, times in Counter(shard.resolve() for shard in self.shards).items() if times > 1]
        if repeated:
            raise ValueError(f"given twice: {', '.join(map(str, repeated))}")
        for name, low in (("workers", 1), ("validation_every", 0), ("max_bad_lines", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}: expected at least {low}, got {getattr(self, name)}")


class CorruptDataError(ValueError):
    """Shards or lines could not be read, more than the options allow. The message lists the places."""


def prepare_dolma(options: DolmaOptions, console: Console | None = None) -> PreparedData:
    """Tokenize the shards, or the rest of them after an interruption, and join them.

    Args:
        options: see `DolmaOptions`.
        console: for the progress bar and the places of what could not be read.

    Returns:
        The prepared folder; see `PreparedData`.

    Raises:
        ValueError: a bad option, or `out` was begun with other options (the message says which differ).
        CorruptDataError: too many bad lines, or a broken shard without `allow_corrupt`. What was read stays for a
            later run.
        TimeoutError: another process works in `out`.
    """
    console = console or Console(stderr=True)
    options.validate()
    source = find_tokenizer(options.tokenizer)
    tokenizer = load_tokenizer(source)
    vocab_size, eod = vocabulary_size(tokenizer), token_id(tokenizer, options.eod, source)
    options.out.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(options.out / ".lock", "preparing data in this folder"):
        _begin(options, sha256_file(source))
        if (options.out / MANIFEST).is_file():
            prepared = PreparedData.load(options.out)
            console.print(f"{options.out}: already prepared, {prepared.train_tokens:,} training tokens")
            return prepared
        if not (options.out / TOKENIZER_FILE).is_file():
            copy = options.out / f".tmp-{TOKENIZER_FILE}"
            shutil.copyfile(source, copy)
            copy.replace(options.out / TOKENIZER_FILE)
        counts = _tokenize(options, vocab_size, eod, console)
        _judge(counts, options, console)
        _join(options, counts, vocab_size, eod)
        if not options.keep_parts:
            shutil.rmtree(options.out / PARTS)
    return PreparedData.load(options.out)


def _recorded(options: DolmaOptions, tokenizer_sha256: str) -> dict[str, Any]:
    """The options that decide the result."""
    return {
        "shards": [shard.name for shard in options.shards],
        "tokenizer_sha256": tokenizer_sha256,
        "eod": options.eod,
        "validation_every": options.validation_every,
    }


def _begin(options: DolmaOptions, tokenizer_sha256: str) -> None:
    """Start in an empty folder, or continue one that was begun with the same options."""
    path, wanted = options.out / OPTIONS_FILE, _recorded(options, tokenizer_sha256)
    if path.is_file():
        begun = read_json(path)
        differing = [
            f"{key}: {_short(begun.get(key))} then, {_short(wanted.get(key))} now"
            for key in sorted({*begun, *wanted})
            if begun.get(key) != wanted.get(key)
        ]
        if differing:
            raise ValueError(
                f"{options.out}: begun with other options. "
                + "; ".join(differing)
                + ". Use those, another --out, or delete the folder"
            )
    elif strange := sorted(entry.name for entry in options.out.iterdir() if entry.name != ".lock"):
        raise ValueError(
            f"{options.out}: not empty and not begun by this program (has {', '.join(strange[:5])}); choose "
            f"another --out"
        )
    else:
        write_json(path, wanted)
    parts = options.out / PARTS
    parts.mkdir(exist_ok=True)
    for stale in [*parts.glob(".tmp-*"), *options.out.glob(".tmp-*")]:  # of a killed run: the lock is ours
        shutil.rmtree(stale) if stale.is_dir() else stale.unlink()


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} files ({', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''})"
    return repr(value)


def _part(options: DolmaOptions, index: int) -> Path:
    return options.out / PARTS / f"{index:05d}-{options.shards[index].name}"


def _tokenize(options: DolmaOptions, vocab_size: int, eod: int, console: Console) -> list[ShardCounts]:
    """Counts of all shards in order, after tokenizing those without a finished part."""
    counts = {index: finished_part(shard, _part(options, index)) for index, shard in enumerate(options.shards)}
    missing = {index: options.shards[index] for index, found in counts.items() if found is None}
    if len(missing) < len(options.shards):
        console.print(f"continuing: {len(options.shards) - len(missing)} of {len(options.shards)} shards are done")
    tasks = [
        ShardTask(shard, _part(options, index), vocab_size, eod, options.validation_every, options.max_bad_lines)
        for index, shard in missing.items()
    ]
    index_of = {task.part: index for task, index in zip(tasks, missing, strict=True)}
    counters = Counters()
    started = time.monotonic()
    size = sum(shard.stat().st_size for shard in missing.values())
    with token_progress(console) as bar:
        row = bar.add_task(f"{len(missing)} shards", total=size, documents=0, tokens=0, rate=0.0)
        try:
            with shard_futures(tasks, options.workers, options.out / TOKENIZER_FILE, counters) as futures:
                pending = set(futures)
                while pending:
                    done, pending = wait(pending, timeout=0.25, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        counts[index_of[futures[future].part]] = result
                        _tell(result, console)
                    documents, tokens, num_bytes = counters.read()
                    rate = tokens / max(1e-9, time.monotonic() - started)
                    bar.update(row, completed=num_bytes, documents=documents, tokens=tokens, rate=rate)
                    _limit(counts, options.max_bad_lines)
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process was killed, perhaps for want of memory; finished shards are kept. Run again "
                "with fewer --workers"
            ) from error
    return [found for _, found in sorted(counts.items()) if found is not None]


def _tell(counts: ShardCounts, console: Console) -> None:
    """Print the places of what could not be read."""
    if counts.corrupt is not None:
        console.print(
            f"corrupt shard: {counts.corrupt}; kept {counts.documents:,} documents", style="red", markup=False
        )
    for place in counts.bad_line_places:
        console.print(f"bad line: {place}", style="yellow", markup=False)
    if (unlisted := counts.bad_lines - len(counts.bad_line_places)) > 0:
        console.print(f"bad line: {counts.name}: and {unlisted:,} more", style="yellow", markup=False)


def _limit(counts: dict[int, ShardCounts | None], max_bad_lines: int) -> None:
    bad = sum(found.bad_lines for found in counts.values() if found is not None)
    if bad > max_bad_lines:
        raise CorruptDataError(
            f"{bad:,} bad lines, at most {max_bad_lines:,} are allowed; finished shards are kept. "
            "Look at the places above; --max-bad-lines raises the limit"
        )


def _judge(counts: list[ShardCounts], options: DolmaOptions, console: Console) -> None:
    corrupt = [found.corrupt for found in counts if found.corrupt is not None]
    if corrupt and not options.allow_corrupt:
        raise CorruptDataError(
            f"{len(corrupt)} of {len(counts)} shards are corrupt: {'; '.join(corrupt)}. Replace the files and "
            f"run again "
            "(only they are read again), or accept what could be read with --allow-corrupt"
        )
    if not any(found.documents for found in counts):
        raise CorruptDataError("no documents in any shard")


def _join(options: DolmaOptions, counts: list[ShardCounts], vocab_size: int, eod: int) -> None:
    """Join the parts in the order of the shards and write the manifest last."""
    temporary = options.out / f".tmp-{os.getpid()}"
    temporary.mkdir()
    parts = [_part(options, index) for index in range(len(options.shards))]
    written = {
        split: join_indexed_datasets([part / split for part in parts], temporary / split)
        for split in (TRAIN, VALIDATION)
    }
    for split, dataset in written.items():
        if not dataset.documents:
            if split == TRAIN:
                raise ValueError("all documents fell to validation; use a larger --validation-every or more data")
            for name in dataset.files:
                (temporary / name).unlink()
    manifest = build_manifest(
        "dolma_c4",
        tokenizer_facts(
            vocab_size,
            eod,
            options.out / TOKENIZER_FILE,
            None if Path(options.tokenizer).exists() else options.tokenizer,
        ),
        written,
        options=read_json(options.out / OPTIONS_FILE),
        counts={
            key: sum(getattr(found, key) for found in counts)
            for key in ("lines", "documents", "tokens", "empty_documents", "bad_lines")
        }
        | {"corrupt_shards": sum(found.corrupt is not None for found in counts)},
        shards=[asdict(found) for found in counts],
    )
    write_json(temporary / MANIFEST, manifest)
    publish(temporary, options.out, MANIFEST)
