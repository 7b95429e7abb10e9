"""The paper's Tables 2 and 3 and the tests on real ranks, on the GPUs of this machine, within a budget of minutes.

Each part is a command of its own with a limit of time: a part that fails, hangs or is cut leaves the others what they
measured. After each the combined page is written anew. Exit status: 0 everything asked for is there; 1 a part failed
or was cut, the page says which and why; 2 the command line or the machine was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from echo_megatron.arguments import positive, positive_number
from echo_megatron.bench import paper_combine, paper_page
from echo_megatron.bench.launch import load_percent
from echo_megatron.bench.paper_parts import (
    DONE,
    MODELS,
    PAPER_BATCH,
    ROOT,
    SMALL_BATCH,
    WEIGHTS,
    Budget,
    Place,
    nccl_variables,
    run_part,
    sources_path,
)
from echo_megatron.bench.step_models import MODELS as ALL_MODELS
from echo_megatron.bench.step_tables import PAPER_LOADS
from echo_megatron.config import MAX_WORLD_SIZE, TransportName
from echo_megatron.doctor_facts import probe
from echo_megatron.plan_machine import gpu_of_name
from echo_megatron.result_files import made_by, write_results

SCRIPT = "scripts/paper_tables.py"
PAGE = "paper_tables"
PROBE_S = 60.0
BENCHES = ("all_reduce", "step", "ttft")
UNRECORDED = ("render", "replace", "device")


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS), help="default all")
    parser.add_argument("--ranks", type=positive, metavar="P", help="default all GPUs, on a CPU 2")
    parser.add_argument("--budget-s", type=positive_number, default=540.0, help="of the whole run; default %(default)g")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses with tiny sizes")
    parser.add_argument("--models", nargs="+", choices=list(ALL_MODELS), help="of Table 3; default the paper's two")
    parser.add_argument("--loads", nargs="+", type=load_percent, help="of Table 3, per cent; default 0 50 75 100")
    parser.add_argument(
        "--ttft-batch",
        type=positive,
        help=f"default {PAPER_BATCH}, the paper's, at 4 ranks and more, else {SMALL_BATCH}",
    )
    parser.add_argument(
        "--transport", choices=list(TransportName.__members__), help="of Echo's; default p2p, on a CPU auto"
    )
    parser.add_argument("--plan", type=Path, help="predictions to compare with; default docs/results/plan_p4_p8.json")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder; default docs/results")
    parser.add_argument("--replace", action="store_true", help="write over results of the same names in --out")
    parser.add_argument("--render", action="store_true", help="measure nothing: page and figures anew from the JSONs")
    options = parser.parse_args(arguments)
    options.parts = [name for name in WEIGHTS if name in options.parts]
    if options.ranks is not None and not 2 <= options.ranks <= MAX_WORLD_SIZE:
        parser.error(f"--ranks: expected 2 to {MAX_WORLD_SIZE}, got {options.ranks}")
    options.out = options.out.resolve()
    return options


def main(arguments: Sequence[str] | None = None, prog: str = "paper_tables.py") -> int:
    """Entry point; returns the exit status."""
    start = time.monotonic()
    options = parse_arguments(arguments, prog)
    try:
        if options.render:
            return render(options)
        place = find_place(options)
        complete(options, place)
        refuse_to_overwrite(options, place)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)  # the parts' processes end with this one
    return run(options, place, time.monotonic() - start)


def find_place(options: argparse.Namespace) -> Place:
    """The GPUs, asked for in another process so that this one holds no memory of theirs.

    Raises:
        ValueError: there are fewer than are needed.
    """
    if options.device == "cpu":
        return Place("cpu", None, "cpu", options.ranks or 2)
    os.environ["PYTHONPATH"] = sources_path(os.environ)
    facts = probe("cuda", PROBE_S)
    gpus = [gpu["name"] for gpu in facts.get("gpus", ())]
    ranks = options.ranks or min(len(gpus), MAX_WORLD_SIZE)
    if len(gpus) < max(ranks, 2):
        found = facts.get("error") or f"{len(gpus)} here"
        raise ValueError(f"--ranks: expected at least {max(ranks, 2)} GPUs, got {found}; --device cpu is a rehearsal")
    return Place("cuda", gpus[0], machine_key(gpus[0]), ranks)


def machine_key(gpu: str) -> str:
    """A GPU in file names: h200 of NVIDIA H200."""
    known = gpu_of_name(gpu)
    return known.key if known else "_".join(gpu.lower().replace("-", " ").split())


def complete(options: argparse.Namespace, place: Place) -> None:
    """Fills in what depends on the machine."""
    on_cpu = place.device == "cpu"
    options.ranks = place.ranks
    options.models = options.models or list(MODELS[place.device])
    options.loads = options.loads if options.loads is not None else ([0, 100] if on_cpu else list(PAPER_LOADS))
    batch = 1 if on_cpu else PAPER_BATCH if place.ranks >= 4 else SMALL_BATCH
    options.ttft_batch = options.ttft_batch or batch
    options.transport = options.transport or ("auto" if on_cpu else TransportName.p2p.name)


def refuse_to_overwrite(options: argparse.Namespace, place: Place) -> None:
    """Raises ValueError where a chosen part would write over a file: others may rest on it."""
    paths = [options.out / f"{place.name(part)}.json" for part in options.parts if part != "tests"]
    if (found := [path.name for path in paths if path.exists()]) and not options.replace:
        raise ValueError(
            f"--out {options.out}: expected a folder without {', '.join(found)}; pass another one, or --replace to "
            "write over them"
        )


def run(options: argparse.Namespace, place: Place, already_s: float) -> int:
    """The parts, and the page after each; returns the exit status."""
    budget = Budget(options.budget_s - already_s, [WEIGHTS[name] for name in options.parts])
    parts = []
    made = {
        **made_by(SCRIPT, _recorded(options), torch.device("cpu"), "torch", "megatron-core", "transformer-engine"),
        "date": datetime.now(UTC).date().isoformat(),
    }
    made["machine"] |= {"device": place.device, "gpu": place.gpu}
    path = options.out / f"{place.name(PAGE)}.json"
    kept = [run for run in _read(path).get("runs", ()) if not set(_names(run)) <= set(options.parts)]
    for name in options.parts:
        parts.append(run_part(name, place, options, budget.next_limit()))
        this = {**made, "budget_s": options.budget_s, "parts": [part.to_json() for part in parts]}
        head = {"world_size": place.ranks, "machine_key": place.key, "gpu": place.gpu}
        nccl = {"set": nccl_variables(os.environ), "multicast": "off: NCCL_NVLS_ENABLE=0"}
        write_page(options, {**head, "nccl": nccl, "runs": [*kept, this]})
    figures_fail = draw(options.out, place.name)
    unfinished = [part for part in parts if part.status != DONE]
    for part in unfinished:
        print(f"{part.status}: {part.name}: {part.why}")
    print(f"{path.with_suffix('.md')}: {len(parts) - len(unfinished)} of {len(parts)} parts are done")
    return int(bool(unfinished or figures_fail))


def write_page(options: argparse.Namespace, head: Mapping[str, Any]) -> None:
    """JSON and Markdown from what lies in the folder.

    Args:
        options: `out` and `plan` of them.
        head: number of ranks, machine, runs with their parts.
    """
    name = f"{head['machine_key']}x{head['world_size']}"
    found = {what: _read(options.out / f"{what}_{name}.json") for what in (*BENCHES, "nccl_defaults")}
    plan_path = options.plan or ROOT / "docs" / "results" / "plan_p4_p8.json"
    page = paper_combine.combine(head, found, _read(plan_path), plan_path.name)
    write_results(options.out, f"{PAGE}_{name}", page, paper_page.markdown(page))


def render(options: argparse.Namespace) -> int:
    """The pages in the folder anew, all or those of `--ranks`; returns the exit status.

    Raises:
        ValueError: there is none.
    """
    paths = sorted(options.out.glob(f"{PAGE}_*x{options.ranks or '*'}.json"))
    if not paths:
        raise ValueError(f"--render: expected {PAGE}_GPUxP.json in --out {options.out}, found none")
    fails = False
    for path in paths:
        page = _read(path)
        head = {key: page[key] for key in ("world_size", "machine_key", "gpu", "nccl", "runs")}
        write_page(options, head)
        place = Place("cuda" if page["gpu"] else "cpu", page["gpu"], page["machine_key"], page["world_size"])
        fails |= draw(options.out, place.name)
    return int(fails)


def draw(folder: Path, name: Callable[[str], str]) -> bool:
    """Figures of the benches' results, where Matplotlib is; returns whether one failed.

    Args:
        folder: where they are.
        name: of the file of a bench.
    """
    if find_spec("matplotlib") is None:
        print("no figures: matplotlib is not installed here; --render draws them where it is")
        return False
    from echo_megatron.bench import all_reduce, step, ttft

    fails = False
    for what, draw_one in zip(BENCHES, (all_reduce.render, step.render, ttft.render), strict=True):
        path = folder / f"{name(what)}.json"
        results = _read(path)
        if any(results.get(key) for key in ("rows", "prefill")):
            try:
                draw_one(path)
            except (ValueError, KeyError, TypeError, RuntimeError) as error:  # what was measured is kept
                print(f"no figure of {path.name}: {type(error).__name__}: {error}", file=sys.stderr)
                fails = True
    return fails


def _names(run: Mapping[str, Any]) -> list[str]:
    return [part["name"] for part in run["parts"]]


def _recorded(options: argparse.Namespace) -> dict[str, Any]:
    found = {name: value for name, value in vars(options).items() if name not in UNRECORDED}
    return {**found, "device": "cpu"} if options.device == "cpu" else found


def _read(path: Path) -> dict[str, Any]:
    """A file of results; empty where it is missing.

    Raises:
        ValueError: it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected a JSON of results, got {error}") from error
    return found


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
