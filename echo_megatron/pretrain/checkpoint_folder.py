"""The folder `checkpoints` of a run: written beside and renamed, so a killed save never costs the last checkpoint.

    checkpoints/iter_0000100/   Megatron's distributed checkpoint, settings.json, and files.json with every file's size
    checkpoints/latest.json     {"step": 100, "folder": "iter_0000100"}

A save writes `iter_….tmp`, renames it, and only then replaces `latest.json`; both renames are atomic.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from echo_megatron.run_folder import write_atomic


class CheckpointFolder:
    """Reads and writes the folder; one process writes.

    Args:
        path: the folder `checkpoints`.
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, path: Path, keep: int):
        self.path = path
        self._keep = keep

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, or None.

        Raises:
            ValueError: latest.json is damaged, or names a checkpoint that is not there.
        """
        pointer = self.path / "latest.json"
        if not pointer.exists():
            return None
        step = _read_json(pointer).get("step")
        if not isinstance(step, int):
            raise ValueError(f'{pointer}: expected {{"step": …}}, got {pointer.read_text()[:80]!r}')
        if not self.whole(step).is_dir():
            raise ValueError(
                f"{pointer}: names {self.whole(step).name}, which is missing; restore it or delete the run folder"
            )
        return step

    def settings(self, step: int) -> dict[str, Any]:
        """The settings of the run that saved the checkpoint of `step`.

        Raises:
            ValueError: settings.json is damaged.
        """
        return _read_json(self.whole(step) / "settings.json")

    def check(self, step: int) -> None:
        """Whether all files of the checkpoint of `step` are there and as long as they were written.

        Raises:
            ValueError: one is not; the message names it and what can be done.
        """
        sizes = self.whole(step) / "files.json"
        if not sizes.exists():  # saved by a version that did not note them
            return
        for name, expected in _read_json(sizes).items():
            path = self.whole(step) / name
            found = f"{path.stat().st_size:,} bytes" if path.exists() else "no file"
            if found != f"{expected:,} bytes":
                raise ValueError(f"{path}: expected {expected:,} bytes, got {found}; {self.way_out(step)}")

    def way_out(self, step: int) -> str:
        """What to do about a damaged checkpoint."""
        older = [path.name for path in sorted(self.path.glob("iter_*[0-9]")) if path != self.whole(step)]
        go_back = f"write the step of {' or '.join(older)} into {self.path / 'latest.json'}, " if older else ""
        return f"the checkpoint is damaged: restore {self.whole(step)} from a copy, {go_back}or delete the run folder"

    def whole(self, step: int) -> Path:
        """Where the checkpoint of `step` is once it is complete."""
        return self.path / f"iter_{step:07d}"

    def partial(self, step: int) -> Path:
        """Where it is written."""
        return self.whole(step).with_suffix(".tmp")

    def begin(self, step: int) -> None:
        """Make room to write the checkpoint of `step`; what killed saves have left goes."""
        for partial in self.path.glob("iter_*.tmp"):
            shutil.rmtree(partial)
        if self.whole(step).exists():  # whole, but latest.json never came to name it
            shutil.rmtree(self.whole(step))
        self.partial(step).mkdir(parents=True)

    def commit(self, step: int, settings: dict[str, Any]) -> None:
        """Make the written checkpoint of `step` the latest, and drop the oldest."""
        partial = self.partial(step)
        write_atomic(partial / "settings.json", json.dumps(settings, indent=2) + "\n")
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
        write_atomic(partial / "files.json", json.dumps(sizes, indent=2) + "\n")
        self.partial(step).replace(self.whole(step))
        write_atomic(self.path / "latest.json", json.dumps({"step": step, "folder": self.whole(step).name}) + "\n")
        for old in sorted(self.path.glob("iter_*[0-9]"))[: -self._keep]:
            shutil.rmtree(old)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path}: is missing or damaged ({error}); restore it or delete the run folder") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content
