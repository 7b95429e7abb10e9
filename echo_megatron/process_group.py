"""The process group of one linear: it knows its site; everything but the site's all-reduce is the real group's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.communicator import Communicator
from echo_megatron.sites import Site

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SUM = dist.ReduceOp.SUM


class EchoProcessGroup(dist.ProcessGroup):
    """Stands in for the tensor-parallel group of one linear.

    Megatron's and Transformer Engine's linears end in `torch.distributed.all_reduce(t, group=<the module's group>)`.
    This group sends that call, when it is the site's sum of activations or gradients, to the communicator; every other
    collective and every other all-reduce goes to the real group, whose equal it is.

    Args:
        communicator: does the quantized all-reduce.
        site: the site of this linear.
        hidden_size: last dimension of the site's tensors; an all-reduce of another shape is not the site's.
        is_active: tells whether the module's present phase (train, evaluate) is quantized.
    """

    def __init__(self, communicator: Communicator, site: Site, hidden_size: int, is_active: Callable[[], bool]) -> None:
        super().__init__(communicator.group.rank(), communicator.group.size())  # type: ignore[call-arg]
        self.communicator = communicator
        self.real_group = communicator.group
        self.site = site
        self.hidden_size = hidden_size
        self._is_active = is_active
        self._min_bytes = {dtype: communicator.min_bytes(dtype) for dtype in _DTYPES}
        communicator.site_groups.append(self)

    def takes(self, x: Tensor, op: Any) -> bool:
        """Whether this all-reduce is the site's own and large enough to quantize, or small enough to sum exactly."""
        return self._call_for(x, op) is not None

    def is_own(self, x: Tensor, op: Any) -> bool:
        """Whether this all-reduce is the site's sum in a phase that is quantized, whatever its size."""
        return (
            self._is_active()
            and x.dtype in _DTYPES
            and x.dim() >= 2
            and x.shape[-1] == self.hidden_size
            and x.numel() > 0
            and op == _SUM
        )

    def _call_for(self, x: Tensor, op: Any) -> Callable[..., Tensor] | None:
        """The communicator's call that does this all-reduce, or None: the real group does it."""
        if not self.is_own(x, op):
            return None
        if x.numel() * x.element_size() >= self._min_bytes[x.dtype]:
            return self.communicator.all_reduce
        return self.communicator.exact_all_reduce if self.communicator.sums_exactly(x) else None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        opts = dist.AllreduceOptions() if opts is None else opts
        reduce = self._call_for(tensors[0], opts.reduceOp) if len(tensors) == 1 else None
        if reduce is None:
            return self.real_group.allreduce(tensors, opts)
        x = tensors[0]
        try:
            if not (opts.asyncOp and x.is_cuda):
                reduce(x, self.site, out=x)
                return _CompletedWork(tensors)
            return _run_beside(tensors, partial(reduce, x, self.site, out=x))
        except Exception:
            logger.exception("echo: %s failed on rank %d", self.site, self.rank())
            raise

    def getBackendName(self) -> str:
        return self.real_group.name()

    # Everything else is the real group's. PyTorch calls these with positional arguments only.

    def allreduce_coalesced(self, *args: Any) -> dist.Work:
        return self.real_group.allreduce_coalesced(*args)

    def allgather(self, *args: Any) -> dist.Work:
        return self.real_group.allgather(*args)

    def _allgather_base(self, *args: Any) -> dist.Work:
        return self.real_group._allgather_base(*args)

    def allgather_into_tensor_coalesced(self, *args: Any) -> dist.Work:
        return self.real_group.allgather_into_tensor_coalesced(*args)

    def reduce_scatter(self, *args: Any) -> dist.Work:
        return self.real_group.reduce_scatter(*args)

    def _reduce_scatter_base(self, *args: Any) -> dist.Work:
        return self.real_group._reduce_scatter_base(*args)

    def reduce_scatter_tensor_coalesced(self, *args: Any) -> dist.Work:
        return self.real_group.reduce_scatter_tensor_coalesced(*args)

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
