"""What `megatron.training` needs beyond `cpu_shims` in order to run on the CPU with gloo; for tests only.

`megatron.training` asserts that CUDA is there, counts its devices before it makes the parallel groups, asks for the
GPU's generation and memory, and wraps models on a stream of its own.
"""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace

import torch
import torch._dynamo

from echo_megatron.pretrain.cpu_shims import _NullStream, install_cpu_shims


def install() -> None:
    """Make `megatron.training` run on the CPU in this process, for good. Call before it parses arguments."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda device: None
    cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0, multi_processor_count=1)
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.Stream = lambda *args, **kwargs: _NullStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.empty_cache = lambda: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.device_memory_used = lambda device=None: 0
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: None  # the CPU generator is restored beside it
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch._dynamo.config.disable = True  # it saves and restores the CUDA generator
    install_cpu_shims()
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None  # the wheel brings them compiled, and no Makefile
