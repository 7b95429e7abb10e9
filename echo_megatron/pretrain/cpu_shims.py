"""Everything that Megatron-core needs in order to run on a CPU, in one place; nothing is changed where CUDA is used.

Megatron-core takes CUDA for granted. Found one at a time by running without them:

1. `torch.cuda.current_device()` names the device of rotary embeddings, DDP buffers and pipeline messages.
2. The CUDA random-number tracker seeds and forks CUDA generators; attention dropout forks it even at p = 0.
3. Activation recompute saves and restores the CUDA generator.
4. Factory calls with `device="cuda"`, `.cuda()`, `pin_memory=True` (`FP32Optimizer`, gradient clipping, checkpointing).
5. Gradient clipping asserts that `grad.type()` is `torch.cuda.FloatTensor`.
6. DDP's gradient reduction and the pipeline's messages use `torch.cuda.current_stream()` and `synchronize()`.
7. The norm that needs neither CUDA nor Apex asserts that sequence parallelism is off.

`TransformerConfig(use_cpu_initialization=True)` is the eighth; `model.py` sets it on every device, because it also
makes the initial weights independent of the tensor-parallel size.

What NeMo adds (`install_nemo_cpu_shims`):

9. It builds DDP on a side stream: `torch.cuda.Stream()` and `torch.cuda.stream()`.
10. It logs `torch.cuda.max_memory_reserved()` and `max_memory_allocated()`.
11. It seeds Megatron's random-number tracker only where there is a CUDA device.
12. Its progress printer gathers (zero) timers on rank 0 alone; gloo counts that as a call, and the next one hangs.
13. It moves a loaded checkpoint's tensors to the current CUDA device.
14. megatron-core 0.15.3 compiles a CUDA extension when it is imported: `TORCH_CUDA_ARCH_LIST` has to be set.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from echo_megatron.pretrain.norm import TorchNorm

_installed = False


class _CudaToCpu(TorchFunctionMode):
    """Sends tensor factories and copies that name a CUDA device to the CPU (4); answers `Tensor.type()` (5)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _NullStream:
    """Stands for the current CUDA stream where work is done when it is called (6)."""

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _NullStream:
        return self


def install_cpu_shims() -> None:
    """Make Megatron-core run on the CPU in this process, for good. Call before a model is built; twice is harmless."""
    global _installed
    if _installed:
        return
    _installed = True
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        """Megatron's tracker with its contract, on the CPU generator (2)."""

        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random-number state {name!r} or seed {seed} is already there")
            self.seeds_.add(seed)
            before = torch.get_rng_state()
            torch.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(before)

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    null_stream = _NullStream()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.current_stream = lambda *args, **kwargs: null_stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # (3)
    megatron_random._set_cuda_rng_state = lambda *args, **kwargs: None
    WrappedTorchNorm.__new__ = TorchNorm.__new__  # (7)
    _CudaToCpu().__enter__()


def install_nemo_cpu_shims() -> None:
    """Make NeMo run on the CPU in this process, for good. Call before NeMo is imported; twice is harmless."""
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")  # (14)
    install_cpu_shims()
    null_stream = _NullStream()
    torch.cuda.Stream = lambda *args, **kwargs: null_stream  # type: ignore[assignment, misc]  # (9)
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.max_memory_reserved = lambda *args, **kwargs: 0  # (10)
    torch.cuda.max_memory_allocated = lambda *args, **kwargs: 0
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl
    from nemo.lightning.pytorch.callbacks.progress_printer import ProgressPrinter

    megatron_init._set_random_seed = seed_all  # (11)
    ProgressPrinter.log_megatron_timers = lambda self, timers: None  # (12)
    pl._fix_tensors_device = lambda checkpoint: checkpoint  # (13)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, and Megatron's tracker for this rank.

    Args:
        seed: the run's seed; offsets are Megatron's own. Model parallelism has to be initialized.
    """
    import random

    import numpy as np
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random as megatron_random

    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # Megatron uses the global generator
    torch.manual_seed(seed)
    if not _installed:
        megatron_random.model_parallel_cuda_manual_seed(seed)
        return
    tracker = megatron_random.get_cuda_rng_tracker()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tracker.reset()
    tracker.add(megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME, seed + 2718 + tp_rank)
    tracker.add(megatron_random._DATA_PARALLEL_RNG_TRACKER_NAME, seed)
    tracker.add(megatron_random._EXPERT_PARALLEL_RNG_TRACKER_NAME, seed + 1024 + 100 + tp_rank)
