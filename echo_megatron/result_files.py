"""Files of results under docs/results/: JSON with its provenance, and the Markdown made from it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from echo_megatron import provenance
from echo_megatron.run_folder import write_atomic


def made_by(script: str, options: Mapping[str, Any], device: torch.device, *packages: str) -> dict[str, Any]:
    """Machine, versions, commit and command of a result.

    Args:
        script: the script's path in the repository.
        options: its parsed options. Those that are None are left out, and of a path only the file's name is recorded:
            where it lay means nothing on another machine.
        device: where it ran.
        packages: whose versions to record besides Python's and this project's.
    """
    words = ["python", script]
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words.append(f"--{name.replace('_', '-')}")
        words += [item.name if isinstance(item, Path) else str(item) for item in values]
    return {
        "machine": {**provenance.machine(device), "threads": torch.get_num_threads()},
        "versions": provenance.versions("echo-megatron", *packages),
        "commit": provenance.commit(),
        "command": shlex.join(words),
    }


def write_results(folder: Path, name: str, results: Mapping[str, Any], markdown: str) -> Path:
    """Write `name`.json and `name`.md; returns the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomic(path, json.dumps(results, indent=1) + "\n")
    write_atomic(path.with_suffix(".md"), markdown)
    return path


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    cells = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]


def provenance_lines(made: Mapping[str, Any]) -> list[str]:
    """The Markdown of `made_by`."""
    machine, versions = (", ".join(f"{k} {v}" for k, v in made[name].items()) for name in ("machine", "versions"))
    return [f"Made by `{made['command']}` at commit {made['commit']}, on {machine}; {versions}."]
