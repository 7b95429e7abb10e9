"""Codes written straight into the peers' memory: one fused CUDA kernel a call (cuda/all_reduce.cuh)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, EchoConfig, Residual
from echo_megatron.ops import index_of
from echo_megatron.reference import make_quantizer, num_sent_bytes
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError, Reduced
from echo_megatron.transports.tiled_state import read_correction
from echo_megatron.tuning import Choice, Table, load_table
from echo_megatron.workspace import SymmetricWorkspace, Workspace, all_or_none, gather_numbers, host_number

logger = logging.getLogger(__name__)

_STAGES = ("push", "gather", "rescale")
_TIMEOUT, _MISMATCH = 1, 2  # cuda/arguments.cuh, Failure; 3 is a peer that gave up
_MAX_PLANS = 1024  # sizes of messages that are remembered at once


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the calls of one size, dtype, bits, direction and compensation share: worked out once.

    Attributes:
        options: the operator's keyword arguments that are the same in all of them.
        state_key: of `Compensator.raw_state`.
        num_state_bytes: size of that state.
        num_code_bytes: size of the records that the sum is decoded from.
        saves_codes: the records are smaller than the sum.
        num_sent_bytes: of the wire records that the rank sends to others.
        decode_options: of the operator `decode`.
        update_options: of the operator `consensus_update`, the same in all of them.
    """

    options: dict[str, Any]
    state_key: tuple[int, Algorithm]
    num_state_bytes: int
    num_code_bytes: int
    saves_codes: bool
    num_sent_bytes: int
    decode_options: dict[str, Any]
    update_options: dict[str, Any]


class P2PTransport:
    """One rank's part of the calls that `reference.SimulatedGroup` defines, bit for bit, in one kernel launch each.

    No call synchronizes the host or allocates more than its result, so a CUDA graph captures it. Calls of one
    communicator run in the order in which they were made, whatever their streams. The host's part of a call is paid by
    every message that the GPU waits for: what it needs is in a `_Plan`.

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
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self.table = table
        self._sites: dict[tuple[int, int, int], Site] = {}
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._raw_stream: int | None = None
        self._updates_beside = True
        self._updates: dict[int, _ConsensusUpdate] = {}
        self._num_sent_bytes = 0
        self._coefficients = Compensator(config).coefficients
        library = torch.ops.echo_megatron
        # Overloads: an operator's own name looks for the overload that fits in each call.
        self._all_reduce, self._all_reduce_ = library.all_reduce.default, library.all_reduce_.default
        self._exact, self._exact_ = library.exact_all_reduce.default, library.exact_all_reduce_.default
        self._memory = {
            "rank": self.rank,
            "num_teams": workspace.num_teams,
            "ring": workspace.ring,
            "slot_bytes": workspace.slot_bytes,
            "timeout_s": config.timeout_s,
        }
        self._exact_options = {**self._memory, "num_blocks": workspace.max_blocks}

    @property
    def table(self) -> Table:
        """What chooses; another one takes effect with the next call."""
        return self._table

    @table.setter
    def table(self, table: Table) -> None:
        self._table = table
        self._plans.clear()

    def choose(self, x: Tensor, site: Site) -> Choice:
        """Algorithm, grid and depth of a call, the same on every rank.

        The algorithm is that of the config's bits: sites of other bits share the compensator's layout.
        """
        sizes = (x.numel() * x.element_size(), self.world_size, self.config.policy)
        choice = self.table.choose(*sizes, self.config.bits, site.direction, x.dtype)
        algorithm = choice.algorithm if self.config.algorithm is Algorithm.auto else self.config.algorithm
        return Choice(algorithm, min(choice.num_blocks, self.workspace.max_blocks), choice.depth)

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
        state, fresh, update = None, True, None
        if compensator is not None:
            is_captured = _is_capturing()
            state = compensator.raw_state(plan.state_key, plan.num_state_bytes, self._device, is_captured)
            # A replay of a later site's graph follows one of the site before it, whatever ran before the capture.
            fresh = compensator.is_fresh and not (is_captured and site.idx > 0)
            update = self._update_of(site) if self._updates_later(site) else None

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

    def correction(self, x: Tensor, site: Site, compensator: Compensator) -> Tensor | None:
        """See `Transport.correction`."""
        self._begin(x, site)
        plan = self._plan(x, site, True)
        state = compensator.written_state(plan.state_key, plan.num_state_bytes, self._device)
        if state is None:
            return None
        if self._updates_later(site):
            self._update_of(site).wait(self._stream)
        num_values, algorithm = plan.state_key
        return read_correction(state, self.config, algorithm, self.world_size, num_values)

    def num_sent_bytes(self, x: Tensor, site: Site) -> int:
        """See `Transport.num_sent_bytes`."""
        return self._plan(x, site, self.config.compensates).num_sent_bytes

    def exact_below_bytes(self, dtype: torch.dtype) -> int:
        """Messages of fewer bytes are summed exactly in no more time."""
        return self.table.exact_below_bytes(self.world_size, dtype)

    def min_bytes(self, dtype: torch.dtype) -> int:
        """As `exact_below_bytes`: why round what costs no less."""
        return self.exact_below_bytes(dtype)

    def check(self) -> None:
        """Raises CommunicationError if a wait on the device was given up, here or on a peer."""
        if not self.workspace.has_failed:
            return
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
                "agree on site, elements, dtype, bits, policy and algorithm"
            )
        else:
            what = f"rank {peer} gave up; see its error"
        raise CommunicationError(
            f"{where}: {what}. The outputs of this call are NaN; create a new communicator to go on"
        )

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
        self._updates.clear()
        if isinstance(self.workspace, SymmetricWorkspace):
            self.workspace.destroy()

    def abandon(self) -> None:
        """See `Transport.abandon`."""
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
                f"all_reduce: expected a tensor on {self._device}, this communicator's GPU, got {x.device}; use "
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

    def _plan(self, x: Tensor, site: Site, compensates: bool) -> _Plan:
        key = (x.numel(), x.dtype, site.bits, site.numbers[1], compensates)  # a number: an enum's hash is slow
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(x, site, compensates)
        return plan

    def _make_plan(self, x: Tensor, site: Site, compensates: bool) -> _Plan:
        library, config, num_values = torch.ops.echo_megatron, self.config, x.numel()
        choice = self.choose(x, site)
        layout = {
            "policy": index_of(config.policy),
            "group_size": config.group_size,
            "algorithm": index_of(choice.algorithm),
        }
        records = {**layout, "bits": site.bits}
        coefficients = self._coefficients if compensates else [0.0] * len(self._coefficients)
        state_dtype = index_of(config.state_dtype)
        num_tiles = library.call_tiles(num_values, self.world_size, **layout)
        num_records = num_tiles * (self.world_size if choice.algorithm is Algorithm.one_shot else 1)
        num_basis_values = make_quantizer(config, config.bits).num_basis_values(num_values)
        num_code_bytes = num_records * library.slot_bytes(site.bits, layout["policy"], config.group_size)
        decode_options = {**records, "world_size": self.world_size}
        return _Plan(
            options={
                **self._memory,
                **records,
                "residual": index_of(config.residual_of(site.direction)),
                "rescale": index_of(config.rescale),
                "state_dtype": state_dtype,
                "coefficients": coefficients,
                "num_blocks": choice.num_blocks,
                "depth": choice.depth,
            },
            state_key=(num_basis_values, choice.algorithm),
            num_state_bytes=num_tiles * library.state_tile_bytes(state_dtype),
            num_code_bytes=num_code_bytes,
            saves_codes=num_code_bytes < num_values * x.element_size(),
            num_sent_bytes=num_sent_bytes(config, site.bits, choice.algorithm, self.world_size, self.rank, num_values),
            decode_options=decode_options,
            update_options={**decode_options, "state_dtype": state_dtype, "coefficients": coefficients},
        )

    def _updates_later(self, site: Site) -> bool:
        return self.config.residual_of(site.direction) is Residual.consensus

    def _update_of(self, site: Site) -> _ConsensusUpdate:
        update = self._updates.get(site.numbers[1])
        if update is None:
            update = self._updates[site.numbers[1]] = _ConsensusUpdate(self._device, self._updates_beside)
        return update


class _ConsensusUpdate:
    """The consensus residual's update of one direction: on a side stream, beside the next matmul (paper Sec. 5.1).

    The next call of the direction waits for it. In a graph capture it runs on the call's own stream: a fork that is
    not joined before the capture ends is an error.

    Args:
        device: of the group's tensors.
        beside: False runs every update on the call's own stream.
    """

    def __init__(self, device: torch.device, beside: bool = True) -> None:
        self._beside = beside
        self._captured: list[Tensor] = []  # buffers that graphs use
        self._update = torch.ops.echo_megatron.consensus_update.default
        self._stream = torch.cuda.Stream(device)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._is_pending = False
        self._codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._copy = torch.empty(0, dtype=torch.uint8, device=device)
        self._copy_view = self._copy

    def codes(self, num_bytes: int) -> Tensor:
        """A buffer for the call's records."""
        if self._codes.numel() < num_bytes:
            self._codes = self._allocate(num_bytes)
        return self._codes

    def copy_of(self, x: Tensor) -> Tensor:
        """A flat buffer for x's values: a call in place overwrites x before the update has read it."""
        if self._copy_view.dtype != x.dtype or self._copy_view.numel() != x.numel():
            num_bytes = x.numel() * x.element_size()
            if self._copy.numel() < num_bytes:
                self._copy = self._allocate(num_bytes)
            with torch.inference_mode(False):
                self._copy_view = self._copy[:num_bytes].view(x.dtype)
        return self._copy_view

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Orders `stream`, the current one, behind the last update."""
        assert stream is not None
        if self._is_pending and not _is_capturing():
            stream.wait_event(self._done)

    def launch(
        self, stream: torch.cuda.Stream | None, x: Tensor, codes: Tensor | None, state: Tensor | None, **options: Any
    ) -> None:
        """Starts the update behind the call on `stream`, the current one."""
        assert stream is not None and codes is not None and state is not None
        is_captured = _is_capturing()
        if is_captured or not self._beside:
            self._update(x, codes, state, **options)
            self._is_pending = False
            if is_captured:
                self._captured += [self._codes, self._copy]
            return
        self._begun.record(stream)
        self._stream.wait_event(self._begun)
        with self._stream:
            self._update(x, codes, state, **options)
        self._done.record(self._stream)
        self._is_pending = True
        for tensor in (x, codes, state):
            if tensor is not self._codes and tensor is not self._copy_view:
                tensor.record_stream(self._stream)

    def _allocate(self, num_bytes: int) -> Tensor:
        """A buffer whose memory is not used anew before the last update has read it."""
        with torch.inference_mode(False):  # see Compensator.apply
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._codes.device)
        buffer.record_stream(self._stream)
        return buffer

    def num_bytes(self) -> int:
        """Device memory that is kept between calls."""
        return self._codes.numel() + self._copy.numel()


def why_unavailable(group: dist.ProcessGroup) -> str | None:
    """Why this rank cannot use the p2p transport, or None; then the ranks must still agree."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the GPU's compute capability {torch.cuda.get_device_capability()} is below 8.0"
    try:
        ops.load()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        return str(error) or type(error).__name__
    return None


def agree(group: dist.ProcessGroup) -> str | None:
    """Why the group cannot use the p2p transport, the same answer on every rank, or None. Collective."""
    reason = why_unavailable(group)
    if reason is not None:
        logger.warning("echo: rank %d cannot use the p2p transport: %s", group.rank(), reason)
    unable = [rank for rank, bad in enumerate(gather_numbers(group, int(reason is not None))) if bad]
    if unable:
        return (
            f"rank {unable[0]} cannot: {reason}" if group.rank() in unable else f"rank {unable[0]} cannot (see its log)"
        )
    if len(set(gather_numbers(group, host_number()))) > 1:
        return "the ranks are on several hosts"
    device = torch.cuda.current_device()
    identities = gather_numbers(group, device_number(device))
    if len(set(identities)) < len(identities):
        return "two ranks share a GPU"
    visible = {device_number(other): other for other in range(torch.cuda.device_count())}
    blocked = [
        number
        for number in identities
        if number in visible
        and visible[number] != device
        and not torch.cuda.can_device_access_peer(device, visible[number])
    ]
    if any(gather_numbers(group, int(bool(blocked)))):
        return "the GPUs have no peer access to each other"
    return None


def connect(group: dist.ProcessGroup, config: EchoConfig) -> P2PTransport:
    """The group's transport over PyTorch symmetric memory. Collective; the ranks must have `agree`d.

    Raises:
        CommunicationError: memory could not be allocated or mapped, or the ranks' tuning tables differ; on all ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    table: Table = all_or_none(group, "read its tuning table", lambda: load_table(name))
    if len(set(gather_numbers(group, table.fingerprint()))) > 1:
        raise CommunicationError(
            "p2p transport: the ranks have different tuning tables; write them anew with echo-megatron bench --tune"
        )
    return P2PTransport(SymmetricWorkspace(group, device, config), config, table)


def device_number(device: int) -> int:
    """The GPU's identity, which no permutation of CUDA_VISIBLE_DEVICES changes, as a number."""
    return int(str(torch.cuda.get_device_properties(device).uuid).replace("-", "")[-14:], 16)


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
