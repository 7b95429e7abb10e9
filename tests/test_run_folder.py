"""Run folders: what is written reads back bit for bit, and a kill at any byte loses one line at most."""

import json
import math
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_megatron.run_folder import RunFolder, write_atomic


def train_record(step: int, loss: float = 4.0) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "tokens": 2048 * step}


def filled(path: Path, num_steps: int = 5) -> RunFolder:
    folder = RunFolder(path)
    for step in range(1, num_steps + 1):
        folder.append(train_record(step, loss=1 / step))
    folder.append({"kind": "validation", "step": num_steps, "loss": 2.5})
    folder.close()
    return folder


@given(losses=st.lists(st.floats(), min_size=1, max_size=20))
def test_losses_read_back_bit_for_bit(losses: list[float]) -> None:
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(path)
        for step, loss in enumerate(losses, start=1):
            folder.append(train_record(step, loss))
        folder.truncate(len(losses))  # rewriting must not round either
        read = [record["loss"] for record in folder.train()]
    assert [value.hex() if math.isfinite(value) else "nan" for value in read] == [
        value.hex() if math.isfinite(value) else "nan" for value in losses
    ]


def test_nonfinite_is_null_and_flagged_and_none_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append({"kind": "train", "step": 1, "loss": math.inf, "grad_norm": None, "lr": 0.1})
    line = json.loads(folder.metrics_path.read_text())
    assert line == {"kind": "train", "step": 1, "loss": None, "lr": 0.1, "nonfinite": True}
    assert math.isnan(folder.train()[0]["loss"])


def test_each_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.append(train_record(step))
        assert RunFolder(tmp_path).train()[-1]["step"] == step


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "test", "step": 1}, "train or validation, got 'test'"),
        ({"kind": "train"}, "got None"),
        ({"kind": "train", "step": 1.0}, "got 1.0"),
        ({"kind": "train", "step": -1}, "got -1"),
    ],
)
def test_wrong_records_are_refused_and_write_nothing(tmp_path: Path, record: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunFolder(tmp_path).append(record)
    assert not list(tmp_path.iterdir())


def test_truncate_keeps_the_checkpoint_step_and_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    folder = filled(tmp_path, 5)
    whole = folder.metrics_path.read_bytes()
    folder.truncate(3)
    assert [record["step"] for record in folder.train()] == [1, 2, 3]
    assert folder.validation() == []
    for step in (4, 5):
        folder.append(train_record(step, loss=1 / step))
    folder.append({"kind": "validation", "step": 5, "loss": 2.5})
    assert folder.metrics_path.read_bytes() == whole
    assert not [path.name for path in tmp_path.iterdir() if path.name != "metrics.jsonl"]  # no temporary file stays


def test_truncate_without_metrics_does_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path).truncate(0)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_that_did_not_truncate_is_an_error(tmp_path: Path) -> None:
    folder = filled(tmp_path, 3)
    folder.append(train_record(2))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5: train step 2 comes after step 3"):
        folder.train()


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_kill_at_any_byte_loses_at_most_the_last_line(tmp_path: Path, cut: int) -> None:
    folder = filled(tmp_path, 3)
    content = folder.metrics_path.read_bytes()
    folder.metrics_path.write_bytes(content[:-cut])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = [record["step"] for record in folder.train()]
        validation = folder.validation()
    last_line = len(content.splitlines()[-1]) + 1
    if cut == 1:  # only the newline is gone: the record is whole
        assert (steps, len(validation), len(caught)) == ([1, 2, 3], 1, 0)
    elif cut < last_line:
        assert (steps, validation) == ([1, 2, 3], [])
        assert f"{folder.metrics_path}, line 4: cut off, dropped" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder.append(train_record(9))  # goes on at a line's start
    assert [record["step"] for record in folder.train()] == [*steps, 9]


def test_a_malformed_line_elsewhere_is_an_error_with_its_place(tmp_path: Path) -> None:
    folder = filled(tmp_path, 3)
    lines = folder.metrics_path.read_text().splitlines()
    folder.metrics_path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON"):
        folder.train()
    folder.metrics_path.write_text(lines[0] + "\n[1, 2]\n")
    with pytest.raises(ValueError, match=r"line 2: expected an object with kind"):
        folder.train()


def test_run_json_is_replaced_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.write_run({"name": "a", "status": "running", "tokens_per_s": math.nan})
    assert folder.run() == {"name": "a", "status": "running", "tokens_per_s": None}
    with pytest.raises(TypeError):
        folder.write_run({"name": object()})
    assert folder.run()["name"] == "a"
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_a_failed_write_leaves_the_old_text_and_no_temporary_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "latest.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "latest.json", "\udcff")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest.json", "old")]


def test_a_bad_run_json_says_where(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"run\.json"):
        folder.run()
    folder.run_path.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json: not JSON"):
        folder.run()
