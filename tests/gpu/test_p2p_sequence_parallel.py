"""One GPU, several ranks on it: reduce-scatter and all-gather give the reference's outputs and state, bit for bit."""

import itertools
import math
import random
import time

import pytest
import torch
from feedbacks import AVERAGES
from policies import group_size
from test_p2p_kernels import misaligned, normal, wild
from test_p2p_opcheck import UTILS
from torch.testing._internal.optests import generate_tests
from virtual_checks import assert_same_bits
from virtual_ranks import DTYPES, VirtualRanks
from virtual_shares import ShareCall, SharingRanks, poisoned_output
from virtual_workspaces import VirtualWorkspaces

from echo_megatron import ops
from echo_megatron.compensator import Compensator
from echo_megatron.config import GROUP_SIZES, Algorithm, Collective, Direction, EchoConfig, Policy, Rescale, StateDtype
from echo_megatron.reference import exact_sum
from echo_megatron.sites import Site

POLICIES = list(Policy)
SHARES = (Collective.reduce_scatter, Collective.all_gather)
COMPENSATIONS = [
    {"eta": 0.0},
    *({"state_dtype": dtype} for dtype in StateDtype),
    *({"state_dtype": dtype, **AVERAGES} for dtype in (StateDtype.bf16, StateDtype.fp32)),
]
NUM_SITES = 3
TIMEOUT_S = 1.0


def inputs(make, collective, world_size, num_share_values, dtype, seed):
    """The ranks' inputs of a call in shares of `num_share_values` values."""
    num_shares = world_size if collective is Collective.reduce_scatter else 1
    return make(world_size, num_shares * num_share_values, dtype, seed)


# -- everything with everything, at one size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_combination_equals_the_reference(world_size, policy, bits, dtype):
    """In turn shares of an odd number of values and of one that leaves all of them on 16 bytes."""
    memory = VirtualWorkspaces(world_size)
    sizes_in_turn = itertools.cycle((10_007, 12_328, 12_328, 10_007, 12_328))
    for rescale, compensation in itertools.product(Rescale, COMPENSATIONS):
        config = EchoConfig(policy=policy, group_size=group_size(policy), rescale=rescale, **compensation)
        checked, num_share_values = SharingRanks(world_size, config, memory=memory), next(sizes_in_turn)
        for idx in range(NUM_SITES):
            xs = inputs(normal, Collective.reduce_scatter, world_size, num_share_values, dtype, seed=idx)
            checked.call(Collective.reduce_scatter, xs, Site(idx, Direction.forward, bits=bits))
        if "eta" in compensation:  # nothing of the state reaches an all-gather
            for size in (10_007, 12_328):
                xs = inputs(normal, Collective.all_gather, world_size, size, dtype, seed=7)
                checked.call(Collective.all_gather, xs, Site(0, Direction.forward, bits=bits))


# -- sizes of a share: each with every policy, the other options drawn


def sizes(policy):
    size = group_size(policy)
    tiny = {1, 7, 8, 31, 32, 33, size - 1, size, size + 1, 1000, 1024, 1032}
    return [*sorted(tiny), 4088, 4095, 4096, 4097, 8192, 3 * 4096 + 8, 33_333, 40_960, 300_007]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_sizes_with_drawn_options(world_size, policy):
    draw = random.Random(f"{world_size} {policy.name}")
    memory = VirtualWorkspaces(world_size)
    for num_share_values, collective in itertools.product(sizes(policy), SHARES):
        bits, dtype, direction = draw.choice((4, 8)), draw.choice(DTYPES), draw.choice(list(Direction))
        options = {"group_size": draw.choice(GROUP_SIZES), "rescale": draw.choice(list(Rescale))}
        config = EchoConfig(policy=policy, **options, **draw.choice(COMPENSATIONS))
        make = draw.choice((normal, normal, wild))
        checked = SharingRanks(world_size, config, memory=memory)
        grid = {"num_blocks": draw.randint(1, memory.num_blocks), "depth": draw.randint(1, 4)}
        for idx in range(NUM_SITES):
            xs = inputs(make, collective, world_size, num_share_values, dtype, seed=draw.randrange(2**31))
            xs = misaligned(xs) if draw.random() < 0.25 else xs
            checked.call(collective, xs, Site(idx, direction, bits=bits), what=make.__name__, **grid)


@pytest.mark.parametrize("collective", SHARES)
@pytest.mark.parametrize(("world_size", "policy"), [*zip((2, 3, 4, 5, 8), POLICIES, strict=True)])
def test_ten_million_values(world_size, policy, collective):
    checked = SharingRanks(world_size, EchoConfig(policy=policy, group_size=group_size(policy)))
    for idx, num_values in enumerate((10_000_000, 10_000_384)):
        num_share_values = num_values // world_size + idx % 2
        xs = inputs(normal, collective, world_size, num_share_values, torch.bfloat16, seed=idx)
        checked.call(collective, xs, Site(idx, Direction.forward, bits=8 if idx else 4))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("collective", SHARES)
@pytest.mark.parametrize("world_size", [2, 5])
def test_messages_far_larger_than_the_ring(world_size, collective, depth):
    """Two thread blocks a rank: a team has more than 80 tiles for 16 slots."""
    checked = SharingRanks(world_size, EchoConfig(), num_blocks=2, depth=depth)
    for idx in range(2):
        xs = inputs(normal, collective, world_size, 4096 * 8 * 16 * 5 + 37, torch.bfloat16, seed=idx)
        checked.call(collective, xs, Site(idx, Direction.forward))


@pytest.mark.parametrize("world_size", [2, 3])
def test_tile_numbers_wrap(world_size):
    checked = SharingRanks(world_size, EchoConfig(), num_blocks=1)
    memory = checked.virtual.memory
    memory.set_epochs(2**32 - 5)
    for idx, collective in zip(range(8), itertools.cycle(SHARES)):
        xs = inputs(normal, collective, world_size, 4096 * 4 * 3, torch.bfloat16, seed=idx)
        checked.call(collective, xs, Site(idx, Direction.forward))
    assert all(0 < epoch < 2**31 for epoch in memory.epochs(0))


# -- values


@pytest.mark.parametrize("rescale", list(Rescale))
@pytest.mark.parametrize("collective", SHARES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_exponents(bits, policy, collective, rescale):
    """A magnitude a tile, from FP32's subnormal numbers to its largest; signs of zeros included."""
    config = EchoConfig(policy=policy, group_size=group_size(policy), rescale=rescale)
    checked = SharingRanks(2, config)
    exponents = torch.arange(-149, 128, 4, device="cuda", dtype=torch.float64)[:, None]
    for dtype, num_share_values in itertools.product((torch.float32, torch.bfloat16), (4096, 4095)):
        num_rows = len(exponents) * (2 if collective is Collective.reduce_scatter else 1)
        base = torch.stack(normal(2, num_share_values * num_rows, torch.float32, seed=bits)).double()
        rows = base.view(2, -1, len(exponents), num_share_values) * 2.0**exponents
        xs = rows.to(torch.float32).to(dtype).view(2, -1).unbind()
        for idx in range(2):
            checked.call(collective, [x.clone() for x in xs], Site(idx, Direction.forward, bits=bits))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_own_share_is_not_rounded(policy):
    """Where the others contribute zeros, the sum is the own share to the working basis's own rounding."""
    checked = SharingRanks(2, EchoConfig(policy=policy, group_size=group_size(policy)))
    xs = [torch.zeros(2 * 5_000, device="cuda") for _ in range(2)]
    own = [x.view(2, -1)[rank].normal_() for rank, x in enumerate(xs)]
    for out, expected in zip(checked.call(Collective.reduce_scatter, xs, Site(0, Direction.forward)), own, strict=True):
        assert torch.allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_gather_repeats_bit_for_bit_whatever_grid_depth_and_state(policy, bits):
    """The input that is gathered again for a weight gradient is the forward pass's."""
    checked = SharingRanks(3, EchoConfig(policy=policy, group_size=group_size(policy)))
    xs = normal(3, 100_003, torch.bfloat16, seed=5)
    first = checked.call(Collective.all_gather, xs, Site(0, Direction.forward, bits=bits))
    scattered = normal(3, 3 * 7_000, torch.bfloat16, seed=6)
    checked.call(Collective.reduce_scatter, scattered, Site(0, Direction.backward, bits=bits))
    for num_blocks, depth in ((1, 1), (7, 4)):
        options = {"num_blocks": num_blocks, "depth": depth}
        again = checked.run(Collective.all_gather, xs, Site(3, Direction.backward, bits=bits), **options)
        checked.virtual.memory.check()
        for one, other in zip(first, again, strict=True):
            assert_same_bits(other, one, "gathered again")


# -- one call after the other, of every kind


def draw_config(draw):
    return EchoConfig(
        policy=draw.choice(POLICIES),
        group_size=draw.choice(GROUP_SIZES),
        algorithm=draw.choice((Algorithm.one_shot, Algorithm.two_shot)),
        rescale=draw.choice(list(Rescale)),
        **draw.choice((*COMPENSATIONS, *COMPENSATIONS[1:])),
    )


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_random_sequences_of_every_kind_of_call(world_size):
    """Passes in which kinds, sizes and directions alternate: the state is carried where the reference carries it."""
    draw, memory = random.Random(world_size), VirtualWorkspaces(world_size)
    for _ in range(12):
        checked = SharingRanks(world_size, draw_config(draw), memory=memory)
        counts = dict.fromkeys(Direction, 0)
        num_values, dtype = draw.choice((1, 96, 4_000, 9_001, 120_008)), draw.choice(DTYPES)
        for _ in range(14):
            direction = draw.choice(list(Direction))
            if draw.random() < 0.15:
                counts[direction], num_values = 0, draw.choice((5, 4_096, 20_003, 60_000))
            bits = draw.choice((4, 4, 8))
            site = Site(counts[direction], direction, bits=bits)
            kind = draw.choice((*Collective, Collective.reduce_scatter, "exact"))
            if kind == "exact":
                checked.exact_all_reduce(normal(world_size, num_values, dtype, seed=draw.randrange(2**31)), site)
                continue
            xs = inputs(normal, kind, world_size, num_values, dtype, seed=draw.randrange(2**31))
            grid = {"num_blocks": draw.randint(1, memory.num_blocks), "depth": draw.randint(1, 2)}
            if kind is Collective.all_reduce:
                checked.all_reduce(xs, site, keep_codes=draw.random() < 0.3, **grid)
            else:
                checked.call(kind, xs, site, **grid)
            counts[direction] += kind is not Collective.all_gather


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_calls_that_only_a_rank_s_own_order_holds_apart(world_size, request):
    """Hundreds of calls of every kind on one workspace, a rank late at random, compared only afterwards."""
    num_calls = request.config.getoption("--num-calls", default=2000) // 4
    draw, memory = random.Random(10 + world_size), VirtualWorkspaces(world_size)
    groups = [SharingRanks(world_size, draw_config(draw), memory=memory) for _ in range(8)]
    running = []

    def compare():
        memory.join()
        memory.check()
        for outs, expected, what, *_ in running:
            for rank, (out, wanted) in enumerate(zip(outs, expected, strict=True)):
                assert_same_bits(out, wanted, f"output of rank {rank}, {what}")
        running.clear()

    values = {dtype: normal(world_size, 5 * 1_000_000, dtype, seed=1) for dtype in DTYPES}
    for number in range(num_calls):
        checked, dtype = draw.choice(groups), draw.choice(DTYPES)
        kind = draw.choice((*Collective, *SHARES, "exact"))
        num_values = int(2 ** draw.uniform(0, 19))
        begin, site = draw.choice((0, 8, 16, 3)), Site(0, draw.choice(list(Direction)), bits=draw.choice((4, 8)))
        end = begin + num_values * (world_size if kind is Collective.reduce_scatter else 1)
        xs = [x[begin:end] for x in values[dtype]]
        late = draw.randrange(world_size)
        delays = [draw.choice((0, draw.randrange(600_000))) if rank == late else 0 for rank in range(world_size)]
        grid = {"num_blocks": draw.randint(1, memory.num_blocks)}
        what = f"call {number}: {kind} {num_values} from {begin} {dtype} {site} {checked.virtual.config}"
        if kind == "exact":
            expected = [exact_sum(torch.stack(xs))] * world_size
            outs = checked.virtual.exact_all_reduce(xs, site, wait=False, **grid)
        elif kind is Collective.all_reduce:
            expected = [checked.reference.all_reduce(xs, site)] * world_size
            outs = checked.virtual.all_reduce(xs, site, delays=delays, depth=draw.randint(1, 2), wait=False, **grid)
        else:
            expected = checked.expected(kind, xs, site)
            outs = checked.run(kind, xs, site, delays=delays, depth=draw.randint(1, 4), wait=False, **grid)
        running.append((outs, expected, what, xs))
        if len(running) == 20:
            compare()
    compare()


# -- what ends badly ends soon


def run_some(ranks, kinds, num_share_values, sites=None):
    """Calls of the ranks that `kinds` names, by rank, all prepared before the first is launched; how long they took."""
    calls = {}
    for rank, kind in kinds.items():
        (x, *_) = inputs(normal, kind, ranks.world_size, num_share_values, torch.bfloat16, seed=rank)
        out = poisoned_output(x, kind, ranks.world_size).fill_(7.0)  # so that NaN is the kernel's
        site = sites[rank] if sites else Site(5, Direction.backward, chunk=2)
        calls[rank] = ShareCall(ranks.ranks[rank], x, out, site, kind)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for rank, call in calls.items():
        with torch.cuda.stream(ranks.memory.streams[rank]):
            call.launch()
    torch.cuda.synchronize()
    return calls, time.perf_counter() - begin


def warm_up(ranks, num_share_values):
    """A good call of each kind, so that nothing is loaded while a clock runs."""
    for kind in SHARES:
        calls, _ = run_some(ranks, dict.fromkeys(range(ranks.world_size), kind), num_share_values)
        ranks.memory.check()
        assert all(call.out.isfinite().all() for call in calls.values())


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("num_share_values", [1_000, 300_007])
@pytest.mark.parametrize("kind", SHARES)
def test_an_absent_rank_ends_the_others_within_the_limit(kind, num_share_values, absent):
    ranks = VirtualRanks(3, EchoConfig(), timeout_s=TIMEOUT_S)
    warm_up(ranks, num_share_values)
    calls, seconds = run_some(ranks, {rank: kind for rank in range(3) if rank != absent}, num_share_values)
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + 0.5, f"took {seconds:.2f} s"
    failures = [failure for failure in ranks.memory.failures() if failure is not None]
    assert len(failures) == 2
    timeouts = [failure for failure in failures if failure.code == "timeout"]
    assert timeouts and all((failure.peer, failure.stage) == (absent, "push") for failure in timeouts)
    assert all(failure.site == (5, 1, 2) for failure in failures)
    for call in calls.values():
        assert call.out.isnan().any(), "a failed call must not look like a result"
        assert not (call.out == 7.0).any(), "every element is written"


@pytest.mark.parametrize("kinds", [SHARES, SHARES[::-1]])
def test_another_kind_of_call_on_a_rank_is_seen_at_once(kinds):
    """The halves and the all-reduce use one ring: the signature tells them apart."""
    ranks = VirtualRanks(2, EchoConfig(), timeout_s=10.0)
    warm_up(ranks, 20_000)
    calls, seconds = run_some(ranks, dict(enumerate(kinds)), 20_000)
    assert seconds < 5.0
    failures = ranks.memory.failures()
    assert all(failure.code in ("mismatch", "peer") for failure in failures)
    assert any(failure.code == "mismatch" for failure in failures)
    assert all(call.out.isnan().any() for call in calls.values())


def test_another_site_of_a_rank_is_seen_at_once():
    ranks = VirtualRanks(2, EchoConfig(), timeout_s=10.0)
    warm_up(ranks, 20_000)
    sites = [Site(0, Direction.forward), Site(1, Direction.forward)]
    kinds = dict.fromkeys(range(2), Collective.reduce_scatter)
    _, seconds = run_some(ranks, kinds, 20_000, sites)
    assert seconds < 5.0 and any(failure.code == "mismatch" for failure in ranks.memory.failures())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 10_000}, "num_blocks"),
        ({"depth": 9}, "ring of at least"),
        ({"bits": 5}, "bits of 4 or 8"),
        ({"rank": 2}, "rank"),
        ({"slot_bytes": 128}, "slots of at least"),
    ],
)
@pytest.mark.parametrize("kind", SHARES)
def test_a_wrong_option_is_named(kind, change, message):
    ranks = VirtualRanks(2, EchoConfig())
    calls, _ = run_some(ranks, dict.fromkeys(range(2), kind), 1_000)
    calls[0].options.update(change)
    with pytest.raises(RuntimeError, match=message):
        calls[0].launch()
    torch.cuda.synchronize()


def test_wrong_tensors_are_named():
    ranks = VirtualRanks(2, EchoConfig())
    calls, _ = run_some(ranks, dict.fromkeys(range(2), Collective.reduce_scatter), 1_000)
    call = calls[0]
    x, out, state = call.x, call.out, call.state
    call.options["residual"] = 1
    with pytest.raises(RuntimeError, match="local residual only"):
        call.launch()
    call.options["residual"] = 0
    own, call.options["coefficients"] = call.options["coefficients"], Compensator(EchoConfig(**AVERAGES)).coefficients
    with pytest.raises(RuntimeError, match="compact state keeps no average"):
        call.launch()
    call.options["coefficients"] = own
    for call.x, call.out, call.state, message in (
        (x[:-1], out, state, "2 equal shares"),
        (x, out[:-1], state, "expected y of 1000"),
        (x, x.clone(), state, "expected y of 1000"),
        (x, out, state[:-1], "expected state of at least"),
        (x[:0], out[:0], state, "at least one value"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call.launch()
    torch.cuda.synchronize()


# -- CUDA graphs, schemas


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [AVERAGES, {"state_dtype": StateDtype.compact}, {"eta": 0.0, "rescale": Rescale.group}],
)
def test_fifty_replays_on_new_data(world_size, options):
    """A graph a rank of a pass as sequence parallelism makes it; the first calls of all are made inside the capture."""
    config, num_share_values = EchoConfig(**options), 20_008
    checked = SharingRanks(world_size, config)
    plan = [(kind, Site(idx, Direction.forward, bits=8 if kind is Collective.all_gather else 4))
            for idx in range(2) for kind in SHARES[::-1]]  # fmt: skip
    xs = [
        [x.clone() for x in inputs(normal, kind, world_size, num_share_values, torch.bfloat16, 0)] for kind, _ in plan
    ]
    calls, graphs = [], []
    for rank in checked.virtual.ranks:
        graph, captured = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=rank.stream):
            for (kind, site), tensors in zip(plan, xs, strict=True):
                x = tensors[rank.rank]
                call = ShareCall(rank, x, poisoned_output(x, kind, world_size), site, kind)
                call.out.fill_(math.nan)
                call.launch()
                call.finish()
                captured.append(call)
        calls.append(captured)
        graphs.append(graph)
    for replay in range(50):
        for step, ((kind, _), tensors) in enumerate(zip(plan, xs, strict=True)):
            seed = 1000 * replay + step
            for x, new in zip(
                tensors, inputs(normal, kind, world_size, num_share_values, torch.bfloat16, seed), strict=True
            ):
                x.copy_(new)
        checked.virtual.memory.fork()
        for graph, stream in zip(graphs, checked.virtual.memory.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        checked.virtual.memory.join()
        checked.virtual.memory.check()
        for step, ((kind, site), tensors) in enumerate(zip(plan, xs, strict=True)):
            for rank, expected in enumerate(checked.expected(kind, tensors, site)):
                what = f"replay {replay}, {kind.name} {step} on rank {rank}"
                assert_same_bits(calls[rank][step].out, expected, what)


@pytest.mark.parametrize("util", UTILS)
@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("eta", [0.0, None])
def test_opcheck(kind, eta, util, monkeypatch):
    monkeypatch.setattr(generate_tests, "deepcopy_tensors", lambda inputs: inputs)  # the peers know one workspace
    ops.load()
    library, config = torch.ops.echo_megatron, EchoConfig(eta=eta)
    operator = (library.all_gather if kind is Collective.all_gather else library.reduce_scatter).default
    for has_peer in (False, True):  # the first run loads and allocates what opcheck needs, before a kernel waits
        checked = SharingRanks(2, config, num_blocks=2, timeout_s=5.0 if has_peer else 0.05)
        xs, site = inputs(normal, kind, 2, 2_500, torch.bfloat16, seed=0), Site(1, Direction.forward)
        expected = checked.expected(kind, xs, site)
        calls = [
            ShareCall(rank, x, poisoned_output(x, kind, 2), site, kind)
            for rank, x in zip(checked.virtual.ranks, xs, strict=True)
        ]
        torch.cuda.synchronize()
        if has_peer and util != "test_autograd_registration":  # which runs nothing: no input requires a gradient
            with torch.cuda.stream(checked.virtual.memory.streams[1]):
                calls[1].launch()
        torch.library.opcheck(operator, calls[0].operands(), calls[0].options, test_utils=util)
        if util == "test_autograd_registration":
            continue
        if has_peer:
            checked.virtual.memory.check()
            for call, wanted in zip(calls, expected, strict=True):
                assert_same_bits(call.out, wanted, "output")
        else:
            assert checked.virtual.memory.failures()[0].code == "timeout"
