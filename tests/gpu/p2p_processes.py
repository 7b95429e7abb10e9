"""What the tests of processes over peer memory share."""

import pytest
import torch
import torch.distributed as dist
from ranks import NUM_GPUS

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, TransportName
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site

NEEDS_TWO_GPUS = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(400),
]
ALGORITHMS = (Algorithm.one_shot, Algorithm.two_shot)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
P2P = {"transport": TransportName.p2p}
TIMEOUT_S = 2.0


def contribution(rank, num_values, seed, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
    return torch.randn(num_values, generator=generator, device="cuda").to(dtype)


def contributions(world_size, num_values, seed, dtype=torch.bfloat16):
    return [contribution(rank, num_values, seed, dtype) for rank in range(world_size)]


def forward(idx, config=None):
    return Site(idx, Direction.forward, bits=config.bits if config else 4)


def communicate_and_compare(config, world_size, rank, num_sites=3, num_values=100_003):
    """A communicator of `config`, after a pass that was compared with the reference."""
    communicator = Communicator(dist.group.WORLD, config)
    simulated = SimulatedGroup(world_size, config)
    for idx in range(num_sites):
        xs = contributions(world_size, num_values, idx)
        y = communicator.all_reduce(xs[rank], forward(idx, config))
        assert torch.equal(y, simulated.all_reduce(xs, forward(idx, config))), f"{config} {idx}"
    torch.cuda.synchronize()
    communicator.check()
    return communicator
