"""The folder `checkpoints` of a run: written beside and renamed, so a killed save never costs the last checkpoint.

    checkpoints/iter_0000100/   Megatron's distributed checkpoint, and settings.json
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
            ValueError: latest.json names a checkpoint that is not there.
        """
        pointer = self.path / "latest.json"
        if not pointer.exists():
            return None
        step = int(json.loads(pointer.read_text())["step"])
        if not self.whole(step).is_dir():
            raise ValueError(
                f"{pointer}: names {self.whole(step).name}, which is missing; restore it or delete the run folder"
            )
        return step

    def settings(self, step: int) -> dict[str, Any]:
        """The settings of the run that saved the checkpoint of `step`."""
        settings = json.loads((self.whole(step) / "settings.json").read_text())
        assert isinstance(settings, dict)
        return settings

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
        write_atomic(self.partial(step) / "settings.json", json.dumps(settings, indent=2) + "\n")
        self.partial(step).replace(self.whole(step))
        write_atomic(self.path / "latest.json", json.dumps({"step": step, "folder": self.whole(step).name}) + "\n")
        for old in sorted(self.path.glob("iter_*[0-9]"))[: -self._keep]:
            shutil.rmtree(old)
