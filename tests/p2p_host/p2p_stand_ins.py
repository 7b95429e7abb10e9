"""What stands for the kernels, for CUDA's streams and for a process group, and a rank that calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual
from echo_megatron.ops import index_of
from echo_megatron.sites import Site
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.tuning import Choice, Entry, Table
from echo_megatron.workspace import TEAMS_A_BLOCK, Workspace

BINDING = Path(__file__).resolve().parents[2] / "cuda" / "binding.cpp"
RECORDED = (
    "all_reduce",
    "all_reduce_",
    "reduce_scatter",
    "all_gather",
    "exact_all_reduce",
    "exact_all_reduce_",
    "decode",
    "consensus_update",
)
# Invented; the tests ask the operators, as the transport does.
SIZES = {
    "slot_bytes": lambda bits, policy, group_size: 512 * bits + 8192 // group_size,
    "call_tiles": lambda num_values, world_size, policy, group_size, algorithm: -(-num_values // 4096),
    "scatter_state_tiles": lambda num_values, world_size, policy, group_size: 2 * -(-num_values // 4096),
    "state_tile_bytes": lambda state_dtype: 16384 * (1 + state_dtype),
}
SUM = 7.0  # what a stand-in leaves as the sum
RANK, PEERS = 1, [11, 22, 33]
NUM_BLOCKS, RING, SLOT_BYTES, TIMEOUT_S = 32, 16, 5000, 4.5
FORWARD, BACKWARD = Direction.forward, Direction.backward
TABLE = Table(
    (
        Entry(Choice(Algorithm.one_shot, 8, 1), direction=BACKWARD),
        Entry(Choice(Algorithm.one_shot, 16, 2), below_bytes=1 << 18),
        Entry(Choice(Algorithm.two_shot, 1000, 3)),
    ),
    {3: 1 << 14},
    {3: 1 << 14},
    ("test",),
)
LOCAL = EchoConfig(timeout_s=TIMEOUT_S)
CONSENSUS = LOCAL.replace(residual=Residual.consensus)
NONE = LOCAL.replace(eta=0.0)


def schemas() -> dict[str, str]:
    """The operators' schemas by name."""
    text = BINDING.read_text(encoding="utf-8").replace("\\\n", " ")
    literals: dict[str, str] = {}

    def expanded(parts: str) -> str:
        found = re.findall(r"\"([^\"]*)\"|(ECHO_\w+)", parts)
        return "".join(literal or literals[macro] for literal, macro in found)

    for name, body in re.findall(r"#define (ECHO_[A-Z]+) (.*)", text):
        literals[name] = expanded(body)
    definitions = re.findall(r"m\.def\(((?:\s*(?:\"[^\"]*\"|ECHO_\w+))+)", text)
    return {schema.partition("(")[0]: schema for schema in map(expanded, definitions)}


@dataclass
class Call:
    """A call of an operator: its arguments by name."""

    name: str
    arguments: dict[str, Any]

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]


LOG: list[tuple[Any, ...]] = []
STREAMS: list[str] = []  # the current one is the last


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        LOG.append(("wait", self.name, other.name))

    def wait_event(self, event: Event) -> None:
        LOG.append(("wait", self.name, event.at))

    def __enter__(self) -> None:
        STREAMS.append(self.name)

    def __exit__(self, *_: object) -> None:
        STREAMS.pop()


class Event:
    def record(self, stream: Stream) -> None:
        self.at = f"{stream.name} at {len(LOG)}"


@dataclass
class Rank:
    """A transport with one compensator a direction."""

    transport: P2PTransport
    compensators: dict[Direction, Compensator]

    def all_reduce(self, x, site, out=None, keep=False):
        compensates = self.transport.config.compensates
        return self.transport.all_reduce(x, site, self.compensators[site.direction] if compensates else None, out, keep)


def make_transport(config: EchoConfig) -> P2PTransport:
    buffer = torch.zeros(64, dtype=torch.uint8)
    workspace = Workspace(RANK, buffer, PEERS, NUM_BLOCKS * TEAMS_A_BLOCK, RING, SLOT_BYTES)
    return P2PTransport(workspace, config, TABLE)


def make_rank(config: EchoConfig) -> Rank:
    return Rank(make_transport(config), {direction: Compensator(config, direction) for direction in Direction})


def site(idx: int = 0, direction: Direction = FORWARD, **options: Any) -> Site:
    return Site(idx, direction, "layer", **options)


def values(num_values: int = 200_000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(num_values, dtype=dtype)


def sizes(config: EchoConfig, num_values: int, algorithm: Algorithm, bits: int = 4) -> tuple[int, int]:
    """Bytes of a call's state and of its records."""
    library, policy = torch.ops.echo_megatron, index_of(config.policy)
    tiles = library.call_tiles(
        num_values, len(PEERS), policy=policy, group_size=config.group_size, algorithm=index_of(algorithm)
    )
    records = tiles * (len(PEERS) if algorithm is Algorithm.one_shot else 1)
    return (
        tiles * library.state_tile_bytes(index_of(config.state_dtype_of(FORWARD))),
        records * library.slot_bytes(bits, policy, config.group_size),
    )


def options(config: EchoConfig, site: Site, choice: Choice, fresh: bool) -> dict[str, Any]:
    """The keyword arguments of a call."""
    return {
        "rank": RANK,
        "bits": site.bits,
        "policy": index_of(config.policy),
        "group_size": config.group_size,
        "algorithm": index_of(choice.algorithm),
        "residual": index_of(config.residual_of(site.direction)),
        "rescale": index_of(config.rescale),
        "state_dtype": index_of(config.state_dtype_of(site.direction)),
        "fresh": fresh,
        "coefficients": Compensator(config, site.direction).coefficients if config.compensates else [0.0] * 5,
        "site": [site.idx, index_of(site.direction), site.chunk],
        "num_blocks": choice.num_blocks,
        "depth": choice.depth,
        "num_teams": NUM_BLOCKS * TEAMS_A_BLOCK,
        "ring": RING,
        "slot_bytes": SLOT_BYTES,
        "timeout_s": TIMEOUT_S,
    }


TENSORS = ("x", "y", "state", "codes", "kept_x")


def without_tensors(call: Call) -> dict[str, Any]:
    """The arguments that are not tensors of the call; the workspace's are checked."""
    left = {name: value for name, value in call.arguments.items() if name not in TENSORS}
    assert left.pop("peers") == PEERS
    assert left.pop("workspace").numel() == 64 and left.pop("failure").dtype is torch.int64
    return left


class Group:
    """Stands for a process group of the tensor-parallel ranks."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def rank(self) -> int:
        return RANK

    def size(self) -> int:
        return len(PEERS)

    def allreduce(self, tensors, opts):
        self.calls.append(opts.reduceOp)
        return "native"
