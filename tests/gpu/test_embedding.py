"""The embedding's gradient in a deterministic run: the same bits every time, also where most tokens share a row."""

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("num_tokens", [100, 3073, 65536])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_of_an_embedding_is_deterministic(num_tokens: int, dtype: torch.dtype):
    generator = torch.Generator(device="cuda").manual_seed(num_tokens)
    tokens = torch.randint(0, 75968, (num_tokens,), device="cuda", generator=generator)
    tokens[torch.rand(num_tokens, device="cuda", generator=generator) < 0.5] = 0  # other ranks' tokens
    grad = torch.randn(num_tokens, 64, device="cuda", dtype=dtype, generator=generator)
    first = None
    for _ in range(20):
        weight = torch.zeros(75968, 64, device="cuda", dtype=dtype, requires_grad=True)
        F.embedding(tokens, weight).backward(grad)
        first = weight.grad if first is None else first
        assert torch.equal(weight.grad, first)
    exact = torch.zeros(75968, 64, device="cuda", dtype=torch.float64).index_add_(0, tokens, grad.double())
    error = (first.double() - exact).norm() / exact.norm()
    assert error < (2e-2 if dtype is torch.bfloat16 else 1e-5)
