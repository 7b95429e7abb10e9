"""What this machine has, as `echo-megatron doctor` finds it: every question asked in another process, with a limit.

A broken driver can hang the process that initializes CUDA, so that is never the doctor's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_megatron import provenance
from echo_megatron.kernel_cache import cache_folder
from echo_megatron.kernel_tools import KernelsUnavailable, find_nvcc

PACKAGES = ("torch", "megatron-core", "transformer-engine", "nemo-toolkit", "megatron-bridge", "echo-megatron")
SMI_LIMIT_S = 20.0
STOP_LIMIT_S = 5.0
NOT_FOUND = "no nvidia-smi"
ROOT = Path(__file__).resolve().parent.parent
IN_CHECKOUT = (ROOT / "docs" / "troubleshooting.md").is_file()  # otherwise the package was installed from a wheel
NEMO_ENVIRONMENT = ROOT / ".venv-nemo"


@dataclass
class Facts:
    """The answers.

    Attributes:
        versions: of Python and `PACKAGES`; `not installed` where one is missing.
        torch: what PyTorch says of CUDA (`doctor_probe.cuda_facts`), or `error`.
        driver: of the NVIDIA driver; None where nvidia-smi is missing or fails.
        smi_error: why nvidia-smi gave nothing.
        used_mib: memory in use of every GPU, by nvidia-smi.
        links: kind of link between GPUs by nvidia-smi's topology, `NV18`, `PIX`, …; empty where it is not known.
        nvcc: path and version, or `error`.
        kernels: where the kernels' library is, `error`, or `skipped`: why it was not asked for.
        nemo_environment: versions in `.venv-nemo` of this checkout; empty where there is none.
        cache: the kernels' folder, and whether it can be written.
    """

    versions: dict[str, str]
    torch: dict[str, Any]
    driver: str | None = None
    smi_error: str | None = None
    used_mib: list[int] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    nvcc: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    nemo_environment: dict[str, str] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """That PyTorch can use."""
        return len(self.torch.get("gpus", ()))


@dataclass(frozen=True)
class Answer:
    """How another process ended.

    Attributes:
        status: its exit status; None where it did not end in time and was stopped.
        output: standard output.
        errors: standard error.
    """

    status: int | None
    output: str
    errors: str

    def last_line(self) -> str:
        """The last line that says something, of what it complained about or else of its output."""
        lines = [line for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1].strip() if lines else "no message"


def ask(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Runs a command; it and all that it started are stopped after `limit_s` seconds."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
                env=None if environment is None else {**os.environ, **environment},
            )  # fmt: skip
        except OSError as error:
            return Answer(127, "", f"{command[0]}: {error}")
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _stop(process)
        except BaseException:
            _stop(process)
            raise
        output.seek(0)
        errors.seek(0)
        return Answer(status, output.read(), errors.read())


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its children; one that the driver holds is left behind rather than waited for.

    torchrun ends its ranks, which are sessions of their own, where it is asked to by SIGTERM.
    """
    for kind in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, kind)
        try:
            process.wait(STOP_LIMIT_S)
            return
        except subprocess.TimeoutExpired:
            continue


def gather(limit_s: float, build_limit_s: float) -> Facts:
    """Asks everything.

    Args:
        limit_s: seconds for what PyTorch says of CUDA.
        build_limit_s: seconds for building the kernels where no library is cached.
    """
    facts = Facts(provenance.versions(*PACKAGES), probe("cuda", limit_s), nvcc=find_compiler())
    _ask_smi(facts)
    if facts.num_gpus:
        facts.kernels = probe("kernels", build_limit_s)
    else:
        build = "`python -m echo_megatron.kernel_build --arch 90 --out FILE`"
        facts.kernels = {"skipped": f"no GPU to build them for; {build} builds a library for another machine"}
    facts.nemo_environment = environment_versions(NEMO_ENVIRONMENT)
    folder = cache_folder()
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    facts.cache = {"folder": str(folder), "writable": os.access(nearest, os.W_OK)}
    return facts


def probe(question: str, limit_s: float) -> dict[str, Any]:
    """The answer of `doctor_probe` to a question, or `{"error": …}`."""
    answer = ask([sys.executable, "-m", "echo_megatron.doctor_probe", question], limit_s)
    if answer.status is None:
        return {"error": f"no answer within {limit_s:g} s"}
    if answer.status:
        return {"error": answer.last_line()}
    try:
        found: dict[str, Any] = json.loads(answer.output.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"unreadable answer: {answer.last_line()}"}
    return found


def find_compiler() -> dict[str, str]:
    """nvcc's path and version, or why there is none."""
    try:
        nvcc = find_nvcc()
    except KernelsUnavailable as error:
        return {"error": str(error)}
    answer = ask([str(nvcc), "--version"], SMI_LIMIT_S)
    found = re.search(r"release (\d+\.\d+)", answer.output)
    if answer.status or not found:
        return {"error": f"{nvcc}: {answer.last_line()}"}
    return {"path": str(nvcc), "version": found[1]}


def environment_versions(folder: Path) -> dict[str, str]:
    """Versions of `PACKAGES` installed in a virtual environment, read from its files; empty where it has none."""
    found = {}
    for package in PACKAGES:
        name = package.replace("-", "_")
        for path in folder.glob(f"lib/python*/site-packages/{name}-*.dist-info"):
            found[package] = path.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return found


def parse_links(topology: str) -> list[str]:
    """The links between pairs of GPUs in the output of `nvidia-smi topo -m`."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    gpus = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    count = len(gpus)
    return [gpus[i][1 + j] for i in range(count) for j in range(count) if i < j and len(gpus[i]) > j + 1]


def _ask_smi(facts: Facts) -> None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        facts.smi_error = f"{NOT_FOUND} on PATH"
        return
    answer = ask([smi, "--query-gpu=driver_version,memory.used", "--format=csv,noheader,nounits"], SMI_LIMIT_S)
    rows = [line.split(",") for line in answer.output.splitlines() if line.count(",") == 1]
    if answer.status or not rows:
        within = f"no answer within {SMI_LIMIT_S:g} s"
        facts.smi_error = within if answer.status is None else f"nvidia-smi: {answer.last_line()}"
        return
    facts.driver = rows[0][0].strip()
    facts.used_mib = [int(row[1]) for row in rows if row[1].strip().isdecimal()]
    facts.links = parse_links(ask([smi, "topo", "-m"], SMI_LIMIT_S).output)
