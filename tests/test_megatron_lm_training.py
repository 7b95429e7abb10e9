"""Megatron-LM front end: real training through `megatron.training` on gloo, with stock Megatron-LM as the reference.

For another release unpack its wheel of megatron-core and put the folder first:
`PYTHONPATH=/tmp/megatron-core-0.18.2 pytest tests/test_megatron_lm_training.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron.core.tokenizers.text  # imported by the ranks anyway; here it is done once
import megatron.training
import megatron_lm_cpu
import pytest
import torch
from distributed import run_ranks

from echo_megatron.integrations import megatron_lm

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("megatron_lm_script.py")
RECIPE = ROOT / "recipes" / "megatron_lm_pretrain.sh"
MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --qk-layernorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-rope-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion"""
TRAINING = """--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 4 --train-iters 3
    --lr 1e-3 --override-opt-param-scheduler --distributed-backend gloo --num-workers 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 127
    --eval-iters 1 --eval-interval 100 --log-interval 1 --ckpt-format torch"""
ARGUMENTS = [*MODEL.split(), *TRAINING.split()]
NEVER = ["--echo-min-bytes", str(2**40)]  # every site installed, no message quantized
ALWAYS = ["--echo-min-bytes", "0"]


# The three lines of docs/megatron_lm.md.
OWN_SCRIPT = """
from megatron.training.arguments import parse_and_validate_args
from megatron_lm_script import LOSSES, add_own_args, train

from echo_megatron.integrations.megatron_lm import echo_training, with_echo_args

args = parse_and_validate_args(extra_args_provider=with_echo_args(add_own_args))
with echo_training():
    train(args)
"""


def train(
    rank: int, world_size: int, arguments: list[str], plain: bool = False, script: Path = SCRIPT
) -> dict[str, Any]:
    """Runs a script in this process: as it is, or under Echo's command.

    Returns:
        losses of all microbatches this rank saw, trained parameters, what was printed, sites and the report of them.
    """
    megatron_lm_cpu.install()
    training = megatron.training.training
    seen: dict[str, Any] = {"sites": [], "report": None}
    build, install, run_path = training.setup_model_and_optimizer, megatron_lm.install, runpy.run_path

    def building(*rest: Any, **named: Any) -> Any:
        built = build(*rest, **named)
        seen["chunks"] = built[0]
        return built

    def installing(*rest: Any, **named: Any) -> Any:
        installation = install(*rest, **named)
        seen["sites"] = [(site.direction.name, site.chunk) for site in installation.sites]
        seen["report"] = installation.report()
        return installation

    def running(*rest: Any, **named: Any) -> Any:
        namespace = run_path(*rest, **named)
        seen["losses"] = namespace["LOSSES"]
        return namespace

    training.setup_model_and_optimizer, megatron_lm.install, runpy.run_path = building, installing, running
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if plain:
            sys.argv = [str(script), *ARGUMENTS, *arguments]
            runpy.run_path(str(script), run_name="__main__")
        else:
            megatron_lm.main([str(script), *ARGUMENTS, *arguments])
    return {
        "losses": seen["losses"],
        "sites": seen["sites"],
        "report": seen["report"],
        "printed": out.getvalue(),
        "parameters": {
            f"{idx}.{name}": parameter.detach().clone()
            for idx, chunk in enumerate(seen["chunks"])
            for name, parameter in chunk.named_parameters()
        },
    }


def same_bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    return all(
        a["losses"] == b["losses"]
        and a["parameters"].keys() == b["parameters"].keys()
        and all(torch.equal(value, b["parameters"][name]) for name, value in a["parameters"].items())
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """Megatron-LM without Echo: results, and the checkpoint of its last iteration."""
    folder = tmp_path_factory.mktemp("stock")
    return run_ranks(train, 2, ["--save", str(folder), "--save-interval", "3"], True, timeout_s=120), folder


class TestTraining:
    def test_installed_without_quantizing_it_is_megatron_to_the_bit(self, stock: Any) -> None:
        echo = run_ranks(train, 2, ["--tp-comm", "echo4", *NEVER, "--test-model-provider"], timeout_s=120)
        assert len(stock[0][0]["losses"]) == 3 * 2 + 2 * 2
        assert len(echo[0]["sites"]) == 2 * 4
        assert same_bits(stock[0], echo)

    def test_echo4_trains_and_measures(self, stock: Any, tmp_path: Path) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        inspect = ["--echo-inspect-every", "2", "--tensorboard-dir", str(tmp_path), "--save", str(tmp_path / "saved")]
        inspect += ["--save-interval", "3"]
        echo = run_ranks(train, 2, ["--tp-comm", "echo4", *ALWAYS, *inspect], timeout_s=120)
        assert not same_bits(stock[0], echo)
        assert echo[0]["losses"] == echo[1]["losses"], "all ranks see the same sums"
        reference = torch.tensor(stock[0][0]["losses"])
        assert (torch.tensor(echo[0]["losses"]) - reference).abs().max() < 0.02 * reference.max()

        assert echo[0]["printed"].count(echo[0]["report"]) == 1
        assert echo[1]["report"] not in echo[1]["printed"]

        events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("echo/")]
        assert {tag.split("/")[1] for tag in tags} == {"forward", "backward"}
        assert {event.step for tag in tags for event in events.Scalars(tag)} == {2}
        errors = [event.value for tag in tags if tag.endswith("/relative_error") for event in events.Scalars(tag)]
        assert len(errors) == 2 * 4 and all(0 < error < 1 for error in errors)

        # Megatron-LM without Echo goes on from there: what the checkpoint holds needs no Echo.
        back = ["--load", str(tmp_path / "saved"), "--train-iters", "4"]
        plain = run_ranks(train, 2, back, True, timeout_s=120)
        assert "iteration        4/       4" in plain[1]["printed"]

    def test_sequence_parallel(self, stock: Any) -> None:
        parallel = ["--sequence-parallel", "--tp-comm", "echo4", *ALWAYS]
        echo = run_ranks(train, 2, parallel, timeout_s=120)
        assert echo[0]["losses"] == echo[1]["losses"] and echo[0]["report"].count("all-gather") == 4
        reference = torch.tensor(stock[0][0]["losses"])
        assert 0 < (torch.tensor(echo[0]["losses"]) - reference).abs().max() < 0.02 * reference.max()

    @pytest.mark.skipif(
        not hasattr(megatron.training.arguments, "parse_and_validate_args"),
        reason="pretrain parses the arguments itself",
    )
    def test_a_script_of_one_s_own_goes_on_from_the_other_arm_and_says_so(self, stock: Any, tmp_path: Path) -> None:
        results, folder = stock
        script = tmp_path / "own.py"
        script.write_text(OWN_SCRIPT)
        arguments = ["--tp-comm", "echo4", *ALWAYS, "--load", str(folder), "--train-iters", "4"]
        echo = run_ranks(train, 2, arguments, True, script, timeout_s=120)
        assert echo[0]["printed"].count(echo[0]["report"]) == 1
        expected = f"comes from a run with --tp-comm nccl, this one has --tp-comm echo4 {' '.join(ALWAYS)}"
        assert echo[0]["printed"].count(expected) == 1
        assert len(echo[0]["losses"]) == 2 + 2 * 2
        assert abs(echo[0]["losses"][0] - results[0]["losses"][-1]) < 0.5

    @pytest.mark.slow
    def test_from_the_command_line(self, tmp_path: Path) -> None:
        """The recipe, torchrun, the command and the script, in processes of their own."""
        megatron_lm_folder = tmp_path / "Megatron LM"
        megatron_lm_folder.mkdir()
        (megatron_lm_folder / "pretrain_gpt.py").write_text(
            "import runpy\n\nimport megatron_lm_cpu\nimport torch\n\nmegatron_lm_cpu.install()\n"
            "runpy.run_module('megatron_lm_script', run_name='__main__')\n"
            # A process that ends with gloo's threads running is now and then aborted.
            "torch.distributed.destroy_process_group()\n"
        )
        arguments = [word for word in ARGUMENTS if word != "--mock-data"]  # the recipe names data, which nobody reads
        arguments += [*ALWAYS, "--num-query-groups", "2", "--kv-channels", "16", "--train-iters", "1"]
        arguments += ["--lr-warmup-iters", "0", "--vocab-size", "128"]
        environment = {
            "MEGATRON_LM": str(megatron_lm_folder),
            "DATA_PREFIX": str(tmp_path / "no data"),
            "OUT": str(tmp_path / "out"),
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests")]),
            "OMP_NUM_THREADS": "1",
        }
        shown = subprocess.run(
            [str(RECIPE), *arguments], env=os.environ | environment, capture_output=True, text=True, timeout=200
        )
        assert shown.returncode == 0, shown.stdout[-4000:] + shown.stderr[-4000:]
        assert "iteration        1/       1" in shown.stdout
        rows = [line for line in shown.stdout.splitlines() if "mlp.linear_fc1" in line and "backward" in line.split()]
        assert len(rows) == 1, shown.stdout

    @pytest.mark.slow
    def test_virtual_pipeline_chunks(self, tmp_path: Path) -> None:
        pipeline = ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"]
        pipeline += ["--num-layers", "4", "--train-iters", "2"]
        plain = run_ranks(train, 4, pipeline, True, timeout_s=120)
        echo = run_ranks(train, 4, [*pipeline, "--tp-comm", "echo4", *NEVER], timeout_s=120)
        assert same_bits(plain, echo)
        for result in echo:
            assert {chunk for _, chunk in result["sites"]} == {0, 1}

        inspect = ["--echo-inspect-every", "1", "--tensorboard-dir", str(tmp_path)]
        quantized = run_ranks(train, 4, [*pipeline, "--tp-comm", "echo4", *ALWAYS, *inspect], timeout_s=120)
        reference, losses = torch.tensor(plain[3]["losses"]), torch.tensor(quantized[3]["losses"])
        assert not torch.equal(losses, reference)
        assert (losses - reference).abs().max() < 0.02 * reference.max()

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
        events.Reload()
        layers = {tag.split(".")[1] for tag in events.Tags()["scalars"] if tag.startswith("echo/forward/layers.")}
        assert layers == {"0", "1", "2", "3"}, "the sites of every pipeline stage"
