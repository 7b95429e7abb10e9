"""TensorBoard event folders of Megatron-LM and NeMo runs, read as loss runs.

Megatron-LM logs at 1-based iterations and writes all its arguments as text. NeMo (Lightning) logs at the 0-based step,
so 1 is added, and records little of what was run. A step that a resumed run logged again counts once, as logged last.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echo_megatron.loss_runs import LossRun, require_increasing

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# source -> (training loss, validation loss, learning rate, batch, first step)
TAGS = {
    "Megatron-LM events": ("lm loss", "lm loss validation", "learning-rate", "batch-size", 1),
    "NeMo events": ("reduced_train_loss", "val_loss", "lr", "global_batch_size", 0),
}


def has_event_files(path: Path) -> bool:
    """Whether `path` or a folder below it holds TensorBoard event files."""
    return bool(_event_folders(path))


def load_event_folder(path: Path) -> LossRun:
    """The run whose event files lie in `path` or in one folder below it.

    Raises:
        FileNotFoundError: there are no event files.
        ValueError: they lie in several folders, or hold neither Megatron-LM's nor NeMo's training loss.
    """
    events = _load(path)
    scalars = events.Tags()["scalars"]
    source = next((source for source, tags in TAGS.items() if tags[0] in scalars), None)
    if source is None:
        expected = " or ".join(f"{tags[0]!r} ({source})" for source, tags in TAGS.items())
        raise ValueError(f"{path}: expected the tag {expected}, got {', '.join(sorted(scalars)) or 'no scalars'}")
    train_tag, validation_tag, lr_tag, batch_tag, first_step = TAGS[source]
    losses = _scalar(events, train_tag, 1 - first_step)
    steps = np.array(sorted(losses), dtype=np.int64)
    require_increasing(path, steps)
    batches = _scalar(events, batch_tag, 0)
    rates = _scalar(events, lr_tag, 0)
    arguments = _arguments(events)
    max_steps = _number(arguments.get("train_iters"))
    return LossRun(
        path=path,
        name=path.name,
        source=source,
        tp_comm=None,
        lr=max(rates.values()) if rates else None,
        max_steps=max_steps,
        finished=None if max_steps is None else int(steps[-1]) >= max_steps,
        facts={
            "data": None,  # a path is not its content
            "batch": _last(batches) or _number(arguments.get("global_batch_size")),
            "sequence": _number(arguments.get("seq_length")),
            "seed": _number(arguments.get("seed")),
            "parameters": None,
            "tensor_parallel": _number(arguments.get("tensor_model_parallel_size")),
            "precision": _precision(arguments),
            "optimizer": _optimizer(arguments),
        },
        steps=steps,
        losses=np.array([losses[step] for step in steps.tolist()]),
        validation=_scalar(events, validation_tag, 1 - first_step),
    )


def load_scalars(path: Path, prefix: str) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of the tags that begin with `prefix`, in the order in which they were first logged.

    Raises:
        FileNotFoundError: there are no event files.
        ValueError: they lie in several folders.
    """
    events = _load(path)
    return {tag: _scalar(events, tag, 0) for tag in events.Tags()["scalars"] if tag.startswith(prefix)}


def _load(path: Path) -> "EventAccumulator":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = _event_folders(path)
    if not folders:
        raise FileNotFoundError(f"{path}: no TensorBoard event files (events.out.tfevents.*)")
    if len(folders) > 1:
        listing = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"{path}: event files of {len(folders)} runs below it; name one of {listing}")
    events = EventAccumulator(str(folders[0]), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _event_folders(path: Path) -> list[Path]:
    return sorted({file.parent for file in path.rglob("events.out.tfevents.*")})


def _scalar(events: "EventAccumulator", tag: str, offset: int) -> dict[int, float]:
    """{step: value}, the value logged last."""
    if tag not in events.Tags()["scalars"]:
        return {}
    logged = sorted(events.Scalars(tag), key=lambda event: event.wall_time)
    return {event.step + offset: float(event.value) for event in logged}


def _last(values: dict[int, float]) -> int | None:
    return int(values[max(values)]) if values else None


def _arguments(events: "EventAccumulator") -> dict[str, str]:
    """Megatron-LM's arguments, which it writes with `add_text`."""
    suffix = "/text_summary"
    return {
        tag.removesuffix(suffix): events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
        if tag.endswith(suffix)
    }


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _optimizer(arguments: dict[str, str]) -> str | None:
    names = ("optimizer", "min_lr", "lr_warmup_iters", "lr_decay_style", "weight_decay", "clip_grad")
    return " ".join(f"{name}={arguments[name]}" for name in names) if set(names) <= set(arguments) else None


def _precision(arguments: dict[str, str]) -> str | None:
    if "bf16" not in arguments or "fp16" not in arguments:
        return None
    return "bf16" if arguments["bf16"] == "True" else "fp16" if arguments["fp16"] == "True" else "fp32"
