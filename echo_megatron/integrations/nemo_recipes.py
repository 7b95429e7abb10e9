"""nemo_run factories: NeMo's Qwen3-0.6B recipe with Echo, and the paper's pretraining experiment in both arms.

nemo_run finds them by the entry point `nemo_run.cli` of this package:

    nemo llm pretrain --factory qwen3_600m_echo
    nemo llm pretrain --factory "qwen3_600m_paper_echo4(data='data/dolma_c4')"
"""
# No `from __future__ import annotations`: nemo_run reads the annotations of the factories' parameters.

from typing import Optional

import nemo_run as run
from nemo.collections.llm.api import pretrain
from nemo.collections.llm.recipes import qwen3_600m

from echo_megatron.integrations.nemo import EchoTPComm
from echo_megatron.integrations.nemo_build import PreparedDataModule
from echo_megatron.integrations.options import resolve


@run.cli.factory(target=pretrain, name="qwen3_600m_echo")
def qwen3_600m_echo(
    dir: Optional[str] = None,  # noqa: UP045
    name: str = "qwen3_600m_echo",
    tp_comm: str = "echo4",
    inspect_every: int = 0,
    tensor_parallelism: int = 4,
    pipeline_parallelism: int = 1,
    num_nodes: int = 1,
    num_gpus_per_node: int = 8,
    max_steps: int = 300_000,
    global_batch_size: int = 32,
    micro_batch_size: int = 2,
    seq_length: int = 4096,
    sequence_parallelism: bool = False,
) -> run.Partial:
    """NeMo's `qwen3_600m` pretraining recipe at a tensor-parallel size above 1, with `EchoTPComm` among its callbacks.

    Single options of Echo are set on the callback, e.g. `trainer.callbacks[1].eta=0.5`.

    Args:
        dir: of logs and checkpoints.
        name: of the run.
        tp_comm: the flag; `nccl` is NeMo's own recipe.
        inspect_every: see `EchoTPComm`.
        tensor_parallelism, pipeline_parallelism, num_nodes, num_gpus_per_node: parallel sizes.
        max_steps: optimizer steps.
        global_batch_size, micro_batch_size: sequences.
        seq_length: tokens of a sequence.
        sequence_parallelism: norms and residuals on a share of the sequence on each tensor-parallel rank.
    """
    resolve(tp_comm)  # a misspelt flag fails here, not on the cluster
    recipe = qwen3_600m.pretrain_recipe(
        dir=dir,
        name=name,
        tensor_parallelism=tensor_parallelism,
        pipeline_parallelism=pipeline_parallelism,
        num_nodes=num_nodes,
        num_gpus_per_node=num_gpus_per_node,
        max_steps=max_steps,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        sequence_parallelism=sequence_parallelism,
    )
    recipe.model.config.seq_length = seq_length
    recipe.trainer.callbacks.append(run.Config(EchoTPComm, tp_comm=tp_comm, inspect_every=inspect_every))
    return recipe


@run.cli.factory(target=pretrain, name="qwen3_600m_paper_16bit")
def qwen3_600m_paper_16bit(
    data: str = "data/dolma_c4",
    dir: Optional[str] = None,  # noqa: UP045
    name: str = "qwen3_600m_paper_16bit",
) -> run.Partial:
    """The paper's 16-bit run (appendix B; Table 7): NeMo's own communication, peak learning rate 3.0e-4."""
    return _paper(data, dir, name, tp_comm="nccl", max_lr=3.0e-4)


@run.cli.factory(target=pretrain, name="qwen3_600m_paper_echo4")
def qwen3_600m_paper_echo4(
    data: str = "data/dolma_c4",
    dir: Optional[str] = None,  # noqa: UP045
    name: str = "qwen3_600m_paper_echo4",
    tp_comm: str = "echo4",
) -> run.Partial:
    """The paper's 4-bit run (appendix B; Table 7): peak learning rate 3.5e-4, which is the paper's choice for 4 bits.

    `tp_comm='echo4_paper'` is the paper's communication; `echo4` is ours.
    """
    return _paper(data, dir, name, tp_comm=tp_comm, max_lr=3.5e-4)


def _paper(data: str, dir: str | None, name: str, tp_comm: str, max_lr: float) -> run.Partial:
    """The paper, appendix B: tensor parallel 4 and nothing else, 384 x 2048 tokens a step, 12,716 steps."""
    resolve(tp_comm)
    recipe = qwen3_600m.pretrain_recipe(
        dir=dir,
        name=name,
        tensor_parallelism=4,
        num_nodes=1,
        num_gpus_per_node=4,
        max_steps=12_716,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        limit_val_batches=4,
        limit_test_batches=0,
        seq_length=2048,
        global_batch_size=384,
        micro_batch_size=24,
        warmup_steps=100,
        constant_steps=0,
        min_lr=3.0e-5,
        max_lr=max_lr,
    )
    recipe.model.config.seq_length = 2048
    recipe.data = run.Config(
        PreparedDataModule, folder=data, seq_length=2048, global_batch_size=384, micro_batch_size=24, num_workers=4
    )
    recipe.trainer.num_sanity_val_steps = 0
    recipe.trainer.callbacks.append(run.Config(EchoTPComm, tp_comm=tp_comm))
    return recipe
