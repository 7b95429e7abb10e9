"""What the paper's policies round of SmolLM2-135M's messages, and what a few sites of massive activations do to that.

usage: python scripts/policy_errors.py --text wiki.test.tokens [--out docs/results]

Errors are those of each of P ranks' partial outputs in one window at 16 bits, rounded once, site by site; each figure
is the mean over the sites. Then perplexity of the paper's form on the tokens of `ablation_smollm2.py`, whose results
have to be there: as they are, and with exact sums at the sites of massive activations.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from ablation_smollm2 import NAME as ABLATION
from ablation_smollm2 import model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo_megatron.config import Direction, EchoConfig, Policy, Rescale
from echo_megatron.evaluate.error_tables import policy_errors
from echo_megatron.evaluate.perplexity import Windows, measure
from echo_megatron.evaluate.settings import NATIVE, parse_setting
from echo_megatron.evaluate.subjects import ROW_PARALLEL, TransformersSubject
from echo_megatron.evaluate.token_source import Tokens, read_source
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup, sum_in_rank_order
from echo_megatron.result_files import made_by, provenance_lines, write_results
from echo_megatron.simulation import find_linears, split_linear, sum_partial_outputs
from echo_megatron.sites import Site

NAME = "policy_errors_smollm2_135m"
POLICIES = (Policy.zero_aware, Policy.naive, Policy.symmetric)
WIDTHS = (4, 8)
GROUP_SIZES = (128, 256)
WORLD_SIZE = 4
MASSIVE = 100.0  # times the rms of the message


@contextmanager
def summed_by(linears: Sequence[tuple[str, torch.nn.Linear]], sums: Any) -> Iterator[None]:
    """While it is entered, every linear is P partial outputs that `sums(partial outputs, site index)` adds."""
    for idx, (_, linear) in enumerate(linears):

        def forward(x: Tensor, linear: torch.nn.Linear = linear, idx: int = idx) -> Tensor:
            output: Tensor = sums(split_linear(linear, x, WORLD_SIZE), idx)
            return output

        linear.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for _, linear in linears:
            del linear.forward


def captured(subject: TransformersSubject, linears: Any, window: Tensor) -> list[Tensor]:
    """The ranks' partial outputs of every site, fp32 [P, values]."""
    messages: list[Tensor] = []

    def sums(parts: list[Tensor], idx: int) -> Tensor:
        messages.append(torch.stack([part.flatten() for part in parts]))
        return sum_in_rank_order(torch.stack(parts))

    with torch.no_grad(), summed_by(linears, sums):
        subject.losses(window)
    return messages


def rounding(message: Tensor, quantizer: Quantizer) -> tuple[float, float]:
    """Relative error of all values, and of the largest of each group."""
    error = (quantizer.dequantize(quantizer.quantize(message)) - message).view(-1, quantizer.group_size)
    groups = message.view(-1, quantizer.group_size)
    largest = groups.abs().argmax(-1, keepdim=True)
    ratios = (error.square().sum() / groups.square().sum()).sqrt()
    of_largest = (error.gather(-1, largest).square().sum() / groups.gather(-1, largest).square().sum()).sqrt()
    return float(ratios), float(of_largest)


def span(message: Tensor, group_size: int) -> float:
    """Mean over groups of how much of a symmetric grid they use."""
    low, high = message.view(-1, group_size).aminmax(dim=-1)
    return float(((high - low) / (2 * torch.maximum(-low, high)).clamp_min(1e-30)).mean())


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def errors(messages: Sequence[Tensor]) -> list[dict[str, Any]]:
    """A row for each width, group size and policy."""
    rows = []
    for bits in WIDTHS:
        for group_size in GROUP_SIZES:
            spans = mean([span(message, group_size) for message in messages])
            for policy in POLICIES:
                quantizer = Quantizer(bits, policy, group_size, Rescale.tile)
                found = [rounding(message, quantizer) for message in messages]
                rows.append(
                    {
                        "bits": bits,
                        "group_size": group_size,
                        "policy": policy.name,
                        "span": spans,
                        "relative_error": mean([everything for everything, _ in found]),
                        "relative_error_of_largest": mean([largest for _, largest in found]),
                    }
                )
    return rows


def perplexity(
    subject: TransformersSubject, linears: Any, tokens: Tokens, windows: Windows, config: EchoConfig, exact: set[int]
) -> float:
    """With the sums of the sites `exact` at full precision; the compensator passes them by."""
    group = SimulatedGroup(WORLD_SIZE, config)
    sites = [Site(idx, Direction.forward, name, config.bits) for idx, (name, _) in enumerate(linears)]

    def sums(parts: list[Tensor], idx: int) -> Tensor:
        return sum_partial_outputs(None if idx in exact else group, parts, sites[idx])

    with summed_by(linears, sums):
        return measure(subject, tokens, windows).perplexity


def setting_of(row: dict[str, Any]) -> str:
    """The row's setting by the names of `echo-megatron evaluate`."""
    preset = f"echo{row['bits']}_paper"
    changes = "" if row["policy"] == "zero_aware" else f",policy={row['policy']}"
    return preset + changes + ("" if row["group_size"] == 128 else f",group_size={row['group_size']}")


def page(results: dict[str, Any]) -> str:
    """The Markdown beside the JSON."""
    lines = ["# Rounding of the paper's policies: SmolLM2-135M", "", *policy_errors(results)]
    return "\n".join([*lines, "", *provenance_lines(results["made_by"])]) + "\n"


def main() -> int:
    """Measures; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the text of the ablation's results")
    parser.add_argument("--models", type=Path, default=Path("build/models"), help="where the model is (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="has the ablation's JSON (%(default)s)")
    options = parser.parse_args()
    try:
        ablation = json.loads((options.out / f"{ABLATION}.json").read_text(encoding="utf-8"))
        folder = model_folder(options.models)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = ablation["settings"]
    by_name = {row["setting"]: row["perplexity"] for row in ablation["rows"] if row["P"] == WORLD_SIZE}

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    subject = TransformersSubject(model, {})
    linears = find_linears(model, ROW_PARALLEL)
    tokens = read_source(str(options.text), settings["tokens"], vocab_size=subject.vocab_size, tokenizer=str(folder))
    if (tokens.sha256, subject.facts["weights_sha256"]) != (settings["tokens_sha256"], settings["weights_sha256"]):
        parser.error(f"--text or --models: expected the tokens and the model of {ABLATION}.json, got others")
    windows = Windows(settings["context"], batch=1)

    messages = captured(subject, linears, next(windows.batches(tokens)))
    ratios = [float(message.abs().max() / message.square().mean().sqrt()) for message in messages]
    massive = {idx for idx, ratio in enumerate(ratios) if ratio > MASSIVE}
    rows = errors(messages)
    for row in rows:
        name = setting_of(row)
        row["perplexity"] = by_name.get(name)
        # The other linear of the same layers is the control: as many sites, exact as well.
        for column, exact in (("massive", massive), ("control", {idx ^ 1 for idx in massive})):
            is_measured = row["group_size"] == 128 and (column == "massive" or row["policy"] == "zero_aware")
            config = parse_setting(name).config
            row[f"perplexity_{column}_exact"] = (
                perplexity(subject, linears, tokens, windows, config, exact) if is_measured else None
            )
        print(name, row, flush=True)
    results = {
        "settings": {
            "num_sites": len(linears),
            "world_size": WORLD_SIZE,
            "threshold": MASSIVE,
            "massive": [f"{linears[idx][0]} ({ratios[idx]:,.0f})" for idx in sorted(massive)],
            "perplexity_16bit": by_name[NATIVE],
            **{name: settings[name] for name in ("model", "data", "tokens", "context", "tokens_sha256")},
        },
        "rows": rows,
        "made_by": made_by("scripts/policy_errors.py", vars(options), torch.device("cpu"), "torch", "transformers"),
    }
    print(f"written: {write_results(options.out, NAME, results, page(results))}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
