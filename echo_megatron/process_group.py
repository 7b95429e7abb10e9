"""The process group of one linear: it knows its site; what is not the linear's own activations is the real group's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from echo_megatron.communicator import Communicator
from echo_megatron.config import Collective
from echo_megatron.sites import Site

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SUM = dist.ReduceOp.SUM


class EchoProcessGroup(dist.ProcessGroup):
    """Stands in for the tensor-parallel group of one linear.

    Megatron's and Transformer Engine's linears end in `torch.distributed.all_reduce(t, group=<the module's group>)`,
    or, with sequence parallelism, in `reduce_scatter_tensor` and `all_gather_into_tensor`. This group sends these
    calls, where they are for activations or their gradients, to the communicator; every other collective and every
    other tensor, e.g. FP8 data, goes to the real group, whose equal it is.

    Args:
        communicator: does the quantized calls.
        site: the site of this linear.
        hidden_size: last dimension of the site's tensors; a call for another shape is not the site's.
        is_active: tells whether the module's present phase (train, evaluate) is quantized.
        sums: whether the site's all-reduces and reduce-scatters are quantized.
        gather: the site with the bits of the linear's all-gathers; None leaves these to the real group.
    """

    def __init__(
        self,
        communicator: Communicator,
        site: Site,
        hidden_size: int,
        is_active: Callable[[], bool],
        *,
        sums: bool = True,
        gather: Site | None = None,
    ) -> None:
        super().__init__(communicator.group.rank(), communicator.group.size())  # type: ignore[call-arg]
        self.communicator = communicator
        self.real_group = communicator.group
        self.site = site
        self.hidden_size = hidden_size
        self.sums = sums
        self.gather_site = gather
        self._is_active = is_active
        self._is_coalescing = False
        self._reduce_bytes, self._scatter_bytes, self._gather_bytes = (  # not one dictionary: an enum's hash is slow
            {dtype: communicator.min_bytes(dtype, collective) for dtype in _DTYPES} for collective in Collective
        )
        communicator.site_groups.append(self)

    def takes(self, x: Tensor, op: Any) -> bool:
        """Whether this all-reduce is the site's own and large enough to quantize, or small enough to sum exactly."""
        return self._call_for(x, op) is not None

    def is_own(self, x: Tensor, op: Any, out: Tensor | None = None) -> bool:
        """Whether this sum is the site's in a phase that is quantized, whatever its size.

        Args:
            x: what is summed.
            op: the operation.
            out: where a reduce-scatter puts its share; None: it is an all-reduce.
        """
        return self.sums and op == _SUM and self._is_activation(x) and (out is None or self._is_share(out, x))

    def _is_own_gather(self, out: Tensor, x: Tensor) -> bool:
        return self.gather_site is not None and self._is_activation(x) and self._is_share(x, out)

    def _is_activation(self, x: Tensor) -> bool:
        return (
            self._is_active()
            and x.dtype in _DTYPES
            and x.dim() >= 2
            and x.shape[-1] == self.hidden_size
            and x.numel() > 0
        )

    def _is_share(self, share: Tensor, whole: Tensor) -> bool:
        """Whether `share` is one rank's part of the first dimension of `whole`."""
        shape = (share.shape[0] * self.size(), *share.shape[1:]) if share.dim() else ()
        return share.dtype == whole.dtype and tuple(whole.shape) == shape and not self._is_coalescing

    def _call_for(self, x: Tensor, op: Any) -> Callable[..., Tensor] | None:
        """The communicator's call that does this all-reduce, or None: the real group does it."""
        if not self.is_own(x, op):
            return None
        if _num_bytes(x) >= self._reduce_bytes[x.dtype]:
            return self.communicator.all_reduce
        return self.communicator.exact_all_reduce if self.communicator.sums_exactly(x) else None

    def _scatters(self, out: Tensor, x: Tensor, op: Any) -> bool:
        """Whether the communicator does this reduce-scatter."""
        return self.is_own(x, op, out) and _num_bytes(x) >= self._scatter_bytes[x.dtype]

    def _gathers(self, out: Tensor, x: Tensor) -> bool:
        """Whether the communicator does this all-gather."""
        return self._is_own_gather(out, x) and _num_bytes(out) >= self._gather_bytes[x.dtype]

    def _run(self, call: Callable[..., Tensor], x: Tensor, site: Site, out: Tensor, is_async: bool) -> dist.Work:
        """The communicator's `call`; asynchronous on a GPU."""
        tensors = [out] if out is x else [out, x]
        try:
            if not (is_async and x.is_cuda):
                call(x, site, out=out)
                return _CompletedWork(tensors)
            return _run_beside(tensors, partial(call, x, site, out=out))
        except Exception:
            logger.exception("echo: %s failed on rank %d", site, self.rank())
            raise

    # The real group's calls go through torch.distributed, where a run's traffic may be counted.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = dist.AllreduceOptions() if opts is None else opts
        reduce = self._call_for(tensors[0], opts.reduceOp) if len(tensors) == 1 else None
        if reduce is None:
            if len(tensors) == 1:
                return dist.all_reduce(tensors[0], opts.reduceOp, group=self.real_group, async_op=opts.asyncOp)
            return self.real_group.allreduce(tensors, opts)
        return self._run(reduce, tensors[0], self.site, tensors[0], opts.asyncOp)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        if not self._scatters(out, x, opts.reduceOp):
            return dist.reduce_scatter_tensor(out, x, opts.reduceOp, group=self.real_group, async_op=opts.asyncOp)
        return self._run(self.communicator.reduce_scatter, x, self.site, out, opts.asyncOp)

    def _allgather_base(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        opts = AllgatherOptions() if opts is None else opts
        if not self._gathers(out, x):
            return dist.all_gather_into_tensor(out, x, group=self.real_group, async_op=opts.asyncOp)
        assert self.gather_site is not None
        return self._run(self.communicator.all_gather, x, self.gather_site, out, opts.asyncOp)

    def reduce_scatter_tensor_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        pairs = list(zip(outs, xs, strict=True))
        own = [self._scatters(out, x, opts.reduceOp) for out, x in pairs]
        if not any(own):
            return self.real_group.reduce_scatter_tensor_coalesced(outs, xs, opts)
        return _Works([self._reduce_scatter_base(out, x, opts) for out, x in pairs])

    def allgather_into_tensor_coalesced(self, outs: list[Tensor], xs: list[Tensor], *opts: Any) -> dist.Work:
        pairs = list(zip(outs, xs, strict=True))
        if not any(self._gathers(out, x) for out, x in pairs):
            return self.real_group.allgather_into_tensor_coalesced(outs, xs, *opts)
        return _Works([self._allgather_base(out, x, *opts) for out, x in pairs])

    # A block that is coalesced into one launch (with a device, as Transformer Engine does for FP8 data) runs its calls
    # at its end. A call that works on what came can't wait for that: such a block is the real group's as a whole.

    def _start_coalescing(self, device: torch.device) -> None:
        self._is_coalescing = True
        self.real_group._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        self._is_coalescing = False
        return self.real_group._end_coalescing(device)

    def getBackendName(self) -> str:
        return self.real_group.name()

    # Everything else is the real group's. PyTorch calls these with positional arguments only.

    def allreduce_coalesced(self, *args: Any) -> dist.Work:
        return self.real_group.allreduce_coalesced(*args)

    def allgather(self, *args: Any) -> dist.Work:
        return self.real_group.allgather(*args)

    def reduce_scatter(self, *args: Any) -> dist.Work:
        return self.real_group.reduce_scatter(*args)

    def alltoall_base(self, *args: Any) -> dist.Work:
        return self.real_group.alltoall_base(*args)

    def alltoall(self, *args: Any) -> dist.Work:
        return self.real_group.alltoall(*args)

    def broadcast(self, *args: Any) -> dist.Work:
        return self.real_group.broadcast(*args)

    def reduce(self, *args: Any) -> dist.Work:
        return self.real_group.reduce(*args)

    def gather(self, *args: Any) -> dist.Work:
        return self.real_group.gather(*args)

    def scatter(self, *args: Any) -> dist.Work:
        return self.real_group.scatter(*args)

    def send(self, *args: Any) -> dist.Work:
        return self.real_group.send(*args)

    def recv(self, *args: Any) -> dist.Work:
        return self.real_group.recv(*args)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:  # type: ignore[override]
        return self.real_group.barrier(dist.BarrierOptions() if opts is None else opts)

    # `torch.distributed` keeps what it knows of a group (backend, ranks, name) in dictionaries by group. As the real
    # group's equal this one finds the real group's entries, and whoever lists all groups (torch.profiler, the end of
    # the process group) meets the real one alone.

    def __eq__(self, other: object) -> bool:
        return self.real_group is (other.real_group if isinstance(other, EchoProcessGroup) else other)

    def __hash__(self) -> int:
        return hash(self.real_group)

    def close(self) -> None:
        """No linear calls it any more."""
        self.communicator.site_groups = [group for group in self.communicator.site_groups if group is not self]


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _CompletedWork(dist.Work):
    """A call that is already ordered on the caller's stream."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Works(dist.Work):
    """Several calls that are waited for as one."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class _StreamWork(dist.Work):
    """A call on a side stream; `wait` orders the caller's stream behind it."""

    def __init__(self, tensors: list[Tensor], done: torch.cuda.Event) -> None:
        super().__init__()
        self._tensors, self._done = tensors, done  # the tensors' memory must not be used anew before the call ran

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.cuda.current_stream(self._tensors[0].device).wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _run_beside(tensors: list[Tensor], call: Callable[[], object]) -> dist.Work:
    """Runs an asynchronous call on a stream of its own, behind what the caller's stream has done so far."""
    device = tensors[0].device
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    stream = _side_streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        return _StreamWork(tensors, stream.record_event())
