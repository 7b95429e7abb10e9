"""The blocks of results in README.md and in pages of docs/: what each shows of a file in docs/results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from echo_megatron.bench import shares, targets, ttft_tables
from echo_megatron.bench.rows import LARGE_SIZES, MIB, SMALL_SIZES
from echo_megatron.bench.step_tables import load_table
from echo_megatron.bench.tables import MATMULS, overview_table, provenance
from echo_megatron.evaluate import error_tables
from echo_megatron.evaluate.tables import summary
from echo_megatron.loss_table import header, row
from echo_megatron.result_files import markdown_table, provenance_lines

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Block:
    """One kind of results.

    Attributes:
        lines: Markdown of the results; the second argument is their folder, relative to the README.
        made_with: what writes the JSON, shown where it is missing.
        source: name of the JSON where it is not the block's.
    """

    lines: Callable[[Results, str], list[str]]
    made_with: str
    source: str | None = None


def quickstart(results: Results, folder: str) -> list[str]:
    """Losses, bytes and speed of the arms; differences with their noise; remarks."""
    lines = _loss_lines(results, {"max lr", "steps", "step 1000"})
    notes = [*_against_baseline(results), *results["remarks"]]
    stem = f"{folder}/quickstart"
    return [
        *lines,
        *(f"- {note}" for note in notes),
        "",
        f"[All differences]({stem}.md). {_runs_provenance(results['runs'], stem)}",
    ]


def training_study(results: Results, folder: str, name: str = "training_study") -> list[str]:
    """Losses of the arms over seeds, and what each differs from 16 bits by."""
    left_out = {"max lr", "steps", "step 1000", "TP bytes sent per rank", "tokens/s"}
    stem = f"{folder}/{name}"
    return [
        *_loss_lines(results, left_out),
        *(f"- {sentence}" for sentence in _against_baseline(results)),
        "",
        f"[All differences]({stem}.md). {_runs_provenance(results['runs'], stem)}",
    ]


def train_qwen3_0p6b(results: Results, folder: str) -> list[str]:
    """Losses of the arms, and the paper's beside them; speeds are the step bench's to tell."""
    left_out = {"seeds", "max lr", "TP bytes sent per rank", "tokens/s"}
    paper = [
        [f"{row['arm']}, the paper", f"{row['lr']:.1e}", f"{row['step1000']:.3f}", f"{row['tail100']:.3f}"]
        for row in results["paper"]["rows"]
    ]
    stem = f"{folder}/train_qwen3_0p6b_h200x2"
    return [
        *_loss_lines(results, left_out),
        *(f"- {note}" for note in [*_against_baseline(results), *results["remarks"]]),
        "",
        f"What the paper reports of its own data and size ({results['paper']['source']}):",
        "",
        *markdown_table(["arm", "max lr", "step 1000", "tail-100"], paper),
        "",
        f"[Every run and difference]({stem}.md). {_runs_provenance(results['runs'], stem)}",
    ]


def step_h200x2(results: Results, folder: str) -> list[str]:
    """Step and time to first token by load, with the bound and the paper's beside them."""
    loads = [f"{link['load']} %: {link['slowdown']:.2f}" for link in results["links"]]
    return [
        f"P = {results['world_size']}, random weights. The bound is a run that leaves the sites' sums out. Slowdown of "
        f"a 16-bit all-reduce of {results['link_bytes'] // MIB:,} MiB by the copies beside it: {', '.join(loads)}.",
        "",
        *load_table(results["rows"], "step"),
        "",
        *load_table(results["rows"], "forward"),
        "",
        f"In these rows echo4 is `{results['echo']['echo4']}`.",
        "",
        f"[All settings, calls in place, memory]({folder}/step_h200x2.md). {provenance_lines(results)[0]}",
    ]


def _against_baseline(results: Results) -> list[str]:
    return [entry["sentence"] for entry in results["differences"] if entry["other"] == results["baseline"]]


def _loss_lines(results: Results, left_out: set[str]) -> list[str]:
    columns = header(dict(results))
    kept = [idx for idx, column in enumerate(columns) if column not in left_out]
    rows = [[cells[idx] for idx in kept] for cells in (row(arm) for arm in results["arms"])]
    table = markdown_table([columns[idx] for idx in kept], rows)
    return [f"{results['title']}. {results['caption']}", "", *table, ""]


def error_feedback_simulation(results: Results, folder: str) -> list[str]:
    """Accumulated error for the paper's wire and ours, at the ends of the range of rho."""
    arms = {
        "zero_aware none": "paper's quantizer, no compensation",
        "zero_aware consensus": "paper's quantizer, consensus residual (the paper)",
        "rotated none": "rotated, no compensation",
        "rotated averages": "rotated, local residual with averages",
        "rotated local": "rotated, local residual whole (`echo4`)",
    }
    rhos = sorted({entry["rho"] for entry in results["rows"]})
    values = {(entry["world_size"], entry["rho"], entry["arm"]): entry for entry in results["rows"]}
    keys = dict.fromkeys((size, rho) for size, rho, _ in values if rho in (rhos[0], rhos[-1]))
    rows = []
    for size, rho in keys:
        of_arms = [values[size, rho, arm] for arm in arms]
        means = [*(entry["mean"] for entry in of_arms), of_arms[-1]["mean_of_one_site"]]
        rows.append([str(size), str(rho), *(f"{mean:.2f}" for mean in means)])
    setup = results["setup"]
    return [
        f"rms of the accumulated error after {setup['num_sites']} sites, synthetic partial outputs "
        f"({setup['distribution']}), 4 bits, mean of {setup['seeds']} seeds. rho is the correlation of one site's "
        "partial outputs with the next site's.",
        "",
        *markdown_table(["P", "rho", *arms.values(), "of `echo4`, after one site"], rows),
        "",
        f"[All values]({folder}/error_feedback_simulation.md). {provenance_lines(results['made_by'])[0]}",
    ]


def quantizer_study(results: Results, folder: str) -> list[str]:
    """Perplexity at 16 bits, of the presets, and at four ranks without compensation."""
    settings = results["settings"]
    shown = [entry for entry in results["rows"] if _is_shown(entry)]
    shown.sort(key=lambda entry: (-entry["bits_a_value"], entry["label"], entry["world_size"], entry["perplexity"]))
    rows = [
        [
            entry["label"],
            "" if entry["algorithm"] is None else str(entry["world_size"]),
            f"{entry['bits_a_value']:.2f}",
            entry["algorithm"] or "",
            {None: "", "none": "no compensation"}.get(entry["residual"], entry["residual"]),
            f"{entry['perplexity']:.2f}",
        ]
        for entry in shown
    ]
    return [
        f"Perplexity of {settings['model']}, {settings['num_tokens']:,} tokens of {settings['text']} in windows of "
        f"{settings['context']:,}, P ranks simulated on one device, forward sites only. " + _noise(results["rows"]),
        "",
        *markdown_table(["quantizer or preset", "P", "bits a value", "algorithm", "residual", "perplexity"], rows),
        "",
        f"[All values]({folder}/quantizer_study.md). {provenance_lines(results['made_by'])[0]}",
    ]


def collective_h200x2(results: Results, folder: str) -> list[str]:
    """Time of one all-reduce through torch.distributed: the group's own first, then the presets."""
    timed = [key.removesuffix("_ms") for key in results["rows"][0] if key.endswith("_ms")]
    rows = [
        [f"{entry['bytes'] / MIB:g}", *(f"{entry[f'{name}_ms']:.3f}" for name in timed)] for entry in results["rows"]
    ]
    columns = ["MiB a rank (bf16)", *(f"{name}, ms" for name in timed)]
    return [
        f"One call at P = {results['world_size']}, {results['transport']} transport.",
        "",
        *markdown_table(columns, rows),
        "",
        f"[JSON]({folder}/collective_h200x2.json). {provenance_lines(results)[0]}",
    ]


# Rows of the README, fastest baseline first; every row is in the page beside the JSON.
LARGE_ROWS = (
    "nccl16",
    "symm_mem_two_shot",
    "two_collective_8",
    "two_collective_4",
    "flashinfer_fp8",
    "echo8_local",
    "echo4",
    "echo4_unfused",
    "echo4_local",
    "nccl16_critical",
    "echo4_local_critical",
    "echo4_consensus_critical",
    "echo4_paper_critical",
)
SMALL_ROWS = ("nccl16", "symm_mem_one_shot", "symm_mem_two_shot", "auto")


def all_reduce_h200x2(results: Results, folder: str) -> list[str]:
    """Time of one all-reduce: large messages, small ones, and what the wire and HBM carry."""
    carried, stem = results["ceilings"] or {}, f"{folder}/all_reduce_h200x2"
    bounds = [
        f"{carried[key]:.0f} GB/s {words}"
        for key, words in (("wire_gb_per_s", "to a peer, each way"), ("hbm_gb_per_s", "in HBM, read plus written"))
        if key in carried
    ]
    return [
        f"One call at P = {results['world_size']}: ms, and in brackets how many times faster than NCCL in that run. "
        "The rows `echo4` and `echo8` are without compensation, `_local` with it: the preset `echo4` is `echo4_local "
        "(rotated, compact)`. After a row's name stand the quantizer and how the compensator's state is stored. "
        f"`_critical` is the time added between two matmuls, {MATMULS}'s. Echo's rows are held to the reference, bit "
        "for bit, before they are timed. "
        f"Measured in the same run: {', '.join(bounds) or 'no ceilings'}.",
        "",
        *overview_table(results["rows"], LARGE_ROWS, LARGE_SIZES),
        "",
        *overview_table(results["rows"], SMALL_ROWS, SMALL_SIZES[:-1]),
        "",
        f"[All rows, and the paper's beside ours]({stem}.md), with the command of each of the {len(results['runs'])} "
        "runs that they are of; [what was aimed at, and what bounds it](docs/bench.md#targets). "
        + _runs_provenance(results["runs"], stem),
    ]


def evaluation(results: Results, folder: str) -> list[str]:
    """Perplexity by setting and P, and the ablation beside the paper's."""
    return [*summary(results), "", *provenance_lines(results["runs"][-1])]


def expected(results: Results, folder: str) -> list[str]:
    """Increases of perplexity by bits and P, beside the paper's."""
    return error_tables.expected_errors(results)


def policy_errors(results: Results, folder: str) -> list[str]:
    """What the paper's policies round, and perplexity with the massive sites exact."""
    return [*error_tables.policy_errors(results), "", *provenance_lines(results["made_by"])]


def ttft(results: Results, folder: str) -> list[str]:
    """Time to first token by model, load and batch."""
    page = "[All rows, decoding, method](results/ttft_h200x2.md)"
    return [
        f"P = {results['world_size']}: time to first token at 16 bits, and how many times faster the settings are.",
        "",
        *ttft_tables.overview(results),
        "",
        f"{page}. {provenance_lines(results)[0]}",
    ]


def all_reduce_targets(results: Results, folder: str) -> list[str]:
    """What the kernels were meant to reach, beside what was measured."""
    return targets.lines(results)


def sequence_parallel_h200x2(results: Results, folder: str) -> list[str]:
    """Sequence parallelism's collectives: what was aimed at, and what bounds it."""
    page = "[All rows](results/sequence_parallel_h200x2.md)"
    figure = "![times faster than NCCL by size](results/sequence_parallel_h200x2.png)"
    return [*shares.lines(results), "", figure, "", f"{page}. {' '.join(provenance(results))}"]


SMOLLM2 = "python scripts/ablation_smollm2.py --text TEXT"
EVALUATE = "echo-megatron evaluate --model"
ALL_REDUCE = "torchrun --nproc-per-node 2 scripts/bench_all_reduce.py --out docs/results --name all_reduce_h200x2"
BLOCKS = {
    "quickstart": Block(
        quickstart, "make quickstart ABLATION=1 SP=1 && cp runs/quickstart/comparison.json docs/results/quickstart.json"
    ),
    "training_study": Block(
        training_study, "torchrun --nproc-per-node 2 scripts/training_study.py --results docs/results"
    ),
    "training_study_tiny": Block(
        partial(training_study, name="training_study_tiny"),
        "torchrun --nproc-per-node 2 scripts/training_study.py --study tiny --results docs/results",
    ),
    "train_qwen3_0p6b_h200x2": Block(
        train_qwen3_0p6b,
        "torchrun --nproc-per-node 2 scripts/training_study.py --study qwen3_0p6b --results docs/results",
    ),
    "step_h200x2": Block(
        step_h200x2, "torchrun --nproc-per-node 2 scripts/bench_step.py --out docs/results --name step_h200x2"
    ),
    "ablation_smollm2_135m": Block(evaluation, SMOLLM2),
    "ablation_qwen3_0p6b": Block(evaluation, f"{EVALUATE} RUN --data data/gutenberg --name ablation_qwen3_0p6b"),
    "ablation_qwen3_200m": Block(evaluation, f"{EVALUATE} RUN --data data/gutenberg --name ablation_qwen3_200m"),
    "errors_smollm2_135m": Block(expected, SMOLLM2, source="ablation_smollm2_135m"),
    "errors_smollm2_135m_books": Block(expected, f"{EVALUATE} SMOLLM2", source="ablation_smollm2_135m_books"),
    "errors_qwen3_0p6b": Block(expected, f"{EVALUATE} RUN", source="ablation_qwen3_0p6b"),
    "policy_errors_smollm2_135m": Block(policy_errors, "python scripts/policy_errors.py --text TEXT"),
    "ttft": Block(
        ttft, "torchrun --nproc-per-node 2 scripts/bench_ttft.py --out docs/results", source="ttft_h200x2"
    ),  # its figure's place is that of the page in docs
    "quantizer_study": Block(quantizer_study, "python scripts/quantizer_study.py --text TEXT"),
    "error_feedback_simulation": Block(error_feedback_simulation, "python scripts/error_feedback_simulation.py"),
    "all_reduce_h200x2": Block(all_reduce_h200x2, ALL_REDUCE),
    "all_reduce_targets": Block(all_reduce_targets, ALL_REDUCE, source="all_reduce_h200x2"),
    "sequence_parallel_h200x2": Block(
        sequence_parallel_h200x2,
        "torchrun --nproc-per-node 2 scripts/bench_sequence_parallel.py --out docs/results --name "
        "sequence_parallel_h200x2",
        source="sequence_parallel_h200x2",  # its figure's place is that of the page in docs
    ),
    # Recorded by an earlier form of the script; now: --transport collective.
    "collective_h200x2": Block(
        collective_h200x2,
        "torchrun --nproc-per-node 2 scripts/bench_all_reduce.py --transport collective --out docs/results",
    ),
}


def _is_shown(entry: Results) -> bool:
    uncompensated = entry["world_size"] == 4 and entry["residual"] == "none" and entry["bits_a_value"] < 5
    study = entry["section"] in ("The paper's wire", "Rotated quantizers") and uncompensated
    return entry["section"] in ("16 bits", "The presets with the paper's coefficients") or study


def _noise(rows: Iterable[Results]) -> str:
    """The range of each row that was measured again with the ranks' slices in other orders."""
    ranges: dict[tuple[str, str], list[float]] = {}
    rows = list(rows)
    for entry in rows:
        label, _, order = entry["label"].partition(", slices ")
        if order:
            ranges.setdefault((label, entry["residual"]), []).append(entry["perplexity"])
    if not ranges:
        return ""
    spreads = [
        f"{label} {residual} {min(values):.2f} to {max(values):.2f}" for (label, residual), values in ranges.items()
    ]
    return f"With the ranks' slices in {len(next(iter(ranges.values())))} other orders: {'; '.join(spreads)}."


def _runs_provenance(runs: Iterable[Results], stem: str) -> str:
    """Where and with what the runs were made; what differs among them is listed."""
    runs = list(runs)

    def distinct(key: str) -> str:
        found = [value for entry in runs if (value := entry.get(key))]
        texts = (
            ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value for value in found
        )
        return "; ".join(dict.fromkeys(texts)) or "not recorded"

    return f"[JSON]({stem}.json). Machine: {distinct('machine')}; {distinct('versions')}; commit {distinct('commit')}."
