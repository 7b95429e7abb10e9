"""`echo-megatron evaluate`: settings, tokens, perplexity, resumable results, and the command on a small model."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing  # here: the forked ranks then need not import it
from pretrain_runs import make_config, train, write_tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from echo_megatron.config import EchoConfig, Policy
from echo_megatron.evaluate import evaluate_cli
from echo_megatron.evaluate.models import Engine, choose_engine, find_model
from echo_megatron.evaluate.perplexity import Measurement, Windows, measure
from echo_megatron.evaluate.results import Results, RowKey, block_losses, compare
from echo_megatron.evaluate.settings import SETS, TABLE_8, parse_setting, parse_settings
from echo_megatron.evaluate.subjects import TransformersSubject, relative_bytes
from echo_megatron.evaluate.token_source import Tokens, read_source
from echo_megatron.pretrain import loop, worker
from echo_megatron.pretrain.schema import PretrainConfig

assert dist_checkpointing and loop and worker

VOCAB = 64


def make_model(folder: Path, vocab_size: int = VOCAB) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": vocab_size}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # far enough from uniform that quantization shows
    model.save_pretrained(folder)
    return model


def make_ids(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, count)


# -- settings


def test_settings_are_presets_with_overrides() -> None:
    assert parse_setting("16bit").config == parse_setting("nccl").config == EchoConfig.preset("nccl")
    assert parse_setting("echo4_paper,policy=naive,eta=0.9").config == EchoConfig.preset(
        "echo4_paper", policy=Policy.naive, eta=0.9
    )
    early = parse_setting("bits=4,early_bits=8,early_fraction=0.25").config
    assert (early.bits, early.early_bits, early.early_fraction) == (4, 8, 0.25)
    assert parse_setting("echo4,min_bytes=null,timeout_s=5").config == EchoConfig(timeout_s=5.0)


def test_sets_hold_no_setting_twice_and_all_of_table_8() -> None:
    names = [setting.name for setting in parse_settings(["presets", "ablation", "echo4", "echo4,eta=0.0"])]
    assert "echo4,eta=0.0" not in names, "it is uncompensated"
    assert parse_setting("echo4,eta=0.0,a=0.1").key == parse_setting("uncompensated").key
    assert parse_setting("echo4,state_dtype=compact,last_layers=2").key == parse_setting("echo4").key
    assert parse_setting("echo4,last_bits=8,last_layers=2").key != parse_setting("last8").key
    keys = {setting.key for setting in parse_settings(["ablation"])}
    assert len(keys) == len(SETS["ablation"])
    for bits in (4, 8):
        assert {parse_setting(f"echo{bits}_paper{',' * bool(text)}{text}").key for text in TABLE_8} <= keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo5", "expected one of 16bit, echo4"),
        ("16bit,eta=0.5", "expected no overrides with 16bit"),
        ("echo4,eta=2", r"eta: expected a number in \[0, 1\], got 2.0"),
        ("echo4,bits=four", "bits: expected one of 4, 8, 16, got 'four'"),
        ("echo4,phases=train", "expected KEY=VALUE with one of bits"),
        ("echo4,eta", "expected KEY=VALUE"),
    ],
)
def test_settings_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_setting(text)
    assert text in str(caught.value)


# -- tokens


def test_every_kind_of_source_gives_its_tokens(tmp_path: Path) -> None:
    ids = make_ids(40)
    ids.astype("<u2").tofile(tmp_path / "a.u16")
    ids.astype("<u4").tofile(tmp_path / "a.u32")
    np.save(tmp_path / "a.npy", ids)
    for name in ("a.u16", "a.u32", "a.npy"):
        tokens = read_source(str(tmp_path / name), 30, vocab_size=VOCAB)
        assert tokens.num_tokens == 30 and (tokens.ids == ids[:31]).all() and tokens.name == name
    assert read_source(str(tmp_path / "a.npy"), None, vocab_size=VOCAB).num_tokens == 39
    by_rank = np.arange(VOCAB)[::-1].copy()
    np.save(tmp_path / "map.npy", by_rank)
    mapped = read_source(str(tmp_path / "a.u16"), 39, vocab_size=VOCAB, id_map=tmp_path / "map.npy")
    assert (mapped.ids == by_rank[ids]).all() and mapped.sha256 != tokens.sha256

    write_tokens(tmp_path)  # indexed datasets
    indexed = read_source(str(tmp_path / "validation"), 100, vocab_size=VOCAB)
    assert (indexed.ids == np.fromfile(tmp_path / "validation.bin", "<u2")[:101]).all()

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a b b c a " * 10)
    text = read_source(str(tmp_path / "text.txt"), 5, vocab_size=VOCAB, tokenizer=str(tmp_path))
    assert text.ids.tolist() == [0, 1, 1, 2, 0, 0]


def test_sources_that_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", make_ids(40))
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    for name, options, message in (
        ("a.npy", {"num_tokens": 40}, "expected 41 .* tokens, got 40; lower --tokens"),
        ("a.npy", {"vocab_size": 10}, "expected ids from 0 to 9, the model's vocabulary, got 2 to 54"),
        ("a.npy", {"tokenizer": "x"}, "--tokenizer: expected with a text alone"),
        ("a.npy", {"split": "test"}, "--split: expected one of train, validation"),
        ("none", {}, "got nothing of that name"),
        ("text.txt", {}, "a text needs --tokenizer"),
        ("text.txt", {"tokenizer": "x"}, "expected UTF-8 text"),
        ("", {}, "expected a folder with a manifest.json"),
    ):
        given: dict[str, Any] = {"num_tokens": 5, "vocab_size": VOCAB, **options}
        with pytest.raises(ValueError, match=message):
            read_source(str(tmp_path / name), given.pop("num_tokens"), **given)


# -- perplexity


def test_perplexity_is_the_models_own(tmp_path: Path) -> None:
    model = make_model(tmp_path / "hf")
    subject, ids = TransformersSubject(model, {}), make_ids(101)
    tokens = Tokens("ids", ids, "")
    windows = Windows(context=24, batch=3)  # 3 windows, 1 window, and 4 tokens
    shapes = [tuple(batch.shape) for batch in windows.batches(tokens)]
    assert shapes == [(3, 25), (1, 25), (1, 5)] and windows.num_tokens_a_pass(tokens) == 72
    seen: list[int] = []
    with subject.applied(EchoConfig.preset("nccl"), 1, 72):
        found = measure(subject, tokens, windows, lambda so_far: seen.append(sum(so_far.window_tokens)))
    assert seen == [72, 96, 100]
    total = 0.0
    with torch.no_grad():
        for start in range(0, 100, 24):
            window = torch.from_numpy(ids[start : start + 25]).unsqueeze(0)
            total += model(window, labels=window).loss.item() * (window.shape[1] - 1)
    assert found.loss == pytest.approx(total / 100, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / 100), rel=1e-5)


def test_bytes_of_early_sites_lie_between() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": VOCAB}
    subject = TransformersSubject(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)), {})
    relative, bits = {}, {}
    for name in ("16bit", "echo4", "echo8", "early8", "last8"):
        with subject.applied(parse_setting(name).config, 4, 1 << 12) as applied:
            relative[name], bits[name] = applied.bytes_relative, applied.bits_a_value
    assert relative["16bit"] == 1 and relative["echo4"] == pytest.approx(4.28125 / 16, rel=1e-3)
    assert relative["echo8"] == pytest.approx(8.28125 / 16, rel=1e-3)
    # Half of three layers: the first two, so four of six sites.
    assert relative["early8"] == pytest.approx((2 * relative["echo8"] + relative["echo4"]) / 3, rel=1e-6)
    assert relative["last8"] == pytest.approx((relative["echo8"] + 2 * relative["echo4"]) / 3, rel=1e-6)
    assert (bits["16bit"], bits["echo4"], bits["echo8"]) == (16, 4.28125, 8.28125)
    assert bits["early8"] == pytest.approx((2 * 8.28125 + 4.28125) / 3)
    assert relative_bytes(EchoConfig(), [], 1, 100) == 1


def test_differences_are_paired_over_the_same_text() -> None:
    def row(setting: str, bits: int, losses: list[float]) -> dict[str, Any]:
        mean = sum(losses) / len(losses)
        facts = {"setting": setting, "bits": bits, "P": 2, "ranks": "simulated", "block_losses": losses}
        return facts | {"loss": mean, "perplexity": math.exp(mean)}

    rows = [row("16bit", 16, [1.0, 3.0]), row("echo4", 4, [1.1, 3.3]), row("echo4", 4, [1.0, 3.0]) | {"P": 4}]
    for one in rows:
        compare(one, rows)
    assert rows[0]["delta_percent"] is None and rows[2]["delta_loss"] is None, "of other ranks"
    assert rows[1]["delta_loss"] == pytest.approx(0.2) and rows[1]["delta_loss_error"] == pytest.approx(0.1)
    assert rows[1]["delta_percent"] == pytest.approx(100 * (math.exp(0.2) - 1), abs=1e-3)
    many = Measurement([float(n) for n in range(100)], [2] * 100)
    assert block_losses(many)[:2] == [0.25, 1.25] and len(block_losses(many)) == 50


# -- the command


def run(folder: Path, *arguments: str) -> int:
    common = ["--model", str(folder / "hf"), "--data", str(folder / "ids.npy"), "--out", str(folder), "--name", "r"]
    common += ["--device", "cpu", "--context", "32", "--engine", "transformers"]
    return evaluate_cli.main([*common, *arguments])


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "r.json").read_text())
    return {f"{row['setting']} {row['P']}": row for row in content["rows"]}


def test_a_cut_command_goes_on_and_another_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "hf")
    np.save(tmp_path / "ids.npy", make_ids(129))
    command = ("--settings", "16bit", "echo4", "echo4_paper", "early8", "--world-sizes", "2", "4")
    assert run(tmp_path, *command, "--budget-s", "0") == evaluate_cli.EXIT_LEFT
    assert "8 left (16bit P=2" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()

    class Killed(BaseException):
        pass

    measured: list[str] = []
    original = TransformersSubject.losses

    def losses(subject: TransformersSubject, tokens: torch.Tensor) -> torch.Tensor:
        measured.append("pass")
        if len(measured) == 15:
            raise Killed
        return original(subject, tokens)

    monkeypatch.setattr(TransformersSubject, "losses", losses)
    with pytest.raises(Killed):
        run(tmp_path, *command)
    before = rows_of(tmp_path)
    assert list(before) == ["16bit 2", "16bit 4", "echo4 2"], "three settings of four passes each were done"
    assert run(tmp_path, *command) == 0
    after = rows_of(tmp_path)
    assert len(measured) == 15 + 4 * 5 and len(after) == 8
    assert all(after[name]["loss"] == before[name]["loss"] for name in before)
    losses_by_row = {name: row["loss"] for name, row in after.items()}
    assert losses_by_row["16bit 2"] == pytest.approx(losses_by_row["16bit 4"], abs=1e-5)
    assert len(set(losses_by_row.values())) >= 7
    assert after["echo4 2"]["bytes_relative"] < after["early8 2"]["bytes_relative"] < 0.5
    page = (tmp_path / "r.md").read_text()
    assert "| echo4 | 2 | simulated | one_shot |" in page and "128 tokens of ids.npy in windows of 32" in page
    assert "Table 8" not in page

    assert run(tmp_path, *command, "--tokens", "64") == evaluate_cli.EXIT_REFUSED
    message = capsys.readouterr().err
    assert "tokens: the file has 128, got 64" in message and "--restart" in message
    assert rows_of(tmp_path) == after, "a refusal leaves the file alone"
    assert run(tmp_path, "--settings", "16bit", "--world-sizes", "2", "--tokens", "64", "--restart") == 0
    assert list(rows_of(tmp_path)) == ["16bit 2"]
    (tmp_path / "r.json").write_text("{}")
    assert run(tmp_path, *command) == evaluate_cli.EXIT_REFUSED
    assert "expected the results of an evaluation" in capsys.readouterr().err


def test_rows_whose_name_means_other_options_by_now_are_left_out(tmp_path: Path) -> None:
    """As after a change of defaults: echo4 had averages once, and full_feedback was the name of what it is now."""
    averages, now = parse_setting("averages").key, parse_setting("echo4").key
    names = {"16bit": "16bit", "echo4": averages, "full_feedback": now, "averages": averages, "echo4,bits=8": now}
    rows = [{"setting": name, "key": f"P=2 simulated {key}"} for name, key in names.items()]
    (tmp_path / "r.json").write_text(json.dumps({"settings": {"tokens": 1}, "rows": rows, "runs": []}))
    results = Results(tmp_path, "r", {"tokens": 1}, {})
    assert results.outdated == ["echo4", "full_feedback", "echo4,bits=8"]
    keys = [RowKey(parse_setting(name), 2, True) for name in ("16bit", "averages", "echo4")]
    assert [key in results for key in keys] == [True, True, False]


def test_the_ablation_is_one_table(tmp_path: Path) -> None:
    make_model(tmp_path / "hf")
    np.save(tmp_path / "ids.npy", make_ids(33))
    assert run(tmp_path, "--settings", "ablation", "--world-sizes", "4") == 0
    assert len(rows_of(tmp_path)) == len(SETS["ablation"])
    table = (tmp_path / "r.md").read_text().partition("Table 8")[2]
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    by_label = {line[0].strip("| "): line[1:] for line in lines}
    for label, paper in TABLE_8.values():
        assert "%" in by_label[label][0] and "%" in by_label[label][1], label
        assert by_label[label][2].strip(" |") == f"{paper:.3f}"
    assert "%" in by_label["ours: no compensation"][1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world-sizes", "5"), "expected an input dimension divisible by 5 ranks, got 64"),
        (("--world-sizes", "9"), "expected 1 to 8 ranks, got 9"),
        (("--layers", "local"), "expected with Megatron's models alone"),
        (("--model", "nowhere"), "no such folder; a hub name has the form owner/name"),
        (("--model", "."), "got neither"),
        (("--data", "nowhere"), "got nothing of that name"),
        (("--device", "cuda"), "expected at least 1 GPUs, got 0"),
    ],
)
def test_refusals_come_before_the_first_setting(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    make_model(tmp_path / "hf")
    np.save(tmp_path / "ids.npy", make_ids(33))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert run(tmp_path, *arguments) == evaluate_cli.EXIT_REFUSED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


COMMON = ("--settings", "16bit", "echo4", "echo4_paper", "--context", "600", "--tokens", "1200")


def _evaluates_run(config: PretrainConfig) -> int:
    command = ["--model", str(config.run_dir), *COMMON, "--out", config.runs_dir, "--name", "run"]
    return _on_ranks_then_alone(command, command)


def _evaluates_hf(config: PretrainConfig) -> int:
    """Into one file; then transformers into a file of its own, which the first one refuses."""
    folder = Path(config.runs_dir)
    command = ["--model", str(folder / "hf"), "--data", str(folder / "validation"), *COMMON, "--out", str(folder)]
    status = _on_ranks_then_alone([*command, "--name", "hf"], [*command, "--name", "hf"])
    if "RANK" in os.environ:
        return status
    alone = [*command, "--world-sizes", "2", "--engine", "transformers"]
    assert evaluate_cli.main([*alone, "--name", "hf"]) == evaluate_cli.EXIT_REFUSED
    return max(status, evaluate_cli.main([*alone, "--name", "hf_transformers"]))


def _on_ranks_then_alone(on_ranks: list[str], alone: list[str]) -> int:
    """The second process then drops torchrun's environment and simulates."""
    status = evaluate_cli.main(on_ranks)
    if os.environ["RANK"] == "0":
        return status
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    return max(status, evaluate_cli.main([*alone, "--world-sizes", "2"]))


def test_a_run_and_a_hugging_face_folder_on_real_and_simulated_ranks(tmp_path: Path) -> None:
    options = ("trainer.max_steps=2", "trainer.val_interval=0", "trainer.save_interval=0")
    config = make_config(tmp_path, write_tokens(tmp_path), "tiny", *options)
    make_model(tmp_path / "hf", vocab_size=VOCAB + 1)  # two ranks pad it
    assert train(config) == [0, 0]
    log = tmp_path / "tiny.log"
    for work in (_evaluates_run, _evaluates_hf):
        assert train(config, work=work) == [0, 0], log.read_text()
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["settings"]["model"] == "tiny, step 2" and content["settings"]["data"] == "validation"
    losses = {(row["setting"], row["ranks"]): row["loss"] for row in content["rows"]}
    assert len(losses) == 6 and {row["P"] for row in content["rows"]} == {2}
    for setting in ("16bit", "echo4", "echo4_paper"):
        assert losses[setting, "real"] == losses[setting, "simulated"], "bit for bit"
    assert losses["echo4", "real"] != losses["16bit", "real"]
    assert {row["transport"] for row in content["rows"]} == {None, "collective"}
    assert [run["command"].split()[0] for run in content["runs"]] == ["torchrun", "echo-megatron"]

    contents = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("hf", "hf_transformers")}
    engines = {name: content["settings"]["engine"] for name, content in contents.items()}
    assert engines == {"hf": "megatron-core, local layers", "hf_transformers": "transformers"}
    assert "engine: the file has 'megatron-core, local layers', got 'transformers'" in log.read_text()
    found = {(row["setting"], row["ranks"]): row["loss"] for row in contents["hf"]["rows"]}
    other = {row["setting"]: row["loss"] for row in contents["hf_transformers"]["rows"]}
    assert len(found) == 6 and len(other) == 3
    for setting, loss in other.items():
        assert found[setting, "real"] == found[setting, "simulated"], "bit for bit"
        # A rounding error of FP32 may move a code.
        assert loss == pytest.approx(found[setting, "real"], rel=1e-5 if setting == "16bit" else 1e-2), "the same model"
    assert len(set(other.values())) == 3


def test_the_engine_is_chosen_for_all_sizes_of_a_call(tmp_path: Path) -> None:
    make_model(tmp_path / "hf")  # 4 heads, 2 key-value heads
    source, auto = find_model(str(tmp_path / "hf")), Engine.auto
    assert choose_engine(source, auto, [1, 2], True) == (Engine.megatron, "")
    why = "num_key_value_heads is 2, not a multiple of P=4"
    assert choose_engine(source, auto, [2, 4], True) == (Engine.transformers, why)
    assert choose_engine(source, auto, [4], False) == (Engine.megatron, ""), "real ranks are never transformers'"
    assert choose_engine(source, Engine.transformers, [2], True) == (Engine.transformers, "")
    with pytest.raises(ValueError, match="--engine transformers: simulates ranks"):
        choose_engine(source, Engine.transformers, [2], False)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_bias": True}))
    assert choose_engine(source, auto, [2], True) == (
        Engine.transformers,
        "config.json: attention_bias: expected False, got True, which is not converted",
    )
