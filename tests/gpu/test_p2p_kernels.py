"""One GPU, several ranks on it: the fused kernels give the reference's outputs, codes and state, bit for bit."""

import itertools
import math
import random

import pytest
import torch
from feedbacks import AVERAGES
from policies import group_size
from virtual_checks import CheckedRanks, assert_same_bits
from virtual_ranks import DTYPES, VirtualRanks, highest_depth
from virtual_workspaces import VirtualWorkspaces

from echo_megatron.compensator import Compensator
from echo_megatron.config import GROUP_SIZES, Algorithm, Direction, EchoConfig, Policy, Rescale, Residual, StateDtype
from echo_megatron.sites import Site

ALGORITHMS = [Algorithm.one_shot, Algorithm.two_shot]
POLICIES = list(Policy)
ROTATED = (Policy.rotated, Policy.rotated_asymmetric)
WITH_AVERAGES = (StateDtype.bf16, StateDtype.fp32)
COMPENSATIONS = [
    {"eta": 0.0},
    *({"state_dtype": dtype} for dtype in StateDtype),
    *({"state_dtype": dtype, **AVERAGES} for dtype in WITH_AVERAGES),
    *({"residual": Residual.consensus, "state_dtype": dtype} for dtype in WITH_AVERAGES),
    {"residual": Residual.consensus, "beta1": 0.0, "beta2": 0.0},
]
NUM_SITES = 3


def normal(world_size, num_values, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(num_values, generator=generator, device="cuda").to(dtype) for _ in range(world_size)]


def wild(world_size, num_values, dtype, seed):
    """Magnitudes from 2^-120 to 2^100 from block to block, zero and constant groups, a few NaN and Inf."""
    generator = torch.Generator("cuda").manual_seed(seed)
    lowest, highest = (-24, 12) if dtype is torch.float16 else (-120, 100)
    xs = []
    for _ in range(world_size):
        options = {"generator": generator, "device": "cuda"}
        num_runs = -(-num_values // 512)
        exponent = torch.randint(lowest, highest + 1, (num_runs, 1), **options).to(torch.float32)
        x = torch.randn(num_runs, 512, **options) * 2.0**exponent
        kind = torch.randint(0, 8, (num_runs, 1), **options)
        x = x.where(kind != 0, 0.0).where(kind != 1, x[:, :1]).where(kind != 2, x.abs())
        x = x.flatten()[:num_values]
        if num_values > 2000:
            places = torch.randint(0, num_values, (3,), **options)
            x[places] = torch.tensor([math.nan, math.inf, -math.inf], device="cuda")
        xs.append(x.to(dtype))
    return xs


def misaligned(xs):
    """The same values one element further than an allocation begins: 2 or 4 bytes off."""
    views = []
    for x in xs:
        storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        storage[1:].copy_(x)
        views.append(storage[1:])
    return views


# -- everything with everything, at one size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_combination_equals_the_reference(world_size, policy, bits, dtype):
    memory = VirtualWorkspaces(world_size)
    num_values = 20_011
    for algorithm, rescale, compensation in itertools.product(ALGORITHMS, Rescale, COMPENSATIONS):
        options = {"algorithm": algorithm, "rescale": rescale, **compensation}
        config = EchoConfig(policy=policy, group_size=group_size(policy), **options)
        checked = CheckedRanks(world_size, config, memory=memory)
        for idx in range(NUM_SITES):
            xs = normal(world_size, num_values, dtype, seed=idx)
            checked.all_reduce(xs, Site(idx, Direction.forward, bits=bits), in_place=idx == 1, keep_codes=idx != 2)


# -- sizes: each with every policy and algorithm, the other options drawn


def sizes(world_size):
    tiny = {1, 7, 31, 32, 127, 129, world_size - 1, 128 * world_size + 1, 32 * world_size}
    return [*sorted(tiny), 4095, 4096, 4097, 4096 * world_size + 1, 100_003, 1_000_003]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_sizes_with_drawn_options(world_size, policy):
    draw = random.Random(f"{world_size} {policy.name}")
    memory = VirtualWorkspaces(world_size)
    for num_values, algorithm in itertools.product(sizes(world_size), ALGORITHMS):
        bits, dtype, direction = draw.choice((4, 8)), draw.choice(DTYPES), draw.choice(list(Direction))
        options = {
            "group_size": draw.choice(GROUP_SIZES),
            "rescale": draw.choice(list(Rescale)),
            "algorithm": algorithm,
        }
        config = EchoConfig(policy=policy, **options, **draw.choice(COMPENSATIONS))
        depth, num_blocks = (
            draw.randint(1, highest_depth(config, algorithm, bits, dtype)),
            draw.randint(1, memory.num_blocks),
        )
        make = draw.choice((normal, normal, wild))
        checked = CheckedRanks(world_size, config, memory=memory, depth=depth)
        for idx in range(NUM_SITES):
            xs = make(world_size, num_values, dtype, seed=draw.randrange(2**31))
            xs = misaligned(xs) if draw.random() < 0.25 else xs
            call = {"in_place": draw.random() < 0.3, "keep_codes": draw.random() < 0.7, "num_blocks": num_blocks}
            what = f"{make.__name__} depth={depth} {call}"
            checked.all_reduce(xs, Site(idx, direction, bits=bits), what=what, **call)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("world_size", "policy"), [*zip((2, 3, 4, 5, 8), POLICIES, strict=True)])
def test_ten_million_values(world_size, policy, algorithm):
    config = EchoConfig(policy=policy, group_size=group_size(policy), algorithm=algorithm)
    checked = CheckedRanks(world_size, config)
    for idx in range(2):
        xs = normal(world_size, 10_000_019, torch.bfloat16, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward), keep_codes=False)


@pytest.mark.parametrize("preset", ["echo4", "echo8", "echo4_paper", "echo8_paper"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_presets_over_two_passes_and_both_directions(world_size, preset):
    config = EchoConfig.preset(preset)
    checked = CheckedRanks(world_size, config)
    sequence = [(idx, direction) for direction in Direction for idx in range(4)] * 2
    for step, (idx, direction) in enumerate(sequence):
        xs = normal(world_size, 70_001, torch.bfloat16, seed=step)
        checked.all_reduce(xs, Site(idx, direction, bits=config.bits))


def test_sites_of_different_bits_share_a_pass():
    checked = CheckedRanks(2, EchoConfig())
    for idx, bits in enumerate((8, 8, 4, 4)):
        checked.all_reduce(normal(2, 9_001, torch.bfloat16, seed=idx), Site(idx, Direction.forward, bits=bits))


# -- where things lie


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_misaligned_views(algorithm, dtype, in_place):
    for policy, residual in itertools.product((Policy.rotated, Policy.zero_aware), Residual):
        config = EchoConfig(policy=policy, group_size=group_size(policy), algorithm=algorithm, residual=residual)
        checked = CheckedRanks(3, config)
        for idx in range(2):
            xs = misaligned(normal(3, 33_333, dtype, seed=idx))
            assert xs[0].data_ptr() % 16
            checked.all_reduce(xs, Site(idx, Direction.forward), in_place=in_place)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 5])
def test_messages_far_larger_than_the_ring(world_size, algorithm, depth):
    """Two thread blocks a rank: a team has more than 80 tiles for 16 slots."""
    config = EchoConfig(policy=Policy.zero_aware, group_size=128, algorithm=algorithm)
    checked = CheckedRanks(world_size, config, num_blocks=2, depth=depth)
    num_values = 4096 * 8 * 16 * 5 * (world_size if algorithm is Algorithm.two_shot else 1) + 37
    for idx in range(2):
        xs = normal(world_size, num_values, torch.bfloat16, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward), keep_codes=idx == 1)


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_messages_about_as_large_as_the_ring(algorithm, times):
    """The ring's 16 slots of each of 8 teams exactly, once and four times over, and a value or a tile more or less."""
    config = EchoConfig(algorithm=algorithm)
    checked = CheckedRanks(2, config, num_blocks=2, depth=4)
    full = 4096 * 8 * 16 * times * (2 if algorithm is Algorithm.two_shot else 1)
    for idx, more in enumerate((-4096, -1, 0, 1, 4096)):
        xs = normal(2, full + more, torch.bfloat16, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward))


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_a_smaller_grid_than_the_workspace_allows(num_blocks):
    checked = CheckedRanks(2, EchoConfig())
    for idx in range(3):
        xs = normal(2, 200_003, torch.bfloat16, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward), num_blocks=num_blocks + idx)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_tile_numbers_wrap(world_size, algorithm):
    config = EchoConfig(policy=Policy.zero_aware, group_size=128, algorithm=algorithm)
    checked = CheckedRanks(world_size, config, num_blocks=1)
    memory = checked.virtual.memory
    memory.set_epochs(2**32 - 5)
    for idx in range(8):
        xs = normal(world_size, 4096 * 4 * 3 * world_size, torch.bfloat16, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward))
    assert all(0 < epoch < 2**31 for epoch in memory.epochs(0))


def test_the_number_of_rescaled_calls_wraps():
    checked = CheckedRanks(3, EchoConfig(rescale=Rescale.group))
    checked.virtual.memory.set_amax_epoch(2**32 - 3)
    for idx in range(6):
        checked.all_reduce(normal(3, 5_001, torch.bfloat16, seed=idx), Site(idx, Direction.forward))


# -- values


@pytest.mark.parametrize("rescale", list(Rescale))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_exponents(bits, policy, algorithm, rescale):
    """A magnitude a tile, from FP32's subnormal numbers to its largest; NaN and Inf as they come."""
    config = EchoConfig(policy=policy, group_size=group_size(policy), algorithm=algorithm, rescale=rescale)
    checked = CheckedRanks(2, config)
    exponents = torch.arange(-149, 128, 4, device="cuda", dtype=torch.float64)
    for idx, dtype in enumerate((torch.float32, torch.bfloat16)):
        base = torch.stack(normal(2, 4096 * len(exponents), torch.float32, seed=bits)).double().view(2, -1, 4096)
        xs = (base * 2.0 ** exponents.view(-1, 1)).to(torch.float32).to(dtype).view(2, -1).unbind()
        checked.all_reduce([x.clone() for x in xs], Site(0, Direction.forward, bits=bits), what=f"case {idx}")
        checked.all_reduce([x.clone() for x in xs], Site(1, Direction.forward, bits=bits), what=f"case {idx}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_nan_and_inf_stay_in_their_group(policy, algorithm, dtype):
    size = group_size(policy)
    config = EchoConfig(policy=policy, group_size=size, algorithm=algorithm)
    checked = CheckedRanks(3, config)
    places = {0: (0, math.nan), 1: (9_999, math.inf), 2: (20_000, -math.inf)}
    xs = normal(3, 30_011, dtype, seed=1)
    for rank, (place, value) in places.items():
        xs[rank][place] = value
    y = checked.all_reduce(xs, Site(0, Direction.forward))
    groups = torch.zeros(30_011, dtype=torch.bool, device="cuda")
    for place, _ in places.values():
        begin = place // size * size
        groups[begin : begin + size] = True
    assert y[groups].isnan().all(), "a group with NaN or Inf on one rank is NaN as a whole"
    assert y[~groups].isfinite().all(), "and touches no other group"
    checked.all_reduce(normal(3, 30_011, dtype, seed=2), Site(1, Direction.forward))
    clean = checked.all_reduce(normal(3, 30_011, dtype, seed=3), Site(0, Direction.forward))
    assert clean.isfinite().all(), "the next pass starts clean"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_outlier_of_3e5_in_each_group_stays_finite(policy, dtype):
    config = EchoConfig(policy=policy, group_size=group_size(policy))
    checked = CheckedRanks(2, config)
    xs = normal(2, 12_800, dtype, seed=3)
    for x in xs:
        x[:: group_size(policy)] = 3e5
    y = checked.all_reduce(xs, Site(0, Direction.forward))
    assert y.isfinite().all()
    assert (y[:: group_size(policy)].float() / 6e5 - 1).abs().max() < 0.15


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_zero_and_constant_groups(policy, algorithm, dtype):
    size = group_size(policy)
    for rescale in Rescale:
        config = EchoConfig(policy=policy, group_size=size, algorithm=algorithm, rescale=rescale)
        checked = CheckedRanks(2, config)
        zeros = [torch.zeros(10_007, dtype=dtype, device="cuda") for _ in range(2)]
        assert torch.equal(checked.all_reduce(zeros, Site(0, Direction.forward)), zeros[0])
        mixed = []
        for x in normal(2, 10_007, dtype, seed=4):
            x[: 3 * size] = 0.0
            x[5 * size : 9 * size] = 1.0
            x[-100:] = -0.5
            mixed.append(x)
        y = checked.all_reduce(mixed, Site(0, Direction.forward))
        assert y.isfinite().all()
        assert (y[: 3 * size] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rescale", [Rescale.tile, Rescale.group])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_relative_error_is_the_same_at_every_amplitude(policy, rescale, dtype):
    """Amplitudes of 2^-30 to 2^15 give the same codes: the output is the same but for the power of two."""
    config = EchoConfig(policy=policy, group_size=group_size(policy), rescale=rescale)
    checked = CheckedRanks(2, config)
    xs = normal(2, 8_192, dtype, seed=5)
    at_one = checked.all_reduce(xs, Site(0, Direction.forward))
    for exponent in range(-30, 16, 5):
        y = checked.all_reduce([x * 2.0**exponent for x in xs], Site(0, Direction.forward))
        assert_same_bits(y, at_one * 2.0**exponent, f"output at 2^{exponent}")


def test_an_outlier_channel_keeps_the_others_accurate():
    """One channel of 128 at 100 times the rest: finer than one scale for all of them would be."""
    checked = CheckedRanks(2, EchoConfig())
    xs = [x.view(-1, 128) for x in normal(2, 128 * 512, torch.bfloat16, seed=6)]
    for x in xs:
        x[:, 17] *= 100
    y = checked.all_reduce([x.reshape(-1) for x in xs], Site(0, Direction.forward)).view(-1, 128).float()
    exact = xs[0].float() + xs[1].float()
    others = torch.arange(128, device="cuda") // 32 != 0
    assert (y - exact)[:, others].norm() < 0.13 * exact[:, others].norm()


# -- the same bits, always


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_runs_repeat_bit_for_bit_whatever_grid_and_depth(algorithm):
    config = EchoConfig(algorithm=algorithm)
    xs = normal(4, 300_007, torch.bfloat16, seed=7)
    outputs = []
    for num_blocks, depth in itertools.product((1, 5, 30), (1, 4)):
        ranks = VirtualRanks(4, config, num_blocks=num_blocks, depth=depth)
        ys = [ranks.all_reduce(xs, Site(idx, Direction.forward))[3] for idx in range(2)]
        ranks.memory.check()
        outputs.append(torch.stack(ys))
    for output in outputs[1:]:
        assert_same_bits(output, outputs[0], "output of another grid")


# -- exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_exact_sums(world_size, dtype):
    checked = CheckedRanks(world_size, EchoConfig())
    for idx, num_values in enumerate([*sizes(world_size), 8, 9, 1023, 1025]):
        for make, where in itertools.product((normal, wild), (list, misaligned)):
            xs = where(make(world_size, num_values, dtype, seed=idx))
            checked.exact_all_reduce(xs, Site(idx, Direction.backward), in_place=idx % 2 == 1)


def test_exact_sums_on_a_small_grid_and_over_the_wrap():
    checked = CheckedRanks(3, EchoConfig(), num_blocks=2)
    checked.virtual.memory.set_epochs(2**32 - 5)
    for idx in range(4):
        checked.exact_all_reduce(normal(3, 500_001, torch.bfloat16, seed=idx), Site(idx, Direction.forward))


def test_exact_and_quantized_calls_take_turns():
    checked = CheckedRanks(3, EchoConfig())
    for idx in range(6):
        site = Site(idx, Direction.forward)
        checked.all_reduce(normal(3, 50_001, torch.bfloat16, seed=idx), site)
        checked.exact_all_reduce(normal(3, 3_001, torch.bfloat16, seed=idx), site)


# -- what the operators refuse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_blocks": 10_000}, "num_blocks"),
        ({"depth": 9}, "ring of at least"),
        ({"depth": 0}, "depth"),
        ({"bits": 5}, "bits of 4 or 8"),
        ({"group_size": 48}, "group_size of 32, 64, 128 or 256"),
        ({"algorithm": 0}, "algorithm"),
        ({"site": [0, 0]}, "site"),
        ({"rank": 2}, "rank"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"slot_bytes": 128}, "slots of at least"),
    ],
)
def test_a_wrong_option_is_named(change, message):
    ranks = VirtualRanks(2, EchoConfig(eta=0.0))
    xs = normal(2, 1_000, torch.bfloat16, seed=8)
    ranks.all_reduce(xs, Site(0, Direction.forward))
    call = ranks.calls[0]
    call.options.update(change)
    with pytest.raises(RuntimeError, match=message):
        call.launch()
    torch.cuda.synchronize()


def test_the_compact_state_refuses_coefficients_of_averages():
    ranks = VirtualRanks(2, EchoConfig())
    ranks.all_reduce(normal(2, 1_000, torch.bfloat16, seed=8), Site(0, Direction.forward))
    call = ranks.calls[0]
    for averages in (AVERAGES, {"beta1": 0.5, "beta2": 0.5}, {"beta2": 0.3}):
        call.options["coefficients"] = Compensator(EchoConfig(**averages)).coefficients
        with pytest.raises(RuntimeError, match="compact state keeps no average"):
            call.launch()
    torch.cuda.synchronize()


def test_wrong_tensors_are_named():
    ranks = VirtualRanks(2, EchoConfig(eta=0.0))
    ranks.all_reduce(normal(2, 1_000, torch.bfloat16, seed=9), Site(0, Direction.forward))
    call = ranks.calls[0]
    x, out = call.x, call.out
    for call.x, call.out, message in (
        (x.double(), out.double(), "bfloat16, float16 or float32"),
        (x[::2], out[::2], "expected x to be a contiguous"),
        (x[:7], out, "expected y of 7"),
        (x, out.float(), "expected y of 1000"),
        (x[:0], out[:0], "at least one value"),
        (x.cpu(), out, "."),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            call.launch()
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", GROUP_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_group_size(policy, size):
    checked = CheckedRanks(2, EchoConfig(policy=policy, group_size=size))
    for idx in range(2):
        checked.all_reduce(normal(2, 12_289, torch.bfloat16, seed=idx), Site(idx, Direction.forward))
