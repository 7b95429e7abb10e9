"""Forward-only use: Megatron-core's engines, prefill and decode with Echo, on gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks

pytest.importorskip("transformers")
from inference_engines import dynamic_engine, generate, install_stand_ins, run_dynamic_engine, run_static_engine
from presets import ECHO4, PASS_THROUGH
from test_hf import initialize, make_checkpoint

from echo_megatron.config import EchoConfig
from echo_megatron.evaluate.inference import GREEDY, InferenceModel, Sampling, load_model
from echo_megatron.pretrain.traffic import TrafficMeter

NUM_TOKENS = 5
PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14, 15], [21], [31, 32, 33, 34, 35, 36, 37])
LONG = (list(range(90)), [7, 8, 9])  # the first is more than an engine step's 64 tokens
NATIVE = EchoConfig.preset("nccl")
EARLY8 = ECHO4.replace(early_bits=8, early_fraction=0.5)
PAPER = EchoConfig.preset("echo4_paper", min_bytes=0)


@contextmanager
def traced(model: InferenceModel) -> Iterator[list[tuple[int, bool, int, tuple[int, ...]]]]:
    """Site index, whether the state is fresh, bits and shape of every quantized call."""
    trace: list[tuple[int, bool, int, tuple[int, ...]]] = []
    transport = model.installation.communicator.transport  # type: ignore[union-attr]
    original = transport.all_reduce

    def recording(x: Any, site: Any, compensator: Any, *rest: Any) -> Any:
        trace.append((site.idx, compensator.is_fresh, site.bits, tuple(x.shape)))
        return original(x, site, compensator, *rest)

    transport.all_reduce = recording  # type: ignore[method-assign]
    yield trace
    del transport.all_reduce


def without_cache(model: InferenceModel, prompt: list[int]) -> list[int]:
    """Greedy tokens, every one from a pass over all tokens before it."""
    tokens = list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def _engines(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    initialize(world_size)
    install_stand_ins()
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    found: dict[str, Any] = {}
    for name, config in (("nccl", NATIVE), ("through", PASS_THROUGH), ("echo4", ECHO4)):
        with InferenceModel(gpt, config, vocab_size) as model:
            tokens = {"generate": model.generate(PROMPTS, NUM_TOKENS)}
            tokens["no cache"] = [without_cache(model, prompt) for prompt in PROMPTS]
            tokens["static"] = run_static_engine(gpt, PROMPTS, NUM_TOKENS)
            engine = dynamic_engine(gpt)
            tokens["dynamic"] = generate(engine, PROMPTS, NUM_TOKENS)
            tokens["again"] = generate(engine, PROMPTS, NUM_TOKENS)
            found[name] = tokens
            if name in ("nccl", "echo4"):
                options = {"enable_chunked_prefill": True, "max_tokens": 64, "max_sequence_length": 128}
                chunked = run_dynamic_engine(gpt, LONG, NUM_TOKENS, **options)
                found[f"{name}, long"] = {"chunked": chunked, "no cache": [without_cache(model, p) for p in LONG]}
    return found


def test_engines_generate_the_tokens_of_passes_without_a_cache(tmp_path: Path) -> None:
    """In every batch: at P=2 a value is rounded once, in a group within its own token.

    Static, dynamic and chunked-prefill engines differ in which tokens share a message, and in how a prompt is cut.
    """
    make_checkpoint(tmp_path / "hf", "qwen3", hidden_size=64)
    first, second = run_ranks(_engines, 2, tmp_path / "hf")
    assert first == second
    expected = {name: tokens["no cache"] for name, tokens in first.items()}
    assert expected["through"] == expected["nccl"] != expected["echo4"]
    for name, ways in first.items():
        for way, tokens in ways.items():
            assert tokens == expected[name], (name, way)


def _passes(rank: int, world_size: int, folder: Path) -> None:
    """Every forward pass visits all sites in order and begins with a fresh state; no pass sees another one."""
    initialize(world_size)
    install_stand_ins()
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(vocab_size, shape, generator=generator) for shape in ((2, 5), (1, 1), (3, 7), (2, 5))]
    for config in (ECHO4, PAPER, EARLY8):
        alone = []
        for tokens in batches:
            with InferenceModel(gpt, config, vocab_size) as model:
                alone.append(model.logits(tokens))
        with InferenceModel(gpt, config, vocab_size) as model, traced(model) as trace:
            num_sites = sum(site.direction.name == "forward" for site in model.installation.sites)
            for tokens, expected in zip(batches, alone, strict=True):
                assert torch.equal(model.logits(tokens), expected)
            trace.clear()
            for run in (partial(run_static_engine, gpt), partial(run_dynamic_engine, gpt), model.generate):
                run(PROMPTS[:3], 3)
            shapes = set()
            for start in range(0, len(trace), num_sites):
                one = trace[start : start + num_sites]
                assert [idx for idx, *_ in one] == list(range(num_sites))
                assert [fresh for _, fresh, *_ in one] == [True] + [False] * (num_sites - 1)
                assert len({shape for *_, shape in one}) == 1
                bits = [bits for *_, bits, _ in one]
                assert bits == ([8, 8, 4, 4] if config is EARLY8 else [4] * num_sites)
                shapes.add(one[0][3])
            assert len(shapes) > 4  # batch and sequence did change


def test_a_pass_never_sees_the_state_of_another(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "llama", hidden_size=64)
    run_ranks(_passes, 2, tmp_path / "hf")


def _bytes(rank: int, world_size: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Of prefill and decode at the sites; held to what a meter around torch.distributed counts."""
    from megatron.core import parallel_state

    initialize(world_size)
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    group = parallel_state.get_tensor_model_parallel_group()
    found = {}
    batch, sequence = 3, 9
    num_site_values = 4 * batch * 64
    agreements: set[int] = set()
    for name, config in {"nccl": NATIVE, "echo4": ECHO4, "echo8": ECHO4.replace(bits=8), "early8": EARLY8}.items():
        with InferenceModel(gpt, config, vocab_size) as model, TrafficMeter(group) as meter:
            prompts = [list(range(10 * row, 10 * row + sequence)) for row in range(batch)]
            model.generate(prompts, 1)
            prefill = meter.take()
            model.generate(prompts, 2)
            measured = prefill, meter.take() - prefill
            stated = model.sent_bytes(batch, sequence), model.sent_bytes(batch, 1)
        if config is NATIVE:
            assert stated == (0, 0)  # nothing is installed
            native = measured
            stated = 4 * num_site_values * sequence, 4 * num_site_values  # as a ring, fp32
        else:
            # Elsewhere: embedding and logits, as with 16 bits. The rest is the ranks' agreement on every call.
            elsewhere = [total - sites for total, sites in zip(native, found["nccl"], strict=True)]
            agreements |= {m - e - s for m, e, s in zip(measured, elsewhere, stated, strict=True)}
        found[name] = stated
    assert len(agreements) == 1 and 0 <= min(agreements) <= 4 * 100  # a few numbers a call, no payload
    with InferenceModel(gpt, ECHO4.replace(min_bytes=4 * batch * 64 + 1), vocab_size) as model:
        assert model.sent_bytes(batch, 1) == found["nccl"][1]  # too small: at full precision
        assert model.sent_bytes(batch, sequence) == found["echo4"][0]
    return found


def test_bytes_of_prefill_and_decode(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", hidden_size=64)
    first, second = run_ranks(_bytes, 2, tmp_path / "hf")
    assert first == second
    for what in (0, 1):
        four, eight, early = (first[name][what] for name in ("echo4", "echo8", "early8"))
        assert early == (four + eight) // 2  # half of the layers
        assert (
            first["nccl"][what] / four > (7, 5)[what]
        )  # fp32: 32 bits against 4.28, and more where tiles are not full


def _simulated(rank: int, world_size: int, folder: Path, simulated: int | None) -> Any:
    initialize(world_size)
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    with InferenceModel(gpt, ECHO4, vocab_size, simulated) as model:
        tokens = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
        sampling = Sampling(temperature=2.0, top_k=5, seed=3)
        sampled = [model.generate(PROMPTS[:2], 4, sampling=sampling) for _ in range(2)]
        greedy = model.generate(PROMPTS, 4)
        assert sampled[0] == sampled[1] != greedy[:2]
        assert greedy == model.generate(PROMPTS, 4, max_batch=1)
        stop = greedy[0][1]
        ended = model.generate(PROMPTS, 4, stop_ids=[stop])
        assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in greedy]
        assert model.generate(PROMPTS, 4, is_done=lambda new: len(new) == 3) == [row[:3] for row in greedy]
        return model.logits(tokens), greedy, sampled


def test_simulated_ranks_are_the_ranks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3", hidden_size=64)
    ranks = run_ranks(_simulated, 2, tmp_path / "hf", None)
    (simulated,) = run_ranks(_simulated, 1, tmp_path / "hf", 2)
    for logits, *tokens in ranks:
        assert torch.equal(logits, simulated[0])
        assert tokens == list(simulated[1:])


def _of_a_run(rank: int, world_size: int, folder: Path) -> tuple[int, int, list[list[int]]]:
    initialize(world_size)
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    with InferenceModel(gpt, ECHO4, vocab_size, None if world_size > 1 else 2) as model:
        return vocab_size, model.logits(torch.tensor([[1, 2]])).size(-1), model.generate([[1, 2, 3]], 3)


def test_a_run_folder_is_a_checkpoint(tmp_path: Path) -> None:
    from pretrain_runs import make_config, train, write_tokens

    options = ("trainer.max_steps=2", "trainer.val_interval=0", "trainer.save_interval=0")
    config = make_config(tmp_path, write_tokens(tmp_path), "tiny", *options, "data.padded_vocab_size=72")
    assert train(config) == [0, 0]
    ranks = run_ranks(_of_a_run, 2, config.run_dir)
    (simulated,) = run_ranks(_of_a_run, 1, config.run_dir)
    assert ranks[0] == ranks[1] == simulated
    assert simulated[:2] == (64, 64)  # without the padding


def _mistakes(rank: int, world_size: int, folder: Path) -> None:
    initialize(world_size)
    gpt, vocab_size = load_model(folder, torch.device("cpu"))
    with InferenceModel(gpt, NATIVE, vocab_size) as model:
        for prompts, count, options, message in (
            ([[]], 1, {}, "prompt 0: expected at least one token, got none"),
            ([[1], [100]], 1, {}, "prompt 1: expected tokens of 0 to 99, got 100 to 100"),
            ([[1]], 0, {}, "max_new_tokens: expected at least 1, got 0"),
            ([[1]], 1, {"max_batch": 0}, "max_batch: expected at least 1, got 0"),
        ):
            with pytest.raises(ValueError, match=message):
                model.generate(prompts, count, **options)
        assert model.generate([], 1) == []
    query, keys = torch.zeros(2, 1, 4, 16), torch.zeros(3, 1, 4, 16)
    with pytest.raises(ValueError, match="3 keys for 2 queries"):
        gpt.decoder.layers[0].self_attention.core_attention(query, keys, keys, None)


def _inference_optimized(rank: int, world_size: int, folder: Path) -> None:
    initialize(world_size)
    gpt, _ = load_model(folder, torch.device("cpu"))
    linear = gpt.decoder.layers[1].mlp.linear_fc2
    name = "megatron.core.tensor_parallel.inference_layers"
    linear.__class__ = type("InferenceRowParallelLinear", (type(linear),), {"__module__": name})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.linear_fc2 is a InferenceRowParallelLinear, which outside"):
        InferenceModel(gpt, ECHO4)
    for option, value in (("transformer_impl", "inference_optimized"), ("inference_fuse_tp_communication", True)):
        own = getattr(gpt.config, option)
        setattr(gpt.config, option, value)
        with pytest.raises(ValueError, match=rf"{option}={value!r} is not supported"):
            InferenceModel(gpt, ECHO4)
        setattr(gpt.config, option, own)


def test_layers_with_communication_of_their_own_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "qwen3")
    run_ranks(_inference_optimized, 2, tmp_path / "hf")


def test_mistakes_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "hf", "llama")
    run_ranks(_mistakes, 1, tmp_path / "hf")
    for options, message in (
        ({"temperature": 0.0}, "temperature: expected a number above 0"),
        ({"top_k": -1}, "expected top_k >= 0"),
        ({"top_k": 3, "top_p": 0.5}, "expected top_k or top_p"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**options)
    assert Sampling() == GREEDY
