"""What README and docs say is so: results, links, commands, options, presets, code, error messages."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echo_megatron.cli import COMMANDS
from echo_megatron.config import (
    GROUP_SIZES,
    PRESETS,
    Algorithm,
    Direction,
    EchoConfig,
    Phase,
    Policy,
    Rescale,
    Residual,
    StateDtype,
    TransportName,
)
from echo_megatron.evaluate.settings import parse_setting
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import make_quantizer
from echo_megatron.workspace import MAX_DEPTH, TEAMS_A_BLOCK

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "docs" / "results"
QUANTIZED_PRESETS = [name for name in PRESETS if EchoConfig.preset(name).quantizes]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("update_readme")


def cells(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables(text: str) -> dict[str, list[list[str]]]:
    """First header cell of every table -> its rows."""
    found: dict[str, list[list[str]]] = {}
    lines = text.splitlines()
    for idx, line in enumerate(lines[1:], 1):
        if re.fullmatch(r"\|[\s:|-]+\|", line):
            rows = []
            for row in lines[idx + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.setdefault(cells(lines[idx - 1])[0], []).extend(rows)
    return found


# -- results -----------------------------------------------------------------------------------------------------------


STATISTIC = {"mean": 5.5, "sd": None, "n": 1}
ARM = {
    "label": "echo4",
    "baseline": False,
    "seeds": [1],
    "lr": 0.003,
    "steps": ["300"],
    "step_1000": None,
    "tail": STATISTIC,
    "delta": 0.0123,
    "delta_error": None,
    "delta_percent": 0.22,
    "validation": STATISTIC,
    "tp_bytes": 2.0e9,
    "tp_bytes_ratio": 0.2,
    "tokens_per_s": 1234.5,
}
MADE = {"machine": {"gpu": "H200"}, "versions": {"torch": "2.11.0"}, "commit": "abc", "command": "python x"}
RUN = {**MADE, "date": "2026-01-01", "method": "Medians.", "ceilings": None}
ALL_REDUCE = {
    "world_size": 2,
    "ceilings": {"wire_gb_per_s": 390.1, "hbm_gb_per_s": 4188.0},
    "rough_places": ["echo4: 996 B 1.0 ms, 1,000 B 1.2 ms"],
    "runs": [RUN, {**RUN, "commit": "def"}],
    "rows": [
        {
            "row": name,
            "policy": policy,
            "state_dtype": None,
            "bytes": size,
            "ms": ms,
            "nccl_ratio": 0.5 / ms,
            "wire_fraction": 0.5,
            "hbm_fraction": None,
            "run": int(name == "auto"),
            **({"matmuls": model} if model else {}),
        }
        for name, policy, size, ms, model in (
            ("nccl16", None, 2**26, 0.5, None),
            ("nccl16", None, 2**16, 0.021, None),
            ("symm_mem_one_shot", None, 2**16, 0.019, None),
            ("echo4", "rotated", 2**26, 0.15, None),
            ("echo4", "rotated", 2**27, 0.25, None),
            ("echo4_consensus_critical", "rotated", 2**26, 0.4, "llama3_8b"),
            ("echo4_consensus_critical", "rotated", 2**26, 0.3, "qwen3_0.6b"),
            ("echo4", "rotated", 2**30, 1.0, None),
            ("auto", "rotated", 2**16, 0.02, None),
        )
    ],
}
EVALUATION = {
    "settings": {
        "model": "small",
        "tokens": 4096,
        "data": "wiki",
        "note": "test",
        "context": 1024,
        "precision": "fp32",
        "num_sites": 60,
    },
    "runs": [MADE],
    "rows": [
        {
            "setting": setting,
            "key": f"P={size} simulated {parse_setting(setting).key}",
            "P": size,
            "ranks": "simulated",
            "bits_a_value": bits,
            "perplexity": perplexity,
            "delta_percent": delta,
        }
        for setting, size, bits, perplexity, delta in (
            ("16bit", 2, 16.0, 21.2, None),
            ("16bit", 4, 16.0, 21.2, None),
            ("echo4", 2, 4.28, 21.6, 1.887),
            ("echo4", 4, 4.28, None, None),
            ("echo4_paper,policy=naive", 4, 4.28, 39.5, 86.3),
        )
    ],
}
EXAMPLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ablation_qwen3_0p6b": (EVALUATION, ["| echo4 | 4.28 | 21.600 (+1.89 %) | not finite |", "at commit abc"]),
    "ablation_smollm2_135m": (
        EVALUATION,
        [
            "small, 4,096 tokens of wiki (test) in windows of 1,024, fp32, 60 sites.",
            "| 16bit | 16.00 | 21.200 | 21.200 |",
            "| echo4 | 4.28 | 21.600 (+1.89 %) | not finite |",
            "| naive asymmetric | 39.500 (+86.30 %) |  | 7.296 |",
            "at commit abc",
        ],
    ),
    "quickstart": (
        {
            "title": "tiny, P = 2",
            "caption": "Data: sample.",
            "windows": {"tail": 100},
            "validation_step": 300,
            "arms": [ARM],
            "differences": [{"sentence": "echo4 − nccl: +0.0123"}],
            "remarks": ["In fp32 32 bits."],
            "runs": [MADE, {**MADE, "commit": "def"}],
        },
        ["| echo4 | 1 | 5.5000 | +0.0123 | +0.22 |", "- In fp32 32 bits.", "commit abc; def"],
    ),
    "training_study": (
        {
            "title": "small, P = 2",
            "caption": "Data: books.",
            "windows": {"tail": 83},
            "validation_step": 250,
            "baseline": "nccl",
            "arms": [ARM],
            "differences": [
                {"other": "nccl", "sentence": "echo4 − nccl: +0.0123"},
                {"other": "echo4", "sentence": "last − echo4: 26.44"},
            ],
            "remarks": [],
            "runs": [MADE],
        },
        ["| echo4 | 5.5000 | +0.0123 | +0.22 | 5.5000 | 0.200 |", "- echo4 − nccl: +0.0123", "commit abc"],
    ),
    "train_qwen3_0p6b_h200x2": (
        {
            "title": "large, P = 2",
            "caption": "Data: books.",
            "windows": {"tail": 100},
            "validation_step": 1000,
            "baseline": "nccl",
            "arms": [ARM],
            "differences": [{"other": "nccl", "sentence": "echo4 − nccl: +0.0123"}],
            "remarks": ["The runs differ in commit."],
            "runs": [MADE],
            "paper": {"source": "Table 7", "rows": [{"arm": "16bit", "lr": 3e-4, "tail100": 3.197, "step1000": 4.095}]},
        },
        [
            "- echo4 − nccl: +0.0123",
            "- The runs differ in commit.",
            "| 16bit, the paper | 3.0e-04 | 4.095 | 3.197 |",
            "commit abc",
        ],
    ),
    "step_h200x2": (
        {
            **MADE,
            "world_size": 2,
            "link_bytes": 2**30,
            "links": [{"load": 0, "slowdown": 1.0}, {"load": 100, "slowdown": 1.25}],
            "echo": {"echo4": "echo: 4-bit rotated"},
            "rows": [
                {
                    "model": "llama3_8b",
                    "setting": setting,
                    "load": 0,
                    **{f"{what}_ms": ms for what in ("step", "forward")},
                    **{f"{what}_speedup": 400.0 / ms for what in ("step", "forward")},
                    **{f"{what}_share": share for what in ("step", "forward")},
                }
                for setting, ms, share in (("nccl16", 400.0, 0.0), ("echo4", 380.0, 0.5), ("skipped", 360.0, 1.0))
            ],
        },
        [
            "0 %: 1.00, 100 %: 1.25.",
            "| llama3_8b | 16 bits, ms | 400.0 |",
            "| llama3_8b | echo4, speed-up | 1.053 |",
            "| llama3_8b | paper, speed-up | 1.090 |",
            "echo: 4-bit rotated",
        ],
    ),
    "all_reduce_h200x2": (
        ALL_REDUCE,
        [
            "| nccl16 | 0.500 (1.00) |  |  |  |  |",
            "| echo4 (rotated) | 0.150 (3.33) | 0.250 (2.00) |  |  | 1.000 (0.50) |",
            "| echo4_consensus_critical (rotated, llama3_8b) | 0.400 (1.25) |",
            "| auto (rotated) |  |  | 0.020 (25.00) |",
            "390 GB/s to a peer, each way, 4188 GB/s in HBM",
            "at commit abc",
            "auto (rotated): 2026-01-01. Made by `python x` at commit def",
        ],
    ),
    "all_reduce_targets": (
        ALL_REDUCE,
        [
            "| echo4 (rotated) | **3.33** | 2.00 |  |  | 0.50 |",
            "| echo4_consensus_critical (rotated, qwen3_0.6b) | 1.67 |",
            "Slower than NCCL: at no size.",
            "| target | 18.0 |",
            "| NCCL | 21.0 |",
            "| symm_mem, the faster | 19.0 |",
            "| auto (rotated) | 20.0 |",
            "- echo4: 996 B 1.0 ms, 1,000 B 1.2 ms",
            "| echo4 (rotated) | 1.00 | 0.50 (50%) |  |",
        ],
    ),
    "collective_h200x2": (
        {
            **MADE,
            "world_size": 2,
            "transport": "collective",
            "rows": [{"bytes": 2**26, "nccl_ms": 0.5, "echo4_ms": 1.25, "echo4_paper_ms": 1.5}],
        },
        [
            "| MiB a rank (bf16) | nccl, ms | echo4, ms | echo4_paper, ms |",
            "| 64 | 0.500 | 1.250 | 1.500 |",
            "H200",
        ],
    ),
    "quantizer_study": (
        {
            "settings": {"model": "small", "num_tokens": 4096, "text": "wiki", "context": 1024},
            "made_by": MADE,
            "rows": [
                {
                    "section": section,
                    "label": label,
                    "residual": residual,
                    "algorithm": algorithm,
                    "world_size": 4,
                    "bits_a_value": bits,
                    "perplexity": perplexity,
                }
                for section, label, residual, algorithm, bits, perplexity in (
                    ("16 bits", "16 bits", None, None, 16.0, 21.17),
                    ("The paper's wire", "zero_aware g=128", "none", "two_shot", 4.28, 34.04),
                    ("The paper's wire", "zero_aware g=128", "local", "two_shot", 4.28, 26.44),
                    ("The presets with the paper's coefficients", "echo4", "local", "two_shot", 4.28, 22.11),
                    ("Noise: other rank orders", "rotated g=32, slices 3 2 1 0", "local", "two_shot", 4.28, 22.2),
                    ("Noise: other rank orders", "rotated g=32, slices 1 3 0 2", "local", "two_shot", 4.28, 22.4),
                )
            ],
        },
        [
            "| 16 bits |  | 16.00 |  |  | 21.17 |",
            "| zero_aware g=128 | 4 | 4.28 | two_shot | no compensation | 34.04 |",
            "in 2 other orders: rotated g=32 local 22.20 to 22.40.",
        ],
    ),
}


class TestUpdateReadme:
    def test_the_readme_is_up_to_date(self, updater: ModuleType) -> None:
        assert updater.main(["--check"]) == 0
        shown = README + "".join((ROOT / "docs" / name).read_text() for name in ("bench.md", "evaluate.md"))
        assert {found["name"] for found in updater.BLOCK.finditer(shown)} == set(updater.BLOCKS)

    @pytest.mark.parametrize("name", EXAMPLES)
    def test_fills_a_block_and_leaves_the_rest(self, name: str, tmp_path: Path, updater: ModuleType) -> None:
        results, expected = EXAMPLES[name]
        readme = tmp_path / "README.md"
        readme.write_text(f"before\n<!-- results:{name} -->\nold 1.23\n<!-- /results -->\nafter\n")
        source = updater.BLOCKS[name].source
        (tmp_path / f"{source or name}.json").write_text(json.dumps(results))
        arguments = ["--readme", str(readme), "--results", str(tmp_path)]
        assert updater.main([*arguments, "--check"]) == 1
        assert "old 1.23" in readme.read_text()
        assert updater.main(arguments) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!--") and text.endswith("-->\nafter\n") and "old 1.23" not in text
        for line in expected:
            assert line in text
        assert "26.44" not in text, "README shows a choice of the study's rows"
        assert updater.main([*arguments, "--check"]) == 0
        (tmp_path / f"{source or name}.png").touch()
        is_stale = updater.main([*arguments, "--check"]) == 1
        assert is_stale == (source is None), "a figure beside the results belongs into their block, not into a view"

    def test_every_kind_of_block_is_tried(self, updater: ModuleType) -> None:
        tried = {*EXAMPLES, "error_feedback_simulation", "sequence_parallel_h200x2"}  # the latter's results are in docs
        assert tried == set(updater.BLOCKS) and (RESULTS / "error_feedback_simulation.json").is_file()

    def test_a_missing_result_is_an_error_unless_allowed(
        self, tmp_path: Path, updater: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        readme = tmp_path / "README.md"
        readme.write_text("<!-- results:quickstart -->\n5.6012\n<!-- /results -->\n")
        arguments = ["--readme", str(readme), "--results", str(tmp_path)]
        assert updater.main(arguments) == 2
        assert "quickstart.json: missing; make it with: make quickstart" in capsys.readouterr().err
        assert "5.6012" in readme.read_text()
        assert updater.main([*arguments, "--allow-missing"]) == 0
        assert "Not measured yet" in readme.read_text() and "5.6012" not in readme.read_text()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("no block\n", "expected pairs of"),
            ("<!-- results:quickstart -->\nno end\n", "expected pairs of"),
            ("<!-- results:speed -->\n<!-- /results -->\n", "results:speed: expected one of quickstart"),
            ("<!-- results:quickstart -->\n<!-- /results -->\n", "not results of `quickstart`: KeyError"),
        ],
    )
    def test_refuses(
        self, text: str, expected: str, tmp_path: Path, updater: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "README.md").write_text(text)
        (tmp_path / "quickstart.json").write_text("{}")
        assert updater.main(["--readme", str(tmp_path / "README.md"), "--results", str(tmp_path)]) == 2
        assert expected in capsys.readouterr().err

    def test_bytes_of_the_wire_are_the_quantizer_s(self) -> None:
        how = (ROOT / "docs" / "how_it_works.md").read_text()
        table = {row[0]: row[1:] for row in tables(how)["part"]}
        for idx, preset in enumerate(("echo4", "echo8", "echo4_paper", "echo8_paper")):
            config = EchoConfig.preset(preset)
            num_bytes = make_quantizer(config, config.bits).num_bytes(TILE_VALUES)
            assert table["together, for 4,096 values"][idx] == f"{num_bytes:,}"
            assert table["bits a value"][idx] == f"{num_bytes * 8 / TILE_VALUES:.2f}"
        four, eight = (
            16 / (make_quantizer(EchoConfig(bits=b), b).num_bytes(TILE_VALUES) * 8 / TILE_VALUES) for b in (4, 8)
        )
        assert f"{four:.2f} times fewer bytes at 4 bits and {eight:.2f} times fewer at 8" in how
        assert "4.28 bits on the wire" in README and f"{four:.1f} times fewer bytes than BF16" in README.replace(
            "\n", " "
        )


# -- sizes of the kernels ----------------------------------------------------------------------------------------------

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
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


# -- links and commands ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path, updater: ModuleType) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file.parent == RESULTS and file.stem in updater.BLOCKS and not file.with_suffix(".json").exists():
            continue  # not measured yet, as the README's block says
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def commands(text: str) -> list[str]:
    """Lines of code blocks without a language, and inline code elsewhere."""
    found, language = [], None
    for line in text.splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language is None:
            found += re.findall(r"`([^`]+)`", line)
        elif not language:
            found.append(line)
    return found


def test_the_commands_of_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    found = set()
    for command in commands(README):
        if match := re.search(r"\bmake ([a-z-]+)", command):
            assert match[1] in targets, command
            found.add(match[1])
            for variable in re.findall(r"\b([A-Z_]+)=", command):
                assert f"$({variable})" in makefile or variable == "PYTHON", command
        if match := re.search(r"\becho-megatron ([a-z]\w*)", command):
            assert match[1] in COMMANDS, command
            found.add(match[1])
        for group, choice in re.findall(r"\b(experiment|tp_comm)=(\w+)", command):
            if choice != "NAME":
                assert (ROOT / "configs" / group / f"{choice}.yaml").is_file(), command
        for file in re.findall(r"\b(?:docs|scripts|tests|echo_megatron)/[\w./]+\.\w+", command):
            assert (ROOT / file).exists() or file.startswith("docs/results/"), command  # results may be yet to come
    assert {"quickstart", "test", "venv", "pretrain", "compare"} <= found


# Not "nemo", which tests/nemo would answer to.
FRONT_ENDS = {
    "echo_megatron.integrations.nemo": "nemo.lightning",
    "echo_megatron.integrations.bridge": "megatron.bridge",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_import_what_exists(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("echo_megatron"):
                if needs := FRONT_ENDS.get(node.module or ""):
                    pytest.importorskip(needs, reason=f"{needs} has an environment of its own")
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)


# -- options -----------------------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A default as the table writes it."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"`[{', '.join(item.name for item in value)}]`"
    return f"`{value.name if isinstance(value, Enum) else value}`"


def test_the_options_table_is_echo_config() -> None:
    rows = {row[0].strip("`"): row for row in tables(README)["option"]}
    assert list(rows) == [f.name for f in fields(EchoConfig)], "same options in the same order"
    for option in fields(EchoConfig):
        default = option.default if option.default_factory is MISSING else option.default_factory()
        assert rows[option.name][2] == shown(default), option.name
        assert rows[option.name][3], option.name
    legal = {
        "bits": [4, 8, 16],
        "group_size": GROUP_SIZES,
        "early_bits": [4, 8],
        "last_bits": [4, 8],
        "gather_bits": [4, 8, 16],
        "policy": Policy.__members__,
        "algorithm": Algorithm.__members__,
        "transport": TransportName.__members__,
        "residual": Residual.__members__,
        "rescale": Rescale.__members__,
        "state_dtype": StateDtype.__members__,
        "directions": Direction.__members__,
        "phases": Phase.__members__,
    }
    for name, choices in legal.items():
        assert re.findall(r"`(\w+)`", rows[name][1]) == [str(choice) for choice in choices], name
    for name in ("eta", "a", "early_fraction"):
        EchoConfig(**{name: 0}), EchoConfig(**{name: 1})
        assert rows[name][1] == "0 to 1"
    for name in ("beta1", "beta2"):
        assert rows[name][1] == "0 to below 1"
        with pytest.raises(ValueError, match=name):
            EchoConfig(**{name: 1})


def test_the_presets_table_is_presets() -> None:
    rows = {row[0].strip("`"): row[1] for row in tables(README)["preset"]}
    assert list(rows) == list(PRESETS)
    for name in ("nccl", "echo4_paper"):
        said = dict(re.findall(r"`(\w+): (\w+)`", rows[name]))
        assert said == {key: getattr(value, "name", str(value)) for key, value in PRESETS[name].items()}
    assert PRESETS["echo4"] == {} and PRESETS["echo8"] == {"bits": 8}
    assert PRESETS["echo8_paper"] == {**PRESETS["echo4_paper"], "bits": 8}


def test_the_table_of_environment_variables_has_all_that_echo_reads() -> None:
    texts = [path.read_text() for path in (ROOT / "echo_megatron").rglob("*.py")]
    read = {name for text in texts for name in re.findall(r'environ(?:\.get\(|\[)"(ECHO_\w+)"', text)}
    assert read
    assert {row[0].strip("`") for row in tables(README)["environment variable"]} == {*read, "CUDA_HOME"}


# -- refusals and error messages ---------------------------------------------------------------------------------------


def test_every_refused_option_is_documented() -> None:
    from echo_megatron.integrations.megatron_checks import _REFUSALS

    how = (ROOT / "docs" / "how_it_works.md").read_text()
    text = " ".join(row[0] for row in tables(how)["refused"])
    assert [refusal.option for refusal in _REFUSALS if refusal.option not in text] == []


def messages() -> list[str]:
    """Strings of the package, values replaced by an ellipsis."""
    found = []
    for path in (ROOT / "echo_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                found.append(
                    " ".join(
                        part.value
                        for part in ast.walk(node)
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    )
                )
    return found


def test_the_messages_of_troubleshooting_are_the_code_s() -> None:
    strings = messages()
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [row[0] for row in tables(text)["message"]]
    own = [row for row in rows if "(Hydra)" not in row and "(NCCL)" not in row and "find_python.sh" not in row]
    assert len(own) > 30
    unknown = []
    for row in own:
        message = re.match(r"`([^`]+)`", row)
        assert message, row
        parts = [re.escape(part.strip()) for part in message[1].split("…") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        if not any(pattern.search(string) for string in strings):
            unknown.append(message[1])
    assert unknown == []
