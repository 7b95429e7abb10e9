"""Tiny runs of the real Megatron-Bridge on gloo; imported where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import queue
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.bridge.recipes.qwen import qwen3_600m_pretrain_config
from megatron.bridge.training import initialize
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
from megatron.core.dist_checkpointing.strategies import filesystem_async

from echo_megatron.integrations import bridge_cpu
from echo_megatron.integrations.bridge import EchoCallback

RECIPE = Path(__file__).parents[1] / "recipes" / "bridge_pretrain.py"
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def write_hf_config(folder: Path) -> None:
    """What Bridge's recipe otherwise asks the hub for; transformers prefers a local folder of the model's name."""
    model = folder / "Qwen" / "Qwen3-0.6B"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(HF_CONFIG))


def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("bridge_pretrain", RECIPE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(*overrides: str) -> Any:
    """The recipe's `--tiny` configuration, with the section `echo`. Makes this process a CPU process."""
    return recipe().configure(Namespace(tiny=True, config=None, overrides=list(overrides)))


def stock(*overrides: str) -> ConfigContainer:
    """The same run of Bridge without Echo's container."""
    bridge_cpu.install_bridge_cpu_shims()
    config = qwen3_600m_pretrain_config()
    config.model.transformer_layer_spec = bridge_cpu.local_layer_spec
    return process_config_with_overrides(config, cli_overrides=[*recipe().TINY, *bridge_cpu.CPU_OVERRIDES, *overrides])


class Recorder(Callback):
    """Losses, gradient norms, what was installed in each step, and the model."""

    def __init__(self, echo: EchoCallback | None = None) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.num_sites: list[int] = []
        self.eval_losses: list[float] = []
        self.chunks: list[Any] = []
        self._echo = echo

    def on_train_step_end(self, context: Any) -> None:
        self.chunks = context.model
        self.losses += [float(value) for value in context.loss_dict.values()]  # none before the last pipeline stage
        self.grad_norms.append(context.grad_norm)
        self._count()

    def on_eval_end(self, context: Any) -> None:
        self.eval_losses += [float(value) for value in context.total_loss_dict.values()]
        self._count()

    def _count(self) -> None:
        installation = self._echo.installation if self._echo else None
        self.num_sites.append(len(installation.sites) if installation else 0)


def run(config: ConfigContainer) -> tuple[Recorder, str]:
    """Trains; returns what happened in each step and what this rank printed."""
    initialize.compile_helpers = lambda: None  # as the recipe does
    # Otherwise Megatron starts a server process for it, which Bridge shuts down after a failure.
    filesystem_async._results_queue = queue.Queue()
    filesystem_async._results_queue._manager = SimpleNamespace(shutdown=lambda: None)
    echo = EchoCallback(config) if hasattr(config, "echo") else None
    recorder = Recorder(echo)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        pretrain(config, forward_step, callbacks=[recorder, *([echo] if echo else [])])
    return recorder, printed.getvalue()


def parameters(recorder: Recorder) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for chunk in recorder.chunks for name, p in chunk.named_parameters()}
