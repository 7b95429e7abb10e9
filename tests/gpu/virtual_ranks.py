"""P tensor-parallel ranks on one GPU in one process, and beside them the reference that their calls must equal.

A rank has its workspace, its stream, its compensators and its failure record; its peers' workspaces are memory of the
same GPU. Kernels of all ranks must be resident at once, so each rank gets its share of the multiprocessors. What a
call needs is allocated before the first rank is launched, and kernels are loaded when the program starts: both may wait
for the GPU, and a rank's kernel waits for the ranks that are not launched yet.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

# Read when CUDA is initialized. One hardware queue a stream: two ranks in one queue would wait for each other. All
# kernels loaded then: loading one at its first use waits for the ranks' kernels that run, which wait for that rank.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch
from torch import Tensor

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Residual, StateDtype
from echo_megatron.quantizer import HEADER_BYTES, TILE_VALUES, Quantized, Quantizer
from echo_megatron.reference import Segments, SimulatedGroup, choose_algorithm, exact_sum, make_quantizer
from echo_megatron.sites import PassClock, Site
from echo_megatron.workspace import MAX_DEPTH, TEAMS_A_BLOCK

# Of cuda/layout.cuh and cuda/arguments.cuh.
BLOCK_VALUES = 32
TEAM_THREADS = TILE_VALUES // BLOCK_VALUES
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CONTROL_BYTES = 4096
SLOT_ALIGNMENT = 128
FLAG_BYTES = 8
NUM_STAGES = 2
FAILURE_CODES = ("none", "timeout", "mismatch", "peer")
STAGES = ("push", "gather", "rescale")

SPARE_MULTIPROCESSORS = 4  # for what else runs: fills, a sleeping rank, the consensus update


def index_of(member):
    """An enum's member as the operators take it."""
    return list(type(member)).index(member)


def resident_blocks(world_size: int) -> int:
    """Thread blocks a rank so that the kernels of all ranks are resident together, one block a multiprocessor."""
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return max(1, (multiprocessors - SPARE_MULTIPROCESSORS) // world_size)


def highest_depth(
    config: EchoConfig,
    algorithm: Algorithm,
    bits: int,
    dtype: torch.dtype,
    direction: Direction = Direction.forward,
) -> int:
    """The largest depth whose tiles fit into shared memory."""
    residual = index_of(config.residual_of(direction)) if config.compensates else len(Residual)
    kernel = (bits, index_of(config.policy), index_of(algorithm), residual)
    kernel += (index_of(config.state_dtype_of(direction)),)
    return _highest_depth(*kernel, DTYPES.index(dtype))


@lru_cache
def _highest_depth(*kernel: int) -> int:
    ops.load()
    for depth in range(MAX_DEPTH, 1, -1):
        try:
            torch.ops.echo_megatron.max_blocks(*kernel, depth)
        except RuntimeError:
            with suppress(RuntimeError):  # the next launch reports the error once more
                torch.zeros(1, device="cuda")
        else:
            return depth
    return 1


@dataclass
class Failure:
    """A rank's failure record, read."""

    code: str
    peer: int
    stage: str
    row: int
    expected: int
    seen: int
    site: tuple[int, int, int]


class VirtualWorkspaces:
    """The memory of P ranks: workspaces, failure records, streams.

    Args:
        world_size: P, 2 to 8.
        num_blocks: thread blocks of a rank's kernel; None for all that fit.
        workspace_teams: teams that have rings in the workspace; None for those of `num_blocks`.
        timeout_s: bound of a wait on the device.
    """

    def __init__(
        self,
        world_size: int,
        num_blocks: int | None = None,
        workspace_teams: int | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        ops.load()
        torch.cuda._sleep(1)  # loads the kernel that delays a rank
        self.world_size = world_size
        self.num_blocks = resident_blocks(world_size) if num_blocks is None else num_blocks
        self.num_teams = TEAMS_A_BLOCK * self.num_blocks if workspace_teams is None else workspace_teams
        self.timeout_s = timeout_s
        library = torch.ops.echo_megatron
        self.ring = library.ring_size(MAX_DEPTH)
        self.slot_bytes = library.slot_bytes(8, index_of(Policy.zero_aware), 32)  # the largest of all
        num_bytes = library.workspace_bytes(world_size, self.num_teams, self.ring, self.slot_bytes)
        assert num_bytes == self.slots_at().stop, "the layout here is not that of cuda/layout.cuh"
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(world_size)]
        self.peers = [buffer.data_ptr() for buffer in self.buffers]
        self.failure_records = [torch.zeros(16, dtype=torch.int64).pin_memory() for _ in range(world_size)]
        self.streams = [torch.cuda.Stream() for _ in range(world_size)]
        torch.cuda.synchronize()

    def fork(self) -> None:
        """Orders every rank behind the current stream."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """Orders the current stream behind every rank."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def failures(self) -> list[Failure | None]:
        """Every rank's failure; waits for the GPU."""
        torch.cuda.synchronize()
        failures: list[Failure | None] = []
        for record in self.failure_records:
            code, peer, stage, row, expected, seen, *site = record.tolist()[:9]
            failure = Failure(FAILURE_CODES[code], peer, STAGES[stage], row, expected, seen, tuple(site))
            failures.append(failure if code else None)
        return failures

    def check(self) -> None:
        """Fails with every rank's failure if there is one; waits for the GPU."""
        failures = self.failures()
        assert not any(failures), f"failures by rank: {failures}"

    @property
    def epochs_at(self) -> slice:
        """Bytes of a workspace that hold the teams' epochs."""
        return slice(CONTROL_BYTES, CONTROL_BYTES + 4 * self.num_teams)

    def flags_at(self, *stages: int) -> slice:
        """Bytes of a workspace that hold the flags of these stages, which follow each other; of all unless told."""
        return self._stages_at(_aligned(self.epochs_at.stop), FLAG_BYTES, stages)

    def slots_at(self, *stages: int) -> slice:
        """Bytes of a workspace that hold the slots of these stages."""
        return self._stages_at(_aligned(self.flags_at().stop), self.slot_bytes, stages)

    def _stages_at(self, begin: int, slot_bytes: int, stages: Sequence[int]) -> slice:
        num_bytes = (self.world_size - 1) * self.num_teams * self.ring * slot_bytes  # of one stage
        first, last = (min(stages), max(stages)) if stages else (0, NUM_STAGES - 1)
        return slice(begin + first * num_bytes, begin + (last + 1) * num_bytes)

    def set_epochs(self, epoch: int) -> None:
        """Makes the workspaces look as if every team had done `epoch` tiles, each slot written by its last tile."""
        last_tiles = [epoch - 1 - (epoch - 1 - slot) % self.ring for slot in range(self.ring)]
        # Exponent and signature, in the upper half of a flag, are only looked at where the tile number is the expected.
        flags = torch.tensor([(tile + 1) % 2**32 for tile in last_tiles], dtype=torch.int64, device="cuda")
        for buffer in self.buffers:
            buffer[self.epochs_at].view(torch.int32).fill_(_as_int32(epoch))
            buffer[self.flags_at()].view(torch.int64).view(-1, self.ring).copy_(flags)
        torch.cuda.synchronize()

    def epochs(self, rank: int) -> list[int]:
        """Tiles that each team of a rank has done, modulo 2^32; waits for the GPU."""
        torch.cuda.synchronize()
        words = self.buffers[rank][self.epochs_at].view(torch.int32)
        return [word % 2**32 for word in words.tolist()]

    def set_amax_epoch(self, epoch: int) -> None:
        """The number of calls with `rescale: group` so far; at least two calls before it wraps."""
        for buffer in self.buffers:
            buffer[:4].view(torch.int32).fill_(_as_int32(epoch))
        torch.cuda.synchronize()


def _aligned(offset: int) -> int:
    return -(-offset // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _as_int32(word: int) -> int:
    word %= 2**32
    return word - 2**32 if word >= 2**31 else word


class Call:
    """One rank's part of a call: everything allocated, nothing launched."""

    def __init__(
        self,
        rank: VirtualRank,
        x: Tensor,
        out: Tensor,
        site: Site,
        keep_codes: bool = False,
        num_blocks: int | None = None,
        depth: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        config, memory = rank.config, rank.memory
        library = torch.ops.echo_megatron
        self.rank, self.x, self.out = rank, x, out
        self.in_place = out is x
        self.records = {
            "bits": site.bits,
            "policy": index_of(config.policy),
            "group_size": config.group_size,
            "algorithm": index_of(rank.algorithm),
        }
        layout = {name: number for name, number in self.records.items() if name != "bits"}
        num_tiles = library.call_tiles(x.numel(), memory.world_size, **layout)
        compensator = rank.compensators[site.direction]
        if rank.clocks[site.direction].tick(site):
            compensator.reset()
        self.compensator = compensator if config.compensates else None
        self.state, self.fresh, self.coefficients = None, True, [0.0] * 5
        if self.compensator is not None:
            num_bytes = num_tiles * library.state_tile_bytes(index_of(config.state_dtype_of(site.direction)))
            num_values = make_quantizer(config, site.bits).num_basis_values(x.numel())
            self.state = compensator.raw_state((num_values,), num_bytes, x.device)
            self.fresh, self.coefficients = compensator.is_fresh, coefficients_of(compensator)
            if self.fresh:
                self.state.fill_(0xFF)  # NaN, so that reading it shows
            rank.states[site.direction] = (self.state, num_values)
        self.updates_later = self.compensator is not None and config.residual_of(site.direction) is Residual.consensus
        self.codes = self.kept_x = None
        if keep_codes or self.updates_later:
            slot_bytes = library.slot_bytes(site.bits, index_of(config.policy), config.group_size)
            num_records = num_tiles * (memory.world_size if rank.algorithm is Algorithm.one_shot else 1)
            self.codes = torch.full((num_records * slot_bytes,), 0xAB, dtype=torch.uint8, device=x.device)
        if self.updates_later and self.in_place:
            self.kept_x = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
        self.options = {
            **self.records,
            "rank": rank.rank,
            "residual": index_of(config.residual_of(site.direction)),
            "rescale": index_of(config.rescale),
            "state_dtype": index_of(config.state_dtype_of(site.direction)),
            "fresh": self.fresh,
            "coefficients": self.coefficients,
            "site": numbers_of(site),
            "num_blocks": memory.num_blocks if num_blocks is None else num_blocks,
            "depth": rank.depth if depth is None else depth,
            "num_teams": memory.num_teams,
            "ring": memory.ring,
            "slot_bytes": memory.slot_bytes,
            "timeout_s": memory.timeout_s if timeout_s is None else timeout_s,
        }

    def operands(self) -> tuple[object, ...]:
        """The operator's positional arguments."""
        memory, rank = self.rank.memory, self.rank.rank
        tensors = (self.x,) if self.in_place else (self.x, self.out)
        shared = (memory.buffers[rank], self.state, self.codes, self.kept_x, memory.failure_records[rank], memory.peers)
        return (*tensors, *shared)

    def launch(self) -> None:
        """The all-reduce, on the current stream."""
        library = torch.ops.echo_megatron
        run = library.all_reduce_ if self.in_place else library.all_reduce
        run(*self.operands(), **self.options)

    def finish(self) -> None:
        """The consensus update where there is one, on the current stream behind the all-reduce."""
        if self.updates_later:
            torch.ops.echo_megatron.consensus_update(
                self.x if self.kept_x is None else self.kept_x,
                self.codes,
                self.state,
                world_size=self.rank.memory.world_size,
                **self.records,
                state_dtype=self.options["state_dtype"],
                fresh=self.fresh,
                coefficients=self.coefficients,
            )
        if self.compensator is not None:
            self.compensator.mark_updated()

    def decode(self) -> Tensor:
        """The output from the kept codes, on the current stream."""
        out = poisoned_like(self.out)
        torch.ops.echo_megatron.decode(self.codes, out, world_size=self.rank.memory.world_size, **self.records)
        return out


class VirtualRank:
    """One rank: passes and states as `Communicator` keeps them.

    Attributes:
        states: of each direction, the raw buffer and the number of basis values in it.
    """

    def __init__(self, rank: int, config: EchoConfig, memory: VirtualWorkspaces, depth: int) -> None:
        self.rank, self.config, self.memory, self.depth = rank, config, memory, depth
        self.algorithm = choose_algorithm(config, memory.world_size)
        self.clocks = {direction: PassClock() for direction in Direction}
        self.compensators = {direction: Compensator(config, direction) for direction in Direction}
        self.states: dict[Direction, tuple[Tensor, int]] = {}

    @property
    def stream(self) -> torch.cuda.Stream:
        return self.memory.streams[self.rank]

    def run(self, x: Tensor, out: Tensor, site: Site, **options: object) -> Call:
        """Prepares and launches on the rank's stream, as one real rank does. See the module about what may wait."""
        with torch.cuda.stream(self.stream):
            call = Call(self, x, out, site, **options)
            call.launch()
            call.finish()
        return call


class VirtualRanks:
    """P ranks of one config.

    Args:
        world_size: P, 2 to 8.
        config: the options, the same on all ranks.
        num_blocks: thread blocks of a rank's kernel; None for all that fit.
        depth: tiles between push and reduce.
        workspace_teams: teams that have rings in the workspace; None for those of `num_blocks`.
        timeout_s: bound of a wait on the device.
        memory: workspaces to use in place of new ones; the three options before are then its own.
    """

    def __init__(
        self,
        world_size: int,
        config: EchoConfig,
        num_blocks: int | None = None,
        depth: int = 2,
        workspace_teams: int | None = None,
        timeout_s: float = 20.0,
        memory: VirtualWorkspaces | None = None,
    ) -> None:
        self.world_size, self.config = world_size, config
        self.memory = memory or VirtualWorkspaces(world_size, num_blocks, workspace_teams, timeout_s)
        self.ranks = [VirtualRank(rank, config, self.memory, depth) for rank in range(world_size)]
        self.calls: list[Call] = []

    @property
    def algorithm(self) -> Algorithm:
        return self.ranks[0].algorithm

    def all_reduce(
        self,
        xs: Sequence[Tensor],
        site: Site,
        outs: Sequence[Tensor] | None = None,
        keep_codes: bool = False,
        num_blocks: int | None = None,
        depth: int | None = None,
        delays: Sequence[int] = (),
        wait: bool = True,
    ) -> list[Tensor]:
        """Every rank's output.

        Args:
            xs: the ranks' contributions, contiguous.
            site: of the call.
            outs: where the outputs go, `xs` itself for a call in place; None for new tensors full of NaN.
            keep_codes: `records` and `Call.decode` will be asked for.
            num_blocks: of this call, where not the workspaces'.
            depth: of this call, where not the ranks'.
            delays: GPU cycles by which each rank starts late.
            wait: orders the current stream behind the call; otherwise only each rank's own calls are ordered, and `xs`
                must live until the caller has waited.
        """
        outs = [None] * self.world_size if outs is None else outs
        self.memory.fork()
        calls = []
        for rank, x, out in zip(self.ranks, xs, outs, strict=True):
            with torch.cuda.stream(rank.stream):
                out = poisoned_like(x) if out is None else out
                calls.append(Call(rank, x, out, site, keep_codes, num_blocks, depth))
        self.calls = calls
        for rank, call in enumerate(self.calls):
            with torch.cuda.stream(self.memory.streams[rank]):
                if delays and delays[rank]:
                    torch.cuda._sleep(delays[rank])
                call.launch()
        for rank, call in enumerate(self.calls):
            with torch.cuda.stream(self.memory.streams[rank]):
                call.finish()
        if wait:
            self.memory.join()
        return [call.out for call in self.calls]

    def exact_all_reduce(
        self,
        xs: Sequence[Tensor],
        site: Site,
        outs: Sequence[Tensor] | None = None,
        num_blocks: int | None = None,
        wait: bool = True,
    ) -> list[Tensor]:
        """Every rank's output of the exact one-shot; arguments as `all_reduce`, `outs` too must live until the wait."""
        outs = [poisoned_like(x) for x in xs] if outs is None else list(outs)
        memory = self.memory
        memory.fork()
        for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
            with torch.cuda.stream(memory.streams[rank]):
                library = torch.ops.echo_megatron
                run = library.exact_all_reduce_ if out is x else library.exact_all_reduce
                run(
                    *((x,) if out is x else (x, out)),
                    memory.buffers[rank],
                    memory.failure_records[rank],
                    memory.peers,
                    rank=rank,
                    site=numbers_of(site),
                    num_blocks=memory.num_blocks if num_blocks is None else num_blocks,
                    num_teams=memory.num_teams,
                    ring=memory.ring,
                    slot_bytes=memory.slot_bytes,
                    timeout_s=memory.timeout_s,
                )
        if wait:
            memory.join()
        return outs

    def state(self, direction: Direction) -> dict[str, Tensor]:
        """What is kept of c and m2 of all ranks, as it is read back, fp32 [P, basis values]."""
        return stacked([self._rank_state(rank, direction) for rank in self.ranks])

    def _rank_state(self, rank: VirtualRank, direction: Direction) -> dict[str, Tensor]:
        raw, num_values = rank.states[direction]
        num_segments, length = self._segments(num_values)
        parts = unpack_state(raw.view(num_segments, -1), self.config.state_dtype_of(direction))
        return {name: part[:, :length].reshape(-1)[:num_values] for name, part in parts.items()}

    def records(self, rank: int) -> Records:
        """What the last call's output was decoded from on `rank`; rows are sources (one-shot) or segments."""
        call = self.calls[rank]
        quantizer = make_quantizer(self.config, call.records["bits"])
        return unpack_records(call.codes, quantizer, self.world_size)

    def row_sizes(self, num_values: int) -> list[int]:
        """Values that each row of `records` holds."""
        if self.algorithm is Algorithm.one_shot:
            return [num_values] * self.world_size
        segments = Segments.split(num_values, self.world_size, self.config.group_size)
        return [segments.size(rank) for rank in range(self.world_size)]

    def _segments(self, num_values: int) -> tuple[int, int]:
        if self.algorithm is Algorithm.one_shot:
            return 1, num_values
        return self.world_size, Segments.split(num_values, self.world_size, self.config.group_size).length


@dataclass
class Records:
    """Records in the parts of the wire record (quantizer.py).

    Attributes:
        codes: uint8 [rows, tiles, 4096], unsigned.
        params: uint8 [rows, tiles, groups, bytes a group].
        exponent: int32 [rows, tiles].
    """

    codes: Tensor
    params: Tensor
    exponent: Tensor


def unpack_records(slots: Tensor, quantizer: Quantizer, num_rows: int) -> Records:
    """Undoes the layout of slots (cuda/layout.cuh)."""
    num_code_bytes = TILE_VALUES * quantizer.bits // 8
    num_param_bytes = quantizer.groups_per_tile * quantizer.param_bytes
    header_at = num_code_bytes + -(-num_param_bytes // 16) * 16
    slot_bytes = _aligned(header_at + HEADER_BYTES)
    tiles = slots.view(num_rows, -1, slot_bytes)
    # 16-byte chunk j of thread t lies at (j * 128 + t) * 16.
    packed = tiles[..., :num_code_bytes].unflatten(-1, (-1, TEAM_THREADS, 16)).transpose(-3, -2).flatten(-3)
    params = tiles[..., num_code_bytes : num_code_bytes + num_param_bytes]
    return Records(
        quantizer._unpack_codes(packed),
        params.unflatten(-1, (quantizer.groups_per_tile, quantizer.param_bytes)),
        tiles[..., header_at : header_at + 2].contiguous().view(torch.int16)[..., 0].to(torch.int32),
    )


def unpack_state(raw: Tensor, dtype: StateDtype) -> dict[str, Tensor]:
    """Undoes the layout of cuda/state.cuh.

    Args:
        raw: uint8 [rows, bytes].
        dtype: how the state is stored.

    Returns:
        c, and m2 unless the state is compact; fp32 [rows, values of whole tiles].
    """
    if dtype is StateDtype.compact:
        tiles = raw.unflatten(-1, (-1, TILE_VALUES + 4 * TEAM_THREADS))
        codes, scales = tiles.split((TILE_VALUES, 4 * TEAM_THREADS), dim=-1)
        # 16-byte chunk j of thread t lies at (j * 128 + t) * 16; then a scale a thread.
        codes = codes.unflatten(-1, (2, TEAM_THREADS, 16)).transpose(-3, -2).flatten(-2).to(torch.float32) - 128
        return {"c": (codes * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(1)}
    kind, chunk = (torch.bfloat16, 8) if dtype is StateDtype.bf16 else (torch.float32, 4)
    parts = raw.view(kind).unflatten(-1, (-1, 2, BLOCK_VALUES // chunk, TEAM_THREADS, chunk))
    parts = parts.transpose(-3, -2).flatten(-3).to(torch.float32)
    return {"c": parts[:, :, 0].flatten(1), "m2": parts[:, :, 1].flatten(1)}


def stacked(states: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Every rank's tensors of a name as one, [P, ...]."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def coefficients_of(compensator: Compensator) -> list[float]:
    """The recurrence's numbers in the order of cuda/arguments.cuh."""
    return [
        compensator.correction_decay,
        compensator.correction_from_average,
        compensator.correction_from_residual,
        compensator.average_decay,
        compensator.average_from_residual,
    ]


def numbers_of(site: Site) -> list[int]:
    """A site as the operators take it."""
    return [site.idx, index_of(site.direction), site.chunk]


def poisoned_like(x: Tensor) -> Tensor:
    """NaN everywhere, and as far from 16-byte alignment as x is: an element that is not written shows."""
    storage = torch.full((x.numel() + 16,), float("nan"), dtype=x.dtype, device=x.device)
    offset = x.data_ptr() % 16 // x.element_size()
    return storage[offset : offset + x.numel()].view(x.shape)


# -- the reference beside them


class RecordingQuantizer(Quantizer):
    """Keeps what it quantized last."""

    last: Quantized

    def quantize(self, values: Tensor, exponent: Tensor | None = None) -> Quantized:
        self.last = super().quantize(values, exponent)
        return self.last


class RecordedGroup(SimulatedGroup):
    """The reference, and the codes that its last output was decoded from."""

    recorder: RecordingQuantizer

    def _one_shot(self, values, quantizer, exponent):
        return super()._one_shot(values, self._record(quantizer), exponent)

    def _two_shot(self, values, quantizer, exponent):
        return super()._two_shot(values, self._record(quantizer), exponent)

    def _record(self, quantizer: Quantizer) -> RecordingQuantizer:
        options = (quantizer.bits, quantizer.policy, quantizer.group_size, quantizer.rescale)
        self.recorder = RecordingQuantizer(*options)
        return self.recorder

    def state(self, direction: Direction) -> dict[str, Tensor]:
        """What is kept of c and m2, as it is read back, fp32 [P, basis values]."""
        state = self.compensators[direction]._state
        assert state is not None
        if self.compensators[direction].dtype is StateDtype.compact:
            return {"c": state.correction()}
        return {"c": state.correction(), "m2": state.average()}


class CheckedRanks:
    """`VirtualRanks`, each call of which is compared with the reference: outputs, codes and state, bit for bit."""

    def __init__(self, world_size: int, config: EchoConfig, **options: object) -> None:
        self.virtual = VirtualRanks(world_size, config, **options)
        self.reference = RecordedGroup(world_size, config)

    def all_reduce(
        self,
        xs: Sequence[Tensor],
        site: Site,
        in_place: bool = False,
        keep_codes: bool = True,
        what: object = "",
        **options: object,
    ) -> Tensor:
        """The output, which is the reference's; `what` names the case in a failure."""
        what = f"{what} {self.virtual.config} P={self.virtual.world_size} N={xs[0].numel()} {xs[0].dtype} {site}"
        expected = self.reference.all_reduce(xs, site)
        before = [x.clone() for x in xs]
        outs = self.virtual.all_reduce(xs, site, outs=xs if in_place else None, keep_codes=keep_codes, **options)
        self.virtual.memory.check()
        for rank, out in enumerate(outs):
            assert_same_bits(out, expected, f"output of rank {rank}, {what}")
            if not in_place:
                assert_same_bits(xs[rank], before[rank], f"input of rank {rank}, {what}")
        if keep_codes:
            self._check_records(what)
            for rank in range(self.virtual.world_size):
                assert_same_bits(self.virtual.calls[rank].decode(), expected, f"decoded by rank {rank}, {what}")
        if self.virtual.config.compensates:
            assert_same_state(self.virtual.state(site.direction), self.reference.state(site.direction), what)
        return expected

    def exact_all_reduce(self, xs: Sequence[Tensor], site: Site, in_place: bool = False, **options: object) -> Tensor:
        """As `all_reduce`, of the exact one-shot."""
        expected = exact_sum(torch.stack(list(xs)))
        outs = self.virtual.exact_all_reduce(xs, site, outs=xs if in_place else None, **options)
        self.virtual.memory.check()
        for rank, out in enumerate(outs):
            what = f"exact output of rank {rank} of {len(outs)}, N={out.numel()} {out.dtype}"
            assert_same_bits(out, expected, what)
        return expected

    def _check_records(self, what: str) -> None:
        wanted = self.reference.recorder.last
        sizes = torch.tensor(self.virtual.row_sizes(_num_values(self.virtual, wanted)), device=wanted.codes.device)
        num_tiles = wanted.codes.shape[1]
        position = torch.arange(num_tiles * TILE_VALUES, device=sizes.device).view(1, num_tiles, TILE_VALUES)
        is_value = position < sizes.view(-1, 1, 1)
        is_group = is_value.unflatten(-1, wanted.codes.shape[2:])[..., :1]
        is_tile = is_value[..., 0]
        for rank in range(self.virtual.world_size):
            records = self.virtual.records(rank)
            for name, actual, expected, mask in (
                ("exponents", records.exponent, wanted.exponent, is_tile),
                ("params", records.params, wanted.params, is_group),
                ("codes", records.codes, wanted.codes.flatten(-2), is_value),
            ):
                assert_same_integers(actual, expected, mask, f"{name} on rank {rank}, {what}")


def _num_values(virtual: VirtualRanks, wanted: Quantized) -> int:
    call = virtual.calls[0]
    quantizer = make_quantizer(virtual.config, call.records["bits"])
    num_values = quantizer.num_basis_values(call.x.numel())
    assert wanted.num_values == virtual._segments(num_values)[1]
    return num_values


def assert_same_integers(actual: Tensor, expected: Tensor, mask: Tensor, what: str) -> None:
    """Equal where `mask` is set."""
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    different = (actual != expected) & mask
    if different.any():
        where = different.nonzero()[0].tolist()
        wanted, got = expected[tuple(where)].item(), actual[tuple(where)].item()
        raise AssertionError(f"{int(different.sum())} {what}: expected {wanted}, got {got} first at {where}")


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """The same tensors are kept, with the same bits."""
    assert actual.keys() == expected.keys(), what
    for name, wanted in expected.items():
        assert_same_bits(actual[name], wanted, f"{name} by rank, {what}")


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit, signs of zeros included; a NaN equals any NaN."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (
        f"{what}: expected {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} {tuple(actual.shape)}"
    )
    bits = torch.int16 if actual.element_size() == 2 else torch.int32
    different = (actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())
    if different.any():
        where = different.nonzero()[0].tolist()
        wanted, got = expected[tuple(where)].item(), actual[tuple(where)].item()
        num = int(different.sum())
        raise AssertionError(f"{num} of {actual.numel()} of {what}: expected {wanted!r}, got {got!r} first at {where}")
