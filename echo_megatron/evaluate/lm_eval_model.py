"""The model `echo_megatron` of lm-evaluation-harness: a checkpoint on tensor-parallel ranks, or P of them simulated.

A subclass of the harness's own `hf` model, so that texts become tokens, windows and batches as they do there; logits
and generated tokens come from `InferenceModel`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

from echo_megatron.config import EchoConfig
from echo_megatron.data.tokenizer import END_OF_TEXT, find_tokenizer
from echo_megatron.evaluate.checkpoint import find_checkpoint, is_run
from echo_megatron.evaluate.inference import GREEDY, InferenceModel, Sampling, load_model
from echo_megatron.evaluate.ranks import model_parallel, num_ranks, under_torchrun
from echo_megatron.evaluate.settings import Setting, bits_a_value
from echo_megatron.integrations.options import OPTION_NAMES, resolve
from echo_megatron.pretrain.device import resolve_layers
from echo_megatron.pretrain.schema import Layers

logger = logging.getLogger(__name__)

NAME = "echo_megatron"
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Arguments that the harness's `hf` model takes and that mean the same here.
_OF_HARNESS = (
    *("add_bos_token", "prefix_token_id", "softmax_dtype", "logits_cache", "truncation"),
    *("chat_template_args", "enable_thinking", "think_end_token"),
)

_open: list[EchoLM] = []


@register_model(NAME)
class EchoLM(HFLM):
    """A model of lm-evaluation-harness; `echo-megatron lm-eval --model echo_megatron` knows it.

    Under torchrun all processes are one tensor-parallel group: each is given every request, and the first writes the
    results. Alone, the process computes what `tensor_parallel` ranks would.

    Args:
        pretrained: folder or hub name of a Qwen3 or Llama-3 checkpoint, or a run folder of `echo-megatron pretrain`.
        tp_comm: a preset: nccl (16 bits), echo4, echo8, echo4_paper, echo8_paper.
        tensor_parallel: P, simulated; under torchrun the number of its processes, which is also the default.
        layers: local, transformer_engine, or auto: Transformer Engine's where it is installed and there are GPUs.
        tokenizer: folder or hub name, or a tokenizer.json; default the checkpoint's, which a run folder lacks.
        dtype: auto (the checkpoint's), float32 or bfloat16.
        batch_size: sequences at once; auto only without torchrun.
        max_batch_size: of batch_size=auto.
        device: cuda or cpu; cuda, the default, is the CPU where there are fewer GPUs than processes.
        max_length: tokens of a sequence; default the model's.
        options: Echo's options by name (`early_bits=8`), and of the harness's `hf` model add_bos_token,
            prefix_token_id, softmax_dtype, logits_cache, truncation, chat_template_args, enable_thinking,
            think_end_token.

    Raises:
        ValueError: an unknown argument, an illegal value, or a checkpoint that cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str,
        tp_comm: str = "nccl",
        tensor_parallel: int | None = None,
        layers: str = "auto",
        tokenizer: str | None = None,
        dtype: str = "auto",
        batch_size: int | str = 1,
        max_batch_size: int | None = 64,
        device: str | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        of_harness = {name: options.pop(name) for name in _OF_HARNESS if name in options}
        if unknown := sorted(set(options) - set(OPTION_NAMES)):
            raise ValueError(
                f"{NAME}: unknown argument {', '.join(unknown)}; expected pretrained, tp_comm, tensor_parallel, "
                f"layers, tokenizer, dtype, device, max_length, {', '.join((*_OF_HARNESS, *OPTION_NAMES))}"
            )
        config = resolve(tp_comm, options)
        self.simulated_ranks = _simulated_ranks(tensor_parallel, config)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        if layers not in Layers.__members__:
            raise ValueError(f"layers: expected one of {', '.join(Layers.__members__)}, got {layers!r}")
        if under_torchrun() and str(batch_size).startswith("auto"):
            raise ValueError(
                f"batch_size: expected a number under torchrun, got {batch_size!r}: a rank that runs out of memory "
                "alone leaves the others waiting"
            )
        self.setting = Setting(tp_comm, config)
        self._opened = ExitStack()
        try:
            here = self._opened.enter_context(model_parallel(_device(device)))
            of_layers = resolve_layers(Layers[layers], here)
            gpt, vocab_size = load_model(pretrained, here, layers=of_layers, dtype=DTYPES[dtype])
            self.inference = self._opened.enter_context(InferenceModel(gpt, config, vocab_size, self.simulated_ranks))
            super().__init__(
                pretrained=_Logits(self.inference, _config(pretrained)),
                backend="causal",
                tokenizer=_tokenizer(pretrained, tokenizer),
                batch_size=batch_size,
                max_batch_size=max_batch_size,
                max_length=max_length,
                **of_harness,
            )
        except BaseException:
            self._opened.__exit__(*sys.exc_info())  # waits for no other rank
            raise
        self.pretrained = str(pretrained)  # the harness reports it; it was given the model itself
        _open.append(self)

    def close(self, error: BaseException | None = None) -> None:
        """Gives the model back and leaves torch.distributed; no request may follow. Collective.

        Args:
            error: that ended the evaluation; then no other rank is waited for.
        """
        if self in _open:
            _open.remove(self)
        self._opened.__exit__(None if error is None else type(error), error, None)

    def get_model_info(self) -> dict[str, Any]:
        """What the results state of the model."""
        return {
            **super().get_model_info(),
            "tp_comm": self.setting.name,
            "tensor_parallel": self.simulated_ranks or num_ranks(),
            "tensor_parallel_simulated": self.simulated_ranks is not None,
            "bits_a_value": bits_a_value(self.setting.config, self.inference.gpt.config.num_layers),
        }

    def _model_generate(
        self,
        context: Tensor,
        max_length: int,
        stop: list[str],
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """New tokens behind `context` [batch, length], which is padded on the left, as `hf` returns them."""
        sampling = _sampling(options)
        mask = torch.ones_like(context) if attention_mask is None else attention_mask
        prompts = [row[keep.bool()].tolist() for row, keep in zip(context, mask, strict=True)]
        new = self.inference.generate(
            prompts,
            max_length - context.size(1),
            stop_ids=[self.eot_token_id],
            is_done=lambda tokens: _contains(self.tok_decode(tokens), stop),
            sampling=sampling,
            max_batch=len(prompts),
        )
        longest = max(map(len, new))
        padded = [row + [self.tokenizer.pad_token_id] * (longest - len(row)) for row in new]
        return torch.cat([context, torch.tensor(padded, device=context.device)], 1)


def close_models(error: BaseException | None = None) -> None:
    """Closes what the harness has created and does not close."""
    for model in list(_open):
        model.close(error)


class _Logits:
    """What the harness asks of a transformers model."""

    def __init__(self, model: InferenceModel, config: Any) -> None:
        self.inference, self.config = model, config
        self.device, self.dtype = model.device, model.gpt.config.params_dtype
        self.name_or_path = ""

    def __call__(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inference.logits(tokens))

    def num_parameters(self) -> int:
        """Of this process."""
        return sum(parameter.numel() for parameter in self.inference.gpt.parameters())


def _simulated_ranks(tensor_parallel: int | None, config: EchoConfig) -> int | None:
    """P where this process simulates it.

    Raises:
        ValueError: P is not the number of torchrun's processes, or is missing where it decides what comes out.
    """
    if under_torchrun():
        if tensor_parallel not in (None, num_ranks()):
            raise ValueError(
                f"tensor_parallel: expected {num_ranks()}, the processes that torchrun started, got {tensor_parallel}; "
                "leave it out, or start one process to simulate"
            )
        return None
    if tensor_parallel is None and config.quantizes:
        raise ValueError(
            "tensor_parallel: expected the number of ranks to simulate, got none; give tensor_parallel=2, or start "
            "real ranks with torchrun --nproc-per-node 2"
        )
    if tensor_parallel is not None and (not isinstance(tensor_parallel, int) or tensor_parallel < 1):
        raise ValueError(f"tensor_parallel: expected a positive number of ranks, got {tensor_parallel!r}")
    return tensor_parallel


def _device(asked: str | None) -> torch.device:
    """Kind of device; the harness asks for cuda where its user does not say.

    Raises:
        ValueError: another kind than cuda or cpu.
    """
    kind = "cuda" if asked is None else asked.partition(":")[0]
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device: expected cuda or cpu, got {asked!r}")
    if kind == "cuda" and torch.cuda.device_count() < num_ranks():
        logger.warning("%d GPUs for %d processes: evaluating on the CPU", torch.cuda.device_count(), num_ranks())
        kind = "cpu"
    return torch.device(kind)


def _config(pretrained: str) -> Any:
    """What the harness reads the model's greatest length from."""
    if is_run(Path(pretrained)):
        return PretrainedConfig(max_position_embeddings=find_checkpoint(Path(pretrained)).config.model.sequence_length)
    return AutoConfig.from_pretrained(pretrained)


def _tokenizer(pretrained: str, asked: str | None) -> Any:
    """Raises ValueError where there is none."""
    source = pretrained if asked is None else asked
    if asked is None and is_run(Path(pretrained)):
        raise ValueError(
            "tokenizer: expected one with a run folder, which has none; give tokenizer= the folder, hub name or "
            "tokenizer.json that the data was prepared with"
        )
    if Path(source).suffix == ".json":
        return PreTrainedTokenizerFast(
            tokenizer_file=str(find_tokenizer(source)), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
        )
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {source}: not a tokenizer of transformers ({error}); give tokenizer=") from error


def _sampling(options: dict[str, Any]) -> Sampling:
    """Of a task's generation options, less those that `hf` ignores as well when it is greedy.

    Raises:
        ValueError: an option that is not served.
    """
    options = dict(options)
    temperature = options.pop("temperature", 0.0)
    is_sampled = options.pop("do_sample", temperature > 0) and temperature > 0
    top_k, top_p = options.pop("top_k", 0), options.pop("top_p", 0.0)
    if options:
        raise ValueError(
            f"generation: expected do_sample, temperature, top_k, top_p, until and max_gen_toks, got also "
            f"{', '.join(sorted(options))}, which {NAME} does not serve; change the task's generation_kwargs"
        )
    if not is_sampled:
        return GREEDY
    return Sampling(temperature=float(temperature), top_k=top_k or 0, top_p=0.0 if top_p in (None, 1) else float(top_p))


def _contains(text: str, stop: Sequence[str]) -> bool:
    return any(word in text for word in stop)
