"""The cases of test_megatron_te.py: each runs on both ranks and returns what the tests assert on, as plain values.

A case builds its own models, so that the cases don't depend on one another. Bits are compared here, where the tensors
are; what has to be equal across ranks goes home as digests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import te_models as models
import te_training as training
import torch
from te_models import Setting, build
from te_training import Run, train
from torch import Tensor, nn

from echo_megatron import EchoConfig, install
from echo_megatron.config import Algorithm, TransportName
from echo_megatron.reference import SimulatedGroup

CASES: dict[str, Callable[[Setting], dict[str, Any]]] = {}

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
FP8 = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
}
RECOMPUTE = {
    "full": FULL,
    "full_2": {**FULL, "recompute_num_layers": 2},
    "mlp": MLP,
    "full_fp8_delayed": {**FULL, **FP8["delayed"]},
    "full_fp8_current": {**FULL, **FP8["current"]},
    "mlp_fp8_delayed": {**MLP, **FP8["delayed"]},
}


def case(name: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    def add(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        CASES[name] = function
        return function

    return add


def echo4(setting: Setting, **options: Any) -> EchoConfig:
    """Quantizes every message; a lost rank is noticed before NCCL's limit of a minute."""
    options = {"transport": setting.transport, "algorithm": Algorithm.one_shot, **options}
    return EchoConfig.preset("echo4", min_bytes=0, timeout_s=20.0, **options)


def pass_through(transport: TransportName = TransportName.collective) -> EchoConfig:
    """Installs everything and quantizes nothing."""
    return EchoConfig.preset("echo4", min_bytes=2**62, transport=transport, timeout_s=20.0)


def on_fresh(setting: Setting, echo: EchoConfig | None, *, steps: int = 3, **options: Any) -> Run:
    """A training of a model of its own; `train`'s options are told from `build`'s by name."""
    own = {name: options.pop(name) for name in ("record", "microbatches", "update", "same_batch") if name in options}
    return train(build(setting, **options), echo, steps=steps, **own)


def summary(run: Run, stock: Run) -> dict[str, Any]:
    """What every test of a quantized training asks for."""
    return {
        "losses": run.losses,
        "distance": training.distance(run, stock),
        "finite": training.are_finite(run),
        "num_calls": run.num_calls,
        "transport": run.transport,
        "norms": training.norm_digests(run),
        "echo_modules": run.echo_modules,
    }


def stock_pass_through_echo(setting: Setting, **options: Any) -> dict[str, Any]:
    """Stock twice, pass-through once, echo4 once."""
    stock, again = (on_fresh(setting, None, **options) for _ in range(2))
    passed = on_fresh(setting, pass_through(), **options)
    quantized = on_fresh(setting, echo4(setting), **options)
    return {
        "stock_repeats": training.differences(stock, again),
        "pass_through": training.differences(stock, passed),
        "pass_through_calls": passed.num_calls,
        "stock_losses": stock.losses,
        **summary(quantized, stock),
    }


# -- bits of the stock model, bits of the reference


@case("pass_through")
def pass_through_case(setting: Setting) -> dict[str, Any]:
    stock, again = (on_fresh(setting, None) for _ in range(2))
    found = {"stock_repeats": training.differences(stock, again), "losses": stock.losses}
    for transport in {TransportName.collective, setting.transport}:
        passed = on_fresh(setting, pass_through(transport))
        found[transport.name] = training.differences(stock, passed)
        found[f"{transport.name}_calls"] = passed.num_calls
        found["echo_modules"] = passed.echo_modules
    return found


@case("transports")
def transports(setting: Setting) -> dict[str, Any]:
    """Both transports give the same training, with one-shot and with two-shot."""
    stock = on_fresh(setting, None)
    found: dict[str, Any] = {}
    for algorithm in (Algorithm.one_shot, Algorithm.two_shot):
        runs = [
            on_fresh(setting, echo4(setting, algorithm=algorithm, transport=transport))
            for transport in (setting.transport, TransportName.collective)
        ]
        found[algorithm.name] = {
            "between_transports": training.differences(*runs),
            "transports": [run.transport for run in runs],
            **summary(runs[0], stock),
        }
    return found


@case("reference")
def reference(setting: Setting) -> dict[str, Any]:
    """Every call's output is the reference's for the two ranks' inputs."""
    found: dict[str, Any] = {}
    for algorithm in (Algorithm.one_shot, Algorithm.two_shot):
        config = echo4(setting, algorithm=algorithm)
        run = on_fresh(setting, config, record=True, steps=2)
        simulated, wrong = SimulatedGroup(models.TP, config), []
        for call in run.calls:
            expected = simulated.all_reduce(training.gather(call.x), call.site)
            if not torch.equal(call.y, expected):
                wrong.append(str(call.site))
        found[algorithm.name] = {
            "num_calls": len(run.calls),
            "wrong": wrong[:5],
            "names": sorted({call.site.name for call in run.calls}),
            "dtypes": sorted({str(call.x.dtype) for call in run.calls}),
            "outputs": training.digest(torch.cat([call.y.float().flatten() for call in run.calls])),
        }
    return found


@case("side_stream")
def side_stream(setting: Setting) -> dict[str, Any]:
    """Backward sites run beside the weight gradients, on a stream of their own; five repeats give the same bits."""
    first = on_fresh(setting, echo4(setting), record=True)
    streams = {
        direction: sorted({call.stream for call in first.calls if call.site.direction.name == direction})
        for direction in ("forward", "backward")
    }
    repeats = [training.differences(first, on_fresh(setting, echo4(setting))) for _ in range(5)]
    main = torch.cuda.current_stream().cuda_stream if setting.on_gpu else 0
    return {"streams": streams, "main": main, "repeats": repeats, "losses": first.losses}


# -- FP8, fused weight gradients, delayed weight gradients


@case("fp8_delayed")
def fp8_delayed(setting: Setting) -> dict[str, Any]:
    return stock_pass_through_echo(setting, **FP8["delayed"])


@case("fp8_current")
def fp8_current(setting: Setting) -> dict[str, Any]:
    return stock_pass_through_echo(setting, **FP8["current"])


def transformer_engine_linears(model: nn.Module) -> list[Any]:
    from transformer_engine.pytorch import LayerNormLinear, Linear

    return [module for module in model.modules() if isinstance(module, (LayerNormLinear, Linear))]


def fuse_weight_gradients(model: nn.Module) -> None:
    """What gradient_accumulation_fusion asks of Transformer Engine's layers. The option itself also asks Megatron's own
    LM head for a kernel of apex.
    """
    for linear in transformer_engine_linears(model):
        linear.fuse_wgrad_accumulation = True


def delay_weight_gradients(model: nn.Module) -> None:
    """What delay_wgrad_compute asks of the layers; TransformerConfig takes it with MoE overlap only."""
    from transformer_engine.pytorch.module._common import WeightGradStore

    fuse_weight_gradients(model)
    for linear in transformer_engine_linears(model):
        linear.wgrad_store = WeightGradStore(True, False)
        linear.weight.skip_backward_post_hook = True


def compute_delayed(model: nn.Module) -> None:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for linear in transformer_engine_linears(model):
        TransformerEngineBaseModule.backward_dw(linear)


@case("fused_wgrad")
def fused_wgrad(setting: Setting) -> dict[str, Any]:
    found = stock_pass_through_echo(setting, prepare=fuse_weight_gradients)
    trainer = build(setting, prepare=fuse_weight_gradients)
    train(trainer, echo4(setting), steps=1)
    weights = [linear.weight for linear in transformer_engine_linears(trainer.model)]
    found["added_to_main_grad"] = [bool(weight.grad_added_to_main_grad) for weight in weights]
    return found


@case("delayed_wgrad")
def delayed_wgrad(setting: Setting) -> dict[str, Any]:
    def run(echo: EchoConfig | None, prepare: Callable[[nn.Module], None]) -> Run:
        is_delayed = prepare is delay_weight_gradients
        trainer = build(setting, prepare=prepare, delay_wgrad=is_delayed)
        if is_delayed:
            trainer.after_backward = functools.partial(compute_delayed, trainer.model)
        return train(trainer, echo, steps=2, microbatches=1)

    stock = run(None, delay_weight_gradients)
    quantized = run(echo4(setting), delay_weight_gradients)
    return {
        "pass_through": training.differences(stock, run(pass_through(), delay_weight_gradients)),
        "against_fused": training.differences(quantized, run(echo4(setting), fuse_weight_gradients)),
        **summary(quantized, stock),
    }


# -- recompute


def recompute_case(setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
    """Recompute against the same training without it, for Megatron's own communication and for echo4."""
    plain_options = {k: v for k, v in options.items() if not k.startswith("recompute")}
    stock, stock_again = (on_fresh(setting, None, steps=2, **chosen) for chosen in (plain_options, options))
    plain, again = (on_fresh(setting, echo4(setting), steps=2, **chosen) for chosen in (plain_options, options))
    return {
        "stock": training.differences(stock, stock_again),
        "echo": training.differences(plain, again),
        "plain_calls": plain.num_calls,
        **summary(again, stock),
    }


for _name, _options in RECOMPUTE.items():
    case(f"recompute_{_name}")(functools.partial(recompute_case, options=_options))


# -- other models


@case("tied")
def tied(setting: Setting) -> dict[str, Any]:
    return stock_pass_through_echo(setting, model=functools.partial(models.gpt, tied=True))


@case("hybrid")
def hybrid(setting: Setting) -> dict[str, Any]:
    return stock_pass_through_echo(setting, model=models.hybrid, qk_layernorm=False)


@case("mtp")
def mtp(setting: Setting) -> dict[str, Any]:
    return stock_pass_through_echo(setting, mtp_num_layers=1)


class Adapter(nn.Module):
    """Low-rank update of a tensor-parallel linear, as NeMo's and Bridge's ParallelLinearAdapter builds it."""

    def __init__(self, config: Any, in_features: int, out_features: int, rank: int, is_row: bool) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        common = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": True}
        if is_row:
            self.linear_in: nn.Module = RowParallelLinear(in_features, rank, input_is_parallel=True, **common)
        else:
            self.linear_in = ColumnParallelLinear(in_features, rank, gather_output=True, **common)
        self.linear_out = ColumnParallelLinear(rank, out_features, gather_output=is_row, **common)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_out(self.linear_in(x)[0])[0]


class LoRALinear(nn.Module):
    """A frozen linear and its adapter; peft wrappers of Megatron models name the linear `to_wrap`."""

    def __init__(self, to_wrap: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = adapter

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x.contiguous()).reshape(output.shape), bias


def add_lora(model: nn.Module) -> None:
    """Freezes the model and wraps the four linears of every layer."""
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        config = layer.config
        qkv = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        heads = config.num_attention_heads * config.kv_channels
        sizes = {
            (layer.self_attention, "linear_qkv"): (config.hidden_size, qkv, False),
            (layer.self_attention, "linear_proj"): (heads, config.hidden_size, True),
            (layer.mlp, "linear_fc1"): (config.hidden_size, 2 * config.ffn_hidden_size, False),
            (layer.mlp, "linear_fc2"): (config.ffn_hidden_size, config.hidden_size, True),
        }
        for (parent, name), (in_features, out_features, is_row) in sizes.items():
            linear = getattr(parent, name)
            adapter = Adapter(config, in_features, out_features, 16, is_row).to(linear.weight.device)
            setattr(parent, name, LoRALinear(linear, adapter))


@case("lora")
def lora(setting: Setting) -> dict[str, Any]:
    found = stock_pass_through_echo(setting, prepare=add_lora)
    trainer = build(setting, prepare=add_lora)
    found["trained"] = sorted({name.split(".")[-3] for name in training.gradients(trainer)})
    found["adapter_groups_are_real"] = []
    installation = install([trainer.chunk], echo4(setting))
    for module in trainer.model.modules():
        if isinstance(module, Adapter):
            groups = (module.linear_in.tp_group, module.linear_out.tp_group)
            found["adapter_groups_are_real"] += [group is installation.communicator.group for group in groups]
    installation.uninstall()
    return found


# -- refusals, checkpoints


@case("refusals")
def refusals(setting: Setting) -> dict[str, Any]:
    messages = {}

    def attempt(name: str, model: nn.Module) -> None:
        try:
            install([model], echo4(setting)).uninstall()
            messages[name] = "installed"
        except ValueError as error:
            messages[name] = str(error)

    trainer = build(setting)
    trainer.config.tp_comm_overlap = True
    attempt("tp_comm_overlap", trainer.chunk)
    trainer.config.tp_comm_overlap = False
    attempt("nothing", trainer.chunk)
    attempt("compiled wrapper", torch.compile(trainer.model))
    trainer.model.decoder.layers[0].compile()
    attempt("compiled layer", trainer.chunk)
    return messages


@case("checkpoint")
def checkpoint(setting: Setting) -> dict[str, Any]:
    """state_dict and sharded_state_dict with Echo installed are those without it."""
    trainer = build(setting)
    train(trainer, echo4(setting), steps=1)
    before, sharded_before = trainer.model.state_dict(), trainer.model.sharded_state_dict()
    installation = install([trainer.chunk], echo4(setting))
    during, sharded = trainer.model.state_dict(), trainer.model.sharded_state_dict()
    training.run_step(trainer, 7, update=False)
    after = trainer.model.state_dict()
    installation.uninstall()
    return {
        "keys": [list(before) == list(other) for other in (during, after)],
        "different": [name for name in before if not all(_equal(before[name], o[name]) for o in (during, after))],
        "num_keys": len(before),
        "sharded": _shapes(sharded) == _shapes(sharded_before),
        "num_sharded": len(sharded),
    }


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if hasattr(one, "getvalue"):  # FP8's extra state
        return one.getvalue() == other.getvalue()
    return one == other


def _shapes(sharded: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What decides where a checkpoint keeps an entry."""
    return {
        name: (value.key, getattr(value, "global_shape", None), getattr(value, "global_offset", None))
        for name, value in sharded.items()
        if hasattr(value, "key")
    }
