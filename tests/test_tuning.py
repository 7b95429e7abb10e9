"""The tuning tables: the shipped ones, the choice, precedence, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from echo_megatron import tuning
from echo_megatron.config import MAX_WORLD_SIZE, Algorithm, Direction, Policy
from echo_megatron.tuning import Choice, Entry, Table, gpu_slug, load_table, read_table, user_table_path

MIB = 1 << 20
ONE, TWO = Choice(Algorithm.one_shot, 16, 1), Choice(Algorithm.two_shot, 132, 2)
CALL = (2, Policy.rotated, 4, Direction.forward)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tuning, "USER_FOLDER", tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_every_call_has_a_choice(gpu: str) -> None:
    table = load_table(gpu)
    for world_size in range(2, MAX_WORLD_SIZE + 1):
        assert table.exact_below_bytes(world_size) >= 0
        for policy in Policy:
            for bits in (4, 8):
                for num_bytes in (2, 4096, MIB, 1 << 30, 1 << 40):
                    grids = {}
                    for direction in Direction:
                        choice = table.choose(num_bytes, world_size, policy, bits, direction)
                        assert choice.algorithm is not Algorithm.auto
                        grids[direction] = choice.num_blocks
                    assert grids[Direction.backward] <= grids[Direction.forward], "it runs beside a matmul"


@pytest.mark.parametrize("path", sorted(tuning.SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_read_and_written_alike(path: Path) -> None:
    table = read_table(path)
    assert Table.from_json(table.to_json(), path.name) == table


def test_the_first_entry_that_fits_decides() -> None:
    table = Table((Entry(ONE, world_size=2, bits=4, below_bytes=MIB), Entry(TWO)))
    assert table.choose(MIB - 2, *CALL) == ONE
    assert table.choose(MIB, *CALL) == TWO
    assert table.choose(2, 4, Policy.rotated, 4, Direction.forward) == TWO
    assert table.choose(2, 2, Policy.rotated, 8, Direction.forward) == TWO
    assert table.choose(2 * MIB - 4, *CALL, dtype=torch.float32) == ONE, "the number of values counts"
    assert table.choose(MIB, *CALL, dtype=torch.float16) == TWO
    with pytest.raises(ValueError, match="expected an entry for 2097152 bytes, 2 ranks, rotated, 4 bits, forward"):
        Table(table.entries[:1], sources=("mine",)).choose(2 * MIB, *CALL)


def test_exact_below_counts_values_too() -> None:
    table = Table((), {2: 65536})
    assert table.exact_below_bytes(2) == 65536
    assert table.exact_below_bytes(2, torch.float32) == 2 * 65536
    assert table.exact_below_bytes(3) == 0


def test_what_nobody_measured_stays_the_group_s_own() -> None:
    """A token must not become slower than NCCL's: no decode step's message is quantized or summed by us unmeasured."""
    step = 64 * 16384 * 2  # bytes: 64 sequences of hidden size 16,384
    for gpu in ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Some other GPU"):
        table = load_table(gpu)
        for world_size in range(2, MAX_WORLD_SIZE + 1):
            assert table.quantized_from_bytes(world_size) >= step
            if (gpu, world_size) != ("NVIDIA H200", 2):
                assert table.exact_below_bytes(world_size) == 0
                assert table.quantized_from_bytes(world_size, torch.float32) > 2 * step


def test_the_user_s_table_comes_first_and_the_default_last() -> None:
    gpu = "NVIDIA H200"
    path = user_table_path(gpu)
    assert path.name == "tuning_h200.json" == f"tuning_{gpu_slug(gpu)}.json"
    shipped = load_table(gpu)
    own = Table((Entry(Choice(Algorithm.two_shot, 7, 3), world_size=2, below_bytes=MIB),), {2: 128}, {3: 4096})
    path.parent.mkdir()
    path.write_text(json.dumps(own.to_json()))
    table = load_table(gpu)
    assert table.choose(4096, *CALL).num_blocks == 7
    assert table.choose(MIB, *CALL) == shipped.choose(MIB, *CALL)
    assert table.exact_below_bytes(2) == 128 and table.exact_below_bytes(4) == shipped.exact_below_bytes(4)
    assert table.quantized_from_bytes(2) == shipped.quantized_from_bytes(2) and table.quantized_from_bytes(3) == 4096
    assert table.sources == ("tuning_h200.json", "h200.json", "default.json")
    assert load_table("Some other GPU").sources == ("default.json",)


def test_fingerprints_differ_when_choices_may() -> None:
    table = Table((Entry(ONE, below_bytes=MIB), Entry(TWO)), {2: 65536})
    again = Table.from_json(json.loads(json.dumps(table.to_json())), "another file")
    assert again.fingerprint() == table.fingerprint()
    assert 0 <= table.fingerprint() < 2**63
    others = [
        Table(table.entries[::-1], table.exact_below),
        Table((Entry(ONE, below_bytes=MIB + 1), Entry(TWO)), table.exact_below),
        Table(table.entries, {2: 65535}),
        Table(table.entries, table.exact_below, {2: 65536}),
        Table.always(ONE),
    ]
    assert len({t.fingerprint() for t in (table, *others)}) == 6


def entry(**changes: Any) -> dict[str, Any]:
    return {"algorithm": "one_shot", "num_blocks": 16, "depth": 1, **changes}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not JSON"),
        ({"format": 2}, "format: expected 1, got 2"),
        ({"format": 1, "exact_below_bytes": {}}, "KeyError: 'entries'"),
        ({"entries": [entry(algorithm="auto")]}, "expected one_shot or two_shot, got auto"),
        ({"entries": [entry(algorithm="ring")]}, "algorithm: expected one of auto, one_shot, two_shot, got 'ring'"),
        ({"entries": [entry(num_blocks=0)]}, "num_blocks: expected an integer from 1 to 1024, got 0"),
        ({"entries": [entry(depth=None)]}, "depth: expected an integer from 1 to 4, got None"),
        ({"entries": [entry(bits=6)]}, "bits: expected one of 4, 8, got 6"),
        ({"entries": [entry(world_size=9)]}, "world_size: expected an integer from 2 to 8, got 9"),
        ({"entries": [entry(blocks=3)]}, "unknown key blocks"),
        ({"entries": ["x"]}, "delete it"),
        ({"entries": [], "exact_below_bytes": {"1": 4}}, "expected world sizes 2 to 8"),
        ({"entries": [], "min_bytes": {"2": -4}}, "min_bytes: expected world sizes 2 to 8, bytes >= 0; got [2]"),
        ({"entries": [], "exact_below_bytes": {"2": 4}, "min_bytes": {"2": 2}}, "expected at most min_bytes"),
        ([], "delete it"),
    ],
)
def test_malformed_tables_are_refused(content: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    if isinstance(content, dict):
        content = {"format": 1, "exact_below_bytes": {}, **content} if "entries" in content else content
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=r"tuning table .*table\.json") as error:
        read_table(path)
    assert expected in str(error.value)
