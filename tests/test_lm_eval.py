"""lm-evaluation-harness on a tiny checkpoint and tasks of local files: against its own `hf`, on ranks, simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo_megatron.cli import main as cli_main
from echo_megatron.evaluate import lm_eval as command

REASON = "lm-eval is not installed (make eval-env)"
ROOT = Path(__file__).resolve().parent.parent
COMMON = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
metadata:
  version: 1
"""
TASKS = {
    "tiny_choice": """output_type: multiple_choice
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "tiny_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
""",
    "tiny_until": """output_type: generate_until
doc_to_text: "Q: {{question}}\\nA:"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["?", "\\n"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
""",
}


def make_folder(folder: Path) -> Path:
    """Checkpoint with a tokenizer of characters, documents and tasks."""
    from test_hf import make_checkpoint
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    checkpoint = folder / "hf"
    make_checkpoint(checkpoint, "qwen3", hidden_size=64, max_position_embeddings=64)  # some texts take two windows
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"<unk>": 95, "\n": 96, "<|endoftext|>": 99}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, unk_token="<unk>", pad_token=end)
    fast.save_pretrained(checkpoint)
    documents = [
        {
            "question": f"What is {a}+{b}?",
            "choices": [str(a + b), str(a - b), "many"],
            "answer": (a * b) % 3,
            "text": f"The sum of {a} and {b} is {a + b}. " * (1 + a % 3),
        }
        for a, b in ((1, 2), (3, 4), (5, 9), (12, 7), (8, 8))
    ]
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "tasks").mkdir()
    for name, task in TASKS.items():
        text = f"task: {name}\n{task}{COMMON.format(documents=folder / 'documents.jsonl')}"
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return checkpoint


def run(folder: Path, *runs: str, ranks: int = 0, status: int = 0) -> str:
    """Runs of lm_eval_runs.py; what they printed."""
    python = [sys.executable]
    if ranks:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command_line = [*python, str(ROOT / "tests" / "lm_eval_runs.py"), str(folder), *runs]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def answers(folder: Path, name: str) -> dict[str, Any]:
    """The model's answers of every task, in the order of the documents, and the metrics."""
    (results,) = (folder / name).glob("*/results_*.json")  # the first rank alone writes
    found: dict[str, Any] = {"results": json.loads(results.read_text())}
    for task in TASKS:
        (samples,) = (folder / name).glob(f"*/samples_{task}_*.jsonl")
        found[task] = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    return found


def likelihoods(found: dict[str, Any]) -> list[float]:
    choices = [float(answer[0][0]) for answers in found["tiny_choice"] for answer in answers]
    return choices + [float(answer[0][0]) for answer in found["tiny_rolling"]]


@pytest.mark.slow
@pytest.mark.timeout(2000)  # two processes that import it all, and two more on ranks
def test_answers_are_those_of_hf_and_simulated_ranks_are_the_ranks(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason=REASON)
    pytest.importorskip("accelerate", reason=REASON)
    model = f"pretrained={make_folder(tmp_path)},dtype=float32"
    echo4 = f"{model},tp_comm=echo4"
    run(tmp_path, f"hf_own={model}", f"alone={model}", f"simulated={echo4},tensor_parallel=2,early_bits=8")
    run(tmp_path, f"ranks={model}", ranks=2)
    run(tmp_path, f"ranks4={echo4},min_bytes=0,early_bits=8", ranks=2)
    found = {name: answers(tmp_path, name) for name in ("hf_own", "alone", "simulated", "ranks", "ranks4")}
    for name in ("alone", "ranks"):
        assert likelihoods(found[name]) == pytest.approx(likelihoods(found["hf_own"]), rel=1e-5)
        assert found[name]["tiny_until"] == found["hf_own"]["tiny_until"]
        for task in ("tiny_choice", "tiny_until"):
            assert found[name]["results"]["results"][task] == found["hf_own"]["results"]["results"][task]
    for task in TASKS:
        assert found["ranks4"][task] == found["simulated"][task] != found["hf_own"][task]
    stated = found["ranks4"]["results"]["config"]
    assert (stated["tp_comm"], stated["tensor_parallel"], stated["tensor_parallel_simulated"]) == ("echo4", 2, False)
    assert found["simulated"]["results"]["config"]["tensor_parallel_simulated"] is True
    assert stated["bits_a_value"] == pytest.approx((4.28125 + 8.28125) / 2)


def test_arguments_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason=REASON)
    pytest.importorskip("accelerate", reason=REASON)
    from echo_megatron.evaluate.lm_eval_model import EchoLM, _sampling

    for arguments, message in (
        ({"tp_com": "echo4"}, "unknown argument tp_com; expected pretrained, tp_comm"),
        ({"tp_comm": "echo5"}, "tp_comm: expected one of nccl, echo4"),
        ({"tp_comm": "echo4"}, "tensor_parallel: expected the number of ranks to simulate, got none"),
        ({"tp_comm": "echo4", "tensor_parallel": 0}, "tensor_parallel: expected a positive number of ranks, got 0"),
        ({"dtype": "float16"}, "dtype: expected one of auto, float32, bfloat16, got 'float16'"),
        ({"layers": "te"}, "layers: expected one of"),
        ({"device": "tpu"}, "device: expected cuda or cpu, got 'tpu'"),
    ):
        with pytest.raises(ValueError, match=message):
            EchoLM(str(tmp_path), **arguments)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="tensor_parallel: expected 2, the processes that torchrun started, got 4"):
        EchoLM(str(tmp_path), tensor_parallel=4)
    with pytest.raises(ValueError, match="batch_size: expected a number under torchrun, got 'auto'"):
        EchoLM(str(tmp_path), batch_size="auto")
    with pytest.raises(ValueError, match="got also num_beams, which echo_megatron does not serve"):
        _sampling({"num_beams": 4})
    assert _sampling({"do_sample": False, "temperature": 0.0}).top_k == 1
    assert _sampling({"do_sample": True, "temperature": 0.5, "top_p": 0.9}).top_p == 0.9


def test_without_the_harness_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli_main(["lm-eval", "--tasks", "hellaswag"]) == 2
    assert "pip install 'echo-megatron[eval]'" in capsys.readouterr().err
