"""The results file of an evaluation: rows are added as they are done; the same settings go on, others are refused."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_megatron.evaluate.perplexity import Measurement
from echo_megatron.evaluate.settings import Setting, parse_setting
from echo_megatron.evaluate.subjects import Applied
from echo_megatron.evaluate.tables import markdown
from echo_megatron.result_files import write_results
from echo_megatron.run_folder import finite

MAX_BLOCKS = 64  # losses that a row keeps, to compare rows on the same tokens


@dataclass(frozen=True)
class RowKey:
    """Which measurement: a setting at P ranks, simulated or real."""

    setting: Setting
    world_size: int
    is_simulated: bool

    @property
    def text(self) -> str:
        kind = "simulated" if self.is_simulated else "real"
        return f"P={self.world_size} {kind} {self.setting.key}"

    @property
    def title(self) -> str:
        """What progress calls it."""
        return f"{self.setting.name} P={self.world_size}"


class Results:
    """Reads and writes NAME.json and NAME.md; one process does.

    A row whose setting's name has come to mean other options, since defaults change from version to version, is left
    out: it would stand in tables under a name that is not its own.

    Args:
        folder: where.
        name: of both files.
        settings: what decides a row's number besides its key: model, tokens, context, precision, …
        made_by: machine, versions, commit and command of this call.
        restarts: begin anew, whatever the file holds.

    Attributes:
        outdated: names of the settings whose rows were left out.

    Raises:
        ValueError: the file holds rows of other settings, or is no results file.
    """

    def __init__(
        self, folder: Path, name: str, settings: dict[str, Any], made_by: dict[str, Any], restarts: bool = False
    ) -> None:
        self.folder, self.name = folder, name
        self.path = folder / f"{name}.json"
        earlier = {} if restarts else self._read()
        if earlier and (different := _differences(earlier["settings"], settings)):
            raise ValueError(
                f"{self.path}: holds rows of other settings:\n{different}\n"
                "Give its own values, choose another --name, or --restart to measure anew"
            )
        rows = earlier.get("rows", [])
        self._rows: list[dict[str, Any]] = [row for row in rows if _is_current(row)]
        self.outdated = list(dict.fromkeys(row["setting"] for row in rows if not _is_current(row)))
        self._runs: list[dict[str, Any]] = earlier.get("runs", [])
        self._made_by = made_by
        self._settings = settings

    def __contains__(self, key: RowKey) -> bool:
        return any(row["key"] == key.text for row in self._rows)

    def add(self, key: RowKey, measurement: Measurement, applied: Applied, seconds: float) -> dict[str, Any]:
        """Add a row and write both files; returns the row."""
        if self._made_by not in self._runs:
            self._runs.append(self._made_by)
        config = key.setting.config
        entry = {
            "setting": key.setting.name,
            "bits": config.bits,
            "early_bits": config.early_bits,
            "last_bits": config.last_bits,
            "P": key.world_size,
            "ranks": "simulated" if key.is_simulated else "real",
            "data": self._settings["data"],
            "tokens": sum(measurement.window_tokens),
            "perplexity": measurement.perplexity,
            "loss": measurement.loss,
            "algorithm": applied.algorithm,
            "transport": applied.transport,
            "residual": (config.residual.name if config.compensates else "none") if config.quantizes else None,
            "bits_a_value": applied.bits_a_value,
            "bytes_relative": round(applied.bytes_relative, 4),
            "block_losses": block_losses(measurement),
            "seconds": round(seconds, 1),
            "run": self._runs.index(self._made_by),
            "key": key.text,
        }
        self._rows.append(finite(entry))
        self.write()
        return self._rows[-1]

    def write(self) -> None:
        """Write both files atomically, with what rows say about each other."""
        for row in self._rows:
            compare(row, self._rows)
        content = {"settings": self._settings, "rows": self._rows, "runs": self._runs}
        write_results(self.folder, self.name, content, markdown(content))

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            return {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            assert content["settings"] is not None and content["rows"] is not None and content["runs"] is not None
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ValueError(
                f"{self.path}: expected the results of an evaluation, got something else ({error}); choose another "
                "--name, or --restart to replace it"
            ) from error
        return content


def _is_current(row: dict[str, Any]) -> bool:
    """Whether the name of the row's setting still means the options that it was measured with."""
    try:
        setting = parse_setting(row["setting"])
    except ValueError:
        return False
    return bool(row["key"].endswith(f" {setting.key}"))


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> str:
    names = [name for name in (*current, *saved) if saved.get(name) != current.get(name)]
    return "\n".join(
        f"  {name}: the file has {saved.get(name)!r}, got {current.get(name)!r}" for name in dict.fromkeys(names)
    )


def block_losses(measurement: Measurement) -> list[float]:
    """Mean losses of at most MAX_BLOCKS blocks of whole windows, each of as many windows but the last."""
    count = len(measurement.window_losses)
    step = -(-count // MAX_BLOCKS)
    blocks = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        total = math.fsum(measurement.window_losses[part]) / sum(measurement.window_tokens[part])
        blocks.append(round(total, 6))
    return blocks


def compare(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Note in `row` how it differs from the 16-bit row of the same ranks: in %, and in losses with their error.

    `delta_loss_error` is the standard error of the mean difference over blocks of the same tokens.
    """
    same = [other for other in rows if other["bits"] == 16 and (other["P"], other["ranks"]) == (row["P"], row["ranks"])]
    row["delta_percent"] = row["delta_loss"] = row["delta_loss_error"] = None
    if not same or row["bits"] == 16 or row["perplexity"] is None or same[0]["perplexity"] is None:
        return
    base = same[0]
    row["delta_percent"] = round(100 * (row["perplexity"] / base["perplexity"] - 1), 3)
    row["delta_loss"] = round(row["loss"] - base["loss"], 6)
    pairs = zip(row["block_losses"], base["block_losses"], strict=True)
    differences = [mine - theirs for mine, theirs in pairs if mine is not None]
    if len(differences) > 1:
        row["delta_loss_error"] = round(statistics.stdev(differences) / math.sqrt(len(differences)), 6)
