"""What the kernels were meant to reach at two ranks, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.bench.rows import LARGE_SIZES, MIB, SMALL_SIZES
from echo_megatron.bench.tables import Entry, Key, label_of, series, size_label
from echo_megatron.result_files import markdown_table

# Rows, and ratios to NCCL of the same run at LARGE_SIZES; for both quantizers.
CRITICAL = ("echo4_local_critical", "echo4_consensus_critical")
TARGETS: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "4-bit, no compensation": (("echo4",), (3.0, 3.2, 3.2, 3.3, 3.3)),
    "4-bit, local residual, the whole call": (("echo4_local",), (2.6, 2.8, 2.8, 2.9, 2.9)),
    "4-bit, compensated, added to the critical path": (CRITICAL, (2.4, 2.6, 2.6, 2.6, 2.6)),
    "8-bit, local residual, the whole call": (("echo8_local",), (1.6, 1.8, 1.8, 1.9, 1.9)),
}
SMALL_MS = 0.018  # below 1 MiB, or what symm_mem takes where that is a tenth less
A_TENTH_LESS = 0.9
BOUNDED = ("echo4", "echo4_local", "echo8_local", "echo4_consensus")


def large_table(entries: Sequence[Entry]) -> list[str]:
    """Times faster than NCCL: a line of targets, then a line of each series that they are for; bold is reached."""
    found = series(entries)
    rows = []
    for words, (names, targets) in TARGETS.items():
        rows.append([f"{words}: target", *(f"{target:.1f}" for target in targets)])
        measured = {key[0] for key in found}
        rows += [[f"{name}: not measured", *("" for _ in targets)] for name in names if name not in measured]
        for key, by_size in found.items():
            if key[0] in names:
                cells = [_reached(by_size.get(size), target) for size, target in zip(LARGE_SIZES, targets, strict=True)]
                rows.append([label_of(key), *cells])
    return markdown_table(["NCCL / row", *map(size_label, LARGE_SIZES)], rows)


def small_table(entries: Sequence[Entry]) -> list[str]:
    """Microseconds of `auto` beside NCCL and the faster of symm_mem's; bold is within the target."""
    found = series(entries)
    symm_mem = {size: min(of) for size in SMALL_SIZES if (of := _times(found, size, "symm_mem"))}
    sizes = [size for size in SMALL_SIZES if any(size in by_size for by_size in found.values())]
    limits = {size: _limit(symm_mem.get(size)) for size in sizes if size < MIB}
    rows = [
        ["target", *(f"{1e3 * limits[size]:.1f}" if size in limits else "" for size in sizes)],
        ["NCCL", *(_microseconds(_times(found, size, "nccl16")) for size in sizes)],
        ["symm_mem, the faster", *(_microseconds([symm_mem[size]] if size in symm_mem else []) for size in sizes)],
    ]
    for key, by_size in found.items():
        if key[0] == "auto":
            times = [(by_size[size]["ms"], limits.get(size)) if size in by_size else None for size in sizes]
            rows.append([label_of(key), *("" if pair is None else _within(*pair) for pair in times)])
    return markdown_table(["µs", *map(size_label, sizes)], rows)


def bounds_table(entries: Sequence[Entry], size: int = LARGE_SIZES[-1]) -> list[str]:
    """Measured milliseconds at one size, and the least that wire and HBM allow."""
    rows = []
    for key, by_size in series(entries).items():
        entry = by_size.get(size)
        if key[0] in BOUNDED and entry is not None:
            bounds = (entry[name] for name in ("wire_fraction", "hbm_fraction"))
            rows.append(
                [
                    label_of(key),
                    f"{entry['ms']:.2f}",
                    *("" if share is None else f"{entry['ms'] * share:.2f} ({share:.0%})" for share in bounds),
                ]
            )
    return markdown_table([f"ms at {size_label(size)}", "measured", "least by the wire", "least by HBM"], rows)


def slower_than_nccl(entries: Sequence[Entry]) -> str:
    """Where `auto`, below 64 MiB, or a compensated call of the default form, from there on, takes longer than NCCL."""
    slow = [
        f"{label_of(key)} at {size_label(entry['bytes'])} ({entry['nccl_ratio']:.2f})"
        for key, by_size in series(entries).items()
        if key[0] in ("auto", "echo4_local", "echo8_local")
        for entry in by_size.values()
        if (key[0] == "auto" or entry["bytes"] >= LARGE_SIZES[0]) and (entry["nccl_ratio"] or 1) < 1
    ]
    return "Slower than NCCL: " + (", ".join(slow) or "at no size") + "."


def lines(results: Mapping[str, Any]) -> list[str]:
    """The tables, as Markdown."""
    entries = results["rows"]
    rough = results["rough_places"]
    return [
        "Times faster than NCCL; bold is reached.",
        "",
        *large_table(entries),
        "",
        f"Small messages as a site calls them (`auto`). The target, below 1 MiB: {1e3 * SMALL_MS:g} µs, or what "
        "PyTorch's symmetric-memory kernels take where that is over a tenth less; bold is within it. "
        + slower_than_nccl(entries),
        "",
        *small_table(entries),
        "",
        "Sizes within 10 % of each other that differ by over 10 % in time (the target: none):",
        "",
        *([f"- {place}" for place in rough] or ["- none"]),
        "",
        "What wire and HBM allow, by the bytes that a call cannot avoid, and in brackets the share that is reached:",
        "",
        *bounds_table(entries),
    ]


def _times(found: Mapping[Key, Mapping[int, Entry]], size: int, prefix: str) -> list[float]:
    return [
        by_size[size]["ms"]
        for key, by_size in found.items()
        if key[0].startswith(prefix) and not key[3] and size in by_size
    ]


def _limit(symm_mem_ms: float | None) -> float:
    return symm_mem_ms if symm_mem_ms is not None and symm_mem_ms < A_TENTH_LESS * SMALL_MS else SMALL_MS


def _reached(entry: Entry | None, target: float) -> str:
    if entry is None or entry["nccl_ratio"] is None:
        return ""
    return _bold(f"{entry['nccl_ratio']:.2f}", entry["nccl_ratio"] >= target)


def _within(ms: float, limit: float | None) -> str:
    return _bold(f"{1e3 * ms:.1f}", limit is not None and ms <= limit)


def _microseconds(times: Sequence[float]) -> str:
    return f"{1e3 * min(times):.1f}" if times else ""


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text
