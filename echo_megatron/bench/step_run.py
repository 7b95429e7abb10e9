"""One rank's run of `bench_step`: the link, then every model at every load, then its profile.

See `parts.PartedBench` for what happens where a part fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron.bench import step_profile, step_tables
from echo_megatron.bench.clocks import ClockSampler
from echo_megatron.bench.parts import FAILURES, PartedBench
from echo_megatron.bench.step_load import Copied, Load, Loaded
from echo_megatron.bench.step_models import MODELS, Workload, fitting_layers, layers_kind, num_parameters
from echo_megatron.bench.step_settings import (
    NCCL,
    SKIPPED,
    Setting,
    all_settings,
    chosen,
    installed,
    memory_of,
    num_sites,
)
from echo_megatron.bench.step_timing import Block, Ranks, Shares, fits, time_block
from echo_megatron.config import TransportName

LOADED = (NCCL, "echo4", SKIPPED)  # settings at loads above 0
PROFILED = (NCCL, "echo4", SKIPPED)
MARGIN_BYTES = 4 << 30  # that a 16-bit step must not need: Echo's state and workspace, and holes between tensors
ROOM_BYTES = 2 << 30  # of the GPU must be free when Echo's workspace is made, which PyTorch's cache cannot give
LINK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 20}
LINK_CALLS, LINK_WARMUP, LINK_ALONE_S = 20, 5, 0.25
# How long parts take, in visits of a setting.
LINK_WEIGHT, BUILD_WEIGHT, PROFILE_WEIGHT = 2.0, 4.0, 3.0

METHOD = (
    "All {world_size} ranks are one tensor-parallel group; {precision}, {layers} layers, random weights. step_ms: "
    "forward and backward pass of one batch, gradients into .grad, no optimizer. forward_ms: a prefill of the batch "
    "under no_grad in eval mode, logits of the last position alone (time to first token). Both by CUDA events around "
    "each ({steps} a visit, after one that is not timed), wall_ms with launching and waiting; the slowest rank's. "
    "Every round visits every setting once, in an order that rotates, installing and uninstalling it; values are "
    "medians of the rounds, q1 and q3 their quartiles. skipped: the sites' all-reduces return at once, all else is as "
    "it was: the bound. speedup: nccl16 divided by the setting, same model and load. share: of the time that skipping "
    "saves, what the setting saves. load: a process beside each rank copies to the next rank's GPU for that share of "
    "the time. peak_* of PyTorch's allocator during steps; device_bytes: what the GPU says is used."
)


class StepBench(PartedBench):
    """One rank of a run.

    Args:
        options: see `step.parse_arguments`.
        device: this rank's.
        ranks: their agreements.
        load: this rank's copier; None where no load above 0 is asked for.
        start: time.monotonic() of the run's beginning.
    """

    script = "scripts/bench_step.py"

    def __init__(
        self, options: argparse.Namespace, device: torch.device, ranks: Ranks, load: Load | None, start: float
    ) -> None:
        self.options, self.device = options, device
        known = all_settings(options.timeout_s, TransportName[options.transport])
        self.settings = chosen(known, options.settings)
        per_model = [
            BUILD_WEIGHT,
            *(float(len(self._settings_at(load))) for load in options.loads),
            *([PROFILE_WEIGHT] if self._profiles else []),
        ]
        weights = [LINK_WEIGHT, *(per_model * len(options.models))]
        super().__init__(options, device, ranks, load, Shares(options.budget_s, start, weights, ranks))
        self.clocks = ClockSampler(device)
        self.models: dict[str, dict[str, Any]] = {}
        self.echo: dict[str, str] = {}
        self.links: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []

    def run(self) -> int:
        """All parts; returns the exit status: 1 where a part failed or nothing was measured."""
        failed = not self.guarded("link", self._measure_link)
        for name in self.options.models:
            failed |= not self._run_model(name)
        if self.rank == 0:
            print("\n".join(step_tables.summary(self.results())), flush=True)
        return int(failed or not self.rows)

    def results(self) -> dict[str, Any]:
        """The content of the JSON."""
        return {
            **self.made(),
            "method": METHOD.format(
                world_size=self.world_size,
                steps=self.options.steps,
                layers=layers_kind(self.device),
                precision="BF16" if self.device.type == "cuda" else "FP32 on CPU",
            ),
            "link_bytes": LINK_BYTES[self.device.type],
            "models": self.models,
            "echo": self.echo,
            "links": self.links,
            "rows": step_tables.with_ratios(self.rows),
            "profiles": self.profiles,
            "clocks": self.clocks.unknown or "sampled on rank 0",
            "left_out": self.left_out,
        }

    def markdown(self, results: Mapping[str, Any]) -> str:
        """The page beside it."""
        return step_tables.markdown(results)

    @property
    def _profiles(self) -> bool:
        return not self.options.no_profile and self.device.type == "cuda"

    def _settings_at(self, load: int) -> list[Setting]:
        all_loads = load == 0 or self.options.settings is not None
        return [setting for setting in self.settings if all_loads or setting.name in LOADED]

    # -- the link

    def _measure_link(self, deadline: float) -> str:
        """An all-reduce of 1 GiB by the group itself at every load, and what the copies carry alone and beside it."""
        tensor = torch.zeros(LINK_BYTES[self.device.type] // 2, dtype=torch.bfloat16, device=self.device)
        for load in self.options.loads:
            with Loaded(self.load, load, self.ranks):
                before = self.look()
                time.sleep(LINK_ALONE_S)
                alone = self.copied(before)
                for _ in range(LINK_WARMUP):
                    dist.all_reduce(tensor)
                before = self.look()
                times = [time_block(lambda: dist.all_reduce(tensor), 1, self.device).ms for _ in range(LINK_CALLS)]
                beside = self.copied(before)
            ms, alone_rate, rate = (
                self.ranks.largest([statistics.median(times)])[0],
                self.mean(alone.gb_per_s),
                self.mean(beside.gb_per_s),
            )
            first = self.links[0]["all_reduce_ms"] if self.links and self.links[0]["load"] == 0 else None
            slowdown = ms / first if first else (1.0 if load == 0 else None)
            self.links.append(
                {
                    "load": load,
                    "all_reduce_ms": ms,
                    "slowdown": slowdown,
                    "copy_alone_gb_per_s": alone_rate,
                    "copy_gb_per_s": rate,
                    "busy": self.mean(alone.busy),
                }
            )
        return ", ".join(f"{link['load']} %: {link['all_reduce_ms']:.2f} ms" for link in self.links)

    # -- a model

    def _run_model(self, name: str) -> bool:
        """Builds a model and measures it; returns whether no part failed."""
        self._workload: Workload | None = None
        ok = self.guarded(name, lambda deadline: self._build(name))
        workload = self._workload
        if workload is None:
            self.shares.drop(len(self.options.loads) + self._profiles)
            return ok
        self._failed: dict[str, str] = {}
        for load in self.options.loads:
            part = f"{name}, load {load}"
            ok &= self.guarded(part, lambda deadline, load=load: self._measure(name, workload, load, deadline))
        if self._profiles:
            ok &= self.guarded(f"{name}, profile", lambda deadline: self._profile(name, workload))
        ok &= not self._failed
        self._workload = workload = None
        self.free()
        return ok

    def _build(self, name: str) -> str:
        shape = MODELS[name]
        batch, sequence = self.options.batch or shape.batch, self.options.sequence or shape.sequence

        def attempt(num_layers: int) -> bool:
            fits_here, error = True, None
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                self._workload = Workload(shape, num_layers, batch, sequence, self.device)
                for run in (self._workload.step, self._workload.prefill):
                    run()
                    run()  # what compiles for the first time is slow and may need more memory
                fits_here = self._unneeded_bytes() > MARGIN_BYTES
            except torch.OutOfMemoryError:
                fits_here = False
            except FAILURES as caught:
                error = f"{type(caught).__name__}: {caught}"
            too_large, failed = self.ranks.largest([float(not fits_here), float(error is not None)])
            if too_large or failed:
                self._workload = None
                self.free()
            if failed:
                raise RuntimeError(error or "failed on another rank")
            return not too_large

        num_layers = fitting_layers(self.options.layers or shape.num_layers, attempt)
        workload = self._workload
        if workload is None:
            raise RuntimeError(f"no layer fits into this GPU's memory at a batch of {batch} x {sequence}")
        itemsize = next(workload.model.parameters()).element_size()
        self.models[name] = {
            "layers": num_layers,
            "layers_of_model": shape.num_layers,
            "batch": batch,
            "sequence": sequence,
            "layers_kind": layers_kind(self.device),
            "parameters_a_rank": num_parameters(workload.model),
            "sites": num_sites(workload.model),
            "message_bytes": batch * sequence * shape.hidden * itemsize,
        }
        return f"{num_layers} of {shape.num_layers} layers, batch {batch} x {sequence}"

    def _unneeded_bytes(self) -> float:
        """Of this rank's GPU what neither others use nor its own tensors did at their peak."""
        if self.device.type == "cpu":
            return float("inf")
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()

    def _measure(self, name: str, workload: Workload, load: int, deadline: float) -> str:
        """Rounds over the settings until they are done or the part's time is."""
        settings = [setting for setting in self._settings_at(load) if setting.name not in self._failed]
        visits: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
        seconds: list[float] = []
        first_load = load == self.options.loads[0]
        with Loaded(self.load, load, self.ranks):
            while len(seconds) < self.options.rounds and fits(start := self.shares.elapsed(), deadline, seconds):
                turn = len(seconds) % len(settings) if settings else 0
                for setting in [*settings[turn:], *settings[:turn]]:
                    if setting.name in self._failed:
                        continue
                    visit = self._visit(setting, workload, with_memory=first_load and not seconds)
                    if visit is not None:
                        visits[setting.name].append(visit)
                seconds.append(self.shares.elapsed() - start)
        self.rows += [step_tables.row_of(name, setting, load, found) for setting, found in visits.items() if found]
        self.left_out.update({f"{name}, {setting}": why for setting, why in self._failed.items()})
        words = [
            f"{setting} {statistics.median(v['step'].ms for v in found):.1f}"
            for setting, found in visits.items()
            if found
        ]
        return f"{len(seconds)} rounds, ms a step: {', '.join(words)}"

    def _visit(self, setting: Setting, workload: Workload, with_memory: bool) -> dict[str, Any] | None:
        """One visit; None where it failed on some rank."""
        error = None
        if self.device.type == "cuda":
            if with_memory or torch.cuda.mem_get_info()[0] < ROOM_BYTES:
                self.free(workload.model)
            torch.cuda.reset_peak_memory_stats()
        # Nothing within `try` agrees among the ranks: one that fails would answer in another's place.
        try:
            with installed(setting, workload.model) as installation:
                if installation is not None and installation.communicator is not None:
                    self.echo[setting.name] = installation.communicator.describe()
                workload.step()
                before = self.look()
                with self.clocks:
                    step = time_block(workload.step, self.options.steps, self.device)
                step_clock = self.clocks.clock
                copied = self.copied(before)
                loss, peaks, echo = workload.loss(), self._peaks(with_memory), memory_of(installation)
                workload.prefill()
                with self.clocks:
                    forward = time_block(workload.prefill, self.options.steps, self.device)
                if installation is not None:
                    installation.check()
        except FAILURES as caught:
            error = f"{type(caught).__name__}: {caught}"
        if self.ranks.any(error is not None):
            self._failed[setting.name] = error or "failed on another rank"
            self.free(workload.model)
            return None
        return {
            "step": Block(*self.ranks.largest([step.ms, step.wall_ms])),
            "forward": Block(*self.ranks.largest([forward.ms, forward.wall_ms])),
            "copied": Copied(self.mean(copied.gb_per_s), self.mean(copied.busy)),
            "clock": {"step": step_clock, "forward": self.clocks.clock},
            "loss": loss,
            "memory": {name: int(self.ranks.largest([most])[0]) for name, most in peaks.items()} | echo,
        }

    def _peaks(self, with_memory: bool) -> dict[str, int]:
        """This rank's."""
        if not with_memory or self.device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
        }

    def _profile(self, name: str, workload: Workload) -> str:
        """Kernels of a forward and a backward pass, after two steps."""
        words = []
        for setting in self.settings:
            if setting.name not in PROFILED or setting.name in self._failed:
                continue
            with installed(setting, workload.model):
                for _ in range(2):
                    workload.step()
                losses: list[torch.Tensor] = []
                forward = step_profile.record(lambda: losses.append(workload.forward_loss()))  # noqa: B023
                backward = step_profile.record(lambda: losses.pop().backward())  # noqa: B023
            for (direction, count), kernels in zip(num_sites(workload.model).items(), (forward, backward), strict=True):
                count = 0 if setting.name == SKIPPED else count
                profile = step_profile.summary(kernels, count)
                self.profiles.append(
                    {"model": name, "setting": setting.name, "direction": direction, "sites": count, **profile}
                )
                words.append(f"{setting.name} {direction} {profile['call_ms']:.3f} ms")
        return "a call: " + ", ".join(words)
