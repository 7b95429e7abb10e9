"""Echo's calls: a communicator on the sites of a pass, the compensator unfused, and the checks before timing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from echo_megatron.bench.rows import EXACT, NATIVE, Kind, Row
from echo_megatron.bench.timing import agree_max
from echo_megatron.communicator import Communicator
from echo_megatron.config import PAPER_FEEDBACK, Algorithm, Direction, EchoConfig, Residual
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site
from echo_megatron.transports.p2p import P2PTransport

NUM_SITES = 56  # Qwen3-0.6B: 28 layers
TIMEOUT_S = 20.0  # a call that hangs must not take the run's time
CHECKED_SITES = 3
CHECKED_VALUES = 1_000_003
CHECKED_VALUES_LARGE = (32 << 20) + 3  # a little over 64 MiB: the other side of a table's threshold


class EchoCall:
    """`Communicator.all_reduce` on a pass of 56 sites, in place as Megatron calls it, or into a new tensor.

    Args:
        group: the process group.
        config: the options.
        in_place: the sum takes the place of x.
        direction: the pass.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: EchoConfig,
        in_place: bool = True,
        direction: Direction = Direction.forward,
    ) -> None:
        self.config = config.replace(timeout_s=min(config.timeout_s, TIMEOUT_S))
        self.communicator = Communicator(group, self.config)
        self.in_place = in_place
        self._sites = itertools.cycle([Site(idx, direction, bits=config.bits) for idx in range(NUM_SITES)])
        self._last: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        self._last = x
        return self.communicator.all_reduce(x, next(self._sites), out=x if self.in_place else None)

    @property
    def transport(self) -> str | None:
        return self.communicator.transport.name

    @property
    def algorithm(self) -> str | None:
        """Of the last call."""
        assert self._last is not None
        return algorithm_of(self.communicator, self._last, next(self._sites)).name

    @property
    def leads_in(self) -> bool:
        """Whether a call leaves work behind that the next one waits for: the consensus residual's update."""
        return self.config.compensates and self.config.residual_of(Direction.forward) is Residual.consensus

    def check(self) -> None:
        """Raises CommunicationError if a call so far failed on the GPU."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.communicator.check()

    def close(self) -> None:
        self.communicator.destroy()


class UnfusedCall(EchoCall):
    """The paper's compensator as PyTorch operations around a call without compensation (paper Table 2, row 6)."""

    _averages: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        self._last, site = x, next(self._sites)
        coefficients = PAPER_FEEDBACK
        eta, a = coefficients.eta, coefficients.a
        if self._averages is None or self._averages[0].shape != x.shape:
            self._averages = (torch.zeros_like(x), torch.zeros_like(x))
        slow, fast = self._averages
        correction = (slow * (eta * a)).add_(fast, alpha=eta * (1 - a))
        corrected = x + correction
        y = self.communicator.all_reduce(corrected, site)
        residual = torch.sub(corrected, y, alpha=1.0 / self.communicator.group.size())
        slow.lerp_(residual, 1 - coefficients.beta1)
        fast.lerp_(residual, 1 - coefficients.beta2)
        return y


class AutoCall(EchoCall):
    """What a site calls: messages under `min_bytes` are summed exactly or by the group, the others are quantized."""

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_quantized(x):
            return super().__call__(x)
        self._last = x
        if self.communicator.sums_exactly(x):
            return self.communicator.exact_all_reduce(x, next(self._sites), out=x)
        dist.all_reduce(x, group=self.communicator.group)
        return x

    @property
    def algorithm(self) -> str | None:
        assert self._last is not None
        if self._is_quantized(self._last):
            return super().algorithm
        return EXACT if self.communicator.sums_exactly(self._last) else NATIVE

    def _is_quantized(self, x: Tensor) -> bool:
        return x.numel() * x.element_size() >= self.communicator.min_bytes(x.dtype)


def make_echo_call(row: Row, config: EchoConfig, group: dist.ProcessGroup, in_place: bool) -> EchoCall:
    """The call of one of Echo's rows with the options `config`."""
    kind = {Kind.echo: EchoCall, Kind.unfused: UnfusedCall, Kind.auto: AutoCall}[row.kind]
    return kind(group, config, in_place)


def algorithm_of(communicator: Communicator, x: Tensor, site: Site) -> Algorithm:
    """The algorithm of a call: with `algorithm: auto` the p2p transport's table chooses it by message."""
    transport = communicator.transport
    return transport.choose(x, site).algorithm if isinstance(transport, P2PTransport) else transport.algorithm


def check(call: EchoCall, device: torch.device, num_values: int = CHECKED_VALUES) -> None:
    """Compares the first sites of a pass with the reference.

    Raises:
        AssertionError: a rank's result differs in one bit; on every rank.
    """
    communicator = call.communicator
    rank, world_size = communicator.group.rank(), communicator.group.size()
    site = Site(0, Direction.forward, bits=call.config.bits)
    algorithm = algorithm_of(communicator, torch.empty(num_values, dtype=torch.bfloat16, device=device), site)
    simulated = SimulatedGroup(world_size, call.config.replace(algorithm=algorithm))
    generator = torch.Generator(device).manual_seed(0)
    different = 0
    for idx in range(CHECKED_SITES):
        xs = [torch.randn(num_values, generator=generator, device=device).to(torch.bfloat16) for _ in range(world_size)]
        site = Site(idx, Direction.forward, bits=call.config.bits)
        expected = simulated.all_reduce(xs, site)
        x = xs[rank].clone()
        found = communicator.all_reduce(x, site, out=x if call.in_place else None)
        different += int((found != expected).sum())
    call.check()
    if most := int(agree_max(different, device)):
        raise AssertionError(
            f"{communicator.describe()}: expected the reference's bits for {num_values} values at {CHECKED_SITES} "
            f"sites, got {most} other values on one rank"
        )


def check_sum(call: Callable[[Tensor], Tensor], x: Tensor, bits: int) -> None:
    """Compares a baseline's sum with the exact one, loosely: that it is a sum at all.

    Raises:
        AssertionError: it is not; on every rank.
    """
    world_size = dist.get_world_size()
    xs = x.new_empty(world_size * x.numel())
    dist.all_gather_into_tensor(xs, x.contiguous())
    exact = xs.view(world_size, -1).float().sum(0)
    found = call(x)
    error = agree_max(((found.float() - exact).norm() / exact.norm()).nan_to_num(nan=torch.inf).item(), x.device)
    limit = {4: 0.3, 8: 0.06, 16: 0.01}[bits]
    if not error < limit:
        raise AssertionError(f"{type(call).__name__}: expected a relative error below {limit}, got {error:.3g}")
