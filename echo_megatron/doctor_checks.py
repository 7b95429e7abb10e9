"""From facts to findings: what was looked at, what was found, how bad that is, what to do. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from echo_megatron.config import MAX_WORLD_SIZE
from echo_megatron.doctor_facts import IN_CHECKOUT, NOT_FOUND, Facts
from echo_megatron.integrations.versions import MEGATRON_VERSIONS
from echo_megatron.kernel_sources import LOWEST_CAPABILITY
from echo_megatron.tuning import SHIPPED, gpu_slug, user_table_path

MISSING = "not installed"
PYTHONS = ("3.12", "3.13")  # pyproject.toml, requires-python
TORCH = "2.11"  # pyproject.toml
BUSY_MIB = 2048  # more than a context or two


class Status(IntEnum):
    """How bad a finding is; the worst is the exit status, `note` counting as good."""

    good = 0
    degraded = 1
    broken = 2
    note = -1


def _page(name: str, section: str = "") -> str:
    """Where a page of docs/ says more; nothing where the package is installed without its documentation."""
    return f"; docs/{name}{f', {section}' if section else ''}" if IN_CHECKOUT else ""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: the thing.
        status: how it is.
        found: what was found.
        todo: what to do; empty where nothing is to be done.
    """

    what: str
    status: Status
    found: str
    todo: str = ""

    def to_json(self) -> dict[str, str]:
        return {**asdict(self), "status": self.status.name}


def exit_status(findings: list[Finding]) -> int:
    """0 good, 1 something is degraded, 2 something is broken."""
    return max([Status.good, *(finding.status for finding in findings)]).value


def check_machine(facts: Facts) -> list[Finding]:
    """Findings about what is installed and what hardware there is."""
    return [
        *_software(facts),
        *_hardware(facts),
        *_between_gpus(facts),
        _compiler(facts),
        _kernels(facts),
        *_tuning(facts),
    ]


def check_run(run: Mapping[str, Any], num_gpus: int) -> list[Finding]:
    """Findings of the self-test and the measurement (`doctor_run.self_test`)."""
    if "error" in run:
        return [
            Finding(
                "self-test",
                Status.broken,
                run["error"],
                f"with NCCL, NCCL_DEBUG=INFO says more{_page('troubleshooting.md')}",
            )
        ]
    return [_self_test(run), *_transport(run, num_gpus), *_measurement(run)]


# -- the machine


def _software(facts: Facts) -> Iterator[Finding]:
    python = facts.versions["python"]
    good = python.rsplit(".", 1)[0] in PYTHONS
    yield Finding(
        "Python",
        Status.good if good else Status.broken,
        python,
        "" if good else f"use Python {' or '.join(PYTHONS)}, which megatron-core has wheels for",
    )
    torch = facts.versions["torch"]
    build = facts.torch.get("cuda")
    known = torch.startswith(f"{TORCH}.")
    yield Finding(
        "PyTorch",
        Status.good if known else Status.degraded,
        f"{torch}, {f'CUDA {build}' if build else 'built without CUDA'}" if "error" not in facts.torch else torch,
        "" if known else f"this release is tested with PyTorch {TORCH}; install that",
    )
    yield _megatron(facts.versions["megatron-core"])
    for package, label, what in (
        ("transformer-engine", "Transformer Engine", "its layers are faster than Megatron-core's local ones on GPUs"),
        ("nemo-toolkit", "NeMo", f"needed for its front end alone{_page('nemo.md')}"),
        ("megatron-bridge", "Megatron-Bridge", f"needed for its front end alone{_page('bridge.md')}"),
    ):
        version = facts.versions[package]
        yield Finding(label, Status.note if version == MISSING else Status.good, version,
                      what if version == MISSING else "")  # fmt: skip
    if not IN_CHECKOUT:
        return  # an environment beside the sources, where there are none
    environment = ", ".join(f"{name} {version}" for name, version in facts.nemo_environment.items())
    yield Finding(
        "NeMo's environment",
        Status.good if "nemo-toolkit" in facts.nemo_environment else Status.note,
        environment or "no .venv-nemo beside this checkout",
        "" if environment else "`make nemo-env` makes it, for NeMo 2.7 alone",
    )


def _megatron(version: str) -> Finding:
    lowest, highest = (Version(text) for text in MEGATRON_VERSIONS.split(" to "))
    if version == MISSING:
        return Finding("megatron-core", Status.broken, version, f"pip install megatron-core, {MEGATRON_VERSIONS}")
    good = lowest <= Version(version) and Version(version).release[:2] <= highest.release[:2]
    todo = "" if good else f"the tests ran with {MEGATRON_VERSIONS}; install one of these"
    return Finding("megatron-core", Status.good if good else Status.degraded, version, todo)


def _hardware(facts: Facts) -> Iterator[Finding]:
    yield _driver(facts)
    if "error" in facts.torch:
        yield Finding("GPUs", Status.broken, f"PyTorch: {facts.torch['error']}",
                      "run nvidia-smi; a driver that hangs or fails shows in dmesg")  # fmt: skip
        return
    gpus = facts.torch["gpus"]
    if not gpus:
        if facts.driver:
            yield Finding(
                "GPUs", Status.broken, f"the driver has {len(facts.used_mib)}, PyTorch sees none",
                "look at CUDA_VISIBLE_DEVICES; install a CUDA build of PyTorch that the driver is new enough for",
            )  # fmt: skip
        else:
            yield Finding("GPUs", Status.degraded, "none: on the CPU, over gloo, Echo saves bytes but no time",
                          "use a machine with 2 to 8 GPUs; `echo-megatron plan` says what to expect there")  # fmt: skip
        return
    yield _gpus(gpus)
    busy = [idx for idx, used in enumerate(facts.used_mib) if used > BUSY_MIB]
    if busy:
        used = ", ".join(f"GPU {idx} {facts.used_mib[idx]} MiB" for idx in busy)
        yield Finding("other work", Status.degraded, f"memory in use: {used}",
                      "stop it, or take the measurement below as that of a busy machine")  # fmt: skip


def _driver(facts: Facts) -> Finding:
    if facts.driver:
        return Finding("driver", Status.good, facts.driver)
    error = facts.smi_error or "not known"
    if error.startswith(NOT_FOUND):
        return Finding("driver", Status.note, error, "without GPUs nothing; otherwise install the NVIDIA driver")
    return Finding("driver", Status.broken, error, "dmesg says what the driver complains of; a reboot may be needed")


def _gpus(gpus: list[dict[str, Any]]) -> Finding:
    names = sorted({gpu["name"] for gpu in gpus})
    found = f"{len(gpus)} × {' and '.join(names)}, {min(gpu['memory_bytes'] for gpu in gpus) / 2**30:.0f} GiB"
    old = [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < LOWEST_CAPABILITY]
    if old:
        return Finding("GPUs", Status.degraded, f"{found}; {old[0]} has a compute capability below 8.0",
                       "the kernels need Ampere or newer; here codes go through torch.distributed")  # fmt: skip
    if len(names) > 1:
        return Finding("GPUs", Status.degraded, found,
                       "name GPUs of one kind in CUDA_VISIBLE_DEVICES: the slowest sets the time")  # fmt: skip
    if len(gpus) == 1:
        return Finding("GPUs", Status.degraded, found,
                       "one GPU sums nothing: use 2 to 8; `echo-megatron plan` needs none")  # fmt: skip
    if len(gpus) > MAX_WORLD_SIZE:
        return Finding("GPUs", Status.note, found, f"a tensor-parallel group has at most {MAX_WORLD_SIZE} ranks")
    return Finding("GPUs", Status.good, found)


def _between_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.num_gpus < 2:
        return
    kinds = sorted(set(facts.links))
    if not kinds:
        yield Finding("links", Status.note, "not known: nvidia-smi topo -m gave none", "the measurement below tells")
    elif all(kind.startswith("NV") for kind in kinds):
        yield Finding("links", Status.good, f"NVLink ({', '.join(kinds)})")
    else:
        yield Finding("links", Status.degraded, f"not all NVLink: {', '.join(kinds)}",
                      "choose GPUs with NVLink between them by CUDA_VISIBLE_DEVICES: nvidia-smi topo -m")  # fmt: skip
    blocked = [
        f"{own} to {other}"
        for own, row in enumerate(facts.torch["peers"])
        for other, reaches in enumerate(row)
        if not reaches
    ]
    if blocked:
        yield Finding("peer access", Status.degraded, f"none from GPU {', '.join(blocked)}",
                      "nvidia-smi topo -p2p r says why; without it codes go through torch.distributed")  # fmt: skip
    else:
        yield Finding("peer access", Status.good, "every GPU reaches every other")
    nccl = facts.torch["nccl"]
    yield Finding("NCCL", Status.good if nccl else Status.broken, nccl or "none in this PyTorch",
                  "" if nccl else "install a CUDA build of PyTorch")  # fmt: skip


def _compiler(facts: Facts) -> Finding:
    if "error" in facts.nvcc:
        return Finding("nvcc", Status.note, "none",
                       "needed to build the kernels, unless ECHO_KERNEL_LIBRARY names a library")  # fmt: skip
    found = f"{facts.nvcc['version']}, {facts.nvcc['path']}"
    build = facts.torch.get("cuda")
    if build and facts.nvcc["version"].split(".")[0] != build.split(".")[0]:
        return Finding("nvcc", Status.note, found, f"kernels for this PyTorch need CUDA {build.split('.')[0]}.x")
    return Finding("nvcc", Status.good, found)


def _kernels(facts: Facts) -> Finding:
    kernels = facts.kernels
    if "skipped" in kernels:
        return Finding("kernels", Status.note, "not asked for", kernels["skipped"])
    if "error" in kernels:
        todo = (
            "`python -m echo_megatron.kernel_build` shows all that the build says; without kernels codes go through "
            f"torch.distributed{_page('troubleshooting.md', 'Building the kernels')}"
        )
        if not facts.cache.get("writable", True):
            todo = f"{facts.cache['folder']} can't be written: set ECHO_KERNEL_CACHE to a folder that can"
        return Finding("kernels", Status.degraded, kernels["error"], todo)
    origin = "named by ECHO_KERNEL_LIBRARY" if kernels.get("named") else "built here"
    return Finding("kernels", Status.good, f"{kernels['library']} ({origin}), loaded")


def _tuning(facts: Facts) -> Iterator[Finding]:
    if not facts.num_gpus:
        return
    name = facts.torch["gpus"][0]["name"]
    own, shipped = user_table_path(name), SHIPPED / f"{gpu_slug(name)}.json"
    if own.is_file():
        yield Finding("tuning table", Status.good, f"tuned on this machine: {own}")
    elif shipped.is_file():
        yield Finding("tuning table", Status.good, f"shipped: {Path(shipped).name}")
    else:
        yield Finding("tuning table", Status.degraded, f"none for {name}: the conservative default",
                      "echo-megatron bench --tune measures this machine's")  # fmt: skip


# -- the self-test and the measurement


def _self_test(run: Mapping[str, Any]) -> Finding:
    ranks = f"{run['world_size']} ranks on {'GPUs' if run['device'] == 'cuda' else 'the CPU'}"
    failed = {name: why for name, why in run["left_out"].items() if not why.startswith("--budget-s")}
    wrong = [f"{name}: {why}" for name, why in failed.items() if why.startswith("AssertionError")]
    if wrong:
        return Finding("self-test", Status.broken, f"{ranks}: {wrong[0]}",
                       "do not train with it: report this and the versions; tp_comm=nccl meanwhile")  # fmt: skip
    if failed:
        name, why = next(iter(failed.items()))
        todo = f"report it with what `echo-megatron doctor --json` prints{_page('troubleshooting.md')}"
        return Finding("self-test", Status.broken, f"{ranks}: {name}: {why}", todo)
    return Finding(
        "self-test", Status.good, f"{ranks}: all-reduce, reduce-scatter, all-gather are the reference's bits"
    )


def _transport(run: Mapping[str, Any], num_gpus: int) -> Iterator[Finding]:
    if run["device"] != "cuda":
        yield Finding("transport", Status.note, f"{run['transport']}: {run['describe']}")
        return
    yield Finding("symmetric memory", Status.good if run["symmetric"] else Status.degraded,
                  "allocated and mapped by every rank" if run["symmetric"] else "not to be had",
                  "" if run["symmetric"] else "the log above says why: driver, peer access, or memory")  # fmt: skip
    if run["transport"] == "p2p":
        yield Finding("transport", Status.good, run["describe"])
    else:
        yield Finding("transport", Status.degraded if num_gpus > 1 else Status.note, run["describe"],
                      "the reason stands in brackets; tp_comm.transport=p2p makes it an error that says what to do"
                      + _page("troubleshooting.md", "Choosing the transport"))  # fmt: skip


def _measurement(run: Mapping[str, Any]) -> Iterator[Finding]:
    if run["device"] != "cuda":
        return
    ratios = {
        row["bytes"]: row["nccl_ratio"]
        for row in run["rows"]
        if row["row"] == "echo4_local" and row["bytes"] >= run["min_bytes"] and row["nccl_ratio"]
    }
    if not ratios:
        yield Finding("measurement", Status.degraded, "no size that echo4 quantizes was timed in the time given",
                      "give it more: --seconds")  # fmt: skip
        return
    size = max(ratios)
    faster = ratios[size] > 1
    yield Finding(
        "measurement",
        Status.good if faster else Status.degraded,
        f"all-reduce of {size / 2**20:g} MiB: echo4 takes NCCL's time / {ratios[size]:.2f}",
        "" if faster else "min_bytes above this size, or tp_comm=nccl; echo-megatron bench shows more sizes",
    )
