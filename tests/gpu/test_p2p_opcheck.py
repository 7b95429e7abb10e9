"""One GPU: schemas, fake kernels and autograd registration of every operator, by torch.library.opcheck.

opcheck copies its inputs, but an all-reduce must be given the workspace that its peers know: for the collectives the
copy is left out, and the tests that trace a function with copies inside (AOT dispatch) run for the other operators.
"""

import pytest
import torch
from feedbacks import AVERAGES
from torch.testing._internal.optests import generate_tests
from virtual_checks import RecordedGroup, assert_same_bits, contributions
from virtual_ranks import Call, VirtualRanks, numbers_of, poisoned_like

from echo_megatron import ops
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Residual
from echo_megatron.reference import exact_sum
from echo_megatron.sites import Site

SITE = Site(1, Direction.forward)
UTILS = ("test_schema", "test_faketensor", "test_autograd_registration")
CONFIGS = [
    EchoConfig(algorithm=Algorithm.one_shot),
    EchoConfig(algorithm=Algorithm.two_shot, **AVERAGES),
    EchoConfig(policy=Policy.zero_aware, group_size=128, residual=Residual.consensus),
    EchoConfig(eta=0.0),
]


@pytest.fixture
def without_copies(monkeypatch):
    monkeypatch.setattr(generate_tests, "deepcopy_tensors", lambda inputs: inputs)


@pytest.mark.parametrize("util", UTILS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=["one_shot", "two_shot", "consensus", "uncompensated"])
def test_all_reduce(config, in_place, util, without_copies):
    ops.load()
    library = torch.ops.echo_megatron
    operator = (library.all_reduce_ if in_place else library.all_reduce).default
    for has_peer in (False, True):  # the first run loads and allocates what opcheck needs, before a kernel waits
        xs = contributions(2, 5_000)
        expected = RecordedGroup(2, config).all_reduce(xs, SITE)
        ranks = VirtualRanks(2, config, num_blocks=2, timeout_s=5.0 if has_peer else 0.05)
        outs = xs if in_place else [poisoned_like(x) for x in xs]
        calls = [Call(*part, SITE, keep_codes=True) for part in zip(ranks.ranks, xs, outs, strict=True)]
        torch.cuda.synchronize()
        if has_peer and util != "test_autograd_registration":  # which runs nothing: no input requires a gradient
            with torch.cuda.stream(ranks.memory.streams[1]):
                calls[1].launch()
        torch.library.opcheck(operator, calls[0].operands(), calls[0].options, test_utils=util)
        if util == "test_autograd_registration":
            continue
        if has_peer:
            ranks.memory.check()
            for out in outs:
                assert_same_bits(out, expected, "output")
        else:
            assert ranks.memory.failures()[0].code == "timeout"


@pytest.mark.parametrize("util", UTILS)
@pytest.mark.parametrize("in_place", [False, True])
def test_exact_all_reduce(in_place, util, without_copies):
    ops.load()
    library = torch.ops.echo_megatron
    operator = (library.exact_all_reduce_ if in_place else library.exact_all_reduce).default
    for has_peer in (False, True):
        xs = contributions(2, 5_000)
        expected = exact_sum(torch.stack(xs))
        memory = VirtualRanks(2, EchoConfig(), num_blocks=2, timeout_s=5.0 if has_peer else 0.05).memory
        outs = xs if in_place else [poisoned_like(x) for x in xs]
        calls = []
        for rank, (x, out) in enumerate(zip(xs, outs, strict=True)):
            tensors = (x,) if in_place else (x, out)
            operands = (*tensors, memory.buffers[rank], memory.failure_records[rank], memory.peers)
            options = {
                "rank": rank,
                "site": numbers_of(SITE),
                "num_blocks": memory.num_blocks,
                "num_teams": memory.num_teams,
                "ring": memory.ring,
                "slot_bytes": memory.slot_bytes,
                "timeout_s": memory.timeout_s,
            }
            calls.append((operands, options))
        torch.cuda.synchronize()
        if has_peer and util != "test_autograd_registration":
            with torch.cuda.stream(memory.streams[1]):
                operator(*calls[1][0], **calls[1][1])
        torch.library.opcheck(operator, *calls[0], test_utils=util)
        if has_peer and util != "test_autograd_registration":
            memory.check()
            for out in outs:
                assert_same_bits(out, expected, "output")


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("policy", list(Policy))
def test_decode_and_consensus_update(policy, algorithm):
    config = EchoConfig(policy=policy, algorithm=algorithm, residual=Residual.consensus)
    ranks = VirtualRanks(2, config)
    ranks.all_reduce(contributions(2, 5_000), Site(0, Direction.forward))
    ranks.memory.check()
    call = ranks.calls[0]
    library, options = torch.ops.echo_megatron, {"world_size": 2, **call.records}
    torch.library.opcheck(library.decode.default, (call.codes, torch.zeros_like(call.x)), options)
    state = torch.zeros_like(call.state)  # AOT dispatch compares the results of two runs: no NaN in the padding
    update = {"state_dtype": call.options["state_dtype"], "fresh": False, "coefficients": call.coefficients}
    torch.library.opcheck(library.consensus_update.default, (call.x, call.codes, state), {**options, **update})


def test_sizes_agree_with_each_other():
    ops.load()
    library = torch.ops.echo_megatron
    assert library.ring_size(4) == 16 and library.ring_size(1) == 8
    assert library.call_tiles(4097, 2, 0, 128, 1) == 2
    assert library.call_tiles(4097, 2, 0, 128, 2) == 2
    assert library.workspace_bytes(2, 8, 16, 4736) > 2 * 8 * 16 * 4736
    assert library.max_blocks(4, 3, 1, 0, 0, 0, 2) >= 1
