"""NeMo's model, data, optimizer, trainer, logger and resume from a `NemoPretrain`; and prepared folders as its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.data.mock import MockDataModule, _MockGPTDataset
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
from nemo.collections.llm.gpt.model.base import HAVE_TE, default_layer_spec, local_layer_spec
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule

from echo_megatron.data import PreparedData
from echo_megatron.data.tokenizer import DatasetTokenizer
from echo_megatron.integrations.nemo import EchoTPComm
from echo_megatron.integrations.nemo_schema import Accelerator, NemoPretrain
from echo_megatron.pretrain.dataset import check_data
from echo_megatron.pretrain.schema import Precision, Recompute


class PreparedDataModule(PreTrainingDataModule):
    """The folder that `scripts/prepare_dolma_c4.py` left, as NeMo's data.

    Args:
        folder: with manifest.json; read when the run starts, not when a recipe is composed.
        options: PreTrainingDataModule's: seq_length, micro_batch_size, global_batch_size, num_workers, seed.

    Raises:
        ValueError: no such folder, a file that the manifest does not list, or no validation split.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        prepared = PreparedData.load(folder)
        if prepared.validation is None:
            raise ValueError(
                f"{folder}: has no validation split; prepare it with --validation-every or --validation-tokens"
            )
        validation = [str(prepared.validation)]
        super().__init__(
            paths={"train": [str(prepared.train)], "validation": validation, "test": validation},
            tokenizer=DatasetTokenizer(prepared.vocab_size, prepared.eod, prepared.fingerprint),
            split=None,
            index_mapping_dir=str(Path(folder) / "cache"),
            **options,
        )

    def io_transform_args(self, init_fn: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        arguments = super().io_transform_args(init_fn, *args, **kwargs)
        return {**arguments.pop("options", {}), **arguments}


class MaskedMockDataModule(MockDataModule):
    """NeMo's random tokens, with the attention mask that local layers need.

    NeMo 2.7.3 hands create_attention_mask to its dataset in the place of the seed, so no mask is made.
    """

    def setup(self, stage: str = "") -> None:
        for split, num_samples in (
            ("train", self.num_train_samples),
            ("validation", self.num_val_samples),
            ("test", self.num_test_samples),
        ):
            dataset = _MockGPTDataset(
                self.tokenizer,
                split,
                num_samples,
                self.seq_length,
                seed=self.seed,
                create_attention_mask=self.create_attention_mask,
            )
            setattr(self, f"_{split}_ds", dataset)

    seed = 42


def is_on_gpu(config: NemoPretrain) -> bool:
    """Whether the run trains on GPUs.

    Raises:
        ValueError: GPUs are asked for and there is none, or bf16 on the CPU.
    """
    accelerator = config.trainer.accelerator
    has_gpu = torch.cuda.is_available()
    if accelerator is Accelerator.gpu and not has_gpu:
        raise ValueError("trainer.accelerator=gpu: expected a CUDA device, found none; use trainer.accelerator=cpu")
    on_gpu = has_gpu and accelerator is not Accelerator.cpu
    if not on_gpu and config.trainer.precision is Precision.bf16:
        raise ValueError(
            "trainer.precision=bf16: expected GPUs, the run is on the CPU; use trainer.precision=auto or fp32"
        )
    return on_gpu


def build(config: NemoPretrain) -> dict[str, Any]:
    """The arguments of `llm.pretrain`: model, data, trainer, log, resume, optim."""
    on_gpu = is_on_gpu(config)
    use_bf16 = on_gpu and config.trainer.precision is not Precision.fp32
    data = _data(config)
    return {
        "model": llm.Qwen3Model(_model_config(config, on_gpu), tokenizer=data.tokenizer),
        "data": data,
        "trainer": _trainer(config, on_gpu, use_bf16),
        "log": _log(config),
        "resume": nl.AutoResume(
            resume_if_exists=config.resume.if_exists,
            resume_ignore_no_checkpoint=True,
            resume_from_path=config.resume.path,
        ),
        "optim": _optim(config, use_bf16),
    }


def _model_config(config: NemoPretrain, on_gpu: bool) -> Any:
    model = config.model
    use_te = on_gpu and HAVE_TE
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    # Kernels of Apex and Transformer Engine, which local layers do without.
    local = {
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
    }
    return llm.Qwen3Config(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        seq_length=model.sequence_length,
        rotary_base=model.rotary_base,
        layernorm_epsilon=model.layernorm_epsilon,
        init_method_std=model.init_std,
        share_embeddings_and_output_weights=model.tie_embeddings,
        vocab_size=config.data.padded_vocab_size,
        transformer_layer_spec=default_layer_spec if use_te else local_layer_spec,
        use_cpu_initialization=not on_gpu,
        **({} if use_te else local),
        **(recompute if model.recompute is Recompute.full else {}),
    )


def _data(config: NemoPretrain) -> Any:
    data = config.data
    options = {
        "seq_length": config.model.sequence_length,
        "micro_batch_size": config.trainer.micro_batch_size,
        "global_batch_size": config.trainer.global_batch_size,
        "num_workers": data.num_workers,
        "persistent_workers": data.num_workers > 0,
        "pin_memory": torch.cuda.is_available(),
    }
    tokenizer = DatasetTokenizer(data.vocab_size, data.eod_id, data.name)
    if data.mock:
        module = MaskedMockDataModule(tokenizer=tokenizer, **options)
        module.seed = data.seed
        return module
    check_data(data)
    options["seed"] = data.seed
    if data.folder is not None:
        return PreparedDataModule(data.folder, **options)
    paths: Any = data.train
    if data.validation:
        paths = {"train": data.train, "validation": data.validation, "test": data.validation}
    split = None if data.split is None else f"{data.split},0"
    return PreTrainingDataModule(
        paths=paths, split=split, index_mapping_dir=data.cache_dir, tokenizer=tokenizer, **options
    )


def _optim(config: NemoPretrain, use_bf16: bool) -> MegatronOptimizerModule:
    optim = config.optim
    return MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.clip_grad,
            bf16=use_bf16,
            params_dtype=torch.bfloat16 if use_bf16 else torch.float32,
            use_distributed_optimizer=use_bf16,
        ),
        lr_scheduler=CosineAnnealingScheduler(
            warmup_steps=optim.warmup_steps, constant_steps=0, min_lr=optim.min_lr, max_steps=config.trainer.max_steps
        ),
    )


def _trainer(config: NemoPretrain, on_gpu: bool, use_bf16: bool) -> Any:
    trainer = config.trainer
    dtype = torch.bfloat16 if use_bf16 else torch.float32
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=trainer.tensor_parallel,
        pipeline_model_parallel_size=trainer.pipeline_parallel,
        virtual_pipeline_model_parallel_size=trainer.virtual_pipeline,
        context_parallel_size=trainer.context_parallel,
        sequence_parallel=trainer.sequence_parallel,
        pipeline_dtype=dtype,
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True, grad_reduce_in_fp32=True, use_distributed_optimizer=use_bf16
        ),
        ckpt_async_save=False,
        process_group_backend="nccl" if on_gpu else "gloo",
    )
    precision = nl.MegatronMixedPrecision(
        precision="bf16-mixed",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_enabled=False,
        grad_reduce_in_fp32=True,
    )
    return nl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=strategy,
        plugins=precision if use_bf16 else None,
        max_steps=trainer.max_steps,
        val_check_interval=trainer.val_interval or None,
        check_val_every_n_epoch=None,
        limit_val_batches=trainer.val_batches if trainer.val_interval else 0,
        limit_test_batches=0,
        log_every_n_steps=trainer.log_interval,
        enable_checkpointing=config.log.save_interval > 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        callbacks=[EchoTPComm(config.flag, inspect_every=config.inspect_every, **config.echo_options)],
    )


def _log(config: NemoPretrain) -> Any:
    log = config.log
    checkpoint = None
    if log.save_interval:
        checkpoint = nl.ModelCheckpoint(
            monitor="step",
            mode="max",
            save_top_k=log.keep_checkpoints,
            save_last="link",
            save_optim_on_train_end=True,  # so that a finished run can be made longer
            every_n_train_steps=log.save_interval,
            filename="{step}",
        )
    return nl.NeMoLogger(
        log_dir=log.dir,
        name=log.name,
        use_datetime_version=False,
        ckpt=checkpoint,
        tensorboard=TensorBoardLogger(save_dir="tensorboard", name="") if log.tensorboard else None,
    )
