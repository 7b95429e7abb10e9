"""The collectives as mathematics over P contributions held on one device: the oracle of transports and kernels.

`SimulatedGroup` also runs tensor parallelism of any model that hands it the list of partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import MAX_WORLD_SIZE, Algorithm, Direction, EchoConfig, Rescale, Residual
from echo_megatron.quantizer import Quantizer, divide, fill_up
from echo_megatron.sites import PassClock, Site


@dataclass(frozen=True)
class Segments:
    """Two-shot's split of a stream: equal segments on group boundaries, the last ones short or empty (paper Eqn. 7)."""

    num_values: int
    world_size: int
    length: int

    @classmethod
    def split(cls, num_values: int, world_size: int, group_size: int) -> Segments:
        num_groups = -(-num_values // group_size)
        return cls(num_values, world_size, -(-num_groups // world_size) * group_size)

    def bounds(self, rank: int) -> slice:
        """The values that `rank` owns."""
        return slice(min(rank * self.length, self.num_values), min((rank + 1) * self.length, self.num_values))

    def size(self, rank: int) -> int:
        bounds = self.bounds(rank)
        return bounds.stop - bounds.start


def choose_algorithm(config: EchoConfig, world_size: int) -> Algorithm:
    """Resolves `auto`, the same on every rank.

    At two ranks one-shot moves the bytes of two-shot in one phase with two thirds of its error variance (spec 2); above
    two ranks it moves P/2 times the bytes.
    """
    if config.algorithm is not Algorithm.auto:
        return config.algorithm
    return Algorithm.one_shot if world_size <= 2 else Algorithm.two_shot


def num_sent_bytes(
    config: EchoConfig, bits: int, algorithm: Algorithm, world_size: int, rank: int, num_values: int
) -> int:
    """Bytes of wire records that `rank` sends to others in an all-reduce of `num_values` values.

    Args:
        config: the options.
        bits: the site's.
        algorithm: one_shot or two_shot.
        world_size: P.
        rank: whose.
        num_values: of the tensor, before the working basis fills its last block.
    """
    quantizer, num_others = make_quantizer(config, bits), world_size - 1
    num_values = quantizer.num_basis_values(num_values)
    if algorithm is Algorithm.one_shot:
        return num_others * quantizer.num_bytes(num_values)
    segments = Segments.split(num_values, world_size, quantizer.group_size)
    records = [quantizer.num_bytes(segments.size(owner)) for owner in range(world_size)]
    return sum(records) + (num_others - 1) * records[rank]  # push the segments of others, give one's own to them all


def num_sent_share_bytes(config: EchoConfig, bits: int, world_size: int, num_values: int) -> int:
    """Bytes of wire records that a rank sends to others in a reduce-scatter or an all-gather.

    Args:
        config: the options.
        bits: of a code.
        world_size: P.
        num_values: of one rank's share: a P-th of what goes into a reduce-scatter, the whole input of an all-gather.
    """
    quantizer = make_quantizer(config, bits)
    return (world_size - 1) * quantizer.num_bytes(quantizer.num_basis_values(num_values))


def make_quantizer(config: EchoConfig, bits: int) -> Quantizer:
    """The quantizer of a site of `bits` bits."""
    return Quantizer(bits, config.policy, config.group_size, config.rescale)


def sum_in_rank_order(contributions: Tensor) -> Tensor:
    """fp32 [P, ...] to [...], added from rank 0 upwards: every rank gets the same bits."""
    total = contributions[0]
    for contribution in contributions[1:]:
        total = total + contribution
    return total


def exact_sum(contributions: Tensor) -> Tensor:
    """[P, ...] to [...]: the ranks' values summed in fp32 in rank order and rounded once to their dtype."""
    return sum_in_rank_order(contributions.to(torch.float32)).to(contributions.dtype)


def finite_amax(values: Tensor) -> Tensor:
    """Largest finite |value| as an fp32 scalar; 0 for none. The rescaling must not follow a NaN or an Inf."""
    magnitude = values.to(torch.float32).abs()
    return magnitude.where(magnitude < float("inf"), torch.zeros_like(magnitude)).max()


def rank_residual(
    config: EchoConfig,
    direction: Direction,
    world_size: int,
    rank: int,
    values: Tensor,
    residual: Tensor,
    reduced: Tensor,
    returned: Tensor,
) -> Tensor:
    """u of one rank; the sum over ranks is -delta for both residuals (paper Eqn. 4).

    Args:
        config: which residual; `algorithm` may be `auto`.
        direction: of the pass.
        world_size: P.
        rank: whose.
        values: fp32 [n], x' of the rank.
        residual: fp32 [n], what the rank rounded: x' minus its decoded code where it sent one, the exact sum on the
            segment that it owns under two-shot.
        reduced: fp32 [n], the decoded sum.
        returned: fp32 [n], the sum as the residual sees it: y in its dtype, or `reduced` for rotated policies, whose
            residual is taken before the inverse transform.
    """
    if config.residual_of(direction) is Residual.consensus:
        return values - divide(returned, world_size)
    owned = Segments.split(values.shape[-1], world_size, config.group_size).bounds(rank)
    residual = residual.clone()
    if choose_algorithm(config, world_size) is Algorithm.two_shot:
        residual[owned] -= returned[owned]
    elif returned is not reduced:  # one-shot's output rounding is charged to the rank that would own the segment
        residual[owned] += reduced[owned] - returned[owned]
    return residual


class SimulatedGroup:
    """P tensor-parallel ranks on one device.

    Args:
        world_size: P, 1 to 8.
        config: the options; `min_bytes`, `directions` and `phases` are the caller's affair.

    Raises:
        ValueError: `world_size` is out of range, or the config does not quantize.
    """

    def __init__(self, world_size: int, config: EchoConfig) -> None:
        check_group(world_size, config)
        self.world_size = world_size
        self.config = config
        self.algorithm = choose_algorithm(config, world_size)
        self.compensators = {direction: Compensator(config, direction) for direction in Direction}
        self._clocks = {direction: PassClock() for direction in Direction}

    def all_reduce(self, contributions: Sequence[Tensor], site: Site) -> Tensor:
        """The sum that every rank receives.

        Args:
            contributions: P tensors of one shape and dtype (bf16, fp16, fp32), rank by rank.
            site: decides bits and whose compensator is used.

        Returns:
            A tensor of the contributions' shape and dtype.
        """
        first = self._check(contributions)
        if self.world_size == 1:
            return first.clone()
        if first.numel() == 0:
            return torch.empty_like(first)
        quantizer = make_quantizer(self.config, site.bits)
        stacked = torch.stack([x.reshape(-1) for x in contributions])
        exponent = quantizer.call_exponent(finite_amax(stacked)) if self.config.rescale is Rescale.group else None
        values = quantizer.rows_to_basis(stacked)
        compensator = self._begin(site)
        if compensator is not None:
            values = compensator.apply(values)

        step = self._one_shot if self.algorithm is Algorithm.one_shot else self._two_shot
        reduced, residual = step(values, quantizer, exponent)
        output = quantizer.from_basis(reduced, first.numel()).to(first.dtype)
        if compensator is not None:
            returned = reduced if quantizer.rotates else output.to(torch.float32)
            call = (self.config, site.direction, self.world_size)
            rows = [
                rank_residual(*call, rank, own, rounded, reduced, returned)
                for rank, (own, rounded) in enumerate(zip(values, residual, strict=True))
            ]
            compensator.update(torch.stack(rows))
        return output.view(first.shape)

    def reduce_scatter(self, contributions: Sequence[Tensor], site: Site) -> list[Tensor]:
        """Sums of equal shares of the first dimension, one a rank: the push half of two-shot.

        Args:
            contributions: P tensors [P * rows, ...]; a share's groups start at the share's first value.
            site: decides bits and whose compensator is used.

        Returns:
            P tensors [rows, ...], rank by rank.

        Raises:
            ValueError: the first dimension is not divisible by P, or the residual is consensus.
        """
        first = self._check(contributions)
        check_shares(first, self.world_size)
        check_scattered_residual(self.config, site.direction)
        if self.world_size == 1 or first.numel() == 0:
            return [share.clone() for share in first.chunk(self.world_size)]
        quantizer = make_quantizer(self.config, site.bits)
        shares = torch.stack([x.reshape(self.world_size, -1) for x in contributions])
        exponent = quantizer.call_exponent(finite_amax(shares)) if self.config.rescale is Rescale.group else None
        values = quantizer.rows_to_basis(shares.flatten(0, 1)).unflatten(0, shares.shape[:2])
        compensator = self._begin(site)
        if compensator is not None:
            values = compensator.apply(values)
        decoded = quantizer.dequantize(quantizer.quantize(values, exponent))
        own = self._own_mask(values)
        sums = sum_in_rank_order(values.where(own, decoded))
        if compensator is not None:
            compensator.update((values - decoded).where(~own, 0.0))
        outputs = quantizer.from_basis(sums, shares.shape[-1]).to(first.dtype)
        return [output.view(-1, *first.shape[1:]) for output in outputs]

    def all_gather(self, shards: Sequence[Tensor], bits: int) -> Tensor:
        """[P * rows, ...] of the shards as every rank reads them, its own included; nothing is fed back."""
        first = self._check(shards)
        if self.world_size == 1 or first.numel() == 0:
            return torch.cat([shard.clone() for shard in shards])
        quantizer = make_quantizer(self.config, bits)
        stacked = torch.stack([x.reshape(-1) for x in shards])
        exponent = quantizer.call_exponent(finite_amax(stacked)) if self.config.rescale is Rescale.group else None
        decoded = quantizer.dequantize(quantizer.quantize(quantizer.rows_to_basis(stacked), exponent))
        return quantizer.from_basis(decoded, first.numel()).to(first.dtype).reshape(-1, *first.shape[1:])

    def exact_all_reduce(self, contributions: Sequence[Tensor]) -> Tensor:
        """The sum without codes, `exact_sum`: what the p2p transport gives for messages under `min_bytes`."""
        self._check(contributions)
        return exact_sum(torch.stack(list(contributions)))

    # -- one call

    def _begin(self, site: Site) -> Compensator | None:
        compensator = self.compensators[site.direction]
        if self._clocks[site.direction].tick(site):
            compensator.reset()
        return compensator if self.config.compensates else None

    def _one_shot(self, values: Tensor, quantizer: Quantizer, exponent: Tensor | None) -> tuple[Tensor, Tensor]:
        decoded = quantizer.dequantize(quantizer.quantize(values, exponent))
        return sum_in_rank_order(decoded), values - decoded

    def _two_shot(self, values: Tensor, quantizer: Quantizer, exponent: Tensor | None) -> tuple[Tensor, Tensor]:
        segmented, segments = self._segmented(values, quantizer)
        decoded = quantizer.dequantize(quantizer.quantize(segmented, exponent))
        own = self._own_mask(segmented)
        sums = sum_in_rank_order(segmented.where(own, decoded))
        reduced = quantizer.dequantize(quantizer.quantize(sums, exponent)).flatten()[: segments.num_values]
        # On the owned segment the residual is sum - y; y is only final in its dtype, so `rank_residual` subtracts it.
        residual = sums.where(own, segmented - decoded)
        return reduced, residual.flatten(1)[:, : segments.num_values]

    def _segmented(self, values: Tensor, quantizer: Quantizer) -> tuple[Tensor, Segments]:
        """[P, n] to [P, P, segment]."""
        segments = Segments.split(values.shape[-1], self.world_size, quantizer.group_size)
        filled = fill_up(values, segments.length * self.world_size, quantizer.group_size)
        return filled.view(self.world_size, self.world_size, segments.length), segments

    def _own_mask(self, values: Tensor) -> Tensor:
        return torch.eye(self.world_size, dtype=torch.bool, device=values.device).unsqueeze(-1)

    def _check(self, tensors: Sequence[Tensor]) -> Tensor:
        shapes = {(tuple(x.shape), x.dtype) for x in tensors}
        if len(tensors) != self.world_size or len(shapes) != 1:
            raise ValueError(f"expected {self.world_size} tensors of one shape and dtype, got {len(tensors)}: {shapes}")
        check_dtype(tensors[0])
        return tensors[0]


def check_group(world_size: int, config: EchoConfig) -> None:
    """Raises ValueError where a group of this size, or a config that quantizes nothing, can't be served."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ValueError(f"tensor-parallel group: expected 1 to {MAX_WORLD_SIZE} ranks, got {world_size}")
    if not config.quantizes:
        raise ValueError(f"bits: expected 4 or 8 for a quantized all-reduce, got {config.bits}")


def check_shares(x: Tensor, world_size: int) -> None:
    """Raises ValueError where `x` can't be split into one share a rank."""
    if x.dim() == 0 or x.shape[0] % world_size:
        raise ValueError(
            f"reduce_scatter: expected a first dimension divisible by {world_size} ranks, got {tuple(x.shape)}"
        )


def check_scattered_residual(config: EchoConfig, direction: Direction) -> None:
    """Raises ValueError where a reduce-scatter would have to feed back x' - y/P: a rank has y of its own share only."""
    if config.compensates and config.residual_of(direction) is Residual.consensus:
        option = (
            "residual" if config.backward_residual is None or direction is Direction.forward else "backward_residual"
        )
        raise ValueError(
            f"{option}: expected local with sequence parallelism, got consensus: a reduce-scatter gives a rank the sum "
            "of its own share only, and the consensus residual needs all of it. Set residual=local (and "
            "backward_residual=local where it is given), or sequence_parallel=False"
        )


def check_dtype(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"echo: expected a tensor of bfloat16, float16 or float32, got {x.dtype}")
