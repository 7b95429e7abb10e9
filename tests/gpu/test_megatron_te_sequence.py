"""Two GPUs, Transformer Engine: sequence parallelism with install() on Megatron-core's models, trained over NCCL.

    PYTHONPATH=… python -m pytest tests/gpu/test_megatron_te_sequence.py --durations=10

As test_megatron_te.py: ECHO_TE_CASES="sp_bits sp_moe" runs these cases only, and $OUT is the folder of their results.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from ranks import NUM_GPUS
from test_megatron_te import (
    ALL_LINEARS,
    BUDGET_S,
    CALLS_A_STEP,
    LINEARS,
    MICROBATCHES,
    NUM_LAYERS,
    assert_training,
    of,
)

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="transformer_engine is not installed"
    ),
    pytest.mark.timeout(600),
]

RECOMPUTE = ("full", "mlp")
GRAPHS = ("local", "full_iteration")
NAMES = (
    *("sp_bits", "sp_reference", "sp_fp8_delayed", "sp_fp8_current", "sp_frozen", "sp_moe"),
    *(f"sp_recompute_{name}" for name in RECOMPUTE),
    *(f"graphs_sp_{name}" for name in GRAPHS),
)
GATHERS_A_STEP = 6 * NUM_LAYERS * MICROBATCHES  # two inputs, each once more, and two gradients


@pytest.fixture(scope="module")
def results():
    from te_ranks import run_all

    results = run_all(os.environ.get("ECHO_TE_CASES", "").split() or NAMES, BUDGET_S)
    if os.environ.get("OUT"):
        results.write(Path(os.environ["OUT"]))
    return results


def assert_like_stock(ranks):
    for one in ranks:
        assert one["stock_repeats"] == [], "stock is not deterministic here, so nothing can be compared with it"
        assert one["pass_through"] == [[], []]
        assert {count for counts in one["pass_through_calls"] for count in counts} == {0}
        assert one["transports"] == ["p2p", "collective"] and one["between_transports"] == []
        assert one["stock_losses"] != one["losses"]


def test_bits(results):
    ranks = of(results, "sp_bits")
    assert_like_stock(ranks)
    assert_training(ranks)
    for one in ranks:
        assert set(one["echo_modules"]) == ALL_LINEARS and set(one["num_gathers"]) == {GATHERS_A_STEP}
        assert one["distance_to_all_reduce"] < 0.003


def test_every_call_is_the_reference_s_and_inputs_are_gathered_again_with_the_same_bits(results):
    for one in of(results, "sp_reference"):
        assert one["wrong"] == []
        assert one["num_calls"] == 2 * CALLS_A_STEP and one["num_gathers"] == 2 * GATHERS_A_STEP
        assert one["num_pairs"] == 2 * 2 * NUM_LAYERS * MICROBATCHES and one["not_regathered"] == 0
        assert one["dtypes"] == ["torch.bfloat16"]


@pytest.mark.parametrize("case", ["sp_fp8_delayed", "sp_fp8_current"])
def test_fp8_data_is_gathered_as_it_is(results, case):
    """The reduce-scatters are BF16; of the gathers those that Transformer Engine makes in BF16 are quantized."""
    ranks = of(results, case)
    assert_like_stock(ranks)
    assert_training(ranks)
    for one in ranks:
        assert max(one["num_gathers"]) < GATHERS_A_STEP and one["num_gathers_of_bytes"] > 0


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_gives_the_same_bits_and_sums(results, name):
    ranks = of(results, f"sp_recompute_{name}")
    assert_training(ranks)
    for one in ranks:
        assert one["stock"] == [], "recompute changes stock Megatron's bits here, so Echo's can't be compared"
        assert one["echo"] == [] and one["plain_calls"] == one["num_calls"]


def test_frozen_linears(results):
    """What an adapter's base is: no input is gathered again."""
    ranks = of(results, "sp_frozen")
    assert_like_stock(ranks)
    assert_training(ranks)
    assert all(max(one["num_gathers"]) < GATHERS_A_STEP for one in ranks)


def test_experts_are_left_alone(results):
    ranks = of(results, "sp_moe")
    assert_like_stock(ranks)
    attention = LINEARS[:2]
    for one in ranks:
        assert one["finite"] and one["losses"] == ranks[0]["losses"]
        expected = {f"decoder.layers.{layer}.{linear}" for layer in range(NUM_LAYERS) for linear in attention}
        assert set(one["echo_modules"]) == expected and set(one["num_calls"]) == {CALLS_A_STEP // 2}


@pytest.mark.parametrize("name", GRAPHS)
def test_cuda_graphs_follow_eager_and_start_every_pass_afresh(results, name):
    ranks = of(results, f"graphs_sp_{name}")
    assert ranks[0]["losses"] == ranks[1]["losses"]
    for one in ranks:
        assert one["finite"] and one["transport"] == "p2p"
        assert one["against_eager"] == [], f"{one['distance_to_eager']} against {one['distance_of_eager']} of Echo"
        assert one["num_calls"][-2:] == [0, 0], "replays run no Python"
        assert one["repeated_losses"][0] == one["repeated_losses"][1] and one["repeated_gradients"] == []
