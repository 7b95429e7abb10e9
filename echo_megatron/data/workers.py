"""Worker processes that tokenize shards, and the counters through which they report."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from echo_megatron.data.shards import ShardCounts, tokenize_shard
from echo_megatron.data.tokenizer import load_tokenizer

# Spawned, not forked: the parent has threads (progress bar, executor), and the tokenizer has a thread pool of its own.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class ShardTask:
    """What one worker needs for one shard; see `tokenize_shard`."""

    shard: Path
    part: Path
    vocab_size: int
    eod: int
    validation_every: int
    max_bad_lines: int


class Counters:
    """Documents, tokens and compressed bytes, added to by all workers and read by the parent."""

    def __init__(self) -> None:
        self._values: Any = _CONTEXT.Array("q", 3)

    def add(self, documents: int, tokens: int, num_bytes: int) -> None:
        with self._values.get_lock():
            for index, value in enumerate((documents, tokens, num_bytes)):
                self._values[index] += value

    def read(self) -> tuple[int, int, int]:
        with self._values.get_lock():
            documents, tokens, num_bytes = self._values[:]
        return documents, tokens, num_bytes


_worker: dict[str, Any] = {}


def _start(tokenizer: Path, counters: Counters) -> None:
    # One thread a worker: --workers alone says how many cores are used.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.update(tokenizer=load_tokenizer(tokenizer), counters=counters)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for ever for its next task."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(task: ShardTask) -> ShardCounts:
    return tokenize_shard(
        task.shard,
        task.part,
        _worker["tokenizer"],
        vocab_size=task.vocab_size,
        eod=task.eod,
        validation_every=task.validation_every,
        max_bad_lines=task.max_bad_lines,
        report=_worker["counters"].add,
    )


@contextlib.contextmanager
def shard_futures(
    tasks: list[ShardTask], workers: int, tokenizer: Path, counters: Counters
) -> Iterator[dict[Future[ShardCounts], ShardTask]]:
    """Tokenize the shards in `workers` processes. Leaving early, by an error or Ctrl-C, kills them."""
    with contextlib.ExitStack() as stack:
        executor = ProcessPoolExecutor(
            min(workers, max(1, len(tasks))), mp_context=_CONTEXT, initializer=_start, initargs=(tokenizer, counters)
        )
        stack.callback(executor.shutdown)
        try:
            yield {executor.submit(_run, task): task for task in tasks}
        except BaseException:
            processes = list((executor._processes or {}).values())  # no public way to stop a task that runs
            executor.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise
