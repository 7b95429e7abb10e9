"""Two or more GPUs: prefill and decode over the kernels, decode steps in CUDA graphs, engines with graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from inference_engines import dynamic_engine, generate, install_stand_ins, run_dynamic_engine, run_static_engine

from echo_megatron.bench.step_models import ModelShape, build
from echo_megatron.config import EchoConfig, TransportName
from echo_megatron.evaluate.inference import InferenceModel, use_cached_attention

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.timeout(400),
]
SHAPE = ModelShape(4, 256, 512, 4, 2, 64, 100, 10_000, True, False, 2, 64)
PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14, 15], [21])
NUM_TOKENS = 6
SCOPES = ("layer", "block")  # of CUDA graphs
ECHO4 = EchoConfig.preset("echo4", transport=TransportName.p2p, min_bytes=0, timeout_s=20.0)
CONFIGS = {
    "nccl": EchoConfig.preset("nccl"),
    "exact": ECHO4.replace(min_bytes=None),
    "echo4": ECHO4,
    "early8": ECHO4.replace(early_bits=8, early_fraction=0.5),
    "paper": EchoConfig.preset("echo4_paper", transport=TransportName.p2p, min_bytes=0, timeout_s=20.0),
}


def initialize(world_size: int) -> torch.device:
    import importlib

    from megatron.core import parallel_state

    if find_spec("transformer_engine"):
        importlib.import_module("transformer_engine.pytorch")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size, create_gloo_process_groups=False)
    return torch.device("cuda", torch.cuda.current_device())


@contextmanager
def model_options(**options: Any) -> Iterator[None]:
    """Further options of TransformerConfig, while a model is built."""
    from echo_megatron.pretrain import model

    original = model.dense_options
    model.dense_options = lambda *arguments: {**original(*arguments), **options}  # type: ignore[assignment]
    try:
        yield
    finally:
        model.dense_options = original


def _steps(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Of every config: the last layer's new keys of an eager step, and of replays of its graph."""
    from echo_megatron.bench.ttft_models import Serving

    device = initialize(world_size)
    serving = Serving(SHAPE, SHAPE.num_layers, device, 64)
    found: dict[str, list[Any]] = {}
    for name, config in CONFIGS.items():
        with InferenceModel(serving.model, config) as model:
            if model.installation.communicator is not None:
                assert model.installation.communicator.transport.name == "p2p"
                model.installation.communicator.prepare_capture()
            results = []
            for batch in (1, 3):
                decoding = serving.decode(batch, 32)
                keys = serving._context(batch).key_value_memory_dict[SHAPE.num_layers][0]
                eager = decoding.step(), keys[32].clone()
                with decoding.graph() as replay:
                    for _ in range(20):
                        with torch.inference_mode():  # which the caches were made in
                            keys[32].zero_()
                        tokens = replay()
                        torch.cuda.synchronize()
                        results.append(torch.equal(tokens, eager[0]) and torch.equal(keys[32], eager[1]))
                results.append(eager[1].float().cpu())
            model.installation.check()
        found[name] = results
    return found


def test_a_decode_step_in_a_graph_is_the_eager_one() -> None:
    """Twenty replays, each of which begins with fresh state."""
    for found in run_ranks(_steps, world_size=2, timeout_s=240.0):
        for name, results in found.items():
            assert all(result for result in results if isinstance(result, bool)), name
        keys = {name: [one for one in results if isinstance(one, torch.Tensor)] for name, results in found.items()}
        for exact, native, quantized in zip(keys["exact"], keys["nccl"], keys["echo4"], strict=True):
            distance = (exact - native).norm() / native.norm()
            assert distance < 0.02  # the exact sum is rounded once, NCCL's in BF16 as it goes
            assert not torch.equal(quantized, exact)


def _engines(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Tokens of every config by the wrapper, the static engine and the dynamic one."""
    device = initialize(world_size)
    install_stand_ins()
    gpt = build(SHAPE, SHAPE.num_layers, 64, device)
    use_cached_attention(gpt)
    found: dict[str, dict[str, Any]] = {}
    for name, config in CONFIGS.items():
        with InferenceModel(gpt, config) as model:
            found[name] = {
                "generate": model.generate(PROMPTS, NUM_TOKENS),
                "static": run_static_engine(gpt, PROMPTS, NUM_TOKENS),
                "dynamic": run_dynamic_engine(gpt, PROMPTS, NUM_TOKENS),
            }
            model.installation.check()
    return found


def test_engines_generate_the_same_tokens() -> None:
    """At P=2 with the one-shot algorithm a token's rounding does not depend on what else is in the batch."""
    first, second = run_ranks(_engines, world_size=2, timeout_s=180.0)
    assert first == second
    for name in ("nccl", "exact", "echo4", "early8"):
        ways = first[name]
        agreeing = sum(tokens == ways["generate"] for tokens in ways.values())
        # Matrix products of other shapes sum in another order, and the most likely token of a random model can change.
        assert agreeing >= 2, (name, ways)


def _graphs(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Tokens of every config, twice of one dynamic engine each: without graphs, with those of layers, of blocks."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    device = initialize(world_size)
    install_stand_ins()
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # graphs need it, and weights follow it
    found: dict[str, dict[str, Any]] = {}
    for name, config in CONFIGS.items():
        found[name] = {}
        for scope in ("none", *SCOPES):
            graphs = {} if scope == "none" else {"cuda_graph_impl": "local", "inference_cuda_graph_scope": scope}
            options = {"num_cuda_graphs": 2, "use_cuda_graphs_for_non_decode_steps": False} if graphs else {}
            with model_options(**graphs):  # one each: a model keeps its graphs, which serve one engine
                gpt = build(SHAPE, SHAPE.num_layers, 64, device)
            use_cached_attention(gpt)
            with InferenceModel(gpt, config) as model:
                communicator = model.installation.communicator
                assert (communicator is not None and communicator.transport.name == "p2p") == (name != "nccl")
                engine = dynamic_engine(gpt, **options)
                found[name][scope] = [generate(engine, PROMPTS, NUM_TOKENS) for _ in range(2)]
                model.installation.check()
                if graphs:
                    torch.cuda.synchronize()
                    delete_cuda_graphs()
                    torch.cuda.set_stream(torch.cuda.default_stream())
    return found


@pytest.fixture(scope="module")
def generated() -> dict[str, dict[str, Any]]:
    first, second = run_ranks(_graphs, world_size=2, timeout_s=360.0)
    assert first == second
    return first


@pytest.mark.parametrize("scope", SCOPES)
def test_the_dynamic_engine_with_graphs_generates_what_it_does_without(
    generated: dict[str, dict[str, Any]], scope: str
) -> None:
    for name in CONFIGS:
        without, again = generated[name]["none"]
        assert without == again, name
        assert generated[name][scope] == [without, without], name
