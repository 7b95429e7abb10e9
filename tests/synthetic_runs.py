"""Run folders with made-up losses of a realistic shape, for the tests of reports."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from echo_megatron.run_folder import RunFolder

# name -> (offset of the late loss, bytes that a step sends)
ARMS = {
    "nccl": (0.0, 4.0e6),
    "echo4": (0.012, 0.54e6),
    "echo4 eta=0.0": (0.075, 0.54e6),
    "echo4_paper": (0.030, 0.56e6),
}


def losses_of(arm: str, seed: int, num_steps: int, run_noise: float = 0.01) -> np.ndarray:
    """Falls from ln(4096); batch noise is shared by the arms of a seed, as they see the same data."""
    steps = np.arange(1, num_steps + 1)
    shared = np.random.default_rng(seed).normal(0, 0.09, num_steps)
    own = np.random.default_rng([seed, *arm.encode()]).normal(0, run_noise, num_steps)
    drift = np.cumsum(np.random.default_rng([seed, 7, *arm.encode()]).normal(0, 0.0006, num_steps))
    offset = ARMS[arm][0] * (1 - np.exp(-steps / (0.3 * num_steps)))
    base = 3.9 + 4.4 * np.exp(-steps / 35) + 1.3 * np.exp(-steps / (0.45 * num_steps)) + 0.02 * seed
    return base + shared * (0.4 + base / 8) + own + drift + offset


def write_run(folder: Path, arm: str = "nccl", seed: int = 1, num_steps: int = 60, **changes: Any) -> Path:
    """Write a run folder; `changes` replace entries of run.json, `losses` the losses."""
    losses = changes.pop("losses", None)
    losses = losses_of(arm, seed, num_steps) if losses is None else losses
    config = changes.pop("config", {})
    run = {
        "name": folder.name,
        "tp_comm": arm,
        "seed": seed,
        "data": {"name": "sample", "fingerprint": "5f2c", "tokens": 2_310_000},
        "global_batch_size": 16,
        "sequence_length": 128,
        "tensor_parallel": 2,
        "precision": "float32",
        "parameters": 4_200_000,
        "lr": 1e-3,
        "max_steps": num_steps,
        "machine": {"cpu": "2 cores"},
        "versions": {"torch": "2.11.0", "megatron-core": "0.19.2"},
        "commit": "0123abc",
        "command": "echo-megatron pretrain experiment=quickstart",
        "status": "finished",
    } | changes
    output = RunFolder(folder)
    output.write_run(run)
    eta = 0.0 if "eta=0.0" in arm else None
    tp_comm = {"bits": 16 if arm == "nccl" else 4, "policy": "rotated", "eta": eta}
    composed = {
        "model": {"name": "qwen3_tiny"},
        "optim": {"lr": run["lr"], "beta1": 0.9, "min_lr": 1e-4},
        "tp_comm": tp_comm,
    } | config
    (folder / "config.yaml").write_text(yaml.safe_dump(composed))
    for step, loss in enumerate(losses, start=1):
        record = {"kind": "train", "step": step, "loss": float(loss), "lr": 1e-3, "grad_norm": 0.7}
        output.append(record | {"tokens": 2048 * step, "seconds": 0.5, "tp_bytes": int(ARMS[arm][1])})
        if step % 20 == 0:
            output.append({"kind": "validation", "step": step, "loss": float(loss) + 0.05})
    output.close()
    return folder
