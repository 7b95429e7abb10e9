"""Simulated ranks against real ones on gloo, bit for bit, from one checkpoint of another tensor-parallel size."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from distributed import run_ranks
from megatron.core import dist_checkpointing, parallel_state  # here: the forked ranks then need not import it
from pretrain_runs import make_config, train, write_tokens

from echo_megatron.evaluate.checkpoint import find_checkpoint, load_run
from echo_megatron.evaluate.settings import parse_settings
from echo_megatron.evaluate.subjects import MegatronSubject
from echo_megatron.pretrain import loop, model, worker
from echo_megatron.pretrain.cpu_shims import install_cpu_shims, seed_all
from echo_megatron.pretrain.schema import Layers

assert dist_checkpointing and loop and model and worker

SETTINGS = (
    *("16bit", "echo4", "echo4_paper", "uncompensated", "echo8_paper", "bits=4,early_bits=8,early_fraction=0.5"),
    *("echo4,residual=consensus,algorithm=two_shot", "echo4_paper,policy=symmetric", "averages"),
)
LENGTH, VOCAB, PADDED = 48, 64, 72
# Two ranks add in one order only, so that gloo's 16-bit sum is the simulation's as well.
RANKS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float32}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at TP=2 of a model that eight ranks divide, whose vocabulary is padded."""
    folder = tmp_path_factory.mktemp("run")
    options = ("trainer.max_steps=2", "trainer.val_interval=0", "trainer.save_interval=0", "model.num_query_groups=8")
    options = (*options, "model.num_attention_heads=8")
    config = make_config(folder, write_tokens(folder), "tiny", *options, f"data.padded_vocab_size={PADDED}")
    assert train(config) == [0, 0]
    return config.run_dir


Found = dict[str, tuple[torch.Tensor, torch.Tensor, float]]


def _evaluates(rank: int, world_size: int, folder: Path, tokens: torch.Tensor) -> Found:
    """Of each setting: logits of all ranks, losses and relative bytes; one process simulates all of `RANKS`."""
    install_cpu_shims()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    seed_all(1)
    found = {}
    for size, dtype in RANKS.items():
        if world_size not in (1, size):
            continue
        gpt = load_run(find_checkpoint(folder), world_size, dtype, Layers.local, torch.device("cpu"))
        subject = MegatronSubject(gpt, VOCAB, {}, world_size == 1)
        for setting in parse_settings(SETTINGS):
            config = setting.config.replace(min_bytes=0)
            with torch.no_grad(), subject.applied(config, size, tokens.numel()) as applied:
                logits = subject.logits(tokens[:, :-1])
                losses = subject.losses(tokens)
            parts = [torch.empty_like(logits) for _ in range(world_size)]
            torch.distributed.all_gather(parts, logits.contiguous())
            found[f"{size} {setting.name}"] = (torch.cat(parts, -1), losses, applied.bytes_relative)
    return found


def test_simulated_ranks_give_the_bits_of_real_ones(run_folder: Path) -> None:
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    (simulated,) = run_ranks(_evaluates, 1, run_folder, tokens)
    real: Found = {}
    for world_size in RANKS:
        ranks = run_ranks(_evaluates, world_size, run_folder, tokens)
        for name, (logits, losses, _) in ranks[0].items():
            for other in ranks[1:]:
                assert torch.equal(other[name][0], logits) and torch.equal(other[name][1], losses), name
            real[name] = (logits, losses, sum(one[name][2] for one in ranks) / world_size)
    assert real.keys() == simulated.keys() and len(real) == len(RANKS) * len(SETTINGS)
    for name, (logits, losses, num_bytes) in real.items():
        assert (logits[..., VOCAB:] < -1e30).all(), "padded rows take no probability"
        assert num_bytes == pytest.approx(simulated[name][2], rel=1e-12)
        if name in ("4 16bit", "8 16bit"):  # gloo adds more than two ranks in an order of its own
            torch.testing.assert_close(logits, simulated[name][0], rtol=1e-4, atol=1e-5)
            continue
        assert torch.equal(logits, simulated[name][0]), name
        assert torch.equal(losses, simulated[name][1]), name
    kept = {name: logits for name, (logits, _, _) in real.items()}
    for size in RANKS:
        names = [f"{size} {setting}" for setting in SETTINGS]
        equal = [(a, b) for a, b in itertools.combinations(names, 2) if torch.equal(kept[a], kept[b])]
        assert not equal, "every setting computes something of its own"
    relative = {name: num_bytes for name, (_, _, num_bytes) in real.items()}
    assert relative["4 16bit"] == 1.0
    # 4.28 and 8.28 of 16 bits; headers weigh more in short records.
    assert 0.26 < relative["2 echo4"] < 0.32 and 0.5 < relative["2 echo8_paper"] < 0.57
    early = "2 bits=4,early_bits=8,early_fraction=0.5"
    assert relative[early] == pytest.approx((relative["2 echo4"] + relative["2 echo8_paper"]) / 2, abs=0.02)
