"""Compare the losses of runs: the paper's Fig. 3 and Table 7 from run folders or TensorBoard event folders."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from echo_megatron.figures import draw
from echo_megatron.loss_runs import FACTS, LossRun, check_comparable, load_run
from echo_megatron.loss_statistics import Arm, Windows, group_arms
from echo_megatron.loss_table import build_report, data_caption, header, markdown, row
from echo_megatron.run_folder import finite, write_atomic

FIGURE, MARKDOWN, JSON = "loss.png", "comparison.md", "comparison.json"


@dataclass(frozen=True)
class Comparison:
    """What `compare` wrote: the files, and the report, which is the JSON's content."""

    figure: Path
    markdown: Path
    json: Path
    report: dict[str, Any]

    def show(self, console: Console | None = None) -> None:
        """Print the table, the differences and the remarks."""
        console = console or Console()
        # One line a quantity, one column an arm: arms are few, quantities many, and a terminal may have 80 columns.
        table = Table(title=self.report["title"], caption=self.report["caption"])
        cells = zip(header(self.report), *map(row, self.report["arms"]), strict=True)
        for place, heading in enumerate(next(cells)):
            table.add_column(heading, justify="right" if place else "left", overflow="fold")
        for line in cells:
            table.add_row(*line)
        console.print(table)
        for line in (*(entry["sentence"] for entry in self.report["differences"]), *self.report["remarks"]):
            console.print(line, markup=False, highlight=False)
        console.print(f"{self.figure}\n{self.markdown}\n{self.json}", markup=False, highlight=False)


def compare(
    paths: Sequence[str | Path],
    out_dir: str | Path,
    *,
    baseline: str | None = None,
    allow_different: Sequence[str] = (),
    allow_unverified: bool = False,
    tail_panel: int = 1500,
    title: str | None = None,
) -> Comparison:
    """Compare runs and write `loss.png`, `comparison.md` and `comparison.json` to `out_dir`.

    Args:
        paths: run folders, or folders of TensorBoard event files of Megatron-LM or NeMo; two or more.
        out_dir: made when missing.
        baseline: label, tp_comm or name of a run; the first run's arm when None.
        allow_different: entries of `FACTS` that may differ.
        allow_unverified: compare runs that do not record an entry of `FACTS`.
        tail_panel: the most steps that the tail panel shows.
        title: of figure and table; model, data and tensor-parallel size when None.

    Raises:
        ComparisonRefused: the runs differ in more than their communication.
        FileNotFoundError, ValueError: a run cannot be read, or there is no such baseline.
    """
    if len(paths) < 2:
        raise ValueError(f"expected two runs or more, got {len(paths)}")
    if tail_panel < 2:
        raise ValueError(f"tail panel: expected two steps or more, got {tail_panel}")
    runs = [load_run(path) for path in paths]
    _name_apart(runs)
    arms = group_arms(runs)
    remarks = check_comparable(runs, tuple(allow_different), allow_unverified, _seeds_are_paired(arms))
    chosen = _find_baseline(arms, baseline)
    windows = Windows.of(min(run.last_step for run in runs), tail_panel)
    report = build_report(arms, chosen, windows, title, remarks)
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    result = Comparison(out_dir / FIGURE, out_dir / MARKDOWN, out_dir / JSON, report)
    draw(result.figure, arms, chosen, windows, report["title"], data_caption(runs[0]))
    write_atomic(result.markdown, markdown(report, FIGURE))
    write_atomic(result.json, json.dumps(finite(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `echo-megatron compare`."""
    facts = ", ".join(FACTS)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or folder of TensorBoard events")
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder for the results (%(default)s)")
    parser.add_argument("--baseline", help="label, tp_comm or name of the run to compare with (default: the first)")
    parser.add_argument(
        "--allow-different", default="", metavar="FACT,…", help=f"compare although these differ: some of {facts}"
    )
    parser.add_argument(
        "--allow-unverified",
        action="store_true",
        help="compare runs that do not record all that has to agree",
    )
    parser.add_argument("--tail-panel", type=int, default=1500, help="most steps of the tail panel (%(default)s)")
    parser.add_argument("--title", help="of figure and table (default: model, data, tensor-parallel size)")


def run(arguments: argparse.Namespace) -> int:
    """Compare as the parsed options say; 0, or 2 with a message where the runs or the options are wrong."""
    try:
        result = compare(
            arguments.runs,
            arguments.out,
            baseline=arguments.baseline,
            allow_different=[name for name in arguments.allow_different.split(",") if name],
            allow_unverified=arguments.allow_unverified,
            tail_panel=arguments.tail_panel,
            title=arguments.title,
        )
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    result.show()
    return 0


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """`echo-megatron compare` and `scripts/compare_loss.py`; `prog` is the name in the usage text."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _name_apart(runs: list[LossRun]) -> None:
    """Call runs of equal names by where their paths differ: `a` and `b` for `a/tensorboard` and `b/tensorboard`."""
    paths = [run.path.resolve() for run in runs]
    if repeated := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"expected different runs, got {repeated[0]} twice")
    names = [run.name for run in runs]
    for name in {name for name in names if names.count(name) > 1}:
        places = [place for place, found in enumerate(names) if found == name]
        same = [paths[place].parts for place in places]
        first, last = _common_length(same), _common_length([parts[::-1] for parts in same])
        for place, parts in zip(places, same, strict=True):
            runs[place].name = "/".join(parts[first : len(parts) - last]) or str(runs[place].path)


def _common_length(sequences: list[tuple[str, ...]]) -> int:
    """How many entries all of them begin with."""
    return next((place for place, column in enumerate(zip(*sequences, strict=False)) if len(set(column)) > 1), 0)


def _seeds_are_paired(arms: list[Arm]) -> bool:
    """Whether every arm has the same seeds: then runs are compared seed by seed."""
    return len({tuple(arm.seeds) for arm in arms}) == 1


def _find_baseline(arms: list[Arm], name: str | None) -> Arm:
    if name is None:
        return arms[0]
    named = [arm for arm in arms if arm.label == name]
    named = named or [arm for arm in arms if any(name in (run.name, run.tp_comm) for run in arm.runs)]
    if len(named) != 1:
        raise ValueError(f"baseline: expected one of {', '.join(arm.label for arm in arms)}, got {name!r}")
    return named[0]
