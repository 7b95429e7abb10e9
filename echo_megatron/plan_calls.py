"""Predicted milliseconds of one collective at P ranks of a GPU.

    t(n, P, GPU) = latency + work(n) * bound(n, P, GPU) / bound(n, 2, H200)

`work` is what two H200 took beyond the smallest message's time. `bound` is the largest of what the call needs of the
machine: for NCCL the wire; for sequence parallelism's two the wire and HBM; for the all-reduce also the kernel, whose
time is a profiled one's that sends to itself, by multiprocessors and clock. Wire and HBM count with the share of their
ceilings that the best of our rows reached. At P = 2 on the H200 the ratio is one: a measured size gives what was
measured.
"""

from __future__ import annotations

from functools import cached_property

from echo_megatron.bench.rows import ITEMSIZE, MIB, Kind, Row
from echo_megatron.bench.traffic import share_traffic, traffic
from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, Policy, Residual
from echo_megatron.plan_machine import Ceilings, Curve, Measured
from echo_megatron.tuning import DEFAULT, SHIPPED, Table, gpu_slug, read_table

MEASURED_RANKS = 2
LARGE = 64 << 20  # ceilings are reached from here on
_NCCL_ROWS = {
    Collective.all_reduce: ("nccl16", Kind.nccl),
    Collective.reduce_scatter: ("nccl_reduce_scatter", Kind.nccl_reduce_scatter),
    Collective.all_gather: ("nccl_all_gather", Kind.nccl_all_gather),
}


def shipped_table(gpu_name: str) -> Table:
    """The tuning tables that are shipped for a GPU; what `bench --tune` wrote for this machine's does not count."""
    own = SHIPPED / f"{gpu_slug(gpu_name)}.json"
    default = read_table(DEFAULT)
    return read_table(own).before(default) if own.is_file() else default


class CallTimes:
    """Times of collectives on a machine of P GPUs.

    Args:
        measured: what the predictions are scaled from.
        ceilings: the machine's.
        world_size: P, 2 to 8.
    """

    def __init__(self, measured: Measured, ceilings: Ceilings, world_size: int) -> None:
        self.measured, self.ceilings, self.world_size = measured, ceilings, world_size
        self.table = shipped_table(ceilings.gpu.name)

    def ms(self, config: EchoConfig, collective: Collective, num_bytes: int, direction: Direction) -> float:
        """Milliseconds of a call on BF16 values.

        Args:
            config: the setting; `bits: 16` is the group's own.
            collective: what is called.
            num_bytes: of the message, the larger of the call's two tensors.
            direction: of the pass.

        Raises:
            ValueError: nothing was measured that this call could be scaled from.
        """
        nccl = self.nccl_ms(collective, num_bytes)
        if not config.quantizes or not self.quantizes(config, collective, num_bytes, direction):
            return nccl
        if collective is not Collective.all_reduce:
            return self._share_ms(config, collective, num_bytes)
        return self._all_reduce_ms(config, num_bytes, self.algorithm(config, num_bytes, direction))

    def quantizes(self, config: EchoConfig, collective: Collective, num_bytes: int, direction: Direction) -> bool:
        """Whether a site quantizes a message; one that it does not takes NCCL's time, or less."""
        bits = config.gather_bits if collective is Collective.all_gather else config.bits
        return direction in config.directions and bits < 16 and num_bytes >= self.min_bytes(config)

    def min_bytes(self, config: EchoConfig) -> int:
        """Messages of fewer bytes stay at 16 bits."""
        return self.table.quantized_from_bytes(self.world_size) if config.min_bytes is None else config.min_bytes

    def algorithm(self, config: EchoConfig, num_bytes: int, direction: Direction) -> Algorithm:
        """What the p2p transport chooses for an all-reduce."""
        if config.algorithm is not Algorithm.auto:
            return config.algorithm
        return self.table.choose(num_bytes, self.world_size, config.policy, config.bits, direction).algorithm

    def nccl_ms(self, collective: Collective, num_bytes: int) -> float:
        """Of the group's own collective; the wire decides."""
        curve = self._curve(_NCCL_ROWS[collective][0], None, None, collective)
        wire = self._nccl_wire(collective, num_bytes, self.world_size) / self.ceilings.wire
        own = self._nccl_wire(collective, num_bytes, MEASURED_RANKS) / self.measured.ceilings.wire
        return curve.latency_ms + curve.work_ms(num_bytes) * wire / own

    # -- ours

    def _all_reduce_ms(self, config: EchoConfig, num_bytes: int, algorithm: Algorithm) -> float:
        curve = self.curve_of(config)
        nearest = min(curve.algorithm, key=lambda size: abs(size - num_bytes))
        measured_with = Algorithm[curve.algorithm[nearest] or "two_shot"]
        bound = self.bound_ms(config, num_bytes, algorithm)
        own = self._bound(config, num_bytes, measured_with, MEASURED_RANKS, self.measured.ceilings)
        latency = curve.latency_ms
        if algorithm is Algorithm.two_shot:  # its second phase shows in the rows that are two-shot at all sizes
            plain = self._curve(f"echo{config.bits}", config.policy.name, None, Collective.all_reduce)
            latency = max(latency, plain.latency_ms)
        return latency + curve.work_ms(num_bytes) * bound / own

    def is_measured(self, config: EchoConfig) -> bool:
        """Whether there are times of the config's all-reduces."""
        try:
            self.curve_of(config)
        except ValueError:
            return False
        return True

    def curve_of(self, config: EchoConfig) -> Curve:
        """The measured all-reduces of a config.

        Raises:
            ValueError: its residual or quantizer was not measured.
        """
        state = config.state_dtype_of(Direction.forward).name if config.compensates else None
        suffix = "_local" if config.compensates else ""
        if config.compensates and config.residual_of(Direction.forward) is not Residual.local:
            raise ValueError("residual: expected local, the one whose times the plan is calibrated with; got consensus")
        if config.policy not in (Policy.rotated, Policy.zero_aware):
            raise ValueError(f"policy: expected rotated or zero_aware, which were measured; got {config.policy.name}")
        return self._curve(f"echo{config.bits}{suffix}", config.policy.name, state, Collective.all_reduce)

    def bound_ms(self, config: EchoConfig, num_bytes: int, algorithm: Algorithm) -> float:
        """What an all-reduce needs here, at least; only ratios of these are used."""
        return self._bound(config, num_bytes, algorithm, self.world_size, self.ceilings)

    def _bound(
        self, config: EchoConfig, num_bytes: int, algorithm: Algorithm, world_size: int, ceilings: Ceilings
    ) -> float:
        """Milliseconds that the wire, HBM or the kernel's instructions need, the longest."""
        moved = traffic(Row("plan", Kind.echo, config.bits, config), num_bytes // ITEMSIZE, world_size, algorithm.name)
        assert moved is not None
        wire = moved.wire / (ceilings.wire * self.wire_share) / 1e6
        hbm = moved.hbm / (ceilings.hbm * self.hbm_share) / 1e6
        return max(wire, hbm, self._kernel_ms(config, num_bytes, algorithm, world_size, ceilings))

    def _kernel_ms(
        self, config: EchoConfig, num_bytes: int, algorithm: Algorithm, world_size: int, ceilings: Ceilings
    ) -> float:
        state = config.state_dtype_of(Direction.forward).name if config.compensates else None
        row = (config.policy.name, config.bits, algorithm.name, state)
        mebivalues = num_bytes / ITEMSIZE / MIB
        decoding = _decoded_values(algorithm, world_size) / _decoded_values(algorithm, MEASURED_RANKS)
        # Half of what an uncompensated call does is taken to be decoding, which alone grows with P.
        plain = self.measured.kernel_ms(*row[:3], None)
        per_mebi = self.measured.kernel_ms(*row) + plain * (decoding - 1) / 2
        slower = self.measured.ceilings.gpu.issue_rate / ceilings.gpu.issue_rate
        return self.profile_factor * per_mebi * mebivalues * slower

    def _share_ms(self, config: EchoConfig, collective: Collective, num_bytes: int) -> float:
        gathers = collective is Collective.all_gather
        bits = config.gather_bits if gathers else config.bits
        state = None if gathers or not config.compensates else config.state_dtype_of(Direction.forward).name
        measured_bits = bits if gathers else 4  # reduce-scatters at 8 bits were not measured
        name = f"echo{measured_bits}_{collective.name}"
        curve = self._curve(name, config.policy.name, state, collective)
        bound = self.share_bound_ms(config, collective, bits, num_bytes)
        own = self._share_bound(config, collective, measured_bits, num_bytes, MEASURED_RANKS, self.measured.ceilings)
        return curve.latency_ms + curve.work_ms(num_bytes) * bound / own

    def share_bound_ms(self, config: EchoConfig, collective: Collective, bits: int, num_bytes: int) -> float:
        """What a reduce-scatter or all-gather needs here, at least; only ratios of these are used."""
        return self._share_bound(config, collective, bits, num_bytes, self.world_size, self.ceilings)

    def _share_bound(
        self,
        config: EchoConfig,
        collective: Collective,
        bits: int,
        num_bytes: int,
        world_size: int,
        ceilings: Ceilings,
    ) -> float:
        row = Row("plan", Kind[collective.name], bits, config)
        moved = share_traffic(row, num_bytes // ITEMSIZE, world_size)
        return max(
            moved.wire / (ceilings.wire * self.wire_share), moved.hbm / (ceilings.hbm * self.hbm_share)
        ) / 1e6  # fmt: skip

    # -- calibration

    @cached_property
    def wire_share(self) -> float:
        """Of the wire's ceiling, what the best of our rows reached."""
        return self._best("wire_fraction")

    @cached_property
    def hbm_share(self) -> float:
        """Of HBM's ceiling, what the best of our rows reached."""
        return self._best("hbm_fraction")

    @cached_property
    def profile_factor(self) -> float:
        """Measured time of the preset echo4's large calls, which the kernel bounds, to the profiler's of its kernel."""
        config = EchoConfig()
        curve = self.curve_of(config)
        size = max(curve.ms)
        profiled = self.measured.kernel_ms(
            config.policy.name, config.bits, curve.algorithm[size] or "one_shot",
            config.state_dtype_of(Direction.forward).name,
        )  # fmt: skip
        return curve.work_ms(size) / (profiled * size / ITEMSIZE / MIB)

    def _best(self, fraction: str) -> float:
        rows = [*self.measured.all_reduce["rows"], *self.measured.shares["rows"]]
        reached = [
            row[fraction]
            for row in rows
            if row["row"].startswith("echo") and row["bytes"] >= LARGE and "matmuls" not in row and row[fraction]
        ]
        return min(max(reached), 1.0)

    def _curve(self, name: str, policy: str | None, state: str | None, collective: Collective) -> Curve:
        results = self.measured.all_reduce if collective is Collective.all_reduce else self.measured.shares
        return self.measured.curve(results["rows"], name, policy, state)

    def _nccl_wire(self, collective: Collective, num_bytes: int, world_size: int) -> float:
        row, num_values = Row("plan", _NCCL_ROWS[collective][1]), num_bytes // ITEMSIZE
        if collective is not Collective.all_reduce:
            return share_traffic(row, num_values, world_size).wire / 1e6
        moved = traffic(row, num_values, world_size, None)
        assert moved is not None
        return moved.wire / 1e6


def _decoded_values(algorithm: Algorithm, world_size: int) -> float:
    """Values that a rank decodes for each value of the message."""
    if algorithm is Algorithm.one_shot:
        return float(world_size)
    return (world_size - 1) / world_size + 1
