"""Time added to the critical path (paper Table 2): matmul, call, matmul, minus the two matmuls alone.

The first matmul is fc2 of one tensor-parallel rank, whose output is summed; the second is fc1 of the next layer. What a
call does beside the second matmul, on a stream of its own, costs what it slows that down by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echo_megatron.bench.rows import ITEMSIZE
from echo_megatron.bench.timing import Step

# hidden size, FFN size
MODELS = {"llama3_8b": (4096, 14336), "qwen3_0.6b": (1024, 3072)}


class Matmuls:
    """The two matmuls around a message.

    Args:
        model: a key of `MODELS`.
        num_bytes: of the message: it decides the number of tokens.
        world_size: P.
        device: where they run.
    """

    @staticmethod
    def fits(model: str, num_bytes: int, world_size: int) -> bool:
        """Whether the message is a whole number of tokens and the FFN splits over the ranks."""
        hidden, ffn = MODELS[model]
        return num_bytes % (ITEMSIZE * hidden) == 0 and ffn % world_size == 0

    def __init__(self, model: str, num_bytes: int, world_size: int, device: torch.device) -> None:
        hidden, ffn = MODELS[model]
        tokens = num_bytes // (ITEMSIZE * hidden)
        ffn //= world_size

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        self._activation, self._fc2, self._fc1 = random(tokens, ffn), random(ffn, hidden), random(hidden, ffn)
        self._message, self._next = random(tokens, hidden), random(tokens, ffn)

    def alone(self) -> None:
        torch.mm(self._activation, self._fc2, out=self._message)
        torch.mm(self._message, self._fc1, out=self._next)

    def around(self, call: Callable[[Tensor], Tensor]) -> Step:
        """Both matmuls with `call` between them."""

        def step() -> None:
            torch.mm(self._activation, self._fc2, out=self._message)
            reduced = call(self._message)
            torch.mm(reduced, self._fc1, out=self._next)

        return step
