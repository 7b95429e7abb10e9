"""Results as tables: ratios to NCCL, the paper's Table 2 beside ours, and whether neighbouring sizes take alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from echo_megatron.bench.rows import LARGE_SIZES, MIB
from echo_megatron.result_files import markdown_table, provenance_lines

Entry = Mapping[str, Any]
Key = tuple[str, str | None, str | None, str | None]

# Paper Table 2: A100 server, P = 4, ms at 64 MB to 1 GB. Its fused row is the time added to the critical path.
PAPER_MS = {
    "nccl16": ("NCCL 16-bit", (0.70, 1.27, 2.45, 4.60, 9.00)),
    "two_collective_8": ("two-collective 8-bit", (0.74, 1.26, 2.27, 4.14, 7.87)),
    "two_collective_4": ("two-collective 4-bit", (0.62, 1.00, 1.76, 3.25, 5.76)),
    "echo8": ("Echo 8-bit", (0.56, 0.91, 1.42, 2.80, 5.51)),
    "echo4": ("Echo 4-bit", (0.36, 0.62, 0.94, 1.73, 3.40)),
    "echo4_unfused": ("+ unfused compensator", (1.27, 2.33, 4.50, 8.78, 17.49)),
    "echo4_paper_critical": ("+ fused compensator", (0.44, 0.75, 1.19, 2.15, 4.30)),
}
PAPER_POLICY = "zero_aware"
MATMULS = "llama3_8b"  # of the critical rows, where one of the two is shown
CLOSE = 0.1  # sizes are close, and times alike, within this fraction


def key_of(entry: Entry) -> Key:
    """What tells series of one size each apart."""
    return entry["row"], entry.get("policy"), entry.get("state_dtype"), entry.get("matmuls")


def label_of(key: Key) -> str:
    """A series in words."""
    name, *others = key
    return " ".join([name, *(f"({', '.join(words)})" for words in [list(filter(None, others))] if words)])


def series(entries: Iterable[Entry]) -> dict[Key, dict[int, Entry]]:
    """Entries by series and size."""
    found: dict[Key, dict[int, Entry]] = {}
    for entry in entries:
        found.setdefault(key_of(entry), {})[entry["bytes"]] = entry
    return found


def rough_places(entries: Iterable[Entry]) -> list[str]:
    """Pairs of close sizes of which the smaller or larger takes more than 10 % longer, in words."""
    found = []
    for key, by_size in series(entries).items():
        sizes = sorted(by_size)
        for idx, small in enumerate(sizes):
            for large in sizes[idx + 1 :]:
                if large > small * (1 + CLOSE):
                    break
                times = by_size[small]["ms"], by_size[large]["ms"]
                if max(times) > min(times) * (1 + CLOSE):
                    found.append(f"{label_of(key)}: {small:,} B {times[0]:.4f} ms, {large:,} B {times[1]:.4f} ms")
    return found


def size_label(num_bytes: int) -> str:
    """`64 MiB`, `4 KiB`, or bytes."""
    for unit, name in ((MIB, "MiB"), (1024, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes:,} B"


def time_table(entries: Sequence[Entry], value: str = "ms") -> list[str]:
    """Times, or ratios, one line a series and one column a size; sizes beside others are left out."""
    sizes = sorted({entry["bytes"] for entry in entries if not entry.get("beside")})
    rows = []
    for key, by_size in series(entries).items():
        values = [by_size[size].get(value) if size in by_size else None for size in sizes]
        rows.append([label_of(key), *("" if number is None else _figures(number) for number in values)])
    return markdown_table([{"ms": "ms", "nccl_ratio": "NCCL / row"}.get(value, value), *map(size_label, sizes)], rows)


def overview_table(entries: Sequence[Entry], names: Sequence[str], sizes: Sequence[int]) -> list[str]:
    """Milliseconds of the rows `names`, in that order, and in brackets how many times faster than NCCL.

    Of the critical rows those of `MATMULS`.
    """
    found = series(entry for entry in entries if entry.get("matmuls") in (None, MATMULS))
    keys = sorted((key for key in found if key[0] in names), key=lambda key: (names.index(key[0]), key[1] or ""))
    rows = []
    for key in keys:
        measured = [found[key].get(size) for size in sizes]
        if any(measured):
            rows.append([label_of(key), *("" if entry is None else _with_ratio(entry) for entry in measured)])
    return markdown_table(["row", *map(size_label, sizes)], rows)


def paper_table(entries: Sequence[Entry]) -> list[str]:
    """The paper's Table 2 with ours beside: ms and, in brackets, how many times faster than NCCL of the same run."""
    ours = {key: by_size for key, by_size in series(entries).items() if key[1] in (None, PAPER_POLICY)}
    rows = []
    for name, (label, times) in PAPER_MS.items():
        nccl = PAPER_MS["nccl16"][1]
        rows.append([label, "paper", *(f"{ms:.2f} ({base / ms:.2f})" for ms, base in zip(times, nccl, strict=True))])
        for key, by_size in ours.items():
            if key[0] == name:
                measured = (by_size.get(size) for size in LARGE_SIZES)
                cells = ["" if entry is None else _with_ratio(entry) for entry in measured]
                rows.append([label, f"ours{f', {key[3]}' if key[3] else ''}", *cells])
    return markdown_table(["ms (ratio to NCCL)", "", *map(size_label, LARGE_SIZES)], rows)


def markdown(results: Mapping[str, Any]) -> str:
    """The page beside the JSON."""
    entries = results["rows"]
    lines = [
        f"# One all-reduce at P = {results['world_size']}",
        "",
        results["method"],
        "",
        "## Times",
        "",
        *time_table(entries),
        "",
        "## Ratios to NCCL",
        "",
        *time_table(entries, "nccl_ratio"),
        "",
        f"## The paper's Table 2 (A100, P = 4) and the same rows here (P = {results['world_size']})",
        "",
        *paper_table(entries),
        "",
        "## Share of the wire's and of HBM's bound",
        "",
        "The bound is the bytes that a row must move divided by what the machine carries; 1 is the bound itself.",
        "",
    ]
    if results["ceilings"]:
        carried = ", ".join(f"{name} {rate:.0f}" for name, rate in results["ceilings"].items())
        lines += [f"Measured in the same run: {carried}.", ""]
        lines += [*time_table(entries, "wire_fraction"), "", *time_table(entries, "hbm_fraction"), ""]
    lines += ["## Close sizes", ""]
    rough = results["rough_places"]
    lines += [f"- {place}" for place in rough] or ["No size within 10 % of another takes 10 % longer."]
    lines += ["", *(f"- {name}: {why}" for name, why in results["left_out"].items()), "", "## Made by", ""]
    return "\n".join([*lines, *(f"- {line}" for line in provenance(results))]) + "\n"


def provenance(results: Mapping[str, Any]) -> list[str]:
    """The Markdown of the runs that results are of: later ones with their rows; no method is told twice."""
    told: dict[str, int] = {}
    lines = []
    for idx, run in enumerate(results["runs"]):
        line = _of_run(run)
        if idx > 0:
            rows = dict.fromkeys(label_of(key_of(row)) for row in results["rows"] if row["run"] == idx)
            line = f"Run {idx + 1}, {', '.join(rows)}: {line} Their ratios are to NCCL of that run."
            if run["method"] not in told:
                line += f" Method: {run['method']}"
            elif told[run["method"]] > 0:
                line += f" Method: run {told[run['method']] + 1}'s."
        told.setdefault(run["method"], idx)
        lines.append(line)
    return lines


def _of_run(run: Mapping[str, Any]) -> str:
    return " ".join([f"{run['date']}.", *provenance_lines(run), *filter(None, [run.get("note")])])


def _with_ratio(entry: Entry) -> str:
    ratio = entry["nccl_ratio"]
    return f"{entry['ms']:.3f}" if ratio is None else f"{entry['ms']:.3f} ({ratio:.2f})"


def _figures(number: float) -> str:
    return f"{number:.4f}" if number < 1 else f"{number:.2f}"
