"""The command `echo-megatron evaluate`: perplexity of a model for a list of communication settings in one go.

Started plainly, P ranks are simulated on one device. Under torchrun its processes are the tensor-parallel ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echo_megatron.evaluate.settings import SETS, Setting, parse_settings

if TYPE_CHECKING:
    import torch

    from echo_megatron.evaluate.models import Engine, ModelSource
    from echo_megatron.evaluate.results import Results, RowKey
    from echo_megatron.evaluate.subjects import Subject
    from echo_megatron.evaluate.token_source import Tokens
    from echo_megatron.pretrain.schema import Layers

EXIT_LEFT, EXIT_REFUSED = 1, 2
EPILOG = f"""settings: 16bit, the presets echo4, echo8, echo4_paper, echo8_paper, uncompensated (echo4 without), early8
(8 bits in the first half of the layers), last8 (8 bits in the last layer), averages (the paper's coefficients), each
with overrides as in echo4,eta=0.9,residual=consensus; overrides alone change echo4 (bits=4,early_bits=8,last_bits=8).
Sets of them: {", ".join(SETS)}.

On real ranks: torchrun --nproc-per-node P -m echo_megatron.cli evaluate ... (no --world-sizes).

Exit status: 0 all settings are measured; 1 --budget-s ended before, the same command goes on; 2 refused."""


def parse(arguments: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[Setting]]:
    """The options, checked one by one."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="run folder, checkpoint in one, Hugging Face folder, or owner/name on the hub")
    add(
        "--data",
        help="prepared folder or its name in configs/data, indexed dataset, token array, text; default: a run's",
    )
    add("--split", default="validation", help="train or validation, of a prepared folder (%(default)s)")
    add("--tokenizer", help="of a text; default: the model's own, where it is a Hugging Face model")
    add("--id-map", type=Path, help=".npy of ids by rank, for a 16-bit token array that holds ranks")
    add("--note", default="", help="what the tables say about the data")
    add("--settings", nargs="+", default=["presets"], help="see below (%(default)s)")
    add("--world-sizes", nargs="+", type=int, help="P to simulate, 1 to 8 (2 4 8)")
    add("--tokens", type=int, help="tokens to predict, from the data's beginning; default: all")
    add("--context", type=int, help="tokens of a window; default: a run's sequence length, else 1024")
    add("--batch", type=int, default=1, help="windows of a forward pass (%(default)s)")
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto", help="auto: bf16 on GPUs, fp32 on CPUs")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--engine", choices=("auto", "megatron", "transformers"), default="auto", help="of a Hugging Face model")
    add("--layers", choices=("auto", "local", "transformer_engine"), default="auto", help="of Megatron's models")
    add("--out", type=Path, default=Path("evaluations"), help="folder of the results (%(default)s)")
    add("--name", default="perplexity", help="of the results: NAME.json and NAME.md (%(default)s)")
    add("--budget-s", type=float, help="seconds after which no further setting starts")
    add("--restart", action="store_true", help="drop the rows that are there")
    options = parser.parse_args(list(arguments))
    for name in ("tokens", "context", "batch"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    try:
        return options, parse_settings(options.settings)
    except ValueError as error:
        parser.error(f"--settings: {error}")


def main(arguments: Sequence[str], prog: str = "echo-megatron evaluate") -> int:
    """Measures; returns the exit status."""
    options, settings = parse(arguments, prog)
    # Read when CUDA starts: cuBLAS is repeatable by it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    is_writer = int(os.environ.get("RANK", 0)) == 0
    from echo_megatron.evaluate.ranks import under_torchrun
    from echo_megatron.pretrain.quiet import quieten_libraries

    quieten_libraries()
    try:
        command = shlex.join(["evaluate", *arguments] if under_torchrun() else [*prog.split(), *arguments])
        return Evaluation(options, settings, command, is_writer).run()
    except (ValueError, OSError) as error:
        if is_writer:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_REFUSED


@dataclass
class Place:
    """Where an evaluation runs: what computes it, kind of device, precision, layers, real ranks (1: simulated)."""

    engine: Engine
    device: torch.device
    dtype: torch.dtype
    layers: Layers
    num_ranks: int
    is_simulated: bool


class Evaluation:
    """One call of the command.

    Args:
        options: of `parse`.
        settings: to measure.
        command: what was typed.
        is_writer: whether this process writes and prints.
    """

    def __init__(self, options: argparse.Namespace, settings: list[Setting], command: str, is_writer: bool) -> None:
        self._options, self._settings, self._command = options, settings, command
        self._is_writer = is_writer
        self._begin = time.monotonic()

    def run(self) -> int:
        """Loads model and tokens, measures what is not there yet; returns the exit status."""
        from contextlib import nullcontext

        from echo_megatron.evaluate.models import Engine, find_model, load_subject
        from echo_megatron.evaluate.ranks import model_parallel

        source = find_model(self._options.model)
        place = self._place(source)
        is_megatron = place.engine is Engine.megatron
        with model_parallel(place.device) if is_megatron else nullcontext(place.device) as at:
            subject = load_subject(
                source, place.engine, place.num_ranks, place.is_simulated, place.dtype, place.layers, at
            )
            tokens, context = self._tokens(source, subject)
            keys = self._keys(place)
            self._check(subject, keys, context)
            return self._measure(subject, tokens, context, place, keys)

    def _place(self, source: ModelSource) -> Place:
        import torch

        from echo_megatron.evaluate.models import Engine, choose_engine
        from echo_megatron.evaluate.ranks import num_ranks, under_torchrun
        from echo_megatron.pretrain.device import resolve_layers
        from echo_megatron.pretrain.schema import Layers

        options, is_simulated = self._options, not under_torchrun()
        if not is_simulated and options.world_sizes:
            raise ValueError("--world-sizes: expected none under torchrun, whose processes are the ranks")
        local = 1 if is_simulated else int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks()))
        kind = options.device
        if kind == "auto":
            kind = "cuda" if torch.cuda.device_count() >= local else "cpu"
        if kind == "cuda" and torch.cuda.device_count() < local:
            raise ValueError(f"--device cuda: expected at least {local} GPUs, got {torch.cuda.device_count()}")
        device = torch.device(kind)
        is_wide = options.precision == "fp32" or (options.precision == "auto" and kind == "cpu")
        sizes = self._world_sizes(is_simulated)
        engine, why = choose_engine(source, Engine(options.engine), sizes, is_simulated)
        uses_megatron = engine is Engine.megatron
        layers = resolve_layers(Layers[options.layers], device) if uses_megatron else Layers.local
        if not uses_megatron and options.layers != "auto":
            raise ValueError("--layers: expected with Megatron's models alone; this one is simulated in transformers")
        if why:
            print(f"simulated in transformers, whose last bits are not those of real ranks: {why}", file=sys.stderr)
        return Place(engine, device, torch.float32 if is_wide else torch.bfloat16, layers, num_ranks(), is_simulated)

    def _world_sizes(self, is_simulated: bool) -> list[int]:
        """Every P of this call, once."""
        from echo_megatron.evaluate.ranks import num_ranks

        if not is_simulated:
            return [num_ranks()]
        sizes = list(dict.fromkeys(self._options.world_sizes or [2, 4, 8]))
        for size in sizes:
            if not 1 <= size <= 8:
                raise ValueError(f"--world-sizes: expected 1 to 8 ranks, got {size}")
        return sizes

    def _tokens(self, source: ModelSource, subject: Subject) -> tuple[Tokens, int]:
        from echo_megatron.evaluate.data import resolve

        options = self._options
        tokens = resolve(options, source, subject.vocab_size)
        if options.context is not None:
            return tokens, options.context
        return tokens, source.run.config.model.sequence_length if source.run else 1024

    def _keys(self, place: Place) -> list[RowKey]:
        """P by P inside a setting; a run that is cut then has the first settings at every P."""
        from echo_megatron.evaluate.results import RowKey

        if not place.is_simulated and place.num_ranks == 1:
            raise ValueError("torchrun started one process: expected 2 to 8 ranks, or no torchrun to simulate them")
        sizes = self._world_sizes(place.is_simulated)
        return [RowKey(setting, size, place.is_simulated) for setting in self._settings for size in sizes]

    def _check(self, subject: Subject, keys: list[RowKey], context: int) -> None:
        """What a row would refuse is refused before the first is measured."""
        for key in keys:
            if key.is_simulated:
                with subject.applied(key.setting.config, key.world_size, context * self._options.batch):
                    pass

    def _measure(self, subject: Subject, tokens: Tokens, context: int, place: Place, keys: list[RowKey]) -> int:
        from echo_megatron.evaluate.perplexity import Windows, measure
        from echo_megatron.evaluate.progress import Progress

        windows = Windows(context, self._options.batch)
        results = self._results(subject, tokens, windows, place)
        done = agree(None if results is None else [key.text for key in keys if key in results], place)
        left = [key for key in keys if key.text not in done]
        with Progress(self._is_writer, len(keys), len(keys) - len(left)) as progress:
            if results is not None and results.outdated:
                names = ", ".join(results.outdated)
                progress.say(f"left out of {results.path}, measured when these names meant other options: {names}")
            longest = 0.0
            for idx, key in enumerate(left):
                elapsed = time.monotonic() - self._begin
                budget = self._options.budget_s
                if agree(budget is not None and elapsed + longest > budget, place):
                    names = ", ".join(row.title for row in left[idx:])
                    progress.say(f"--budget-s {budget:g}: {len(left) - idx} left ({names}); the same command goes on")
                    return EXIT_LEFT
                start = time.monotonic()
                progress.begin(key.title, tokens.num_tokens)
                config = key.setting.config
                with subject.applied(config, key.world_size, windows.num_tokens_a_pass(tokens)) as applied:
                    measurement = measure(subject, tokens, windows, progress.update)
                seconds = time.monotonic() - start
                longest = max(longest, seconds)
                if results is not None:
                    row = results.add(key, measurement, applied, seconds)
                    progress.end(row)
            if results is not None:
                results.write()
                progress.say(f"written: {results.path} and .md")
        return 0

    def _results(self, subject: Subject, tokens: Tokens, windows: Any, place: Place) -> Results | None:
        """On the process that writes; it refuses for all of them, before anyone measures."""
        from echo_megatron.evaluate.results import Results

        refusal: str | None = None
        results = None
        if self._is_writer:
            settings = {
                **subject.facts,
                "data": tokens.name,
                "note": self._options.note,
                "tokens": tokens.num_tokens,
                "tokens_sha256": tokens.sha256,
                "context": windows.context,
                "batch": windows.batch,
                "precision": "fp32" if place.dtype.itemsize == 4 else "bf16",
                "device": place.device.type,
            }
            try:
                made = self._made_by(place)
                results = Results(self._options.out, self._options.name, settings, made, self._options.restart)
            except ValueError as error:
                refusal = str(error)
        if refusal := agree(refusal, place):
            raise ValueError(refusal)
        return results

    def _made_by(self, place: Place) -> dict[str, Any]:
        import torch

        from echo_megatron import provenance

        launcher = "" if place.is_simulated else f"torchrun --nproc-per-node {place.num_ranks} -m echo_megatron.cli "
        packages = ("torch", "megatron-core", "transformers", "transformer-engine")
        return {
            "machine": {**provenance.machine(place.device), "threads": torch.get_num_threads()},
            "versions": provenance.versions("echo-megatron", *packages),
            "commit": provenance.commit(),
            "command": f"{launcher}{without_folders(self._command)}",
        }


def without_folders(command: str) -> str:
    """The command without the folders that only this machine has: of an absolute path the last part."""
    return shlex.join(Path(word).name if word.startswith("/") else word for word in shlex.split(command))


def agree(value: Any, place: Place) -> Any:
    """Rank 0's value on every rank."""
    if place.num_ranks == 1:
        return value
    import torch.distributed as dist

    values = [json.dumps(value)]
    dist.broadcast_object_list(values, src=0)
    return json.loads(values[0])
