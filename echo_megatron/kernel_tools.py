"""nvcc: which one, of which version, and what its failure says; the two errors of a build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

LIBRARY_NAME = "libecho_megatron.so"
MAX_SHOWN_LINES = 40
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")


class KernelsUnavailable(RuntimeError):
    """This machine cannot run or build the kernels; the message says why and what to do."""


class KernelBuildError(RuntimeError):
    """The sources did not compile, or a library is not of these sources; the message says what to do."""


def find_nvcc() -> Path:
    """nvcc of CUDA_HOME, PATH or /usr/local/cuda, the first that there is.

    Raises:
        KernelsUnavailable: there is none.
    """
    home, on_path = os.environ.get("CUDA_HOME"), shutil.which("nvcc")
    candidates = [Path(home, "bin", "nvcc")] if home else []
    candidates += [Path(on_path)] if on_path else []
    candidates += [DEFAULT_NVCC]
    for path in candidates:
        if os.access(path, os.X_OK) and path.is_file():
            return path
    looked = ", ".join(map(str, candidates)) + ("" if on_path else " and PATH")
    raise KernelsUnavailable(
        f"nvcc: expected the CUDA {torch.version.cuda} toolkit's compiler, found none (looked at {looked}); "
        f"install the toolkit and set CUDA_HOME, or set ECHO_KERNEL_LIBRARY to a library built on another machine with "
        f"`python -m echo_megatron.kernel_build --out {LIBRARY_NAME}`"
    )


def nvcc_version(nvcc: Path) -> str:
    """All that nvcc says about its version; one of another CUDA major version than PyTorch's is refused."""
    text = run_tool([str(nvcc), "--version"], "nvcc --version")
    found = re.search(r"release (\d+)\.(\d+)", text)
    expected = (torch.version.cuda or "").split(".")[0]
    if not found or found[1] != expected:
        got = f"{found[1]}.{found[2]}" if found else repr(text.strip())
        raise KernelsUnavailable(
            f"{nvcc}: expected CUDA {expected}.x, as this PyTorch ({torch.__version__}), got {got}; "
            f"install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it"
        )
    return text


def run_tool(command: Sequence[str], what: str, folder: Path | None = None) -> str:
    """Output of `command`, standard output and error together."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise KernelBuildError(f"{what}: {command[0]} did not start: {error}") from error
    if done.returncode:
        raise KernelBuildError(
            f"{what}: {Path(command[0]).name} failed with exit status {done.returncode}\n{shortened(done.stdout)}\n"
            f"the command was, in {folder or Path.cwd()}: {' '.join(command)}"
        )
    return done.stdout


def shortened(output: str) -> str:
    """A compiler's output; of a long one, which templates make, only the lines that name an error."""
    lines = output.strip().splitlines()
    if len(lines) <= MAX_SHOWN_LINES:
        return "\n".join(lines)
    errors = [line for line in lines if "error" in line][:MAX_SHOWN_LINES] or lines[-MAX_SHOWN_LINES:]
    return "\n".join([*errors, f"… of {len(lines)} lines; run the command for all"])
