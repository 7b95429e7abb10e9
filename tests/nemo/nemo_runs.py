"""Tiny NeMo runs for tests: a Qwen3 of two layers on gloo, built by the recipe's own functions, in forked processes."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from hydra import compose, initialize_config_dir

from echo_megatron.cli import config_dir
from echo_megatron.integrations import nemo_schema

nemo_schema.register()


def _entry(rank: int, world_size: int, folder: str, port: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    # What torchrun sets.
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    torch.set_num_threads(1)
    os.chdir(folder)
    try:
        from echo_megatron.pretrain.cpu_shims import install_nemo_cpu_shims

        install_nemo_cpu_shims()
        torch.save(fn(rank, world_size, *args), f"{folder}/result{rank}")
    except BaseException:
        Path(f"{folder}/error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def run_nemo(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`fn(rank, world_size, *args)` on every rank, each as torchrun would start it; NeMo makes the process group.

    Raises:
        AssertionError: a rank failed; the message holds every rank's traceback.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(_entry, (world_size, folder, port, fn, args), nprocs=world_size, start_method="fork")
        except Exception as error:
            texts = [f"rank {p.name[5:]}:\n{p.read_text()}" for p in sorted(Path(folder).glob("error*"))]
            raise AssertionError("\n".join(texts) or str(error)) from error
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world_size)]


def tiny(*overrides: str) -> nemo_schema.NemoPretrain:
    """configs/nemo/tiny_cpu.yaml with overrides; no checkpoints, validation or TensorBoard unless asked for."""
    quiet = ["log.save_interval=0", "trainer.val_interval=0", "log.tensorboard=false"]
    with initialize_config_dir(str(config_dir() / "nemo"), version_base="1.3"):
        return nemo_schema.from_composed(compose("tiny_cpu", [*quiet, *overrides]))


def train(config: nemo_schema.NemoPretrain, *callbacks: Any) -> dict[str, Any]:
    """Runs `llm.pretrain`; returns its arguments, the trainer among them."""
    from nemo.collections import llm

    from echo_megatron.integrations.nemo_build import build

    arguments = build(config)
    arguments["trainer"].callbacks.extend(callbacks)
    llm.pretrain(**arguments)
    return arguments
