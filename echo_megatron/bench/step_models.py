"""Models of `bench_step`: Qwen3 and Llama 3 by their shapes, random weights, one tensor-parallel group of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from echo_megatron.pretrain.schema import Layers


@dataclass(frozen=True)
class ModelShape:
    """A model's published sizes and the batch that it is timed with.

    Attributes:
        num_layers: transformer layers of the whole model.
        hidden, ffn: hidden size and MLP size.
        heads, groups: attention heads and query groups.
        kv_channels: size of a head.
        vocab: rows of the embedding.
        rotary_base: of the positions.
        qk_layernorm: whether queries and keys are normalized.
        tied: whether embedding and head share their weight.
        batch, sequence: sequences and tokens of each where the command line does not say otherwise.
    """

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    kv_channels: int
    vocab: int
    rotary_base: int
    qk_layernorm: bool
    tied: bool
    batch: int
    sequence: int = 2048


MODELS = {
    "qwen3_0p6b": ModelShape(28, 1024, 3072, 16, 8, 128, 151936, 1_000_000, True, True, 32),
    "qwen3_8b": ModelShape(36, 4096, 12288, 32, 8, 128, 151936, 1_000_000, True, False, 8),
    "llama3_8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 500_000, False, False, 8),
    "tiny": ModelShape(4, 64, 128, 4, 4, 16, 128, 10_000, True, False, 4, 64),  # tries the script out, on a CPU too
}
TRANSFORMER_ENGINE = "transformer_engine"
DEFAULT_MODELS = ("qwen3_0p6b", "qwen3_8b", "llama3_8b")


def layers_kind(device: torch.device) -> str:
    """`transformer_engine` where it is installed and there are GPUs, else `local`: Megatron-core's own."""
    return TRANSFORMER_ENGINE if device.type == "cuda" and find_spec(TRANSFORMER_ENGINE) else "local"


class Workload:
    """One model and one batch: the work that every setting does.

    Args:
        shape: the model.
        num_layers: transformer layers to build.
        batch, sequence: sequences, and tokens of each.
        device: this rank's. Megatron's model parallelism has to be initialized.
    """

    def __init__(self, shape: ModelShape, num_layers: int, batch: int, sequence: int, device: torch.device) -> None:
        self.num_layers, self.batch, self.sequence = num_layers, batch, sequence
        self.model = build(shape, num_layers, sequence, device)
        self.model.output_layer.register_forward_pre_hook(_last_position)
        generator = torch.Generator().manual_seed(5)  # the same batch on all ranks
        tokens = torch.randint(0, shape.vocab, (batch, sequence + 1), generator=generator).to(device)
        self._tokens, self._labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._positions = torch.arange(sequence, device=device).unsqueeze(0).expand(batch, sequence)
        self._loss: Tensor | None = None

    def forward_loss(self) -> Tensor:
        """The mean loss of the batch in training mode; gradients of an earlier step are dropped."""
        self._train(True)
        self.model.zero_grad(set_to_none=True)
        return self.model(self._tokens, self._positions, None, labels=self._labels).mean()

    def step(self) -> None:
        """Forward and backward pass; gradients into `.grad`, no optimizer."""
        loss = self.forward_loss()
        loss.backward()
        self._loss = loss.detach()

    def prefill(self) -> None:
        """The forward pass of an evaluation: logits of each sequence's last position."""
        self._train(False)
        with torch.no_grad():
            self.model(self._tokens, self._positions, None)

    def _train(self, mode: bool) -> None:
        """Only where it changes: visiting every module takes the host a millisecond, while the GPU has no work yet."""
        if self.model.training is not mode:
            self.model.train(mode)

    def loss(self) -> float:
        """Of the last step; waits for it."""
        assert self._loss is not None
        return self._loss.item()


def num_parameters(model: torch.nn.Module) -> int:
    """Of this rank."""
    return sum(parameter.numel() for parameter in model.parameters())


def build(shape: ModelShape, num_layers: int, sequence: int, device: torch.device) -> Any:
    """This rank's part of a GPTModel on `device`: BF16 on GPUs, FP32 on a CPU."""
    from megatron.core.models.gpt import GPTModel

    from echo_megatron.pretrain.cpu_shims import seed_all
    from echo_megatron.pretrain.model import layer_spec

    seed_all(1234)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = GPTModel(
        config=_config(shape, num_layers, dtype, device),
        transformer_layer_spec=layer_spec(Layers[layers_kind(device)], shape.qk_layernorm),
        vocab_size=shape.vocab,
        max_sequence_length=sequence,
        position_embedding_type="rope",
        rotary_base=shape.rotary_base,
        share_embeddings_and_output_weights=shape.tied,
    )
    return model.to(device=device, dtype=dtype)


def _config(shape: ModelShape, num_layers: int, dtype: torch.dtype, device: torch.device) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from echo_megatron.pretrain.model import dense_options

    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.kv_channels,
        layernorm_epsilon=1e-6,
        qk_layernorm=shape.qk_layernorm,
        use_cpu_initialization=device.type == "cpu",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=False,
        **dense_options(dtype, Layers[layers_kind(device)]),
    )


def _last_position(output_layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """Before the head, outside training: of [sequence, batch, hidden] the last position, as a prefill needs it."""
    return None if output_layer.training else (arguments[0][-1:], *arguments[1:])


def fitting_layers(wanted: int, attempt: Callable[[int], bool]) -> int:
    """The most layers, of `wanted` and three quarters of it again and again, with which `attempt` succeeds; 0: none."""
    while wanted >= 1 and not attempt(wanted):
        wanted = wanted * 3 // 4
    return wanted
