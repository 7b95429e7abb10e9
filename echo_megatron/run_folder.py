"""A run folder: `run.json` says what was run, `metrics.jsonl` what came out, one JSON object a line.

`metrics.jsonl` is append-only and flushed at every line, so that a killed run keeps all it had finished. Floats are
written with `repr`, so they read back bit for bit. JSON has no NaN: a non-finite number is written as `null` and its
line carries `"nonfinite": true`; a `None` is not written at all, so every `null` in the file was NaN or infinite.
"""

import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

KINDS = ("train", "validation")


def write_atomic(path: str | Path, text: str) -> None:
    """Replace `path` by `text`: a reader, also one after a crash, finds the old text or the new one, never a part."""
    path = Path(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes it 0600; a run folder is as readable as its neighbours
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


class RunFolder:
    """Reads and writes one run folder. One process writes (rank 0); any number may read meanwhile.

    Args:
        path: the folder; made by the first write.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.run_path = self.path / "run.json"
        self.metrics_path = self.path / "metrics.jsonl"
        self._file: IO[str] | None = None

    def write_run(self, run: dict[str, Any]) -> None:
        """Replace `run.json` atomically; non-finite floats become null."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.run_path, json.dumps(finite(run), indent=2, allow_nan=False) + "\n")

    def run(self) -> dict[str, Any]:
        """What `write_run` wrote.

        Raises:
            FileNotFoundError: there is no run.json.
            ValueError: it is not a JSON object.
        """
        try:
            run = json.loads(self.run_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.run_path}: not JSON: {error}") from error
        if not isinstance(run, dict):
            raise ValueError(f"{self.run_path}: expected a JSON object, got {type(run).__name__}")
        return run

    def append(self, record: dict[str, Any]) -> None:
        """Add one line to `metrics.jsonl` and flush it.

        Args:
            record: {"kind": "train" | "validation", "step": int, …} with numbers, strings or None as values.

        Raises:
            ValueError: no such kind, or `step` is not a whole number ≥ 0.
            TypeError: a value that JSON cannot hold, e.g. a tensor.
        """
        if record.get("kind") not in KINDS:
            raise ValueError(f"a metrics record needs kind {' or '.join(KINDS)}, got {record.get('kind')!r}")
        if not _is_step(record.get("step")):
            raise ValueError(f"a metrics record needs a whole step ≥ 0, got {record.get('step')!r}")
        line = {key: value for key, value in record.items() if value is not None}
        if any(_is_nonfinite(value) for value in line.values()):
            line = {key: None if _is_nonfinite(value) else value for key, value in line.items()} | {"nonfinite": True}
        text = json.dumps(line, allow_nan=False) + "\n"
        if self._file is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._end_cut_line()
            self._file = self.metrics_path.open("a", encoding="utf-8")
        self._file.write(text)
        self._file.flush()

    def truncate(self, step: int) -> None:
        """Drop every record after `step`, atomically: a run resumed from there then adds each step once."""
        self.close()
        if not self.metrics_path.exists():
            return
        kept = [json.dumps(finite(record)) for _, record in self._records() if record["step"] <= step]
        write_atomic(self.metrics_path, "".join(line + "\n" for line in kept))

    def train(self) -> list[dict[str, Any]]:
        """The training records in order of their steps; non-finite numbers as NaN.

        Raises:
            ValueError: a line is malformed, or steps do not increase (a resumed run that was not truncated).
        """
        return self._of_kind("train")

    def validation(self) -> list[dict[str, Any]]:
        """The validation records, as `train`."""
        return self._of_kind("validation")

    def close(self) -> None:
        """Close the metrics file; the next `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _of_kind(self, kind: str) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        for number, record in self._records():
            if record["kind"] != kind:
                continue
            if records and record["step"] <= records[-1]["step"]:
                raise ValueError(
                    f"{self.metrics_path}, line {number}: {kind} step {record['step']} comes after step "
                    f"{records[-1]['step']}; a resumed run has to truncate its metrics to the checkpoint's step"
                )
            records.append(record)
        return records

    def _records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, record). A last line that a kill has cut is dropped with a warning; others are errors."""
        if not self.metrics_path.exists():
            return
        with self.metrics_path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                except ValueError as error:  # also UnicodeDecodeError
                    if not line.endswith(b"\n"):
                        warnings.warn(f"{self.metrics_path}, line {number}: cut off, dropped", stacklevel=2)
                        return
                    raise ValueError(f"{self.metrics_path}, line {number}: not JSON: {error}") from error
                if not isinstance(record, dict) or record.get("kind") not in KINDS or not _is_step(record.get("step")):
                    raise ValueError(
                        f"{self.metrics_path}, line {number}: expected an object with kind {' or '.join(KINDS)} and a "
                        f"step ≥ 0, got {line[:120].decode(errors='replace').strip()}"
                    )
                if record.get("nonfinite"):
                    record = {key: math.nan if value is None else value for key, value in record.items()}
                yield number, record

    def _end_cut_line(self) -> None:
        """Bring the file to a line's end before the first append: else the new line would be glued to the cut one."""
        if not self.metrics_path.exists():
            return
        content = self.metrics_path.read_bytes()
        if not content or content.endswith(b"\n"):
            return
        start = content.rfind(b"\n") + 1
        try:
            json.loads(content[start:])
            addition = b"\n"  # whole but for its newline
        except ValueError:
            warnings.warn(f"{self.metrics_path}: the last line was cut off, dropped", stacklevel=3)
            addition = b""
            os.truncate(self.metrics_path, start)
        with self.metrics_path.open("ab") as file:
            file.write(addition)


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_nonfinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def finite(value: Any) -> Any:
    """`value` with None for every float in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if _is_nonfinite(value) else value


def _umask() -> int:
    mask = os.umask(0)  # there is no way to read it without setting it
    os.umask(mask)
    return mask


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
