"""One rank's run of `bench_ttft`: for every model its prefills at every load, then its decoding."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from echo_megatron.bench import ttft_tables
from echo_megatron.bench.parts import FAILURES, PartedBench
from echo_megatron.bench.step_load import Copied, Load, Loaded
from echo_megatron.bench.step_models import MODELS, layers_kind, num_parameters
from echo_megatron.bench.step_settings import NCCL, Setting, chosen, installed, num_sites
from echo_megatron.bench.step_timing import Block, Ranks, Shares, fits, time_block
from echo_megatron.bench.ttft_models import ALL4, Serving, serving_settings
from echo_megatron.config import TransportName
from echo_megatron.evaluate.inference import forward_sent_bytes
from echo_megatron.integrations.megatron import Installation

# How long parts take, in visits of a setting to all batches.
BUILD_WEIGHT, DECODE_WEIGHT = 3.0, 2.0
WARMUP_TOKENS = 2

METHOD = (
    "All {world_size} ranks are one tensor-parallel group; {precision}, {layers} layers, random weights; the static "
    "inference context of Megatron-core. prefill ms: a batch of prompts into the cache, logits of the last positions, "
    "the most likely tokens (time to first token), by CUDA events around each, the slowest rank's; {steps} a visit, "
    "after one that is not timed. decode: {tokens} tokens a visit one after the other, after {warmup} that are not "
    "timed, behind the context that a row states; eager: each step launched by Python; graph: the step as one CUDA "
    "graph, replayed at the same place. Its ms are of wall time by token, launching included, the slowest rank's. "
    "tokens_per_s: batch divided by that time. Every round visits every setting once, in an order that rotates, "
    "installing and uninstalling it; values are medians of the rounds, q1 and q3 their quartiles. skipped: the sites' "
    "all-reduces return at once, all else is as it was: the bound. speedup: nccl16 divided by the setting, same model, "
    "batch and load. share: of the time that skipping saves, what the setting saves. load: a process beside each rank "
    "copies to the next rank's GPU for that share of the time. sent_bytes: of a rank in one forward pass at the sites; "
    "nccl16 counted as a ring. echo4_min0: echo4 with min_bytes 0, so that decoding is quantized as well; it is "
    "measured in decoding alone."
)


class TtftBench(PartedBench):
    """One rank of a run.

    Args:
        options: see `ttft.parse_arguments`.
        device: this rank's.
        ranks: their agreements.
        load: this rank's copier; None where no load above 0 is asked for.
        start: time.monotonic() of the run's beginning.
    """

    script = "scripts/bench_ttft.py"

    def __init__(
        self, options: argparse.Namespace, device: torch.device, ranks: Ranks, load: Load | None, start: float
    ) -> None:
        known = serving_settings(options.timeout_s, TransportName[options.transport])
        self.settings = chosen(known, options.settings)
        per_model = [BUILD_WEIGHT, *([1.0] * len(options.loads)), *([DECODE_WEIGHT] if options.decode_batches else [])]
        shares = Shares(options.budget_s, start, per_model * len(options.models), ranks)
        super().__init__(options, device, ranks, load, shares)
        self.models: dict[str, dict[str, Any]] = {}
        self.echo: dict[str, str] = {}
        self.prefills: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []

    def run(self) -> int:
        """All parts; returns the exit status: 1 where a part failed or nothing was measured."""
        failed = False
        for name in self.options.models:
            failed |= not self._run_model(name)
        if self.rank == 0:
            print("\n".join(ttft_tables.summary(self.results())), flush=True)
        return int(failed or not (self.prefills or self.decodes))

    def results(self) -> dict[str, Any]:
        """The content of the JSON."""
        return {
            **self.made(),
            "method": METHOD.format(
                world_size=self.world_size,
                steps=self.options.steps,
                tokens=self.options.tokens,
                warmup=WARMUP_TOKENS,
                layers=layers_kind(self.device),
                precision="BF16" if self.device.type == "cuda" else "FP32 on CPU",
            ),
            "models": self.models,
            "echo": self.echo,
            "prefill": ttft_tables.with_ratios(self.prefills, ("model", "batch", "load"), ("ms",)),
            "decode": ttft_tables.with_ratios(self.decodes, ("model", "batch"), ("eager_ms", "graph_ms")),
            "left_out": self.left_out,
        }

    def markdown(self, results: Mapping[str, Any]) -> str:
        """The page beside it."""
        return ttft_tables.markdown(results)

    def _run_model(self, name: str) -> bool:
        """Builds a model and measures it; returns whether no part failed."""
        self._serving: Serving | None = None
        self._failed: dict[str, str] = {}
        ok = self.guarded(name, lambda deadline: self._build(name))
        serving, loads = self._serving, self.options.loads
        if serving is None:
            self.shares.drop(len(loads) + bool(self.options.decode_batches))
            return ok
        for load in loads:
            part = f"{name}, prefill at load {load}"
            ok &= self.guarded(part, lambda deadline, load=load: self._prefill(name, serving, load, deadline))
        if self.options.decode_batches:
            ok &= self.guarded(f"{name}, decode", lambda deadline: self._decode(name, serving, deadline))
        self._serving = serving = None
        self.free()
        return ok and not self._failed

    def _build(self, name: str) -> str:
        shape = MODELS[name]
        sequence, num_layers = self.options.sequence or shape.sequence, self.options.layers or shape.num_layers
        self._serving = serving = Serving(
            shape, num_layers, self.device, sequence + self.options.tokens + WARMUP_TOKENS
        )
        dtype = next(serving.model.parameters()).dtype
        self.models[name] = {
            "layers": num_layers,
            "layers_of_model": shape.num_layers,
            "sequence": sequence,
            "hidden": shape.hidden,
            "layers_kind": layers_kind(self.device),
            "parameters_a_rank": num_parameters(serving.model),
            "sites": num_sites(serving.model)["forward"],
            "token_bytes": shape.hidden * dtype.itemsize,
        }
        return f"{num_layers} of {shape.num_layers} layers, {sequence} tokens"

    def _prefill(self, name: str, serving: Serving, load: int, deadline: float) -> str:
        sequence = self.models[name]["sequence"]

        def visit(batch: int, can_capture: bool) -> dict[str, Any]:
            prefill = serving.prefill(batch, sequence)
            prefill()
            before = self.look()
            block = time_block(prefill, self.options.steps, self.device)
            return {"prefill": block, "copied": self.copied(before)}

        settings = [setting for setting in self.settings if setting.name != ALL4]
        with Loaded(self.load, load, self.ranks):
            part = f"{name}, prefill at load {load}"
            found = self._rounds(part, serving, settings, self.options.batches, sequence, visit, deadline)
        for (setting, batch), visits in found.items():
            copied = [Copied(self.mean(v["copied"].gb_per_s), self.mean(v["copied"].busy)) for v in visits]
            row = {"model": name, "setting": setting, "load": load, "batch": batch, "sequence": sequence}
            self.prefills.append(
                {
                    **row,
                    **self._row(name, visits, {"": "prefill"}, batch * sequence),
                    "copy_gb_per_s": statistics.median(c.gb_per_s for c in copied),
                    "copy_busy": statistics.median(c.busy for c in copied),
                }
            )
        return _words(found, "prefill")

    def _decode(self, name: str, serving: Serving, deadline: float) -> str:
        context, count = self.models[name]["sequence"], self.options.tokens

        def visit(batch: int, can_capture: bool) -> dict[str, Any]:
            decoding = serving.decode(batch, context)
            for _ in range(WARMUP_TOKENS):
                decoding.step()
            found: dict[str, Any] = {"eager": time_block(decoding.step, count, self.device)}
            if can_capture and not self.options.no_graphs:
                with decoding.graph() as replay:
                    for _ in range(WARMUP_TOKENS):
                        replay()
                    found["graph"] = time_block(replay, count, self.device)
            return found

        part = f"{name}, decode"
        found = self._rounds(part, serving, self.settings, self.options.decode_batches, 1, visit, deadline)
        for (setting, batch), visits in found.items():
            row = {"model": name, "setting": setting, "batch": batch, "context": context}
            kinds = {f"{kind}_": kind for kind in ttft_tables.KINDS if kind in visits[0]}
            row |= self._row(name, visits, kinds, batch)
            row |= {f"{kind}tokens_per_s": batch / row[f"{kind}ms"] * 1e3 for kind in kinds}
            self.decodes.append(row)
        return _words(found, "eager")

    def _rounds(
        self,
        part: str,
        serving: Serving,
        settings: Sequence[Setting],
        batches: Sequence[int],
        sequence: int,
        visit: Callable[[int, bool], dict[str, Any]],
        deadline: float,
    ) -> dict[tuple[str, int], list[dict[str, Any]]]:
        """What the visits of every setting to every batch found, until the rounds are done or the part's time is."""
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        seconds: list[float] = []
        while len(seconds) < self.options.rounds and fits(start := self.shares.elapsed(), deadline, seconds):
            turn = len(seconds) % len(settings)
            for setting in [*settings[turn:], *settings[:turn]]:
                if setting.name in self._failed:
                    continue
                for batch, values in self._visit(part, serving, setting, batches, sequence, visit).items():
                    found.setdefault((setting.name, batch), []).append(values)
            seconds.append(self.shares.elapsed() - start)
        return found

    def _visit(
        self,
        part: str,
        serving: Serving,
        setting: Setting,
        batches: Sequence[int],
        sequence: int,
        visit: Callable[[int, bool], dict[str, Any]],
    ) -> dict[int, dict[str, Any]]:
        """By batch; nothing where it failed on some rank, which leaves the setting out from then on."""
        found: dict[int, dict[str, Any]] = {}
        error = None
        # Nothing within `try` agrees among the ranks: one that fails would answer in another's place.
        try:
            with installed(setting, serving.model) as installation:
                can_capture = self.device.type == "cuda"
                if installation is not None and (communicator := installation.communicator) is not None:
                    self.echo[setting.name] = communicator.describe()
                    can_capture = communicator.transport.name == TransportName.p2p.name
                    if can_capture:
                        communicator.prepare_capture()
                for batch in batches:
                    sent = _sent_bytes(installation, setting, serving, batch, sequence, self.world_size)
                    found[batch] = {**visit(batch, can_capture), "sent_bytes": sent}
                if installation is not None:
                    installation.check()
        except FAILURES as caught:
            error = f"{type(caught).__name__}: {caught}"
        if self.ranks.any(error is not None):
            self._failed[setting.name] = error or "failed on another rank"
            self.left_out[f"{part}: {setting.name}"] = self._failed[setting.name]
            serving.forget()
            self.free()
            return {}
        return found

    def _row(
        self, name: str, visits: Sequence[dict[str, Any]], kinds: Mapping[str, str], num_tokens: int
    ) -> dict[str, Any]:
        """Times of the slowest rank, by kind; prefills by the GPU's clock, decoding by the wall's."""
        row: dict[str, Any] = {"rounds": len(visits)}
        for prefix, kind in kinds.items():
            blocks = [Block(*self.ranks.largest([visit[kind].ms, visit[kind].wall_ms])) for visit in visits]
            own = [block.wall_ms if prefix else block.ms for block in blocks]
            row |= ttft_tables.quartiles(own, prefix)
            if not prefix:
                row["wall_ms"] = statistics.median(block.wall_ms for block in blocks)
        row["message_bytes"] = num_tokens * self.models[name]["token_bytes"]
        row["sent_bytes"] = visits[0]["sent_bytes"]
        return row


def _sent_bytes(
    installation: Installation | None, setting: Setting, serving: Serving, batch: int, sequence: int, world_size: int
) -> int:
    """Of this rank in one forward pass; of the group's own all-reduce as a ring."""
    message = serving.message(batch, sequence)
    if installation is not None:
        return forward_sent_bytes(installation, message)
    if setting.name != NCCL:
        return 0
    return num_sites(serving.model)["forward"] * 2 * (world_size - 1) * message.nbytes // world_size


def _words(found: Mapping[tuple[str, int], Sequence[dict[str, Any]]], kind: str) -> str:
    """What is printed of a part: of each setting the largest batch."""
    last = {setting: (batch, visits) for (setting, batch), visits in found.items()}
    words = [
        f"{setting} {statistics.median(visit[kind].wall_ms for visit in visits):.2f}"
        for setting, (_, visits) in last.items()
    ]
    rounds = max((len(visits) for visits in found.values()), default=0)
    batch = next(iter(last.values()))[0] if last else 0
    return f"{rounds} rounds, ms at batch {batch}: {', '.join(words)}"
