"""Fuzz of what travels and where it lies: arbitrary records, and random schedules of many calls on real bytes.

Seconds in CI; `make fuzz MINUTES=60` draws new examples for as long as it is told.
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

from echo_megatron.config import GROUP_SIZES
from echo_megatron.quantizer import HEADER_BYTES, TILE_VALUES, Quantizer
from echo_megatron.tuning import MAX_DEPTH
from tests.compiler import COMPILER
from tests.protocol_model import (
    ALGORITHMS,
    NUMBERS,
    Call,
    Collective,
    Layout,
    Op,
    Program,
    new_program,
    rows_of,
    write_call,
)
from tests.test_cuda_host import HIGHEST_EXPONENT, LOWEST_EXPONENT, POLICIES, for_host, pointer, same_bits

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
NUM_FUZZES = 3  # tests here that share the minutes

quick = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture
def repeat(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], None]:
    """Calls a function once, or with --fuzz-minutes until this test's share of them is over."""
    seconds = 60 * request.config.getoption("--fuzz-minutes", default=0.0) / NUM_FUZZES

    def run(function: Callable[[], object]) -> None:
        end = time.monotonic() + seconds
        function()
        while time.monotonic() < end:
            function()

    return run


# -- records


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """tests/cuda_host/record_check.cpp, compiled."""
    folder = tmp_path_factory.mktemp("records")
    for header in (ROOT / "cuda").glob("*.cuh"):
        (folder / header.name).write_text(for_host(header.read_text()))
    target, sources = folder / "record_check.so", ROOT / "tests" / "cuda_host"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    command = [
        str(COMPILER),
        *flags,
        f"-I{sources}",
        f"-I{folder}",
        str(sources / "record_check.cpp"),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


quantizers = st.builds(Quantizer, st.sampled_from((4, 8)), st.sampled_from(POLICIES), st.sampled_from(GROUP_SIZES))


def arbitrary_record(quantizer: Quantizer, exponent: int, seed: int) -> Tensor:
    """A tile's record of any codes and any parameters that an encoder may store: a scale is positive or NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    groups = quantizer.groups_per_tile
    if quantizer.rotates:
        params = draw(0, 256, groups, quantizer.param_bytes).to(torch.uint8)
    else:
        halves = draw(1, 0x7C00, groups, quantizer.param_bytes // 2)  # positive and finite
        halves[:, 1:] |= draw(0, 2, groups, quantizer.param_bytes // 2 - 1) << 15  # a zero-point has a sign
        halves[:, 0] = halves[:, 0].where(draw(0, 20, groups) > 0, 0x7E00)
        params = halves.to(torch.int16).view(torch.uint8)
    header = torch.zeros(HEADER_BYTES // 2, dtype=torch.int16)
    header[0] = exponent
    codes = draw(0, 256, TILE_VALUES * quantizer.bits // 8).to(torch.uint8)
    record = torch.cat((header.view(torch.uint8), params.flatten(), codes))
    assert record.numel() == quantizer.num_bytes(TILE_VALUES)
    return record


def test_arbitrary_records_decode_alike(decoder: ctypes.CDLL, repeat: Callable[[Callable[[], object]], None]) -> None:
    """Codes and parameters that no encoder may have made together: kernels and definition read the same bits."""

    @settings(quick, max_examples=80)
    @given(quantizers, st.one_of(st.integers(-95, 95), st.integers(LOWEST_EXPONENT, HIGHEST_EXPONENT)),
           st.integers(0, 2**62))  # fmt: skip
    def check(quantizer: Quantizer, exponent: int, seed: int) -> None:
        record = arbitrary_record(quantizer, exponent, seed)
        unpacked = quantizer.unpack(record, TILE_VALUES)
        assert torch.equal(quantizer.pack(unpacked), record)
        expected = quantizer.dequantize(unpacked)
        stored = torch.zeros(quantizer.groups_per_tile, 4, dtype=torch.uint8)
        stored[:, : quantizer.param_bytes] = unpacked.params[0]
        codes = record[-TILE_VALUES * quantizer.bits // 8 :].clone()
        summand = expected.flip(0).nan_to_num(0.0, 0.0, 0.0) * 0.37
        decoded, total = torch.empty(TILE_VALUES), summand.clone()
        sizes = (quantizer.bits, POLICIES.index(quantizer.policy), quantizer.group_size // 32, exponent)
        decoder.record_decode(*sizes, TILE_VALUES // 32, *map(pointer, (stored, codes, decoded, total)))
        assert same_bits(decoded, expected)
        assert same_bits(total, summand + expected)

    repeat(check)


def test_short_records_are_the_beginning_of_whole_ones(repeat: Callable[[Callable[[], object]], None]) -> None:
    """A last tile that is not full: decoded as if it were, and packed again to its own bytes."""

    @settings(quick, max_examples=40)
    @given(quantizers, st.integers(1, 2 * TILE_VALUES), st.integers(0, 2**62))
    def check(quantizer: Quantizer, num_values: int, seed: int) -> None:
        values = torch.randn(num_values, generator=torch.Generator().manual_seed(seed))
        record = quantizer.encode(values)
        unpacked = quantizer.unpack(record, num_values)
        assert torch.equal(quantizer.pack(unpacked), record)
        whole = torch.cat((values, values[-1:].expand(-num_values % TILE_VALUES)))
        if quantizer.rotates or num_values % quantizer.group_size == 0:
            return
        expected = quantizer.decode(quantizer.encode(whole), whole.numel())[:num_values]
        assert same_bits(quantizer.decode(record, num_values), expected)

    repeat(check)


# -- schedules


SLOT_BYTES = 128


class Rank:
    """A rank's workspace and what its teams have to do."""

    def __init__(self, num_bytes: int, num_teams: int) -> None:
        self.memory = bytearray(num_bytes)
        self.programs: list[Program] = []  # of the running call, by team
        self.at = [0] * num_teams
        self.queues: list[deque[Op]] = [deque() for _ in range(num_teams)]  # released, not yet announced
        self.num_calls = 0  # begun


class Schedules(RuleBasedStateMachine):
    """Calls of any kind, grid and depth on up to eight ranks, each of which goes on when it is drawn.

    The programs of test_protocol.py, with more ranks, teams and calls, on bytes at the code's own offsets: a record
    that is read must be the one that was written, and whatever the schedule, all calls end.
    """

    layout: Layout

    @initialize(
        world=st.integers(2, 8), num_teams=st.integers(1, 3),
        first=st.one_of(st.just(0), st.integers(NUMBERS - 12, NUMBERS - 1), st.integers(0, NUMBERS - 1)),
    )  # fmt: skip
    def begin(self, world: int, num_teams: int, first: int) -> None:
        self.world, self.num_teams, self.ring = world, num_teams, self.layout.ring_for(MAX_DEPTH)
        self.places: dict[tuple[int, ...], tuple[int, int, int, int]] = {}
        num_bytes = self._place(0, 0, 1, 0, 0)[3]
        self.ranks = [Rank(num_bytes, num_teams) for _ in range(world)]
        self.calls: list[tuple[Call, int]] = []  # and their number of teams
        for rank in range(world):
            for team in range(num_teams):
                self._write_epoch(rank, team, first)
                self._age_flags(rank, team, first)

    def _age_flags(self, rank: int, team: int, first: int) -> None:
        """Flags of the round before: a new workspace's zeros only where the numbers begin at 0."""
        for stage in (0, 1):
            for source in range(self.world):
                for number in range(first, first + self.ring) if source != rank and first else ():
                    at = self._place(stage, rank, source, team, number)[1]
                    self._write_flag(rank, at, self.layout.flag((number - self.ring) % NUMBERS, 0, 0))

    # -- memory

    def _place(self, stage: int, receiver: int, source: int, team: int, number: int) -> tuple[int, int, int, int]:
        key = (stage, receiver, source, team, number % NUMBERS)
        if key not in self.places:
            self.places[key] = self.layout.place(self.world, self.num_teams, self.ring, SLOT_BYTES, *key)
        return self.places[key]

    def _epoch(self, rank: int, team: int) -> int:
        number: int = struct.unpack_from("<I", self.ranks[rank].memory, self._place(0, 0, 1, team, 0)[2])[0]
        return number

    def _write_epoch(self, rank: int, team: int, number: int) -> None:
        struct.pack_into("<I", self.ranks[rank].memory, self._place(0, 0, 1, team, 0)[2], number % NUMBERS)

    def _write_flag(self, rank: int, at: int, flag: int) -> None:
        struct.pack_into("<Q", self.ranks[rank].memory, at, flag)

    @staticmethod
    def _record(call: int, stage: int, receiver: int, source: int, team: int, number: int) -> bytes:
        return struct.pack("<QQQQ", call << 8 | stage, receiver << 32 | source, team, number) * (SLOT_BYTES // 32)

    # -- rules

    @rule(
        collective=st.sampled_from(ALGORITHMS), tiles=st.integers(1, 20), ragged=st.integers(0, 4095),
        depth=st.integers(1, MAX_DEPTH), grid=st.integers(1, 3),
    )  # fmt: skip
    def call(self, collective: Collective, tiles: int, ragged: int, depth: int, grid: int) -> None:
        """Every rank makes it once it comes to it."""
        if len(self.calls) - min(rank.num_calls for rank in self.ranks) < 4:
            self.calls.append((Call(collective, tiles * TILE_VALUES - ragged, depth), min(grid, self.num_teams)))

    @rule(rank=st.integers(0, 7), num_steps=st.integers(1, 200), announces=st.booleans())
    def go_on(self, rank: int, num_steps: int, announces: bool) -> None:
        """A rank goes on as far as it can; its send warp may sleep meanwhile."""
        self._run(rank % self.world, num_steps, announces)

    @rule(slow=st.integers(0, 7), num_steps=st.integers(1, 30))
    def others_go_on(self, slow: int, num_steps: int) -> None:
        """All but one, until nothing moves."""
        self._run_until_still(lambda rank: rank != slow % self.world, num_steps)

    def teardown(self) -> None:
        if not hasattr(self, "ranks"):
            return
        self._run_until_still(lambda rank: True, 1_000)
        for number, rank in enumerate(self.ranks):
            assert rank.num_calls == len(self.calls) and not rank.programs, f"rank {number} never ends: deadlock"

    # -- steps

    def _run_until_still(self, takes_part: Callable[[int], bool], num_steps: int) -> None:
        ranks = [rank for rank in range(self.world) if takes_part(rank)]
        while sum(self._run(rank, num_steps, True) for rank in ranks):
            pass

    def _run(self, number: int, num_steps: int, announces: bool) -> bool:
        """Whether anything was done."""
        rank, moved = self.ranks[number], False
        for step in range(num_steps):
            if not rank.programs and not self._begin_call(number):
                return moved
            team = step % self.num_teams
            did = self._step(number, team)
            if announces and rank.queues[team]:
                self._announce(number, team)
                did = True
            if self._ends(rank):
                self._end_call(number)
                did = True
            moved = moved or did
        return moved

    def _begin_call(self, number: int) -> bool:
        rank = self.ranks[number]
        if rank.num_calls == len(self.calls):
            return False
        call, num_teams = self.calls[rank.num_calls]
        rank.num_calls += 1
        for team in range(self.num_teams):
            program = new_program(self.world, number)
            num_rows, rows = rows_of(self.layout, self.world, call, team, num_teams) if team < num_teams else (0, [])
            if num_rows:
                write_call(program, self.world, number, call, self._epoch(number, team), num_rows, rows)
            rank.programs.append(program)
            rank.at[team] = 0
        return True

    @staticmethod
    def _ends(rank: Rank) -> bool:
        done = all(at == len(program.ops) for at, program in zip(rank.at, rank.programs, strict=True))
        return done and not any(rank.queues)

    def _end_call(self, number: int) -> None:
        rank = self.ranks[number]
        call, num_teams = self.calls[rank.num_calls - 1]
        for team in range(num_teams):  # Team::run, last line
            num_rows = rows_of(self.layout, self.world, call, team, num_teams)[0]
            self._write_epoch(number, team, self._epoch(number, team) + num_rows)
        rank.programs = []

    def _step(self, number: int, team: int) -> bool:
        rank = self.ranks[number]
        if rank.at[team] == len(rank.programs[team].ops):
            return False
        op, call = rank.programs[team].ops[rank.at[team]], rank.num_calls
        if op.kind == "wait":
            source = op.peers[0]
            tile = rank.programs[team].lanes[op.stage, source][op.place][1]
            flag = struct.unpack_from("<Q", rank.memory, self._place(op.stage, number, source, team, tile)[1])[0]
            if self.layout.flag_epoch(flag) != self.layout.flag_value(tile):
                return False
            assert flag == self.layout.flag(tile, tile % 1000, call), "a flag of another record"
        elif op.kind == "take":
            at = self._place(op.stage, number, op.peers[0], team, op.number)[0]
            expected = self._record(call, op.stage, number, op.peers[0], team, op.number)
            assert rank.memory[at : at + SLOT_BYTES] == expected, "a stale or overwritten record"
        elif op.kind == "store":
            receiver = op.peers[0]
            at = self._place(op.stage, receiver, number, team, op.number)[0]
            record = self._record(call, op.stage, receiver, number, team, op.number)
            self.ranks[receiver].memory[at : at + SLOT_BYTES] = record
        elif op.kind == "release":
            if len(rank.queues[team]) >= self.layout.max_events:
                return False
            rank.queues[team].append(op)
        rank.at[team] += 1
        return True

    def _announce(self, number: int, team: int) -> None:
        op = self.ranks[number].queues[team].popleft()
        for receiver in op.peers:
            at = self._place(op.stage, receiver, number, team, op.number)[1]
            flag = self.layout.flag(op.number, op.number % 1000, self.ranks[number].num_calls)
            self._write_flag(receiver, at, flag)


def test_random_schedules(layout: Layout, repeat: Callable[[Callable[[], object]], None]) -> None:
    machine = type("LaidOut", (Schedules,), {"layout": layout})
    options = settings(quick, max_examples=8, stateful_step_count=20)
    repeat(lambda: run_state_machine_as_test(machine, settings=options))


def test_schedules_find_a_ring_that_is_too_small(layout: Layout) -> None:
    """Four slots hold what a rank sends before it waits at depth 4; the other, which need not wait, overwrites them."""

    class Small(Layout):
        def __init__(self) -> None:
            vars(self).update(vars(layout))

        def ring_for(self, depth: int) -> int:
            return 4

    schedules = type("TooSmall", (Schedules,), {"layout": Small()})()
    schedules.begin(2, 1, 0)
    schedules.call("two_shot", 20, 0, MAX_DEPTH, 1)
    schedules.go_on(0, 200, True)
    schedules.go_on(1, 200, True)
    with pytest.raises(AssertionError, match="rank 0 never ends: deadlock"):  # its flags are those of later tiles
        schedules.teardown()
