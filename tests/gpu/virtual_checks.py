"""The reference beside virtual ranks, and what must be equal bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from virtual_ranks import VirtualRanks

from echo_megatron.config import Direction, EchoConfig, StateDtype
from echo_megatron.quantizer import TILE_VALUES, Quantized, Quantizer
from echo_megatron.reference import SimulatedGroup, exact_sum, make_quantizer
from echo_megatron.sites import Site


def contributions(world_size: int, num_values: int, seed: int = 0) -> list[Tensor]:
    """Normal BF16 values of every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(num_values, generator=generator, device="cuda").bfloat16() for _ in range(world_size)]


class RecordingQuantizer(Quantizer):
    """Keeps what it quantized last."""

    last: Quantized

    def quantize(self, values: Tensor, exponent: Tensor | None = None) -> Quantized:
        self.last = super().quantize(values, exponent)
        return self.last


class RecordedGroup(SimulatedGroup):
    """The reference, and the codes that its last output was decoded from."""

    recorder: RecordingQuantizer

    def _one_shot(self, values, quantizer, exponent):
        return super()._one_shot(values, self._record(quantizer), exponent)

    def _two_shot(self, values, quantizer, exponent):
        return super()._two_shot(values, self._record(quantizer), exponent)

    def _record(self, quantizer: Quantizer) -> RecordingQuantizer:
        options = (quantizer.bits, quantizer.policy, quantizer.group_size, quantizer.rescale)
        self.recorder = RecordingQuantizer(*options)
        return self.recorder

    def state(self, direction: Direction) -> dict[str, Tensor]:
        """What is kept of c and m2, as it is read back, fp32 [P, basis values]."""
        state = self.compensators[direction]._state
        assert state is not None
        if self.compensators[direction].dtype is StateDtype.compact:
            return {"c": state.correction()}
        return {"c": state.correction(), "m2": state.average()}


class CheckedRanks:
    """`VirtualRanks`, each call of which is compared with the reference: outputs, codes and state, bit for bit."""

    def __init__(self, world_size: int, config: EchoConfig, **options: object) -> None:
        self.virtual = VirtualRanks(world_size, config, **options)
        self.reference = RecordedGroup(world_size, config)

    def all_reduce(
        self,
        xs: Sequence[Tensor],
        site: Site,
        in_place: bool = False,
        keep_codes: bool = True,
        what: object = "",
        **options: object,
    ) -> Tensor:
        """The output, which is the reference's; `what` names the case in a failure."""
        what = f"{what} {self.virtual.config} P={self.virtual.world_size} N={xs[0].numel()} {xs[0].dtype} {site}"
        expected = self.reference.all_reduce(xs, site)
        before = [x.clone() for x in xs]
        outs = self.virtual.all_reduce(xs, site, outs=xs if in_place else None, keep_codes=keep_codes, **options)
        self.virtual.memory.check()
        for rank, out in enumerate(outs):
            assert_same_bits(out, expected, f"output of rank {rank}, {what}")
            if not in_place:
                assert_same_bits(xs[rank], before[rank], f"input of rank {rank}, {what}")
        if keep_codes:
            self._check_records(what)
            for rank in range(self.virtual.world_size):
                assert_same_bits(self.virtual.calls[rank].decode(), expected, f"decoded by rank {rank}, {what}")
        if self.virtual.config.compensates:
            assert_same_state(self.virtual.state(site.direction), self.reference.state(site.direction), what)
        return expected

    def exact_all_reduce(self, xs: Sequence[Tensor], site: Site, in_place: bool = False, **options: object) -> Tensor:
        """As `all_reduce`, of the exact one-shot."""
        expected = exact_sum(torch.stack(list(xs)))
        outs = self.virtual.exact_all_reduce(xs, site, outs=xs if in_place else None, **options)
        self.virtual.memory.check()
        for rank, out in enumerate(outs):
            what = f"exact output of rank {rank} of {len(outs)}, N={out.numel()} {out.dtype}"
            assert_same_bits(out, expected, what)
        return expected

    def _check_records(self, what: str) -> None:
        wanted = self.reference.recorder.last
        sizes = torch.tensor(self.virtual.row_sizes(_num_values(self.virtual, wanted)), device=wanted.codes.device)
        num_tiles = wanted.codes.shape[1]
        position = torch.arange(num_tiles * TILE_VALUES, device=sizes.device).view(1, num_tiles, TILE_VALUES)
        is_value = position < sizes.view(-1, 1, 1)
        is_group = is_value.unflatten(-1, wanted.codes.shape[2:])[..., :1]
        is_tile = is_value[..., 0]
        for rank in range(self.virtual.world_size):
            records = self.virtual.records(rank)
            for name, actual, expected, mask in (
                ("exponents", records.exponent, wanted.exponent, is_tile),
                ("params", records.params, wanted.params, is_group),
                ("codes", records.codes, wanted.codes.flatten(-2), is_value),
            ):
                assert_same_integers(actual, expected, mask, f"{name} on rank {rank}, {what}")


def _num_values(virtual: VirtualRanks, wanted: Quantized) -> int:
    call = virtual.calls[0]
    quantizer = make_quantizer(virtual.config, call.records["bits"])
    num_values = quantizer.num_basis_values(call.x.numel())
    assert wanted.num_values == virtual._segments(num_values)[1]
    return num_values


def assert_same_integers(actual: Tensor, expected: Tensor, mask: Tensor, what: str) -> None:
    """Equal where `mask` is set."""
    assert actual.shape == expected.shape, f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    different = (actual != expected) & mask
    if different.any():
        where = different.nonzero()[0].tolist()
        wanted, got = expected[tuple(where)].item(), actual[tuple(where)].item()
        raise AssertionError(f"{int(different.sum())} {what}: expected {wanted}, got {got} first at {where}")


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """The same tensors are kept, with the same bits."""
    assert actual.keys() == expected.keys(), what
    for name, wanted in expected.items():
        assert_same_bits(actual[name], wanted, f"{name} by rank, {what}")


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    """Equal bit for bit, signs of zeros included; a NaN equals any NaN."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (
        f"{what}: expected {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} {tuple(actual.shape)}"
    )
    bits = torch.int16 if actual.element_size() == 2 else torch.int32
    different = (actual.view(bits) != expected.view(bits)) & ~(actual.isnan() & expected.isnan())
    if different.any():
        where = different.nonzero()[0].tolist()
        wanted, got = expected[tuple(where)].item(), actual[tuple(where)].item()
        num = int(different.sum())
        raise AssertionError(f"{num} of {actual.numel()} of {what}: expected {wanted!r}, got {got!r} first at {where}")
