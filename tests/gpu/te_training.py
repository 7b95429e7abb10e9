"""Trains the models of te_models.py by Megatron's schedules and compares what came out."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from te_models import Trainer
from torch import Tensor, nn

from echo_megatron import EchoConfig, install
from echo_megatron.process_group import EchoProcessGroup


@dataclass
class Call:
    """What one site's call saw on this rank."""

    collective: str
    site: Any
    x: Tensor
    y: Tensor
    stream: int


@dataclass
class Run:
    """What a training of some steps gave."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    num_calls: list[int] = field(default_factory=list)  # that sum, of the transport, by step
    num_gathers: list[int] = field(default_factory=list)
    echo_modules: list[str] = field(default_factory=list)
    transport: str = ""


def batches(trainer: Trainer, step: int, count: int) -> Iterator[dict[str, Tensor]]:
    setting = trainer.setting
    generator = torch.Generator().manual_seed(step)
    position = torch.arange(setting.sequence).unsqueeze(0).expand(setting.batch, setting.sequence).contiguous()
    for _ in range(count):
        shape = (setting.batch, setting.sequence + 1)
        tokens = torch.randint(0, setting.vocab, shape, generator=generator).to(setting.device)
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "position": position.to(setting.device),
            "labels": tokens[:, 1:].contiguous(),
        }


def forward_step(trainer: Trainer, iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(iterator)
    output = model(batch["tokens"], batch["position"], trainer.mask, labels=batch["labels"])

    def loss(values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        mean = values.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def run_step(trainer: Trainer, step: int, *, microbatches: int = 1, update: bool = True) -> list[float]:
    """One training step; the losses of its microbatches."""
    trainer.chunk.zero_grad_buffer()
    trainer.optimizer.zero_grad()
    losses = trainer.schedule(
        forward_step_func=functools.partial(forward_step, trainer),
        data_iterator=batches(trainer, step, microbatches),
        model=trainer.chunk,
        num_microbatches=microbatches,
        seq_length=trainer.setting.sequence,
        micro_batch_size=trainer.setting.batch,
        forward_only=False,
    )
    trainer.after_backward()
    if update:
        trainer.optimizer.step()
    return [one["loss"].item() for one in losses]


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Every gradient, after a step."""
    named = trainer.chunk.named_parameters()
    return {name: p.main_grad.detach().clone() for name, p in named if p.requires_grad}


def train(
    trainer: Trainer,
    echo: EchoConfig | None = None,
    *,
    steps: int = 3,
    microbatches: int = 2,
    record: bool = False,
    update: bool = True,
    same_batch: bool = False,
    before_step: Callable[[int], None] = lambda step: None,
) -> Run:
    """Trains some steps, with Echo installed where `echo` is given; uninstalls it in the end.

    Args:
        trainer: see `build`.
        echo: options, or None for Megatron's own communication.
        steps: number of steps.
        microbatches: of a step.
        record: keep what every call of the transport saw and gave.
        update: whether the optimizer steps.
        same_batch: every step sees the batches of step 0.
        before_step: called first in every step.
    """
    run = Run()
    installation = install([trainer.chunk], echo) if echo else None
    if installation is not None:
        communicator = installation.communicator
        run.transport = communicator.transport.name
        run.echo_modules = echo_modules(trainer.model)
        _count_calls(communicator.transport, run, record)
    for step in range(steps):
        before_step(step)
        run.num_calls.append(0)
        run.num_gathers.append(0)
        run.losses += run_step(trainer, 0 if same_batch else step, microbatches=microbatches, update=update)
        run.gradients.append(gradients(trainer))
    if trainer.setting.on_gpu:
        torch.cuda.synchronize()
    if installation is not None:
        installation.check()
        installation.uninstall()
    return run


def echo_modules(model: nn.Module) -> list[str]:
    """Names of the modules whose group is Echo's."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "tp_group", None), EchoProcessGroup)
    ]


def _count_calls(transport: Any, run: Run, record: bool) -> None:
    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        setattr(transport, name, _counting(name, getattr(transport, name), run, record))


def _counting(name: str, original: Callable[..., Any], run: Run, record: bool) -> Callable[..., Any]:
    counts = run.num_gathers if name == "all_gather" else run.num_calls

    def counting(x: Tensor, site: Any, *rest: Any, **named: Any) -> Any:
        counts[-1] += 1
        kept = x.detach().clone() if record else None
        result = original(x, site, *rest, **named)
        if kept is not None:
            stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
            output = getattr(result, "output", result)
            run.calls.append(Call(name, site, kept, output.detach().clone(), stream))
        return result

    return counting


# -- comparing


def differences(one: Run, other: Run) -> list[str]:
    """What is not equal to the bit, losses and gradients of every step; at most five names."""
    found = [] if one.losses == other.losses else [f"losses {one.losses} and {other.losses}"]
    if len(one.gradients) != len(other.gradients):
        found.append("number of steps")
    for step, (a, b) in enumerate(zip(one.gradients, other.gradients, strict=False)):
        if a.keys() != b.keys():
            found.append(f"step {step}: names of the gradients")
        found += [f"step {step} {name}" for name in a if name in b and not torch.equal(a[name], b[name])]
    return found[:5]


def distance(one: Run, other: Run) -> float:
    """Largest difference of two losses."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def are_finite(run: Run) -> bool:
    losses = torch.tensor(run.losses).isfinite().all().item()
    return bool(losses and all(g.isfinite().all().item() for step in run.gradients for g in step.values()))


def norm_digests(run: Run) -> dict[str, str]:
    """Digest of the last step's gradient of every norm: these parameters are the same on all ranks."""
    return {n: digest(g) for n, g in run.gradients[-1].items() if "layer_norm" in n or "layernorm" in n or "norm." in n}


def digest(tensor: Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def gather(x: Tensor) -> list[Tensor]:
    """The tensor of every rank."""
    gathered = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, x.contiguous())
    return gathered
