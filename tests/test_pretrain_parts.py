"""Parts of the training loop on their own: core attention, the traffic meter, settings, the checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from echo_megatron.communicator import Communicator
from echo_megatron.config import PAPER_FEEDBACK, Collective, Direction, EchoConfig
from echo_megatron.pretrain.checkpoint_folder import CheckpointFolder
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.pretrain.settings import check_same, run_settings
from echo_megatron.pretrain.traffic import TrafficMeter, layers, mappings
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.sites import Site
from tests.distributed import run_ranks


def _attention(**changes: Any) -> Any:
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from echo_megatron.pretrain.attention import SdpaCoreAttention

    options: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, **options | changes
    )
    return SdpaCoreAttention(config, 1, AttnMaskType.causal, "self")


def test_attention_is_causal_grouped_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(6, 2, heads, 8, generator=generator) for heads in (4, 2, 2))
    actual = _attention()(query, key, value, None)
    assert actual.shape == (6, 2, 32)
    for batch in range(2):
        for head in range(4):
            q, k, v = query[:, batch, head], key[:, batch, head // 2], value[:, batch, head // 2]
            scores = (q @ k.T / 8**0.5).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
            expected = F.softmax(scores, -1) @ v
            torch.testing.assert_close(actual[:, batch, head * 8 : head * 8 + 8], expected, rtol=1e-5, atol=1e-6)


def test_attention_refuses_by_name() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        _attention(attention_dropout=0.1)
    with pytest.raises(ValueError, match="window_size"):
        _attention(window_size=(4, 0))
    attention = _attention()
    query, key = torch.zeros(3, 1, 4, 8), torch.zeros(3, 1, 2, 8)
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="attention_mask"):
        attention(query, key, key, mask)
    with pytest.raises(ValueError, match="packed_seq_params"):
        attention(query, key, key, None, packed_seq_params=object())
    with pytest.raises(ValueError, match="3 keys for 2 queries"):
        attention(query[:2], key, key, None)


def _traffic(rank: int, world_size: int) -> list[int]:
    group = dist.new_group(list(range(world_size)))
    pair = dist.new_group([0, 1])  # fewer ranks: not the tensor-parallel group
    original = dist.all_reduce
    meter = TrafficMeter(group)
    counts = []
    with meter:
        dist.all_reduce(torch.zeros(30), group=group)
        counts.append(meter.take())
        dist.all_reduce(torch.zeros(30), op=dist.ReduceOp.MAX)  # the default group has the same ranks
        counts.append(meter.take())
        if rank < 2:
            dist.all_reduce(torch.zeros(30), group=pair)
        counts.append(meter.take())
        dist.all_gather_into_tensor(torch.zeros(30), torch.zeros(10), group=group)
        counts.append(meter.take())
        dist.all_to_all_single(torch.zeros(30), torch.zeros(30), group=group)
        counts.append(meter.take())
        received, sent = [[1, 2, 3][rank]] * 3, [1, 2, 3]
        dist.all_to_all_single(torch.zeros(sum(received), 2), torch.zeros(6, 2), received, sent, group=group)
        counts.append(meter.take())
        # Where Megatron-core keeps sequence parallelism's calls; of a linear's group, what the real one does.
        mappings.dist_reduce_scatter_func(torch.zeros(10), torch.zeros(30), group=group)
        layers.dist_all_gather_func(torch.zeros(30), torch.zeros(10), group=group)
        counts.append(meter.take())
        communicator = Communicator(group, EchoConfig(min_bytes=0))
        site = Site(0, Direction.forward)
        linear = EchoProcessGroup(communicator, site, 10, lambda: True)
        layers.dist_reduce_scatter_func(torch.zeros(1, 10), torch.zeros(3, 10), group=linear)  # records of 4 bits
        records = communicator.transport.num_sent_bytes(torch.zeros(3, 10), site, Collective.reduce_scatter)
        counts.append(meter.take() - records)
        layers.dist_all_gather_func(torch.zeros(3, 10), torch.zeros(1, 10), group=linear)
        dist.all_reduce(torch.zeros(30), group=linear)
        counts.append(meter.take())
    assert dist.all_reduce is original
    assert layers.dist_all_gather_func is dist.all_gather_into_tensor
    dist.all_reduce(torch.zeros(30), group=group)
    counts.append(meter.take())
    return counts


def test_traffic_meter_counts_what_this_rank_sends() -> None:
    # Of 120 B: a ring sends 2 * 2/3; nothing on the pair; 40 B to each of two; 2/3 of 120 B; rows of 8 B but one's own.
    for rank, counts in enumerate(run_ranks(_traffic, 3)):
        # Agreeing on the quantized call takes 7 numbers of 8 B to each of two.
        assert counts == [160, 160, 0, 80, 80, (6 - [1, 2, 3][rank]) * 8, 80 + 80, 112, 80 + 160, 0]


def test_settings_name_every_difference_and_accept_what_is_listed() -> None:
    saved, current = {"optim.lr": 1.0, "tp_comm.bits": 4, "seed": 1}, {"optim.lr": 2.0, "tp_comm.bits": 16, "seed": 1}
    check_same(saved, dict(saved), [], "runs/a")
    check_same(saved, current, ["tp_comm", "optim.lr"], "runs/a")
    with pytest.raises(ValueError, match=r"runs/a was run with other settings") as caught:
        check_same(saved, current, ["tp"], "runs/a")
    assert r"optim.lr: the run has 1.0, got 2.0" in str(caught.value)
    assert r"tp_comm.bits: the run has 4, got 16" in str(caught.value)
    assert "seed" not in str(caught.value)
    newer = {**saved, "trainer.sequence_parallel": False, "tp_comm.gather_bits": 8}
    check_same(saved, newer, [], "runs/a")  # a run from before these settings had what are their defaults
    with pytest.raises(ValueError, match=r"sequence_parallel: the run has False, got True"):
        check_same(saved, newer | {"trainer.sequence_parallel": True}, [], "runs/a")


@pytest.mark.parametrize(
    ("options", "goes_on"),
    [
        ({}, False),
        (vars(PAPER_FEEDBACK), True),
        ({"residual": "consensus"}, True),
        ({"eta": 0.0}, True),
        ({"bits": 16}, True),
    ],
    ids=["echo4", "averages", "consensus", "uncompensated", "16bit"],
)
def test_a_run_whose_coefficients_were_written_out_goes_on_where_they_are_in_effect(
    options: dict[str, Any], goes_on: bool
) -> None:
    """Before they followed the residual, they were the paper's and stood in the settings of every run."""
    config = PretrainConfig()
    config.tp_comm = EchoConfig(**options)
    current = run_settings(config, {})
    saved = current | {f"tp_comm.{name}": value for name, value in (vars(PAPER_FEEDBACK) | options).items()}
    if goes_on:
        check_same(saved, current, [], "runs/a")
    else:
        with pytest.raises(ValueError, match=r"tp_comm\.eta: the run has 0\.75, got 1\.0"):
            check_same(saved, current, [], "runs/a")


def test_checkpoint_folder_keeps_the_newest_and_never_names_a_partial_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    assert folder.latest() is None
    for step in (1, 2, 3):
        folder.begin(step)
        (folder.partial(step) / "content").write_text(str(step))
        assert folder.latest() == (step - 1 or None)
        folder.commit(step, {"step": step})
    assert folder.latest() == 3
    assert folder.settings(3) == {"step": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "iter_0000003", "latest.json"]
    folder.begin(4)  # killed here
    assert folder.latest() == 3
    folder.begin(5)
    assert not folder.partial(4).exists()
    # Renamed, but killed before latest.json: written again.
    folder.partial(5).rename(folder.whole(5))
    folder.begin(5)
    assert not folder.whole(5).exists()
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("asked", "device", "is_installed", "expected"),
    [
        ("auto", "cuda", True, "transformer_engine"),
        ("auto", "cuda", False, "local"),
        ("auto", "cpu", False, "local"),
        ("local", "cuda", True, "local"),
        ("local", "cpu", False, "local"),
        ("transformer_engine", "cuda", True, "transformer_engine"),
        ("transformer_engine", "cuda", False, "transformer-engine is not installed"),
        ("transformer_engine", "cpu", False, "there is none on the CPU"),
        ("auto", "cpu", True, "which need a GPU"),
    ],
)
def test_whose_layers_a_model_is_made_of(monkeypatch, asked, device, is_installed, expected):
    from echo_megatron.pretrain import device as module
    from echo_megatron.pretrain.schema import Layers

    monkeypatch.setattr(module, "find_spec", lambda name: object() if is_installed else None)
    if expected in Layers.__members__:
        assert module.resolve_layers(Layers[asked], torch.device(device)) is Layers[expected]
    else:
        with pytest.raises(ValueError, match=expected):
            module.resolve_layers(Layers[asked], torch.device(device))
