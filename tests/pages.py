"""README and the pages of docs/, and the tables in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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
