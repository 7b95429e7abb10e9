"""Every interleaving of a few small calls of the p2p kernels: a model of how ranks hand each other tiles.

What is modelled is one team (cuda/all_reduce.cuh, "Why no barrier"): teams share no slot, flag or epoch. Of it

  team          Team::run (team.cuh): per iteration wait_ready, push, reduce, tail; stores, release, reads
  send warp     run_send_warp (signal_warps.cuh): sets the flags of released records, in order, any time later
  receive warp  run_receive_warp (signal_warps.cuh): polls a flag for every source and stage, in order
  kernel end    the next call of a rank begins when its three kinds of warps are done; nothing else orders calls

The programs are protocol_model.py's, on the code's own layout. A process is its program and a counter, and what a slot
or flag holds follows from its writer's counter; so a state is a tuple of counters, and `explore` visits all that can
be reached, breadth first. Memory is sequentially consistent here: that stores are seen in order is what release, fence
and acquire are for (signal.cuh).

`grain="coarse"` joins steps that cannot matter. Reads and waits may be put off to the next store of their rank, because
the only step of another rank that they do not commute with is the overwriting of what is read, which is an error
found at the store; flags may be set and seen at once, because a rank that sees one late is a rank that acts late.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tests.protocol_model import NUMBERS, Call, Layout, Mutation, Op, write_program


@dataclass(frozen=True)
class Result:
    """`error`: what the first bad state met, None where there is none; `trace`: the steps that lead there."""

    num_states: int
    error: str | None
    trace: tuple[str, ...] = ()


class Bad(Exception):
    """A step that must not be possible."""


class Model:
    """The calls on `world` ranks.

    Args:
        layout: the code's.
        world: ranks.
        calls: in program order of every rank.
        ring: slots a ring; the code's for the deepest call where None.
        first: number of the first tile.
        is_used: flags are those of an earlier round of the rings; otherwise a new workspace's zeros.
        max_events: the code's where None.
        mutation: breaks the protocol.
    """

    def __init__(
        self, layout: Layout, world: int, calls: list[Call], *, ring: int | None = None, first: int = 0,
        is_used: bool = False, max_events: int | None = None, mutation: Mutation | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.world, self.mutation = layout, world, mutation
        self.ring = ring or layout.ring_for(max(call.depth for call in calls))
        self.max_events = max_events or layout.max_events
        self.is_used = is_used
        self.programs = [write_program(layout, world, rank, calls, first, mutation) for rank in range(world)]
        self._index()

    def _index(self) -> None:
        """What follows from counters, looked up by them."""
        ranks = range(self.world)
        self.num_releases = [  # [rank][ops done]
            list(itertools.accumulate((op.kind == "release" for op in self.programs[rank].ops), initial=0))
            for rank in ranks
        ]
        self.releases = [[op for op in self.programs[rank].ops if op.kind == "release"] for rank in ranks]
        self.lanes = [list(self.programs[rank].lanes.items()) for rank in ranks]
        self.lane_idx = [{lane: i for i, (lane, _) in enumerate(lanes)} for lanes in self.lanes]
        # Lanes' counts at the end of each call: the receive warp has all of its rows.
        self.due = [
            [
                [sum(c <= call for c, _ in numbers) for _, numbers in self.lanes[rank]]
                for call in range(self._num_calls())
            ]
            for rank in ranks
        ]
        self.takes = [
            {(op.stage, op.peers[0], op.number, self._call_of(rank, at)): at
             for at, op in enumerate(self.programs[rank].ops) if op.kind == "take"}
            for rank in ranks
        ]  # fmt: skip
        # Of a slot: (op index, number, call) of the stores into it, in order; (releases done, flag) of its flag.
        self.stores: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        self.flags: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank in ranks:
            num_released = 0
            for at, op in enumerate(self.programs[rank].ops):
                if op.kind == "store":
                    stored = (at, op.number, self._call_of(rank, at))
                    self.stores.setdefault(self._slot(op.peers[0], rank, op), []).append(stored)
                elif op.kind == "release":
                    num_released += 1
                    for peer in op.peers:
                        flag = self.layout.flag(op.number, op.number % 1000, op.place + 1)
                        self.flags.setdefault(self._slot(peer, rank, op), []).append((num_released, flag))

    def _num_calls(self) -> int:
        return len(self.programs[0].call_starts)

    def _call_of(self, rank: int, at: int) -> int:
        return sum(start <= at for start in self.programs[rank].call_starts) - 1

    def _slot(self, receiver: int, source: int, op: Op) -> tuple[int, int]:
        return receiver, self.layout.slot(self.world, self.ring, op.stage, receiver, source, op.number)

    # -- what a step needs and does; `team`, `sent` and `received` are the counters of all ranks

    def flag_seen(self, slot: tuple[int, int], number: int, num_sent: int) -> int:
        """Of a slot once its sender has announced num_sent records."""
        seen = self.layout.flag((number - self.ring) % NUMBERS, 0, 0) if self.is_used else 0
        for at, flag in self.flags.get(slot, ()):
            if at <= num_sent:
                seen = flag
        return seen

    def has_arrived(self, rank: int, lane: int, count: int, num_sent: int) -> bool:
        """run_receive_warp: whether the poll for a lane's record ends; the flag that ends it must be the record's."""
        (stage, source), numbers = self.lanes[rank][lane]
        call, number = numbers[count]
        slot = rank, self.layout.slot(self.world, self.ring, stage, rank, source, number)
        seen = self.flag_seen(slot, number, num_sent)
        if self.mutation == "later flags count":
            ends = self.layout.flag_epoch(seen) >= self.layout.flag_value(number)
        else:
            ends = self.layout.flag_is_of(seen, number)
        if not ends:
            return False
        if seen != self.layout.flag(number, number % 1000, call + 1):
            raise Bad(f"rank {rank} takes a flag of another record for that of tile {number} of rank {source}")
        return True

    def check_store(self, rank: int, at: int, team: tuple[int, ...]) -> None:
        """What the slot held has been read."""
        op, receiver = self.programs[rank].ops[at], self.programs[rank].ops[at].peers[0]
        before = None
        for stored, number, call in self.stores[self._slot(receiver, rank, op)]:
            if stored == at:
                break
            before = number, call
        if before is not None:
            taken = self.takes[receiver].get((op.stage, rank, *before))
            if taken is None or team[receiver] <= taken:
                raise Bad(f"rank {rank} stores tile {op.number} over tile {before[0]}, not yet read by rank {receiver}")

    def check_take(self, rank: int, at: int, team: tuple[int, ...]) -> None:
        """The slot holds what is to be read."""
        op = self.programs[rank].ops[at]
        source, held = op.peers[0], None
        for stored, number, call in self.stores.get(self._slot(rank, source, op), ()):
            if stored < team[source]:
                held = number, call
        if held != (op.number, self._call_of(rank, at)):
            raise Bad(f"rank {rank} reads tile {op.number} of rank {source} where {held} lies")


State = tuple[int, ...]
Step = tuple[str, State]


def fine_steps(model: Model) -> tuple[State, Callable[[State], Iterator[Step]]]:
    """Every store, release, announcement, poll and read for itself. A state: team, sent, lanes of each rank."""
    world, width = model.world, 2 + len(model.lanes[0])
    arrived = _Memo(model.has_arrived)

    def steps(state: State) -> Iterator[Step]:
        team = state[::width]
        for rank in range(world):
            base = rank * width
            at, sent, program = team[rank], state[base + 1], model.programs[rank]
            received = state[base + 2 : base + width]

            def advanced(offset: int, base: int = base) -> State:
                return (*state[: base + offset], state[base + offset] + 1, *state[base + offset + 1 :])

            if sent < model.num_releases[rank][at]:
                yield f"{rank} announces {sent}", advanced(1)
            for lane, ((_, source), numbers) in enumerate(model.lanes[rank]):
                count = received[lane]
                if count < len(numbers) and at >= program.call_starts[numbers[count][0]]:
                    num_sent = state[source * width + 1]
                    if arrived(rank, lane, count, num_sent):
                        yield f"{rank} receives {numbers[count][1]} of {source}", advanced(2 + lane)
            if at == len(program.ops):
                continue
            op = program.ops[at]
            if op.kind == "wait" and received[model.lane_idx[rank][op.stage, op.peers[0]]] <= op.place:
                continue
            if op.kind == "end" and (
                sent < model.num_releases[rank][at] or list(received) != model.due[rank][op.place]
            ):
                continue
            if op.kind == "release" and model.num_releases[rank][at] - sent >= model.max_events:
                if model.mutation != "events without wait":
                    continue
                raise Bad(f"rank {rank} overwrites an event that is not announced")
            if op.kind == "store":
                model.check_store(rank, at, team)
            if op.kind == "take":
                model.check_take(rank, at, team)
            yield f"{rank} {op.kind} {op.number}", advanced(0)

    return (0,) * (width * world), steps


def coarse_steps(model: Model) -> tuple[State, Callable[[State], Iterator[Step]]]:
    """A rank goes on to its next release or end. A state: the teams' counters."""
    arrived = _Memo(model.has_arrived)

    def steps(state: State) -> Iterator[Step]:
        for rank in range(model.world):
            after = advance(state, rank)
            if after > state[rank]:
                yield f"{rank} to {after}", (*state[:rank], after, *state[rank + 1 :])

    def advance(state: State, rank: int) -> int:
        """Where the rank's next release or end lies; where it stands if it has to wait before."""
        ops = model.programs[rank].ops
        for at in range(state[rank], len(ops)):
            op = ops[at]
            if op.kind == "wait":
                source = op.peers[0]
                lane = model.lane_idx[rank][op.stage, source]
                if not arrived(rank, lane, op.place, model.num_releases[source][state[source]]):
                    return state[rank]
            elif op.kind == "store":
                model.check_store(rank, at, (*state[:rank], at, *state[rank + 1 :]))
            elif op.kind == "take":
                model.check_take(rank, at, state)
            elif op.kind == "end" or model.mutation != "flag before record":
                return at + 1
            else:
                return at + 1  # the store is a step of its own
        return len(ops)

    return (0,) * model.world, steps


class _Memo:
    """The answers of a function without side effects; what it raises is raised anew."""

    def __init__(self, function: Callable[..., bool]) -> None:
        self._function, self._answers = function, dict[tuple[int, ...], bool]()

    def __call__(self, *arguments: int) -> bool:
        if arguments not in self._answers:
            self._answers[arguments] = self._function(*arguments)
        return self._answers[arguments]


def explore(model: Model, grain: Literal["fine", "coarse"] = "fine") -> Result:
    """Every state that can be reached, until one is bad: a stale read, a tile overwritten unread, or a deadlock."""
    start, steps = (fine_steps if grain == "fine" else coarse_steps)(model)
    width = len(start) // model.world
    ends = tuple(len(program.ops) for program in model.programs)
    parents: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        try:
            following = list(steps(state))
        except Bad as bad:
            return Result(len(parents), str(bad), _trace(parents, state))
        if not following and state[::width] != ends:
            error = f"deadlock: ranks stand at {_standing(model, state[::width])}"
            return Result(len(parents), error, _trace(parents, state))
        for name, after in following:
            if after not in parents:
                parents[after] = state, name
                queue.append(after)
    return Result(len(parents), None)


def _standing(model: Model, team: State) -> str:
    ops = [program.ops[at] if at < len(program.ops) else None for program, at in zip(model.programs, team, strict=True)]
    return ", ".join("the end" if op is None else f"{op.kind} of stage {op.stage}" for op in ops)


def _trace(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    names = []
    while (parent := parents[state]) is not None:
        state, name = parent
        names.append(name)
    return tuple(reversed(names))
