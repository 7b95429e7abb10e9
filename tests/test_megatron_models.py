"""install() finds sites by what modules are: adapters, multi-token prediction, several stacks, versions, the report."""

import sys
from types import ModuleType

import pytest
import torch
from distributed import run_ranks
from presets import ECHO4, PASS_THROUGH
from tiny_megatron import HIDDEN, VOCAB, build_trainer, gradients, record_sites, run_step
from torch import nn

from echo_megatron import install
from echo_megatron.integrations import versions
from echo_megatron.integrations.megatron_report import _ranges
from echo_megatron.process_group import EchoProcessGroup


class Adapted(nn.Module):
    """As the wrappers of NeMo's and Megatron-Bridge's PEFT: the frozen linear in `to_wrap`, beside an adapter."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.to_wrap = linear
        for parameter in linear.parameters():
            parameter.requires_grad_(False)
        outputs, inputs = linear.weight.shape
        splits_output = type(linear).__name__ == "ColumnParallelLinear"
        self.adapter = nn.Sequential(nn.Linear(inputs, rank), nn.Linear(rank, outputs)) if splits_output else None

    def forward(self, x):
        output, bias = self.to_wrap(x)
        return output if self.adapter is None else output + self.adapter(x), bias


def adapt(model):
    for layer in model.decoder.layers:
        layer.self_attention.linear_qkv = Adapted(layer.self_attention.linear_qkv)
        layer.mlp.linear_fc2 = Adapted(layer.mlp.linear_fc2)


def with_adapters(rank, world_size):
    from megatron.core import parallel_state

    results = []
    for config in (None, PASS_THROUGH, ECHO4):
        trainer = build_trainer(tp=world_size, num_layers=2, adapt=adapt)
        installation = install(trainer.chunks, config) if config else None
        if config is ECHO4:
            record_sites(trainer, installation.communicator)
            names = {site.name for site in installation.sites}
            assert "layers.0.mlp.linear_fc2" in names and not any("to_wrap" in name for name in names)
        results.append(([run_step(trainer, step) for step in range(2)], gradients(trainer), len(trainer.trace)))
        if installation:
            installation.uninstall()
            groups = [getattr(module, "tp_group", None) for module in trainer.chunks[0].modules()]
            assert not any(isinstance(group, EchoProcessGroup) for group in groups)
        parallel_state.destroy_model_parallel()
    return results


def test_linears_inside_adapters_are_covered():
    for stock, passed, echo in run_ranks(with_adapters, 2):
        assert passed[0] == stock[0] and echo[0] != stock[0]
        assert all(torch.equal(passed[1][name], gradient) for name, gradient in stock[1].items())
        assert echo[2] == 2 * 8  # two steps of 2 layers, 4 sites each: the adapters' frozen bases too


class TEFusedLoRALinear(Adapted):
    """Named like NeMo's, whose forward uses the wrapped linear's weight alone."""


def fused_adapter(rank, world_size):
    trainer = build_trainer(tp=world_size, num_layers=1)
    mlp = trainer.chunks[0].module.decoder.layers[0].mlp
    mlp.linear_fc2 = TEFusedLoRALinear(mlp.linear_fc2)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.linear_fc2 is a TEFusedLoRALinear.*tp_comm=nccl"):
        install(trainer.chunks, ECHO4)
    return True


def test_adapters_that_replace_the_all_reduce_are_refused():
    assert run_ranks(fused_adapter, 2) == [True] * 2


def sharded(rank, world_size):
    from megatron.core import parallel_state

    results = []
    for config in (None, PASS_THROUGH, ECHO4):
        trainer = build_trainer(tp=2, num_layers=2, shards_optimizer=True)
        if config:
            install(trainer.chunks, config)
        results.append([run_step(trainer, step) for step in range(3)])
        parallel_state.destroy_model_parallel()
    return results


def test_the_distributed_optimizer_trains_the_same():
    """Tensor parallel 2 x data parallel 2, each data-parallel rank with half of the optimizer's state."""
    for stock, passed, echo in run_ranks(sharded, 4):
        assert passed == stock and echo != stock
        assert torch.allclose(torch.tensor(echo), torch.tensor(stock), atol=0.03)


class Tower(nn.Module):
    """Two stacks of transformer layers in one chunk; the second is built first and runs last."""

    def __init__(self, first, second):
        super().__init__()
        self.config = first.config
        self.text, self.vision = second, first

    def forward(self, tokens, position, mask):
        output = self.vision(tokens, position, mask)
        return output.float().sum() + self.text(tokens, position, mask).float().sum()


def two_stacks(rank, world_size):
    from megatron.core import parallel_state

    models = []
    for seed in range(2):
        trainer = build_trainer(tp=world_size, num_layers=2 + seed)
        models.append(trainer.chunks[0].module)
        if not seed:
            parallel_state.destroy_model_parallel()
    group = models[1].decoder.layers[0].mlp.linear_fc1.tp_group
    for module in models[0].modules():
        if hasattr(module, "tp_group"):
            module.tp_group = group
    tower = Tower(*models)
    installation = install(tower, ECHO4)
    assert {site.chunk for site in installation.sites} == {0, 1}
    assert "vision.decoder.layers.1.mlp.linear_fc1" in {site.name for site in installation.sites}
    assert "text.decoder.layers.*.mlp.linear_fc2" in installation.report()
    fresh = []
    original = installation.communicator.transport.all_reduce

    def recording(x, site, compensator, *rest):
        fresh.append((site.direction.name, site.chunk, site.idx, compensator.is_fresh))
        return original(x, site, compensator, *rest)

    installation.communicator.transport.all_reduce = recording
    tokens = torch.randint(0, VOCAB, (2, 16))
    position = torch.arange(16).expand(2, 16)
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    for _ in range(2):
        tower(tokens, position, mask).backward()
    return fresh


def test_each_stack_of_layers_has_passes_of_its_own():
    for fresh in run_ranks(two_stacks, 2):
        one = len(fresh) // 2
        assert fresh[:one] == fresh[one:] and one == 4 * 2 + 4 * 3
        assert all(is_fresh == (idx == 0) for _, _, idx, is_fresh in fresh)
        assert [chunk for name, chunk, *_ in fresh[:one] if name == "forward"] == [1] * 4 + [0] * 6


def predicted(rank, world_size):
    """Multi-token prediction: its layer stays on the real group."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    trainer = build_trainer(
        tp=world_size,
        num_layers=2,
        mtp_num_layers=1,
        mtp_loss_scaling_factor=0.1,
        model_options=lambda config: {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, False)},
    )
    installation = install(trainer.chunks, ECHO4)
    record_sites(trainer, installation.communicator)
    model = trainer.chunks[0].module
    groups = {name: module.tp_group for name, module in model.mtp.named_modules() if hasattr(module, "tp_group")}
    assert any("linear_fc2" in name for name in groups)
    assert not any(isinstance(group, EchoProcessGroup) for group in groups.values())
    assert "mtp.layers.*" in installation.report().splitlines()[-1]
    losses = [run_step(trainer, step) for step in range(2)]
    return losses, len(installation.sites), len(trainer.trace)


def test_multi_token_prediction_keeps_its_communication():
    ranks = run_ranks(predicted, 2)
    for losses, sites, calls in ranks:
        assert sites == 8 and calls == 2 * 8
        assert losses == ranks[0][0] and all(torch.tensor(losses).isfinite().flatten())


def reported(rank, world_size):
    trainer = build_trainer(tp=world_size, num_layers=3)
    return install(trainer.chunks, ECHO4.replace(early_bits=8, early_fraction=0.34)).report().splitlines()


def test_the_report_names_every_site_and_what_stays():
    lines = run_ranks(reported, 2)[0]
    assert lines[0].startswith("echo: 4-bit rotated")
    assert lines[1].split() == ["layers", "module", "direction", "collective", "shape", "bits", "transport"]
    rows = [line.split("  ") for line in lines[2:-1]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    shape = f"[…, {HIDDEN}]"
    assert cells == [
        ["0-1", "self_attention.linear_proj", "forward", "all-reduce", shape, "8", "collective"],
        ["0-1", "mlp.linear_fc2", "forward", "all-reduce", shape, "8", "collective"],
        ["2", "self_attention.linear_proj", "forward", "all-reduce", shape, "4", "collective"],
        ["2", "mlp.linear_fc2", "forward", "all-reduce", shape, "4", "collective"],
        ["0-2", "mlp.linear_fc1", "backward", "all-reduce", shape, "4", "collective"],
        ["0-2", "self_attention.linear_qkv", "backward", "all-reduce", shape, "4", "collective"],
    ]
    assert lines[-1].startswith("not quantized: ")
    assert all(word in lines[-1] for word in ("embedding.word_embeddings", "output_layer", "cross-entropy"))


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), ([2, 1, 0, 1], "0-2"), ([0, 1, 3, 5, 6], "0-1, 3, 5-6"), ([], "")]
)
def test_layer_ranges(numbers, text):
    assert _ranges(numbers) == text


def with_a_stage_of_no_layers(rank, world_size):
    """TP=2 x PP=2: the first stage has the embedding alone."""
    trainer = build_trainer(tp=2, pp=2, num_layers=2)
    stage = rank // 2
    if stage == 0:
        trainer.chunks[0].module.decoder.layers = nn.ModuleList()
    installation = install(trainer.chunks, ECHO4)
    installation.check()
    installation.uninstall()
    return stage, len(installation.sites), "nothing installed" in installation.report()


def test_a_pipeline_stage_without_layers_has_nothing_installed():
    assert sorted(run_ranks(with_a_stage_of_no_layers, 4)) == [(0, 0, True)] * 2 + [(1, 0, False)] * 2


def graphed(rank, world_size):
    trainer = build_trainer(tp=world_size, num_layers=1)
    trainer.config.cuda_graph_impl = "local"
    with pytest.raises(ValueError, match=r"transport collective.*CUDA graph can't capture.*cuda_graph_impl=none"):
        install(trainer.chunks, ECHO4)
    groups = [getattr(module, "tp_group", None) for module in trainer.chunks[0].modules()]
    assert not any(isinstance(group, EchoProcessGroup) for group in groups)
    trainer.config.cuda_graph_impl = "none"
    assert not install(trainer.chunks, ECHO4).uses_cuda_graphs
    with pytest.raises(ValueError, match=r"layers\.0\.self_attention\.linear_proj has Echo installed already"):
        install(trainer.chunks, ECHO4)
    return True


def test_graphs_without_p2p_and_a_second_installation_are_refused():
    assert run_ranks(graphed, 2) == [True] * 2


def test_a_missing_symbol_names_itself_and_the_versions(monkeypatch):
    empty = ModuleType("megatron.core.transformer.transformer_layer")
    monkeypatch.setitem(sys.modules, empty.__name__, empty)
    with pytest.raises(ImportError, match=r"transformer_layer\.TransformerLayer.*Expected megatron-core 0\.15\.3 to"):
        versions.require(empty.__name__, "TransformerLayer")
    with pytest.raises(ImportError, match=r"no megatron\.core\.none\.Thing"):
        versions.require("megatron.core.none", "Thing")
    assert versions.installed("no-such-distribution") == "(not installed)"
