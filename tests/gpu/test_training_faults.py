"""Two GPUs: a training run over the kernels loses a rank at any moment, ends in time, and goes on as if it had not.

python -m pytest tests/gpu/test_training_faults.py
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pretrain_runs import checkpoint_tensors, losses, make_config, same, write_tokens
from ranks import NUM_GPUS

from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.run_folder import RunFolder

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(600),
]
STEPS, SAVED = 60, 20
TIMEOUT_S = 20  # of the trainer, so of NCCL; a call of the kernels gives up after a quarter of it
SIZES = ("hidden_size=256", "ffn_hidden_size=512", "kv_channels=64", "sequence_length=128")


def make_run(folder: Path, name: str) -> PretrainConfig:
    options = {"device": "cuda", "deterministic": "true", "max_steps": STEPS, "val_interval": 0, "timeout_s": TIMEOUT_S}
    options |= {"save_interval": SAVED, "micro_batch_size": 2, "global_batch_size": 8}
    return make_config(
        folder,
        write_tokens(folder),
        name,
        *(f"model.{size}" for size in SIZES),
        *(f"trainer.{key}={value}" for key, value in options.items()),
        *("tp_comm.bits=4", "tp_comm.transport=p2p", "tp_comm.min_bytes=0", f"tp_comm.timeout_s={TIMEOUT_S / 4}"),
    )


def said(config: PretrainConfig, rank: int) -> Path:
    return Path(config.runs_dir) / f"{config.name}.{rank}.stderr"


@contextmanager
def running(config: PretrainConfig) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The run's processes, without torchrun, which would end the survivors itself; what they say is in `said`."""
    file = Path(config.runs_dir) / f"{config.name}.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, "-m", "echo_megatron.pretrain.worker", "--config", str(file)]
    processes = []
    for rank in range(2):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        environment = {**os.environ, **address, **{name: str(value) for name, value in names.items()}}
        with said(config, rank).open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stderr=log))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(config: PretrainConfig) -> None:
    with running(config) as processes:
        statuses = [process.wait(300) for process in processes]
        assert statuses == [0, 0], [said(config, rank).read_text()[-3000:] for rank in range(2)]


def test_a_rank_that_is_killed_at_any_moment_costs_what_was_not_saved(tmp_path: Path) -> None:
    """Thrice, after steps and milliseconds that are drawn; the survivor ends by itself within the limits."""
    whole = make_run(tmp_path, "whole")
    train(whole)
    config, draw = make_run(tmp_path, "dying"), random.Random(5)
    for dying, reached in ((1, 12), (0, 28), (1, 45)):
        with running(config) as processes:
            while not (config.run_dir / "metrics.jsonl").exists() or len(RunFolder(config.run_dir).train()) < reached:
                assert all(process.poll() is None for process in processes), said(config, dying).read_text()[-3000:]
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.2))
            processes[dying].send_signal(signal.SIGKILL)
            begin = time.monotonic()
            assert processes[1 - dying].wait(4 * TIMEOUT_S) != 0
            text = said(config, 1 - dying).read_text()
            print(f"rank {dying} killed after step {reached}: the other ended after {time.monotonic() - begin:.1f} s")
            print("".join(f"    {line}\n" for line in text.splitlines() if "rank" in line.lower()))
        # NCCL's own time-out names no rank; it is alone only where no call of the kernels was under way or followed.
        assert f"for rank {dying}: expected epoch" in text or "Watchdog caught collective" in text, text
        assert not list((config.run_dir / "checkpoints").glob("*.tmp/metadata.json"))
    train(config)
    assert losses(config) == losses(whole)
    assert same(checkpoint_tensors(config, STEPS), checkpoint_tensors(whole, STEPS))
