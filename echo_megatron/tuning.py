"""Measured choices of the p2p transport: algorithm, grid and pipeline depth by message, and which are not quantized.

A table is data, one JSON for each GPU. `load_table` reads, in this order, and the first entry that fits a call decides:

    ~/.cache/echo_megatron/tuning_<gpu>.json     written by `echo-megatron bench --tune` on this machine
    tuning_tables/<gpu>.json                     shipped
    tuning_tables/default.json                   shipped, conservative; it has an answer for every call

The choice is a function of the call and the table alone, so ranks whose tables have one `fingerprint` choose alike.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from echo_megatron.config import MAX_WORLD_SIZE, QUANTIZED_BITS, Algorithm, Direction, Policy

FORMAT = 1
SHIPPED = Path(__file__).parent / "tuning_tables"
DEFAULT = SHIPPED / "default.json"
USER_FOLDER = Path("~/.cache/echo_megatron")
MAX_BLOCKS = 1024
MAX_DEPTH = 4  # tiles between push and reduce: the workspace's rings are for as many
MEASURED_ITEMSIZE = 2  # thresholds are bytes of a 16-bit message
UNMEASURED_MIN_BYTES = 4 << 20  # above any decode step's message, where NCCL's latency is hard to beat


@dataclass(frozen=True)
class Choice:
    """How a call runs.

    Attributes:
        algorithm: one_shot or two_shot.
        num_blocks: thread blocks of the grid; the transport clamps it to what can be resident together.
        depth: tiles that a team has in flight between push and gather.
    """

    algorithm: Algorithm
    num_blocks: int
    depth: int


@dataclass(frozen=True)
class Entry:
    """The choice for a set of calls; an attribute that is None fits all.

    Attributes:
        choice: what is chosen.
        world_size: P.
        policy: the quantizer.
        bits: bits of a code.
        direction: the pass.
        below_bytes: messages of fewer bytes, counted at 16 bits a value.
    """

    choice: Choice
    world_size: int | None = None
    policy: Policy | None = None
    bits: int | None = None
    direction: Direction | None = None
    below_bytes: int | None = None

    def fits(self, num_bytes: int, world_size: int, policy: Policy, bits: int, direction: Direction) -> bool:
        asked = ((self.world_size, world_size), (self.policy, policy), (self.bits, bits), (self.direction, direction))
        return all(own is None or own == value for own, value in asked) and (
            self.below_bytes is None or num_bytes < self.below_bytes
        )

    def to_json(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in (
                ("world_size", self.world_size),
                ("policy", self.policy and self.policy.name),
                ("bits", self.bits),
                ("direction", self.direction and self.direction.name),
                ("below_bytes", self.below_bytes),
                *(asdict(self.choice) | {"algorithm": self.choice.algorithm.name}).items(),
            )
            if value is not None
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Entry:
        """Raises ValueError for an unknown key, a missing one, or an illegal value."""
        known = {f.name for f in fields(Choice)} | {f.name for f in fields(cls)} - {"choice"}
        if unknown := sorted(set(entry) - known):
            raise ValueError(f"unknown key {', '.join(unknown)}; expected {', '.join(sorted(known))}")
        algorithm = _member(Algorithm, entry, "algorithm", required=True)
        if algorithm is Algorithm.auto:
            raise ValueError("algorithm: expected one_shot or two_shot, got auto")
        choice = Choice(
            algorithm,
            _integer(entry, "num_blocks", 1, MAX_BLOCKS, required=True),
            _integer(entry, "depth", 1, MAX_DEPTH, required=True),
        )
        bits = _integer(entry, "bits", *QUANTIZED_BITS)
        if bits not in (None, *QUANTIZED_BITS):
            raise ValueError(f"bits: expected one of {', '.join(map(str, QUANTIZED_BITS))}, got {bits}")
        return cls(
            choice,
            world_size=_integer(entry, "world_size", 2, MAX_WORLD_SIZE),
            policy=_member(Policy, entry, "policy"),
            bits=bits,
            direction=_member(Direction, entry, "direction"),
            below_bytes=_integer(entry, "below_bytes", 1, 1 << 62),
        )


@dataclass(frozen=True)
class Table:
    """Entries in order of precedence.

    Attributes:
        entries: the first that fits a call decides.
        exact_below: world size -> bytes (at 16 bits a value) below which the exact sum is the fastest.
        min_bytes: world size -> bytes (likewise) below which a message is not quantized. Between the two the group's
            own all-reduce is the fastest.
        sources: what it was read from, for the log.
    """

    entries: tuple[Entry, ...]
    exact_below: Mapping[int, int] = field(default_factory=dict)
    min_bytes: Mapping[int, int] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def choose(
        self,
        num_bytes: int,
        world_size: int,
        policy: Policy,
        bits: int,
        direction: Direction,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Choice:
        """The choice for a call; the same on every rank that has this table.

        Args:
            num_bytes: bytes of the message, in `dtype`.
            world_size: P.
            policy: the quantizer.
            bits: 4 or 8.
            direction: the pass: forward blocks the next matmul, backward runs beside one.
            dtype: of the message; what counts is the number of values.

        Raises:
            ValueError: no entry fits; `load_table` gives none of these tables.
        """
        num_bytes = num_bytes * MEASURED_ITEMSIZE // dtype.itemsize
        for entry in self.entries:
            if entry.fits(num_bytes, world_size, policy, bits, direction):
                return entry.choice
        raise ValueError(
            f"tuning table {', '.join(self.sources)}: expected an entry for {num_bytes} bytes, {world_size} ranks, "
            f"{policy.name}, {bits} bits, {direction.name}; got none"
        )

    def exact_below_bytes(self, world_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Messages in `dtype` of fewer bytes are summed exactly in the least time; 0 where nobody measured."""
        return self.exact_below.get(world_size, 0) * dtype.itemsize // MEASURED_ITEMSIZE

    def quantized_from_bytes(self, world_size: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Messages in `dtype` of fewer bytes gain nothing by being quantized; cautious where nobody measured."""
        return self.min_bytes.get(world_size, UNMEASURED_MIN_BYTES) * dtype.itemsize // MEASURED_ITEMSIZE

    def fingerprint(self) -> int:
        """A number in [0, 2^63) that two tables share when they choose alike: for ranks to compare."""
        canonical = json.dumps(self.to_json(), sort_keys=True)
        return int.from_bytes(hashlib.sha256(canonical.encode()).digest()[:8], "little") >> 1

    def before(self, other: Table) -> Table:
        """This table, and `other` where this one has no answer."""
        return Table(
            self.entries + other.entries,
            {**other.exact_below, **self.exact_below},
            {**other.min_bytes, **self.min_bytes},
            self.sources + other.sources,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "exact_below_bytes": {str(size): self.exact_below[size] for size in sorted(self.exact_below)},
            "min_bytes": {str(size): self.min_bytes[size] for size in sorted(self.min_bytes)},
            "entries": [entry.to_json() for entry in self.entries],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> Table:
        """The table of a file's content.

        Raises:
            ValueError: it is malformed; the message names `source` and what to do.
        """
        try:
            if content["format"] != FORMAT:
                raise ValueError(f"format: expected {FORMAT}, got {content['format']!r}")
            exact, least = (_bytes_by_size(content, name) for name in ("exact_below_bytes", "min_bytes"))
            if bad := [size for size in exact if exact[size] > least.get(size, UNMEASURED_MIN_BYTES)]:
                raise ValueError(f"exact_below_bytes: expected at most min_bytes, got more for world sizes {bad}")
            return cls(tuple(Entry.from_json(entry) for entry in content["entries"]), exact, least, (source,))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"tuning table {source}: {type(error).__name__}: {error}; delete it, or write it anew with "
                "echo-megatron bench --tune"
            ) from error

    @classmethod
    def always(cls, choice: Choice) -> Table:
        """The table that makes one choice for every call: for measuring that choice."""
        return cls((Entry(choice),), sources=(f"always {choice.algorithm.name}, {choice.num_blocks} blocks",))


def gpu_slug(gpu_name: str) -> str:
    """The GPU's name as part of a file's name: `NVIDIA H200` gives `h200`."""
    return re.sub(r"[^a-z0-9]+", "_", gpu_name.lower().removeprefix("nvidia")).strip("_") or "unknown"


def user_table_path(gpu_name: str) -> Path:
    """Where `echo-megatron bench --tune` writes the table of this GPU."""
    return USER_FOLDER.expanduser() / f"tuning_{gpu_slug(gpu_name)}.json"


def read_table(path: Path) -> Table:
    """Raises ValueError where the file is not a table."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"tuning table {path}: not JSON: {error}; delete it, or tune again") from error
    return Table.from_json(content, path.name)


def load_table(gpu_name: str) -> Table:
    """The tables of this GPU, most particular first, and the default behind them: every call has an answer.

    Raises:
        ValueError: one of the files is malformed.
    """
    paths = (user_table_path(gpu_name), SHIPPED / f"{gpu_slug(gpu_name)}.json", DEFAULT)
    table, *others = [read_table(path) for path in paths if path.is_file()]
    for other in others:
        table = table.before(other)
    return table


def _bytes_by_size(content: Mapping[str, Any], name: str) -> dict[int, int]:
    """World size -> bytes; a table that was tuned before the field existed says nothing of it."""
    found = {int(size): int(num_bytes) for size, num_bytes in content.get(name, {}).items()}
    if bad := [size for size in found if not 2 <= size <= MAX_WORLD_SIZE or found[size] < 0]:
        raise ValueError(f"{name}: expected world sizes 2 to {MAX_WORLD_SIZE}, bytes >= 0; got {bad}")
    return found


def _integer(entry: Mapping[str, Any], name: str, lowest: int, highest: int, required: bool = False) -> Any:
    value = entry.get(name)
    if value is None and not required:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError(f"{name}: expected an integer from {lowest} to {highest}, got {value!r}")
    return value


def _member(kind: Any, entry: Mapping[str, Any], name: str, required: bool = False) -> Any:
    value = entry.get(name)
    if value is None and not required:
        return None
    if value not in kind.__members__:
        raise ValueError(f"{name}: expected one of {', '.join(kind.__members__)}, got {value!r}")
    return kind[value]
