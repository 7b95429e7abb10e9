"""Codes written straight into the peers' memory: one fused CUDA kernel a call (cuda/all_reduce.cuh)."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual
from echo_megatron.ops import index_of
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError, Reduced
from echo_megatron.tuning import Choice, Table, load_table
from echo_megatron.workspace import SymmetricWorkspace, Workspace, gather_numbers, host_number

_STAGES = ("push", "gather", "rescale")
_TIMEOUT, _MISMATCH = 1, 2  # cuda/arguments.cuh, Failure; 3 is a peer that gave up


class P2PTransport:
    """One rank's part of the calls that `reference.SimulatedGroup` defines, bit for bit, in one kernel launch each.

    No call synchronizes the host or allocates more than its result, so a CUDA graph captures it. Calls of one
    communicator run in the order in which they were made, whatever their streams.

    Args:
        workspace: this rank's.
        config: the options.
        table: grid, depth and, for `algorithm: auto`, algorithm by message; the same on every rank.
    """

    name = "p2p"

    def __init__(self, workspace: Workspace, config: EchoConfig, table: Table) -> None:
        self.workspace = workspace
        self.config = config
        self.table = table
        self.rank, self.world_size = workspace.rank, workspace.world_size
        self.algorithm = config.algorithm
        self._sites: dict[tuple[int, int, int], Site] = {}
        self._last_stream: torch.cuda.Stream | None = None
        self._updates: dict[Direction, _ConsensusUpdate] = {}
        self._enums = {
            "policy": index_of(config.policy),
            "group_size": config.group_size,
            "residual": index_of(config.residual),
            "rescale": index_of(config.rescale),
            "state_dtype": index_of(config.state_dtype),
        }
        self._memory = {
            "num_teams": workspace.num_teams,
            "ring": workspace.ring,
            "slot_bytes": workspace.slot_bytes,
            "timeout_s": config.timeout_s,
        }

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
        in_place = out is not None and out.data_ptr() == source.data_ptr() and out.is_contiguous()
        output = source if in_place else torch.empty_like(source)
        choice = self.choose(x, site)
        call = {**self._enums, "bits": site.bits, "algorithm": index_of(choice.algorithm)}
        key = {name: call[name] for name in ("policy", "group_size", "algorithm")}
        num_tiles = torch.ops.echo_megatron.call_tiles(x.numel(), self.world_size, **key)

        state, fresh, coefficients, update = None, True, [0.0] * 5, None
        if compensator is not None:
            num_bytes = num_tiles * torch.ops.echo_megatron.state_tile_bytes(call["state_dtype"])
            state = compensator.raw_state((x.numel(), choice.algorithm), num_bytes, x.device)
            fresh, coefficients = compensator.is_fresh, compensator.coefficients
            if self.config.residual is Residual.consensus:
                update = self._updates.setdefault(site.direction, _ConsensusUpdate(x.device))
        codes = self._codes(x, num_tiles, choice, site, keep, update)
        kept_x = update.copy_of(source) if update is not None and in_place else None
        if update is not None:
            update.wait()
        run = torch.ops.echo_megatron.all_reduce_ if in_place else torch.ops.echo_megatron.all_reduce
        run(
            *((source,) if in_place else (source, output)),
            self.workspace.buffer,
            state,
            codes,
            kept_x,
            self.workspace.failure,
            self.workspace.peers,
            rank=self.rank,
            **call,
            fresh=fresh,
            coefficients=coefficients,
            site=_numbers(site),
            num_blocks=choice.num_blocks,
            depth=choice.depth,
            **self._memory,
        )
        if update is not None:
            assert state is not None and codes is not None
            update.launch(
                source if kept_x is None else kept_x,
                codes,
                state,
                fresh=fresh,
                coefficients=coefficients,
                world_size=self.world_size,
                bits=site.bits,
                state_dtype=call["state_dtype"],
                **key,
            )
        if compensator is not None:
            compensator.mark_updated()
        output = output.view(x.shape)
        if out is not None and not in_place:
            out.copy_(output)
            output = out
        if not keep:
            return Reduced(output, output, _same)
        if codes is None or codes.numel() >= x.numel() * x.element_size():
            return Reduced(output, output, _same)
        restore = partial(_restore, x.shape, x.dtype, {**key, "bits": site.bits, "world_size": self.world_size})
        return Reduced(output, codes, restore)

    def exact_all_reduce(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """The sum in FP32 in rank order, rounded once (`reference.exact_sum`): for messages too small to quantize."""
        source = self._begin(x, site)
        in_place = out is not None and out.data_ptr() == source.data_ptr() and out.is_contiguous()
        output = source if in_place else torch.empty_like(source)
        run = torch.ops.echo_megatron.exact_all_reduce_ if in_place else torch.ops.echo_megatron.exact_all_reduce
        run(
            *((source,) if in_place else (source, output)),
            self.workspace.buffer,
            self.workspace.failure,
            self.workspace.peers,
            rank=self.rank,
            site=_numbers(site),
            num_blocks=self.workspace.max_blocks,
            **self._memory,
        )
        output = output.view(x.shape)
        if out is not None and not in_place:
            return out.copy_(output)
        return output

    def exact_below_bytes(self, x: Tensor) -> int:
        """Messages of fewer bytes are summed exactly in no more time."""
        return self.table.exact_below_bytes(self.world_size, x.dtype)

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
                f"rank {peer} makes another call: expected call {expected:#010x}, got {seen:#010x}. The ranks must "
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

    def destroy(self) -> None:
        """Gives the workspace back; collective."""
        self._updates.clear()
        if isinstance(self.workspace, SymmetricWorkspace):
            self.workspace.destroy()

    def _begin(self, x: Tensor, site: Site) -> Tensor:
        """The contiguous input, ordered behind the communicator's last call."""
        self.check()
        if not self.workspace.peers:
            raise CommunicationError(f"{site}: this communicator was destroyed; create a new one")
        if x.device != self.workspace.buffer.device:
            raise ValueError(
                f"all_reduce: expected a tensor on {self.workspace.buffer.device}, this communicator's GPU, got "
                f"{x.device}; use transport: collective for other devices"
            )
        self._sites[tuple(_numbers(site))] = site  # type: ignore[index]
        stream = torch.cuda.current_stream(x.device)
        if self._last_stream is not None and self._last_stream != stream and not _is_capturing():
            stream.wait_stream(self._last_stream)
        self._last_stream = stream
        return x.contiguous()

    def _codes(
        self, x: Tensor, num_tiles: int, choice: Choice, site: Site, keep: bool, update: _ConsensusUpdate | None
    ) -> Tensor | None:
        """Where the call leaves the records that its result was decoded from, if anybody needs them."""
        num_records = num_tiles * (self.world_size if choice.algorithm is Algorithm.one_shot else 1)
        slot_bytes = torch.ops.echo_megatron.slot_bytes(site.bits, self._enums["policy"], self.config.group_size)
        num_bytes = num_records * slot_bytes
        if keep and num_bytes < x.numel() * x.element_size():
            return torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
        return update.codes(num_bytes) if update is not None else None


class _ConsensusUpdate:
    """The consensus residual's update of one direction: on a side stream, beside the next matmul (paper Sec. 5.1).

    The next call of the direction waits for it. In a graph capture it runs on the call's own stream: a fork that is
    not joined before the capture ends is an error.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._done: torch.cuda.Event | None = None
        self._codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._copy = torch.empty(0, dtype=torch.uint8, device=device)

    def codes(self, num_bytes: int) -> Tensor:
        """A buffer for the call's records."""
        if self._codes.numel() < num_bytes:
            self._codes = torch.empty(num_bytes, dtype=torch.uint8, device=self._codes.device)
        return self._codes

    def copy_of(self, x: Tensor) -> Tensor:
        """A buffer like x: a call in place overwrites x before the update has read it."""
        num_bytes = x.numel() * x.element_size()
        if self._copy.numel() < num_bytes:
            self._copy = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
        return self._copy[:num_bytes].view(x.dtype).view(x.shape)

    def wait(self) -> None:
        """Orders the current stream behind the last update."""
        if self._done is not None and not _is_capturing():
            torch.cuda.current_stream().wait_event(self._done)

    def launch(self, x: Tensor, codes: Tensor, state: Tensor, **call: object) -> None:
        """Starts the update behind the current stream's call."""
        if _is_capturing():
            torch.ops.echo_megatron.consensus_update(x, codes, state, **call)
            self._done = None
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            torch.ops.echo_megatron.consensus_update(x, codes, state, **call)
            self._done = self._stream.record_event()
        for tensor in (x, codes, state):  # their memory must not be used anew before the update has read it
            tensor.record_stream(self._stream)

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
    except (ops.KernelsUnavailable, ops.KernelBuildError) as error:
        return str(error)
    return None


def agree(group: dist.ProcessGroup) -> str | None:
    """Why the group cannot use the p2p transport, the same answer on every rank, or None. Collective."""
    reason = why_unavailable(group)
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
    table = load_table(torch.cuda.get_device_name(device))
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


def _numbers(site: Site) -> list[int]:
    return [site.idx, index_of(site.direction), site.chunk]


def _same(output: Tensor) -> Tensor:
    return output


def _restore(shape: torch.Size, dtype: torch.dtype, call: dict[str, int], codes: Tensor) -> Tensor:
    output = torch.empty(shape, dtype=dtype, device=codes.device)
    torch.ops.echo_megatron.decode(codes, output, **call)
    return output
