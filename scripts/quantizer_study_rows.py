"""The rows of quantizer_study.py, the values of the prototype beside them, and the Markdown made from the results."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import Any

from echo_megatron.config import PAPER_FEEDBACK, Direction, EchoConfig, Policy, Residual, plain
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import choose_algorithm, make_quantizer
from echo_megatron.result_files import markdown_table, provenance_lines

# What the prototype's values were measured with: they are shown beside results of these settings alone.
PROTOTYPE_SETTINGS: dict[str, Any] = {"num_tokens": 4096, "context": 1024, "num_sites": 60}
PROTOTYPE_MODEL = "SmolLM2-135M-Instruct"
PROTOTYPE_16_BIT = 21.17
# Two draws of a row that loses next to nothing may differ by this much; what a row loses adds to it.
NOISE = 0.2
LARGE_LOSS = 2  # perplexity; the prototype's one decimal is then less than 3 % of it
# Two of the standard deviations of a difference between two draws.
NUM_DEVIATIONS = 2 * 2**0.5


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        section: the table that it stands in.
        label: quantizer and what is not default.
        world_size: P.
        config: what is simulated.
        prototype: perplexity of an independent prototype at the same setting, where it has one.
        rank_order: which slice of a linear each rank holds, where it is not its own.
    """

    section: str
    label: str
    world_size: int
    config: EchoConfig
    prototype: float | None = None
    rank_order: tuple[int, ...] | None = None

    @property
    def key(self) -> str:
        """Tells rows apart: P and every option that differs between them, coefficients as they are in effect."""
        feedback = vars(self.config.feedback_of(Direction.forward))
        config = {name: plain({**vars(self.config), **feedback}[name]) for name in _KEYED}
        if not self.config.quantizes:
            return "16 bits"
        order = "" if self.rank_order is None else f" {list(self.rank_order)}"
        return f"P={self.world_size} {json.dumps(config)}{order}"

    @property
    def title(self) -> str:
        """What progress and log call it."""
        if not self.config.quantizes:
            return self.label
        algorithm = choose_algorithm(self.config, self.world_size).name
        return f"P={self.world_size} {self.label} {self.config.bits} bits {algorithm} {_residual(self.config)}"

    @property
    def bits_a_value(self) -> float:
        """Bits on the wire, scales and tile headers included."""
        if not self.config.quantizes:
            return 16.0
        return make_quantizer(self.config, self.config.bits).num_bytes(TILE_VALUES) * 8 / TILE_VALUES

    def entry(self, perplexity: float) -> dict[str, Any]:
        """The row of the results file."""
        quantizes = self.config.quantizes
        return {
            "key": self.key,
            "section": self.section,
            "label": self.label,
            "world_size": self.world_size,
            "algorithm": choose_algorithm(self.config, self.world_size).name if quantizes else None,
            "residual": _residual(self.config),
            "bits_a_value": self.bits_a_value,
            "perplexity": perplexity,
            "prototype": self.prototype,
        }


_KEYED = (
    *("bits", "policy", "group_size", "algorithm", "residual", "rescale"),
    *("eta", "a", "beta1", "beta2", "state_dtype", "early_bits", "early_fraction"),
)


def _residual(config: EchoConfig) -> str | None:
    if not config.quantizes:
        return None
    return config.residual.name if config.compensates else "none"


NATIVE, PAPER, OURS, PRESETS = (
    "16 bits",
    "The paper's wire",
    "Rotated quantizers",
    "The presets with the paper's coefficients",
)
NOISE_SECTION = "Noise: another rank order"
_ORDERS = ((3, 2, 1, 0),)

# No compensation, consensus and local at P = 2, 3, 4, 8; None where the prototype has no value.
_PAPER_WIRE: dict[tuple[Policy, str], tuple[float, float, float, float]] = {
    (Policy.zero_aware, "consensus"): (28.9, 30.1, 28.9, 29.7),
    (Policy.zero_aware, "local"): (26.9, 27.8, 26.4, 27.1),
    (Policy.zero_aware, "none"): (33.6, 36.0, 34.0, 35.0),
    (Policy.naive, "none"): (39.5, 41.1, 40.9, 41.3),
    (Policy.symmetric, "none"): (48.0, 55.5, 55.5, 53.0),
}
# P, algorithm, residual, eta: perplexity of rotated and of rotated_asymmetric.
_ROTATED: dict[tuple[int, str, str, float], tuple[float, float]] = {
    (4, "two_shot", "local", 0.75): (22.1, 21.9),
    (4, "two_shot", "none", 0.0): (24.4, 23.3),
    (4, "two_shot", "consensus", 0.75): (22.3, 22.2),
    (2, "one_shot", "local", 0.75): (21.5, 21.7),
    (2, "two_shot", "local", 0.75): (22.0, 22.0),
    (8, "two_shot", "local", 0.75): (22.3, 22.0),
    (4, "two_shot", "local", 0.9): (22.4, 21.9),
}


_AVERAGES = vars(PAPER_FEEDBACK)


def _mode(mode: str) -> dict[str, Any]:
    """The prototype keeps its state in fp32, and has the paper's coefficients with either residual."""
    if mode == "none":
        return {**_AVERAGES, "eta": 0.0, "state_dtype": "bf16"}
    return {**_AVERAGES, "residual": Residual[mode], "state_dtype": "fp32"}


def rows_for(world_sizes: list[int]) -> list[Row]:
    """The rows of these P, the most telling ones first."""
    rows = [Row(NATIVE, "16 bits", world_sizes[0], EchoConfig.preset("nccl"), PROTOTYPE_16_BIT)]
    by_size = [*_paper_rows(4), *_rotated_rows(4), *_paper_rows(2), *_rotated_rows(2), *_eight_bit_rows()]
    by_size += [*_preset_rows(), *_noise_rows(), *_paper_rows(8), *_rotated_rows(8), *_paper_rows(3)]
    return rows + [row for row in by_size if row.world_size in world_sizes]


def _paper_rows(world_size: int) -> list[Row]:
    column = (2, 3, 4, 8).index(world_size)
    rows = []
    for (policy, mode), values in _PAPER_WIRE.items():
        config = EchoConfig.preset("echo4_paper", policy=policy, **_mode(mode))
        rows.append(Row(PAPER, f"{policy.name} g=128", world_size, config, values[column]))
    if world_size == 2:
        for mode, value in (("none", 28.2), ("local", 24.1)):
            config = EchoConfig.preset("echo4_paper", algorithm="one_shot", **_mode(mode))
            rows.append(Row(PAPER, "zero_aware g=128", world_size, config, value))
    return rows


def _rotated_rows(world_size: int) -> list[Row]:
    rows = []
    for (size, algorithm, mode, eta), values in _ROTATED.items():
        if size != world_size:
            continue
        for policy, value in zip((Policy.rotated, Policy.rotated_asymmetric), values, strict=True):
            options = {**_mode(mode), "policy": policy, "algorithm": algorithm, "eta": eta}
            label = f"{policy.name} g=32" + (f", eta {eta}" if eta == 0.9 else "")
            rows.append(Row(OURS, label, world_size, EchoConfig.preset("echo4", **options), value))
    return rows


def _eight_bit_rows() -> list[Row]:
    rows = []
    for mode, value in (("none", 21.28), ("consensus", 21.29), ("local", 21.22)):
        rows.append(Row(PAPER, "zero_aware g=128", 4, EchoConfig.preset("echo8_paper", **_mode(mode)), value))
    return [*rows, Row(OURS, "rotated g=32", 4, EchoConfig.preset("echo8", **_mode("local")))]


def _preset_rows() -> list[Row]:
    """State in bf16, `auto`; echo4 and echo8 are since then without averages."""
    sizes = {"echo4": (2, 4, 8), "echo4_paper": (4,), "echo8": (4,), "echo8_paper": (4,)}
    rows = []
    for name, all_of in sizes.items():
        config = EchoConfig.preset(name, **_AVERAGES, state_dtype="bf16")
        label = f"{name}, averages" if config.residual is Residual.local else name
        rows += [Row(PRESETS, label, size, config) for size in all_of]
    return rows


def _noise_rows() -> list[Row]:
    """What perplexities differ by although nothing differs but where values are rounded."""
    chosen = {("rotated g=32", "none"), ("rotated g=32", "local")}
    return [
        Row(NOISE_SECTION, f"{row.label}, slices {' '.join(map(str, order))}", 4, row.config, rank_order=order)
        for row in (*_paper_rows(4), *_rotated_rows(4))
        if row.section == PAPER or (row.label, _residual(row.config)) in chosen
        for order in _ORDERS
    ]


NOT_COMPARED = "No earlier values belong to this model, text or length, or no rank orders to judge them by."


# -- results as Markdown -----------------------------------------------------------------------------------------------


def rank_order_draws(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that differ in the rank order alone, the ranks' own order first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["key"].partition("} [")[0].removesuffix("}"), []).append(row)
    several = [group for group in groups.values() if len(group) > 1]
    return [sorted(group, key=lambda row: row["section"] == NOISE_SECTION) for group in several]


def relative_noise(rows: list[dict[str, Any]]) -> float | None:
    """Standard deviation of a row's loss against 16 bits as a fraction of it, pooled; None without other orders."""
    fractions = []
    for group in rank_order_draws(rows):
        losses = [row["perplexity"] - PROTOTYPE_16_BIT for row in group]
        fractions.append((statistics.variance(losses) / statistics.fmean(losses) ** 2, len(group) - 1))
    if not fractions:
        return None
    degrees = sum(count for _, count in fractions)
    return math.sqrt(sum(variance * count for variance, count in fractions) / degrees)


def judge(results: dict[str, Any]) -> None:
    """Note in each row whether it agrees with the prototype: whether two draws of one row may differ so much."""
    settings, rows = results["settings"], results["rows"]
    same = settings["model"].startswith(PROTOTYPE_MODEL)
    same = same and all(settings[name] == value for name, value in PROTOTYPE_SETTINGS.items())
    relative = relative_noise(rows) if same else None
    results["relative_noise"] = relative
    for row in rows:
        row["agrees"] = None
        if relative is not None and row["prototype"] is not None:
            tolerance = NOISE + NUM_DEVIATIONS * relative * (row["prototype"] - PROTOTYPE_16_BIT)
            row["agrees"] = abs(row["perplexity"] - row["prototype"]) <= tolerance


def markdown(results: dict[str, Any]) -> str:
    """Results that have been judged as Markdown, a table a section."""
    settings, rows = results["settings"], results["rows"]
    relative = results["relative_noise"]
    note = f" ({results['text_note']})" if results["text_note"] else ""
    lines = [
        "# Which quantizer, which residual: perplexity, simulated",
        "",
        f"{settings['model']}, first {settings['num_tokens']:,} tokens of {settings['text']}{note} in windows of "
        f"{settings['context']:,}. P ranks are simulated on one device by splitting the inputs of the "
        f"{settings['num_sites']} row-parallel linears; the partial outputs are fp32. The paper's coefficients with "
        "either residual, and a compensator state in fp32 except for the presets, which keep it in bf16. Without the "
        "averages, as echo4 and echo8 are now, the model is measured in ablation_smollm2_135m.",
        "",
        *(_agreement(rows, relative) if relative is not None else [NOT_COMPARED]),
    ]
    for section in (NATIVE, PAPER, OURS, PRESETS):
        if chosen := [row for row in rows if row["section"] == section]:
            chosen.sort(key=lambda row: (row["bits_a_value"], row["label"], row["residual"] or "", row["world_size"]))
            lines += ["", f"## {section}", "", *_table(chosen)]
    if draws := rank_order_draws(rows):
        lines += ["", f"## {NOISE_SECTION}", "", *_noise_table(draws)]
    lines += ["", *provenance_lines(results["made_by"])]
    commits = {row["commit"] for row in rows}
    if commits != {results["made_by"]["commit"]}:
        lines += ["", f"Rows were measured at commits {', '.join(sorted(map(str, commits)))}."]
    return "\n".join(lines) + "\n"


def _agreement(rows: list[dict[str, Any]], relative: float) -> list[str]:
    pairs = [row for row in rows if row["prototype"] is not None]
    misses = [row for row in pairs if not row["agrees"]]
    lines = [
        "Beside our perplexity stands that of an independent prototype with the same model and tokens, rounded to one "
        "decimal (two at 16 and 8 bits). Both are one draw of a chaotic computation: a value that rounds the other way "
        "changes all later layers. With the ranks' slices in another order a row's loss against 16 bits has a standard "
        f"deviation of {relative:.1%} of it (last table). Two draws agree where they differ by at most {NOISE} plus "
        f"two deviations of their difference, {NUM_DEVIATIONS * relative:.0%} of the loss: {len(pairs) - len(misses)} "
        f"of {len(pairs)} rows do. {_closeness(pairs)}"
    ]
    if misses:
        lines += ["", "Not within it: " + "; ".join(_describe(row) for row in misses) + "."]
    return lines


def _closeness(pairs: list[dict[str, Any]]) -> str:
    """How far apart all rows are together: a tighter test than one row's tolerance."""
    close = sum(abs(row["perplexity"] - row["prototype"]) <= NOISE for row in pairs)
    lossy = [row for row in pairs if row["prototype"] - PROTOTYPE_16_BIT > LARGE_LOSS]
    ratios = [(row["perplexity"] - row["prototype"]) / (row["prototype"] - PROTOTYPE_16_BIT) for row in lossy]
    rms = math.sqrt(statistics.fmean(ratio**2 for ratio in ratios)) if ratios else 0.0
    mean = statistics.fmean(ratios) if ratios else 0.0
    return (
        f"{close} differ by at most {NOISE} outright. Over the {len(lossy)} rows that lose more than {LARGE_LOSS}, the "
        f"difference has an rms of {rms:.1%} of the loss and a mean of {mean:+.1%}."
    )


def _describe(row: dict[str, Any]) -> str:
    name = f"{row['label']} {row['residual']} {row['algorithm']} P={row['world_size']}"
    return f"{name} {row['perplexity']:.2f} against {row['prototype']}"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = ["bits a value", "quantizer", "residual", "P", "algorithm", "perplexity"]
    judged = any(row["agrees"] is not None for row in rows)
    cells = []
    for row in rows:
        line = [f"{row['bits_a_value']:.2f}", row["label"], row["residual"] or ""]
        line += [str(row["world_size"]) if row["algorithm"] else ""]
        line += [row["algorithm"] or "", f"{row['perplexity']:.2f}"]
        if judged and row["agrees"] is None:
            line += ["", "", ""]
        elif judged:
            difference = f"{row['perplexity'] - row['prototype']:+.2f}"
            line += [f"{row['prototype']}", difference, "yes" if row["agrees"] else "no"]
        cells.append(line)
    return markdown_table(columns + (["prototype", "difference", "agrees"] if judged else []), cells)


def _noise_table(draws: list[list[dict[str, Any]]]) -> list[str]:
    cells = []
    for group in draws:
        values = [row["perplexity"] for row in group]
        listed = " ".join(f"{value:.2f}" for value in values)
        spread = f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
        cells.append([group[0]["label"], group[0]["residual"], str(group[0]["world_size"]), listed, spread])
    return markdown_table(["quantizer", "residual", "P", "perplexities", "mean ± sd"], cells)
