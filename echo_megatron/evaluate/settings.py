"""The communication settings of an evaluation: names, `KEY=VALUE` overrides, and the sets of the paper's tables."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from echo_megatron.config import PAPER_FEEDBACK, PRESETS, Direction, EchoConfig, plain
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import make_quantizer

NATIVE = "16bit"
# The options that decide what comes out of forward passes; those of a row only where its first is set.
_DECIDING = (
    ("bits", "policy", "group_size", "algorithm", "rescale"),
    ("eta", "residual", "a", "beta1", "beta2", "state_dtype"),
    ("early_bits", "early_fraction"),
    ("last_bits", "last_layers"),
)
# Of real ranks alone; a simulation quantizes every message and has no transport.
_OF_RANKS = ("transport", "min_bytes", "timeout_s")

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    NATIVE: ("nccl", {}),
    **{name: (name, {}) for name in PRESETS if name != "nccl"},
    "uncompensated": ("echo4", {"eta": 0.0}),
    "early8": ("echo4", {"early_bits": 8, "early_fraction": 0.5}),
    "last8": ("echo4", {"last_bits": 8}),
    "averages": ("echo4", {**vars(PAPER_FEEDBACK)}),
}


@dataclass(frozen=True)
class Setting:
    """One communication to evaluate.

    Attributes:
        name: as it was asked for, e.g. `echo4` or `echo4_paper,eta=0.9`.
        config: its options.
    """

    name: str
    config: EchoConfig

    @property
    def key(self) -> str:
        """Tells settings apart: every option that decides what comes out, in effect rather than as it was given."""
        if not self.config.quantizes:
            return NATIVE
        options = {
            **vars(self.config),
            **vars(self.config.feedback_of(Direction.forward)),
            "state_dtype": self.config.state_dtype_of(Direction.forward),
        }
        deciding = [name for names in _DECIDING if options[names[0]] for name in names]
        return json.dumps({name: plain(options[name]) for name in deciding})


def bits_a_value(config: EchoConfig, num_layers: int) -> float:
    """Bits on the wire of a value at forward sites, scales and headers included, mean over the layers."""
    if not config.quantizes:
        return float(config.bits)
    layers = [config.site_bits(Direction.forward, layer, num_layers) for layer in range(num_layers)]
    return sum(make_quantizer(config, bits).num_bytes(TILE_VALUES) for bits in layers) * 8 / (TILE_VALUES * num_layers)


# -- sets --------------------------------------------------------------------------------------------------------------

PRESET_SETTINGS = (NATIVE, "echo4", "echo4_paper", "last8", "early8", "uncompensated", "echo8", "echo8_paper")

# Rows of the paper's Table 8 as overrides of its own form, with its 4-bit perplexity of Llama-3-8B on WikiText, P=4.
TABLE_8: dict[str, tuple[str, float]] = {
    "": ("full method", 6.362),
    "policy=naive": ("naive asymmetric", 7.296),
    "policy=symmetric": ("symmetric", 6.568),
    "policy=symmetric,group_size=256": ("symmetric, g=256", 6.921),
    "policy=naive,group_size=256": ("naive asymmetric, g=256", 9.204),
    "beta1=0.4,beta2=0.4": ("single average (beta 0.4)", 6.506),
    "eta=0.0": ("no compensation", 6.730),
    "eta=0.7": ("eta 0.7", 6.365),
    "eta=0.9": ("eta 0.9", 6.384),
    "a=0.25": ("a 0.25", 6.365),
    "a=0.45": ("a 0.45", 6.367),
    "beta1=0.8,beta2=0.2": ("betas 0.8, 0.2", 6.370),
    "beta1=0.6,beta2=0.4": ("betas 0.6, 0.4", 6.370),
}
# The same questions to our form, and what sets it apart from the paper's.
OURS: dict[str, str] = {
    "": "full method",
    "policy=rotated_asymmetric": "rotated_asymmetric (4.5 bits)",
    "residual=consensus": "consensus residual",
    "algorithm=two_shot,policy=zero_aware,group_size=128": "zero_aware, g=128",
    "eta=0.75,beta1=0.7,beta2=0.3": "the paper's averages (eta 0.75, betas 0.7, 0.3)",
    "eta=0.75,beta1=0.4,beta2=0.4": "single average (eta 0.75, beta 0.4)",
    "eta=0.0": "no compensation",
    "eta=0.75": "eta 0.75",
    "eta=0.9": "eta 0.9",
    "state_dtype=bf16": "bf16 state",
    "last_bits=8": "8 bits in the last layer",
}


def _with(preset: str, overrides: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{preset},{text}" if text else preset for text in overrides)


_OURS_8 = ("", "residual=consensus", "eta=0.0")
SETS: dict[str, tuple[str, ...]] = {
    "presets": PRESET_SETTINGS,
    "ablation4": (NATIVE, *_with("echo4_paper", TABLE_8), *_with("echo4", OURS)),
    "ablation8": (NATIVE, *_with("echo8_paper", TABLE_8), *_with("echo8", _OURS_8)),
}
SETS["ablation"] = tuple(dict.fromkeys((*SETS["ablation4"], *SETS["ablation8"])))


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """The settings of a command line, without repetitions.

    Args:
        texts: each a set (`presets`, `ablation`, `ablation4`, `ablation8`), a name (`16bit`, a preset, `uncompensated`,
            `early8`, …), a name with overrides (`echo4,eta=0.9`), or overrides of echo4 alone (`bits=4,early_bits=8`).

    Raises:
        ValueError: an unknown name or option, or an illegal value; two names for one setting are no error.
    """
    found: dict[str, Setting] = {}
    for text in texts:
        for name in SETS.get(text, (text,)):
            setting = parse_setting(name)
            found.setdefault(setting.key, setting)
    return list(found.values())


def parse_setting(text: str) -> Setting:
    """The setting that `text` names; see `parse_settings`."""
    first, *rest = text.split(",")
    if "=" in first:
        first, rest = "echo4", [first, *rest]
    if first == "nccl":
        first = NATIVE
    if first not in NAMED:
        raise ValueError(
            f"setting {text!r}: expected one of {', '.join((*NAMED, *SETS))}, alone or with overrides as in "
            f"echo4,eta=0.9, got {first!r}"
        )
    preset, options = NAMED[first]
    if rest and preset == "nccl":
        raise ValueError(f"setting {text!r}: expected no overrides with {NATIVE}, which quantizes nothing")
    try:
        return Setting(text, EchoConfig.preset(preset, **{**options, **_overrides(rest)}))
    except ValueError as error:
        raise ValueError(f"setting {text!r}: {error}") from error


def _overrides(texts: Sequence[str]) -> dict[str, Any]:
    hints = get_type_hints(EchoConfig)
    legal = [*itertools.chain(*_DECIDING), *_OF_RANKS]
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in legal:
            raise ValueError(f"expected KEY=VALUE with one of {', '.join(legal)}, got {text!r}")
        options[name] = _value(hints[name], value)
    return options


def _value(hint: Any, text: str) -> Any:
    """`text` as the option's type; what is no number stays text, which EchoConfig refuses with the option's name."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in kinds and text in ("null", "None"):
        return None
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text
