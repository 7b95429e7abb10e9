"""Files that are either complete or absent: checksums, atomic JSON, publishing a folder, one writer at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 22


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, also after a crash."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is no JSON object; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); delete it and prepare the data again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def publish(temporary: Path, folder: Path, last: str) -> None:
    """Move the finished files of `temporary` into `folder`; the file named `last` says that all others are there.

    `last` is removed first and moved last, so a folder that has it is complete whatever interrupts this.
    """
    (folder / last).unlink(missing_ok=True)
    names = sorted(path.name for path in temporary.iterdir() if path.name != last)
    for name in [*names, last]:
        with (temporary / name).open("rb") as stream:
            os.fsync(stream.fileno())
        (temporary / name).replace(folder / name)
    temporary.rmdir()


@contextlib.contextmanager
def exclusive_lock(path: Path, what: str, timeout_s: float = 0.0) -> Iterator[None]:
    """Hold a lock file; the kernel releases it when this process ends, however it ends.

    Args:
        path: the lock file; it is created and stays.
        what: what the lock protects, for the message.
        timeout_s: seconds to wait for another holder.

    Raises:
        TimeoutError: another process still holds it.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("a") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{path}: another process is {what}; waited {timeout_s:.0f} s. Wait for it or stop it, "
                        f"then retry"
                    ) from None
                time.sleep(0.1)
        yield
