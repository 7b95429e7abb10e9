"""install() on the real megatron-core: schedules, recompute, evaluation, failures, checkpoints, refusals."""

from itertools import chain
from types import SimpleNamespace

import megatron.core.tensor_parallel.layers  # noqa: F401  # before the processes fork: they need not import it again
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from presets import ECHO4, PASS_THROUGH
from tiny_megatron import HIDDEN, build_trainer, gradients, record_sites, run_step, train

from echo_megatron import EchoConfig, install
from echo_megatron.config import Direction
from echo_megatron.integrations.megatron_checks import _REFUSALS, check_model
from echo_megatron.process_group import EchoProcessGroup


def stock_and_echo(rank, world_size, config):
    from megatron.core import parallel_state

    results = []
    for echo in (None, config):
        trainer = build_trainer(tp=world_size)
        if echo:
            installation = install(trainer.chunks, echo)
            assert len(installation.sites) == 16 and "linear_proj" in installation.report()
        results.append(train(trainer, 3, microbatches=2))
        parallel_state.destroy_model_parallel()
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_pass_through_is_stock_bit_for_bit(world_size):
    for (stock_losses, stock_gradients), (losses, grads) in run_ranks(stock_and_echo, world_size, PASS_THROUGH):
        assert losses == stock_losses
        assert all(torch.equal(grads[name], expected) for name, expected in stock_gradients.items())


@pytest.mark.parametrize("preset", ["echo4", "echo4_paper", "echo8"])
def test_quantized_training_follows_stock_and_ranks_agree(preset):
    config = EchoConfig.preset(preset, min_bytes=0)
    ranks = run_ranks(stock_and_echo, 2, config)
    for (stock_losses, _), (losses, _) in ranks:
        flat, stock = list(chain(*losses)), list(chain(*stock_losses))
        assert flat != stock and max(abs(a - b) for a, b in zip(flat, stock, strict=True)) < 0.03
    assert ranks[0][1][0] == ranks[1][1][0]  # losses, to the last bit
    first, second = (rank[1][1] for rank in ranks)
    replicated = [name for name in first if "layernorm" in name]
    assert len(replicated) == 4 * 4 + 1
    assert all(torch.equal(first[name], second[name]) for name in replicated)


def traced(rank, world_size, layout, microbatches):
    trainer = build_trainer(**layout)
    installation = install(trainer.chunks, ECHO4)
    record_sites(trainer, installation.communicator)
    losses = [run_step(trainer, step, microbatches=microbatches) for step in range(2)]
    return losses, trainer.trace, installation.communicator.replays.num_bytes()


def passes(trace, direction):
    """The trace of one direction cut at site 0: one list of (chunk, idx) a pass."""
    cut = []
    for name, chunk, idx in trace:
        if name == direction:
            if idx == 0:
                cut.append([])
            cut[-1].append((chunk, idx))
    return cut


@pytest.mark.parametrize(
    ("layout", "microbatches", "sites"),
    [
        ({"tp": 2}, 3, 8),
        ({"tp": 2, "pp": 2}, 4, 4),
        ({"tp": 2, "pp": 2, "vpp": 2}, 4, 2),
        ({"tp": 2, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 2, 8),
    ],
)
def test_every_pass_visits_its_sites_once_in_order(layout, microbatches, sites):
    """No pipeline, 1F1B, interleaved 1F1B, recompute: the clock sees whole passes, two sites a layer and direction."""
    chunks = layout.get("vpp", 1)
    for losses, trace, kept in run_ranks(traced, 2 * layout.get("pp", 1), layout, microbatches):
        for direction in ("forward", "backward"):
            cut = passes(trace, direction)
            assert len(cut) == 2 * microbatches * chunks
            for one in cut:
                assert [idx for _, idx in one] == list(range(sites)) and len({chunk for chunk, _ in one}) == 1
        assert kept == 0
        assert all(0 < loss < 10 for step in losses for loss in step)


def recomputed(rank, world_size, options):
    from megatron.core import parallel_state

    results = []
    for extra in ({}, options):
        trainer = build_trainer(tp=world_size, **extra)
        installation = install(trainer.chunks, ECHO4)
        record_sites(trainer, installation.communicator)
        states, compensators = [], installation.communicator._compensators
        for compensator in compensators.values():
            original = compensator.update

            def recording(residual, original=original, states=states):
                states.append(residual.double().sum().item())
                original(residual)

            compensator.update = recording
        held = []
        for chunk in trainer.chunks:
            chunk.register_forward_hook(
                lambda *_, held=held, cache=installation.communicator.replays: held.append(cache.num_bytes())
            )
        results.append((train(trainer, 2, microbatches=2), trainer.trace, states, held))
        parallel_state.destroy_model_parallel()
    return results


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    "options",
    [
        FULL,
        {**FULL, "recompute_num_layers": 2},
        {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ],
    ids=["full", "full-2", "block-3", "mlp", "core_attn"],
)
def test_recompute_gives_the_same_bits_calls_and_state_trace(options):
    for plain, again in run_ranks(recomputed, 2, options):
        (losses, grads), trace, states, held = plain
        (losses2, grads2), trace2, states2, held2 = again
        assert losses2 == losses and trace2 == trace and states2 == states
        assert all(torch.equal(grads[name], grads2[name]) for name in grads)
        assert set(held) == {0}
        kept_sites = {"full": 8, "selective": 4}[options["recompute_granularity"]]
        if options.get("recompute_method") == "block":
            kept_sites = 6
        if options.get("recompute_modules") == ["core_attn"]:
            kept_sites = 0
        values = 2 * 16 * HIDDEN
        assert set(held2) == {kept_sites * 2 * (values * 17 // 32 + 16)}  # one-shot at P=2: two records of 4.25 bits


def disturbed(rank, world_size, disturbance, options):
    from megatron.core import parallel_state

    results = []
    for active in (False, True):
        trainer = build_trainer(tp=world_size, **options)
        install(trainer.chunks, ECHO4)
        losses = []
        for step in range(3):
            losses.append(run_step(trainer, step))
            if not active:
                continue
            if disturbance == "evaluation":
                run_step(trainer, 77, evaluate=True, microbatches=2)
            elif disturbance == "shape":
                run_step(trainer, 78, sequence=24, batch_size=1, update=False)
            else:
                with pytest.raises(RuntimeError, match="planted failure"):
                    run_step(trainer, 79, fail=disturbance, update=False)
        results.append((losses, gradients(trainer) if disturbance == "evaluation" else None))
        parallel_state.destroy_model_parallel()
    return results


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recompute"])
@pytest.mark.parametrize("disturbance", ["evaluation", "shape", "forward", "backward"])
def test_nothing_in_between_leaves_state_behind(disturbance, options):
    for (calm, calm_gradients), (losses, grads) in run_ranks(disturbed, 2, disturbance, options):
        assert losses == calm
        if grads is not None:
            assert all(torch.equal(grads[name], calm_gradients[name]) for name in grads)


def interrupted_in_the_middle(rank, world_size):
    """An exception inside a pass, at a site in the middle, in both directions."""
    from megatron.core import parallel_state

    results = []
    for direction in (None, "forward", "backward"):
        trainer = build_trainer(tp=world_size)
        installation = install(trainer.chunks, ECHO4)
        losses = [run_step(trainer, 0)]
        if direction:
            original = installation.communicator.transport.all_reduce

            def failing(x, site, *rest, original=original, direction=direction):
                if site.direction.name == direction and site.idx == 3:
                    raise RuntimeError("planted failure at a site")
                return original(x, site, *rest)

            installation.communicator.transport.all_reduce = failing
            with pytest.raises(RuntimeError, match="planted failure at a site"):
                run_step(trainer, 5, update=False)
            installation.communicator.transport.all_reduce = original
        losses.append(run_step(trainer, 1))
        results.append(losses)
        parallel_state.destroy_model_parallel()
    return results


def test_an_exception_inside_a_pass_is_its_own_and_leaves_no_state_behind():
    for calm, forward, backward in run_ranks(interrupted_in_the_middle, 2):
        assert forward == calm and backward == calm


def evaluation_phases(rank, world_size):
    from megatron.core import parallel_state

    losses = {}
    for name, config in {"nccl": None, "train": ECHO4.replace(phases=["train"]), "both": ECHO4}.items():
        trainer = build_trainer(tp=world_size)
        if config:
            install(trainer.chunks, config)
        losses[name] = run_step(trainer, 0, evaluate=True)
        parallel_state.destroy_model_parallel()
    return losses


def test_phases_choose_what_evaluation_uses():
    for losses in run_ranks(evaluation_phases, 2):
        assert losses["train"] == losses["nccl"] and losses["both"] != losses["nccl"]


def directions(rank, world_size):
    trainer = build_trainer(tp=world_size)
    installation = install(trainer.chunks, ECHO4.replace(directions=["backward"], early_bits=8))
    record_sites(trainer, installation.communicator)
    run_step(trainer, 0)
    backward_only = {direction for direction, _, _ in trainer.trace}
    installation.uninstall()
    installation = install(trainer.chunks, ECHO4.replace(early_bits=8, early_fraction=0.5))
    bits = [site.bits for site in installation.sites if site.direction is Direction.forward]
    names = [(site.direction.name, site.name) for site in installation.sites]
    return backward_only, bits, names


def test_directions_early_bits_and_the_order_of_sites():
    backward_only, bits, names = run_ranks(directions, 2)[0]
    assert backward_only == {"backward"}
    assert bits == [8, 8, 8, 8, 4, 4, 4, 4]
    assert names[:2] == [("forward", "layers.0.self_attention.linear_proj"), ("forward", "layers.0.mlp.linear_fc2")]
    assert names[8:10] == [("backward", "layers.3.mlp.linear_fc1"), ("backward", "layers.3.self_attention.linear_qkv")]


def uninstalled(rank, world_size):
    trainer = build_trainer(tp=world_size)
    modules = [m for m in trainer.chunks[0].modules() if hasattr(m, "tp_group")]
    before = [module.tp_group for module in modules]
    keys = list(trainer.chunks[0].state_dict())
    installation = install(trainer.chunks, ECHO4)
    assert sum(isinstance(module.tp_group, EchoProcessGroup) for module in modules) == 16
    assert list(trainer.chunks[0].state_dict()) == keys
    with pytest.raises(ValueError, match="has Echo installed already"):
        install(trainer.chunks, ECHO4)
    destroyed = []
    installation.communicator.transport.destroy = lambda: destroyed.append(rank)
    installation.uninstall()
    assert destroyed, "the transport's memory is given back"
    installation.uninstall()
    assert all(module.tp_group is group for module, group in zip(modules, before, strict=True))
    installation = install(trainer.chunks, EchoConfig.preset("nccl"))
    assert not installation.sites and "nothing installed" in installation.report()
    return True


def test_uninstall_restores_the_model():
    assert run_ranks(uninstalled, 2) == [True] * 2


def abandoned(rank, world_size):
    trainer = build_trainer(tp=world_size)
    modules = [m for m in trainer.chunks[0].modules() if hasattr(m, "tp_group")]
    before = [module.tp_group for module in modules]
    installation = install(trainer.chunks, ECHO4)
    run_step(trainer, 0)
    calls = []
    installation.communicator.transport.destroy = lambda: calls.append("destroy")
    installation.communicator.transport.abandon = lambda: calls.append("abandon")
    if rank == 0:  # alone: nothing here may wait for rank 1
        installation.abandon()
        installation.abandon()
    dist.barrier()
    if rank == 1:
        installation.abandon()
    assert set(calls) == {"abandon"}
    assert all(module.tp_group is group for module, group in zip(modules, before, strict=True))
    return run_step(trainer, 1)


def test_one_rank_alone_can_abandon_the_installation():
    losses = run_ranks(abandoned, 2)
    assert losses[0] == losses[1]


def checkpointed(rank, world_size, folder):
    from pathlib import Path

    from megatron.core import dist_checkpointing, parallel_state

    losses = {}
    for name, saves, loads in (("nccl", None, ECHO4), ("echo4", ECHO4, None)):
        trainer = build_trainer(tp=world_size)
        if saves:
            install(trainer.chunks, saves)
        run_step(trainer, 0)
        path = Path(folder) / name
        if rank == 0:
            path.mkdir()
        dist.barrier()
        dist_checkpointing.save(trainer.chunks[0].module.sharded_state_dict(), str(path))
        losses[name] = run_step(trainer, 9, evaluate=True)
        parallel_state.destroy_model_parallel()

        for key, config in ((f"{name} reloaded", loads), (f"{name} again", saves)):
            trainer = build_trainer(tp=world_size)
            if config:
                install(trainer.chunks, config)
            state = dist_checkpointing.load(trainer.chunks[0].module.sharded_state_dict(), str(path))
            trainer.chunks[0].module.load_state_dict(state)
            losses[key] = run_step(trainer, 9, evaluate=True)
            parallel_state.destroy_model_parallel()
        assert losses[f"{name} again"] == losses[name]
    return losses


def test_checkpoints_move_between_echo4_and_nccl(tmp_path):
    """The same parameters under the other communication: losses differ by its rounding only."""
    for losses in run_ranks(checkpointed, 2, str(tmp_path)):
        for name in ("nccl", "echo4"):
            difference = abs(losses[name][0] - losses[f"{name} reloaded"][0])
            assert 0 < difference < 0.02


def other_traffic(rank, world_size):
    trainer = build_trainer(tp=world_size)
    installation = install(trainer.chunks, ECHO4)
    group = next(
        m.tp_group for m in trainer.chunks[0].modules() if isinstance(getattr(m, "tp_group", 0), EchoProcessGroup)
    )
    real, calls = group.real_group, trainer.trace
    record_sites(trainer, installation.communicator)

    assert dist.get_rank(group) == rank and dist.get_world_size(group) == world_size
    assert dist.get_backend(group) == dist.get_backend(real) == "gloo"
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(real)
    x = torch.full((3, HIDDEN), float(rank))
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    assert x.eq(world_size - 1).all()
    for shape, dtype in (((3, HIDDEN + 1), torch.float32), ((HIDDEN,), torch.float32), ((3, HIDDEN), torch.int64)):
        y = torch.full(shape, rank, dtype=dtype)
        dist.all_reduce(y, group=group)
        assert y.eq(sum(range(world_size))).all()
    gathered = torch.empty(world_size * 2)
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), group=group)
    assert gathered.tolist() == [float(r) for r in range(world_size) for _ in range(2)]
    dist.barrier(group=group)
    dist.broadcast(x, 0, group=group)
    assert calls == [], "only the site's own all-reduce is quantized"
    work = dist.all_reduce(torch.randn(3, HIDDEN), group=group, async_op=True)
    work.wait()
    assert len(calls) == 1

    def broken(*_):
        raise RuntimeError("planted failure of the transport")

    installation.communicator.transport.all_reduce = broken
    with pytest.raises(RuntimeError, match="planted failure of the transport"):  # not masked by PyTorch's own logging
        dist.all_reduce(torch.randn(3, HIDDEN), group=group)
    return True


def test_everything_but_the_site_s_sum_goes_to_the_real_group():
    assert run_ranks(other_traffic, 2) == [True] * 2


def refusals(rank, world_size):
    messages = {}
    trainer = build_trainer(tp=world_size, num_layers=2)
    for refusal in _REFUSALS:
        values = {
            "symmetric_ar_type": "two_shot", "mlp_chunks_for_training": 2, "mlp_chunks_for_prefill": 2,
            "transformer_impl": "inference_optimized",
        }  # fmt: skip
        saved = dict(vars(trainer.config))
        setattr(trainer.config, refusal.option, values.get(refusal.option, True))
        try:
            install(trainer.chunks, ECHO4)
            messages[refusal.option] = "installed"
        except ValueError as error:
            messages[refusal.option] = str(error)
        vars(trainer.config).clear()  # a version may lack the option
        vars(trainer.config).update(saved)
    linear = trainer.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    linear.allreduce_dgrad = False
    with pytest.raises(ValueError, match="disable_grad_reduce"):
        install(trainer.chunks, ECHO4)
    linear.allreduce_dgrad = True
    mlp = trainer.chunks[0].module.decoder.layers[1].mlp
    fc2, mlp.linear_fc2 = mlp.linear_fc2, torch.nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.linear_fc2 is a torch.*expected Megatron-core's RowParallel"
    ):
        install(trainer.chunks, ECHO4)
    mlp.linear_fc2 = fc2
    trainer.chunks[0].module.decoder.layers[0].compile()
    with pytest.raises(ValueError, match=r"torch\.compile of module\.decoder\.layers\.0 is not supported"):
        install(trainer.chunks, ECHO4)
    return messages


def test_unsupported_options_are_refused_by_name():
    for option, message in run_ranks(refusals, 2)[0].items():
        assert message.startswith(f"echo: {option}="), (option, message)
        assert "is not supported" in message and "Expected" in message and "tp_comm=nccl" in message


def test_models_without_sites_are_refused():
    with pytest.raises(ValueError, match="expected a Megatron-core model, got Linear"):
        install(torch.nn.Linear(2, 2), ECHO4)
    model = torch.nn.Module()
    model.config = SimpleNamespace(hidden_size=8)
    check_model(model, ECHO4)
    with pytest.raises(ValueError, match="found none in Module"):
        install(model, ECHO4)


def single_rank(rank, world_size):
    trainer = build_trainer(tp=1, num_layers=2)
    installation = install(trainer.chunks, ECHO4)
    assert not installation.sites
    return run_step(trainer, 0)


def test_tensor_parallel_one_installs_nothing():
    assert run_ranks(single_rank, 1)
