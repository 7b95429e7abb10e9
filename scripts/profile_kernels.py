"""What bounds a call of the p2p transport: Nsight Compute's counters of kernels that send to themselves, on one GPU.

usage: profile_kernels.py [--mib 128] [--out docs/results --name kernel_profile_h200]
       profile_kernels.py --render docs/results/kernel_profile_h200.json

Every quantizer, width and algorithm with and without the compensator's state, so that the parts can be told apart.
Needs `ncu` on PATH. HBM and the multiprocessors do what they do in a call; the wire is missing.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from echo_megatron import provenance
from echo_megatron.run_folder import write_atomic

WARP = 32
RANGE = "profiled"
# Our names, Nsight Compute's, and what one is divided by.
METRICS = {
    "ms": "gpu__time_duration.sum",
    "instructions": "smsp__inst_executed.sum",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "hbm_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "hbm_bytes": "dram__bytes.sum",
    "registers": "launch__registers_per_thread",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "stall_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "stall_barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
}
MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def profiled(mib: int) -> None:
    """The process that ncu looks at: each variant twice, then once inside the range."""
    import torch

    from echo_megatron.bench.loopback import LoopbackCall, variants

    values = torch.randn(mib << 19, device="cuda").to(torch.bfloat16)
    for variant in variants():
        call = LoopbackCall(variant, values)
        for _ in range(2):
            call()
        call.prepare()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(RANGE)
        call()
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()
        call.check()
        print(json.dumps(variant.label), flush=True)


def counters(text: str) -> list[dict[str, tuple[float, str]]]:
    """Rows of ncu's raw CSV page, in the order of the launches: our name -> number and unit.

    Raises:
        ValueError: it is not such a page.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        raise ValueError(f"ncu: expected a CSV page with titles, units and kernels, got {text[-500:]!r}")
    titles, units, *kernels = rows
    place = {title: idx for idx, title in enumerate(titles)}
    if missing := [name for name in METRICS.values() if name not in place]:
        raise ValueError(f"ncu: expected the metrics {', '.join(missing)}; this version of ncu or this GPU lacks them")
    return [
        {ours: (float(kernel[place[name]].replace(",", "")), units[place[name]]) for ours, name in METRICS.items()}
        for kernel in kernels
    ]


def row_of(label: dict[str, Any], kernel: dict[str, tuple[float, str]], num_values: int) -> dict[str, Any]:
    """One row of the results: instructions and bytes a value, the rest as ncu says it."""
    plain = {name: number for name, (number, _) in kernel.items()}
    return {
        **label,
        "ms": plain.pop("ms") * MILLISECONDS[kernel["ms"][1]],
        "instructions_a_value": plain.pop("instructions") * WARP / num_values,
        "hbm_bytes_a_value": plain.pop("hbm_bytes") * BYTES[kernel["hbm_bytes"][1]] / num_values,
        **plain,
    }


def run(mib: int) -> list[dict[str, Any]]:
    """Starts itself under ncu; the rows.

    Raises:
        RuntimeError: ncu is missing or failed.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu: expected Nsight Compute on PATH, found none; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = ["ncu", "--nvtx", "--nvtx-include", f"{RANGE}/", "-k", "regex:all_reduce", "--csv", "--page", "raw"]
        command += ["--metrics", ",".join(METRICS.values()), "--log-file", str(log)]
        command += [sys.executable, __file__, "--profiled", "--mib", str(mib)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode != 0:
            raise RuntimeError(
                f"ncu failed with exit status {done.returncode}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
            )
        labels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        kernels = counters(log.read_text(encoding="utf-8"))
    if len(labels) != len(kernels):
        raise RuntimeError(f"ncu: expected {len(labels)} kernels, got {len(kernels)}")
    return [row_of(label, kernel, mib << 19) for label, kernel in zip(labels, kernels, strict=True)]


def render(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    titles = (
        "quantizer",
        "bits",
        "algorithm",
        "state",
        "ms",
        "instructions a value",
        "issue slots",
        "HBM",
        "HBM bytes a value",
        "registers",
        "warps",
    )
    lines = [
        f"# Counters of one call, {results['machine']['gpu']}, {results['mib']} MiB, sent to itself",
        "",
        f"Made by `{results['command']}`, commit {results['commit']}. Times are ncu's, at the clock that it fixes.",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
    ]
    for row in results["rows"]:
        cells = (
            *(row["policy"], row["bits"], row["algorithm"], row["state_dtype"] or "none", f"{row['ms']:.3f}"),
            *(f"{row['instructions_a_value']:.1f}", f"{row['issue_percent']:.0f} %", f"{row['hbm_percent']:.0f} %"),
            *(f"{row['hbm_bytes_a_value']:.1f}", f"{row['registers']:.0f}", f"{row['warps_percent']:.0f} %"),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(arguments_given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="MiB of BF16 values in a call")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", default="kernel_profile")
    parser.add_argument("--render", type=Path, help="results whose table is written anew")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(arguments_given)
    if arguments.mib < 1:
        parser.error(f"--mib: expected at least 1, got {arguments.mib}")
    if arguments.profiled:
        profiled(arguments.mib)
        return 0
    if arguments.render is not None:
        results, path = json.loads(arguments.render.read_text(encoding="utf-8")), arguments.render
    else:
        import torch

        try:
            rows = run(arguments.mib)
        except (RuntimeError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        results = {
            "machine": provenance.machine(torch.device("cuda")),
            "versions": provenance.versions("echo-megatron", "torch"),
            "commit": provenance.commit(),
            "command": f"python scripts/profile_kernels.py --mib {arguments.mib} --name {arguments.name}",
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "mib": arguments.mib,
            "rows": rows,
        }
        path = arguments.out / f"{arguments.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(results, indent=1) + "\n")
    write_atomic(path.with_suffix(".md"), render(results))
    print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
