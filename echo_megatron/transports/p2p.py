"""Codes written straight into the peers' memory: one fused CUDA kernel a call (cuda/all_reduce.cuh)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, Residual
from echo_megatron.sites import Site
from echo_megatron.transports.consensus import ConsensusUpdate
from echo_megatron.transports.failure_watch import watch
from echo_megatron.transports.p2p_plans import Plan, SharePlan, plan_all_reduce, plan_shares
from echo_megatron.transports.protocol import CommunicationError, Reduced
from echo_megatron.transports.tiled_state import read_correction, read_scattered_correction
from echo_megatron.tuning import Choice, Table
from echo_megatron.workspace import SymmetricWorkspace, Workspace

_STAGES = ("push", "gather", "rescale")
_TIMEOUT, _MISMATCH = 1, 2  # cuda/arguments.cuh, Failure; 3 is a peer that gave up
_MAX_PLANS = 1024  # sizes of messages that are remembered at once


class P2PTransport:
    """One rank's part of the calls that `reference.SimulatedGroup` defines, bit for bit, in one kernel launch each.

    No call synchronizes the host or allocates more than its result, so a CUDA graph captures it. Calls of one
    communicator run in the order in which they were made, whatever their streams. The host's part of a call is paid by
    every message that the GPU waits for: what it needs is in a `Plan` or a `SharePlan`.

    Args:
        workspace: this rank's.
        config: the options.
        table: grid, depth and, for `algorithm: auto`, algorithm by message; the same on every rank.
    """

    name = "p2p"

    def __init__(self, workspace: Workspace, config: EchoConfig, table: Table) -> None:
        self.workspace = workspace
        self.config = config
        self.rank, self.world_size = workspace.rank, workspace.world_size
        self.algorithm = config.algorithm
        self._device = workspace.buffer.device
        self._plans: dict[tuple[object, ...], Plan] = {}
        self._share_plans: dict[tuple[object, ...], SharePlan] = {}
        self.table = table
        self._sites: dict[tuple[int, int, int], Site] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._raw_stream: int | None = None
        self._updates_beside = True
        self._updates: dict[int, ConsensusUpdate] = {}
        self._num_sent_bytes = 0
        self._coefficients = {direction: Compensator(config, direction).coefficients for direction in Direction}
        library = torch.ops.echo_megatron
        # Overloads: an operator's own name looks for the overload that fits in each call.
        self._all_reduce, self._all_reduce_ = library.all_reduce.default, library.all_reduce_.default
        self._exact, self._exact_ = library.exact_all_reduce.default, library.exact_all_reduce_.default
        self._reduce_scatter, self._all_gather = library.reduce_scatter.default, library.all_gather.default
        self._memory = {
            "rank": self.rank,
            "num_teams": workspace.num_teams,
            "ring": workspace.ring,
            "slot_bytes": workspace.slot_bytes,
            "timeout_s": config.timeout_s,
        }
        self._exact_options = {**self._memory, "num_blocks": workspace.max_blocks}
        self.is_raised = False  # of a failure
        watch.add(self)

    @property
    def table(self) -> Table:
        """What chooses; another one takes effect with the next call."""
        return self._table

    @table.setter
    def table(self, table: Table) -> None:
        self._table = table
        self._plans.clear()
        self._share_plans.clear()

    def choose(self, x: Tensor, site: Site) -> Choice:
        """Algorithm, grid and depth of a call, the same on every rank.

        The algorithm is that of the config's bits: sites of other bits share the compensator's layout.
        """
        sizes = (x.numel() * x.element_size(), self.world_size, self.config.policy)
        choice = self.table.choose(*sizes, self.config.bits, site.direction, x.dtype)
        algorithm = choice.algorithm if self.config.algorithm is Algorithm.auto else self.config.algorithm
        return Choice(algorithm, min(choice.num_blocks, self.workspace.max_blocks), choice.depth)

    def choose_shares(self, x: Tensor, site: Site, collective: Collective) -> Choice:
        """Grid and depth of a reduce-scatter or an all-gather: those of an all-reduce of the larger tensor."""
        num_bytes = x.numel() * x.element_size() * (1 if collective is Collective.reduce_scatter else self.world_size)
        choice = self.table.choose(num_bytes, self.world_size, self.config.policy, site.bits, site.direction, x.dtype)
        return Choice(Algorithm.two_shot, min(choice.num_blocks, self.workspace.max_blocks), choice.depth)

    def all_reduce(
        self,
        x: Tensor,
        site: Site,
        compensator: Compensator | None,
        out: Tensor | None = None,
        keep: bool = False,
    ) -> Reduced:
        """See `Transport.all_reduce`."""
        source = self._begin(x, site)
        in_place = out is not None and _is_same_memory(out, source)
        output = source if in_place else torch.empty_like(source)
        plan = self._plan(x, site, compensator is not None)
        state, fresh = self._state(compensator, plan, site)
        update = self._update_of(site) if compensator is not None and self._updates_later(site) else None
        codes = kept_x = None
        keeps_codes = keep and plan.saves_codes
        if keeps_codes:
            codes = torch.empty(plan.num_code_bytes, dtype=torch.uint8, device=self._device)
        if update is not None:
            codes = update.codes(plan.num_code_bytes) if codes is None else codes
            kept_x = update.copy_of(source) if in_place else None
            update.wait(self._stream)
        memory = self.workspace
        tensors = (memory.buffer, state, codes, kept_x, memory.failure, memory.peers)
        if in_place:
            self._all_reduce_(source, *tensors, fresh=fresh, site=site.numbers, **plan.options)
        else:
            self._all_reduce(source, output, *tensors, fresh=fresh, site=site.numbers, **plan.options)
        self._num_sent_bytes += plan.num_sent_bytes
        if update is not None:
            contribution = source if kept_x is None else kept_x
            update.launch(self._stream, contribution, codes, state, fresh=fresh, **plan.update_options)
        if compensator is not None:
            compensator.mark_updated()
        if out is not None:
            output = out if in_place else out.copy_(output)
        if keeps_codes:
            assert codes is not None
            return Reduced(output, codes, partial(_restore, x.shape, x.dtype, plan.decode_options))
        return Reduced(output, output, _same)

    def reduce_scatter(
        self, x: Tensor, site: Site, compensator: Compensator | None, out: Tensor | None = None
    ) -> Tensor:
        """See `Transport.reduce_scatter`."""
        source, memory = self._begin(x, site), self.workspace
        plan = self._share_plan(x, site, Collective.reduce_scatter, compensator is not None)
        state, fresh = self._state(compensator, plan, site)
        output = source.new_empty((x.shape[0] // self.world_size, *x.shape[1:])) if out is None else out
        tensors = (memory.buffer, state, memory.failure, memory.peers)
        self._reduce_scatter(source, output, *tensors, fresh=fresh, site=site.numbers, **plan.options)
        self._num_sent_bytes += plan.num_sent_bytes
        if compensator is not None:
            compensator.mark_updated()
        return output

    def all_gather(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """See `Transport.all_gather`."""
        source, memory = self._begin(x, site), self.workspace
        plan = self._share_plan(x, site, Collective.all_gather, False)
        output = source.new_empty((x.shape[0] * self.world_size, *x.shape[1:])) if out is None else out
        self._all_gather(source, output, memory.buffer, memory.failure, memory.peers, site=site.numbers, **plan.options)
        self._num_sent_bytes += plan.num_sent_bytes
        return output

    def exact_all_reduce(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """The sum in FP32 in rank order, rounded once (`reference.exact_sum`): for messages too small to quantize."""
        source, memory = self._begin(x, site), self.workspace
        tensors = (memory.buffer, memory.failure, memory.peers)
        self._num_sent_bytes += (self.world_size - 1) * source.nbytes
        if out is not None and _is_same_memory(out, source):
            self._exact_(source, *tensors, site=site.numbers, **self._exact_options)
            return out
        output = torch.empty_like(source)
        self._exact(source, output, *tensors, site=site.numbers, **self._exact_options)
        return output if out is None else out.copy_(output)

    def correction(
        self, x: Tensor, site: Site, compensator: Compensator, collective: Collective = Collective.all_reduce
    ) -> Tensor | None:
        """See `Transport.correction`."""
        self._begin(x, site)
        if collective is not Collective.all_reduce:
            return self._scattered_correction(self._share_plan(x, site, collective, True), compensator)
        plan = self._plan(x, site, True)
        state = compensator.written_state(plan.state_key, plan.num_state_bytes, self._device)
        if state is None:
            return None
        if self._updates_later(site):
            self._update_of(site).wait(self._stream)
        num_values, algorithm = plan.state_key
        return read_correction(state, self.config.group_size, compensator.dtype, algorithm, self.world_size, num_values)

    def _scattered_correction(self, plan: SharePlan, compensator: Compensator) -> Tensor | None:
        state = compensator.written_state(plan.state_key, plan.num_state_bytes, self._device)
        if state is None:
            return None
        ranks = (self.world_size, self.rank)
        return read_scattered_correction(state, compensator.dtype, *ranks, num_values=plan.state_key[0])

    def num_sent_bytes(self, x: Tensor, site: Site, collective: Collective = Collective.all_reduce) -> int:
        """See `Transport.num_sent_bytes`."""
        if collective is Collective.all_reduce:
            return self._plan(x, site, self.config.compensates).num_sent_bytes
        compensates = self.config.compensates and collective is Collective.reduce_scatter
        return self._share_plan(x, site, collective, compensates).num_sent_bytes

    def exact_below_bytes(self, dtype: torch.dtype) -> int:
        """Messages of fewer bytes are summed exactly in the least time, by the table."""
        return self.table.exact_below_bytes(self.world_size, dtype)

    def min_bytes(self, dtype: torch.dtype, collective: Collective = Collective.all_reduce) -> int:
        """Messages of fewer bytes gain nothing by being quantized, by the table; of every collective."""
        return self.table.quantized_from_bytes(self.world_size, dtype)

    def check(self) -> None:
        """Raises CommunicationError if a wait on the device was given up, here or on a peer."""
        if self.workspace.has_failed:
            self.is_raised = True
            raise CommunicationError(self.failure())

    def failure(self) -> str | None:
        """The wait on the device that was given up, in words; None: none so far. No synchronization."""
        if not self.workspace.has_failed:
            return None
        code, peer, stage, row, expected, seen, *numbers = self.workspace.failure_fields()[:9]
        site = self._sites.get((numbers[0], numbers[1], numbers[2]))
        where = f"rank {self.rank} of {self.world_size}: {site}, phase {_STAGES[stage]}, tile {row}"
        if code == _TIMEOUT:
            what = (
                f"waited {self.config.timeout_s:g} s (timeout_s) for rank {peer}: "
                f"expected epoch {expected}, seen {seen}. The rank died, hangs, or makes fewer calls"
            )
        elif code == _MISMATCH:
            what = (
                f"rank {peer} makes another call: expected call {expected:#06x}, got {seen:#06x}. The ranks must "
                "agree on collective, site, elements, dtype, bits, policy and algorithm"
            )
        else:
            what = f"rank {peer} gave up; see its error"
        return f"{where}: {what}. The outputs of this call are NaN; create a new communicator to go on"

    def num_bytes(self) -> int:
        """Device memory of the workspace and of what the consensus residual keeps."""
        return self.workspace.num_bytes() + sum(update.num_bytes() for update in self._updates.values())

    def take_sent_bytes(self) -> int:
        """Bytes of payload, as the collective transport would send them, since this was last asked."""
        num_bytes, self._num_sent_bytes = self._num_sent_bytes, 0
        return num_bytes

    def prepare_capture(self) -> None:
        """See `Transport.prepare_capture`."""
        self._updates_beside = False  # no replay would wait for an update that a call left on a side stream

    def destroy(self) -> None:
        """Gives the workspace back; collective."""
        watch.remove(self)
        self._updates.clear()
        if isinstance(self.workspace, SymmetricWorkspace):
            self.workspace.destroy()

    def abandon(self) -> None:
        """See `Transport.abandon`."""
        watch.remove(self)
        self._updates.clear()
        if isinstance(self.workspace, SymmetricWorkspace):
            self.workspace.abandon()

    def _begin(self, x: Tensor, site: Site) -> Tensor:
        """The contiguous input, ordered behind the communicator's last call."""
        self.check()
        if not self.workspace.peers:
            raise CommunicationError(f"{site}: this communicator was destroyed; create a new one")
        if x.device != self._device:
            raise ValueError(
                f"{site}: expected a tensor on {self._device}, this communicator's GPU, got {x.device}; use "
                "transport: collective for other devices"
            )
        self._sites[site.numbers] = site
        raw_stream = _current_raw_stream(self._device)
        if raw_stream != self._raw_stream:
            stream = torch.cuda.current_stream(self._device)
            if self._stream is not None and not _is_capturing():
                stream.wait_stream(self._stream)
            self._stream, self._raw_stream = stream, raw_stream
        return x.contiguous()

    def _state(self, compensator: Compensator | None, plan: Plan | SharePlan, site: Site) -> tuple[Tensor | None, bool]:
        """The state that a call updates, and whether it does so without reading it."""
        if compensator is None:
            return None, True
        is_captured = _is_capturing()
        state = compensator.raw_state(plan.state_key, plan.num_state_bytes, self._device, is_captured)
        # A replay of a later site's graph follows one of the site before it, whatever ran before the capture.
        return state, compensator.is_fresh and not (is_captured and site.idx > 0)

    def _plan(self, x: Tensor, site: Site, compensates: bool) -> Plan:
        key = (x.numel(), x.dtype, site.bits, site.numbers[1], compensates)  # a number: an enum's hash is slow
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            call = (self.config, self._memory, self.world_size, x, site, self.choose(x, site))
            plan = self._plans[key] = plan_all_reduce(*call, self._coefficients_of(site, compensates))
        return plan

    def _share_plan(self, x: Tensor, site: Site, collective: Collective, compensates: bool) -> SharePlan:
        key = (x.numel(), x.dtype, site.bits, site.numbers[1], collective.value, compensates)
        plan = self._share_plans.get(key)
        if plan is None:
            if len(self._share_plans) >= _MAX_PLANS:
                self._share_plans.clear()
            num_values = x.numel() // (self.world_size if collective is Collective.reduce_scatter else 1)
            call = (self.config, self._memory, self.world_size, num_values, site, collective)
            choice = self.choose_shares(x, site, collective)
            plan = self._share_plans[key] = plan_shares(*call, choice, self._coefficients_of(site, compensates))
        return plan

    def _coefficients_of(self, site: Site, compensates: bool) -> list[float]:
        coefficients = self._coefficients[site.direction]
        return coefficients if compensates else [0.0] * len(coefficients)

    def _updates_later(self, site: Site) -> bool:
        return self.config.residual_of(site.direction) is Residual.consensus

    def _update_of(self, site: Site) -> ConsensusUpdate:
        update = self._updates.get(site.numbers[1])
        if update is None:
            update = self._updates[site.numbers[1]] = ConsensusUpdate(self._device, self._updates_beside)
        return update


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _current_raw_stream(device: torch.device) -> int:
    """The current stream as a number, which is had in a tenth of the time of a `torch.cuda.Stream`."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def _is_same_memory(out: Tensor, source: Tensor) -> bool:
    """Whether the contiguous `source` and `out` are one."""
    return out is source or (out.data_ptr() == source.data_ptr() and out.is_contiguous())


def _same(output: Tensor) -> Tensor:
    return output


def _restore(shape: torch.Size, dtype: torch.dtype, options: dict[str, Any], codes: Tensor) -> Tensor:
    output = torch.empty(shape, dtype=dtype, device=codes.device)
    torch.ops.echo_megatron.decode(codes, output, **options)
    return output
