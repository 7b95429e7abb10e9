"""Two GPUs, Transformer Engine: install() on Megatron-core's models of its layers, trained over NCCL.

    PYTHONPATH=… python -m pytest tests/gpu/test_megatron_te.py --durations=10

All cases run in one pair of processes when the first test asks for results (te_ranks.py); the tests then look at their
parts. ECHO_TE_CASES="hybrid mtp" runs these cases only. $OUT, where set, is the folder of megatron_te.json with every
case's results and seconds.
"""

import importlib.util
import math
import os
from pathlib import Path

import pytest
from ranks import NUM_GPUS

pytestmark = [
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs, found {NUM_GPUS}"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="transformer_engine is not installed"
    ),
    pytest.mark.timeout(600),
]

BUDGET_S = 480.0
NUM_LAYERS = 4
SITES_A_PASS = 2 * NUM_LAYERS
MICROBATCHES = 2
CALLS_A_STEP = 2 * SITES_A_PASS * MICROBATCHES
CLOSE = 0.05  # losses start near ln(1024) = 6.9
LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
ALL_LINEARS = {f"decoder.layers.{layer}.{linear}" for layer in range(NUM_LAYERS) for linear in LINEARS}
RECOMPUTE = ("full", "full_2", "mlp", "full_fp8_delayed", "full_fp8_current", "mlp_fp8_delayed")
GRAPHS = ("local", "te", "full_iteration")
NAMES = (
    "pass_through", "transports", "reference", "side_stream", "refusals", "checkpoint", "tied", "hybrid", "mtp", "lora",
    "fused_wgrad", "delayed_wgrad", "fp8_delayed", "fp8_current", *(f"recompute_{name}" for name in RECOMPUTE),
    *(f"graphs_{name}" for name in GRAPHS),
)  # fmt: skip


@pytest.fixture(scope="module")
def results():
    from te_ranks import run_all

    names = os.environ.get("ECHO_TE_CASES", "").split() or NAMES
    results = run_all(names, BUDGET_S)
    if os.environ.get("OUT"):
        results.write(Path(os.environ["OUT"]))
    return results


def of(results, name):
    """Both ranks' results; skipped where ECHO_TE_CASES leaves the case out."""
    names = os.environ.get("ECHO_TE_CASES", "").split()
    if names and name not in names:
        pytest.skip(f"case {name} is not in ECHO_TE_CASES")
    return results.of(name)


def assert_training(ranks, transport="p2p", calls=CALLS_A_STEP, norms=True):
    """A quantized training: finite, close to stock, the same on both ranks, with every site's calls."""
    first, second = ranks
    for one in ranks:
        assert one["finite"] and 0 < one["distance"] < CLOSE, one["distance"]
        assert one["transport"] == transport
        assert set(one["num_calls"]) == {calls}, one["num_calls"]
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"] and bool(first["norms"]) == norms


def assert_pass_through(ranks):
    for one in ranks:
        assert one["stock_repeats"] == [], "stock is not deterministic here, so nothing can be compared with it"
        assert one["pass_through"] == []
        assert set(one["pass_through_calls"]) == {0}
        assert one["stock_losses"] != one["losses"]


# -- bits


@pytest.mark.parametrize("transport", ["p2p", "collective"])
def test_pass_through_is_stock_bit_for_bit(results, transport):
    for one in of(results, "pass_through"):
        assert one["stock_repeats"] == [] and len(one["losses"]) == 3 * MICROBATCHES
        assert one[transport] == []
        assert set(one[f"{transport}_calls"]) == {0}
        assert set(one["echo_modules"]) == ALL_LINEARS


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_both_transports_give_the_same_training(results, algorithm):
    ranks = [one[algorithm] for one in of(results, "transports")]
    assert_training(ranks)
    for one in ranks:
        assert one["transports"] == ["p2p", "collective"]
        assert one["between_transports"] == []
        assert len([name for name in one["norms"] if "layer_norm_weight" in name]) == 2 * NUM_LAYERS


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_every_call_is_the_reference_s(results, algorithm):
    ranks = [one[algorithm] for one in of(results, "reference")]
    for one in ranks:
        assert one["wrong"] == []
        assert one["num_calls"] == 2 * CALLS_A_STEP and one["dtypes"] == ["torch.bfloat16"]
        assert {f"decoder.{name}" for name in one["names"]} == ALL_LINEARS
    assert ranks[0]["outputs"] == ranks[1]["outputs"]


def test_backward_sites_run_on_a_side_stream_and_repeat(results):
    for one in of(results, "side_stream"):
        assert one["streams"]["forward"] == [one["main"]]
        assert len(one["streams"]["backward"]) == 1 and one["streams"]["backward"] != [one["main"]]
        assert one["repeats"] == [[]] * 5


# -- FP8 and weight gradients


@pytest.mark.parametrize("case", ["fp8_delayed", "fp8_current", "fused_wgrad"])
def test_fp8_and_fused_weight_gradients(results, case):
    ranks = of(results, case)
    assert_pass_through(ranks)
    assert_training(ranks)
    if case == "fused_wgrad":
        assert all(one["added_to_main_grad"] == [True] * 4 * NUM_LAYERS for one in ranks)


def test_delayed_weight_gradients(results):
    ranks = of(results, "delayed_wgrad")
    assert_training(ranks, calls=2 * SITES_A_PASS)
    for one in ranks:
        assert one["pass_through"] == [] and one["against_fused"] == []


# -- recompute


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_gives_the_same_bits_and_calls(results, name):
    ranks = of(results, f"recompute_{name}")
    assert_training(ranks)
    for one in ranks:
        assert one["stock"] == [], "recompute changes stock Megatron's bits here, so Echo's can't be compared"
        assert one["echo"] == []
        assert one["plain_calls"] == one["num_calls"]


# -- models


def test_tied_embeddings(results):
    ranks = of(results, "tied")
    assert_pass_through(ranks)
    assert_training(ranks)
    assert all(set(one["echo_modules"]) == ALL_LINEARS for one in ranks)


def test_hybrid_model(results):
    """Two attention layers and two MLP layers."""
    ranks = of(results, "hybrid")
    assert_pass_through(ranks)
    assert_training(ranks, calls=CALLS_A_STEP // 2)
    attention, mlp = LINEARS[:2], LINEARS[2:]
    expected = {f"decoder.layers.{n}.{linear}" for n in range(4) for linear in (mlp if n % 2 else attention)}
    assert all(set(one["echo_modules"]) == expected for one in ranks)


def test_multi_token_prediction_stays_at_full_precision(results):
    ranks = of(results, "mtp")
    assert_pass_through(ranks)
    assert_training(ranks)
    assert all(set(one["echo_modules"]) == ALL_LINEARS for one in ranks)


def test_lora(results):
    """Layer 0's qkv sums no input gradient: nothing before it is trained."""
    ranks = of(results, "lora")
    assert_pass_through(ranks)
    assert_training(ranks, calls=CALLS_A_STEP - MICROBATCHES, norms=False)
    for one in ranks:
        assert set(one["echo_modules"]) == {f"{linear}.to_wrap" for linear in ALL_LINEARS}
        assert one["trained"] == ["adapter"]
        assert one["adapter_groups_are_real"] == [True] * 8 * NUM_LAYERS


# -- refusals and checkpoints


def test_refusals(results):
    for one in of(results, "refusals"):
        assert one["nothing"] == "installed"
        assert one["tp_comm_overlap"].startswith("echo: tp_comm_overlap=True is not supported")
        assert "torch.compile" in one["compiled wrapper"] and "not supported" in one["compiled wrapper"]
        assert "torch.compile" in one["compiled layer"] and "layers.0" in one["compiled layer"]


def test_checkpoints_do_not_know_of_echo(results):
    for one in of(results, "checkpoint"):
        assert one["keys"] == [True, True] and one["different"] == [] and one["num_keys"] > 4 * NUM_LAYERS
        assert one["sharded"] and one["num_sharded"] > 4 * NUM_LAYERS


# -- CUDA graphs


@pytest.mark.parametrize("name", GRAPHS)
def test_cuda_graphs_follow_eager_and_start_every_pass_afresh(results, name):
    ranks = of(results, f"graphs_{name}")
    first, second = ranks
    assert first["losses"] == second["losses"] and first["norms"] == second["norms"]
    for one in ranks:
        assert one["finite"] and one["transport"] == "p2p"
        assert one["against_eager"] == [], f"{one['distance_to_eager']} against {one['distance_of_eager']} of Echo"
        assert not math.isclose(one["distance_of_eager"], 0.0)
        assert one["num_calls"][-2:] == [0, 0], "replays run no Python"
        assert one["num_calls"][0] >= CALLS_A_STEP and set(one["eager_calls"]) == {CALLS_A_STEP}
        assert one["repeated_losses"][0] == one["repeated_losses"][1] and one["repeated_gradients"] == []
