"""One GPU: the definition gives the same bits on CUDA tensors as on CPU tensors."""

import itertools
import math

import pytest
import torch
from policies import group_size

from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale, Residual
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site


def stream(num_values, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_values, generator=generator)
    x[::97] *= 2.0 ** torch.randint(-120, 100, (len(x[::97]),), generator=generator)
    x[5::4001] = 0.0
    if num_values > 9000:
        x[7000], x[8000], x[9000] = math.nan, math.inf, -math.inf
    return x.to(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_values", [1, 33, 4097, 300_001])
def test_records_and_values_equal_the_cpu_s(bits, policy, dtype, num_values):
    quantizer = Quantizer(bits, policy, group_size(policy))
    x = stream(num_values, num_values, dtype)
    values, cuda_values = quantizer.to_basis(x), quantizer.to_basis(x.cuda())
    record, cuda_record = quantizer.encode(values), quantizer.encode(cuda_values)
    assert torch.equal(cuda_record.cpu(), record)
    decoded, cuda_decoded = (quantizer.decode(r, len(values)) for r in (record, cuda_record))
    assert torch.equal(cuda_decoded.cpu().nan_to_num(nan=123.0), decoded.nan_to_num(nan=123.0))
    assert cuda_decoded.isnan().cpu().equal(decoded.isnan())


COMBINATIONS = list(itertools.product(Policy, (Algorithm.one_shot, Algorithm.two_shot), Residual, Rescale))


@pytest.mark.parametrize(("policy", "algorithm", "residual", "rescale"), COMBINATIONS)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_simulated_passes_equal_the_cpu_s(policy, algorithm, residual, rescale, world_size):
    options = {"algorithm": algorithm, "residual": residual, "rescale": rescale}
    config = EchoConfig(policy=policy, group_size=group_size(policy), **options)
    groups = [SimulatedGroup(world_size, config) for _ in range(2)]
    for idx in range(4):
        generator = torch.Generator().manual_seed(idx)
        xs = [torch.randn(10_007, generator=generator).to(torch.bfloat16) for _ in range(world_size)]
        expected = groups[0].all_reduce(xs, Site(idx, Direction.forward))
        on_cuda = groups[1].all_reduce([x.cuda() for x in xs], Site(idx, Direction.forward))
        assert torch.equal(on_cuda.cpu(), expected)
