"""Loss runs: what a comparison knows of a run, from a run folder or event files, and which runs may be compared."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf

from echo_megatron.run_folder import RunFolder

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# What must agree before losses may be compared, and how a refusal calls it.
FACTS = {
    "data": "data fingerprint",
    "batch": "global batch (sequences)",
    "sequence": "sequence length (tokens)",
    "seed": "seed",
    "parameters": "model parameters",
    "steps": "steps",
    "precision": "precision",
    "tensor_parallel": "tensor-parallel size",
    "optimizer": "optimizer and schedule",
}
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class ComparisonRefused(ValueError):
    """The runs do not differ in their communication alone; the message says in what and which flag lets them pass."""


@dataclass
class LossRun:
    """One run's losses and facts.

    Attributes:
        path: where it was read.
        name: its name.
        source: "run folder", "Megatron-LM events" or "NeMo events".
        tp_comm: name of its tensor-parallel communication; None for event files.
        lr: peak learning rate; None when not recorded.
        max_steps: steps it was to do; None when not recorded.
        finished: None when not recorded.
        facts: the entries of `FACTS` but "steps"; None where not recorded.
        steps: int64 [n], strictly increasing, 1-based.
        losses: float64 [n], nats a token; NaN or infinite where the run's was.
        validation: {step: loss}.
        tp_bytes: float64 [n], bytes that rank 0 sent for tensor parallelism in each step; None when not recorded.
        tokens_per_s: float64 [n]; None when not recorded.
        config: config.yaml, composed.
        record: run.json.
    """

    path: Path
    name: str
    source: str
    tp_comm: str | None
    lr: float | None
    max_steps: int | None
    finished: bool | None
    facts: dict[str, Any]
    steps: IntArray
    losses: FloatArray
    validation: dict[int, float]
    tp_bytes: FloatArray | None = None
    tokens_per_s: FloatArray | None = None
    config: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1])

    @property
    def progress(self) -> str:
        """ "400", or "200 of 400 (stopped)"."""
        if self.finished is False:
            return f"{self.last_step} of {self.max_steps} ({self.record.get('status', 'unfinished')})"
        return str(self.last_step)

    @property
    def nonfinite_steps(self) -> list[int]:
        """Steps whose loss is NaN or infinite."""
        steps: list[int] = self.steps[~np.isfinite(self.losses)].tolist()
        return steps

    def fact(self, name: str) -> Any:
        """The entry `name` of `FACTS`, or None."""
        return self.progress if name == "steps" else self.facts[name]

    @property
    def settings(self) -> dict[str, Any]:
        """The composed `tp_comm` options."""
        return _section(self.config, "tp_comm")


def load_run(path: str | Path) -> LossRun:
    """Read a run folder (it has a run.json) or a folder of TensorBoard event files.

    Raises:
        FileNotFoundError: neither is there.
        ValueError: a file is malformed, or there is no training loss yet.
    """
    from echo_megatron.event_files import has_event_files, load_event_folder

    path = Path(path)
    if (path / "run.json").exists():
        return _load_run_folder(path)
    if path.is_dir() and has_event_files(path):
        return load_event_folder(path)
    raise FileNotFoundError(f"{path}: expected a run folder (run.json, metrics.jsonl) or TensorBoard event files")


def check_comparable(
    runs: list[LossRun],
    allow_different: tuple[str, ...] = (),
    allow_unverified: bool = False,
    paired_seeds: bool = False,
) -> list[str]:
    """Refuse runs that differ in more than their communication.

    Args:
        runs: two or more.
        allow_different: entries of `FACTS` that may differ.
        allow_unverified: let runs pass that do not record an entry.
        paired_seeds: the seeds differ within the arms and agree between them, so they need not be equal.

    Returns:
        Remarks for the report: what differs or was not checked, although it was let pass.

    Raises:
        ComparisonRefused: naming every entry, its values and the flag that lets it pass.
        ValueError: `allow_different` has an entry that is not one of `FACTS`.
    """
    if unknown := sorted(set(allow_different) - set(FACTS)):
        raise ValueError(f"allow-different: expected some of {', '.join(FACTS)}, got {', '.join(unknown)}")
    different: dict[str, str] = {}
    unverified: dict[str, list[str]] = {}  # runs -> what they do not record
    for name in FACTS:
        values = [(run.name, run.fact(name)) for run in runs]
        known = [value for _, value in values if value is not None]
        if len(set(map(str, known))) > 1 and not (name == "seed" and paired_seeds):
            different[name] = _list_values(values)
        if len(known) < len(values):
            unverified.setdefault(", ".join(run for run, value in values if value is None), []).append(FACTS[name])
    refused = [f"different {FACTS[name]}: {text}" for name, text in different.items() if name not in allow_different]
    unchecked = [f"not recorded by {names}: {', '.join(facts)}" for names, facts in unverified.items()]
    if refused or (unchecked and not allow_unverified):
        lines = ["these runs cannot be compared as they are:", *(f"  {line}" for line in refused)]
        if refused:
            names = ",".join(name for name in different if name not in allow_different)
            lines.append(f"  to compare them all the same: --allow-different {names}")
        if unchecked and not allow_unverified:
            lines += [*(f"  {line}" for line in unchecked), "  to compare them unchecked: --allow-unverified"]
        raise ComparisonRefused("\n".join(lines))
    return [f"Allowed to differ: {FACTS[name]}: {text}" for name, text in different.items()] + [
        f"Not checked, {line}" for line in unchecked
    ]


def require_increasing(path: Path, steps: IntArray) -> None:
    """Raise ValueError when there are no steps or one is before 1."""
    if len(steps) == 0:
        raise ValueError(f"{path}: no training loss yet")
    if steps[0] < 1:
        raise ValueError(f"{path}: training steps count from 1, got step {steps[0]}")


def _list_values(values: list[tuple[str, Any]]) -> str:
    """ "a 1, b 2"; of values of several words, such as the optimizer's, the words that all have are left out."""
    words = [str(value).split() for _, value in values if value is not None]
    shared = set.intersection(*map(set, words))
    texts = ("not recorded" if value is None else _without(str(value), shared) for _, value in values)
    return ", ".join(f"{run} {text}" for (run, _), text in zip(values, texts, strict=True))


def _without(text: str, words: set[str]) -> str:
    return " ".join(word for word in text.split() if word not in words) if "=" in text else text


def _load_run_folder(path: Path) -> LossRun:
    folder = RunFolder(path)
    record, train = folder.run(), folder.train()
    steps = np.array([entry["step"] for entry in train], dtype=np.int64)
    require_increasing(path, steps)
    _require_loss(path, train)
    data = record.get("data") or {}
    tokens, seconds, tp_bytes = (_column(train, key) for key in ("tokens", "seconds", "tp_bytes"))
    config = _config(path)
    return LossRun(
        path=path,
        name=record.get("name") or path.name,
        source="run folder",
        tp_comm=record.get("tp_comm"),
        lr=record.get("lr"),
        max_steps=record.get("max_steps"),
        finished=record.get("status") == "finished",
        facts={
            "data": data.get("fingerprint"),
            "batch": record.get("global_batch_size"),
            "sequence": record.get("sequence_length"),
            "seed": record.get("seed"),
            "parameters": record.get("parameters"),
            "precision": PRECISIONS.get(record.get("precision", ""), record.get("precision")),
            "tensor_parallel": record.get("tensor_parallel"),
            "optimizer": _optimizer(config),
        },
        steps=steps,
        losses=np.array([entry["loss"] for entry in train], dtype=np.float64),
        validation={entry["step"]: float(entry["loss"]) for entry in folder.validation()},
        tp_bytes=tp_bytes,
        tokens_per_s=None if tokens is None or seconds is None else np.diff(tokens, prepend=0.0) / seconds,
        config=config,
        record=record,
    )


def _require_loss(path: Path, train: list[dict[str, Any]]) -> None:
    for entry in train:
        if not isinstance(entry.get("loss"), (int, float)):
            raise ValueError(f"{path / 'metrics.jsonl'}: step {entry['step']} has no loss")


def _column(records: list[dict[str, Any]], key: str) -> FloatArray | None:
    if any(key not in record for record in records):
        return None
    return np.array([record[key] for record in records], dtype=np.float64)


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    if not file.exists():
        warnings.warn(f"{path}: no config.yaml, so its options are not known beyond run.json", stacklevel=2)
        return {}
    config = OmegaConf.to_container(OmegaConf.load(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected a mapping, got {type(config).__name__}")
    return {str(key): value for key, value in config.items()}


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _optimizer(config: dict[str, Any]) -> str | None:
    """All of the optimizer's options but the peak learning rate, which may differ as it does in the paper's Table 7."""
    options = _section(config, "optim")
    return " ".join(f"{name}={value}" for name, value in options.items() if name != "lr") or None
