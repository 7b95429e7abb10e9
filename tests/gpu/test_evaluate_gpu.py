"""Two GPUs: a run's checkpoint evaluated at simulated ranks on one GPU and on two real ones, by either kind of layers.

python -m pytest tests/gpu/test_evaluate_gpu.py
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pretrain_runs import make_config, write_tokens
from ranks import NUM_GPUS

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(600),
]

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# The messages are small: without min_bytes=0 they would stay at 16 bits.
SETTINGS = ("16bit", *(f"{name},min_bytes=0" for name in ("echo4", "echo4_paper", "early8")))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    sizes = ("model.hidden_size=256", "model.ffn_hidden_size=512", "model.kv_channels=64", "model.sequence_length=128")
    options = ("trainer.device=cuda", "trainer.max_steps=20", "trainer.val_interval=0", "trainer.save_interval=0")
    config = make_config(folder, write_tokens(folder), "tiny", *sizes, *options)
    file = folder / "config.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    command = [*TORCHRUN, "-m", "echo_megatron.pretrain.worker", "--config", str(file)]
    subprocess.run(command, check=True, timeout=300)
    return config.run_dir


@pytest.mark.parametrize(
    "layers",
    [
        "local",
        pytest.param(
            "transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="transformer_engine is not installed")
        ),
    ],
)
def test_simulated_and_real_ranks_agree(run_folder: Path, tmp_path: Path, layers: str) -> None:
    command = ["-m", "echo_megatron.cli", "evaluate", "--model", str(run_folder), "--layers", layers]
    command += ["--settings", *SETTINGS, "--device", "cuda", "--batch", "2", "--out", str(tmp_path)]
    subprocess.run([sys.executable, *command, "--world-sizes", "2"], check=True, timeout=300)
    subprocess.run([*TORCHRUN, *command], check=True, timeout=300)
    content = json.loads((tmp_path / "perplexity.json").read_text())
    assert content["settings"]["precision"] == "bf16" and layers in content["settings"]["engine"]
    rows = {(row["setting"], row["ranks"]): row for row in content["rows"]}
    assert len(rows) == 2 * len(SETTINGS)
    for setting in SETTINGS:
        # BF16 logits: other matrix shapes round elsewhere.
        assert rows[setting, "real"]["loss"] == pytest.approx(rows[setting, "simulated"]["loss"], rel=5e-3)
    assert rows["echo4,min_bytes=0", "real"]["transport"] == "p2p"
    assert rows["echo4,min_bytes=0", "real"]["loss"] != rows["16bit", "real"]["loss"]
