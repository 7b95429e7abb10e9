"""Tells, in a forward pass, whether activation recompute will run it again inside the backward pass.

Both reentrant checkpoints count: Megatron's, and Transformer Engine's, which Megatron takes with FP8.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType

from echo_megatron.integrations.versions import require, transformer_engine


def recompute_test() -> Callable[[], bool]:
    """The test for this version of megatron-core; it is asked inside a forward site's all-reduce."""
    random = require("megatron.core.tensor_parallel", "random")
    is_checkpointing: Callable[[], bool] | None = getattr(random, "is_checkpointing", None)
    if is_checkpointing is None:  # megatron-core 0.15 has no flag
        code = random.CheckpointFunction.forward.__code__
        return lambda: _runs_inside(code) or _is_transformer_engine_checkpointing()
    return lambda: is_checkpointing() or _is_transformer_engine_checkpointing()


def _runs_inside(code: CodeType) -> bool:
    """Whether a caller runs `code`."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def _is_transformer_engine_checkpointing() -> bool:
    distributed = transformer_engine("pytorch.distributed")
    if distributed is None:
        return False
    # The public function is False for a layer that is kept in BF16; older versions have it alone.
    in_region: bool = getattr(distributed, "_IN_ACTIVATION_RECOMPUTE_REGION", False)
    return in_region or distributed.is_fp8_activation_recompute_enabled()
