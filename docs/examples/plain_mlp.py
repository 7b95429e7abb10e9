"""Echo on a plain PyTorch model: a tensor-parallel residual MLP without Megatron.

    torchrun --nproc-per-node 2 docs/examples/plain_mlp.py

Every block holds one rank's share of a column-parallel and a row-parallel linear. The row-parallel output is summed in
forward, the column-parallel input's gradient in backward; `mappings.py` has an autograd function for each.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echo_megatron import PRESETS, Communicator, EchoConfig
from echo_megatron.config import Direction
from echo_megatron.mappings import copy_to_tensor_parallel_region, reduce_from_tensor_parallel_region
from echo_megatron.sites import Site


class Block(nn.Module):
    """x + fc2(gelu(fc1(x))), hidden units split over the ranks."""

    def __init__(self, width: int, idx: int, num_blocks: int, communicator: Communicator, bits: int) -> None:
        super().__init__()
        rank, world_size = communicator.group.rank(), communicator.group.size()
        generator = torch.Generator().manual_seed(idx)  # the whole weight on every rank, then this rank's share of it
        fc1, fc2 = (torch.randn(4 * width, width, generator=generator) * 0.05 for _ in range(2))
        self.fc1 = nn.Parameter(fc1.chunk(world_size)[rank].clone())
        self.fc2 = nn.Parameter(fc2.chunk(world_size)[rank].clone())
        self.norm = nn.LayerNorm(width)
        self.communicator = communicator
        # Indices increase in the order in which a pass reaches the sites: a backward pass reaches the last block first.
        self.forward_site = Site(idx, Direction.forward, f"blocks.{idx}.fc2", bits)
        self.backward_site = Site(num_blocks - 1 - idx, Direction.backward, f"blocks.{idx}.fc1", bits)

    def forward(self, x: Tensor) -> Tensor:
        hidden = copy_to_tensor_parallel_region(self.norm(x), self.communicator, self.backward_site)
        hidden = nn.functional.gelu(hidden @ self.fc1.T)
        return x + reduce_from_tensor_parallel_region(hidden @ self.fc2, self.communicator, self.forward_site)


def train(config: EchoConfig, steps: int, width: int = 64, num_blocks: int = 4) -> list[float]:
    """Fits random targets; returns the losses. Call it on every rank of an initialized process group."""
    communicator = Communicator(dist.group.WORLD, config)
    model = nn.Sequential(*(Block(width, i, num_blocks, communicator, config.bits) for i in range(num_blocks)))
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(256, width, generator=generator), torch.randn(256, width, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    communicator.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quantized = [name for name in PRESETS if EchoConfig.preset(name).quantizes]
    parser.add_argument("--tp-comm", choices=quantized, default="echo4")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    losses = train(EchoConfig.preset(arguments.tp_comm), arguments.steps)
    if dist.get_rank() == 0:
        print(f"{arguments.tp_comm}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {arguments.steps} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
