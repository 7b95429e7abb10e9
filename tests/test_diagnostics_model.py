"""The inspector in a model of the real megatron-core: the same bits with and without it, and what it refuses."""

import logging
from types import SimpleNamespace

import megatron.core.tensor_parallel.layers  # noqa: F401  # before the processes fork: they need not import it again
import pytest
import torch
from distributed import run_ranks
from tiny_megatron import HIDDEN, SEQUENCE, build_trainer, gradients, run_step

from echo_megatron import EchoConfig, install
from echo_megatron.config import Algorithm
from echo_megatron.diagnostics import QUANTITIES, Inspector, gather
from echo_megatron.reference import num_sent_bytes

ECHO4 = EchoConfig.preset("echo4", min_bytes=0)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def inspected(rank, world_size, layout, microbatches, config):
    """The same training three times: not measured, measured at every second step, at every step."""
    from megatron.core import parallel_state

    results = []
    for every in (0, 2, 1):
        trainer = build_trainer(**layout)
        installation = install(trainer.chunks, config)
        inspector = Inspector(installation, every)
        losses, metrics = [], []
        for step in range(1, 4):
            inspector.begin_step(step)
            losses.append(run_step(trainer, step, microbatches=microbatches))
            metrics.append(inspector.end_step())
            losses.append(run_step(trainer, 50, evaluate=True, microbatches=microbatches))
        stages = gather(metrics[-1], parallel_state.get_pipeline_model_parallel_group(), torch.device("cpu"))
        results.append((losses, gradients(trainer), metrics, stages))
        parallel_state.destroy_model_parallel()
    return results


def sites_in(metrics):
    return list(dict.fromkeys(tag.rpartition("/")[0] for tag in metrics))


LAYOUTS = {
    "plain": ({"tp": 2}, 3),
    "recompute": ({"tp": 2, **FULL}, 2),
    "stages": ({"tp": 2, "pp": 2}, 4),
    "interleaved": ({"tp": 2, "pp": 2, "vpp": 2}, 4),
}


@pytest.mark.parametrize(("layout", "microbatches"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_measured_run_has_the_bits_of_one_that_is_not(layout, microbatches):
    stages = layout.get("pp", 1)
    ranks = run_ranks(inspected, 2 * stages, layout, microbatches, ECHO4, timeout_s=120)
    for rank, results in enumerate(ranks):
        (losses, grads, off, _), second, each = results
        assert off == [{}, {}, {}]
        assert [bool(metrics) for metrics in second[2]] == [False, True, False]
        for other_losses, other_grads, _, _ in (second, each):
            assert other_losses == losses
            assert all(torch.equal(other_grads[name], grads[name]) for name in grads)
        assert second[2][1] == each[2][1], "a measured step's numbers don't depend on the steps before"
        neighbour = ranks[rank ^ 1]  # of the same tensor-parallel group
        assert each[2] == neighbour[2][2]
        for metrics in each[2]:
            sites = sites_in(metrics)
            assert len(sites) == 16 // stages and len(metrics) == len(sites) * len(QUANTITIES)
            for site in sites:
                values = {quantity: metrics[f"{site}/{quantity}"] for quantity in QUANTITIES}
                assert 0.03 < values["injected_error"] < 0.3
                # A site gets the last one's error whole, and a gradient may be several times smaller than the last.
                assert 0.03 < values["relative_error"] < 1
                assert 0 < values["bound_used"] < 1.01 and values["saturated"] == values["underflowed"] == 0
                assert 0 < values["accumulated_error"] < values["accumulated_bound"] * 1.01
                assert values["amax"] > 0 and values["exact_calls"] == 0
                assert values["bytes"] == num_sent_bytes(ECHO4, 4, Algorithm.one_shot, 2, 0, 2 * SEQUENCE * HIDDEN)
        assert len(sites_in(results[2][3])) == 16, "all stages"
        assert results[2][3] == ranks[0][2][3] or rank % 2, "the same dictionary on all stages"


def only_what_is_covered(rank, world_size):
    from megatron.core import parallel_state

    trainer = build_trainer(tp=world_size)
    installation = install(trainer.chunks, ECHO4.replace(directions=["backward"], phases=["train"]))
    inspector = Inspector(installation, 1)
    inspector.begin_step(1)
    run_step(trainer, 1, evaluate=True)
    evaluated = inspector.end_step()
    inspector.begin_step(2)
    with pytest.raises(RuntimeError, match="planted failure"):
        run_step(trainer, 2, fail="backward", update=False)
    inspector.begin_step(3)
    run_step(trainer, 2)
    trained = inspector.end_step()
    installation.uninstall()
    inspector.begin_step(4)
    run_step(trainer, 3)
    after = inspector.end_step()
    parallel_state.destroy_model_parallel()

    trainer = build_trainer(tp=world_size)
    inspector = Inspector(install(trainer.chunks, ECHO4), 1)
    inspector.begin_step(1)
    run_step(trainer, 1, evaluate=True)
    return evaluated, trained, after, inspector.end_step()


def test_directions_phases_failures_and_uninstalling():
    for evaluated, trained, after, quantized_evaluation in run_ranks(only_what_is_covered, 2):
        assert evaluated == after == {}
        assert {site.split("/")[1] for site in sites_in(trained)} == {"backward"} and len(sites_in(trained)) == 8
        assert all(trained[tag] == 0 for tag in trained if tag.endswith("exact_calls"))
        assert {site.split("/")[1] for site in sites_in(quantized_evaluation)} == {"forward"}


# -- what is refused


def test_options_that_cannot_be(caplog):
    nothing = SimpleNamespace(communicator=None, uses_cuda_graphs=False)
    for every in (-1, 1.5, True, "10"):
        with pytest.raises(ValueError, match="inspect_every: expected a whole number of steps"):
            Inspector(nothing, every)
    with caplog.at_level(logging.INFO, "echo_megatron.diagnostics"):
        inspector = Inspector(nothing, 5)
    assert "nothing is installed" in caplog.text
    inspector.begin_step(5)
    assert inspector.end_step() == {}


def test_cuda_graphs_are_refused():
    installation = SimpleNamespace(communicator=SimpleNamespace(), uses_cuda_graphs=True)
    with pytest.raises(ValueError, match="inspect_every: expected 0 with CUDA graphs, got 3: a replay runs no Python"):
        Inspector(installation, 3)
    Inspector(installation, 0)


def test_a_capture_is_refused(monkeypatch):
    inspector = Inspector(SimpleNamespace(communicator=SimpleNamespace(), uses_cuda_graphs=False), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inspector.begin_step(1)
    with pytest.raises(RuntimeError, match="a step that a CUDA graph captures can't be measured"):
        inspector.begin_step(2)
