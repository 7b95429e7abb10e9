"""No interleaving of calls deadlocks, reads a stale tile or loses one; broken protocols are found out."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from echo_megatron.tuning import MAX_DEPTH
from tests.compiler import COMPILER
from tests.protocol_explorer import Model, explore
from tests.protocol_model import ALGORITHMS, NUMBERS, Call, Collective, Layout, Mutation

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

TILE = 4096
WRAPS = NUMBERS - 3  # the number of a first tile: it wraps within the first or second call
HALF_RING = 4  # at depth 1 the code has 8: fewer slots only make what follows harder, and six tiles come round

SEQUENCES = list(itertools.product(ALGORITHMS, repeat=3))
# Of two ranks, and of three: two tiles on all but the last, which has one. Two-shot's split is by groups of 128.
UNEVEN = {2: 2 * TILE + 128, 3: 3 * TILE + 128}


def two_tiles(name: Collective, world: int) -> Call:
    """Of each segment."""
    return Call(name, world * 2 * TILE if name == "two_shot" else 2 * TILE)


def test_rings_fit_what_they_share(layout: Layout) -> None:
    """A team keeps the exponents of its last kMaxRing rows: of every record that lies in a slot, unread."""
    rings = [layout.ring_for(depth) for depth in range(1, MAX_DEPTH + 1)]
    assert rings == [8, 8, 16, 16]
    assert max(rings) <= layout.max_ring


@pytest.mark.parametrize("sequence", SEQUENCES, ids="-".join)
def test_two_ranks_three_calls_every_step(layout: Layout, sequence: tuple[Collective, ...]) -> None:
    """Every order of three collectives of two tiles; the numbers wrap, and any warp of either rank may be slow."""
    calls = [two_tiles(name, 2) for name in sequence]
    result = explore(Model(layout, 2, calls, ring=HALF_RING, first=WRAPS, is_used=True))
    assert result.error is None, result.trace
    assert result.num_states > 400


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("second", ALGORITHMS)
def test_ranks_without_a_tile_in_some_rows(layout: Layout, second: Collective, world: int) -> None:
    """Segments of unequal size: rows that some ranks neither reduce nor gather."""
    tiles = [layout.tiles(UNEVEN[world], world, "two_shot", rank) for rank in range(world)]
    assert tiles == [2] * (world - 1) + [1]
    for num_values in (128, UNEVEN[world]):
        calls = [Call("two_shot", num_values), two_tiles(second, world), Call("two_shot", num_values)] * 2
        result = explore(Model(layout, world, calls, ring=HALF_RING, first=WRAPS, is_used=True), "coarse")
        assert result.error is None, result.trace


@pytest.mark.parametrize("sequence", SEQUENCES, ids="-".join)
def test_three_ranks_three_calls(layout: Layout, sequence: tuple[Collective, ...]) -> None:
    calls = [two_tiles(name, 3) for name in sequence]
    result = explore(Model(layout, 3, calls, ring=HALF_RING, first=WRAPS, is_used=True), "coarse")
    assert result.error is None, result.trace
    assert result.num_states > 50


@pytest.mark.parametrize(
    "sequence", [("two_shot", "one_shot", "two_shot"), ("reduce_scatter", "all_gather", "two_shot")], ids="-".join
)
def test_three_ranks_every_step(layout: Layout, sequence: tuple[Collective, ...]) -> None:
    """Calls of a tile: two_shot's has no segment on two of the ranks, whose next calls may come much sooner."""
    calls = [Call(name, 128) for name in sequence]
    result = explore(Model(layout, 3, calls, ring=2, first=NUMBERS - 2, is_used=True))
    assert result.error is None, result.trace


@pytest.mark.parametrize("depth", range(1, MAX_DEPTH + 1))
@pytest.mark.parametrize("world", [2, 3])
def test_the_code_s_ring_at_every_depth(layout: Layout, depth: int, world: int) -> None:
    """Long calls, so that the ring comes round several times, also between calls of other depths."""
    long, tiles = 3 * depth + 3, (3 * depth + 3) * (world if world == 2 else 1)
    calls = [Call("two_shot", tiles * TILE, depth), Call("all_gather", long // world * TILE, depth),
             Call("reduce_scatter", 4 * TILE, 1), Call("two_shot", (tiles - 1) * TILE, depth)]  # fmt: skip
    result = explore(Model(layout, world, calls, first=NUMBERS - depth, is_used=True), "coarse")
    assert result.error is None, result.trace


@pytest.mark.parametrize(("depth", "ring"), [(1, 2), (2, 4), (3, 4), (4, 8)])
def test_too_few_slots_are_found(layout: Layout, depth: int, ring: int) -> None:
    """Two-shot needs more than 2 depth: the next smaller power of two, or the one below, loses tiles."""
    model = Model(layout, 2, [Call("two_shot", 6 * depth * TILE, depth)] * 2, ring=ring, is_used=True)
    result = explore(model, "coarse")
    assert result.error is not None and "not yet read" in result.error


FOUND: dict[Mutation, str] = {
    "no wait for pushes": "reads tile",
    "no wait for sums": "reads tile",
    "flag before record": "reads tile",
    "later flags count": "a flag of another record",
    "numbers restart": "a flag of another record",
    "numbers of own rows": "deadlock",
    "events without wait": "not announced",
}


@pytest.mark.parametrize("mutation", get_args(Mutation))
def test_broken_protocols_are_found(layout: Layout, mutation: Mutation) -> None:
    calls = [Call("two_shot", UNEVEN[2]), two_tiles("all_gather", 2), two_tiles("two_shot", 2)]
    options = {"first": WRAPS, "is_used": True, "max_events": 2}
    assert explore(Model(layout, 2, calls, **options)).error is None
    result = explore(Model(layout, 2, calls, **options, mutation=mutation))
    assert result.error is not None and FOUND[mutation] in result.error and result.trace


def test_comparing_by_size_is_wrong_only_where_numbers_wrap(layout: Layout) -> None:
    """The reason to begin near the wrap: elsewhere an unsigned >= would do."""
    calls = [two_tiles("two_shot", 2)] * 3
    for first, is_found in ((100, False), (WRAPS, True)):
        model = Model(layout, 2, calls, first=first, is_used=True, mutation="later flags count")
        assert (explore(model).error is not None) is is_found


@pytest.mark.parametrize("mutation", [None, "no wait for pushes", "no wait for sums", "flag before record",
                                      "later flags count", "numbers restart", "numbers of own rows"])  # fmt: skip
@pytest.mark.parametrize("ring", [2, HALF_RING])
def test_joined_steps_find_what_single_steps_find(layout: Layout, mutation: Mutation | None, ring: int) -> None:
    calls = [Call("two_shot", UNEVEN[2]), two_tiles("reduce_scatter", 2), two_tiles("two_shot", 2)]
    model = Model(layout, 2, calls, ring=ring, first=WRAPS, is_used=True, mutation=mutation)
    fine, coarse = explore(model), explore(model, "coarse")
    assert (fine.error is None) is (coarse.error is None), (fine, coarse)
    assert coarse.num_states < fine.num_states


@pytest.mark.parametrize("first", [0, WRAPS])
def test_a_new_workspace_s_flags_announce_nothing(layout: Layout, first: int) -> None:
    """All zeros, also where a stage is first used as the numbers wrap: tile 2^32 - 1 counts as 0."""
    result = explore(Model(layout, 2, [two_tiles(name, 2) for name in ALGORITHMS], first=first))
    assert result.error is None, result.trace
