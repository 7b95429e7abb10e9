"""Questions that may hang or take the process down, each asked in a process of its own by `doctor_facts.probe`.

    python -m echo_megatron.doctor_probe cuda       what PyTorch says of CUDA
    python -m echo_megatron.doctor_probe kernels    builds or finds the kernels, and loads them

The answer is the last line, JSON. Of an error only the last line counts.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch


def cuda_facts() -> dict[str, Any]:
    """The build, the GPUs, which of them reach each other's memory, NCCL."""
    facts: dict[str, Any] = {"cuda": torch.version.cuda, "gpus": [], "peers": [], "nccl": None}
    if torch.version.cuda is None or not torch.cuda.is_available():
        return facts
    count = torch.cuda.device_count()
    for idx in range(count):
        properties = torch.cuda.get_device_properties(idx)
        capability = [properties.major, properties.minor]
        facts["gpus"].append(
            {"name": properties.name, "capability": capability, "memory_bytes": properties.total_memory}
        )
    facts["peers"] = [
        [own == other or torch.cuda.can_device_access_peer(own, other) for other in range(count)]
        for own in range(count)
    ]  # fmt: skip
    version = torch.cuda.nccl.version()
    facts["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    return facts


def kernel_facts() -> dict[str, Any]:
    """Loads the kernels for the first GPU; where their library came from."""
    from echo_megatron import ops
    from echo_megatron.kernel_build import find_library

    major, minor = torch.cuda.get_device_capability(0)
    library = find_library(f"{major}{minor}")
    ops.load()
    return {"library": str(library), "named": os.environ.get("ECHO_KERNEL_LIBRARY", "")}


def main(arguments: list[str]) -> int:
    """Answers one question."""
    questions = {"cuda": cuda_facts, "kernels": kernel_facts}
    try:
        answer = questions[arguments[0]]()
    except Exception as error:  # whatever it is, the doctor reports it
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
