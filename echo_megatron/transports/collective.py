"""Codes over torch.distributed: all-to-all and all-gather on any process group (gloo, NCCL, several nodes)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Collective, EchoConfig, Rescale
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import (
    Segments,
    choose_algorithm,
    finite_amax,
    make_quantizer,
    num_sent_bytes,
    num_sent_share_bytes,
    rank_residual,
    sum_in_rank_order,
)
from echo_megatron.sites import Site
from echo_megatron.transports.peers import Peers
from echo_megatron.transports.protocol import CommunicationError, Reduced

MIN_BYTES = 16384  # on a CPU; reasoned, not measured
# On GPUs a call takes 3 ms whatever its size, NCCL 0.03 to 0.05 (docs/results/collective_h200x2.json). The 3 MB that it
# saves of 4 MiB take a link of 10 Gbit/s as long: smaller messages, a token's among them, would only be slower.
MIN_BYTES_ON_GPUS = 4 << 20


class CollectiveTransport:
    """One rank's part of the calls that `reference.SimulatedGroup` defines; packed records are what travels.

    Args:
        group: the tensor-parallel process group.
        config: the options.
        peers: the ranks of the group; None where this one is alone.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, config: EchoConfig, peers: Peers | None) -> None:
        self.group, self.peers = group, peers
        self.rank, self.world_size = group.rank(), group.size()
        self.config = config
        self.algorithm = choose_algorithm(config, self.world_size)
        self._quantizers: dict[int, Quantizer] = {}
        self._agreed: set[tuple[int, ...]] = set()

    def all_reduce(
        self,
        x: Tensor,
        site: Site,
        compensator: Compensator | None,
        out: Tensor | None = None,
        keep: bool = False,
    ) -> Reduced:
        """See `Transport.all_reduce`."""
        self._agree(x, site, Collective.all_reduce)
        quantizer = self._quantizer(site.bits)
        exponent = self._call_exponent(x, quantizer, site)
        values = quantizer.to_basis(x)
        if compensator is not None:
            values = compensator.apply(values)
        call = self._one_shot if self.algorithm is Algorithm.one_shot else self._two_shot
        reduced, residual, records, decode = call(values, quantizer, exponent, site)
        output = quantizer.from_basis(reduced, x.numel()).to(x.dtype)
        if compensator is not None:
            returned = reduced if quantizer.rotates else output.to(torch.float32)
            ranks = (self.config, site.direction, self.world_size, self.rank)
            compensator.update(rank_residual(*ranks, values, residual, reduced, returned))
        output = output.view(x.shape)
        if out is not None:
            output = out.copy_(output)
        if not keep or records.numel() >= output.numel() * output.element_size():
            return Reduced(output, output, _same)
        return Reduced(output, records, partial(_restore, quantizer, decode, x.shape, x.dtype))

    def reduce_scatter(
        self, x: Tensor, site: Site, compensator: Compensator | None, out: Tensor | None = None
    ) -> Tensor:
        """See `Transport.reduce_scatter`."""
        self._agree(x, site, Collective.reduce_scatter)
        quantizer = self._quantizer(site.bits)
        exponent = self._call_exponent(x, quantizer, site)
        shares = x.reshape(self.world_size, -1)
        values = quantizer.rows_to_basis(shares)
        if compensator is not None:
            values = compensator.apply(values)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        quantized = quantizer.quantize(values[others], exponent)
        send = list(quantizer.pack(quantized))
        send.insert(self.rank, send[0].new_empty(0))
        received = self._all_to_all(send, quantizer.num_bytes(values.shape[-1]), site)
        decoded = quantizer.decode(received, values.shape[-1])
        own = values[self.rank].unsqueeze(0)
        total = sum_in_rank_order(torch.cat((decoded[: self.rank], own, decoded[self.rank :])))
        if compensator is not None:
            residual = torch.zeros_like(values)
            residual[others] = values[others] - quantizer.dequantize(quantized)
            compensator.update(residual)
        output = quantizer.from_basis(total, shares.shape[-1]).to(x.dtype)
        return _placed(output.view(-1, *x.shape[1:]), out)

    def all_gather(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """See `Transport.all_gather`."""
        self._agree(x, site, Collective.all_gather)
        quantizer = self._quantizer(site.bits)
        exponent = self._call_exponent(x, quantizer, site)
        values = quantizer.to_basis(x)
        records = self._all_gather(quantizer.encode(values, exponent), site, "gather")
        decoded = quantizer.from_basis(quantizer.decode(records, values.numel()), x.numel()).to(x.dtype)
        return _placed(decoded.reshape(-1, *x.shape[1:]), out)

    def correction(
        self, x: Tensor, site: Site, compensator: Compensator, collective: Collective = Collective.all_reduce
    ) -> Tensor | None:
        """See `Transport.correction`."""
        quantizer = self._quantizer(site.bits)
        if collective is Collective.all_reduce:
            return compensator.correction(torch.Size((quantizer.num_basis_values(x.numel()),)), x.device)
        num_values = quantizer.num_basis_values(x.numel() // self.world_size)
        return compensator.correction(torch.Size((self.world_size, num_values)), x.device)

    def num_sent_bytes(self, x: Tensor, site: Site, collective: Collective = Collective.all_reduce) -> int:
        """See `Transport.num_sent_bytes`."""
        if collective is Collective.all_reduce:
            return num_sent_bytes(self.config, site.bits, self.algorithm, self.world_size, self.rank, x.numel())
        num_shares = self.world_size if collective is Collective.reduce_scatter else 1
        return num_sent_share_bytes(self.config, site.bits, self.world_size, x.numel() // num_shares)

    def exact_below_bytes(self, dtype: torch.dtype) -> int:
        """0: the process group's own all-reduce serves small messages."""
        return 0

    def min_bytes(self, dtype: torch.dtype, collective: Collective = Collective.all_reduce) -> int:
        """A few tokens: they are bound by latency, not by bytes."""
        return MIN_BYTES_ON_GPUS if "nccl" in dist.get_backend_config(self.group) else MIN_BYTES

    def exact_all_reduce(self, x: Tensor, site: Site, out: Tensor | None = None) -> Tensor:
        """Not offered: its bits would be those of the group's backend."""
        raise NotImplementedError("the collective transport has no exact all-reduce; call the process group's own")

    def check(self) -> None:
        """Nothing: failures raise in the call."""

    def num_bytes(self) -> int:
        """0: nothing is kept between calls."""
        return 0

    def take_sent_bytes(self) -> int:
        """0: everything goes through torch.distributed."""
        return 0

    def prepare_capture(self) -> None:
        """See `Transport.prepare_capture`."""
        raise ValueError(
            "transport collective: the ranks compare their calls on the host, which a CUDA graph can't capture. "
            "Expected the p2p transport (GPUs of one host that reach each other's memory), or no CUDA graphs "
            "(cuda_graph_impl=none)"
        )

    def destroy(self) -> None:
        """Nothing to give back."""

    def abandon(self) -> None:
        """Nothing to keep."""

    def _one_shot(
        self, values: Tensor, quantizer: Quantizer, exponent: Tensor | None, site: Site
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        quantized = quantizer.quantize(values, exponent)
        records = self._all_gather(quantizer.pack(quantized), site, "push")
        decode = partial(_decode_contributions, quantizer, values.numel())
        residual = values - quantizer.dequantize(quantized)
        return decode(records), residual, records, decode

    def _two_shot(
        self, values: Tensor, quantizer: Quantizer, exponent: Tensor | None, site: Site
    ) -> tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]:
        segments = Segments.split(values.numel(), self.world_size, quantizer.group_size)
        owned = segments.bounds(self.rank)
        residual = torch.empty_like(values)
        # Push: every segment to its owner.
        send = [values.new_empty(0, dtype=torch.uint8)] * self.world_size
        for ranks, rows in self._rows(values, segments):
            quantized = quantizer.quantize(rows, exponent)
            errors = rows - quantizer.dequantize(quantized)
            for rank, record, error in zip(ranks, quantizer.pack(quantized), errors, strict=True):
                send[rank], residual[segments.bounds(rank)] = record, error
        received = self._all_to_all(send, quantizer.num_bytes(segments.size(self.rank)), site)
        # Reduce: own segment exact, in rank order.
        record = values.new_empty(0, dtype=torch.uint8)
        if segments.size(self.rank):
            decoded = quantizer.decode(received, segments.size(self.rank))
            contributions = torch.cat((decoded[: self.rank], values[owned].unsqueeze(0), decoded[self.rank :]))
            residual[owned] = sum_in_rank_order(contributions)
            record = quantizer.encode(residual[owned], exponent)
        # Gather: the code of every sum to every rank; the owner decodes its own like everybody.
        largest = quantizer.num_bytes(segments.size(0))
        padded = torch.nn.functional.pad(record, (0, largest - record.numel()))
        records = self._all_gather(padded, site, "gather")
        decode = partial(_decode_segments, quantizer, segments)
        return decode(records), residual, records, decode

    def _rows(self, values: Tensor, segments: Segments) -> list[tuple[list[int], Tensor]]:
        """The segments of other ranks, grouped into matrices of equal length."""
        by_size: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            if rank != self.rank and segments.size(rank):
                by_size.setdefault(segments.size(rank), []).append(rank)
        return [(ranks, torch.stack([values[segments.bounds(r)] for r in ranks])) for ranks in by_size.values()]

    # -- messages

    def _all_gather(self, record: Tensor, site: Site, phase: str) -> Tensor:
        records = record.new_empty(self.world_size * record.numel())
        with self._named_errors(site, phase):
            self._wait(
                dist.all_gather_into_tensor(records, record.contiguous(), group=self.group, async_op=True), record
            )
        return records.view(self.world_size, -1)

    def _all_to_all(self, send: list[Tensor], num_bytes: int, site: Site) -> Tensor:
        receive_sizes = [0 if rank == self.rank else num_bytes for rank in range(self.world_size)]
        received = send[0].new_empty(sum(receive_sizes))
        send_sizes = [record.numel() for record in send]
        with self._named_errors(site, "push"):
            work = dist.all_to_all_single(
                received, torch.cat(send), receive_sizes, send_sizes, group=self.group, async_op=True
            )
            self._wait(work, received)
        return received.view(self.world_size - 1, num_bytes)

    def _call_exponent(self, x: Tensor, quantizer: Quantizer, site: Site) -> Tensor | None:
        """With `rescale: group` one exponent for the tensor from the largest |x| over the ranks (paper Sec. 5.4)."""
        if self.config.rescale is not Rescale.group:
            return None
        amax = finite_amax(x)
        with self._named_errors(site, "rescale"):
            self._wait(dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group, async_op=True), x)
        return quantizer.call_exponent(amax)

    def _agree(self, x: Tensor, site: Site, collective: Collective) -> None:
        """Fails on every rank when the ranks make different calls, which a collective would answer by hanging.

        On CPU before every call; on GPUs, where it costs a host synchronization, once for each kind of call.
        """
        names = ("elements", "bytes an element", "bits", "site", "direction", "chunk", "collective")
        kind = list(Collective).index(collective)
        call = (x.numel(), x.element_size(), site.bits, *site.numbers, kind)
        if x.is_cuda and call in self._agreed:
            return
        mine = torch.tensor(call, dtype=torch.int64, device=x.device)
        calls = mine.new_empty(self.world_size * mine.numel())
        with self._named_errors(site, "agree"):
            self._wait(dist.all_gather_into_tensor(calls, mine, group=self.group, async_op=True), x)
        rows = calls.view(self.world_size, -1).tolist()
        for rank, row in enumerate(rows):
            if tuple(row) != call:
                different = ", ".join(
                    f"{name} {theirs} (here {ours})"
                    for name, theirs, ours in zip(names, row, call, strict=True)
                    if theirs != ours
                )
                raise CommunicationError(
                    f"rank {self.rank}: {site}: expected the same call on all {self.world_size} ranks, but rank {rank} "
                    f"has {different}; check that every rank runs the same model on the same batch shape"
                )
        self._agreed.add(call)

    def _wait(self, work: dist.Work | None, like: Tensor) -> None:
        assert work is not None
        if like.is_cuda:
            work.wait()  # orders the stream; the host does not block, the group's own time-out bounds the wait
        else:
            work.wait(timedelta(seconds=self.config.timeout_s))

    def _named_errors(self, site: Site, phase: str) -> _NamedErrors:
        return _NamedErrors(self, f"{site}, phase {phase}")

    def _quantizer(self, bits: int) -> Quantizer:
        if bits not in self._quantizers:
            self._quantizers[bits] = make_quantizer(self.config, bits)
        return self._quantizers[bits]


class _NamedErrors:
    """Turns a backend's error, which knows no ranks, into one that says who waited where, and for whom."""

    def __init__(self, transport: CollectiveTransport, where: str) -> None:
        self.transport, self.where = transport, where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, CommunicationError):
            transport = self.transport
            assert transport.peers is not None
            raise CommunicationError(
                f"rank {transport.rank} of {transport.world_size}: {self.where}: "
                f"{transport.peers.roll_call(self.where)}. A peer did not answer "
                f"(timeout_s={transport.config.timeout_s:g}) or closed its connection: {error}"
            ) from error


def _decode_contributions(quantizer: Quantizer, num_values: int, records: Tensor) -> Tensor:
    return sum_in_rank_order(quantizer.decode(records, num_values))


def _decode_segments(quantizer: Quantizer, segments: Segments, records: Tensor) -> Tensor:
    full = segments.num_values // segments.length
    parts = [quantizer.decode(records[:full], segments.length).flatten()] if full else []
    if rest := segments.num_values - full * segments.length:
        parts.append(quantizer.decode(records[full, : quantizer.num_bytes(rest)], rest))
    return torch.cat(parts)


def _restore(
    quantizer: Quantizer, decode: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype, records: Tensor
) -> Tensor:
    return quantizer.from_basis(decode(records), shape.numel()).to(dtype).view(shape)


def _same(output: Tensor) -> Tensor:
    return output


def _placed(output: Tensor, out: Tensor | None) -> Tensor:
    return output.contiguous() if out is None else out.copy_(output)
