"""Pretrains a Qwen3 with NeMo from configs/nemo/*.yaml; 4-bit and 16-bit runs differ in the line `tp_comm` alone.

    torchrun --nproc-per-node 8 recipes/nemo_pretrain.py tp_comm=echo4 data.mock=true
    torchrun --nproc-per-node 2 recipes/nemo_pretrain.py --config-name tiny_cpu tp_comm=nccl

Keys, types and defaults: echo_megatron/integrations/nemo_schema.py. Everything is explained in docs/nemo.md.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    from echo_megatron.pretrain.cpu_shims import install_nemo_cpu_shims

    install_nemo_cpu_shims()

from nemo.collections import llm
from nemo.core.config import hydra_runner
from omegaconf import DictConfig, OmegaConf

from echo_megatron.integrations import nemo_schema

nemo_schema.register()


@hydra_runner(config_path="../configs/nemo", config_name="pretrain")
def main(composed: DictConfig) -> None:
    try:
        config = nemo_schema.from_composed(composed)
        from echo_megatron.integrations.nemo_build import build

        arguments = build(config)
    except ValueError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if os.environ.get("RANK", "0") == "0":
        print(OmegaConf.to_yaml(composed))
    llm.pretrain(**arguments)


if __name__ == "__main__":
    main()
