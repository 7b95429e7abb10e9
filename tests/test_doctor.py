"""`echo-megatron doctor`: every kind of finding from faked answers, one real run on the CPU, and nothing that hangs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_megatron import cli, doctor, doctor_checks, doctor_facts, doctor_probe, doctor_ranks
from echo_megatron.doctor_checks import Finding, Status, check_machine, check_run, exit_status
from echo_megatron.doctor_facts import Facts, ask, environment_versions, parse_links
from echo_megatron.doctor_run import SEQUENCE_PARALLEL, _cause, expectation
from echo_megatron.plan_tables import show

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150_000_000_000}
VERSIONS = {
    "python": "3.12.3",
    "torch": "2.11.0",
    "megatron-core": "0.19.2",
    "transformer-engine": "2.20.2",
    "nemo-toolkit": "not installed",
    "megatron-bridge": "not installed",
    "echo-megatron": "0.1.0",
}
CUDA = {"cuda": "13.0", "gpus": [H200, H200], "peers": [[True, True], [True, True]], "nccl": "2.28.9"}
TWO_H200 = Facts(
    versions=VERSIONS,
    torch=CUDA,
    driver="580.65.06",
    used_mib=[4, 4],
    links=["NV18"],
    nvcc={"path": "/usr/local/cuda/bin/nvcc", "version": "13.0"},
    kernels={"library": "/cache/kernels.so", "named": ""},
    cache={"folder": "/cache", "writable": True},
)
CPU = Facts(
    versions=VERSIONS,
    torch={"cuda": None, "gpus": [], "peers": [], "nccl": None},
    smi_error="no nvidia-smi on PATH",
    nvcc={"error": "nvcc: none"},
    kernels={"skipped": "no GPU"},
    cache={"folder": "/cache", "writable": True},
)


def row(name: str, size: int, ms: float, ratio: float) -> dict[str, Any]:
    return {"row": name, "bytes": size, "ms": ms, "nccl_ratio": ratio, "algorithm": None}


RUN = {
    "device": "cuda",
    "world_size": 2,
    "transport": "p2p",
    "describe": "echo: p2p transport",
    "min_bytes": 2 << 20,
    "algorithms": {"134217728": "one_shot"},
    "tables": ["h200.json", "default.json"],
    "symmetric": True,
    "ceilings": None,
    "left_out": {},
    "rows": [
        row("nccl16", 128 << 20, 0.46, 1.0),
        row("echo4_local", 128 << 20, 0.21, 2.2),
        row("echo8_local", 128 << 20, 0.23, 2.0),
        row("nccl_reduce_scatter", 128 << 20, 0.31, 1.0),
        row("nccl_all_gather", 128 << 20, 0.29, 1.0),
        row("echo4_reduce_scatter", 128 << 20, 0.08, 3.8),
        row("echo8_all_gather", 128 << 20, 0.12, 2.5),
    ],
}


def found(findings: list[Finding], what: str) -> Finding:
    (one,) = [finding for finding in findings if finding.what == what]
    return one


def changed(facts: Facts, **torch: Any) -> Facts:
    return replace(facts, torch={**facts.torch, **torch})


def test_a_good_machine_has_status_0() -> None:
    findings = check_machine(TWO_H200) + check_run(RUN, 2)
    assert exit_status(findings) == 0, [finding for finding in findings if finding.status > 0]
    assert found(findings, "links").found == "NVLink (NV18)"
    assert found(findings, "tuning table").status is Status.good
    assert found(findings, "transport").found == RUN["describe"]


def versions(**others: str) -> Facts:
    return replace(TWO_H200, versions={**VERSIONS, **{name.replace("_", "-"): text for name, text in others.items()}})


OLD = {**H200, "name": "Tesla V100", "capability": [7, 0]}
CASES: list[tuple[str, Facts, str, Status, str, str]] = [
    ("old Python", versions(python="3.11.9"), "Python", Status.broken, "3.11.9", "3.12"),
    ("torch", versions(torch="2.9.1"), "PyTorch", Status.degraded, "2.9.1", "2.11"),
    ("no core", versions(megatron_core="not installed"), "megatron-core", Status.broken, "not installed",
     "pip install"),
    ("old core", versions(megatron_core="0.12.0"), "megatron-core", Status.degraded, "0.12.0", "0.15.3"),
    ("no TE", versions(transformer_engine="not installed"), "Transformer Engine", Status.note, "not installed",
     "faster"),
    ("hung driver", replace(TWO_H200, driver=None, smi_error="no answer within 20 s"), "driver", Status.broken,
     "no answer", "dmesg"),
    ("hung CUDA", replace(TWO_H200, torch={"error": "no answer within 180 s"}), "GPUs", Status.broken, "no answer",
     "nvidia-smi"),
    ("hidden GPUs", changed(TWO_H200, gpus=[], peers=[]), "GPUs", Status.broken, "PyTorch sees none",
     "CUDA_VISIBLE_DEVICES"),
    ("no GPU", CPU, "GPUs", Status.degraded, "none", "2 to 8 GPUs"),
    ("one GPU", changed(TWO_H200, gpus=[H200], peers=[[True]]), "GPUs", Status.degraded, "1 × NVIDIA H200", "2 to 8"),
    ("old GPU", changed(TWO_H200, gpus=[OLD, OLD]), "GPUs", Status.degraded, "below 8.0", "Ampere"),
    ("two kinds", changed(TWO_H200, gpus=[H200, {**H200, "name": "NVIDIA H100"}]), "GPUs", Status.degraded,
     "NVIDIA H100 and NVIDIA H200", "one kind"),
    ("busy", replace(TWO_H200, used_mib=[4, 90_000]), "other work", Status.degraded, "GPU 1 90000 MiB", "busy"),
    ("PCIe", replace(TWO_H200, links=["SYS"]), "links", Status.degraded, "SYS", "nvidia-smi topo -m"),
    ("no topology", replace(TWO_H200, links=[]), "links", Status.note, "not known", ""),
    ("no peers", changed(TWO_H200, peers=[[True, False], [True, True]]), "peer access", Status.degraded, "GPU 0 to 1",
     "topo -p2p"),
    ("no NCCL", changed(TWO_H200, nccl=None), "NCCL", Status.broken, "none", "CUDA build"),
    ("no nvcc", replace(TWO_H200, nvcc={"error": "none"}), "nvcc", Status.note, "none", "ECHO_KERNEL_LIBRARY"),
    ("other nvcc", replace(TWO_H200, nvcc={"path": "/n", "version": "12.4"}), "nvcc", Status.note, "12.4", "13.x"),
    ("no kernels", replace(TWO_H200, kernels={"error": "KernelBuildError: nvcc failed"}), "kernels", Status.degraded,
     "nvcc failed", "Building the kernels"),
    ("no cache", replace(TWO_H200, kernels={"error": "PermissionError"}, cache={"folder": "/c", "writable": False}),
     "kernels", Status.degraded, "PermissionError", "ECHO_KERNEL_CACHE"),
    ("unknown GPU", changed(TWO_H200, gpus=[{**H200, "name": "NVIDIA X9"}] * 2), "tuning table", Status.degraded,
     "NVIDIA X9", "bench --tune"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "what", "status", "says", "todo"), [case[1:] for case in CASES],
                         ids=[case[0] for case in CASES])  # fmt: skip
def test_findings_about_the_machine(facts: Facts, what: str, status: Status, says: str, todo: str) -> None:
    findings = check_machine(facts)
    finding = found(findings, what)
    assert finding.status is status
    assert says in finding.found
    assert todo in finding.todo
    assert exit_status(findings) == max(status.value, 0)


def left_out(why: str) -> dict[str, Any]:
    return {**RUN, "left_out": {"echo8_local rotated": why}}


COLLECTIVE = {"transport": "collective", "describe": "collective (p2p is not possible: x)"}
RUN_CASES: list[tuple[Mapping[str, Any], str, Status, str]] = [
    ({"error": "2 processes did not end within 180 s and were stopped"}, "self-test", Status.broken, "did not end"),
    (left_out("AssertionError: expected the reference's bits"), "self-test", Status.broken, "reference's bits"),
    (left_out("RuntimeError: NCCL error"), "self-test", Status.broken, "NCCL error"),
    (left_out("--budget-s 10: from 1 bytes on"), "self-test", Status.good, "2 ranks"),
    ({**RUN, **COLLECTIVE}, "transport", Status.degraded, "p2p is not possible"),
    ({**RUN, "symmetric": False}, "symmetric memory", Status.degraded, "not to be had"),
    ({**RUN, "rows": [row("echo4_local", 128 << 20, 0.9, 0.5)]}, "measurement", Status.degraded, "0.50"),
    ({**RUN, "rows": []}, "measurement", Status.degraded, "no size"),
]


@pytest.mark.parametrize(("run", "what", "status", "says"), RUN_CASES)
def test_findings_about_the_self_test(run: Mapping[str, Any], what: str, status: Status, says: str) -> None:
    findings = check_run(run, 2)
    finding = found(findings, what)
    assert (finding.status, says in finding.found) == (status, True), finding
    assert exit_status(findings) == status.value
    assert finding.todo or status is Status.good


def test_links_are_read_from_the_topology() -> None:
    topology = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tSYS\t0-31\nGPU1\tNV18\t X \tPIX\t0-31\nGPU2\tSYS\tPIX\t X \t0-31\n\nLegend:\n  X = Self\n"
    )
    assert parse_links(topology) == ["NV18", "SYS", "PIX"]
    assert parse_links("") == []


def test_a_process_that_hangs_is_stopped_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {pid}; wait"
    start = time.monotonic()
    answer = ask(["sh", "-c", script], 0.5)
    assert answer.status is None
    assert time.monotonic() - start < 10
    deadline = time.monotonic() + 5
    while _is_running(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    monkeypatch.setattr(doctor_facts, "STOP_LIMIT_S", 0.2)
    assert ask(["sh", "-c", "trap '' TERM; while true; do sleep 0.1; done"], 0.3).status is None  # SIGKILL follows
    assert ask(["/no/such/program"], 1).status == 127
    failed = ask([sys.executable, "-c", "import sys; print('first', file=sys.stderr); sys.exit('last words')"], 20)
    assert (failed.status, failed.last_line()) == (1, "last words")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_cause_of_a_failed_self_test_is_a_rank_s_error() -> None:
    errors = (
        "W1 torchrun warns\n[rank1]: Traceback (most recent call last):\n"
        "[rank1]: torch.distributed.DistBackendError: NCCL error in x\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    assert _cause(errors) == "torch.distributed.DistBackendError: NCCL error in x"
    assert _cause("a\nlast\n") == "last"
    assert _cause("") == "no message"


def test_probes_report_what_went_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(status: int | None, output: str = "", errors: str = "") -> None:
        monkeypatch.setattr(doctor_facts, "ask", lambda *_: doctor_facts.Answer(status, output, errors))

    answer(None)
    assert doctor_facts.probe("cuda", 3)["error"] == "no answer within 3 s"
    answer(1, errors="Traceback\nRuntimeError: CUDA driver too old\n")
    assert doctor_facts.probe("cuda", 3)["error"] == "RuntimeError: CUDA driver too old"
    answer(0, output="chatter\n")
    assert "unreadable answer" in doctor_facts.probe("cuda", 3)["error"]
    answer(0, output='chatter\n{"cuda": null}\n')
    assert doctor_facts.probe("cuda", 3) == {"cuda": None}

    def fail() -> dict[str, Any]:
        raise RuntimeError("no\nGPU")

    monkeypatch.setattr(doctor_probe, "cuda_facts", fail)
    assert doctor_probe.main(["cuda"]) == 1
    assert capsys.readouterr().err == "RuntimeError: no GPU\n"


def test_nvidia_smi_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\nif [ "$1" = topo ]; then printf "\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X\\n";'
        ' else echo "580.65.06, 12"; echo "580.65.06, 7000"; fi\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(doctor_facts, "probe", lambda question, _: CUDA if question == "cuda" else {"library": "x"})
    facts = doctor_facts.gather(10, 10)
    assert (facts.driver, facts.used_mib, facts.links) == ("580.65.06", [12, 7000], ["NV18"])
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n")
    facts = doctor_facts.gather(10, 10)
    assert facts.driver is None
    assert found(check_machine(facts), "driver").status is Status.broken


def test_versions_of_an_environment_are_read_from_its_files(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("nemo_toolkit-2.7.3", "megatron_core-0.15.3", "torch-2.11.0", "torchvision-0.26.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert environment_versions(tmp_path) == {"torch": "2.11.0", "megatron-core": "0.15.3", "nemo-toolkit": "2.7.3"}
    assert environment_versions(tmp_path / "none") == {}


def test_expectations_are_measured_ones_where_p_was_measured() -> None:
    asked = ("NVIDIA H200", 1024, 28, 65536)
    here = expectation(RUN, *asked, 2, None)
    assert here["calls_from"] == "measured here"
    assert [here[name]["calls_ms"] for name in ("echo4", "echo8")] == [0.21, 0.23]
    assert here["echo4"]["nccl_calls_ms"] == 0.46
    assert 0 < here["echo4"]["saved_forward_ms"] < 56 * 0.25  # part of it is paid back as a lower clock
    assert here["echo4"]["step_speedup_low"] < here["echo4"]["step_speedup"] < here["echo4"]["step_speedup_high"]
    assert 1 < here["echo8"]["step_speedup"] < here["echo4"]["step_speedup"] < 1.3
    large = {**RUN, "rows": [{**row, "bytes": 2 * row["bytes"]} for row in RUN["rows"]]}
    beyond = expectation(large, "NVIDIA H200", 1024, 28, 4 * 65536, 2, None)  # twice the largest that is timed
    assert beyond["echo4"]["nccl_calls_ms"] == pytest.approx(2 * 0.46)
    assert "no time of NCCL" in expectation(RUN, "NVIDIA H200", 1024, 28, 4 * 65536, 2, None)["none"]
    assert expectation(RUN, *asked, 2, 460.0)["step_from"] == "--step-ms"
    with pytest.raises(ValueError, match="--step-ms: expected more than"):
        expectation(RUN, *asked, 2, 3.0)
    more = expectation(RUN, *asked, 8, None)
    assert more["calls_from"].startswith("plan for NVIDIA H200")
    assert more["echo4"]["step_speedup"] > here["echo4"]["step_speedup"]
    slow_wire = {**RUN, "ceilings": {"wire_gb_per_s": 100.0, "hbm_gb_per_s": None}}
    slow = expectation(slow_wire, *asked, 8, None)
    assert slow["echo4"]["nccl_calls_ms"] > 3 * more["echo4"]["nccl_calls_ms"]
    assert "nothing was measured" in expectation({}, "NVIDIA X9", 1024, 28, 65536, 2, None)["none"]
    unknown = expectation(RUN, "NVIDIA X9", 1024, 28, 65536, 2, None)
    assert unknown["echo4"]["step_speedup"] is None


def test_sequence_parallelism_is_expected_from_the_same_measurement() -> None:
    asked = ("NVIDIA H200", 1024, 28, 65536)
    here = expectation(RUN, *asked, 2, None)
    shares = here[SEQUENCE_PARALLEL]
    assert (shares["calls_ms"], shares["nccl_calls_ms"]) == (pytest.approx(0.2), pytest.approx(0.6))
    assert 1 < shares["step_speedup_low"] < shares["step_speedup_high"]
    rows = [row for row in RUN["rows"] if row["row"] != "echo8_all_gather"]
    without = expectation({**RUN, "rows": rows}, *asked, 2, None)
    assert "--seconds" in without[SEQUENCE_PARALLEL]["none"] and without["echo4"] == here["echo4"]
    more = expectation(RUN, *asked, 4, None)  # by the plan
    assert more[SEQUENCE_PARALLEL]["call_speedup"] > 1
    short = expectation({**RUN, "min_bytes": 1 << 30}, *asked, 2, None)
    assert short[SEQUENCE_PARALLEL]["call_speedup"] == short["echo4"]["call_speedup"] == 1


def test_the_benches_share_the_seconds() -> None:
    options = argparse.Namespace(seconds=10.0, sizes=[1 << 20], transport="auto")
    device = torch.device("cuda")
    asked = [doctor_ranks._bench_options(options, kind, device) for kind in doctor_ranks.ROWS]
    assert sum(one.budget_s for one in asked) == 10.0


def test_notes_alone_are_good() -> None:
    note = Finding("NeMo", Status.note, "not installed")
    assert exit_status([note]) == exit_status([]) == 0
    assert exit_status([note, Finding("GPUs", Status.degraded, "none")]) == 1


def test_without_a_checkout_nothing_of_one_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    def todos() -> str:
        facts = [case[1] for case in CASES]
        runs = [case[0] for case in RUN_CASES]
        findings = [one for fact in facts for one in check_machine(fact)]
        findings += [one for run in runs for one in check_run(run, 2)]
        return "\n".join(f"{one.found}\n{one.todo}" for one in findings)

    assert "docs/troubleshooting.md, Building the kernels" in todos() and "make nemo-env" in todos()
    monkeypatch.setattr(doctor_checks, "IN_CHECKOUT", False)
    assert not re.search(r"docs/|`make |checkout", todos())
    with monkeypatch.context() as patched:
        patched.setattr(doctor_facts, "probe", lambda *_: CPU.torch)
        assert "`make " not in doctor_facts.gather(1, 1).kernels["skipped"]


@pytest.mark.parametrize(("run", "status"), [(RUN, 0), ({**RUN, "symmetric": False}, 1), ({"error": "it hung"}, 2)])
def test_exit_status_and_json(
    run: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda *_: TWO_H200)
    monkeypatch.setattr(doctor, "self_test", lambda *_: run)
    assert cli.main(["doctor", "--json"]) == status
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert printed.err == ""
    assert report["exit_status"] == status
    assert all(set(finding) == {"what", "status", "found", "todo"} for finding in report["findings"])
    assert cli.main(["doctor"]) == status
    text = capsys.readouterr().out
    assert f"(exit status {status})" in text
    assert "\x1b" not in text
    assert ("crossover: messages under 2,097,152 bytes" in text) is ("error" not in run)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--ranks", "1"])
    assert ended.value.code == 2


def test_a_real_run_on_the_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    status = cli.main(["doctor", "--json", "--seconds", "0.1", "--timeout-s", "250"])
    report = json.loads(capsys.readouterr().out)
    findings = {finding["what"]: finding for finding in report["findings"]}
    assert findings["self-test"]["status"] == "good", findings["self-test"]
    assert "2 ranks on the CPU" in findings["self-test"]["found"]
    assert report["run"]["transport"] == "collective"
    assert report["run"]["min_bytes"] == 16384
    assert report["exit_status"] == status
    assert findings["GPUs"]["status"] in ("degraded", "broken")  # broken where a driver's GPUs were hidden above
    assert "none" in report["expectation"]


def test_tables_on_a_terminal_keep_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "150")
    show("Findings", ["found"], [["[rank0] failed: [Errno 2]"]])
    assert "[rank0] failed: [Errno 2]" in capsys.readouterr().out
