"""Which transport a communicator takes, and what it says about it."""

import logging

import pytest
import torch
import torch.distributed as dist
from communicator_runs import ROUGHLY
from distributed import run_ranks

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig, TransportName
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError


class Logged(logging.Handler):
    """Messages of the communicators made meanwhile."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        self.logger = logging.getLogger("echo_megatron")
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)


def made_without_gpus(rank, world_size):
    torch.cuda.is_available = lambda: False  # also where the tests run beside GPUs
    made = {}
    for name in TransportName.__members__:
        with Logged() as logged:
            try:
                communicator = Communicator(dist.group.WORLD, EchoConfig(transport=name))
                made[name] = communicator.transport.name, communicator.describe(), logged.messages
            except ValueError as error:
                made[name] = str(error)
    x = torch.ones(1000)
    y = communicator.all_reduce(x, Site(0, Direction.forward))  # the group serves on after a refusal
    return made, y.mean().item()


def test_without_gpus_auto_says_why_it_is_collective_and_p2p_is_refused():
    for rank, (made, mean) in enumerate(run_ranks(made_without_gpus, 2)):
        for name, why in (("auto", "no GPUs in this group"), ("collective", "asked for")):
            transport, described, messages = made[name]
            assert transport == "collective"
            assert described == (
                f"echo: 4-bit rotated (groups of 32), collective transport ({why}), algorithm one_shot (at 2 ranks), "
                "local residual, eta 1, compact state, rescale tile; messages under 16384 bytes stay at full "
                "precision; 0.0 MiB of workspace"
            )
            assert messages == ([described] if rank == 0 else []), "one line a group"
        refusal = (
            "transport p2p: rank 0 cannot: there is no CUDA GPU; remove the cause, or use transport: auto or collective"
        )
        assert made["p2p"] == refusal
        assert mean == pytest.approx(2.0, rel=ROUGHLY)


def one_rank_of(rank, world_size):
    group = dist.new_group([rank], use_local_synchronization=True)
    communicator = Communicator(group, EchoConfig(transport=TransportName.p2p, eta=0.0))
    return communicator.transport.name, communicator.describe()


def test_one_rank_needs_no_transport():
    for name, described in run_ranks(one_rank_of, 2):
        assert name == "collective" and "collective transport (one rank)" in described
        assert "no compensation" in described


def agreed(rank, world_size, facts):
    """What `p2p_setup.agree` finds when rank 1 differs from the others in one fact."""
    from echo_megatron.transports import p2p_setup

    differs = rank == 1
    p2p_setup.why_unavailable = lambda group: "nvcc is missing" if differs and facts == "rank" else None
    p2p_setup.host_number = lambda: int(differs and facts == "host")
    p2p_setup.device_number = lambda device: 7 if facts == "device" else 10 * rank + device
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    if facts == "peer access":
        torch.cuda.device_count = lambda: world_size
        p2p_setup.device_number = lambda device: (rank + device) % world_size  # every rank sees its own GPU first
        torch.cuda.can_device_access_peer = lambda device, other: not differs
    return p2p_setup.agree(dist.group.WORLD)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ("none", None),
        ("rank", "rank 1 cannot"),
        ("host", "the ranks are on several hosts"),
        ("device", "two ranks share a GPU"),
        ("peer access", "the GPUs have no peer access to each other"),
    ],
)
def test_ranks_agree_on_why_p2p_is_not_possible(facts, reason):
    """The same answer everywhere, whichever rank it is that can't; planted facts in place of GPUs."""
    for rank, answer in enumerate(run_ranks(agreed, 3, facts)):
        assert answer == reason or (facts == "rank" and answer.startswith(reason))
        if facts == "rank" and rank == 1:
            assert answer == "rank 1 cannot: nvcc is missing"


def made_where_p2p_fails(rank, world_size, transport, fails_at):
    from echo_megatron.transports import p2p_setup

    torch.cuda.is_available = lambda: True
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    p2p_setup.agree = lambda group: "two ranks share a GPU" if fails_at == "agree" else None

    def connect(group, config):
        raise CommunicationError("p2p transport: could not map the peers' memory on rank 1")

    p2p_setup.connect = connect
    communicator = Communicator(dist.group.WORLD, EchoConfig(transport=transport))
    return communicator.transport.name, communicator.describe()


@pytest.mark.parametrize(
    ("fails_at", "reason"),
    [("agree", "two ranks share a GPU"), ("connect", "could not map the peers' memory on rank 1")],
)
def test_where_p2p_is_not_possible_auto_is_collective_and_says_why(fails_at, reason):
    for name, described in run_ranks(made_where_p2p_fails, 2, "auto", fails_at):
        assert name == "collective" and "p2p is not possible: " in described and reason in described
    with pytest.raises(AssertionError, match=r"ValueError: transport p2p: .*" + reason + ".* use transport: auto or"):
        run_ranks(made_where_p2p_fails, 2, "p2p", fails_at)
