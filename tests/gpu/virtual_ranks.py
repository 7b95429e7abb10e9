"""P tensor-parallel ranks on one GPU in one process; virtual_checks.py has the reference that their calls must equal.

A rank has its workspace, its stream, its compensators and its failure record; its peers' workspaces are memory of the
same GPU. Kernels of all ranks must be resident at once, so each rank gets its share of the multiprocessors. What a
call needs is allocated before the first rank is launched, and kernels are loaded when the program starts: both may wait
for the GPU, and a rank's kernel waits for the ranks that are not launched yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor
from virtual_records import Records, stacked, unpack_records, unpack_state
from virtual_workspaces import VirtualWorkspaces

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual
from echo_megatron.reference import Segments, choose_algorithm, make_quantizer
from echo_megatron.sites import PassClock, Site
from echo_megatron.workspace import MAX_DEPTH

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def highest_depth(
    config: EchoConfig,
    algorithm: Algorithm,
    bits: int,
    dtype: torch.dtype,
    direction: Direction = Direction.forward,
) -> int:
    """The largest depth whose tiles fit into shared memory."""
    residual = ops.index_of(config.residual_of(direction)) if config.compensates else len(Residual)
    kernel = (bits, ops.index_of(config.policy), ops.index_of(algorithm), residual)
    kernel += (ops.index_of(config.state_dtype_of(direction)),)
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
            "policy": ops.index_of(config.policy),
            "group_size": config.group_size,
            "algorithm": ops.index_of(rank.algorithm),
        }
        layout = {name: number for name, number in self.records.items() if name != "bits"}
        num_tiles = library.call_tiles(x.numel(), memory.world_size, **layout)
        compensator = rank.compensators[site.direction]
        if rank.clocks[site.direction].tick(site):
            compensator.reset()
        self.compensator = compensator if config.compensates else None
        self.state, self.fresh, self.coefficients = None, True, [0.0] * 5
        if self.compensator is not None:
            num_bytes = num_tiles * library.state_tile_bytes(ops.index_of(config.state_dtype_of(site.direction)))
            num_values = make_quantizer(config, site.bits).num_basis_values(x.numel())
            self.state = compensator.raw_state((num_values,), num_bytes, x.device)
            self.fresh, self.coefficients = compensator.is_fresh, coefficients_of(compensator)
            if self.fresh:
                self.state.fill_(0xFF)  # NaN, so that reading it shows
            rank.states[site.direction] = (self.state, num_values)
        self.updates_later = self.compensator is not None and config.residual_of(site.direction) is Residual.consensus
        self.codes = self.kept_x = None
        if keep_codes or self.updates_later:
            slot_bytes = library.slot_bytes(site.bits, ops.index_of(config.policy), config.group_size)
            num_records = num_tiles * (memory.world_size if rank.algorithm is Algorithm.one_shot else 1)
            self.codes = torch.full((num_records * slot_bytes,), 0xAB, dtype=torch.uint8, device=x.device)
        if self.updates_later and self.in_place:
            self.kept_x = torch.full_like(x, float("nan"), memory_format=torch.contiguous_format)
        self.options = {
            **self.records,
            "rank": rank.rank,
            "residual": ops.index_of(config.residual_of(site.direction)),
            "rescale": ops.index_of(config.rescale),
            "state_dtype": ops.index_of(config.state_dtype_of(site.direction)),
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
    return [site.idx, ops.index_of(site.direction), site.chunk]


def poisoned_like(x: Tensor) -> Tensor:
    """NaN everywhere, and as far from 16-byte alignment as x is: an element that is not written shows."""
    storage = torch.full((x.numel() + 16,), float("nan"), dtype=x.dtype, device=x.device)
    offset = x.data_ptr() % 16 // x.element_size()
    return storage[offset : offset + x.numel()].view(x.shape)
