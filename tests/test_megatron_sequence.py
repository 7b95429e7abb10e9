"""install() with sequence parallelism on the real megatron-core: what is quantized, by the reference's bits, and what
is not; schedules, recompute, experts, context parallelism, checkpoints."""

from collections import Counter
from itertools import chain

import megatron.core.tensor_parallel.layers  # noqa: F401  # before the processes fork: they need not import it again
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from presets import ECHO4, PASS_THROUGH
from tiny_megatron import HIDDEN, build_trainer, gradients, run_step, train

from echo_megatron import EchoConfig, install
from echo_megatron.config import Direction
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.reference import SimulatedGroup

SEQUENCE_PARALLEL = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def record_calls(communicator):
    """(collective, site, x, result) of every call that the transport makes, in their order."""
    log = []

    def recording(name, original):
        def call(x, site, *rest):
            before = x.clone()
            result = original(x, site, *rest)
            log.append((name, site, before, getattr(result, "output", result).clone()))
            return result

        return call

    for name in ("all_reduce", "reduce_scatter", "all_gather"):
        setattr(communicator.transport, name, recording(name, getattr(communicator.transport, name)))
    return log


def trained(rank, world_size, layout, arms, steps=2, **options):
    """Losses and gradients of each arm (None: stock), and the calls of the last one."""
    from megatron.core import parallel_state

    results, log = [], []
    for config in arms:
        trainer = build_trainer(**layout, **SEQUENCE_PARALLEL)
        if config:
            installation = install(trainer.chunks, config)
            log = record_calls(installation.communicator)
            tp_ranks = dist.get_process_group_ranks(installation.communicator.group)
        results.append(train(trainer, steps, **options))
        if config and config.min_bytes:
            assert not log, "nothing is quantized"
        parallel_state.destroy_model_parallel()
    return results, log, tp_ranks


class GatheringAttention(torch.nn.Module):
    """Attention over all context-parallel ranks' keys: what megatron-core leaves to Transformer Engine."""

    def __init__(self, config, **_):
        super().__init__()
        self.config = config

    def forward(self, query, key, value, *_, **__):
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        group = parallel_state.get_context_parallel_group()
        k, v = (gather_from_sequence_parallel_region(x, group=group) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, k, v))
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return context.permute(2, 0, 1, 3).flatten(2)


def gathering(spec):
    spec.submodules.self_attention.submodules.core_attention = GatheringAttention


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"tp": 2}, {"microbatches": 2, "sequence": 6}),
        ({"tp": 4, "num_layers": 2}, {"sequence": 12, "batch_size": 3}),
        ({"tp": 2, "pp": 2, "vpp": 2}, {"microbatches": 2, "sequence": 16}),
        ({"tp": 2, "cp": 2, "num_layers": 2, "adapt_spec": gathering}, {"sequence": 16}),
    ],
    ids=["tp2", "tp4", "tp2-pp2-vpp2", "tp2-cp2"],
)
def test_pass_through_is_stock_and_every_call_is_the_reference_s(layout, options):
    """Bit for bit; each linear sums once and gathers as Megatron does, its input again for the weight gradient."""
    world_size = layout["tp"] * layout.get("pp", 1) * layout.get("cp", 1)
    num_layers, microbatches = layout.get("num_layers", 4) // layout.get("pp", 1), options.get("microbatches", 1)
    ranks = run_ranks(trained_with, world_size, layout, options)
    for (stock, passed, echo), _, _ in ranks:
        assert passed[0] == stock[0]
        assert all(torch.equal(passed[1][name], gradient) for name, gradient in stock[1].items())
        assert echo[0] != stock[0] or not echo[0][0], "a stage that is not the last has no losses"
        flat = list(zip(chain(*echo[0]), chain(*stock[0]), strict=True))
        assert all(abs(a - b) < 0.03 for a, b in flat)
    for tp_ranks in {tuple(tp_ranks) for _, _, tp_ranks in ranks}:
        logs = [ranks[rank][1] for rank in tp_ranks]
        simulated = SimulatedGroup(len(tp_ranks), ECHO4)
        kinds = Counter()
        gathered = {}
        for calls in zip(*logs, strict=True):
            name, site = calls[0][:2]
            assert all(call[:2] == (name, site) for call in calls)
            xs, results = [call[2] for call in calls], [call[3] for call in calls]
            kinds[name, site.direction.name] += 1
            if name == "reduce_scatter":
                expected = simulated.reduce_scatter(xs, site)
            else:
                assert site.bits == 8
                expected = [simulated.all_gather(xs, 8)] * len(xs)
                if site.direction is Direction.backward:  # a column-parallel linear's
                    gathered.setdefault(site, []).append(results[0])
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), (name, site)
        per_direction = 2 * num_layers * 2 * microbatches  # two sites a layer, two steps
        assert kinds == {
            ("reduce_scatter", "forward"): per_direction,
            ("reduce_scatter", "backward"): per_direction,
            ("all_gather", "backward"): 2 * per_direction,
            ("all_gather", "forward"): per_direction,
        }
        if not layout.get("vpp"):
            for results in gathered.values():
                pairs = zip(results[::2], results[1::2], strict=True)
                assert all(torch.equal(first, again) for first, again in pairs), (
                    "the weight gradient sees the forward's"
                )


def trained_with(rank, world_size, layout, options):
    return trained(rank, world_size, layout, (None, PASS_THROUGH, ECHO4), **options)


def variants(rank, world_size):
    """Runs of one model that have to agree, or to differ, by name."""
    from megatron.core import parallel_state

    results = {}

    def run(name, config=ECHO4, disturb=False, parallel=True, steps=2, **options):
        trainer = build_trainer(tp=world_size, num_layers=2, sequence_parallel=parallel, **options)
        installation = install(trainer.chunks, config) if config else None
        log = record_calls(installation.communicator) if config else []
        losses = []
        for step in range(steps):
            losses += run_step(trainer, step, microbatches=2)
            if disturb:
                run_step(trainer, 70, evaluate=True)
                run_step(trainer, 71, sequence=24, batch_size=1, update=False)
        kinds = Counter((call, site.direction.name) for call, site, *_ in log)
        kept = installation.communicator.replays.num_bytes() if config else 0
        results[name] = (losses, None if disturb else gradients(trainer), kinds, kept)
        parallel_state.destroy_model_parallel()

    run("stock", None)
    run("plain")
    run("full recompute", **FULL)
    run("mlp recompute", recompute_granularity="selective", recompute_modules=["mlp"])
    run("disturbed", disturb=True)
    run("exact gathers", ECHO4.replace(gather_bits=16))
    run("forward only", ECHO4.replace(directions=["forward"]))
    run("backward only", ECHO4.replace(directions=["backward"]))
    for name, config in (("stock of frozen", None), ("pass-through of frozen", PASS_THROUGH), ("frozen", ECHO4)):
        run(name, config, adapt=lambda model: model.decoder.layers.requires_grad_(False), steps=1)
    run("all-reduce", parallel=False)
    run("stock of all-reduce", None, parallel=False)
    return results


def test_variants_of_one_model():
    """Recompute and what runs in between change nothing; options choose what is quantized."""
    ranks = run_ranks(variants, 2)
    for results in ranks:
        losses, grads, kinds, _ = results["plain"]
        assert losses == ranks[0]["plain"][0] and losses != results["stock"][0]
        replicated = [name for name in grads if "layernorm" in name]
        assert len(replicated) == 4 * 2 + 1
        assert all(torch.equal(grads[name], ranks[0]["plain"][1][name]) for name in replicated)
        for name in ("full recompute", "mlp recompute"):
            again, same, calls, kept = results[name]
            assert again == losses and all(torch.equal(same[key], grad) for key, grad in grads.items()), name
            assert kept == 0
            sums = {key: count for key, count in calls.items() if key[0] == "reduce_scatter"}
            assert sums == {key: count for key, count in kinds.items() if key[0] == "reduce_scatter"}, name
        assert results["disturbed"][0] == losses
        one = 2 * 2 * 2 * 2  # steps, microbatches, layers, sites a layer
        assert kinds == {
            ("reduce_scatter", "forward"): one, ("reduce_scatter", "backward"): one,
            ("all_gather", "backward"): 2 * one, ("all_gather", "forward"): one,
        }  # fmt: skip
        assert results["exact gathers"][2] == {
            ("reduce_scatter", "forward"): one, ("reduce_scatter", "backward"): one,
        }  # fmt: skip
        # The input that a column-parallel linear gathers again belongs to the forward pass.
        assert results["forward only"][2] == {
            ("reduce_scatter", "forward"): one, ("all_gather", "backward"): 2 * one,
        }  # fmt: skip
        assert results["backward only"][2] == {
            ("reduce_scatter", "backward"): one, ("all_gather", "forward"): one,
        }  # fmt: skip
        assert results["backward only"][0][0] == results["stock"][0][0], "its first forward pass is exact"
        stock, passed, frozen = (results[name] for name in ("stock of frozen", "pass-through of frozen", "frozen"))
        assert passed[:2] != frozen[:2] and passed[0] == stock[0]
        assert all(torch.equal(passed[1][key], grad) for key, grad in stock[1].items())
        assert frozen[2] == {
            ("reduce_scatter", "forward"): one // 2, ("reduce_scatter", "backward"): one // 2,
            ("all_gather", "backward"): one // 2, ("all_gather", "forward"): one // 2,
        }, "as an adapter's base: no weight gradient, and no input that is gathered again"  # fmt: skip
        assert results["all-reduce"][2] == {("all_reduce", "forward"): one, ("all_reduce", "backward"): one}
        for first, second in (("plain", "all-reduce"), ("plain", "stock"), ("stock", "stock of all-reduce")):
            pairs = zip(results[first][0], results[second][0], strict=True)
            assert all(abs(a - b) < 0.003 * b for a, b in pairs), (first, second)


def experts(rank, world_size):
    """A model of experts, and the table of what is covered."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.15 and 0.16 forget it without Transformer Engine
    results = []
    for config in (None, PASS_THROUGH, ECHO4):
        trainer = build_trainer(
            tp=world_size, num_layers=2, num_experts=4, moe_router_topk=2, moe_token_dispatcher_type="allgather",
            **SEQUENCE_PARALLEL,
        )  # fmt: skip
        if config:
            installation = install(trainer.chunks, config)
            groups = {
                name: module.tp_group
                for name, module in trainer.chunks[0].named_modules()
                if isinstance(getattr(module, "tp_group", None), EchoProcessGroup)
            }
            assert sorted(name.rpartition(".")[2] for name in groups) == ["linear_proj"] * 2 + ["linear_qkv"] * 2
            assert {site.name.rpartition(".")[2] for site in installation.sites} == {"linear_proj", "linear_qkv"}
            lines = installation.report().splitlines()
            assert "experts" in lines[-1] and "router" not in "".join(lines[:-1])
        results.append(train(trainer))
        parallel_state.destroy_model_parallel()
    return results


def test_experts_are_left_alone():
    for (stock, stock_gradients), (passed, grads), (echo, _) in run_ranks(experts, 2):
        assert passed == stock and all(torch.equal(grads[name], grad) for name, grad in stock_gradients.items())
        assert echo != stock
        assert all(abs(a - b) < 0.03 for a, b in zip(chain(*echo), chain(*stock), strict=True))


def installed(rank, world_size, folder):
    """Refusals, the table, a checkpoint that moves between communications, and an exception in the middle of a pass."""
    from pathlib import Path

    from megatron.core import dist_checkpointing, parallel_state

    trainer = build_trainer(tp=world_size, num_layers=2, **SEQUENCE_PARALLEL)
    for config in (EchoConfig.preset("echo4_paper"), ECHO4.replace(backward_residual="consensus")):
        with pytest.raises(ValueError, match=r"residual: expected local with sequence parallelism, got consensus"):
            install(trainer.chunks, config)
    linear = trainer.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    before = linear.tp_group
    installation = install(trainer.chunks, ECHO4.replace(early_bits=8, gather_bits=4))
    report = installation.report().splitlines()
    installation.uninstall()
    assert linear.tp_group is before
    installation = install(trainer.chunks, ECHO4)
    losses = [run_step(trainer, 0)]
    path = Path(folder) / "saved"
    if rank == 0:
        path.mkdir()
    dist.barrier()
    dist_checkpointing.save(trainer.chunks[0].module.sharded_state_dict(), str(path))
    original = installation.communicator.transport.reduce_scatter

    def failing(x, site, *rest):
        if site.direction is Direction.backward and site.idx == 1:
            raise RuntimeError("planted failure at a site")
        return original(x, site, *rest)

    installation.communicator.transport.reduce_scatter = failing
    with pytest.raises(RuntimeError, match="planted failure at a site"):
        run_step(trainer, 5, update=False)
    installation.communicator.transport.reduce_scatter = original
    losses.append(run_step(trainer, 9, evaluate=True))
    parallel_state.destroy_model_parallel()
    for config, parallel in ((ECHO4, True), (None, True), (ECHO4, False)):
        trainer = build_trainer(tp=world_size, num_layers=2, sequence_parallel=parallel)
        if config:
            install(trainer.chunks, config)
        trainer.chunks[0].module.load_state_dict(
            dist_checkpointing.load(trainer.chunks[0].module.sharded_state_dict(), str(path))
        )
        losses.append(run_step(trainer, 9, evaluate=True))
        parallel_state.destroy_model_parallel()
    return report, losses


def test_refusals_table_checkpoints_and_an_exception_inside_a_pass(tmp_path):
    ranks = run_ranks(installed, 2, str(tmp_path))
    shape = f"[…, {HIDDEN}]"
    for report, (_, after_failure, reloaded, exact, all_reduced) in ranks:
        cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in report[2:-1]]
        assert [row[:4] + row[5:6] for row in cells] == [
            ["0", "self_attention.linear_proj", "forward", "reduce-scatter", "8"],
            ["0", "mlp.linear_fc2", "forward", "reduce-scatter", "8"],
            ["1", "self_attention.linear_proj", "forward", "reduce-scatter", "4"],
            ["1", "mlp.linear_fc2", "forward", "reduce-scatter", "4"],
            ["0-1", "mlp.linear_fc1", "backward", "reduce-scatter", "4"],
            ["0-1", "self_attention.linear_qkv", "backward", "reduce-scatter", "4"],
            ["0-1", "self_attention.linear_qkv", "forward", "all-gather", "4"],
            ["0-1", "mlp.linear_fc1", "forward", "all-gather", "4"],
            ["0-1", "mlp.linear_fc2", "backward", "all-gather", "4"],
            ["0-1", "self_attention.linear_proj", "backward", "all-gather", "4"],
        ]
        assert {row[4] for row in cells} == {shape}
        assert reloaded == after_failure, "no state is left behind"
        assert 0 < abs(exact[0] - reloaded[0]) < 0.02 and 0 < abs(all_reduced[0] - reloaded[0]) < 0.02
