"""README and the pages of docs/, and the tables in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables(text: str) -> dict[str, list[list[str]]]:
    """First header cell of every table -> its rows."""
    found: dict[str, list[list[str]]] = {}
    lines = text.splitlines()
    for idx, line in enumerate(lines[1:], 1):
        if re.fullmatch(r"\|[\s:|-]+\|", line):
            rows = []
            for row in lines[idx + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.setdefault(cells(lines[idx - 1])[0], []).extend(rows)
    return found


def names_in(path: Path) -> set[str]:
    """The tests of a file, `test_x` or `TestX::test_y`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return {name for name in names if name.split("::")[-1].startswith("test_")}


def missing_tests(text: str) -> list[str]:
    """The tests that a page names, as `file.py::test_x`, and that do not exist."""
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)
    known = {file: names_in(ROOT / "tests" / file) for file in {file for file, _ in named}}
    return [f"{file}::{name}" for file, name in named if name not in known[file]]
