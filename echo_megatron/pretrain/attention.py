"""Core attention of the local layer spec on torch's `scaled_dot_product_attention`: causal, no dropout.

Megatron's own local core attention builds the whole [sequence, sequence] score matrix; this one has the flash and
memory-efficient kernels that torch ships, and needs neither Transformer Engine nor Apex.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class SdpaCoreAttention(MegatronModule):
    """Takes the place of Megatron's `DotProductAttention` where only causal self-attention is asked for.

    Raises:
        ValueError: an option that is not served here, by name: attention dropout, a mask type other than causal,
            context parallelism, sliding windows, query-key layer scaling, a softmax that is not the plain one.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **kwargs: Any,
    ):
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            f"attention_dropout={dropout} (expected 0)": dropout != 0,
            f"attn_mask_type={attn_mask_type.name} (expected causal)": attn_mask_type is not AttnMaskType.causal,
            f"attention_type={attention_type} (expected self)": attention_type != "self",
            f"context_parallel_size={config.context_parallel_size} (expected 1)": config.context_parallel_size != 1,
            f"window_size={config.window_size} (expected None)": config.window_size is not None,
            "apply_query_key_layer_scaling (expected False)": config.apply_query_key_layer_scaling,
            f"softmax_type={config.softmax_type} (expected vanilla)": config.softmax_type != "vanilla",
        }
        if reasons := [name for name, is_refused in refused.items() if is_refused]:
            raise ValueError(
                f"SdpaCoreAttention does not support {', '.join(reasons)}; use Megatron's DotProductAttention"
            )
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Causal attention of this rank's heads.

        Args:
            query: [sequence, batch, heads, channels]; one position, where a KV cache holds the earlier ones.
            key: [sequence, batch, query groups, channels]; with a KV cache also the earlier positions.
            value: as `key`.
            attention_mask: has to be None: the mask is causal.
            attn_mask_type: causal, or with a KV cache no_mask.

        Returns:
            [sequence, batch, heads * channels].

        Raises:
            ValueError: a mask, a bias or packed sequences were given, or more keys than queries where there are several
                queries: Megatron-core gives no mask for these, so that they would see each other's future.
        """
        from_cache = query.size(0) == 1 and key.size(0) > 1  # the last position, which sees all of them
        mask_types = (None, AttnMaskType.causal, *([AttnMaskType.no_mask] if from_cache else []))
        refused = {
            "attention_mask": attention_mask is not None,
            "attention_bias": attention_bias is not None,
            "packed_seq_params": packed_seq_params is not None,
            f"attn_mask_type={attn_mask_type}": attn_mask_type not in mask_types,
            f"{key.size(0)} keys for {query.size(0)} queries": not from_cache and key.size(0) != query.size(0),
        }
        if reasons := [name for name, is_refused in refused.items() if is_refused]:
            raise ValueError(
                "SdpaCoreAttention is causal attention of whole sequences, or of one position behind a KV cache; "
                f"it got {', '.join(reasons)}"
            )
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = F.scaled_dot_product_attention(
            q, k, v, is_causal=not from_cache, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
        return context.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
