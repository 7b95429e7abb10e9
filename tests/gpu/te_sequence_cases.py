"""Cases with sequence parallelism: a compensated reduce-scatter at 4 bits, all-gathers at 8."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import te_models as models
import te_training as training
import torch
import torch.distributed as dist
from te_cases import FP8, FULL, MLP, case, echo4, on_fresh, pass_through, recompute_case, summary
from te_models import Setting
from torch import nn

from echo_megatron.config import TransportName
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import SimulatedGroup

PARALLEL = {"sequence_parallel": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}


def against_stock(setting: Setting, **options: Any) -> dict[str, Any]:
    """Stock twice, pass-through on both transports, echo4 on both."""
    options = {**PARALLEL, **options}
    transports = dict.fromkeys((setting.transport, TransportName.collective))
    stock, again = (on_fresh(setting, None, **options) for _ in range(2))
    passed = [on_fresh(setting, pass_through(transport), **options) for transport in transports]
    quantized = [on_fresh(setting, echo4(setting, transport=transport), **options) for transport in transports]
    return {
        "stock_repeats": training.differences(stock, again),
        "pass_through": [training.differences(stock, run) for run in passed],
        "pass_through_calls": [run.num_calls + run.num_gathers for run in passed],
        "between_transports": training.differences(quantized[0], quantized[-1]),
        "transports": [run.transport for run in quantized],
        "num_gathers": quantized[0].num_gathers,
        "stock_losses": stock.losses,
        **summary(quantized[0], stock),
    }


@case("sp_bits")
def bits(setting: Setting) -> dict[str, Any]:
    found = against_stock(setting)
    without = on_fresh(setting, echo4(setting))
    found["distance_to_all_reduce"] = max(abs(a - b) / b for a, b in zip(found["losses"], without.losses, strict=True))
    return found


@case("sp_reference")
def reference(setting: Setting) -> dict[str, Any]:
    """Every call's output is the reference's for the two ranks' inputs; the weight gradient sees the forward's bits."""
    config = echo4(setting)
    run = on_fresh(setting, config, record=True, steps=2, **PARALLEL)
    simulated, wrong, gathered = SimulatedGroup(models.TP, config), [], {}
    for call in run.calls:
        xs = training.gather(call.x)
        if call.collective == "reduce_scatter":
            expected = simulated.reduce_scatter(xs, call.site)[dist.get_rank()]
        else:
            expected = simulated.all_gather(xs, call.site.bits)
            if call.site.direction.name == "backward":  # a column-parallel linear's: forward, then again
                gathered.setdefault(call.site, []).append(call.y)
        if not torch.equal(call.y, expected):
            wrong.append(f"{call.collective} of {call.site}")
    # Microbatches run one after the other, forward then backward: the two gathers of one follow each other.
    pairs = [pair for ys in gathered.values() for pair in zip(ys[::2], ys[1::2], strict=True)]
    return {
        "wrong": wrong[:5],
        "num_calls": sum(call.collective == "reduce_scatter" for call in run.calls),
        "num_gathers": sum(call.collective == "all_gather" for call in run.calls),
        "not_regathered": sum(not torch.equal(first, again) for first, again in pairs),
        "num_pairs": len(pairs),
        "dtypes": sorted({str(call.x.dtype) for call in run.calls}),
    }


@contextmanager
def gathers_of_bytes() -> Iterator[list[int]]:
    """Values of FP8 data, one byte each, in every all-gather that Echo's groups leave to the group behind them."""
    original, found = dist.all_gather_into_tensor, []

    def recording(out: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        if x.element_size() == 1 and not isinstance(options.get("group"), EchoProcessGroup):
            found.append(x.numel())
        return original(out, x, *args, **options)

    dist.all_gather_into_tensor = recording
    try:
        yield found
    finally:
        dist.all_gather_into_tensor = original


def fp8(setting: Setting, name: str) -> dict[str, Any]:
    found = against_stock(setting, **FP8[name])
    with gathers_of_bytes() as gathered:
        on_fresh(setting, echo4(setting), **PARALLEL, **FP8[name])
    return {**found, "num_gathers_of_bytes": len(gathered)}


@case("sp_fp8_delayed")
def fp8_delayed(setting: Setting) -> dict[str, Any]:
    return fp8(setting, "delayed")


@case("sp_fp8_current")
def fp8_current(setting: Setting) -> dict[str, Any]:
    return fp8(setting, "current")


@case("sp_recompute_full")
def recompute_full(setting: Setting) -> dict[str, Any]:
    return recompute_case(setting, {**PARALLEL, **FULL})


@case("sp_recompute_mlp")
def recompute_mlp(setting: Setting) -> dict[str, Any]:
    return recompute_case(setting, {**PARALLEL, **MLP})


def freeze_layers(model: nn.Module) -> None:
    """As an adapter's base: no weight gradients, so that inputs are not gathered again."""
    model.decoder.layers.requires_grad_(False)


@case("sp_frozen")
def frozen(setting: Setting) -> dict[str, Any]:
    return against_stock(setting, prepare=freeze_layers)


@case("sp_moe")
def moe(setting: Setting) -> dict[str, Any]:
    return against_stock(setting, model=models.experts, **EXPERTS)
