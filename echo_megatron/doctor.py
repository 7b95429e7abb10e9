"""`echo-megatron doctor`: is this machine ready for Echo, which way will calls take, and what will that gain.

Looks at what is installed and at the hardware, builds or finds the kernels, checks the collectives against the
reference on this machine's ranks, times them for about ten seconds, and says what follows. Nothing is downloaded, and
every step has a limit of time. Exit status: 0 good; 1 it works, but something is degraded; 2 something is broken, or
the command line was refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from echo_megatron.arguments import positive, positive_number
from echo_megatron.bench.rows import MIB
from echo_megatron.bench.step_models import MODELS
from echo_megatron.config import MAX_WORLD_SIZE
from echo_megatron.doctor_checks import Finding, check_machine, check_run, exit_status
from echo_megatron.doctor_facts import Facts, gather
from echo_megatron.doctor_run import SETTINGS, expectation, message_bytes, self_test
from echo_megatron.plan_tables import show

DEFAULT = MODELS["qwen3_0p6b"]
FINDINGS = ["what", "status", "found", "what to do"]
TIMES = ["collective", "message", "algorithm", "ms", "NCCL / it"]
EXPECTED = [
    "setting",
    "one all-reduce or its halves, ms",
    "NCCL / it",
    "saved a forward pass, ms",
    "training step, times faster",
]


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--hidden", type=positive, default=DEFAULT.hidden, help="default %(default)s: Qwen3-0.6B")
    parser.add_argument("--layers", type=positive, default=DEFAULT.num_layers, help="default %(default)s")
    parser.add_argument(
        "--tokens", type=positive, default=DEFAULT.batch * DEFAULT.sequence,
        help="of one forward pass: sequences x length; default %(default)s",
    )  # fmt: skip
    parser.add_argument("--ranks", type=positive, metavar="P", help="default all GPUs here, or 2")
    parser.add_argument("--step-ms", type=_seconds, help="a 16-bit training step that you measured, for the speed-up")
    parser.add_argument("--seconds", type=_seconds, default=10.0, help="of timing, about; default %(default)g")
    parser.add_argument("--no-run", action="store_true", help="leave out self-test and measurement")
    parser.add_argument("--timeout-s", type=_seconds, default=180.0, help="limit of the self-test; default %(default)g")
    parser.add_argument(
        "--build-timeout-s", type=_seconds, default=1200.0, help="limit of a build of the kernels; default %(default)g"
    )
    parser.add_argument("--json", action="store_true", help="JSON in place of tables")
    options = parser.parse_args(arguments)
    if options.ranks is not None and not 2 <= options.ranks <= MAX_WORLD_SIZE:
        parser.error(f"--ranks: expected 2 to {MAX_WORLD_SIZE}, got {options.ranks}")
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "echo-megatron doctor") -> int:
    """Entry point; returns the exit status."""
    options = parse_arguments(arguments, prog)
    _say(options, "looking at the machine; building the kernels where they are not cached takes minutes")
    facts = gather(options.timeout_s, options.build_timeout_s)
    findings = check_machine(facts)
    run: dict[str, Any] = {}
    if not options.no_run:
        _say(options, f"self-test, then about {options.seconds:g} s of timing")
        message = message_bytes(options.hidden, options.tokens)
        run = self_test(facts.num_gpus, message, options.seconds, options.timeout_s)
        findings += check_run(run, facts.num_gpus)
    report = make_report(options, facts, findings, run)
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        _show(report)
    return report["exit_status"]


def make_report(
    options: argparse.Namespace, facts: Facts, findings: list[Finding], run: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `--json`."""
    gpus = facts.torch.get("gpus", [])
    world_size = options.ranks or min(max(len(gpus), 2), MAX_WORLD_SIZE)
    try:
        expected = expectation(
            run, gpus[0]["name"] if gpus else None, options.hidden, options.layers, options.tokens, world_size,
            options.step_ms,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        expected = {"none": str(error)}
    return {
        "exit_status": exit_status(findings),
        "findings": [finding.to_json() for finding in findings],
        "versions": facts.versions,
        "run": dict(run),
        "expectation": expected,
    }


def _show(report: Mapping[str, Any]) -> None:
    show("Findings", FINDINGS, [[f[k] for k in ("what", "status", "found", "todo")] for f in report["findings"]])
    run = report["run"]
    if run and "error" not in run:
        crossover = f"messages under {run['min_bytes']:,} bytes stay at 16 bits" if run["min_bytes"] else "none"
        print(f"Transport {run['transport']}, crossover: {crossover}. Algorithm of an all-reduce: " + ", ".join(
            f"{int(size) / MIB:g} MiB {name}" for size, name in run["algorithms"].items()
        ) + ".")  # fmt: skip
        print(f"Tuning tables: {', '.join(run['tables']) or 'none are read by this transport'}.")
        show(f"Measured, P = {run['world_size']} ({run['device']})", TIMES, [
            [
                row["row"],
                f"{row['bytes'] / MIB:g} MiB",
                row["algorithm"] or "",
                f"{row['ms']:.3f}",
                f"{row['nccl_ratio']:.2f}" if row["nccl_ratio"] else "",
            ]
            for row in run["rows"]
        ])  # fmt: skip
    _show_expectation(report["expectation"])
    worst = {0: "good", 1: "works, but something is degraded", 2: "something is broken"}
    print(f"Result: {worst[report['exit_status']]} (exit status {report['exit_status']}).")


def _show_expectation(expected: Mapping[str, Any]) -> None:
    if "none" in expected:
        print(f"No speed-up to state: {expected['none']}.")
        return
    print(
        f"Expected at P = {expected['world_size']}, messages of {expected['message_bytes'] / MIB:g} MiB; "
        f"times of a call: {expected['calls_from']}; the rest of a step: {expected['step_from'] or 'not known'}."
    )
    show("Expected", EXPECTED, [_expected_row(name, expected[name]) for name in SETTINGS])


def _expected_row(name: str, gain: Mapping[str, Any]) -> list[str]:
    if "none" in gain:
        return [name, gain["none"], "", "", ""]
    step = "pass --step-ms"
    if gain["step_speedup"] is not None:
        step = f"{gain['step_speedup_low']:.3f} to {gain['step_speedup_high']:.3f}"
    return [
        name, f"{gain['calls_ms']:.3f}", f"{gain['call_speedup']:.2f}", f"{gain['saved_forward_ms']:.1f}", step,
    ]  # fmt: skip


def _say(options: argparse.Namespace, line: str) -> None:
    """To people who wait; not into what a script reads."""
    if not options.json:
        print(f"{line} …", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    return positive_number(text, below=86400)


if __name__ == "__main__":
    sys.exit(main())
