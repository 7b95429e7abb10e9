"""What README and docs say is so: results, links, commands, options, presets, code, error messages."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections import Counter
from dataclasses import MISSING, fields, replace
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest
from pages import PAGES, README, RESULTS, ROOT, missing_tests, tables
from readme_examples import EXAMPLES

from echo_megatron.cli import COMMANDS
from echo_megatron.compensator import source_bound, source_variance
from echo_megatron.config import (
    GROUP_SIZES,
    LOCAL_FEEDBACK,
    PAPER_FEEDBACK,
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
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import make_quantizer


@pytest.fixture
def updater(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("update_readme")


# -- results -----------------------------------------------------------------------------------------------------------


class TestUpdateReadme:
    def test_the_readme_is_up_to_date(self, updater: ModuleType) -> None:
        assert updater.main(["--check"]) == 0
        shown = README + "".join(
            (ROOT / "docs" / name).read_text() for name in ("bench.md", "evaluate.md", "inference.md")
        )
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
        page = (ROOT / "docs" / "quantizers.md").read_text()
        table = {row[0]: row[1:] for row in tables(page)["part"]}
        for idx, preset in enumerate(("echo4", "echo8", "echo4_paper", "echo8_paper")):
            config = EchoConfig.preset(preset)
            num_bytes = make_quantizer(config, config.bits).num_bytes(TILE_VALUES)
            assert table["together, for 4,096 values"][idx] == f"{num_bytes:,}"
            assert table["bits a value"][idx] == f"{num_bytes * 8 / TILE_VALUES:.2f}"
        four, eight = (
            16 / (make_quantizer(EchoConfig(bits=b), b).num_bytes(TILE_VALUES) * 8 / TILE_VALUES) for b in (4, 8)
        )
        assert f"{four:.2f} times fewer bytes at 4 bits and {eight:.2f} times fewer at 8" in page
        assert "4.28 bits on the wire" in README and f"{four:.1f} times fewer bytes than BF16" in README.replace(
            "\n", " "
        )


# -- theory ------------------------------------------------------------------------------------------------------------


def test_the_bounds_of_the_theory_are_the_code_s() -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    rows = {row[0]: row[1:] for row in tables(text)["over 56 sites"]}
    feedbacks = {
        "full feedback": LOCAL_FEEDBACK,
        "the paper's coefficients": PAPER_FEEDBACK,
        "no compensation": replace(PAPER_FEEDBACK, eta=0.0),
    }
    assert list(rows) == list(feedbacks)
    for name, feedback in feedbacks.items():
        bound, variance = (float(re.split(r"[ ;]", cell)[0]) for cell in rows[name])
        assert bound == round(source_bound(feedback, 56, 1.0), 1)
        assert variance == round(source_variance(feedback, 56), 1)
    defaults = {row[0].strip("`").split("`")[0]: row[2] for row in tables(text)["residual"]}
    for residual, feedback in ((Residual.local, LOCAL_FEEDBACK), (Residual.consensus, PAPER_FEEDBACK)):
        assert defaults[residual.name].startswith(f"{feedback.eta:g}, {feedback.beta1:g}, {feedback.beta2:g}")


def test_every_proved_statement_has_a_test() -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    rows = tables(text)["statement"]
    assert len(rows) > 10 and all(re.search(r"`\w+\.py::test_\w+`", row[1]) for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    assert missing_tests(page.read_text()) == []


def test_the_table_of_quantizers_has_every_policy() -> None:
    rows = tables((ROOT / "docs" / "quantizers.md").read_text())["policy"]
    assert [row[0].strip("`") for row in rows] == list(Policy.__members__)


# -- links and commands ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: of equal ones the second has -1."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


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
