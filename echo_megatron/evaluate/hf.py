"""Hugging Face checkpoints of Qwen3 and Llama-3 into tensor-parallel Megatron-core models, and back."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

from echo_megatron.evaluate.hf_config import HfConfig, read_config
from echo_megatron.evaluate.hf_files import CheckpointReader, CheckpointWriter
from echo_megatron.evaluate.hf_mapping import Parameter, deinterleave, hf_shapes, interleave, num_blocks, parameters
from echo_megatron.evaluate.hf_model import build_gpt, check_model, check_parallel
from echo_megatron.pretrain.schema import Layers

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def load_hf(
    folder_or_name: str | Path,
    *,
    layers: Layers = Layers.local,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 1,
) -> GPTModel:
    """This rank's tensor-parallel part of a checkpoint, on the CPU, as a Megatron-core GPTModel.

    Every rank reads its own slices; nothing is communicated. Model parallelism has to be initialized, on a CPU also
    `install_cpu_shims`. The model's attribute `hf_config` is the configuration that `save_hf` writes back.

    Args:
        folder_or_name: a folder with config.json and safetensors files, or owner/name on the Hugging Face hub.
        layers: local or Transformer Engine's.
        dtype: torch.float32 or torch.bfloat16; None: that of the files.
        vocab_multiple: the vocabulary is padded to a multiple of vocab_multiple * tensor parallel size. Padded rows
            are zero, so their logits are 0: leave them out before a softmax.

    Returns:
        GPTModel; logits [batch, sequence, padded vocabulary / tensor parallel size].

    Raises:
        ValueError: anything in config.json that is not understood; files or tensors missing, unexpected, truncated or
            of another shape or type; sizes that the tensor-parallel size does not divide.
    """
    folder = checkpoint_folder(folder_or_name)
    config = read_config(folder / "config.json")
    tp, rank = check_parallel(config), parallel_state.get_tensor_model_parallel_rank()
    shapes = hf_shapes(config)
    with CheckpointReader(folder) as reader:
        # Some tied checkpoints hold the embedding twice.
        reader.check(shapes, config.dtype if dtype is None else None, [OUTPUT] if config.tie_word_embeddings else [])
        if OUTPUT in reader and OUTPUT not in shapes:
            _check_same(reader, config, folder)
        model = build_gpt(config, dtype or config.dtype, layers, vocab_multiple)
        targets = _named_parameters(model, config)
        for entry, target in targets:
            parts = [_read_part(reader, entry, tensor.name, shapes, target, rank, tp) for tensor in entry.tensors]
            with torch.no_grad():
                target.copy_(interleave(parts, num_blocks(entry, config, tp)))
            if entry.split is not None and not hasattr(target, "tensor_model_parallel"):
                # megatron-core 0.15.3 marks only what it initializes; the norm of gradients goes by the mark.
                set_tensor_model_parallel_attributes(target, True, entry.split, 1)
    model.hf_config = replace(config, dtype=dtype or config.dtype)
    return model


def save_hf(
    model: Any, folder: str | Path, hf_config: HfConfig | None = None, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as a Hugging Face checkpoint; collective, to be called on every rank.

    Global rank 0 gathers one parameter at a time, and writes into a folder beside, which is renamed once it is whole.
    The tensors have the type of the model's parameters. No tokenizer is written.

    Args:
        model: of `load_hf`, or any GPTModel of that architecture; wrapped (DDP, Float16Module) or not.
        folder: must not exist.
        hf_config: None: the model's `hf_config`, which `load_hf` has set.
        max_shard_bytes: a larger checkpoint gets several files and an index.

    Raises:
        ValueError: on every rank, with the first rank's reason: the folder exists or cannot be written, no
            configuration is known, or the model is not that of the configuration.
    """
    folder = Path(folder)
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialized; the tensor-parallel ranks gather the model")
    targets: Sequence[tuple[Parameter, torch.nn.Parameter]] = []
    failure = None
    try:
        gpt = _unwrap(model)
        config = _config(gpt, hf_config)
        check_parallel(config)
        check_model(gpt, config)
        targets = _named_parameters(gpt, config)
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes: expected a positive number, got {max_shard_bytes}")
        if dist.get_rank() == 0 and folder.exists():
            raise ValueError(f"{folder}: exists; name another folder, or delete it")
    except (ValueError, OSError) as error:
        failure = str(error)
    _raise_on_every_rank(failure)
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() == 0:
        failure = _write(targets, config, folder, max_shard_bytes, group)
    elif 0 in ranks:
        for entry, parameter in targets:
            _gather(entry, parameter, group)
    _raise_on_every_rank(failure)


def checkpoint_folder(folder_or_name: str | Path) -> Path:
    """The folder itself, or where the hub's client has put the files of owner/name.

    Raises:
        ValueError: neither; or the hub did not give it.
    """
    folder = Path(folder_or_name)
    if folder.is_dir():
        return folder
    if not isinstance(folder_or_name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", folder_or_name):
        raise ValueError(f"{folder_or_name}: expected a folder, or owner/name on the Hugging Face hub, got neither")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(folder_or_name, allow_patterns=["config.json", "model*.safetensors*"]))
    except Exception as error:  # the client has a dozen, of several packages
        raise ValueError(
            f"{folder_or_name}: is no folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {error}); where there is no network, copy the checkpoint into a folder"
        ) from error


def _named_parameters(model: GPTModel, config: HfConfig) -> list[tuple[Parameter, torch.nn.Parameter]]:
    """Every entry of the mapping with its parameter of the model; exactly those must be there."""
    found = dict(model.named_parameters())
    targets = []
    for entry in parameters(config):
        name = entry.fused_name if entry.fused_name in found else entry.name
        if name not in found:
            raise ValueError(f"the model has no parameter {name}; it is not that of the configuration")
        targets.append((entry, found.pop(name)))
    if found:
        raise ValueError(f"the model's parameters {', '.join(sorted(found)[:4])} have no counterpart in the checkpoint")
    dtype = model.config.params_dtype
    for entry, parameter in targets:
        if parameter.dtype is not dtype:
            raise ValueError(f"{entry.name}: expected {dtype}, the model's params_dtype, got {parameter.dtype}")
    return targets


def _read_part(
    reader: CheckpointReader,
    entry: Parameter,
    name: str,
    shapes: dict[str, tuple[int, ...]],
    target: torch.Tensor,
    rank: int,
    tp: int,
) -> torch.Tensor:
    """This rank's part of a tensor; rows beyond the vocabulary are zero."""
    if entry.split is None:
        return reader.read(name)
    size = shapes[name][entry.split]
    # The embedding's rows are divided after padding; a tensor that shares its parameter with others is never padded.
    count = target.size(entry.split) if len(entry.tensors) == 1 else size // tp
    start, stop = min(rank * count, size), min((rank + 1) * count, size)
    if start == stop:  # padding alone
        return target.new_zeros(target.shape)
    part = reader.read(name, entry.split, start, stop)
    if (num_padded := count - (stop - start)) == 0:
        return part
    return torch.cat([part, part.new_zeros(num_padded, *part.shape[1:])])


def _check_same(reader: CheckpointReader, config: HfConfig, folder: Path, num_rows: int = 4096) -> None:
    """A tied checkpoint's second copy of the embedding has to be one."""
    for start in range(0, config.vocab_size, num_rows):
        stop = min(start + num_rows, config.vocab_size)
        if not torch.equal(reader.read(EMBEDDING, 0, start, stop), reader.read(OUTPUT, 0, start, stop)):
            raise ValueError(
                f"{folder}: {OUTPUT}: expected {EMBEDDING}'s values, for tie_word_embeddings is true, got others; "
                "set tie_word_embeddings to false"
            )


def _unwrap(model: Any) -> Any:
    """The GPTModel in a list of one chunk, DDP and Float16Module."""
    if isinstance(model, list):
        if len(model) != 1:
            raise ValueError(f"model: expected one chunk, got {len(model)}; virtual pipeline chunks are not converted")
        model = model[0]
    while not isinstance(model, GPTModel) and hasattr(model, "module"):
        model = model.module
    if not isinstance(model, GPTModel):
        raise ValueError(f"model: expected a GPTModel, got {type(model).__name__}")
    return model


def _config(model: GPTModel, given: HfConfig | None) -> HfConfig:
    """The configuration to write, with the type of the model's parameters."""
    config = given or getattr(model, "hf_config", None)
    if config is None:
        raise ValueError("hf_config: expected one for a model that load_hf has not made, got none")
    return replace(config, dtype=model.config.params_dtype)


def _raise_on_every_rank(failure: str | None) -> None:
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, text in enumerate(failures):
        if text is not None:
            raise ValueError(text if rank == dist.get_rank() else f"rank {rank}: {text}")


def _write(
    targets: Sequence[tuple[Parameter, torch.nn.Parameter]],
    config: HfConfig,
    folder: Path,
    max_shard_bytes: int,
    group: dist.ProcessGroup,
) -> str | None:
    """Rank 0's part of `save_hf`. It gathers to the end even where it cannot write: the others send."""
    shapes = hf_shapes(config)
    failure = partial = writer = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
        writer = CheckpointWriter(partial, shapes, config.dtype, max_shard_bytes)
    except OSError as error:
        failure = f"{folder}: cannot be written ({error})"
    for entry, parameter in targets:
        whole = _gather(entry, parameter, group)
        if failure or writer is None:
            continue
        try:
            for name, tensor in _hf_tensors(entry, whole, config, shapes):
                writer.add(name, tensor)
        except Exception as error:  # a full disk is an error of the safetensors package
            failure = f"{folder}: cannot be written ({error})"
    if partial is None or writer is None:
        return failure
    try:
        if failure is None:
            writer.finish()
            (partial / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
            partial.chmod(0o755)  # mkdtemp's is for its owner alone
            partial.rename(folder)
    except OSError as error:
        failure = f"{folder}: cannot be written ({error})"
    if failure:
        shutil.rmtree(partial, ignore_errors=True)
    return failure


def _gather(entry: Parameter, parameter: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's part of a parameter, on global rank 0; an empty list on the others."""
    local = parameter.detach()
    size = dist.get_world_size(group)
    if entry.split is None or size == 1:
        return [local]
    # As bytes: not every backend knows every type.
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(size)] if dist.get_rank() == 0 else []
    dist.gather(local.view(torch.uint8), [part.view(torch.uint8) for part in parts] or None, dst=0, group=group)
    return parts


def _hf_tensors(
    entry: Parameter, parts: list[torch.Tensor], config: HfConfig, shapes: dict[str, tuple[int, ...]]
) -> list[tuple[str, torch.Tensor]]:
    """Names and tensors that the ranks' parts of a parameter are made of; padded rows are dropped."""
    if entry.split is None:
        return [(entry.tensors[0].name, parts[0])]
    tp = len(parts)
    names = [tensor.name for tensor in entry.tensors]
    rows = [shapes[name][0] // tp for name in names]
    cut = [deinterleave(part, rows, num_blocks(entry, config, tp)) for part in parts]
    wholes = [torch.cat(pieces, entry.split) for pieces in zip(*cut, strict=True)]
    return [(name, whole[: shapes[name][0]]) for name, whole in zip(names, wholes, strict=True)]
