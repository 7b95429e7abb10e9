"""Two or more GPUs: the collective transport over NCCL gives the reference's bits, on each rank and for each dtype."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Residual, TransportName
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

NUM_GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}")


def cases():
    for preset in ("echo4", "echo8", "echo4_paper", "echo8_paper"):
        for algorithm in (Algorithm.one_shot, Algorithm.two_shot):
            for residual in Residual:
                yield EchoConfig.preset(preset, algorithm=algorithm, residual=residual)
    for policy in (Policy.symmetric, Policy.naive, Policy.rotated_asymmetric):
        yield EchoConfig(policy=policy, group_size=32)


def contribution(rank, num_values, idx, dtype):
    generator = torch.Generator().manual_seed(num_values + 7 * rank + idx)
    return torch.randn(num_values, generator=generator).to(dtype)


def check_shares(communicator, simulated, xs, site):
    """The reduce-scatter of inputs as long as all of `xs`, and the all-gather."""
    rank, world_size = dist.get_rank(), communicator.world_size
    wholes = [torch.cat([xs[(peer + step) % world_size] for step in range(world_size)]) for peer in range(world_size)]
    y = communicator.reduce_scatter(wholes[rank], site)
    assert torch.equal(y, simulated.reduce_scatter(wholes, site)[rank]), site
    y = communicator.all_gather(xs[rank], Site(10 + site.idx, site.direction, bits=8))
    assert torch.equal(y, simulated.all_gather(xs, 8)), site


def check(rank, world_size, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", world_size)
    timeout = timedelta(seconds=60)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    different = EchoConfig(transport=TransportName.collective, group_size=64 if rank else 32)
    with pytest.raises(
        ValueError, match=r"same options on all \d ranks of a group, got group_size: 32 on rank 0 and 64"
    ):
        Communicator(dist.group.WORLD, different)
    for config in (case.replace(transport=TransportName.collective) for case in cases()):
        communicator, simulated = Communicator(dist.group.WORLD, config), SimulatedGroup(world_size, config)
        for num_values, dtype in ((1, torch.float32), (1_000_003, torch.bfloat16), (65_536, torch.float16)):
            for idx in range(3):
                site = Site(idx, Direction.backward, bits=config.bits)
                y = communicator.all_reduce(contribution(rank, num_values, idx, dtype).cuda(), site)
                xs = [contribution(peer, num_values, idx, dtype).cuda() for peer in range(world_size)]
                assert torch.equal(y, simulated.all_reduce(xs, site)), (config, num_values, dtype, idx)
                if config.residual is Residual.local:
                    check_shares(communicator, simulated, xs, Site(idx, Direction.forward, bits=config.bits))
    message = "no error"
    try:
        communicator.all_reduce(torch.ones(100 + rank, device="cuda"), Site(0, Direction.forward))
    except CommunicationError as error:
        message = str(error)
    assert "expected the same call on all" in message
    Path(f"{folder}/done{rank}").touch()
    dist.destroy_process_group()


@needs_two
def test_nccl_ranks_hold_the_reference_s_bits(tmp_path):
    mp.start_processes(check, (NUM_GPUS, str(tmp_path)), nprocs=NUM_GPUS, start_method="spawn")
    assert len(list(tmp_path.glob("done*"))) == NUM_GPUS
