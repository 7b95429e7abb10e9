"""The host's part of the p2p transport, without a GPU: what reaches the operators, in which order, and what is raised.

The operators are stand-ins on the CPU with the schemas of cuda/binding.cpp; streams and events write a log.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from feedbacks import AVERAGES
from torch import Tensor
from torch.distributed import distributed_c10d

from echo_megatron import communicator as communicator_module
from echo_megatron.communicator import Communicator
from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, Policy, Residual, StateDtype
from echo_megatron.ops import NAMESPACE, index_of
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import Segments, make_quantizer
from echo_megatron.sites import Site
from echo_megatron.transports import p2p
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.transports.protocol import CommunicationError
from echo_megatron.tuning import Choice, Entry, Table
from echo_megatron.workspace import TEAMS_A_BLOCK, Workspace

BINDING = Path(__file__).resolve().parent.parent / "cuda" / "binding.cpp"
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


@pytest.fixture
def calls():
    """The calls of the operators so far; stand-ins take the place of kernels."""
    library = getattr(torch.ops, NAMESPACE)
    is_real = hasattr(library, "all_reduce")  # loaded by another test
    fragment = torch.library.Library(NAMESPACE, "FRAGMENT")
    recorded: list[Call] = []

    def stand_in(name):
        def run(*args, **options):
            schema = getattr(library, name).default._schema
            names = [argument.name for argument in schema.arguments]
            call = Call(name, dict(zip(names, args, strict=False)) | options)
            recorded.append(call)
            LOG.append((name, STREAMS[-1]))
            if name != "consensus_update":
                output = call.arguments.get("y", call.arguments.get("x"))
                output.fill_(SUM)

        return run

    for name, schema in schemas().items():
        if name not in RECORDED and (is_real or name not in SIZES):
            continue
        if not is_real:
            fragment.define(schema)
        if name in RECORDED:
            fragment.impl(name, stand_in(name), "CPU")
        else:
            fragment.impl(name, SIZES[name], "CompositeExplicitAutograd")
    yield recorded
    fragment._destroy()


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


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Streams without a GPU; `capturing` says whether a graph is captured."""
    state = SimpleNamespace(capturing=False, num_created=0)

    def create(device):
        state.num_created += 1
        return Stream(f"side{state.num_created}")

    LOG.clear()
    STREAMS[:] = ["main"]
    monkeypatch.setattr(torch.cuda, "Stream", create)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(STREAMS[-1]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(p2p, "_current_raw_stream", lambda device: hash(STREAMS[-1]))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: LOG.append(("record", self.data_ptr())))
    return state


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


class TestArguments:
    @pytest.mark.parametrize(
        ("num_values", "choice"),
        [(1000, Choice(Algorithm.one_shot, 16, 2)), (200_000, Choice(Algorithm.two_shot, NUM_BLOCKS, 3))],
    )
    def test_out_of_place_without_compensation(self, calls, num_values, choice):
        rank, x, where = make_rank(NONE), values(num_values).view(-1, 8), site(5, chunk=2)
        reduced = rank.all_reduce(x, where)
        (call,) = calls
        assert call.name == "all_reduce" and call["x"] is x and call["y"] is reduced.output
        assert call["state"] is None and call["codes"] is None and call["kept_x"] is None
        assert without_tensors(call) == options(NONE, where, choice, fresh=True)
        assert reduced.output.shape == x.shape and reduced.codes is reduced.output
        assert (x == 1).all() and (reduced.output == SUM).all()

    @pytest.mark.parametrize("changes", [{}, {"bits": 8, **AVERAGES}, {"group_size": 128, "state_dtype": "fp32"}])
    def test_in_place_with_the_local_residual(self, calls, changes):
        config, x = LOCAL.replace(**changes), values()
        rank = make_rank(config)
        sites = [site(idx, bits=config.bits) for idx in range(3)]
        for where in sites:
            assert rank.all_reduce(x, where, out=x).output is x
        state_bytes, _ = sizes(config, x.numel(), Algorithm.two_shot, config.bits)
        assert calls[0]["state"].numel() == state_bytes
        for idx, (call, where) in enumerate(zip(calls, sites, strict=True)):
            assert call.name == "all_reduce_" and call["x"] is x and "y" not in call.arguments
            assert call["state"] is calls[0]["state"] and call["codes"] is None and call["kept_x"] is None
            choice = Choice(Algorithm.two_shot, NUM_BLOCKS, 3)
            assert without_tensors(call) == options(config, where, choice, fresh=idx == 0)

    def test_bits_of_a_site_change_neither_state_nor_choice(self, calls):
        config = LOCAL.replace(bits=8)
        rank, x = make_rank(config), values()
        for idx, bits in enumerate((8, 4, 8)):
            rank.all_reduce(x, site(idx, bits=bits), out=x)
        assert [call["bits"] for call in calls] == [8, 4, 8]
        assert [call["fresh"] for call in calls] == [True, False, False]
        assert len({(id(call["state"]), call["algorithm"], call["num_blocks"]) for call in calls}) == 1

    def test_directions_have_their_own_choice_and_state(self, calls):
        rank, x = make_rank(LOCAL), values()
        for direction in (FORWARD, BACKWARD, FORWARD, BACKWARD):
            rank.all_reduce(x, site(1, direction), out=x)
        assert [call["num_blocks"] for call in calls] == [NUM_BLOCKS, 8, NUM_BLOCKS, 8]
        assert [call["fresh"] for call in calls] == [True, True, False, False]
        assert [call["site"][1] for call in calls] == [0, 1, 0, 1]
        assert calls[0]["state"] is calls[2]["state"] and calls[1]["state"] is calls[3]["state"]
        assert calls[0]["state"] is not calls[1]["state"]

    def test_directions_have_the_coefficients_of_their_residual(self, calls):
        config = LOCAL.replace(backward_residual=Residual.consensus, bits=8)
        rank, x = make_rank(config), values()
        sites = [site(idx, direction, bits=8) for idx in range(2) for direction in Direction]
        for where in sites:
            rank.all_reduce(x, where)
        sums = [call for call in calls if call.name == "all_reduce"]
        choices = {FORWARD: Choice(Algorithm.two_shot, NUM_BLOCKS, 3), BACKWARD: Choice(Algorithm.one_shot, 8, 1)}
        for call, where in zip(sums, sites, strict=True):
            assert without_tensors(call) == options(config, where, choices[where.direction], fresh=where.idx == 0)
        assert {tuple(call["coefficients"]) for call in sums[::2]} == {(0.0, 0.0, 1.0, 0.0, 1.0)}
        updates = [call for call in calls if call.name == "consensus_update"]
        assert len(updates) == 2, "of the backward calls"
        for call in updates:
            assert call["coefficients"] == Compensator(EchoConfig(residual=Residual.consensus)).coefficients
            assert call["state_dtype"] == index_of(StateDtype.bf16)

    def test_a_plan_serves_one_dtype(self, calls):
        """The records are smaller than the sum in fp32 only."""
        config = NONE.replace(algorithm=Algorithm.one_shot, bits=8)
        rank = make_rank(config)
        kept = []
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            reduced = rank.all_reduce(values(dtype=dtype), site(bits=8), keep=True)
            assert (reduced.codes is reduced.output) is (calls[-1]["codes"] is None)
            kept.append(reduced.codes.numel())
        assert kept == [200_000, sizes(config, 200_000, Algorithm.one_shot, bits=8)[1], 200_000]

    def test_a_plan_is_with_or_without_compensation(self, calls):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(1))
        rank.transport.all_reduce(x, site(2), None)
        rank.all_reduce(x, site(3))
        assert [call["state"] is None for call in calls] == [False, True, False]
        assert [call["coefficients"] == [0.0] * 5 for call in calls] == [False, True, False]
        assert [call["fresh"] for call in calls] == [True, True, False]

    def test_another_table_takes_effect(self, calls):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(0), out=x)
        rank.transport.table = Table.always(Choice(Algorithm.one_shot, 5, 1))
        rank.all_reduce(x, site(1), out=x)
        assert (calls[1]["num_blocks"], calls[1]["depth"]) == (5, 1)
        assert calls[1]["algorithm"] == index_of(Algorithm.one_shot) and calls[1]["fresh"], "the state's layout changed"

    def test_plans_are_bounded(self, calls, monkeypatch):
        monkeypatch.setattr(p2p, "_MAX_PLANS", 3)
        rank = make_rank(NONE)
        for num_values in (*range(1, 9), 1):
            rank.all_reduce(values(num_values), site())
            assert len(rank.transport._plans) <= 3
        assert [call["x"].numel() for call in calls] == [*range(1, 9), 1]


class TestPasses:
    def test_a_reset_starts_a_pass_in_the_same_buffer(self, calls):
        rank, x = make_rank(LOCAL), values()
        for idx in (0, 1, 0, 1):
            if idx == 0:
                rank.compensators[FORWARD].reset()
            rank.all_reduce(x, site(idx), out=x)
        assert [call["fresh"] for call in calls] == [True, False, True, False]
        assert len({id(call["state"]) for call in calls}) == 1

    def test_another_shape_within_a_pass_starts_anew(self, calls):
        rank = make_rank(LOCAL)
        for idx, num_values in enumerate((200_000, 200_000, 100_000, 100_000, 200_000)):
            rank.all_reduce(values(num_values), site(idx))
        assert [call["fresh"] for call in calls] == [True, False, True, False, True]
        assert calls[0]["state"] is calls[1]["state"] and calls[2]["state"] is calls[3]["state"]
        for call in calls:
            algorithm = list(Algorithm)[call["algorithm"]]
            assert call["state"].numel() == sizes(LOCAL, call["x"].numel(), algorithm)[0]

    def test_the_layout_counts_values_of_the_basis(self, calls):
        """Rotated values come in whole blocks of 32: the state of one length serves the other."""
        rank = make_rank(LOCAL)
        for idx, num_values in enumerate((199_970, 199_969, 199_900)):
            rank.all_reduce(values(num_values), site(idx))
        assert [call["fresh"] for call in calls] == [True, False, True]

    def test_a_failed_launch_leaves_the_pass_fresh(self, calls, monkeypatch):
        rank, x = make_rank(LOCAL), values()

        def fail(*_, **__):
            raise RuntimeError("CUDA error at launch")

        with monkeypatch.context() as broken:
            broken.setattr(rank.transport, "_all_reduce_", fail)
            with pytest.raises(RuntimeError, match="at launch"):
                rank.all_reduce(x, site(0), out=x)
        rank.all_reduce(x, site(1), out=x)
        assert [call["fresh"] for call in calls] == [True]


class TestOutputs:
    def test_another_tensor(self, calls):
        rank, x, out = make_rank(LOCAL), values(), torch.zeros(200_000, dtype=torch.bfloat16)
        assert rank.all_reduce(x, site(), out=out).output is out
        assert calls[0].name == "all_reduce" and calls[0]["y"] is not out and (out == SUM).all() and (x == 1).all()

    def test_another_tensor_of_the_same_memory(self, calls):
        rank, x = make_rank(LOCAL), values()
        out = x.view(x.shape)
        assert rank.all_reduce(x, site(), out=out).output is out
        assert calls[0].name == "all_reduce_" and calls[0]["x"] is x

    @pytest.mark.parametrize("exact", [False, True])
    def test_strided_in_place(self, calls, exact):
        rank, x = make_rank(LOCAL), torch.ones(500, 400, dtype=torch.bfloat16).t()
        if exact:
            assert rank.transport.exact_all_reduce(x, site(), out=x) is x
        else:
            assert rank.all_reduce(x, site(), out=x).output is x
        assert calls[0].name == ("exact_all_reduce" if exact else "all_reduce")
        assert calls[0]["x"].is_contiguous() and calls[0]["x"].shape == x.shape and calls[0]["y"].is_contiguous()
        assert (x == SUM).all() and x.stride() == (1, 400)

    def test_new_output_of_a_strided_input_is_contiguous(self, calls):
        reduced = make_rank(LOCAL).all_reduce(torch.ones(500, 400, dtype=torch.bfloat16).t(), site())
        assert reduced.output.is_contiguous() and reduced.output.shape == (400, 500)


class TestCodes:
    def test_kept_codes_are_decoded_with_the_call_s_options(self, calls):
        config = LOCAL.replace(algorithm=Algorithm.two_shot)
        rank, x = make_rank(config), values(dtype=torch.float32).view(100, -1)
        reduced = rank.all_reduce(x, site(), out=x, keep=True)
        _, num_bytes = sizes(config, x.numel(), Algorithm.two_shot)
        assert calls[0]["codes"] is reduced.codes and reduced.codes.numel() == num_bytes and calls[0]["kept_x"] is None
        restored = reduced.restore(reduced.codes)
        assert restored.shape == x.shape and restored.dtype == x.dtype and (restored == SUM).all()
        decode = calls[1]
        assert decode.name == "decode" and decode["codes"] is reduced.codes and decode["y"] is restored
        left = {name: value for name, value in decode.arguments.items() if name not in ("codes", "y")}
        assert left == {
            "world_size": len(PEERS),
            "bits": 4,
            "policy": index_of(config.policy),
            "group_size": config.group_size,
            "algorithm": index_of(Algorithm.two_shot),
        }

    def test_every_call_keeps_its_own(self, calls):
        rank, x = make_rank(LOCAL), values(dtype=torch.float32)
        first, second = (rank.all_reduce(x, site(idx), keep=True) for idx in range(2))
        assert first.codes is not second.codes and first.codes.data_ptr() != second.codes.data_ptr()

    def test_a_sum_smaller_than_its_records_is_kept_itself(self, calls):
        reduced = make_rank(LOCAL).all_reduce(values(10), site(), keep=True)
        assert calls[0]["codes"] is None
        assert reduced.codes is reduced.output and reduced.restore(reduced.codes) is reduced.output


class TestConsensus:
    def test_in_place_keeps_x_for_the_update(self, calls):
        rank, x = make_rank(CONSENSUS), values().view(50, -1)
        for idx in range(2):
            rank.all_reduce(x, site(idx), out=x)
        assert [call.name for call in calls] == ["all_reduce_", "consensus_update"] * 2
        for reduce, update, fresh in zip(calls[::2], calls[1::2], (True, False), strict=True):
            kept = reduce["kept_x"]
            assert kept.numel() == x.numel() and kept.dtype == x.dtype and kept.is_contiguous()
            assert update["x"] is kept and update["codes"] is reduce["codes"] and update["state"] is reduce["state"]
            _, num_bytes = sizes(CONSENSUS, x.numel(), Algorithm.two_shot)
            assert reduce["codes"].numel() == num_bytes
            left = {name: value for name, value in update.arguments.items() if name not in ("x", "codes", "state")}
            assert left == {
                "world_size": len(PEERS),
                "bits": 4,
                "policy": index_of(CONSENSUS.policy),
                "group_size": CONSENSUS.group_size,
                "algorithm": index_of(Algorithm.two_shot),
                "state_dtype": index_of(CONSENSUS.state_dtype_of(FORWARD)),
                "fresh": fresh,
                "coefficients": Compensator(CONSENSUS).coefficients,
            }
        assert calls[0]["kept_x"].data_ptr() == calls[2]["kept_x"].data_ptr(), "one buffer a direction"
        assert calls[0]["codes"] is calls[2]["codes"]

    def test_out_of_place_reads_x_itself(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site())
        assert calls[0]["kept_x"] is None and calls[1]["x"] is x

    def test_kept_x_follows_size_and_dtype(self, calls):
        rank = make_rank(CONSENSUS)
        shapes = [(1000, torch.bfloat16), (1000, torch.float32), (500, torch.float32), (1000, torch.bfloat16)]
        for idx, (num_values, dtype) in enumerate(shapes):
            x = values(num_values, dtype)
            rank.all_reduce(x, site(idx), out=x)
        assert [(call["kept_x"].numel(), call["kept_x"].dtype) for call in calls[::2]] == shapes
        assert len({call["kept_x"].data_ptr() for call in calls[2::2]}) == 1, "a buffer large enough serves"

    def test_directions_have_their_own_buffers(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        for direction in Direction:
            rank.all_reduce(x, site(direction=direction), out=x)
        forward, backward = calls[::2]
        assert forward["kept_x"].data_ptr() != backward["kept_x"].data_ptr()
        assert forward["codes"] is not backward["codes"]
        kept = sum(call[name].nbytes for call in (forward, backward) for name in ("codes", "kept_x"))
        assert rank.transport.num_bytes() == 64 + kept

    def test_kept_codes_serve_the_update_too(self, calls):
        rank, x = make_rank(CONSENSUS), values(dtype=torch.float32)
        first, second = (rank.all_reduce(x, site(idx), keep=True) for idx in range(2))
        assert calls[0]["codes"] is first.codes and calls[1]["codes"] is first.codes
        assert calls[3]["codes"] is second.codes and second.codes is not first.codes

    def test_the_update_runs_beside_and_the_next_call_waits(self, calls, cuda):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(0), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0] == ("all_reduce_", "main") and waits[2] == ("consensus_update", "side1")
        assert waits[1][:2] == ("wait", "side1") and waits[1][2].startswith("main at")
        LOG.clear()
        rank.all_reduce(x, site(0, BACKWARD), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0] == ("all_reduce_", "main"), "the other direction's update is not waited for"
        LOG.clear()
        rank.all_reduce(x, site(1), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0][:2] == ("wait", "main") and waits[0][2].startswith("side1 at")
        assert waits[1] == ("all_reduce_", "main") and cuda.num_created == 2, "a stream a direction"

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("keep", [False, True])
    def test_memory_that_the_update_reads_is_not_used_anew(self, calls, keep, in_place):
        rank = make_rank(CONSENSUS)
        for idx in range(2):
            x = values(dtype=torch.float32)
            LOG.clear()
            rank.all_reduce(x, site(idx), out=x if in_place else None, keep=keep)
            recorded = {entry[1] for entry in LOG if entry[0] == "record"}
            read = {name for name in ("x", "codes", "state") if calls[-1][name].data_ptr() in recorded}
            buffers = ({"x"} if in_place else set()) | (set() if keep else {"codes"})
            # The allocator knows of buffers that stay from when they were allocated.
            assert read == {"x", "codes", "state"} - (buffers if idx else set())

    def test_in_a_graph_the_update_follows_on_the_call_s_stream(self, calls, cuda):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(0), out=x)
        cuda.capturing = True
        LOG.clear()
        for idx in range(2):
            rank.all_reduce(x, site(idx), out=x)
        assert LOG == [("all_reduce_", "main"), ("consensus_update", "main")] * 2
        cuda.capturing = False
        LOG.clear()
        rank.all_reduce(x, site(2), out=x)
        assert LOG[0] == ("all_reduce_", "main"), "there is no update beside to wait for"

    def test_training_after_inference(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        with torch.inference_mode():
            rank.all_reduce(x, site(0), out=x)
        rank.all_reduce(x, site(1), out=x)
        assert not any(calls[0][name].is_inference() for name in ("codes", "kept_x", "state"))
        calls[2]["kept_x"].fill_(0)


class TestShares:
    """Sequence parallelism's reduce-scatter and all-gather."""

    @pytest.mark.parametrize("config", [LOCAL, NONE, LOCAL.replace(bits=8, **AVERAGES)])
    def test_reduce_scatter(self, calls, config):
        rank, x = make_rank(config), values(300_000).view(-1, 8)
        sites = [site(idx, bits=bits, chunk=2) for idx, bits in enumerate((config.bits, 8, 4))]
        compensator = rank.compensators[FORWARD] if config.compensates else None
        for where in sites:
            output = rank.transport.reduce_scatter(x, where, compensator)
            assert output.shape == (12_500, 8) and output.dtype == x.dtype and (output == SUM).all()
        tile_bytes = torch.ops.echo_megatron.state_tile_bytes(index_of(config.state_dtype_of(FORWARD)))
        for idx, (call, where) in enumerate(zip(calls, sites, strict=True)):
            assert call.name == "reduce_scatter" and call["x"] is x
            assert call["state"] is calls[0]["state"]
            if config.compensates:
                assert call["state"].numel() == 2 * 25 * tile_bytes, "two shares of other ranks of 100,000 values each"
            expected = options(config, where, Choice(Algorithm.two_shot, NUM_BLOCKS, 3), idx == 0 or config is NONE)
            del expected["algorithm"]
            assert without_tensors(call) == expected

    @pytest.mark.parametrize("bits", [4, 8])
    def test_all_gather(self, calls, bits):
        rank, x = make_rank(LOCAL), values(100_000).view(-1, 8)
        for idx in range(2):
            output = rank.transport.all_gather(x, site(idx, bits=bits))
            assert output.shape == (37_500, 8) and (output == SUM).all()
        expected = options(LOCAL, site(1, bits=bits), Choice(Algorithm.two_shot, NUM_BLOCKS, 3), fresh=True)
        for name in ("algorithm", "residual", "state_dtype", "fresh", "coefficients"):
            del expected[name]
        assert calls[1].name == "all_gather" and calls[1]["x"] is x and without_tensors(calls[1]) == expected
        assert rank.compensators[FORWARD].is_fresh, "nothing is fed back"

    def test_a_given_output_is_written_in_place_and_a_strided_input_is_copied(self, calls):
        rank, x = make_rank(NONE), torch.ones(300, 400, dtype=torch.bfloat16)
        share, whole = x.new_zeros(100, 400), x.new_zeros(900, 400)
        assert rank.transport.reduce_scatter(x, site(), None, share) is share and calls[0]["y"] is share
        assert rank.transport.all_gather(x, site(), whole) is whole and calls[1]["y"] is whole
        rank.transport.reduce_scatter(torch.ones(400, 300, dtype=torch.bfloat16).t(), site(), None)
        rank.transport.all_gather(torch.ones(400, 300, dtype=torch.bfloat16).t(), site())
        assert calls[2]["x"].is_contiguous() and calls[2]["y"].shape == (100, 400)
        assert calls[3]["x"].is_contiguous() and calls[3]["y"].shape == (900, 400)

    def test_the_larger_tensor_decides_how_a_call_runs(self, calls):
        rank = make_rank(NONE)
        small, large = Choice(Algorithm.one_shot, 16, 2), Choice(Algorithm.two_shot, NUM_BLOCKS, 3)
        for num_values, scattered, gathered in ((120_000, small, large), (30_000, small, small)):
            calls.clear()
            rank.transport.reduce_scatter(values(num_values), site(), None)
            rank.transport.all_gather(values(num_values), site())
            for call, choice in zip(calls, (scattered, gathered), strict=True):
                assert (call["num_blocks"], call["depth"]) == (choice.num_blocks, choice.depth)

    def test_a_reduce_scatter_and_an_all_reduce_do_not_share_a_pass(self, calls):
        """Of one working basis: their states are laid out differently."""
        rank, x = make_rank(LOCAL.replace(algorithm=Algorithm.two_shot)), values(300_000)
        compensator = rank.compensators[FORWARD]
        rank.transport.reduce_scatter(x, site(0), compensator)
        rank.transport.reduce_scatter(x, site(1), compensator)
        rank.transport.all_gather(x, site(1))
        rank.all_reduce(values(100_000), site(2))
        rank.transport.reduce_scatter(x, site(3), compensator)
        assert [call["fresh"] for call in calls if call.name != "all_gather"] == [True, False, True, True]

    def test_bits_that_the_workspace_has_no_room_for_are_named(self, calls, monkeypatch):
        transport = make_transport(NONE.replace(gather_bits=16))
        monkeypatch.setitem(transport._memory, "slot_bytes", 2500)
        with pytest.raises(
            ValueError, match=r"all_gather, forward site 3.* gather_bits 16\), got 8; set gather_bits=8"
        ):
            transport.all_gather(values(), site(3, bits=8))
        assert not calls

    def test_sent_bytes(self, calls):
        rank, x = make_rank(LOCAL), values(300_000)
        quantizer = {bits: make_quantizer(LOCAL, bits) for bits in (4, 8)}
        scattered = 2 * quantizer[4].num_bytes(100_000)
        gathered = 2 * quantizer[8].num_bytes(300_000)
        assert rank.transport.num_sent_bytes(x, site(), Collective.reduce_scatter) == scattered
        assert rank.transport.num_sent_bytes(x, site(bits=8), Collective.all_gather) == gathered
        rank.transport.reduce_scatter(x, site(), rank.compensators[FORWARD])
        rank.transport.all_gather(x, site(bits=8))
        assert rank.transport.take_sent_bytes() == scattered + gathered

    def test_correction_of_a_reduce_scatter_by_share(self, calls):
        """Zeros for the rank's own share, of which it rounds nothing; each share to the end of its last block."""
        rank, x = make_rank(LOCAL.replace(state_dtype=StateDtype.bf16)), values(3 * 100_001)
        compensator, kind = rank.compensators[FORWARD], Collective.reduce_scatter
        assert rank.transport.correction(x, site(0), compensator, kind) is None
        rank.transport.reduce_scatter(x, site(0), compensator)
        calls[0]["state"].view(2, -1).view(torch.bfloat16).copy_(torch.tensor([[1.5], [2.5]]))
        correction = rank.transport.correction(x, site(1), compensator, kind)
        assert correction.shape == (3, 100_032) and correction.dtype is torch.float32
        assert correction[0].eq(1.5).all() and correction[RANK].eq(0).all() and correction[2].eq(2.5).all()
        assert rank.transport.correction(values(300), site(1), compensator, kind) is None, "another size begins a pass"
        assert rank.transport.correction(x, site(1), compensator) is None, "so does an all-reduce"

    def test_plans_are_bounded_and_of_one_table(self, calls, monkeypatch):
        monkeypatch.setattr(p2p, "_MAX_PLANS", 3)
        rank = make_rank(NONE)
        for num_values in (*range(3, 30, 3), 3):
            rank.transport.reduce_scatter(values(num_values), site(), None)
            rank.transport.all_gather(values(num_values), site())
            assert len(rank.transport._share_plans) <= 3
        rank.transport.table = Table.always(Choice(Algorithm.one_shot, 5, 1))
        rank.transport.all_gather(values(3), site())
        assert (calls[-1]["num_blocks"], calls[-1]["depth"]) == (5, 1)


class TestCorrection:
    """What the next call adds, for diagnostics."""

    @pytest.mark.parametrize(
        "config", [LOCAL.replace(state_dtype=StateDtype.bf16), CONSENSUS], ids=["local", "consensus"]
    )
    def test_it_is_read_behind_what_writes_it_and_where_the_next_call_reads(self, calls, config):
        rank, x = make_rank(config), values(100_001)
        compensator = rank.compensators[FORWARD]
        assert rank.transport.correction(x, site(0), compensator) is None, "nothing is added at the first site"
        rank.all_reduce(x, site(0), out=x)
        calls[0]["state"].view(torch.bfloat16).fill_(2.5)
        LOG.clear()
        STREAMS[:] = ["other"]
        correction = rank.transport.correction(x, site(1), compensator)
        assert correction.dtype is torch.float32 and correction.shape == (100_032,) and correction.eq(2.5).all()
        assert LOG[0] == ("wait", "other", "main")
        assert [entry[2][:8] for entry in LOG[1:]] == (["side1 at"] if config is CONSENSUS else [])
        assert rank.transport.correction(values(1000), site(1), compensator) is None, "another size begins a pass"
        assert rank.compensators[BACKWARD].is_fresh and not compensator.is_fresh, "asking changes nothing"
        rank.all_reduce(x, site(1), out=x)
        assert not [call for call in calls if call.name == "all_reduce_"][1]["fresh"]
        compensator.reset()
        assert rank.transport.correction(x, site(1), compensator) is None

    def test_bytes_are_those_that_the_call_counts(self, calls):
        rank, x = make_rank(LOCAL), values()
        expected = rank.transport.num_sent_bytes(x, site(0))
        rank.all_reduce(x, site(0), out=x)
        assert rank.transport.take_sent_bytes() == expected > 0


class TestStreams:
    def test_calls_run_in_their_order_whatever_their_streams(self, calls):
        rank, x = make_rank(LOCAL), values()
        for idx, name in enumerate(("main", "main", "other", "other", "main")):
            STREAMS[:] = [name]
            if idx == 3:
                rank.transport.exact_all_reduce(x, site(idx), out=x)
            else:
                rank.all_reduce(x, site(idx), out=x)
        assert LOG == [
            ("all_reduce_", "main"),
            ("all_reduce_", "main"),
            ("wait", "other", "main"),
            ("all_reduce_", "other"),
            ("exact_all_reduce_", "other"),
            ("wait", "main", "other"),
            ("all_reduce_", "main"),
        ]

    def test_a_capture_does_not_wait_for_what_is_outside(self, calls, cuda):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(0), out=x)
        STREAMS[:], cuda.capturing = ["capture"], True
        rank.all_reduce(x, site(1), out=x)
        assert [entry for entry in LOG if entry[0] == "wait"] == []


class TestExact:
    def check(self, call: Call, name: str, x: Tensor) -> None:
        assert call.name == name and call["x"] is x
        assert without_tensors(call) == {
            "rank": RANK,
            "site": [4, 1, 0],
            "num_blocks": NUM_BLOCKS,
            "num_teams": NUM_BLOCKS * TEAMS_A_BLOCK,
            "ring": RING,
            "slot_bytes": SLOT_BYTES,
            "timeout_s": TIMEOUT_S,
        }

    def test_in_place(self, calls):
        transport, x = make_transport(LOCAL), values(100)
        assert transport.exact_all_reduce(x, site(4, BACKWARD), out=x) is x
        (call,) = calls
        self.check(call, "exact_all_reduce_", x)

    @pytest.mark.parametrize("has_out", [False, True])
    def test_out_of_place(self, calls, has_out):
        transport, x = make_transport(LOCAL), values(100)
        out = torch.zeros_like(x) if has_out else None
        y = transport.exact_all_reduce(x, site(4, BACKWARD), out=out)
        (call,) = calls
        self.check(call, "exact_all_reduce", x)
        assert (y is out) if has_out else (y is call["y"])
        assert (y == SUM).all() and (x == 1).all()


class TestSentBytes:
    """P = 3, rank 1."""

    @pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
    @pytest.mark.parametrize("num_values", [1, 40, 199_969])
    @pytest.mark.parametrize("policy", [Policy.rotated, Policy.zero_aware])
    def test_records_to_others_are_counted_once(self, calls, policy, num_values, algorithm):
        config = NONE.replace(algorithm=algorithm, policy=policy)
        rank, quantizer = make_rank(config), make_quantizer(config, 8)
        for idx in range(2):
            rank.all_reduce(values(num_values), site(idx, bits=8))
        records = quantizer.num_basis_values(num_values)
        if algorithm is Algorithm.one_shot:
            expected = 2 * quantizer.num_bytes(records)
        else:
            first, own, last = (quantizer.num_bytes(Segments.split(records, 3, 32).size(r)) for r in range(3))
            expected = first + last + 2 * own
        assert rank.transport.take_sent_bytes() == 2 * expected
        assert rank.transport.take_sent_bytes() == 0

    def test_exact_sums_send_the_values(self, calls):
        transport = make_transport(LOCAL)
        transport.exact_all_reduce(values(100), site())
        transport.exact_all_reduce(values(100, torch.float32), site())
        assert transport.take_sent_bytes() == 2 * 200 + 2 * 400


class TestErrors:
    def fail(self, transport: P2PTransport, code: int, *fields: int) -> None:
        transport.workspace.failure[: 1 + len(fields)] = torch.tensor([code, *fields])

    @pytest.mark.parametrize(
        ("code", "text"),
        [
            (
                1,
                r"rank 1 of 3: forward site 2 of chunk 0 \(layer\), phase gather, tile 9: waited 4\.5 s \(timeout_s\) "
                r"for rank 2: expected epoch 17, seen 16\. The rank died, hangs, or makes fewer calls\. The outputs of "
                r"this call are NaN; create a new communicator to go on",
            ),
            (
                2,
                r"rank 2 makes another call: expected call 0x0011, got 0x0010\. The ranks must agree on collective",
            ),
            (3, r"forward site 2 .*: rank 2 gave up; see its error"),
        ],
    )
    def test_a_failure_record_is_raised_by_check_and_by_the_next_call(self, calls, code, text):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(2), out=x)
        rank.transport.check()
        self.fail(rank.transport, code, 2, 1, 9, 17, 16, 2, 0, 0)
        with pytest.raises(CommunicationError, match=text):
            rank.transport.check()
        with pytest.raises(CommunicationError, match=text):
            rank.all_reduce(x, site(3), out=x)
        with pytest.raises(CommunicationError, match=text):
            rank.transport.exact_all_reduce(x, site(3), out=x)
        assert len(calls) == 1, "nothing is launched behind a failure"

    def test_a_destroyed_communicator_says_so(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(2), out=x)
        rank.transport.destroy()
        rank.transport.workspace.peers = []  # as a SymmetricWorkspace leaves it
        for call in (rank.all_reduce, rank.transport.exact_all_reduce):
            with pytest.raises(CommunicationError, match=r"forward site 3 .*: this communicator was destroyed; create"):
                call(x, site(3), out=x)
        assert len(calls) == 2 and rank.transport.num_bytes() == 64

    def test_a_tensor_elsewhere_is_refused(self, calls):
        with pytest.raises(ValueError, match="expected a tensor on cpu, this communicator's GPU, got meta"):
            make_rank(LOCAL).all_reduce(torch.ones(8, dtype=torch.bfloat16, device="meta"), site())
        assert not calls


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


@pytest.fixture
def communicate(monkeypatch, calls):
    """Makes a communicator over the stand-ins."""
    monkeypatch.setattr(
        communicator_module, "_make_transport", lambda group, config: (make_transport(config), "for the test")
    )
    return lambda config, **options: Communicator(Group(), config, **options)


class TestCommunicator:
    @pytest.mark.parametrize("config", [LOCAL, CONSENSUS], ids=["local", "consensus"])
    def test_the_first_call_of_a_pass_is_fresh(self, communicate, calls, config):
        communicator, x = communicate(config), values()
        order = [(0, FORWARD), (1, FORWARD), (0, BACKWARD), (2, FORWARD), (1, BACKWARD), (0, FORWARD), (1, FORWARD)]
        for idx, direction in order:
            assert communicator.all_reduce(x, site(idx, direction), out=x) is x
        reduces = [call for call in calls if call.name == "all_reduce_"]
        assert [call["fresh"] for call in reduces] == [True, False, True, False, False, True, False]
        communicator.reset()
        communicator.all_reduce(x, site(2), out=x)
        assert [call for call in calls if call.name == "all_reduce_"][-1]["fresh"]

    def test_a_recomputed_site_is_decoded_inside_the_backward_pass(self, communicate, calls, monkeypatch):
        communicator, x = communicate(LOCAL, is_recomputed=lambda: True), values(dtype=torch.float32)
        communicator.all_reduce(x, site(0), out=x)
        communicator.all_reduce(x, site(0, BACKWARD), out=x)
        assert calls[0]["codes"] is not None and calls[1]["codes"] is None
        monkeypatch.setattr(communicator_module, "inside_backward", lambda: True)
        out = torch.zeros_like(x)
        assert communicator.all_reduce(x, site(0), out=out) is out and (out == SUM).all()
        assert [call.name for call in calls] == ["all_reduce_", "all_reduce_", "decode"]
        assert calls[2]["codes"] is calls[0]["codes"]

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("grad", [False, True])
    def test_no_call_is_recorded_for_autograd(self, communicate, grad, exact):
        communicator, x = communicate(LOCAL), values().requires_grad_()
        call = communicator.exact_all_reduce if exact else communicator.all_reduce
        with torch.set_grad_enabled(grad):
            y = call(x, site(0))
            assert not y.requires_grad and torch.is_grad_enabled() is grad
            assert call(x, site(1), out=x) is x, "a leaf, in place"

    def test_exact_sums(self, communicate, calls):
        communicator, x = communicate(LOCAL), values(100)
        assert communicator.exact_all_reduce(x, site(3), out=x) is x
        assert [call.name for call in calls] == ["exact_all_reduce_"]
        with pytest.raises(ValueError, match=r"expected a tensor of bfloat16, float16 or float32, got torch\.int32"):
            communicator.exact_all_reduce(x.int(), site(3))
        empty = torch.ones(0, 8)
        assert communicator.exact_all_reduce(empty, site(3)).shape == (0, 8) and len(calls) == 1


@pytest.fixture
def group(communicate, monkeypatch):
    """A site's process group; messages under 2,048 bytes are not quantized."""
    communicator = communicate(LOCAL.replace(min_bytes=2048))
    world = distributed_c10d._world
    monkeypatch.setitem(world.pg_map, communicator.group, ("fake", None))
    monkeypatch.setitem(world.pg_group_ranks, communicator.group, {})
    group = EchoProcessGroup(communicator, site(6), 64, lambda: True)
    yield group
    group.close()


class TestProcessGroup:
    def test_the_site_s_sum_is_quantized(self, group, calls):
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        tensors = [x]
        work = group.allreduce(tensors)
        assert [call.name for call in calls] == ["all_reduce_"] and calls[0]["x"] is x
        assert calls[0]["site"] == [6, 0, 0] and (x == SUM).all() and not group.real_group.calls
        assert work.wait() and work.is_completed() and work.is_success() and work.result() == tensors
        assert work.get_future().wait() == tensors

    @pytest.mark.parametrize("sums_exactly", [False, True])
    def test_a_small_sum_is_exact_where_that_is_as_fast(self, group, calls, monkeypatch, sums_exactly):
        monkeypatch.setattr(group.communicator, "sums_exactly", lambda x: sums_exactly)
        x = torch.ones(15, 64, dtype=torch.bfloat16)
        assert group.takes(x, dist.ReduceOp.SUM) is sums_exactly
        work = group.allreduce([x])
        assert [call.name for call in calls] == ["exact_all_reduce_"] * sums_exactly
        assert (work == "native") is not sums_exactly and len(group.real_group.calls) == (not sums_exactly)

    def test_other_sums_are_the_real_group_s(self, group, calls):
        opts = dist.AllreduceOptions()
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        others = [[x, x], [x.view(64, 16)], [x.view(-1)], [x.int()], [x[:0]]]
        for tensors in others:
            assert group.allreduce(tensors, opts) == "native"
        opts.reduceOp = dist.ReduceOp.MAX
        assert group.allreduce([x], opts) == "native"
        assert not calls and len(group.real_group.calls) == len(others) + 1

    def test_nothing_is_taken_in_a_phase_that_is_not_quantized(self, group, calls):
        group._is_active = lambda: False
        assert group.allreduce([torch.ones(16, 64, dtype=torch.bfloat16)]) == "native" and not calls

    def test_an_error_of_the_call_is_raised(self, group, calls):
        group.communicator.transport.workspace.failure[:4] = torch.tensor([3, 2, 0, 0])
        with pytest.raises(CommunicationError, match="rank 2 gave up"):
            group.allreduce([torch.ones(16, 64, dtype=torch.bfloat16)])


def test_the_numbers_of_a_site():
    assert Site(3, BACKWARD, "name", 8, 2).numbers == (3, 1, 2)
    assert math.prod(Site(1, FORWARD).numbers) == 0
    used, new = Site(3, BACKWARD), Site(3, BACKWARD)
    assert used.numbers and used == new and hash(used) == hash(new)
