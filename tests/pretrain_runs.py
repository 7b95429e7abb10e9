"""Small pretraining runs for tests: synthetic tokens, a configuration, and worker processes without torchrun."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from echo_megatron.data.indexed import IndexedWriter
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.run_folder import RunFolder

VOCAB_SIZE = 64
# None of the tests waits for these: a dead process closes its connections. A cold, loaded machine needs minutes.
COLLECTIVE_TIMEOUT_S = 240
RUN_TIMEOUT_S = 420


def import_what_runs_need() -> None:
    """In the tests' own process, once: forked processes then start at once, and none waits for another's imports."""
    import megatron.core.dist_checkpointing.strategies.fully_parallel
    import megatron.core.dist_checkpointing.strategies.state_dict_saver
    import megatron.core.models.gpt  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import echo_megatron.data.gpt
    import echo_megatron.integrations.megatron
    import echo_megatron.pretrain.loop
    import echo_megatron.pretrain.worker  # noqa: F401


def write_tokens(folder: Path) -> dict[str, Any]:
    """Documents that a small model learns in a few steps (a token mostly decides the next); returns `data` options."""
    generator = np.random.default_rng(0)
    successor = generator.permutation(np.arange(1, VOCAB_SIZE))
    for name, documents in (("train", 200), ("validation", 20)):
        with IndexedWriter(folder / name, VOCAB_SIZE) as writer:
            for _ in range(documents):
                ids = [int(generator.integers(1, VOCAB_SIZE))]
                for is_random in generator.random(63) < 0.1:
                    ids.append(int(generator.integers(1, VOCAB_SIZE)) if is_random else int(successor[ids[-1] - 1]))
                writer.add_document(np.array([*ids, 0]))
            writer.finish()
    return {
        "name": "synthetic",
        "train": [str(folder / "train")],
        "validation": [str(folder / "validation")],
        "vocab_size": VOCAB_SIZE,
        "padded_vocab_size": VOCAB_SIZE,
        "eod_id": 0,
    }


def make_config(runs_dir: Path, data: dict[str, Any], name: str, *overrides: str) -> PretrainConfig:
    """Two layers, TP=2, eight steps on the CPU, with dotted overrides such as `trainer.max_steps=4`."""
    base = {
        "name": name,
        "runs_dir": str(runs_dir),
        "data": data,
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 8,
            "sequence_length": 16,
        },
        "optim": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 1},
        "trainer": {
            "max_steps": 8,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "tensor_parallel": 2,
            "device": "cpu",
            "val_interval": 4,
            "val_batches": 1,
            "save_interval": 4,
            "log_interval": 1,
            "timeout_s": COLLECTIVE_TIMEOUT_S,
        },
        "tp_comm": {"bits": 16},
    }
    merged = OmegaConf.merge(OmegaConf.structured(PretrainConfig), base, OmegaConf.from_dotlist(list(overrides)))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, PretrainConfig)
    return config


Work = Callable[[PretrainConfig], int]  # of one process; returns its exit status


def train_one(config: PretrainConfig) -> int:
    """What torchrun's processes of a run do."""
    from echo_megatron.pretrain.worker import run_worker

    return run_worker(config, "test")


def _work(rank: int, port: int, config: PretrainConfig, before: Callable[[], None] | None, work: Work) -> None:
    sys.stdout = sys.stderr = log_path(config).open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    size, local = str(config.trainer.world_size), str(rank)
    os.environ.update(RANK=local, LOCAL_RANK=local, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if before is not None:
        before()
    status = work(config)
    sys.stdout.flush()
    os._exit(status)  # no clean-up of the parent's pytest in its copy


@contextmanager
def running(
    config: PretrainConfig, before: Callable[[], None] | None = None, work: Work = train_one
) -> Iterator[list[BaseProcess]]:
    """The run's worker processes, forked so that they need not import anything; killed where a test leaves them.

    Args:
        config: the run; its folder's parent gets the processes' output as `NAME.log`.
        before: called in every process before it trains.
        work: what every process does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path(config.runs_dir).mkdir(parents=True, exist_ok=True)
    context = mp.get_context("fork")
    ranks = range(config.trainer.world_size)
    processes = [context.Process(target=_work, args=(rank, port, config, before, work)) for rank in ranks]
    for process in processes:
        process.start()
    try:
        yield list(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def train(
    config: PretrainConfig,
    before: Callable[[], None] | None = None,
    timeout_s: float = RUN_TIMEOUT_S,
    work: Work = train_one,
) -> list[int | None]:
    """Run to the end; returns every process's exit status."""
    with running(config, before, work) as processes:
        return wait(processes, timeout_s)


def wait(processes: list[BaseProcess], timeout_s: float = RUN_TIMEOUT_S) -> list[int | None]:
    """Every process's exit status, None for one that did not end in time."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def wait_for_step(config: PretrainConfig, step: int, timeout_s: float = RUN_TIMEOUT_S) -> None:
    """Until `metrics.jsonl` has the step."""
    deadline = time.monotonic() + timeout_s
    path = config.run_dir / "metrics.jsonl"
    while not path.exists() or f'"step": {step},' not in path.read_text():
        if time.monotonic() > deadline:
            raise AssertionError(f"step {step} was not reached:\n{log_path(config).read_text()}")
        time.sleep(0.02)


def log_path(config: PretrainConfig) -> Path:
    """What the run's processes printed."""
    return Path(config.runs_dir) / f"{Path(config.name).name}.log"


def losses(config: PretrainConfig) -> list[str]:
    """`repr` of every loss and gradient norm in order: equal only where the runs are bit for bit."""
    folder = RunFolder(config.run_dir)
    train_records = [f"{record['step']} {record['loss']!r} {record['grad_norm']!r}" for record in folder.train()]
    return train_records + [f"{record['step']} {record['loss']!r}" for record in folder.validation()]


def checkpoint_tensors(config: PretrainConfig, step: int) -> dict[str, Any]:
    """Every tensor and object of a checkpoint by name, without a process group."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    buffer = config.run_dir / "plain.pt"
    dcp_to_torch_save(config.run_dir / "checkpoints" / f"iter_{step:07d}", buffer)
    loaded = torch.load(buffer, weights_only=False)
    return {name: _content(value) for name, value in loaded.items()}


def _content(value: Any) -> Any:
    if isinstance(value, io.BytesIO):
        return torch.load(io.BytesIO(value.getvalue()), weights_only=False)
    return value


def same(left: Any, right: Any) -> bool:
    """Deep equality with tensors and arrays, bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
