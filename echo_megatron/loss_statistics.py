"""Statistics of a comparison: windows, moving averages, arms of several seeds, and whether two arms differ at all."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from echo_megatron.config import IDLE_WITHOUT_GAIN, LOCAL_FEEDBACK, NATIVE_BITS, PAPER_FEEDBACK, EchoConfig
from echo_megatron.loss_runs import FACTS, FloatArray, IntArray, LossRun

# Two-sided 95 % quantiles of Student's t at 1 to 10 degrees of freedom; beyond, `_t95` expands them (to 0.1 %).
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Windows:
    """How many steps are averaged: the paper's numbers, shrunk for short runs.

    Attributes:
        end: last step that all runs have; every statistic ends there.
        curve: moving average of the full curve (paper Fig. 3: 50), at most a 20th of the steps.
        tail: last steps whose mean is the tail loss (paper Table 7: 100), at most a third.
        panel: last steps that the tail panel shows (paper Fig. 3: 1,500), at most a third.
        band: moving average and spread in the tail panel (paper Fig. 3: 100), at most a fifth of the panel.
    """

    end: int
    curve: int
    tail: int
    panel: int
    band: int

    @classmethod
    def of(cls, end: int, panel: int = 1500) -> "Windows":
        """The windows of runs of `end` steps; `panel` is the most that the tail panel shows."""
        panel = max(2, min(panel, end // 3))
        return cls(end, max(1, min(50, end // 20)), max(1, min(100, end // 3)), panel, max(1, min(100, panel // 5)))


@dataclass(frozen=True)
class Statistic:
    """Mean over seeds. `sd` is the sample standard deviation over seeds; NaN with one seed."""

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: list[float]) -> "Statistic":
        with np.errstate(invalid="ignore"):  # infinite losses are legal, their spread is NaN
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
        return cls(float(np.mean(values)), sd, len(values))


@dataclass
class Arm:
    """Runs that differ in their seed alone, in order of seed."""

    label: str
    runs: list[LossRun]

    @property
    def seeds(self) -> list[Any]:
        return [run.facts["seed"] for run in self.runs]


@dataclass(frozen=True)
class Difference:
    """Tail loss of `arm` minus tail loss of `other`.

    Attributes:
        mean: nats a token.
        error: standard error of the mean over seeds; NaN with one seed.
        n: pairs of runs with the same seed, or runs of the smaller arm when unpaired.
        paired: the runs were subtracted seed by seed.
        bound: two-sided 95 % bound of Student's t on the noise of seeds; NaN with one seed.
        exceeds_noise: |mean| is above `bound`; None when one seed cannot tell.
    """

    arm: str
    other: str
    mean: float
    error: float
    n: int
    paired: bool
    bound: float
    exceeds_noise: bool | None

    def sentence(self) -> str:
        """The verdict in words."""
        text = f"{self.arm} − {self.other}: {self.mean:+.4f}"
        if self.exceeds_noise is None:
            reason = (
                "the tail loss is not finite" if not math.isfinite(self.mean) else "one seed, so its noise is not known"
            )
            return f"{text} ({reason})"
        how = f"paired over {self.n} seeds" if self.paired else f"unpaired, at least {self.n} seeds an arm"
        verdict = "larger than the noise of seeds" if self.exceeds_noise else "drowns in the noise of seeds"
        return f"{text} ± {self.error:.4f} (standard error, {how}; 95 % bound {self.bound:.4f}): {verdict}"


def group_arms(runs: list[LossRun]) -> list[Arm]:
    """Runs of equal communication, learning rate and facts but different seeds form an arm; order as given."""
    groups: dict[str, list[LossRun]] = {}
    for run in runs:
        groups.setdefault(repr(_description(run)), []).append(run)
    arms: list[list[LossRun]] = []
    for group in groups.values():
        seeds = [run.facts["seed"] for run in group]
        distinct = None not in seeds and len(set(seeds)) == len(seeds)
        arms += [sorted(group, key=lambda run: run.facts["seed"])] if distinct else [[run] for run in group]
    arms.sort(key=lambda group: min(runs.index(run) for run in group))
    return [Arm(label, group) for label, group in zip(_labels(arms), arms, strict=True)]


def moving_average(steps: IntArray, losses: FloatArray, window: int) -> tuple[FloatArray, FloatArray]:
    """Mean and standard deviation over the steps (s - window, s], fewer at the start; gaps between steps are allowed.

    Returns:
        float64 [n] each; NaN where the window holds a loss that is not finite.
    """
    centre = float(np.mean(losses[np.isfinite(losses)])) if np.isfinite(losses).any() else 0.0
    finite = np.isfinite(losses)
    values = np.where(finite, losses - centre, 0.0)  # centred: the variance is a difference of sums
    first = np.searchsorted(steps, steps - window, side="right")
    last = np.arange(1, len(steps) + 1)

    def window_sum(array: FloatArray) -> FloatArray:
        sums = np.concatenate([[0.0], np.cumsum(array)])
        result: FloatArray = sums[last] - sums[first]
        return result

    count = (last - first).astype(np.float64)
    mean = window_sum(values) / count
    variance = np.maximum(window_sum(values**2) / count - mean**2, 0.0)
    bad = window_sum((~finite).astype(np.float64)) > 0
    return np.where(bad, np.nan, mean + centre), np.where(bad, np.nan, np.sqrt(variance))


def tail_loss(run: LossRun, windows: Windows) -> float:
    """Mean loss of the last `windows.tail` steps up to `windows.end`; not finite when one of them is not."""
    inside = (run.steps > windows.end - windows.tail) & (run.steps <= windows.end)
    return float(np.mean(run.losses[inside])) if inside.any() else math.nan


def loss_at(run: LossRun, step: int) -> float | None:
    """The loss of `step` itself; None when the run has not logged it."""
    found = np.flatnonzero(run.steps == step)
    return float(run.losses[found[0]]) if len(found) else None


def mean_curve(arm: Arm, end: int | None = None) -> tuple[IntArray, FloatArray]:
    """Steps that all runs of the arm have, and losses [number of runs, number of steps]."""
    steps = arm.runs[0].steps
    for run in arm.runs[1:]:
        steps = np.intersect1d(steps, run.steps)
    if end is not None:
        steps = steps[steps <= end]
    return steps, np.stack([run.losses[np.isin(run.steps, steps)] for run in arm.runs])


def paired_runs(arm: Arm, other: Arm) -> list[tuple[LossRun, LossRun]]:
    """Runs of the same seed; one run each is a pair whatever its seed."""
    if len(arm.runs) == len(other.runs) == 1:
        return [(arm.runs[0], other.runs[0])]
    by_seed = {run.facts["seed"]: run for run in other.runs}
    return [(run, by_seed[run.facts["seed"]]) for run in arm.runs if run.facts["seed"] in by_seed]


def difference_curve(arm: Arm, other: Arm) -> tuple[IntArray, FloatArray]:
    """Common steps, and loss of `arm` minus `other` [number of pairs, number of steps]; unpaired arms give one row."""
    pairs = paired_runs(arm, other)
    if not pairs:
        (steps_a, losses_a), (steps_b, losses_b) = mean_curve(arm), mean_curve(other)
        steps = np.intersect1d(steps_a, steps_b)
        mean_a, mean_b = losses_a.mean(axis=0), losses_b.mean(axis=0)
        return steps, (mean_a[np.isin(steps_a, steps)] - mean_b[np.isin(steps_b, steps)])[None]
    steps = pairs[0][0].steps
    for run in (run for pair in pairs for run in pair):
        steps = np.intersect1d(steps, run.steps)
    with np.errstate(invalid="ignore"):
        rows = [a.losses[np.isin(a.steps, steps)] - b.losses[np.isin(b.steps, steps)] for a, b in pairs]
    return steps, np.stack(rows)


def tail_difference(arm: Arm, other: Arm, windows: Windows) -> Difference:
    """Tail loss of `arm` minus `other`: of the common seeds, else Welch's unpaired form.

    With one common seed it is that pair's where an arm has no other run: a mean over other seeds would add their noise.
    """
    tails, other_tails = ([tail_loss(run, windows) for run in side.runs] for side in (arm, other))
    pairs = paired_runs(arm, other)
    rows = [tail_loss(a, windows) - tail_loss(b, windows) for a, b in pairs]
    if len(rows) > 1:
        paired = Statistic.of(rows)
        return _difference(arm, other, paired.mean, paired.sd / math.sqrt(paired.n), paired.n, True, paired.n - 1)
    mean = Statistic.of(tails).mean - Statistic.of(other_tails).mean
    smaller = min(len(tails), len(other_tails))
    if smaller < 2:
        mean = rows[0] if rows else mean
        return Difference(arm.label, other.label, mean, math.nan, smaller, bool(rows), math.nan, None)
    parts = [Statistic.of(side).sd ** 2 / len(side) for side in (tails, other_tails)]
    total = sum(parts)
    degrees = sum(part**2 / (len(side) - 1) for part, side in zip(parts, (tails, other_tails), strict=True))
    freedom = int(total**2 / degrees) if degrees > 0 else smaller - 1
    return _difference(arm, other, mean, math.sqrt(total), smaller, False, max(1, freedom))


def all_differences(arms: list[Arm], baseline: Arm, windows: Windows) -> list[Difference]:
    """Every arm against the baseline first, then the other pairs."""
    others = [arm for arm in arms if arm is not baseline]
    against = [tail_difference(arm, baseline, windows) for arm in others]
    return against + [tail_difference(arm, other, windows) for arm, other in combinations(others, 2)]


def _difference(arm: Arm, other: Arm, mean: float, error: float, n: int, paired: bool, freedom: int) -> Difference:
    bound = _t95(freedom) * error
    exceeds = abs(mean) > bound if math.isfinite(mean) else None
    return Difference(arm.label, other.label, mean, error, n, paired, bound, exceeds)


def _t95(freedom: int) -> float:
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _description(run: LossRun) -> dict[str, Any]:
    """All that makes two runs different arms."""
    facts = {name: run.facts[name] for name in FACTS if name not in ("seed", "steps")}
    # Event files name neither their communication nor their options: each is its own arm.
    alone = {} if run.tp_comm is not None else {"path": str(run.path)}
    return {"lr": run.lr, "max_steps": run.max_steps, **facts, **_options(run), "tp_comm": run.tp_comm, **alone}


def _options(run: LossRun) -> dict[str, Any]:
    """The communication's options that had an effect, as config.yaml has them; nothing is validated.

    Runs of several versions are compared. What was made before an option existed had what is its default today, and
    coefficients that follow the residual today were written out then.
    """
    if not run.settings:
        return {}
    options = {**_DEFAULTS, **run.settings}
    if options["bits"] == NATIVE_BITS:
        return {"bits": NATIVE_BITS}
    if options["eta"] == 0:
        return {name: value for name, value in options.items() if name not in IDLE_WITHOUT_GAIN}
    if options["backward_residual"] in (None, options["residual"]):
        default = PAPER_FEEDBACK if options["residual"] == "consensus" else LOCAL_FEEDBACK
        options.update({name: value for name, value in vars(default).items() if options[name] is None})
    return options


def _labels(arms: list[list[LossRun]]) -> list[str]:
    """The name of the communication; then what tells equal labels apart; then the run's name."""
    shared = shared_options([run for group in arms for run in group])
    labels = [_label(group[0], shared) for group in arms]
    for label in {label for label in labels if labels.count(label) > 1}:
        places = [place for place, found in enumerate(labels) if found == label]
        described = [_description(arms[place][0]) for place in places]
        keys = {key: None for description in described for key in description}
        differing = [key for key in keys if len({str(description.get(key)) for description in described}) > 1]
        for place, description in zip(places, described, strict=True):
            labels[place] = " ".join([label, *(f"{key}={_short(description.get(key))}" for key in differing)])
    return [
        f"{label} ({group[0].name})" if labels.count(label) > 1 else label
        for label, group in zip(labels, arms, strict=True)
    ]


def shared_options(runs: Sequence[LossRun]) -> list[str]:
    """Options, `min_bytes=16384`, that every Echo arm has, where there are several; labels leave them out."""
    names = dict.fromkeys(run.tp_comm for run in runs if run.tp_comm is not None)
    echo = [words for words in map(str.split, names) if words[0] != "nccl"]
    if len(echo) < 2:
        return []
    return [word for word in echo[0] if "=" in word and word not in _WORDS and all(word in words for words in echo)]


_WORDS = {
    "eta=0": "without compensation",
    "eta=0.0": "without compensation",
    "state_dtype=compact": "compact state",
    "state_dtype=bf16": "bf16 state",
    "sequence_parallel": "with SP",  # the legend of a figure is narrow
}
_DEFAULTS: Any = OmegaConf.to_container(OmegaConf.structured(EchoConfig()), enum_to_str=True)
_AVERAGES = {f"{name}={value}" for name, value in vars(PAPER_FEEDBACK).items()}


def _label(run: LossRun, shared: Collection[str] = ()) -> str:
    """What `tp_comm` says, shorter; it does not name the averages where they were the local residual's default."""
    if run.tp_comm is None:
        return run.name
    words = [word for word in run.tp_comm.split() if word not in shared]
    options = _options(run)
    if options.get("residual") == "local" and vars(PAPER_FEEDBACK).items() <= options.items():
        words = [word for word in words if word not in _AVERAGES]
        words.insert(1, "with averages")
    return " ".join(_WORDS.get(word, word) for word in words)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
