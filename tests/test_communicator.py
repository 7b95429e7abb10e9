"""The communicator on real gloo groups: against the reference, bit for bit, and against what broke other systems."""

import itertools
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import group_size

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale, Residual, TransportName
from echo_megatron.quantizer import Quantizer
from echo_megatron.reference import SimulatedGroup
from echo_megatron.sites import Site
from echo_megatron.transports.protocol import CommunicationError

NUM_SITES = 3
ROUGHLY = 2.0**-4  # a constant is one rotated value a block: its scale has 3 mantissa bits


def all_cases(sizes):
    """(config, bits, sizes, directions): every combination at one odd size, the presets at every size and direction."""
    combinations = itertools.product(Policy, (Algorithm.one_shot, Algorithm.two_shot), Residual, Rescale)
    for policy, algorithm, residual, rescale in combinations:
        config = EchoConfig(
            policy=policy, group_size=group_size(policy), algorithm=algorithm, residual=residual, rescale=rescale
        )
        yield config, 4, sizes[-1:], [Direction.forward]
    for preset in ("echo4", "echo8", "echo4_paper", "echo8_paper"):
        config = EchoConfig.preset(preset)
        yield config, config.bits, sizes, list(Direction)
    mixed = EchoConfig(residual=Residual.consensus, backward_residual=Residual.local)
    yield mixed, 4, sizes[-1:], list(Direction)


def contribution(rank, num_values, site_idx, dtype):
    generator = torch.Generator().manual_seed(1000 * num_values + 10 * rank + site_idx)
    return (torch.randn(num_values, generator=generator) * 10.0 ** (site_idx - 1)).to(dtype)


def run_cases(rank, world_size, cases):
    results = []
    for config, bits, sizes, directions in cases:
        communicator = Communicator(dist.group.WORLD, config)
        for num_values, dtype in sizes:
            for direction in directions:
                for idx in range(NUM_SITES):
                    x = contribution(rank, num_values, idx, dtype)
                    before = x.clone()
                    results.append(communicator.all_reduce(x, Site(idx, direction, bits=bits)))
                    assert torch.equal(x, before), "the input must be left alone"
    return results


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (1, [(1, torch.float32), (500, torch.bfloat16)]),
        (2, [(1, torch.bfloat16), (1000, torch.float32), (20_011, torch.float16), (1_001, torch.bfloat16)]),
        (3, [(2, torch.float32), (129, torch.bfloat16), (12_289, torch.bfloat16), (385, torch.float32)]),
        (4, [(3, torch.float32), (127, torch.float16), (16_384, torch.bfloat16), (509, torch.bfloat16)]),
        (5, [(4, torch.bfloat16), (641, torch.float32)]),
        (6, [(7, torch.bfloat16), (769, torch.float32)]),
        (7, [(6, torch.float32), (4_097, torch.bfloat16)]),
        (8, [(7, torch.float32), (1_025, torch.bfloat16)]),
    ],
)
def test_ranks_hold_the_reference_s_bits(world_size, sizes):
    """Every policy, algorithm, residual and rescaling; sizes of P-1, 128 P + 1 and others that don't divide."""
    cases = list(all_cases(sizes))
    if world_size > 4:
        cases = cases[:-4:4] + cases[-4:]
    ranks = run_ranks(run_cases, world_size, cases, timeout_s=120)
    position = 0
    for config, bits, case_sizes, directions in cases:
        simulated = SimulatedGroup(world_size, config)
        for num_values, dtype in case_sizes:
            for direction in directions:
                for idx in range(NUM_SITES):
                    xs = [contribution(rank, num_values, idx, dtype) for rank in range(world_size)]
                    expected = simulated.all_reduce(xs, Site(idx, direction, bits=bits))
                    assert expected.dtype is dtype
                    for results in ranks:
                        assert torch.equal(results[position], expected), (
                            config,
                            bits,
                            num_values,
                            dtype,
                            direction,
                            idx,
                        )
                    position += 1
    assert position == len(ranks[0])


def run_fuzz(rank, world_size, script):
    communicator = Communicator(dist.group.WORLD, script[0])
    return [
        communicator.all_reduce(contribution(rank, n, i, dtype), Site(i, direction))
        for n, i, dtype, direction in script[1]
    ]


calls = st.tuples(
    st.integers(1, 5000),
    st.integers(0, NUM_SITES - 1),
    st.sampled_from((torch.bfloat16, torch.float32)),
    st.sampled_from(list(Direction)),
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(2, 4),
    st.sampled_from(list(Policy)),
    st.sampled_from(list(Residual)),
    st.sampled_from((None, *Residual)),
    st.lists(calls, min_size=1, max_size=12),
)
def test_any_sequence_of_calls_equals_the_reference(world_size, policy, residual, backward_residual, sequence):
    """Shapes, dtypes, sites and directions in any order: state resets are the same everywhere."""
    residuals = {"residual": residual, "backward_residual": backward_residual}
    config = EchoConfig(policy=policy, group_size=group_size(policy), **residuals)
    ranks = run_ranks(run_fuzz, world_size, (config, sequence))
    simulated = SimulatedGroup(world_size, config)
    for position, (n, i, dtype, direction) in enumerate(sequence):
        xs = [contribution(rank, n, i, dtype) for rank in range(world_size)]
        expected = simulated.all_reduce(xs, Site(i, direction))
        assert all(torch.equal(results[position], expected) for results in ranks)


class CountedBytes:
    """Bytes that this rank hands to torch.distributed for its peers, by counting inside the real calls."""

    def __init__(self):
        self.sent = 0
        self._originals = dist.all_to_all_single, dist.all_gather_into_tensor

    def __enter__(self):
        all_to_all, all_gather = self._originals

        def counted_all_to_all(output, tensor, receive_sizes, send_sizes, group, **kwargs):
            assert tensor.dtype is torch.uint8 and send_sizes[dist.get_rank()] == 0
            self.sent += sum(send_sizes)
            return all_to_all(output, tensor, receive_sizes, send_sizes, group=group, **kwargs)

        def counted_all_gather(output, tensor, group, **kwargs):
            if tensor.dtype is torch.uint8:  # the agreement on the call is int64: 48 B, not payload
                self.sent += tensor.numel() * (group.size() - 1)
            return all_gather(output, tensor, group=group, **kwargs)

        dist.all_to_all_single, dist.all_gather_into_tensor = counted_all_to_all, counted_all_gather
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, dist.all_gather_into_tensor = self._originals


def count_bytes(rank, world_size, config, num_values):
    communicator = Communicator(dist.group.WORLD, config)
    with CountedBytes() as counted:
        communicator.all_reduce(torch.randn(num_values), Site(0, Direction.forward, bits=config.bits))
    return counted.sent


@pytest.mark.parametrize("preset", ["echo4", "echo4_paper", "echo8"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_packed_bytes_are_what_travels(preset, world_size):
    """At 4 bits 68 B for 128 values each way, plus tile headers under 1 %."""
    num_values = 1 << 20
    config = EchoConfig.preset(preset)
    bytes_of_128 = 68 if config.bits == 4 else 132
    # One-shot at P=2: everything to the one peer. Two-shot: (P-1)/P of the tensor in push and again in gather.
    expected = num_values / 128 * bytes_of_128 * (1 if world_size == 2 else 2 * (world_size - 1) / world_size)
    for sent in run_ranks(count_bytes, world_size, config, num_values):
        assert expected <= sent < 1.01 * expected


def strided_calls(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(rank))
    offset = torch.randn(6 * 1024 + 1, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)[1:]
    views = [x.t(), x[:, ::2], x[3:5].expand(7, 2, 96), x[:, 1:33], offset, x.t()[5]]
    return [
        (
            communicator.all_reduce(view, Site(0, Direction.forward)),
            communicator.all_reduce(view.contiguous(), Site(0, Direction.forward)),
        )
        for view in views
    ]


def test_strided_and_misaligned_inputs_equal_their_contiguous_copies():
    """A non-contiguous input came back unreduced from other systems: t(), [:, ::2], expand(), a 2-byte offset."""
    for pairs in run_ranks(strided_calls, 2):
        for strided, contiguous in pairs:
            assert torch.equal(strided, contiguous) and strided.is_contiguous()


def overwriting_calls(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    outputs = []
    for step in range(30):
        x = torch.full((3008,), float(rank + step))
        if rank == step % world_size:
            time.sleep(0.003)
        outputs.append(communicator.all_reduce(x, Site(0, Direction.forward)))  # 3,008 values: whole blocks of 32
        x.fill_(float("nan"))
    return outputs


def test_overwriting_the_input_after_the_call_harms_nobody():
    for outputs in run_ranks(overwriting_calls, 3):
        for step, output in enumerate(outputs):
            exact = 3.0 * step + 3
            assert (output - exact).abs().max() <= 0.15 * max(exact, 1.0)


def many_sizes(rank, world_size):
    communicator, simulated = Communicator(dist.group.WORLD, EchoConfig()), SimulatedGroup(world_size, EchoConfig())
    sizes = torch.randint(1, 20_000, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    for step, num_values in enumerate(sizes):
        if step % 13 == rank:
            time.sleep(0.002)
        site = Site(step % 2, Direction.forward)
        y = communicator.all_reduce(contribution(rank, num_values, 0, torch.float32), site)
        xs = [contribution(peer, num_values, 0, torch.float32) for peer in range(world_size)]
        assert torch.equal(y, simulated.all_reduce(xs, site))
    return True


def test_changing_sizes_back_to_back_with_a_slow_rank():
    assert all(run_ranks(many_sizes, 4, timeout_s=120))


def communicators_come_and_go(rank, world_size):
    import gc

    def open_files():
        return len(list(Path("/proc/self/fd").iterdir()))

    def cycle():
        communicator = Communicator(dist.group.WORLD, EchoConfig())
        for idx in range(2):
            communicator.all_reduce(torch.ones(2000), Site(idx, Direction.forward))

    cycle()
    before = open_files()
    for _ in range(100):
        cycle()
    gc.collect()
    return before, open_files()


def test_creating_and_dropping_communicators_leaks_no_descriptors():
    for before, after in run_ranks(communicators_come_and_go, 2):
        assert after <= before


def different_calls(rank, world_size, kind):
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=10))
    communicator.all_reduce(torch.ones(1000), Site(0, Direction.forward))
    site = Site(
        1 if kind != "site" or rank != 1 else 2, Direction.forward, bits=8 if kind == "bits" and rank == 1 else 4
    )
    size = 999 if kind == "elements" and rank == 1 else 1000
    try:
        communicator.all_reduce(torch.ones(size), site)
    except CommunicationError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("elements", "elements 999 (here 1000)"), ("site", "site 2 (here 1)"), ("bits", "bits 8 (here 4)")],
)
def test_ranks_that_make_different_calls_are_told(kind, theirs):
    messages = run_ranks(different_calls, 3, kind)
    assert "rank 1 has " + theirs in messages[0] and "rank 1 has " + theirs in messages[2]
    assert "expected the same call on all 3 ranks" in messages[1] and "rank 0 has" in messages[1]


def killed_peer(rank, world_size, timeout_s):
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=timeout_s))
    communicator.all_reduce(torch.ones(5000), Site(0, Direction.backward))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.time()
    try:
        communicator.all_reduce(
            torch.ones(5000), Site(1, Direction.backward, name="layers.0.self_attention.linear_qkv")
        )
    except CommunicationError as error:
        return time.time() - start, str(error)
    raise AssertionError("the call succeeded without its peer")


def start_rank(rank, world_size, folder, fn, args):
    """As `run_ranks` does it, but a rank may die: no barrier at the end, and no clean-up that waits for the others."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.save(fn(rank, world_size, *args), f"{folder}/result{rank}")
    os._exit(0)


def run_with_losses(fn, world_size, folder, *args):
    """Exit code of every rank; what `fn` returned lies in result0, result1, …"""
    context = torch.multiprocessing.get_context("fork")
    ranks = range(world_size)
    processes = [context.Process(target=start_rank, args=(rank, world_size, str(folder), fn, args)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_a_killed_peer_is_reported_by_the_survivors_within_the_limit(tmp_path):
    assert run_with_losses(killed_peer, 3, tmp_path, 15.0) == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        seconds, message = torch.load(tmp_path / f"result{rank}", weights_only=False)
        assert seconds < 20
        assert f"rank {rank} of 3" in message and "backward site 1" in message and "linear_qkv" in message
        assert "timeout_s=15" in message


def late_peer(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=1.0))
    if rank == 1:
        time.sleep(4)
        return None
    start = time.time()
    try:
        communicator.all_reduce(torch.ones(5000), Site(0, Direction.forward))
    except CommunicationError as error:
        return time.time() - start, str(error)
    raise AssertionError("the call succeeded without its peer")


def test_a_late_peer_ends_the_wait(tmp_path):
    assert run_with_losses(late_peer, 2, tmp_path) == [0, 0]
    seconds, message = torch.load(tmp_path / "result0", weights_only=False)
    assert 0.9 < seconds < 3.5
    assert "rank 0 of 2" in message and "forward site 0" in message and "timeout_s=1" in message


def inference_then_training(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    xs = [contribution(rank, 1000, idx, torch.float32) for idx in range(3)]
    with torch.inference_mode():
        evaluated = [communicator.all_reduce(x, Site(idx, Direction.forward)) for idx, x in enumerate(xs)]
        evaluated = [y.clone() for y in evaluated]
    trained = [communicator.all_reduce(x, Site(idx, Direction.forward)) for idx, x in enumerate(xs)]
    return all(torch.equal(a, b) for a, b in zip(evaluated, trained, strict=True))


def test_a_pass_in_inference_mode_before_training():
    assert run_ranks(inference_then_training, 2) == [True] * 2


def large_odd_size(rank, world_size):
    xs = [contribution(peer, 10_000_019, 1, torch.bfloat16) for peer in range(world_size)]
    communicator, simulated = Communicator(dist.group.WORLD, EchoConfig()), SimulatedGroup(world_size, EchoConfig())
    site = Site(0, Direction.forward)
    return torch.equal(communicator.all_reduce(xs[rank], site), simulated.all_reduce(xs, site))


def test_ten_million_and_nineteen_elements():
    assert run_ranks(large_odd_size, 2, timeout_s=120) == [True] * 2


def group_destroyed_first(rank, world_size):
    import gc

    group = dist.new_group()
    communicator = Communicator(group, EchoConfig())
    communicator.all_reduce(torch.ones(2000), Site(0, Direction.forward))
    dist.destroy_process_group(group)
    del group, communicator
    gc.collect()
    return True


def test_a_communicator_collected_after_its_group_communicates_no_more():
    assert run_ranks(group_destroyed_first, 2) == [True] * 2


def wrong_dtype(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    with pytest.raises(ValueError, match=r"expected a tensor of bfloat16, float16 or float32, got torch\.float64"):
        communicator.all_reduce(torch.ones(4, dtype=torch.float64), Site(0, Direction.forward))
    empty = communicator.all_reduce(torch.ones(0, 4), Site(0, Direction.forward))
    return empty.shape


def test_wrong_dtype_is_refused_and_empty_tensors_pass():
    assert run_ranks(wrong_dtype, 2) == [(0, 4)] * 2


def quantizations(rank, world_size, algorithm):
    counts = torch.zeros(30_000)
    original = Quantizer.quantize
    values_seen = []

    def counting(self, values, exponent=None):
        values_seen.append(values.numel())
        return original(self, values, exponent)

    Quantizer.quantize = counting
    Communicator(dist.group.WORLD, EchoConfig(algorithm=algorithm)).all_reduce(counts, Site(0, Direction.forward))
    return sum(values_seen)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_quantizes_what_it_sends_and_its_sum_only(world_size):
    """Two-shot: (P-1)/P of the tensor pushed and 1/P gathered; summed over ranks, an element is quantized P times, P-1
    contributions once each and their sum once: at most two roundings on any path."""
    for total in run_ranks(quantizations, world_size, Algorithm.two_shot):
        assert total <= 30_000 + 32 * world_size
    assert run_ranks(quantizations, world_size, Algorithm.one_shot) == [30_016 - 30_016 % 32] * world_size


def replaying(rank, world_size, algorithm, keep):
    communicator = Communicator(
        dist.group.WORLD, EchoConfig(algorithm=algorithm), is_recomputed=lambda: keep, max_passes=None
    )
    first = [communicator.all_reduce(torch.randn(3000), Site(i, Direction.forward)).clone() for i in range(3)]
    second = [communicator.all_reduce(torch.randn(3000), Site(i, Direction.forward)).clone() for i in range(3)]
    held = communicator.num_state_bytes()
    replayed = []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            for i in (2, 0, 1):
                replayed.append(communicator.all_reduce(torch.full((3000,), float("nan")), Site(i, Direction.forward)))
            return grad

    for _ in range(2):
        Recompute.apply(torch.ones(1, requires_grad=True)).sum().backward()
    order = [first[i] for i in (2, 0, 1)] + [second[i] for i in (2, 0, 1)]
    return all(torch.equal(a, b) for a, b in zip(order, replayed, strict=True)), held, communicator.replays.num_bytes()


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_return_the_first_run_s_bits_first_in_first_out(algorithm, world_size):
    for equal, held, left in run_ranks(replaying, world_size, algorithm, True):
        assert equal and left == 0
        # Two-shot keeps about 4.25 bits an element, one-shot P times that or, where it is smaller, the FP32 sum itself.
        state = 1.125 * 3008
        per_site = (held - state) / 6
        one_shot_bytes = min(world_size * 3008 * 4.25 / 8, 3000 * 4)
        expected = one_shot_bytes if algorithm is Algorithm.one_shot else 3008 * 4.25 / 8
        assert expected <= per_site < expected * 1.1 + 200


def test_a_replay_without_kept_codes_says_what_is_expected():
    with pytest.raises(AssertionError, match=r"kept no codes to replay\. Expected: activation recompute"):
        run_ranks(replaying, 2, Algorithm.one_shot, False)


# -- where the sum goes


SHAPE = (94, 64)


def given_outs(x):
    """Name -> (contribution of x's values, `out`, storage around `out`)."""
    nan = float("nan")
    yield "none", x.clone(), None, None
    yield "x itself", (same := x.clone()), same, None
    yield "another tensor", x.clone(), (other := torch.full_like(x, nan)), other
    turned = torch.full((SHAPE[1], SHAPE[0]), nan, dtype=x.dtype)
    yield "transposed", x.clone(), turned.t(), turned
    wide = torch.full((SHAPE[0], 2 * SHAPE[1]), nan, dtype=x.dtype)
    yield "every other", x.clone(), wide[:, ::2], wide
    own = x.t().contiguous()
    yield "x itself, transposed", own.t(), own.t(), own
    wide = torch.full((SHAPE[0], 2 * SHAPE[1]), nan, dtype=x.dtype)
    wide[:, 1::2] = x
    yield "x itself, every other", wide[:, 1::2], wide[:, 1::2], wide


def calls_with_out(rank, world_size, config, dtype):
    """One pass whose sums go to every kind of place."""
    communicator = Communicator(dist.group.WORLD, config)
    sums = {}
    for idx in range(7):
        x = contribution(rank, 94 * 64, idx % NUM_SITES, dtype).view(SHAPE)
        name, given, out, storage = list(given_outs(x))[idx]
        y = communicator.all_reduce(given, Site(idx, Direction.forward), out=out)
        assert out is None or y is out, name
        assert "itself" in name or torch.equal(given, x), f"{name}: the input must be left alone"
        assert storage is None or storage.isnan().sum() == storage.numel() - x.numel(), (
            f"{name}: nothing else is written"
        )
        sums[name] = y.clone()
    return sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("preset", ["echo4", "echo4_paper"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_sum_goes_where_it_is_asked_to(world_size, preset, dtype):
    config = EchoConfig.preset(preset)
    ranks = run_ranks(calls_with_out, world_size, config, dtype)
    simulated = SimulatedGroup(world_size, config)
    for idx, name in enumerate(ranks[0]):
        xs = [contribution(rank, 94 * 64, idx % NUM_SITES, dtype).view(SHAPE) for rank in range(world_size)]
        expected = simulated.all_reduce(xs, Site(idx, Direction.forward))
        for sums in ranks:
            assert torch.equal(sums[name], expected), name


def out_without_a_sum(rank, world_size):
    """One rank, and no elements: `out` is filled as well."""
    group = dist.new_group([rank], use_local_synchronization=True)
    x, out = torch.randn(3, 5), torch.zeros(5, 3).t()
    alone = Communicator(group, EchoConfig())
    assert alone.all_reduce(x, Site(0, Direction.forward), out=out) is out and torch.equal(out, x)
    assert alone.all_reduce(x, Site(1, Direction.forward), out=x) is x
    empty = torch.empty(0, 5)
    pair = Communicator(dist.group.WORLD, EchoConfig())
    assert pair.all_reduce(empty, Site(0, Direction.forward), out=empty) is empty
    return True


def test_out_of_one_rank_and_of_no_elements():
    assert run_ranks(out_without_a_sum, 2) == [True] * 2


def replaying_into_out(rank, world_size, algorithm):
    """Sums and replays in place, each overwritten by its caller as soon as it has it."""
    config = EchoConfig(algorithm=algorithm)
    communicator = Communicator(dist.group.WORLD, config, is_recomputed=lambda: True)
    first, replayed = [], []
    for idx in range(3):
        x = contribution(rank, 3000, idx, torch.bfloat16)
        first.append(communicator.all_reduce(x, Site(idx, Direction.forward), out=x).clone())
        x.zero_()

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            for idx in range(3):
                x = torch.full((3000,), float("nan"), dtype=torch.bfloat16)
                assert communicator.all_reduce(x, Site(idx, Direction.forward), out=x) is x
                replayed.append(x.clone())
                x.zero_()
            return grad

    Recompute.apply(torch.ones(1, requires_grad=True)).sum().backward()
    return all(torch.equal(a, b) for a, b in zip(first, replayed, strict=True)) and len(replayed) == 3


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("world_size", [2, 4])
def test_replays_in_place_of_sums_in_place(algorithm, world_size):
    """One-shot at four ranks keeps the sum itself, which its caller overwrites."""
    assert run_ranks(replaying_into_out, world_size, algorithm) == [True] * world_size


# -- which transport


class Logged(logging.Handler):
    """Messages of the communicators made meanwhile."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        self.logger = logging.getLogger("echo_megatron")
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self)


def made_without_gpus(rank, world_size):
    torch.cuda.is_available = lambda: False  # also where the tests run beside GPUs
    made = {}
    for name in TransportName.__members__:
        with Logged() as logged:
            try:
                communicator = Communicator(dist.group.WORLD, EchoConfig(transport=name))
                made[name] = communicator.transport.name, communicator.describe(), logged.messages
            except ValueError as error:
                made[name] = str(error)
    x = torch.ones(1000)
    y = communicator.all_reduce(x, Site(0, Direction.forward))  # the group serves on after a refusal
    return made, y.mean().item()


def test_without_gpus_auto_says_why_it_is_collective_and_p2p_is_refused():
    for rank, (made, mean) in enumerate(run_ranks(made_without_gpus, 2)):
        for name, why in (("auto", "no GPUs in this group"), ("collective", "asked for")):
            transport, described, messages = made[name]
            assert transport == "collective"
            assert described == (
                f"echo: 4-bit rotated (groups of 32), collective transport ({why}), algorithm one_shot (at 2 ranks), "
                "local residual, eta 1, compact state, rescale tile; messages under 16384 bytes stay at full "
                "precision; 0.0 MiB of workspace"
            )
            assert messages == ([described] if rank == 0 else []), "one line a group"
        refusal = (
            "transport p2p: rank 0 cannot: there is no CUDA GPU; remove the cause, or use transport: auto or collective"
        )
        assert made["p2p"] == refusal
        assert mean == pytest.approx(2.0, rel=ROUGHLY)


def one_rank_of(rank, world_size):
    group = dist.new_group([rank], use_local_synchronization=True)
    communicator = Communicator(group, EchoConfig(transport=TransportName.p2p, eta=0.0))
    return communicator.transport.name, communicator.describe()


def test_one_rank_needs_no_transport():
    for name, described in run_ranks(one_rank_of, 2):
        assert name == "collective" and "collective transport (one rank)" in described
        assert "no compensation" in described


def agreed(rank, world_size, facts):
    """What `p2p.agree` finds when rank 1 differs from the others in one fact."""
    from echo_megatron.transports import p2p

    differs = rank == 1
    p2p.why_unavailable = lambda group: "nvcc is missing" if differs and facts == "rank" else None
    p2p.host_number = lambda: int(differs and facts == "host")
    p2p.device_number = lambda device: 7 if facts == "device" else 10 * rank + device
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    if facts == "peer access":
        torch.cuda.device_count = lambda: world_size
        p2p.device_number = lambda device: (rank + device) % world_size  # every rank sees its own GPU first
        torch.cuda.can_device_access_peer = lambda device, other: not differs
    return p2p.agree(dist.group.WORLD)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ("none", None),
        ("rank", "rank 1 cannot"),
        ("host", "the ranks are on several hosts"),
        ("device", "two ranks share a GPU"),
        ("peer access", "the GPUs have no peer access to each other"),
    ],
)
def test_ranks_agree_on_why_p2p_is_not_possible(facts, reason):
    """The same answer everywhere, whichever rank it is that can't; planted facts in place of GPUs."""
    for rank, answer in enumerate(run_ranks(agreed, 3, facts)):
        assert answer == reason or (facts == "rank" and answer.startswith(reason))
        if facts == "rank" and rank == 1:
            assert answer == "rank 1 cannot: nvcc is missing"


def made_where_p2p_fails(rank, world_size, transport, fails_at):
    from echo_megatron.transports import p2p

    torch.cuda.is_available = lambda: True
    dist.get_backend_config = lambda group: "cpu:gloo,cuda:nccl"
    p2p.agree = lambda group: "two ranks share a GPU" if fails_at == "agree" else None

    def connect(group, config):
        raise CommunicationError("p2p transport: could not map the peers' memory on rank 1")

    p2p.connect = connect
    communicator = Communicator(dist.group.WORLD, EchoConfig(transport=transport))
    return communicator.transport.name, communicator.describe()


@pytest.mark.parametrize(
    ("fails_at", "reason"),
    [("agree", "two ranks share a GPU"), ("connect", "could not map the peers' memory on rank 1")],
)
def test_where_p2p_is_not_possible_auto_is_collective_and_says_why(fails_at, reason):
    for name, described in run_ranks(made_where_p2p_fails, 2, "auto", fails_at):
        assert name == "collective" and "p2p is not possible: " in described and reason in described
    with pytest.raises(AssertionError, match=r"ValueError: transport p2p: .*" + reason + ".* use transport: auto or"):
        run_ranks(made_where_p2p_fails, 2, "p2p", fails_at)


# -- its end


def ended(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig(), is_recomputed=lambda: True)
    communicator.check()
    x = torch.ones(1000)
    communicator.all_reduce(x, Site(0, Direction.forward))
    communicator.check()
    assert communicator.replays.num_bytes() > 0
    assert not communicator.sums_exactly(x)
    with pytest.raises(NotImplementedError, match="no exact all-reduce; call the process group's own"):
        communicator.exact_all_reduce(x, Site(0, Direction.forward))
    for _ in range(2):
        communicator.destroy()
        communicator.check()
    assert communicator.replays.num_bytes() == 0 and communicator.transport.num_bytes() == 0
    again = Communicator(dist.group.WORLD, EchoConfig())
    return again.all_reduce(x, Site(0, Direction.forward)).mean().item()


def test_check_and_destroy_do_no_harm_where_nothing_is_held():
    assert run_ranks(ended, 2) == [pytest.approx(2.0, rel=ROUGHLY)] * 2
