"""The folder that objects and libraries are kept in: one process builds at a time, and a file is there whole or not."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo_megatron.kernel_tools import KernelBuildError

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """ECHO_KERNEL_CACHE, or ~/.cache/echo_megatron."""
    named = os.environ.get("ECHO_KERNEL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "echo_megatron"


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Holds the lock file `path`; the kernel releases it when its holder ends, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        deadline, waits = time.monotonic() + timeout_s, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
            if time.monotonic() > deadline:
                raise KernelBuildError(
                    f"{path}: expected the lock within {timeout_s:g} s, process {holder} still builds; "
                    f"see whether it makes progress, or set ECHO_KERNEL_CACHE to another folder"
                )
            if not waits:
                logger.info("process %s builds the kernels: waiting for it", holder)
                waits = True
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` at the end, or goes away where the writer failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644 if path.suffix != ".so" else 0o755)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
