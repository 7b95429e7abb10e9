"""PyTorch's norm for Megatron-core's local layers, also with sequence parallelism."""

from __future__ import annotations

from typing import Any

from torch import nn

_NORMS = {"LayerNorm": nn.LayerNorm, "RMSNorm": nn.RMSNorm}


class TorchNorm:
    """In the place of Megatron's `WrappedTorchNorm`, which asserts that sequence parallelism is off.

    With it a rank normalizes its share of the sequence, so that the gradient of a weight has to be summed over the
    tensor-parallel ranks. Megatron's `finalize_model_grads` does that for weights that carry the mark
    `sequence_parallel`, as those of Transformer Engine and Apex do.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        """
        Args:
            config: a TransformerConfig.
            hidden_size: of the last dimension.
            eps: added to the variance.
            options: what Megatron passes to other norms.

        Raises:
            ValueError: a norm or an option that PyTorch's has not.
        """
        if config.normalization not in _NORMS:
            raise ValueError(f"normalization: expected one of {', '.join(_NORMS)}, got {config.normalization!r}")
        for option in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
            if getattr(config, option):
                raise ValueError(f"{option}: expected False with PyTorch's norm, got True")
        norm: nn.Module = _NORMS[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
