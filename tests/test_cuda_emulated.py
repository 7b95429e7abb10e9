"""The collectives' kernels, compiled for the host and run by fibers, give the reference's bits: calls of every kind.

Copies into shared memory come as late as the kernels' waits allow, or at once; ranks advance unevenly, and go from one
call to the next without waiting for each other, so that rings are used as far ahead as they may be.
"""

from __future__ import annotations

import random

import pytest
import torch
from compiler import COMPILER
from emulated_ranks import (
    ALL_GATHER,
    DTYPES,
    ONE_SHOT,
    REDUCE_SCATTER,
    TWO_SHOT,
    EmulatedRanks,
    aligned_empty,
    build,
    for_emulator,
)
from feedbacks import FEEDBACKS, state_dtypes

from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale, StateDtype
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
QUANTIZERS = [(Policy.rotated, 4), (Policy.zero_aware, 8)]
NUM_SEQUENCES = 16
SMALL = (1, 7, 40, 4_096, 4_104, 9_001)
RUN = 256  # values: whole groups of any size
LARGE = (4_096 * 9 + 5, 4_096 * 13 + 8, 4_096 * 19)  # a team has tiles to push while others are reduced and finished


def values(draw: random.Random, num_values: int, dtype: torch.dtype, offset: int, is_wild: bool) -> torch.Tensor:
    """Normal; or of magnitudes to either end of the dtype's range, value by value, with runs of one value and of -0."""
    x = torch.randn(num_values)
    if is_wild:
        lowest, highest = (-24, 10) if dtype is torch.float16 else (-140, 100)
        x = x * torch.exp2(torch.randint(lowest, highest, (num_values,)).float())
        for begin in range(0, num_values, RUN):
            run = x[begin : begin + RUN]
            kind = draw.randrange(8)
            if kind < 2:
                run.fill_(-0.0 if kind == 0 else float(run[0]))
    return aligned_empty(num_values, dtype, offset).copy_(x)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.int16 if found.element_size() == 2 else torch.int32
    return bool(((found.view(kind) == expected.view(kind)) | (found.isnan() & expected.isnan())).all())


class Sequence:
    """A few calls on one workspace, with the reference's answers beside them."""

    def __init__(self, library, policy: Policy, bits: int, draw: random.Random) -> None:
        self.draw, self.world_size = draw, draw.choice((2, 2, 3, 4))
        config = EchoConfig(
            bits=bits,
            policy=policy,
            group_size=draw.choice((32, 128)),
            rescale=draw.choice(list(Rescale)),
            algorithm=draw.choice((Algorithm.one_shot, Algorithm.two_shot)),
            **draw.choice(({}, {}, {}, *FEEDBACKS)),
        )
        self.config = config.replace(state_dtype=draw.choice(state_dtypes(config)))
        self.ranks = EmulatedRanks(library, self.world_size, self.config, draw.choice((1, 1, 2)))
        self.simulated = SimulatedGroup(self.world_size, self.config)
        self.dtype, self.offset = draw.choice((torch.bfloat16, *DTYPES)), draw.choice((0, 0, 0, 1))
        self.num_values = draw.choice(SMALL if self.world_size > 2 or draw.random() < 0.3 else LARGE)
        # The all-reduces that are compiled in; they are here for what they leave in the rings.
        reduces = self.config.compensates and self.config.state_dtype_of(Direction.forward) is StateDtype.compact
        self.kinds = [REDUCE_SCATTER, REDUCE_SCATTER, ALL_GATHER, *(["all_reduce"] if reduces else [])]

    def run(self) -> int:
        """The number of calls."""
        draw, noted, last, idx = self.draw, [], None, 0
        for _ in range(draw.randint(1, 5)):
            kind, is_wild = draw.choice(self.kinds), draw.random() < 0.3
            size = self.num_values * (self.world_size if kind == REDUCE_SCATTER else 1)
            xs = [values(draw, size, self.dtype, self.offset, is_wild) for _ in range(self.world_size)]
            depth, site = draw.choice((1, 1, 2, 3, 4)), Site(idx, Direction.forward, bits=self.config.bits)
            if kind == ALL_GATHER:
                expected = [self.simulated.all_gather(xs, self.config.bits)] * self.world_size
            elif kind == REDUCE_SCATTER:
                expected = self.simulated.reduce_scatter(xs, site)
            else:
                expected = [self.simulated.all_reduce(xs, site)] * self.world_size
            algorithm = kind
            if kind == "all_reduce":
                algorithm = ONE_SHOT if self.config.algorithm is Algorithm.one_shot else TWO_SHOT
            fresh = kind != last  # another layout begins a pass
            if kind != ALL_GATHER:
                last, idx = kind, idx + 1
            noted.append((self.ranks.note(algorithm, xs, fresh, depth, self.offset), expected, (algorithm, depth)))
        how = {"copies_at_once": draw.random() < 0.5, "seed": draw.choice((0, draw.randint(1, 1 << 30)))}
        self.ranks.run(**how)
        what = f"P={self.world_size} {self.config} {self.dtype} {self.num_values} {self.offset} {how}"
        for number, (outs, expected, call) in enumerate(noted):
            for rank, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
                assert same_bits(out, wanted), f"call {number} {call} of {len(noted)}, rank {rank}: {what}"
        return len(noted)


@pytest.mark.parametrize(("policy", "bits"), QUANTIZERS)
def test_sequences_of_calls(policy: Policy, bits: int, tmp_path) -> None:
    library = build(tmp_path, policy.name, bits)
    draw = random.Random(f"{policy.name} {bits}")
    torch.manual_seed(bits)
    assert sum(Sequence(library, policy, bits, draw).run() for _ in range(NUM_SEQUENCES)) > NUM_SEQUENCES


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"assembly of an unknown kind: 'cp\.reduce"):
        for_emulator('asm volatile("cp.reduce.async %0;" ::"r"(x));')
    with pytest.raises(ValueError, match="shared memory of an unknown kind"):
        for_emulator("__shared__ float table[32];")
