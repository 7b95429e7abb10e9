"""Pretrains Qwen3-0.6B with Megatron-Bridge; `echo.tp_comm` is the only override that tells the two arms apart.

    torchrun --nproc-per-node 2 recipes/bridge_pretrain.py model.tensor_model_parallel_size=2 echo.tp_comm=nccl
    torchrun --nproc-per-node 2 recipes/bridge_pretrain.py model.tensor_model_parallel_size=2 echo.tp_comm=echo4
    torchrun --nproc-per-node 2 recipes/bridge_pretrain.py --tiny echo.tp_comm=echo4 logger.log_interval=1

`--config FILE` merges a YAML file before the overrides. `--tiny` is a run of seconds with a small model on mock data,
also without a GPU. Bridge's recipe asks the Hugging Face hub for the model's config.json; offline, start it where a
folder ./Qwen/Qwen3-0.6B has that file. docs/bridge.md explains the rest.
"""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from megatron.bridge.recipes.qwen import qwen3_600m_pretrain_config
from megatron.bridge.training import initialize
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import OverridesError, process_config_with_overrides
from megatron.core.datasets import utils as dataset_utils

from echo_megatron.integrations.bridge import EchoCallback, EchoConfigContainer, with_echo

TINY = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.kv_channels=16",
    "model.num_query_groups=2",
    "model.vocab_size=256",
    "model.tensor_model_parallel_size=2",
    "model.seq_length=32",
    "dataset.seq_length=32",
    "dataset.num_workers=0",
    "dataset.persistent_workers=false",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.vocab_size=255",
    "train.train_iters=4",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "scheduler.lr_warmup_iters=0",
    "validation.eval_iters=0",
    "checkpoint.save=null",
    "checkpoint.load=null",
)


def configure(arguments: argparse.Namespace) -> EchoConfigContainer:
    """The recipe with the section `echo`, and the command line's changes."""
    config = with_echo(qwen3_600m_pretrain_config())
    overrides = list(TINY) if arguments.tiny else []
    if not torch.cuda.is_available():
        from echo_megatron.integrations import bridge_cpu

        bridge_cpu.install_bridge_cpu_shims()
        config.model.transformer_layer_spec = bridge_cpu.local_layer_spec
        overrides = [*overrides, *bridge_cpu.CPU_OVERRIDES]
    return process_config_with_overrides(config, arguments.config, [*overrides, *arguments.overrides])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of Bridge's configuration")
    parser.add_argument("--config", help="YAML file that is merged before the overrides")
    parser.add_argument("--tiny", action="store_true", help="a small model on mock data, a few steps")
    try:
        config = configure(parser.parse_intermixed_args())
        callback = EchoCallback(config)
    except (ValueError, OverridesError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # megatron-core's wheel brings the dataset helpers compiled and no Makefile; Bridge would run `make` and stop there.
    has_makefile = (Path(dataset_utils.__file__).parent / "Makefile").exists()
    if not has_makefile and find_spec("megatron.core.datasets.helpers_cpp"):
        initialize.compile_helpers = lambda: None
    pretrain(config, forward_step, callbacks=[callback])


if __name__ == "__main__":
    main()
