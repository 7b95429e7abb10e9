"""Numbers about the quantized sums in every n-th training step, all-reduces or reduce-scatters: how large their errors
are, and whether the compensator keeps their sum in bounds.

    inspector = Inspector(installation, every=100)
    inspector.begin_step(step)             # before the step's first forward
    ...                                    # forward, backward
    metrics = inspector.end_step()         # {"echo/forward/layers.0.mlp.linear_fc2/relative_error": 0.09, ...} or {}

A step that is not measured costs one comparison. A measured one sums the contributions again in FP32 over the group and
quantizes them again, which takes time, and memory for several FP32 copies of the largest message. It changes no bit of
the step's losses and gradients. docs/inspect.md says what to do about which number.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.communicator import Communicator
from echo_megatron.compensator import Compensator
from echo_megatron.config import Collective, Direction, Rescale
from echo_megatron.diagnostics_errors import PassErrors, grid_use, ratio
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import finite_amax, make_quantizer
from echo_megatron.replay import inside_backward
from echo_megatron.sites import PassClock, Site
from echo_megatron.transports.protocol import Reduced

if TYPE_CHECKING:
    from echo_megatron.integrations.megatron import Installation

logger = logging.getLogger(__name__)

# Every quantity of a site. A step has one call of the site for each microbatch; "mean" and "largest" are over them.
QUANTITIES = {
    "relative_error": "|y - sum x| / |sum x|: the returned sum y against the exact sum of the contributions x; mean",
    "injected_error": "|y - sum x'| / |sum x|: the part that this call's quantization adds; mean",
    "accumulated_error": "|S_t|: norm of the sum of y - sum x over the pass's sites so far; largest",
    "accumulated_bound": "what |S_t| may reach by Eqn. 21, from the largest |y - sum x'| of the pass so far, and by "
    "the rounding of y where that is not fed back; largest",
    "bound_used": "accumulated_error / accumulated_bound of the same call; largest",
    "saturated": "share of groups of x' with a value beyond half a step outside the grid's last code, or with a finite "
    "range that no scale can hold; mean over calls and ranks",
    "underflowed": "share of groups of x' in which a value is off by half the group's largest magnitude or more: "
    "the smallest scale is too large for it; mean over calls and ranks",
    "amax": "largest finite |x| of any rank; largest",
    "bytes": "bytes that a rank sends in a call, of either kind; mean over calls and ranks",
    "exact_calls": "calls of the step that were not quantized, for being smaller than min_bytes",
}
_MEANS = ("relative_error", "injected_error", "saturated", "underflowed")
_LARGEST = ("accumulated_error", "accumulated_bound", "bound_used", "amax")

_CAPTURED = (
    "inspect_every: a step that a CUDA graph captures can't be measured, its replay runs no Python; set "
    "inspect_every=0, or capture in a step that is not measured"
)


class Inspector:
    """Measures every n-th step of an installed model.

    Args:
        installation: what `install` returned; where it installed nothing there is nothing to measure.
        every: steps from one measured step to the next; 0 switches it off.

    Raises:
        ValueError: `every` is not a whole number >= 0, or the model runs under CUDA graphs: replays run no Python.
    """

    def __init__(self, installation: Installation, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"inspect_every: expected a whole number of steps, 0 or more, got {every!r}")
        self._every = every
        self._communicator = installation.communicator
        self._measurement: _Measurement | None = None
        if not every:
            return
        if self._communicator is None:
            logger.info("echo: inspect_every=%d: nothing is installed, so there is nothing to measure", every)
        if installation.uses_cuda_graphs:
            raise ValueError(
                f"inspect_every: expected 0 with CUDA graphs, got {every}: a replay runs no Python, so no call could "
                "be measured; set inspect_every=0, or measure a run with cuda_graph_impl=none"
            )

    def begin_step(self, step: int) -> bool:
        """Before the step's first forward: measures the calls from here to `end_step`, if the step's number is due.

        A step that was begun and never ended, because it failed, is forgotten.

        Args:
            step: the same on all ranks; due where it is divisible by `every`.

        Returns:
            Whether the step is measured, the same on all ranks that have sites.

        Raises:
            RuntimeError: a CUDA graph is being captured: its replay would measure nothing.
        """
        if self._measurement is not None:
            self._measurement.stop()
            self._measurement = None
        if not self._every or step % self._every or self._communicator is None:
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED)
        self._measurement = _Measurement(self._communicator)
        return True

    def end_step(self) -> dict[str, float]:
        """After the step's last backward; collective over the tensor-parallel group in a measured step.

        Returns:
            `QUANTITIES` of every site that was called, by the tag `echo/<direction>/<site>/<quantity>`, in the order of
            the passes, the same on all ranks of the tensor-parallel group; {} where the step was not measured. A
            pipeline stage knows its own sites: see `gather`. Sites without a quantized call have `bytes` and
            `exact_calls` only.
        """
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return {}
        measurement.stop()
        return measurement.metrics()


def gather(metrics: dict[str, float], group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    """The metrics of all ranks of `group`, e.g. of the pipeline stages, on every rank of it. Collective.

    Args:
        metrics: from `Inspector.end_step`; the lower rank's value counts where two have a tag.
        group: over whose ranks.
        device: that the group's backend communicates from.
    """
    if group.size() == 1:
        return metrics
    text = torch.frombuffer(bytearray(json.dumps(metrics).encode()), dtype=torch.uint8).to(device)
    sizes = torch.zeros(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, torch.tensor([text.numel()], device=device), group=group)
    padded = torch.nn.functional.pad(text, (0, int(sizes.max()) - text.numel()))
    texts = torch.empty(group.size() * padded.numel(), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(texts, padded, group=group)
    rows = texts.view(group.size(), -1).cpu()
    gathered: dict[str, float] = {}
    for row, size in zip(rows, sizes.tolist(), strict=True):
        for tag, value in json.loads(bytes(row[:size].tolist())).items():
            gathered.setdefault(tag, value)
    return gathered


class _Measurement:
    """One measured step: stands in for the transport's sums from its creation to `stop`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._transport = communicator.transport
        self._group = communicator.group
        self._config = communicator.config
        self._clocks = {direction: PassClock() for direction in Direction}
        self._errors = {direction: PassErrors(self._config.feedback_of(direction)) for direction in Direction}
        self._measured: dict[Site, list[Tensor]] = {}
        self._num_bytes: dict[Site, list[int]] = {}
        self._num_exact: dict[Site, int] = {}
        self._device = torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None  # of the last call
        # Attributes of the objects hide their classes' methods: a step that is not measured runs what it always runs.
        self._replaced: list[tuple[Any, str, Any]] = []
        self._all_reduce = self._replace(self._transport, "all_reduce", self._observe)
        self._reduce_scatter = self._replace(self._transport, "reduce_scatter", self._observe_scatter)
        for group in communicator.site_groups:
            self._replace(group, "_call_for", partial(self._choose, group, group._call_for))
            self._replace(group, "_scatters", partial(self._choose_scatter, group, group._scatters))

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> Any:
        self._replaced.append((owner, name, vars(owner).get(name)))
        old = getattr(owner, name)
        setattr(owner, name, new)
        return old

    def stop(self) -> None:
        """Puts everything back."""
        for owner, name, own in self._replaced:
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._replaced.clear()

    # -- what happens in a call

    def _choose(
        self, group: EchoProcessGroup, call_for: Callable[..., Callable[..., Tensor] | None], x: Tensor, op: Any
    ) -> Callable[..., Tensor] | None:
        """`EchoProcessGroup._call_for`, counting the site's calls that are summed exactly."""
        call = call_for(x, op)
        if call != self._communicator.all_reduce and group.is_own(x, op):
            # p2p's exact sum sends the contribution to everybody; the real group's counts as a ring.
            size = self._group.size()
            self._count_exact(group.site, x, (size - 1) * x.nbytes if call is not None else 2 * self._ring_bytes(x))
        return call

    def _choose_scatter(
        self, group: EchoProcessGroup, scatters: Callable[..., bool], out: Tensor, x: Tensor, op: Any
    ) -> bool:
        """`EchoProcessGroup._scatters`, counting likewise."""
        is_quantized = scatters(out, x, op)
        if not is_quantized and group.is_own(x, op, out):
            self._count_exact(group.site, x, self._ring_bytes(x))
        return is_quantized

    def _ring_bytes(self, x: Tensor) -> int:
        return (self._group.size() - 1) * x.nbytes // self._group.size()

    def _count_exact(self, site: Site, x: Tensor, num_bytes: int) -> None:
        if site.direction is Direction.forward and inside_backward():
            return  # recomputed
        self._device = x.device
        self._num_exact[site] = self._num_exact.get(site, 0) + 1
        self._num_bytes.setdefault(site, []).append(num_bytes)

    def _observe(
        self, x: Tensor, site: Site, compensator: Compensator | None, out: Tensor | None = None, keep: bool = False
    ) -> Reduced:
        """`Transport.all_reduce`. The ranks communicate after it: if they make different calls, it says so."""
        begins, contribution, correction = self._before(x, site, compensator, Collective.all_reduce)
        reduced = self._all_reduce(x, site, compensator, out, keep)
        returned = reduced.output.reshape(1, -1).to(torch.float32)
        self._after(x, site, Collective.all_reduce, begins, contribution, correction, returned)
        return reduced

    def _observe_scatter(
        self, x: Tensor, site: Site, compensator: Compensator | None, out: Tensor | None = None
    ) -> Tensor:
        """`Transport.reduce_scatter`; the shares of all ranks are the sum."""
        begins, contribution, correction = self._before(x, site, compensator, Collective.reduce_scatter)
        output = self._reduce_scatter(x, site, compensator, out)
        returned = torch.empty_like(contribution)
        work = self._group._allgather_base(returned, output.reshape(1, -1).to(torch.float32))
        if work is not None:
            work.wait()
        self._after(x, site, Collective.reduce_scatter, begins, contribution, correction, returned)
        return output

    def _before(
        self, x: Tensor, site: Site, compensator: Compensator | None, collective: Collective
    ) -> tuple[bool, Tensor, Tensor | None]:
        """Whether the call begins a pass; x and the correction, fp32, a row for each stream that is quantized."""
        if x.is_cuda:
            self._follow(x.device)
        begins = self._clocks[site.direction].tick(site) or (compensator is not None and compensator.is_fresh)
        correction = None
        if compensator is not None:
            correction = self._transport.correction(x, site, compensator, collective)
        num_rows = self._group.size() if collective is Collective.reduce_scatter else 1
        contribution = x.reshape(num_rows, -1).to(torch.float32, copy=True)  # x may be where the sum goes
        return begins, contribution, None if correction is None else correction.view(num_rows, -1)

    def _after(
        self,
        x: Tensor,
        site: Site,
        collective: Collective,
        begins: bool,
        contribution: Tensor,
        correction: Tensor | None,
        returned: Tensor,
    ) -> None:
        errors = self._errors[site.direction]
        if begins:
            errors.begin()
        measured = self._measure(site, errors, contribution, correction, returned, x.dtype)
        self._measured.setdefault(site, []).append(measured)
        self._num_bytes.setdefault(site, []).append(self._transport.num_sent_bytes(x, site, collective))

    def _measure(
        self,
        site: Site,
        errors: PassErrors,
        contribution: Tensor,
        correction: Tensor | None,
        returned: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """fp64, `_MEANS` and `_LARGEST` of the call, as this rank sees them; nothing waits for the device."""
        num_values, amax = contribution.shape[-1], finite_amax(contribution)
        quantizer = make_quantizer(self._config, site.bits)
        exponent = None
        if self._config.rescale is Rescale.group:
            exponent = quantizer.call_exponent(self._sum(amax.clone(), dist.ReduceOp.MAX))
        values = quantizer.rows_to_basis(contribution)
        values = values if correction is None else values + correction
        saturated, underflowed = torch.stack([grid_use(quantizer, row, exponent) for row in values]).mean(0)
        del values
        if correction is None:
            exact, added = self._sum(contribution), None
        else:
            sums = self._sum(torch.cat((contribution, correction), dim=-1))
            exact = sums[:, :num_values]
            added = quantizer.from_basis(sums[:, num_values:], num_values).flatten()
        # What a rotated policy rounds y by goes unreturned; in FP32 that is as small as all arithmetic's.
        is_lost = quantizer.rotates and self._config.compensates and dtype.itemsize < 4
        roundoff = torch.finfo(dtype).eps / 2 if is_lost else 0.0
        relative, injected, accumulated, bound = errors.add(exact.flatten(), added, returned.flatten(), roundoff)
        for held in (errors.accumulated, errors.largest, errors.rounded):
            if held is not None and self._stream is not None:
                held.record_stream(self._stream)
        means = (relative, injected, saturated, underflowed)
        return torch.stack((*means, accumulated, bound, ratio(accumulated, bound), amax.double()))

    def _sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place over the group; not through `torch.distributed`, where a run's traffic may be counted."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = self._group.allreduce([values], options)
        if work is not None:
            work.wait()  # on GPUs orders the stream, the host goes on
        return values

    def _follow(self, device: torch.device) -> None:
        """Orders the current stream behind the last call's: backward passes communicate on a stream of their own."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED)
        stream = torch.cuda.current_stream(device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream, self._device = stream, device

    # -- the result

    def metrics(self) -> dict[str, float]:
        """See `Inspector.end_step`."""
        sites = sorted(self._num_bytes, key=lambda site: (list(Direction).index(site.direction), site.chunk, site.idx))
        if not sites:
            return {}
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        num_means, num_columns = len(_MEANS), len(_MEANS) + len(_LARGEST)
        rows = []
        for site in sites:
            if site not in self._measured:
                rows.append(torch.zeros(num_columns, dtype=torch.float64, device=self._device))
                continue
            calls = torch.stack(self._measured[site])
            rows.append(torch.cat((calls[:, :num_means].mean(0), calls[:, num_means:].amax(0))))
        num_bytes = [sum(self._num_bytes[site]) / len(self._num_bytes[site]) for site in sites]
        table = torch.stack(rows)
        amax = self._sum(table[:, -1].clone(), dist.ReduceOp.MAX)
        table[:, -1] = torch.tensor(num_bytes, dtype=torch.float64)
        table = self._sum(table) / self._group.size()
        values = torch.cat((table, amax.unsqueeze(-1)), dim=-1).tolist()
        names = (*_MEANS, *_LARGEST[:-1], "bytes", "amax")
        metrics = {}
        for site, row in zip(sites, values, strict=True):
            measured = dict(zip(names, row, strict=True)) | {"exact_calls": float(self._num_exact.get(site, 0))}
            for quantity in QUANTITIES if site in self._measured else ("bytes", "exact_calls"):
                metrics[f"echo/{site.direction.name}/{site.name}/{quantity}"] = measured[quantity]
        return metrics
