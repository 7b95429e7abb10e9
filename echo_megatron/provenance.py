"""What a result was made with: machine, versions, commit. Every file of results carries it."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """The platform, and the GPU where `device` is one."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"platform": platform.platform(), "processor": platform.machine(), "device": device.type, "gpu": accelerator}


def command() -> str:
    """What was typed, without the folders that only this machine has."""
    program, *arguments = sys.argv
    path = Path(program)
    if path.parent == Path(__file__).parent:
        return shlex.join(["python", "-m", f"echo_megatron.{path.stem}", *arguments])
    return shlex.join([path.name, *arguments])


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of `packages`."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str | None:
    """Commit of the checkout that this file lies in, with "+" where it has been changed; None outside a checkout.

    The environment variable ECHO_COMMIT comes first: it names the commit of sources copied without their history.
    """
    if named := os.environ.get("ECHO_COMMIT"):
        return named
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
