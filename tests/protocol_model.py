"""What ranks do in calls of the p2p kernels, step by step: the programs that test_protocol.py and test_fuzz.py run.

Slot indices, flags, tile numbers, rings and the split into segments are the code's own: cuda/layout.cuh, compiled for
the host. The order of a team's steps is that of Team::run (cuda/team.cuh).
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda"
PUSH, GATHER = 0, 1  # layout.cuh: Stage
NUMBERS = 2**32
Collective = Literal["one_shot", "two_shot", "reduce_scatter", "all_gather"]  # layout.cuh: Algorithm, from 1
ALGORITHMS: tuple[Collective, ...] = ("one_shot", "two_shot", "reduce_scatter", "all_gather")
Mutation = Literal[
    "no wait for pushes",  # wait_ready(Stage::push, …) of Team::run left out
    "no wait for sums",  # wait_ready(Stage::gather, …) left out
    "flag before record",  # release before store: as if the send warp had no fence, or did not wait for all warps
    "later flags count",  # run_receive_warp: seen >= expected, unsigned, in place of ==
    "numbers restart",  # the epoch word is not written at the end of Team::run
    "numbers of own rows",  # it is advanced by the rows of the rank's own segment, not by num_rows
    "events without wait",  # release() does not wait until the send warp has read an event's place
]


class Layout:
    """cuda/layout.cuh, compiled by `compiler` into `folder`."""

    def __init__(self, compiler: str, folder: Path) -> None:
        target = folder / "protocol_layout.so"
        source = ROOT / "tests" / "cuda_host" / "protocol_layout.cpp"
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CUDA}", str(source), "-o", str(target)]
        subprocess.run(command, check=True, timeout=120)
        self._library = ctypes.CDLL(str(target))
        self._library.protocol_slot.restype = ctypes.c_int64
        self._library.protocol_tiles.restype = ctypes.c_int64
        self._library.protocol_flag.restype = ctypes.c_uint64
        self._library.protocol_flag_value.restype = ctypes.c_uint32
        self._library.protocol_flag_epoch.restype = ctypes.c_uint32
        self.max_ring, self.max_events = constant("kMaxRing"), constant("kMaxEvents")

    def ring_for(self, depth: int) -> int:
        return int(self._library.protocol_ring_for(depth))

    def slot(self, world: int, ring: int, stage: int, receiver: int, source: int, number: int) -> int:
        """Of the receiver's workspace."""
        return int(self._library.protocol_slot(world, ring, stage, receiver, source, ctypes.c_uint32(number)))

    def place(
        self, world: int, num_teams: int, ring: int, slot_bytes: int, stage: int, receiver: int, source: int, team: int,
        number: int,
    ) -> tuple[int, int, int, int]:  # fmt: skip
        """Offsets in the receiver's workspace of a slot, its flag and the team's epoch; bytes of the workspace."""
        out = (ctypes.c_int64 * 4)()
        slot = (stage, receiver, source, team, ctypes.c_uint32(number))
        self._library.protocol_place(world, num_teams, ring, ctypes.c_int64(slot_bytes), *slot, out)
        return out[0], out[1], out[2], out[3]

    def flag(self, number: int, exponent: int, signature: int) -> int:
        return int(self._library.protocol_flag(ctypes.c_uint32(number), exponent, ctypes.c_uint32(signature)))

    def flag_value(self, number: int) -> int:
        return int(self._library.protocol_flag_value(ctypes.c_uint32(number)))

    def flag_epoch(self, flag: int) -> int:
        return int(self._library.protocol_flag_epoch(ctypes.c_uint64(flag)))

    def flag_is_of(self, flag: int, number: int) -> bool:
        return bool(self._library.protocol_flag_is_of(ctypes.c_uint64(flag), ctypes.c_uint32(number)))

    def tiles(self, num_values: int, world: int, collective: Collective, rank: int | None = None) -> int:
        """Of a rank's segment, or the most of any."""
        algorithm = ALGORITHMS.index(collective) + 1
        arguments = (world, 128, algorithm, -1 if rank is None else rank)
        return int(self._library.protocol_tiles(ctypes.c_int64(num_values), *arguments))


def constant(name: str) -> int:
    """A constant of team_plan.cuh, which only nvcc compiles."""
    found = re.search(rf"constexpr int {name} = (\d+);", (CUDA / "team_plan.cuh").read_text())
    assert found is not None, f"cuda/team_plan.cuh has no constant {name}"
    return int(found[1])


class Call(NamedTuple):
    """A call of one team on all tiles; num_values is of the tensor, or of one share (layout.cuh: Segments).

    An exact call (exact.cu) is a one-shot of depth 1 whose sender sets its own flags: fewer interleavings of the same.
    """

    collective: Collective
    num_values: int
    depth: int = 1


class Op(NamedTuple):
    """A step of a team. `place`: of a wait the lane's count of received records, of an end the call."""

    kind: Literal["wait", "take", "store", "release", "end"]
    stage: int = 0
    peers: tuple[int, ...] = ()
    number: int = 0
    place: int = 0


@dataclass
class Program:
    """What one rank does, and where in it things happen."""

    ops: list[Op] = field(default_factory=list)
    call_starts: list[int] = field(default_factory=list)  # op index
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)  # (stage, source): (call, number)


def write_program(
    layout: Layout, world: int, rank: int, calls: list[Call], first: int, mutation: str | None
) -> Program:
    """Team::run for each call, for team 0 of one team."""
    program, epoch = new_program(world, rank), first
    for call in calls:
        num_rows, rows = rows_of(layout, world, call)
        write_call(program, world, rank, call, epoch, num_rows, rows, mutation)
        # Team::run, last line
        advance = rows[rank] if mutation == "numbers of own rows" else 0 if mutation == "numbers restart" else num_rows
        epoch = (epoch + advance) % NUMBERS
    return program


def new_program(world: int, rank: int) -> Program:
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {
        (stage, peer): [] for stage in (PUSH, GATHER) for peer in range(world) if peer != rank
    }
    return Program(lanes=lanes)


def rows_of(layout: Layout, world: int, call: Call, team: int = 0, num_teams: int = 1) -> tuple[int, list[int]]:
    """TeamPlan::rows_of: the team's rows, and those of them that each segment has."""

    def of(tiles: int) -> int:
        return (tiles - team + num_teams - 1) // num_teams if team < tiles else 0

    num_rows = of(layout.tiles(call.num_values, world, call.collective))
    if call.collective == "one_shot":  # TeamPlan::rows_from: one segment, received from everybody
        return num_rows, [num_rows] * world
    return num_rows, [of(layout.tiles(call.num_values, world, call.collective, segment)) for segment in range(world)]


def write_call(
    program: Program, world: int, rank: int, call: Call, epoch: int, num_rows: int, rows: list[int],
    mutation: str | None = None,
) -> None:  # fmt: skip
    """Team::run of one call, behind the calls that the program has."""
    idx = len(program.call_starts)
    program.call_starts.append(len(program.ops))
    peers = [(rank + i) % world for i in range(1, world)]  # Team::peer_at
    two_shot, scatter = call.collective == "two_shot", call.collective == "reduce_scatter"
    tail_stage = GATHER if two_shot else PUSH  # Team::kTailStage
    before = {lane: len(numbers) for lane, numbers in program.lanes.items()}
    for peer in peers:  # TeamPlan::rows_from
        for stage, count in ((PUSH, rows[rank]), (GATHER, rows[peer] if two_shot else 0)):
            program.lanes[stage, peer] += [(idx, (epoch + k) % NUMBERS) for k in range(count)]

    def wait_ready(stage: int, k: int) -> None:
        if mutation == ("no wait for pushes", "no wait for sums")[stage]:
            return
        for source in peers:
            if k < rows[rank if stage == PUSH else source]:
                program.ops.append(Op("wait", stage, (source,), 0, before[stage, source] + k))

    def take(stage: int, k: int) -> None:
        for source in peers:
            if k < rows[rank if stage == PUSH else source]:
                program.ops.append(Op("take", stage, (source,), (epoch + k) % NUMBERS))

    def send(stage: int, targets: list[int], k: int) -> None:  # store() to each, then release()
        number = (epoch + k) % NUMBERS
        stores = [Op("store", stage, (peer,), number) for peer in targets]
        release = Op("release", stage, tuple(targets), number, idx)
        program.ops += [release, *stores] if mutation == "flag before record" else [*stores, release]

    lag = 2 * call.depth if two_shot else call.depth
    for k in range(num_rows + lag):
        tail_row = -1 if scatter else k - lag
        reduce_row = k - call.depth if two_shot or scatter else -1
        if not 0 <= reduce_row < rows[rank]:
            reduce_row = -1
        if tail_row >= 0:
            wait_ready(tail_stage, tail_row)
        if reduce_row >= 0:
            wait_ready(PUSH, reduce_row)
        if k < num_rows:  # push
            if two_shot or scatter:
                for peer in peers:
                    if k < rows[peer]:
                        send(PUSH, [peer], k)
            else:
                send(PUSH, peers, k)
        if reduce_row >= 0:  # reduce: all is read before the sum is stored
            take(PUSH, reduce_row)
            if two_shot:
                send(GATHER, peers, reduce_row)
        if tail_row >= 0:
            take(tail_stage, tail_row)
    program.ops.append(Op("end", place=idx))
