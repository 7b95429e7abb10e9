"""Sequence parallelism's collectives on the virtual ranks of `virtual_ranks`, and the reference beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from virtual_checks import CheckedRanks, assert_same_bits, assert_same_state
from virtual_ranks import VirtualRank, coefficients_of, numbers_of
from virtual_records import stacked, unpack_state

from echo_megatron import ops
from echo_megatron.config import Collective, Direction
from echo_megatron.reference import make_quantizer
from echo_megatron.sites import Site


def share_of(x: Tensor, collective: Collective, world_size: int) -> int:
    """Values of a share in a call whose input is `x`."""
    return x.numel() // world_size if collective is Collective.reduce_scatter else x.numel()


def poisoned_output(x: Tensor, collective: Collective, world_size: int) -> Tensor:
    """NaN everywhere, and as far from 16-byte alignment as x is: an element that is not written shows."""
    scatters = collective is Collective.reduce_scatter
    num_values = x.numel() // world_size if scatters else x.numel() * world_size
    storage = torch.full((num_values + 16,), float("nan"), dtype=x.dtype, device=x.device)
    offset = x.data_ptr() % 16 // x.element_size()
    return storage[offset : offset + num_values]


class ShareCall:
    """One rank's part of a reduce-scatter or an all-gather: everything allocated, nothing launched."""

    def __init__(
        self,
        rank: VirtualRank,
        x: Tensor,
        out: Tensor,
        site: Site,
        collective: Collective,
        num_blocks: int | None = None,
        depth: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        config, memory = rank.config, rank.memory
        library = torch.ops.echo_megatron
        self.rank, self.x, self.out, self.collective = rank, x, out, collective
        layout = {"policy": ops.index_of(config.policy), "group_size": config.group_size}
        self.options = {
            **layout,
            "rank": rank.rank,
            "bits": site.bits,
            "rescale": ops.index_of(config.rescale),
            "site": numbers_of(site),
            "num_blocks": memory.num_blocks if num_blocks is None else num_blocks,
            "depth": rank.depth if depth is None else depth,
            "num_teams": memory.num_teams,
            "ring": memory.ring,
            "slot_bytes": memory.slot_bytes,
            "timeout_s": memory.timeout_s if timeout_s is None else timeout_s,
        }
        self.state = self.compensator = None
        if collective is Collective.all_gather:
            return
        num_share_values = share_of(x, collective, memory.world_size)
        compensator = rank.compensators[site.direction]
        if rank.clocks[site.direction].tick(site):
            compensator.reset()
        fresh = True
        if config.compensates:
            self.compensator = compensator
            num_tiles = library.scatter_state_tiles(num_share_values, memory.world_size, **layout)
            num_bytes = num_tiles * library.state_tile_bytes(ops.index_of(config.state_dtype_of(site.direction)))
            num_values = make_quantizer(config, site.bits).num_basis_values(num_share_values)
            self.state = compensator.raw_state((num_values, collective), num_bytes, x.device)
            fresh = compensator.is_fresh
            if fresh:
                self.state.fill_(0xFF)  # NaN, so that reading it shows
            rank.states[site.direction] = (self.state, num_values)
        self.options |= {
            "residual": ops.index_of(config.residual_of(site.direction)),
            "state_dtype": ops.index_of(config.state_dtype_of(site.direction)),
            "fresh": fresh,
            "coefficients": coefficients_of(compensator) if config.compensates else [0.0] * 5,
        }

    def operands(self) -> tuple[object, ...]:
        """The operator's positional arguments."""
        memory, rank = self.rank.memory, self.rank.rank
        state = () if self.collective is Collective.all_gather else (self.state,)
        return (self.x, self.out, memory.buffers[rank], *state, memory.failure_records[rank], memory.peers)

    def launch(self) -> None:
        """The call, on the current stream."""
        library = torch.ops.echo_megatron
        run = library.all_gather if self.collective is Collective.all_gather else library.reduce_scatter
        run(*self.operands(), **self.options)

    def finish(self) -> None:
        if self.compensator is not None:
            self.compensator.mark_updated()


class SharingRanks(CheckedRanks):
    """`CheckedRanks` that also reduce-scatter and all-gather, in any order with all-reduces."""

    def run(
        self,
        collective: Collective,
        xs: Sequence[Tensor],
        site: Site,
        num_blocks: int | None = None,
        depth: int | None = None,
        delays: Sequence[int] = (),
        wait: bool = True,
    ) -> list[Tensor]:
        """Every rank's output; arguments as `VirtualRanks.all_reduce`."""
        virtual, memory = self.virtual, self.virtual.memory
        memory.fork()
        calls = []
        for rank, x in zip(virtual.ranks, xs, strict=True):
            with torch.cuda.stream(rank.stream):
                out = poisoned_output(x, collective, virtual.world_size)
                calls.append(ShareCall(rank, x, out, site, collective, num_blocks, depth))
        self.share_calls = calls
        for rank, call in enumerate(calls):
            with torch.cuda.stream(memory.streams[rank]):
                if delays and delays[rank]:
                    torch.cuda._sleep(delays[rank])
                call.launch()
        for call in calls:
            call.finish()
        if wait:
            memory.join()
        return [call.out for call in calls]

    def expected(self, collective: Collective, xs: Sequence[Tensor], site: Site) -> list[Tensor]:
        """Every rank's output as the reference has it; flat tensors in and out."""
        if collective is Collective.reduce_scatter:
            return self.reference.reduce_scatter(xs, site)
        return [self.reference.all_gather(xs, site.bits)] * self.virtual.world_size

    def call(
        self, collective: Collective, xs: Sequence[Tensor], site: Site, what: object = "", **options: object
    ) -> list[Tensor]:
        """The outputs, which are the reference's, as is the state; `what` names the case in a failure."""
        what = f"{what} {collective.name} {self.virtual.config} P={self.virtual.world_size} N={xs[0].numel()} "
        what += f"{xs[0].dtype} {site} bits={site.bits} {options}"
        expected = self.expected(collective, xs, site)
        before = [x.clone() for x in xs]
        outs = self.run(collective, xs, site, **options)
        self.virtual.memory.check()
        for rank, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
            assert_same_bits(out, wanted, f"output of rank {rank}, {what}")
            assert_same_bits(xs[rank], before[rank], f"input of rank {rank}, {what}")
        if collective is Collective.reduce_scatter and self.virtual.config.compensates:
            assert_same_state(self.scattered_state(site.direction), self.reference.state(site.direction), what)
        return outs

    def scattered_state(self, direction: Direction) -> dict[str, Tensor]:
        """What is kept of c and m2 of all ranks after a reduce-scatter.

        Returns:
            fp32 [P, P, values of a share's basis]; zeros in own shares.
        """
        return stacked([self._rank_state(rank, direction) for rank in self.virtual.ranks])

    def _rank_state(self, rank: VirtualRank, direction: Direction) -> dict[str, Tensor]:
        raw, num_values = rank.states[direction]
        parts = unpack_state(raw.view(self.virtual.world_size - 1, -1), self.virtual.config.state_dtype_of(direction))
        shares = {name: part[:, :num_values] for name, part in parts.items()}
        return {
            name: torch.cat((part[: rank.rank], torch.zeros_like(part[:1]), part[rank.rank :]))
            for name, part in shares.items()
        }
