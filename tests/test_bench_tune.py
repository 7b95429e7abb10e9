"""What tuning tries, takes and writes."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

from echo_megatron.bench import tune
from echo_megatron.config import Algorithm, Direction, Policy
from echo_megatron.tuning import Choice, Entry, Table


class TestTune:
    def test_candidates_are_legal_entries(self) -> None:
        for size, multiprocessors in itertools.product(tune.SIZES, (132, 64, 20)):
            choices = tune.candidates(size, multiprocessors)
            assert len(set(choices)) == len(choices)
            assert max(choice.num_blocks for choice in choices) == multiprocessors
            assert all(Entry.from_json(Entry(choice).to_json()).choice == choice for choice in choices)

    def test_the_smallest_grid_among_the_as_good(self) -> None:
        def choice(blocks: int, depth: int = 1) -> Choice:
            return Choice(Algorithm.one_shot, blocks, depth)

        times = {choice(16): 1.2, choice(32, 2): 1.02, choice(32): 1.01, choice(132): 1.0}
        assert tune.fastest(times) == choice(32, 2)
        assert tune.fastest({**times, choice(132): 0.9}) == choice(132)

    def test_thresholds_lie_between_sizes_and_equal_neighbours_are_one(self) -> None:
        one, two = Choice(Algorithm.one_shot, 16, 1), Choice(Algorithm.two_shot, 132, 2)
        key = Entry(one, 2, Policy.rotated, 4, Direction.forward)
        entries = tune.thresholds(key, {1024: one, 4096: one, 16384: two, 65536: two})
        assert [(entry.choice, entry.below_bytes) for entry in entries] == [(one, 8192), (two, None)]
        table = Table(tuple(entries))
        assert table.choose(4096, 2, Policy.rotated, 4, Direction.forward) == one
        assert table.choose(1 << 40, 2, Policy.rotated, 4, Direction.forward) == two

    def test_exact_below_has_no_gaps_and_holds_for_all(self) -> None:
        first, second, third = tune.SIZES[:3]
        assert tune.exact_below([{first, second}, {first, second, third}]) == math.isqrt(second * third)
        assert tune.exact_below([{first, third}]) == math.isqrt(first * second)
        assert tune.exact_below([{second}]) == 0

    def test_quantized_from_has_no_gaps_and_holds_for_all(self) -> None:
        *_, third, second, first = tune.SIZES
        assert tune.quantized_from([{first, second}, {first, second, third}]) == math.isqrt(second * third)
        assert tune.quantized_from([{first, third}]) == math.isqrt(first * second)
        assert tune.quantized_from([{second}]) > first, "never faster: no size that was measured is quantized"
        assert tune.quantized_from([set(tune.SIZES)]) == 0

    def test_the_written_table_is_read(self, tmp_path: Path) -> None:
        table = Table(
            (Entry(Choice(Algorithm.one_shot, 16, 1)), Entry(Choice(Algorithm.two_shot, 2, 1))), {2: 96}, {2: 96}
        )
        text = tune.dump({**table.to_json(), "made_by": {"commit": "abc"}})
        assert Table.from_json(json.loads(text), "x") == Table(table.entries, {2: 96}, {2: 96}, ("x",))
        assert text.count("num_blocks") == 2 and '"depth": 1},\n  {' in text, "one entry a line"
