"""One GPU, several ranks on it: thousands of random calls back to back on one workspace, ranks late at random.

`--num-calls 100000` for the long run (give tests/gpu or this file on pytest's command line). On every call the ranks
hold the same bits; a sample of the passes is compared with the reference.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from feedbacks import FEEDBACKS, state_dtypes
from virtual_checks import RecordedGroup, assert_same_bits
from virtual_ranks import DTYPES, VirtualRanks, highest_depth
from virtual_workspaces import VirtualWorkspaces

from echo_megatron.config import GROUP_SIZES, Algorithm, Direction, EchoConfig, Policy, Rescale, Residual
from echo_megatron.reference import exact_sum
from echo_megatron.sites import Site

MOST_VALUES = 4 << 20
NUM_CONFIGS = 24
LONGEST_DELAY = 1_000_000  # GPU cycles, about 0.6 ms
COMPARED = 0.05  # of the passes
PASSES_BETWEEN_WAITS = 6  # within them only each rank's own calls are ordered
PASSES_BETWEEN_CHECKS = 60
WORLD_SIZES = (2, 3, 5)


def draw_config(draw):
    config = EchoConfig(
        policy=draw.choice(list(Policy)),
        group_size=draw.choice(GROUP_SIZES),
        algorithm=draw.choice((Algorithm.one_shot, Algorithm.two_shot)),
        residual=draw.choice(list(Residual)),
        backward_residual=draw.choice((None, *Residual)),
        rescale=draw.choice(list(Rescale)),
        **draw.choice(({}, {}, *FEEDBACKS)),
    )
    return config.replace(state_dtype=draw.choice(state_dtypes(config)))


@dataclass
class Pass:
    """A pass of calls of one shape: what is drawn for it."""

    config_idx: int
    dtype: torch.dtype
    num_values: int
    sites: list[Site]
    depths: list[int]
    grids: list[int]
    late: int | None
    in_place: bool
    exact: bool
    compared: bool
    begin: int

    @classmethod
    def drawn(cls, draw, world_size, configs, highest_grid):
        config_idx = draw.randrange(len(configs))
        config = configs[config_idx]
        dtype, num_sites = draw.choice(DTYPES), draw.randint(1, 4)
        direction = draw.choice(list(Direction))
        bits = [draw.choice((4, 8)) for _ in range(num_sites)]
        return cls(
            config_idx,
            dtype,
            num_values=int(2 ** draw.uniform(0, 22)),
            sites=[Site(idx, direction, bits=bits[idx]) for idx in range(num_sites)],
            depths=[draw.randint(1, highest_depth(config, config.algorithm, b, dtype, direction)) for b in bits],
            grids=[draw.randint(1, highest_grid) for _ in bits],
            late=draw.choice((None, *range(world_size))),
            in_place=draw.random() < 0.3,
            exact=draw.random() < 0.1,
            compared=draw.random() < COMPARED,
            begin=draw.choice((0, 8, 16, 1, 3, draw.randrange(4096))),
        )


class Rounds:
    """Random passes on one workspace of `world_size` ranks."""

    def __init__(self, world_size, seed):
        self.world_size = world_size
        self.draw = random.Random(seed)
        self.configs = [draw_config(self.draw) for _ in range(NUM_CONFIGS)]
        self.memory = VirtualWorkspaces(world_size)
        self.ranks = [VirtualRanks(world_size, config, memory=self.memory) for config in self.configs]
        generator = torch.Generator("cuda").manual_seed(seed)
        size = (world_size, MOST_VALUES + 8192)
        values = torch.randn(size, generator=generator, device="cuda")
        self.values = {dtype: values.to(dtype) for dtype in DTYPES}
        self.num_different = torch.zeros((), dtype=torch.int64, device="cuda")
        self.running = []

    def run(self, number):
        """One pass; its number of calls."""
        drawn = Pass.drawn(self.draw, self.world_size, self.configs, self.memory.num_blocks)
        config, ranks = self.configs[drawn.config_idx], self.ranks[drawn.config_idx]
        reference = RecordedGroup(self.world_size, config) if drawn.compared else None
        for site, depth, grid in zip(drawn.sites, drawn.depths, drawn.grids, strict=True):
            end = drawn.begin + drawn.num_values
            xs = [row[drawn.begin : end] for row in self.values[drawn.dtype]]
            expected = None
            if reference is not None:
                expected = exact_sum(torch.stack(xs)) if drawn.exact else reference.all_reduce(xs, site)
            xs = [x.clone() for x in xs] if drawn.in_place else xs
            outs = xs if drawn.in_place else None
            if drawn.exact:
                outs = ranks.exact_all_reduce(xs, site, outs, num_blocks=grid, wait=False)
            else:
                delays = [self.draw.randrange(LONGEST_DELAY) if r == drawn.late else 0 for r in range(self.world_size)]
                options = {"num_blocks": grid, "depth": depth, "delays": delays}
                outs = ranks.all_reduce(xs, site, outs, **options, wait=False)
            self.running.append((xs, outs, expected, f"pass {number}: {drawn}, {config}"))
        return len(drawn.sites)

    def wait(self):
        """Orders the current stream behind all calls and compares them."""
        self.memory.join()
        for _, outs, expected, what in self.running:
            self._compare(outs, expected, what)
        self.running.clear()

    def _compare(self, outs, expected, what):
        bits = torch.int16 if outs[0].element_size() == 2 else torch.int32
        for out in outs[1:]:
            self.num_different += (out.view(bits) != outs[0].view(bits)).any() | ~out.isfinite().all()
        if expected is not None:
            self.memory.check()
            for rank, out in enumerate(outs):
                assert_same_bits(out, expected, f"output of rank {rank}, {what}")

    def check(self, number):
        """Of all passes up to `number`: no failure, and the ranks' bits were the same and finite."""
        self.wait()
        self.memory.check()
        assert self.num_different.item() == 0, f"ranks differ, or are not finite, in the passes up to {number}"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_random_calls_one_after_the_other(world_size, request):
    num_calls = request.config.getoption("--num-calls", default=2000) // len(WORLD_SIZES)
    rounds, done, number = Rounds(world_size, seed=world_size), 0, 0
    while done < num_calls:
        done += rounds.run(number)
        number += 1
        if number % PASSES_BETWEEN_WAITS == 0:
            rounds.wait()
        if number % PASSES_BETWEEN_CHECKS == 0:
            rounds.check(number)
    rounds.check(number)
