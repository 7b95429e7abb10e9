"""What docs/how_it_works.md says of sizes is so: those of the kernels' layout, and what the compact state costs."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
from compiler import COMPILER
from pages import RESULTS, ROOT, tables

from echo_megatron.config import PRESETS, EchoConfig, StateDtype
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.workspace import MAX_DEPTH, TEAMS_A_BLOCK

QUANTIZED_PRESETS = [name for name in PRESETS if EchoConfig.preset(name).quantizes]
H200_MULTIPROCESSORS = 132


def layout_numbers(folder: Path, expressions: dict[str, str]) -> dict[str, int]:
    """Values of C++ expressions in terms of cuda/layout.cuh."""
    lines = [f'  std::printf("{name} %lld\\n", (long long)({text}));' for name, text in expressions.items()]
    header = ROOT / "cuda" / "layout.cuh"
    source = (
        f'#include <cstdio>\n#include "{header}"\nusing namespace echo;\nint main() {{\n' + "\n".join(lines) + "\n}\n"
    )
    (folder / "numbers.cpp").write_text(source)
    program = folder / "numbers"
    subprocess.run([str(COMPILER), "-std=c++17", str(folder / "numbers.cpp"), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in map(str.split, printed.splitlines())}


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_sizes_of_the_kernels_are_those_of_the_layout(tmp_path: Path) -> None:
    how = (ROOT / "docs" / "how_it_works.md").read_text()
    expressions = {
        "teams": "kTeams",
        "threads": "kTeamThreads",
        "ring": f"ring_for({MAX_DEPTH})",
        "control": "kControlBytes",
    }
    expressions |= {f"state_{name}": f"state_tile_bytes(StateDtype::{name})" for name in StateDtype.__members__}
    for preset in QUANTIZED_PRESETS:
        config = EchoConfig.preset(preset)
        slot = f"SlotLayout({config.bits}, Policy::{config.policy.name}, {config.group_size}).bytes"
        expressions[f"slot_{preset}"] = slot
        for size in (2, 4, 8):
            teams = f"kTeams * {H200_MULTIPROCESSORS}"
            expressions[f"{preset}_{size}"] = (
                f"WorkspaceLayout{{{size}, {teams}, ring_for({MAX_DEPTH}), {slot}}}.bytes()"
            )
    numbers = layout_numbers(tmp_path, expressions)
    assert numbers["teams"] == TEAMS_A_BLOCK

    rows = {row[0].strip("`"): row[1:] for row in tables(how)["workspace, MiB"]}
    for preset in QUANTIZED_PRESETS:
        sizes = [f"{numbers[f'{preset}_{size}'] / 2**20:.1f}" for size in (2, 4, 8)]
        assert rows[preset] == [f"{numbers[f'slot_{preset}']:,}", *sizes]
    for row in tables(how)["state"]:
        assert row[1] == f"{numbers['state_' + row[0].strip('`')] / TILE_VALUES:g}"
    for said in (
        f"A *team* of {numbers['threads']} threads",
        f"A thread block has {numbers['teams']} teams",
        f"Depth is at most {MAX_DEPTH} and R a power of two: {numbers['ring']}.",
        f"{numbers['control'] // 1024} KiB of control words",
        f"2 · (P−1) · {numbers['teams']} · {H200_MULTIPROCESSORS} · {numbers['ring']} flags",
        f"Of a GPU with {H200_MULTIPROCESSORS}",
    ):
        assert said in how, said
    compact = numbers["state_compact"]
    assert f"`compact`: {TILE_VALUES:,} bytes of c, {compact - TILE_VALUES} of scales" in how
    grace = re.search(r"kGatherGraceNs = ([\d']+);", (ROOT / "cuda" / "signal_warps.cuh").read_text())
    assert grace and f"{int(grace[1].replace(chr(39), '')) / 1e9:g} s more patient" in how
    figure = (ROOT / "scripts" / "draw_pipeline.py").read_text()
    assert f"RING = {numbers['ring']} " in figure


def test_what_the_compact_state_costs_is_in_the_results() -> None:
    rows = json.loads((RESULTS / "error_feedback_simulation.json").read_text())["rows"]
    errors = {(row["world_size"], row["rho"], row["arm"]): row["mean"] for row in rows}
    ratios = [
        error / errors[world_size, rho, f"{arm} bf16"]
        for (world_size, rho, arm), error in errors.items()
        if arm.endswith(" local")
    ]
    most = math.ceil(1000 * (max(ratios) - 1)) / 10
    text = " ".join((ROOT / "docs" / "how_it_works.md").read_text().split())
    assert f"with `compact` is at most {most:g} % larger than with `bf16`" in text
