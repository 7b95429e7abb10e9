"""Which settings decide a run's numbers: a run may be resumed only with the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from echo_megatron.config import IDLE_WITHOUT_GAIN, NATIVE_BITS, Direction, EchoConfig
from echo_megatron.pretrain.schema import PretrainConfig

# Where the run is kept, what it prints and when it saves: free to change.
FREE = (
    *("name", "runs_dir", "data.cache_dir", "data.prepare", "data.name", "model.name"),
    *("trainer.val_interval", "trainer.val_batches", "trainer.save_interval", "trainer.keep_checkpoints"),
    *(
        "trainer.log_interval",
        "trainer.inspect_every",
        "trainer.max_nonfinite_steps",
        "trainer.resume",
        "trainer.accept_changes",
        "trainer.timeout_s",
    ),
    # What they resolve to is compared.
    *("trainer.device", "trainer.precision", "model.layers"),
    "tp_comm.timeout_s",
)


def run_settings(config: PretrainConfig, extra: dict[str, Any]) -> dict[str, Any]:
    """Every setting that decides the run's numbers, by its dotted name.

    Options of the compensator that follow from its residual are written out: their defaults may change.

    Args:
        config: the run.
        extra: what the configuration does not say, e.g. the data's fingerprint.
    """
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    flat = dict(_flatten(plain)) | {f"tp_comm.{name}": value for name, value in _feedback(config.tp_comm).items()}
    # The fingerprint says which tokens; where they lie is free.
    for name in (*FREE, "data.folder", "data.train", "data.validation", "data.split"):
        flat.pop(name, None)
    return {**flat, **extra}


def _feedback(config: EchoConfig) -> dict[str, float]:
    """The coefficients of both directions; those that differ are decided by the residuals, which are compared."""
    forward, backward = (vars(config.feedback_of(direction)) for direction in Direction)
    return {name: value for name, value in forward.items() if value == backward[name]}


def check_same(saved: dict[str, Any], current: dict[str, Any], accept: list[str], where: str) -> None:
    """Raise where a setting differs from the run's that is to be resumed.

    A setting that the run does not have is newer than the run, which had what is now its default.

    Raises:
        ValueError: names every setting, with the run's value and the one given.
    """
    defaults = run_settings(PretrainConfig(), {})
    saved = _in_effect({name: defaults[name] for name in current if name in defaults} | saved)
    current = _in_effect(current)
    different = [
        f"  {name}: the run has {saved.get(name)!r}, got {current.get(name)!r}"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
        and not any(name == part or name.startswith(f"{part}.") for part in accept)
    ]
    if different:
        raise ValueError(
            f"{where} was run with other settings, so it cannot be resumed with these:\n" + "\n".join(different) + "\n"
            "Give the run's own values, choose another `name`, or list what may change in trainer.accept_changes."
        )


def _in_effect(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the options of Echo that do nothing: all at 16 bits, the compensator's at gain 0."""
    if settings.get("tp_comm.bits") == NATIVE_BITS:
        idle = {name for name in settings if name.startswith("tp_comm.")} - {"tp_comm.bits"}
    elif settings.get("tp_comm.eta") == 0:
        idle = {f"tp_comm.{name}" for name in IDLE_WITHOUT_GAIN}
    else:
        return settings
    return {name: value for name, value in settings.items() if name not in idle}


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _flatten(entry, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
