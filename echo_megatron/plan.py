"""`echo-megatron plan`: predicted step time, bytes and memory of a model at P ranks, 16 bits beside Echo.

No GPU is needed. Predictions are scaled from what two H200 took (docs/results); docs/plan.md says how, and how far they
were from measured points.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from echo_megatron import plan_tables, provenance
from echo_megatron.arguments import message_size, positive, positive_number
from echo_megatron.bench.step_models import MODELS as BENCH_MODELS
from echo_megatron.bench.step_models import ModelShape
from echo_megatron.config import MAX_WORLD_SIZE, Collective, Direction, EchoConfig, TransportName
from echo_megatron.plan_calibration import calibrate
from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_errors import call_errors, step_errors
from echo_megatron.plan_machine import MEASURED_GPU, Ceilings, Measured, gpus, results_folder
from echo_megatron.plan_memory import memory_of, sent_bytes
from echo_megatron.plan_model import Calibration, Work, predict, speedups
from echo_megatron.result_files import write_results

SETTINGS = ("nccl", "echo4", "echo8")
SEQUENCE_PARALLEL = {"no": (False,), "yes": (True,), "both": (False, True)}
DEFAULT_BATCH = 32  # sequences, as `bench_step` times Qwen3-0.6B
_SHAPE_OPTIONS = ("num_layers", "hidden", "ffn", "heads", "groups", "kv_channels", "vocab", "batch", "sequence")


def model_shapes() -> dict[str, ModelShape]:
    """The models of configs/model, and the larger ones that the benches time."""
    from echo_megatron.cli import config_dir
    from echo_megatron.pretrain.schema import DataConfig, ModelConfig

    shapes = dict(BENCH_MODELS)
    for path in sorted((config_dir() / "model").glob("*.yaml")):
        values = {**vars(ModelConfig()), **OmegaConf.to_container(OmegaConf.load(path))}  # type: ignore[dict-item]
        shapes[path.stem] = ModelShape(
            num_layers=values["num_layers"],
            hidden=values["hidden_size"],
            ffn=values["ffn_hidden_size"],
            heads=values["num_attention_heads"],
            groups=values["num_query_groups"],
            kv_channels=values["kv_channels"],
            vocab=DataConfig.padded_vocab_size,
            rotary_base=values["rotary_base"],
            qk_layernorm=True,
            tied=values["tie_embeddings"],
            batch=DEFAULT_BATCH,
            sequence=values["sequence_length"],
        )
    return shapes


def parse_arguments(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--model", nargs="+", default=["qwen3_0p6b"], help=f"of {', '.join(model_shapes())}")
    for name, what in (
        ("layers", "transformer layers"),
        ("hidden", "hidden size"),
        ("ffn", "MLP size"),
        ("heads", "attention heads"),
        ("groups", "query groups"),
        ("kv-channels", "size of a head"),
        ("vocab", "rows of the embedding"),
        ("batch", "sequences of one forward pass"),
        ("sequence", "tokens of a sequence"),
    ):
        dest = "num_layers" if name == "layers" else None
        parser.add_argument(f"--{name}", type=positive, dest=dest, help=f"{what}; default the model's")
    parser.add_argument("--ranks", nargs="+", type=_ranks, default=[2, 4, 8], metavar="P", help="default 2 4 8")
    parser.add_argument("--gpu", choices=list(gpus()), default=MEASURED_GPU)
    parser.add_argument("--wire-gb-per-s", type=positive_number, help="measured on your machine, in place of the GPU's")
    parser.add_argument(
        "--hbm-gb-per-s", type=positive_number, help="likewise; docs/bench.md says how both are measured"
    )
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--sequence-parallel", choices=list(SEQUENCE_PARALLEL), default="no")
    parser.add_argument("--transport", choices=("p2p", "collective"), default="p2p", help="collective: no times")
    parser.add_argument(
        "--step-ms", type=positive_number, help="a 16-bit step that you measured, for one model and one P"
    )
    parser.add_argument("--sizes", nargs="+", type=message_size, default=[], help="one collective's times, e.g. 64M 1G")
    parser.add_argument("--errors", action="store_true", help="the model's error on measured points")
    parser.add_argument("--results", type=Path, help="folder of measured results; default the ones that came along")
    parser.add_argument("--json", action="store_true", help="JSON in place of tables")
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--name", default="plan")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, prog: str = "echo-megatron plan") -> int:
    """Entry point; returns the exit status: 2 where the question can't be answered."""
    options = parse_arguments(arguments, prog)
    try:
        results = make_plan(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        write_results(options.out, options.name, results, plan_tables.markdown(results))
    if options.json:
        print(json.dumps(results, indent=1))
        return 0
    _show(results, options.errors)
    return 0


def make_plan(options: argparse.Namespace) -> dict[str, Any]:
    """The content of the JSON.

    Raises:
        ValueError: a model is unknown, P does not divide it, or --step-ms goes with more than one of them.
    """
    measured = Measured(options.results or results_folder())
    calibration = calibrate(measured)
    ceilings = _ceilings(options, measured)
    asked = len(options.model), len(options.ranks), len(SEQUENCE_PARALLEL[options.sequence_parallel])
    if options.step_ms is not None and asked != (1, 1, 1):
        raise ValueError(
            "--step-ms: expected one model, one P and --sequence-parallel yes or no beside it, since it is the time of "
            f"one run; got {asked[0]} models, {asked[1]} P, --sequence-parallel {options.sequence_parallel}"
        )
    rows = [
        row
        for name in options.model
        for world_size in options.ranks
        for row in _rows(name, _shape(name, options), world_size, ceilings, measured, calibration, options)
    ]
    errors = [one.to_json() for one in (*call_errors(measured), *step_errors(measured))]
    return {
        "machine": provenance.machine(torch.device("cpu")),
        "versions": provenance.versions("echo-megatron", "torch"),
        "commit": provenance.commit(),
        "command": provenance.command(),
        "measured_by": {
            name: {"commit": content["commit"], "command": content["command"]}
            for name, content in vars(measured).items()
            if isinstance(content, dict)
        },
        "planned_machine": {
            "gpu": ceilings.gpu.name,
            "wire_gb_per_s": ceilings.wire,
            "hbm_gb_per_s": ceilings.hbm,
            "is_measured": ceilings.is_measured,
            "calibrated_with": measured.ceilings.gpu.name,
            "tflops": ceilings.gpu.tflops,
            "source": ceilings.gpu.source,
        },
        "calibration": asdict(calibration),
        "rows": rows,
        "calls": [
            call
            for world_size in options.ranks
            for call in _calls(CallTimes(measured, ceilings, world_size), options.sizes)
        ],
        "errors": errors,
    }


def setting_config(name: str) -> EchoConfig:
    """The preset of a setting."""
    return EchoConfig.preset(name)


def _rows(
    name: str,
    shape: ModelShape,
    world_size: int,
    ceilings: Ceilings,
    measured: Measured,
    calibration: Calibration,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    times, rows = CallTimes(measured, ceilings, world_size), []
    transport = TransportName[options.transport]
    for sequence_parallel in SEQUENCE_PARALLEL[options.sequence_parallel]:
        _check(name, shape, world_size, sequence_parallel)
        work = Work(shape, world_size, sequence_parallel)
        for setting in options.settings:
            config = setting_config(setting)
            prediction = predict(work, config, times, calibration, options.step_ms)
            step, forward = speedups(work, config, times, calibration, options.step_ms)
            memory = memory_of(work, config, times, transport, recompute=True)
            has_times = transport is TransportName.p2p or not config.quantizes
            rows.append(
                {
                    "model": name,
                    "world_size": world_size,
                    "setting": f"{setting} SP" if sequence_parallel else setting,
                    "message_bytes": work.message_bytes,
                    **{key: value if has_times else None for key, value in asdict(prediction).items()},
                    **{
                        key: value if has_times else None
                        for key, value in (step.fields("step") | forward.fields("forward")).items()
                    },
                    "sent_bytes": sent_bytes(work, config, times, transport),
                    "state_bytes": memory.state,
                    "workspace_bytes": memory.workspace,
                    "kept_bytes": memory.kept_codes,
                }
            )
    return rows


def _calls(times: CallTimes, sizes: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {
            "world_size": times.world_size,
            "collective": collective.name,
            "bytes": size,
            "nccl_ms": times.nccl_ms(collective, size),
            **{
                f"{setting}_ms": times.ms(setting_config(setting), collective, size, Direction.forward)
                for setting in ("echo4", "echo8")
            },
        }
        for collective in Collective
        for size in sizes
    ]


def _shape(name: str, options: argparse.Namespace) -> ModelShape:
    shapes = model_shapes()
    if name not in shapes:
        raise ValueError(f"--model: expected one of {', '.join(shapes)}, got {name!r}")
    given = {key: value for key in _SHAPE_OPTIONS if (value := getattr(options, key)) is not None}
    return replace(shapes[name], **given)


def _check(name: str, shape: ModelShape, world_size: int, sequence_parallel: bool) -> None:
    divided = {"heads": shape.heads, "groups": shape.groups, "ffn": shape.ffn, "vocab": shape.vocab}
    if sequence_parallel:
        divided["sequence"] = shape.sequence
    for what, value in divided.items():
        if value % world_size:
            raise ValueError(
                f"{name} at P = {world_size}: expected {what} divisible by {world_size}, got {value}; "
                f"choose another --ranks or --{what}"
            )


def _ceilings(options: argparse.Namespace, measured: Measured) -> Ceilings:
    ceilings = measured.ceilings_of(gpus()[options.gpu])
    given = {
        name: value
        for name, value in (("wire", options.wire_gb_per_s), ("hbm", options.hbm_gb_per_s))
        if value is not None
    }
    return replace(ceilings, **given, is_measured=ceilings.is_measured and not given)


def _show(results: dict[str, Any], with_errors: bool) -> None:
    print(plan_tables.machine_line(results))
    print(plan_tables.calibration_line(results))
    plan_tables.show("Predicted", plan_tables.PREDICTIONS, plan_tables.prediction_rows(results["rows"]))
    if results["calls"]:
        plan_tables.show("One collective", plan_tables.CALLS, plan_tables.call_rows(results["calls"]))
    if with_errors:
        for kind, title in plan_tables.KINDS.items():
            plan_tables.show(title, plan_tables.ERRORS, plan_tables.error_rows(results["errors"], kind))
    print(plan_tables.summary_line(results["errors"]))


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= MAX_WORLD_SIZE:
        raise argparse.ArgumentTypeError(f"expected 2 to {MAX_WORLD_SIZE} ranks, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
