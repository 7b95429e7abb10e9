"""The operators `torch.ops.echo_megatron.*`: built and loaded by `load`, never by an import; and their fake kernels.

Schemas and CUDA kernels are in cuda/binding.cpp. The operators return nothing; what they write is in their schema. A
fake kernel, for tracing without a GPU, checks what the CUDA kernel checks of shapes and types.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from echo_megatron.kernel_build import find_library
from echo_megatron.kernel_tools import KernelBuildError, KernelsUnavailable

__all__ = ["KernelBuildError", "KernelsUnavailable", "index_of", "is_loaded", "load"]

NAMESPACE = "echo_megatron"

_lock = threading.Lock()
_loaded = False


def is_loaded() -> bool:
    """Whether `torch.ops.echo_megatron` has its operators."""
    return _loaded


def load(arch: str | None = None) -> None:
    """Build the kernels where they are not cached and load them; once a process, then nothing.

    Args:
        arch: compute capability such as "90"; None for that of the current GPU.

    Raises:
        KernelsUnavailable: there is no GPU, or nothing to build with and no library is named.
        KernelBuildError: see `kernel_build.find_library`.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        torch.ops.load_library(str(find_library(arch or _present_arch())))
        register_fakes()
        _loaded = True


def index_of(member: Enum) -> int:
    """An enum's member as the operators take it: its place in the enum (cuda/layout.cuh has the same order)."""
    return list(type(member)).index(member)


def _present_arch() -> str:
    if not torch.cuda.is_available():
        raise KernelsUnavailable(
            f"expected a CUDA GPU, PyTorch {torch.__version__} sees none; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def register_fakes() -> None:
    """Register the fake kernels; the operators must be defined."""
    for name, fake in _FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)


def _check_output(op: str, x: Tensor, y: Tensor) -> None:
    torch._check(
        x.numel() == y.numel() and x.dtype == y.dtype and x.device == y.device,
        lambda: f"{op}: expected y like x, {_describe(x)}, got {_describe(y)}",
    )


def _describe(x: Tensor) -> str:
    return f"{x.numel()} of {x.dtype} on {x.device}"


def _all_reduce(x: Tensor, y: Tensor, *_: object, **__: object) -> None:
    _check_output("all_reduce", x, y)


def _reduce_scatter(
    x: Tensor, y: Tensor, workspace: Tensor, state: Tensor | None, failure: Tensor, peers: list[int], **_: object
) -> None:
    _check_shares("reduce_scatter", y, x, len(peers))


def _all_gather(x: Tensor, y: Tensor, workspace: Tensor, failure: Tensor, peers: list[int], **_: object) -> None:
    _check_shares("all_gather", x, y, len(peers))


def _check_shares(op: str, share: Tensor, whole: Tensor, world_size: int) -> None:
    torch._check(
        share.numel() * world_size == whole.numel() and share.dtype == whole.dtype and share.device == whole.device,
        lambda: f"{op}: expected one of {world_size} shares of {_describe(whole)}, got {_describe(share)}",
    )


def _exact_all_reduce(x: Tensor, y: Tensor, *_: object, **__: object) -> None:
    _check_output("exact_all_reduce", x, y)


def _nothing(*_: object, **__: object) -> None:
    pass


_FAKES: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _nothing,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "exact_all_reduce": _exact_all_reduce,
    "exact_all_reduce_": _nothing,
    "decode": _nothing,
    "consensus_update": _nothing,
}
