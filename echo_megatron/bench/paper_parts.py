"""The parts of `paper_tables`: which command each is, what time it has, and how it ended."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from echo_megatron.bench.bounded import STOP_S, Ended, run_bounded

ROOT = Path(__file__).resolve().parent.parent.parent
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0"}
NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")

# The paper's rows, ours beside them, and what shows where two-shot becomes faster than one-shot.
ROWS = (
    *("nccl16", "two_collective_8", "two_collective_4", "echo8", "echo4", "echo4_unfused zero_aware bf16"),
    *("echo4_paper_critical", "nccl16_critical", "echo4_local rotated compact", "echo8_local rotated compact"),
    *("echo4_local_critical rotated compact", "echo4_one_shot", "echo4_two_shot"),
)
CPU_SIZES = ("16K", "256K")
LARGE = ("64M", "128M", "256M", "512M", "1G")
MODELS = {"cuda": ("llama3_8b", "qwen3_8b"), "cpu": ("tiny",)}
SETTINGS = ("echo4", "skipped")
PAPER_BATCH, SMALL_BATCH = 64, 16  # sequences of a prefill; at two ranks a prefill of 64 takes seconds
TESTS = (
    "tests/gpu/test_p2p_processes.py::test_ranks_hold_the_reference_s_bits",
    "tests/gpu/test_p2p_sequence_parallel_processes.py::test_ranks_hold_the_reference_s_bits",
    "tests/gpu/test_p2p_processes.py::test_exact_sums",
    "tests/gpu/test_p2p_processes.py::test_fifty_replays_of_a_graph",
    "tests/gpu/test_p2p_processes.py::test_a_killed_rank_is_named_within_the_limit",
    "tests/gpu/test_p2p_sequence_parallel_processes.py::test_calls_of_every_kind_back_to_back",
    "tests/gpu/test_p2p_processes.py::test_calls_of_mixed_shapes_back_to_back",
)
NUM_CALLS = 500  # of the tests that draw calls
WEIGHTS = {"all_reduce": 3.2, "nccl_defaults": 0.8, "tests": 2.2, "step": 4.0, "ttft": 3.4}
START_S = {"cuda": 15.0, "cpu": 5.0}  # of a part: interpreters, libraries, process groups
OVERRUN = 0.1  # of a part's time: a bench ends the measurement that it is in
SPARE_S = 12.0  # of the whole: page and figures
DONE, CUT, FAILED = "done", "cut", "failed"


@dataclass(frozen=True)
class Place:
    """Where the parts run.

    Attributes:
        device: cuda or cpu.
        gpu: its name; None on a CPU.
        key: the machine in file names: h200, cpu.
        ranks: P.
    """

    device: str
    gpu: str | None
    key: str
    ranks: int

    def name(self, what: str) -> str:
        """Of a file of results."""
        return f"{what}_{self.key}x{self.ranks}"


@dataclass
class Part:
    """One part and how it ended.

    Attributes:
        name: of `WEIGHTS`.
        status: done; cut: its time was over before it was through; failed.
        why: of cut and failed.
        seconds: that it took; `limit_s`: that it had.
        results: name of its JSON; None where it has none, or did not write it.
        left_out: what the JSON says is not in it, by name.
        tests: numbers of tests by outcome, and the names of those that did not pass.
    """

    name: str
    status: str = DONE
    why: str | None = None
    seconds: float = 0.0
    limit_s: float = 0.0
    results: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    tests: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Budget:
    """Divides the seconds of a run among parts that follow each other; what one leaves over, the later ones have.

    Args:
        total_s: seconds from now on.
        weights: of the parts, in their order.
        clock: of seconds.
    """

    def __init__(self, total_s: float, weights: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._rest, self._clock = list(weights), clock
        self._end = clock() + total_s - SPARE_S

    def next_limit(self) -> float:
        """Seconds that the next part may take, being stopped included; below 0 where none are left."""
        weight, rest = self._rest[0], sum(self._rest)
        del self._rest[0]
        return (self._end - self._clock()) * weight / rest - STOP_S


def inner_budget(limit_s: float, device: str) -> float:
    """What a bench is told, so that it ends by itself before it is stopped."""
    return max(1.0, limit_s * (1 - OVERRUN) - START_S[device])


def nccl_variables(environment: Mapping[str, str], files: Sequence[str] = NCCL_FILES) -> dict[str, str]:
    """What is set of NCCL, but for its multicast: the environment's variables, and lines of its configuration files."""
    found: dict[str, str] = {}
    for name in files:
        try:
            lines = Path(name).expanduser().read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        pairs = (line.partition("=") for line in lines if line.strip().startswith("NCCL_"))
        found |= {f"{key.strip()} ({name})": value.strip() for key, _, value in pairs}
    found |= {key: value for key, value in environment.items() if key.startswith("NCCL_")}
    return {key: value for key, value in sorted(found.items()) if not key.startswith("NCCL_NVLS_ENABLE")}


def environment_of(part: str, place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """Of a part's processes: these sources, these GPUs, NCCL without multicast."""
    found = {**environment, **MULTICAST_OFF, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if part == "nccl_defaults":
        found = {key: value for key, value in found.items() if not key.startswith("NCCL_") or key in MULTICAST_OFF}
    found["PYTHONPATH"] = sources_path(environment)
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = named.split(",") if named else [str(idx) for idx in range(place.ranks)]
    found["CUDA_VISIBLE_DEVICES"] = ",".join(devices[: place.ranks]) if place.device == "cuda" else ""
    return found


def sources_path(environment: Mapping[str, str]) -> str:
    """PYTHONPATH with these sources first: they need not be installed."""
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
    return os.pathsep.join([str(ROOT), *others])


def command_of(part: str, place: Place, options: argparse.Namespace, limit_s: float) -> list[str]:
    """The command of a part that may take `limit_s` seconds."""
    if part == "tests":
        return [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *TESTS, "--num-calls", str(NUM_CALLS)]
    on_cpu = place.device == "cpu"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(place.ranks)]
    common = ["--budget-s", f"{inner_budget(limit_s, place.device):.0f}"]
    common += ["--transport", options.transport, "--out", str(options.out), "--name", place.name(part)]
    if part in ("all_reduce", "nccl_defaults"):
        chosen = ["--rows", *(ROWS if part == "all_reduce" else ("nccl16",))]
        if on_cpu:
            chosen += ["--sizes", *CPU_SIZES, "--warmup", "1", "--iterations", "3", "--no-check", "--models"]
        elif part == "all_reduce":
            chosen += ["--models", "llama3_8b"]
        else:
            chosen += ["--sizes", *LARGE]
        return [*run, str(ROOT / "scripts" / "bench_all_reduce.py"), *chosen, *common]
    chosen = ["--models", *options.models, "--loads", *map(str, options.loads), "--settings", *SETTINGS]
    if part == "step":
        chosen += ["--no-profile", *(["--rounds", "1"] if on_cpu else [])]
        return [*run, str(ROOT / "scripts" / "bench_step.py"), *chosen, *common]
    chosen += ["--batches", str(options.ttft_batch), "--decode-batches", "--steps", "1"]
    chosen += ["--rounds", "1"] if on_cpu else []
    return [*run, str(ROOT / "scripts" / "bench_ttft.py"), *chosen, *common]


def run_part(name: str, place: Place, options: argparse.Namespace, limit_s: float) -> Part:
    """Runs a part within its limit; never raises for what the part does."""
    part = Part(name, limit_s=round(limit_s, 1))
    if name == "nccl_defaults" and not nccl_variables(os.environ):
        part.why = "nothing of NCCL's is set here: its times with its defaults are those of Table 2"
        return part
    if limit_s < START_S[place.device]:
        part.status, part.why = CUT, f"{max(limit_s, 0):.0f} s of --budget-s {options.budget_s:g} were left for it"
        return part
    path = options.out / f"{place.name(name)}.json"
    before = _written(path)
    print(f"== {name}: at most {limit_s:.0f} s", flush=True)
    command, environment = command_of(name, place, options, limit_s), environment_of(name, place, os.environ)
    ended = run_bounded(command, limit_s, environment, f"{name}: ", ROOT)
    part.seconds = round(ended.seconds, 1)
    if name == "tests":
        judge_tests(part, ended, place.device)
    else:
        judge_bench(part, ended, path if _written(path) != before else None)
    print(f"== {name}: {part.status}{f', {part.why}' if part.why else ''} ({part.seconds:.0f} s)", flush=True)
    return part


def judge_bench(part: Part, ended: Ended, path: Path | None) -> None:
    """How a bench ended; `path`: of the JSON, None where this run did not write it."""
    if path is not None:
        part.results = path.name
        part.left_out = json.loads(path.read_text(encoding="utf-8")).get("left_out", {})
    out_of_time = [name for name, why in part.left_out.items() if why.startswith("--budget-s")]
    unmeasured = [name for name, why in part.left_out.items() if not why.startswith(("--budget-s", "Unavailable"))]
    if ended.status is None:
        part.status, part.why = CUT, f"stopped after {ended.seconds:.0f} s"
    elif unmeasured or ended.status or path is None:
        words = f"failed: {', '.join(unmeasured)}" if unmeasured else ended.last_line()
        part.status, part.why = FAILED, f"exit status {ended.status}; {words}"
    elif out_of_time:
        part.status, part.why = CUT, f"its time was over before {', '.join(out_of_time)}"


def judge_tests(part: Part, ended: Ended, device: str) -> None:
    """How the tests ended, by pytest's lines; on GPUs a test that is skipped has not passed."""
    outcomes: dict[str, str] = {}
    current = ""
    for line in ended.lines:
        if match := re.match(r"(tests/\S+::\S+)", line):
            current = match[1]
        if current and (match := re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line)):
            outcomes.setdefault(current, match[1].lower())
            current = ""
    missing = [test for test in TESTS if not any(name.startswith(test) for name in outcomes)]
    counts = {what: sum(found == what for found in outcomes.values()) for what in ("passed", "failed", "skipped")}
    counts["failed"] += sum(found == "error" for found in outcomes.values())
    names = {name: found for name, found in outcomes.items() if found != "passed"}
    part.tests = {**counts, "not_run": len(missing), "others": {**names, **dict.fromkeys(missing, "not run")}}
    if counts["failed"] or (ended.status and ended.status != 5):
        part.status, part.why = FAILED, f"exit status {ended.status}; {counts['failed']} failed; {ended.last_line()}"
    elif ended.status is None:
        part.status, part.why = CUT, f"stopped after {ended.seconds:.0f} s"
    elif missing or (counts["skipped"] and device == "cuda"):
        part.status, part.why = FAILED, f"{counts['skipped']} skipped, {len(missing)} not run"


def _written(path: Path) -> float | None:
    return path.stat().st_mtime_ns if path.exists() else None
