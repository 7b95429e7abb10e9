"""What `echo-megatron plan` knows of machines: GPUs by their datasheets, and what was measured, from docs/results.

Only the H200 was measured. Another GPU has its datasheet's wire and HBM times the shares of theirs that two H200
reached, and issues instructions by its multiprocessors and their clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from echo_megatron.package_folders import package_folder

GPUS_FILE = Path(__file__).with_name("plan_gpus.json")
MEASURED_GPU = "h200"
RESULTS = ("all_reduce_h200x2", "sequence_parallel_h200x2", "step_h200x2", "kernel_profile_h200")


@dataclass(frozen=True)
class Gpu:
    """A GPU by its datasheet; GB/s are 1e9 bytes a second.

    Attributes:
        key: what the command line calls it.
        name: what CUDA calls it, which tuning tables go by.
        multiprocessors: of the GPU.
        clock_ghz: of its multiprocessors under load.
        tflops: dense BF16 matmuls.
        hbm_gb_per_s: memory, read plus written.
        wire_gb_per_s: to other GPUs, one direction.
        source: where the numbers are from.
    """

    key: str
    name: str
    multiprocessors: int
    clock_ghz: float
    tflops: float
    hbm_gb_per_s: float
    wire_gb_per_s: float
    source: str

    @property
    def issue_rate(self) -> float:
        """Instructions a time, in units that cancel between GPUs."""
        return self.multiprocessors * self.clock_ghz


@cache
def gpus() -> Mapping[str, Gpu]:
    """The GPUs of `plan_gpus.json`."""
    content = json.loads(GPUS_FILE.read_text(encoding="utf-8"))["gpus"]
    return {key: Gpu(key, **values) for key, values in content.items()}


def gpu_of_name(name: str) -> Gpu | None:
    """The GPU that CUDA calls `name`; None where the file has none such, as of boards with other links or memory."""
    words = name.upper().replace("-", " ").split()
    if {"PCIE", "NVL", "40GB", "MIG"} & set(words):
        return None
    for gpu in gpus().values():
        if gpu.key.upper() in words:
            return gpu
    return None


@dataclass(frozen=True)
class Ceilings:
    """What a machine carries, GB/s, and its matmuls.

    Attributes:
        gpu: by its datasheet.
        wire: sent by a GPU while every GPU sends.
        hbm: read plus written by a copy.
        is_measured: by our bench; otherwise scaled from the datasheet.
    """

    gpu: Gpu
    wire: float
    hbm: float
    is_measured: bool


def results_folder() -> Path:
    """The measured results: inside the installed package, or docs/results of a checkout.

    Raises:
        FileNotFoundError: they are in neither place.
    """
    files = tuple(f"{name}.json" for name in RESULTS)
    remedy = "install the package again, or name their folder with --results"
    return package_folder("results", "docs/results", files, remedy)


class Measured:
    """The result files that the model is calibrated with.

    Args:
        folder: where they are.

    Raises:
        ValueError: a file is missing or is not one of our results.
    """

    def __init__(self, folder: Path) -> None:
        self.all_reduce, self.shares, self.step, self.profile = (_read(folder / f"{name}.json") for name in RESULTS)
        for name, content in zip(RESULTS[:3], (self.all_reduce, self.shares, self.step), strict=True):
            if content["world_size"] != 2:
                raise ValueError(f"{folder / name}.json: expected results at P = 2, got {content['world_size']}")
        self.ceilings = Ceilings(
            gpus()[MEASURED_GPU],
            self.all_reduce["ceilings"]["wire_gb_per_s"],
            self.all_reduce["ceilings"]["hbm_gb_per_s"],
            is_measured=True,
        )

    def ceilings_of(self, gpu: Gpu) -> Ceilings:
        """The measured ceilings of the measured GPU; another's datasheet times the shares that were reached."""
        if gpu == self.ceilings.gpu:
            return self.ceilings
        own = self.ceilings
        return Ceilings(
            gpu,
            gpu.wire_gb_per_s * own.wire / own.gpu.wire_gb_per_s,
            gpu.hbm_gb_per_s * own.hbm / own.gpu.hbm_gb_per_s,
            is_measured=False,
        )

    def curve(self, rows: Iterable[Mapping[str, Any]], name: str, policy: str | None, state: str | None) -> Curve:
        """The times of a row by size; those measured a little beside another size are left out.

        Raises:
            ValueError: the row has fewer than two sizes.
        """
        points = {
            row["bytes"]: (row["ms"], row["algorithm"])
            for row in rows
            if (row["row"], row["policy"], row["state_dtype"]) == (name, policy, state)
            and not row.get("beside")
            and "matmuls" not in row
        }
        if len(points) < 2:
            raise ValueError(
                f"row {name} (policy {policy}, state {state}): expected two sizes or more in the measured results, "
                f"got {len(points)}"
            )
        return Curve({size: ms for size, (ms, _) in points.items()}, {size: how for size, (_, how) in points.items()})

    def kernel_ms(self, policy: str, bits: int, algorithm: str, state: str | None) -> float:
        """Milliseconds for 2^20 values of a kernel that sends to itself: everything but the wire.

        Raises:
            ValueError: that kernel was not profiled.
        """
        wanted = {"policy": policy, "bits": bits, "algorithm": algorithm, "state_dtype": state}
        for row in self.profile["rows"]:
            if all(row[name] == value for name, value in wanted.items()):
                return row["ms"] * 2 / self.profile["mib"]  # mib of BF16
        raise ValueError(f"kernel profile: expected a row {wanted}, got none")


@dataclass(frozen=True)
class Curve:
    """Measured milliseconds by the message's bytes.

    Attributes:
        ms: of each size.
        algorithm: of each size, None for what is not ours.
    """

    ms: Mapping[int, float]
    algorithm: Mapping[int, str | None]

    @property
    def latency_ms(self) -> float:
        """Of the smallest message."""
        return self.ms[min(self.ms)]

    def work_ms(self, num_bytes: float) -> float:
        """What a message takes beyond the latency: straight lines between the sizes, past the largest in proportion."""
        sizes = sorted(self.ms)
        work = [max(self.ms[size] - self.latency_ms, 0.0) for size in sizes]
        if num_bytes >= sizes[-1]:
            return work[-1] * num_bytes / sizes[-1]
        if num_bytes <= sizes[0]:
            return 0.0
        upper = next(idx for idx, size in enumerate(sizes) if size >= num_bytes)
        lower = upper - 1
        share = (num_bytes - sizes[lower]) / (sizes[upper] - sizes[lower])
        return work[lower] + share * (work[upper] - work[lower])

    def without(self, num_bytes: int) -> Curve:
        """This curve without one of its sizes."""
        return replace(self, ms={size: ms for size, ms in self.ms.items() if size != num_bytes})


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not content["rows"]:
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected measured results, got {type(error).__name__}: {error}") from error
    return content
