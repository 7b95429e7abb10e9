"""The API reference: a page for every module, of foreign front ends, too; what pdoc can't read is an error."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT


@pytest.fixture
def build_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("build_docs")


def test_the_api_reference_is_built_whole(
    tmp_path: Path, build_docs: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    def build() -> None:
        sys.exit(build_docs.main(["--out", str(tmp_path)]))

    # A process of its own, so that no test meets the stand-ins; forked, so that what was imported is not again.
    process = multiprocessing.get_context("fork").Process(target=build)
    process.start()
    process.join(250)
    process.kill()
    assert process.exitcode == 0, capfd.readouterr().err
    modules = [path for path in (ROOT / "echo_megatron").rglob("*.py") if not path.name.startswith("_")]
    missing = [path for path in modules if not (tmp_path / path.relative_to(ROOT)).with_suffix(".html").is_file()]
    assert len(modules) > 100 and missing == []
    for page, name in (
        ("echo_megatron.html", "Communicator"),  # which the package imports late
        ("echo_megatron/integrations/nemo.html", "EchoTPComm"),
        ("echo_megatron/integrations/bridge.html", "EchoConfigContainer"),
        ("echo_megatron/integrations/nemo_recipes.html", "qwen3_600m_echo"),
        ("echo_megatron/evaluate/lm_eval_model.html", "EchoLM"),
    ):
        assert f'id="{name}"' in (tmp_path / page).read_text(), page


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def half(x: Nowhere) -> int: ...", "Nowhere"),
        ("import no_such_package", "no_such_package"),
        ("__all__ = ['gone']", "gone"),
    ],
)
def test_a_reference_with_holes_is_an_error(
    source: str,
    says: str,
    tmp_path: Path,
    build_docs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    name = f"broken_{says.lower()}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"from __future__ import annotations\n{source}\n")
    assert build_docs.main(["--package", str(tmp_path / name), "--out", str(tmp_path / "api")]) == 1
    assert says in capsys.readouterr().err
