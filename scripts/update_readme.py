"""Fill the results of README.md and of pages in docs/ from the JSON files in docs/results: no number is copied by hand.

usage: python scripts/update_readme.py [--check] [--allow-missing]

A block lies between `<!-- results:NAME -->` and `<!-- /results -->`; NAME is a file docs/results/NAME.json, whose
figure, if any, is docs/results/NAME.png, or another view of such a file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from pathlib import Path

from readme_blocks import BLOCKS

from echo_megatron.run_folder import write_atomic

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- results:(?P<name>[a-z0-9_]+) -->\n)(?P<body>.*?)(<!-- /results -->)", re.DOTALL)
MARKER = re.compile(r"<!-- results:|<!-- /results -->")


def fill(text: str, results_dir: Path, allow_missing: bool) -> str:
    """`text` with every block made anew.

    Args:
        text: Markdown with result blocks.
        results_dir: folder of NAME.json.
        allow_missing: a block whose JSON is missing says so, and how to make it; otherwise that is an error.

    Raises:
        ValueError: a block has an unknown name or no end, there is no block, or a JSON is missing or malformed.
    """
    blocks = list(BLOCK.finditer(text))
    if not blocks or len(MARKER.findall(text)) != 2 * len(blocks):
        raise ValueError("expected pairs of `<!-- results:NAME -->` and `<!-- /results -->`, each on a line of its own")
    for name in (found["name"] for found in blocks):
        if name not in BLOCKS:
            raise ValueError(f"results:{name}: expected one of {', '.join(BLOCKS)}")

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}{_body(found['name'], results_dir, allow_missing)}{found[4]}"

    return BLOCK.sub(replaced, text)


def _body(name: str, results_dir: Path, allow_missing: bool) -> str:
    block = BLOCKS[name]
    path = results_dir / f"{block.source or name}.json"
    if not path.is_file():
        if allow_missing:
            return f"Not measured yet. Made with: `{block.made_with}`.\n"
        raise ValueError(f"{path}: missing; make it with: {block.made_with}; or pass --allow-missing")
    try:
        lines = block.lines(json.loads(path.read_text(encoding="utf-8")), "docs/results")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not results of `{name}`: {type(error).__name__}: {error}") from error
    if block.source is None and path.with_suffix(".png").is_file():
        lines = [*lines, "", f"![figure of these results](docs/results/{name}.png)"]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill the results of README.md from docs/results/*.json.")
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("bench.md", "evaluate.md", "inference.md"))]
    parser.add_argument("--readme", type=Path, nargs="+", default=pages, help="pages with blocks")
    parser.add_argument("--results", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 where a block is out of date"
    )
    parser.add_argument("--allow-missing", action="store_true", help="say so in the block where a JSON is missing")
    args = parser.parse_args(arguments)
    return max(_update(page, args.results, args.check, args.allow_missing) for page in args.readme)


def _update(page: Path, results_dir: Path, check: bool, allow_missing: bool) -> int:
    """Fills one page; returns the exit status."""
    try:
        before = page.read_text(encoding="utf-8")
        after = fill(before, results_dir, allow_missing)
    except (ValueError, OSError) as error:
        print(f"update_readme: {error}", file=sys.stderr)
        return 2
    if before == after:
        print(f"{page}: up to date")
        return 0
    if check:
        names = (f"{page}", f"{page}, made anew")
        difference = difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=0)
        print("\n".join(difference), file=sys.stderr)
        print(f"update_readme: {page} is out of date; run python scripts/update_readme.py", file=sys.stderr)
        return 1
    write_atomic(page, after)
    print(f"written: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
