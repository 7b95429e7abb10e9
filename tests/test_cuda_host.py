"""The headers in cuda/, compiled for the host, hold to the PyTorch definition bit for bit; no nvcc and no GPU."""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiler import COMPILER
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_megatron import state as state_module
from echo_megatron.compensator import Compensator
from echo_megatron.config import GROUP_SIZES, Algorithm, EchoConfig, Policy, Rescale, StateDtype
from echo_megatron.quantizer import HEADER_BYTES, TILE_VALUES, Quantizer, hadamard
from echo_megatron.reference import Segments
from echo_megatron.transports.tiled_state import tile_corrections

ROOT = Path(__file__).resolve().parent.parent
POLICIES = list(Policy)
STATE_DTYPES = list(StateDtype)
FLOAT32_MAX = torch.finfo(torch.float32).max
# Exponents that a tile or a call of finite FP32 values can have.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -149 - 14, 127 - 4
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

quantizers = st.builds(Quantizer, st.sampled_from((4, 8)), st.sampled_from(POLICIES), st.sampled_from(GROUP_SIZES))
seeds = st.integers(0, 2**31)
thorough = settings(max_examples=60, deadline=None)


# asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
ASSEMBLY = re.compile(r'asm\("([\w.]+) ([^"]*)" : "=\w"\((\w+)\) : ([^;]*)\);')


def as_call(assembly: re.Match[str]) -> str:
    """r = host_max_NaN_f32(a, b); with an immediate operand last."""
    name, operands, result, inputs = assembly.groups()
    values = re.findall(r'"\w"\((\w+)\)', inputs) + re.findall(r"0x[0-9a-f]+", operands)
    return f"{result} = host_{name.replace('.', '_')}({', '.join(values)});"


# asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target)), "l"(source) : "memory");
COPY = re.compile(
    r'asm volatile\("cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+);" '
    r'::"r"\(shared_address\((.+?)\)\),\s+"l"\((.+?)\)\s+: "memory"\);'
)


def for_host(header: str) -> str:
    """A header with its assembly replaced by its meaning."""
    return COPY.sub(r"host_copy(\2, \3, \1);", ASSEMBLY.sub(as_call, header))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """tests/cuda_host/host_check.cpp, compiled."""
    folder = tmp_path_factory.mktemp("cuda_host")
    for header in (ROOT / "cuda").glob("*.cuh"):
        (folder / header.name).write_text(for_host(header.read_text()))
    target = folder / "host_check.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    includes = [f"-I{ROOT / 'tests' / 'cuda_host'}", f"-I{folder}"]
    source = ROOT / "tests" / "cuda_host" / "host_check.cpp"
    done = subprocess.run(
        [str(COMPILER), *flags, *includes, str(source), "-o", str(target)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    for name in ("check_half_value", "check_compact_scale"):
        getattr(library, name).restype = ctypes.c_float
    for name in ("check_half_bits", "check_flag_value"):
        getattr(library, name).restype = ctypes.c_uint32
    library.check_slot_offset.restype = ctypes.c_int64
    library.check_flag.restype = ctypes.c_uint64
    return library


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def same_bits(got: Tensor, expected: Tensor) -> bool:
    """Equal bits; of NaN any."""
    nan = expected.isnan()
    return torch.equal(got.isnan(), nan) and torch.equal(got.view(torch.int32)[~nan], expected.view(torch.int32)[~nan])


KINDS = (
    "normal",
    "heavy",
    "positive",
    "far",
    "constant",
    "zero",
    "negative zero",
    "subnormal",
    "bits",
    "outlier",
    "nan",
    "infinite",
    "max",
)


def group_of(kind: str, size: int, exponent: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(size, generator=generator, dtype=torch.float64)
    scale = 2.0**exponent
    position = int(torch.randint(size, (), generator=generator))
    match kind:
        case "heavy":
            x = x * torch.exp2(torch.randint(-40, 1, (size,), generator=generator).double())
        case "positive":
            x = x.abs()
        case "far":
            x = x * 1e-4 - 100.0
        case "constant":
            x = x[:1].expand(size)
        case "zero":
            x = torch.where(x > 0, 0.0, -0.0)
        case "negative zero":
            x = torch.full_like(x, -0.0)
        case "subnormal":
            x, scale = x.sign() * torch.randint(0, 9, (size,), generator=generator), 2.0**-149
        case "bits":  # every FP32 number, NaN and Inf aside
            words = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32)
            return words.view(torch.float32).nan_to_num(0.0, posinf=1.0, neginf=-1.0)
        case "outlier":
            x[position] *= 1000
        case "nan":
            x[position] = float("nan")
        case "infinite":
            x[position] = float("inf") if x[position] > 0 else -float("inf")
        case "max":
            return FLOAT32_MAX * x.sign().float()
    return (x * scale).float()


def tile(quantizer: Quantizer, seed: int) -> Tensor:
    """A tile whose groups are of one kind and amplitude, or each of its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    base, is_mixed = draw(-140, 120), draw(0, 2) == 1
    kinds = [KINDS[draw(0, len(KINDS))] for _ in range(quantizer.groups_per_tile if is_mixed else 1)]
    groups = [
        group_of(kinds[i % len(kinds)], quantizer.group_size, base + draw(-8, 5), generator)
        for i in range(quantizer.groups_per_tile)
    ]
    return torch.cat(groups)


def reference(quantizer: Quantizer, values: Tensor, exponent: int | None) -> SimpleNamespace:
    """The definition's answers for one tile."""
    given = None if exponent is None else torch.tensor(exponent, dtype=torch.int32)
    quantized = quantizer.quantize(values, given)
    return SimpleNamespace(
        exponent=int(quantized.exponent),
        params=quantized.params[0],
        scale=quantized.scale[0].contiguous(),
        zero=quantized.zero[0].contiguous(),
        codes=quantized.codes.flatten(),
        decoded=quantizer.dequantize(quantized),
    )


def exponents():
    """None: the tile's own. Otherwise a call's, which a tile's range need not fit."""
    return st.one_of(st.none(), st.none(), st.integers(-20, 20), st.integers(LOWEST_EXPONENT, HIGHEST_EXPONENT))


def arguments(quantizer: Quantizer, exponent: int, values: Tensor) -> tuple:
    num_groups = ctypes.c_int64(quantizer.groups_per_tile)
    policy = POLICIES.index(quantizer.policy)
    return quantizer.bits, policy, quantizer.group_size, exponent, num_groups, pointer(values)


@thorough
@given(quantizers, seeds, exponents())
def test_parameters_codes_and_values(host, quantizer, seed, exponent):
    values = tile(quantizer, seed)
    expected = reference(quantizer, values, exponent)
    stored = torch.empty(quantizer.groups_per_tile, dtype=torch.int32)
    scale, zero = torch.empty_like(stored, dtype=torch.float32), torch.empty_like(stored, dtype=torch.float32)
    codes, decoded = torch.empty(TILE_VALUES, dtype=torch.uint8), torch.empty(TILE_VALUES)
    outputs = map(pointer, (stored, scale, zero, codes, decoded))
    host.check_quantize(*arguments(quantizer, expected.exponent, values), *outputs)
    got_params = stored.view(torch.uint8).view(-1, 4)[:, : quantizer.param_bytes].contiguous()
    assert torch.equal(got_params, expected.params)
    assert same_bits(scale, expected.scale)
    assert same_bits(zero, expected.zero)
    assert torch.equal(codes, expected.codes)
    assert same_bits(decoded, expected.decoded)


@thorough
@given(quantizers, seeds, exponents())
def test_blocks_in_registers(host, quantizer, seed, exponent):
    values = tile(quantizer, seed)
    expected = reference(quantizer, values, exponent)
    codes, codes_with_residual = torch.empty(2, TILE_VALUES, dtype=torch.uint8)
    residual, decoded = torch.empty(2, TILE_VALUES)
    # Added to what is near in size, so that the sum rounds.
    summand = values.flip(0).nan_to_num(0.0, posinf=0.0, neginf=0.0) * 0.37
    total = summand.clone()
    outputs = map(pointer, (codes, codes_with_residual, residual, decoded, total))
    host.check_block(*arguments(quantizer, expected.exponent, values), *outputs)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(codes_with_residual, expected.codes)
    assert same_bits(residual, values - expected.decoded)
    assert same_bits(decoded, expected.decoded)
    assert same_bits(total, summand + expected.decoded)


@thorough
@given(seeds, st.integers(-120, 110))
def test_hadamard(host, seed, exponent):
    values = torch.randn(64 * 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    got = values.clone()
    host.check_hadamard(ctypes.c_int64(64), pointer(got))
    assert same_bits(got, hadamard(values))


@thorough
@given(st.floats(0, FLOAT32_MAX, width=32))
def test_exponents(host, amax):
    for policy, group_size in ((Policy.symmetric, 128), (Policy.rotated, 32)):
        quantizer = Quantizer(4, policy, group_size, Rescale.group)
        expected = int(quantizer.call_exponent(torch.tensor(amax)))
        assert host.check_call_exponent(ctypes.c_float(amax), int(quantizer.rotates)) == expected
    values = torch.zeros(TILE_VALUES)
    values[7] = -amax
    expected = int(Quantizer(4, Policy.naive, 128).quantize(values).exponent)
    assert host.check_exponent_for(ctypes.c_float(amax), 14) == expected


def test_every_half(host):
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    got = torch.tensor([host.check_half_value(bits) for bits in range(2**16)])
    assert same_bits(got, halves.float())


@settings(max_examples=300, deadline=None)
@given(st.floats(width=32, allow_nan=False))
def test_rounding_to_half(host, value):
    expected = int(torch.tensor(value, dtype=torch.float32).to(torch.float16).view(torch.int16)) & 0xFFFF
    assert host.check_half_bits(ctypes.c_float(value)) == expected


# -- layout


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_slot_holds_the_parts_of_a_tiles_record(host, bits, policy, group_size):
    quantizer = Quantizer(bits, policy, group_size)
    offsets = (ctypes.c_int * 3)()
    host.check_slot(bits, POLICIES.index(policy), group_size, offsets)
    params, header, num_bytes = offsets
    assert host.check_param_bytes(POLICIES.index(policy)) == quantizer.param_bytes
    assert params == TILE_VALUES * bits // 8
    assert header == quantizer.num_bytes(TILE_VALUES) - HEADER_BYTES
    assert num_bytes % 128 == 0 and 0 <= num_bytes - quantizer.num_bytes(TILE_VALUES) < 128


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 8), st.sampled_from(GROUP_SIZES))
def test_segments(host, num_values, world_size, group_size):
    segments = Segments.split(num_values, world_size, group_size)
    out = (ctypes.c_int64 * 4)()
    for rank in range(world_size):
        two_shot = list(Algorithm).index(Algorithm.two_shot)
        host.check_segment(ctypes.c_int64(num_values), world_size, group_size, two_shot, rank, out)
        bounds = segments.bounds(rank)
        num_tiles = -(-segments.size(rank) // TILE_VALUES)
        assert list(out) == [bounds.start, bounds.stop, num_tiles, -(-segments.length // TILE_VALUES)]
    one_shot = list(Algorithm).index(Algorithm.one_shot)
    host.check_segment(ctypes.c_int64(num_values), world_size, group_size, one_shot, 0, out)
    num_tiles = -(-num_values // TILE_VALUES)
    assert list(out) == [0, num_values, num_tiles, num_tiles]


@pytest.mark.parametrize("algorithm", [3, 4], ids=["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("policy", [Policy.rotated, Policy.zero_aware])
def test_shares(host, policy, algorithm):
    """Of every small size and of sizes about a tile's: each begins where the one before ends, groups and tiles with it.

    The values are those of the rows of x as the definition splits it, the end that of the row's working basis.
    """
    out = (ctypes.c_int64 * 6)()
    for world_size in range(2, 9):
        for num_values in (*range(1, 100), *range(4_060, 4_130), 8_192, 100_003):
            shares = torch.arange(world_size * num_values).view(world_size, -1)
            num_basis_values = Quantizer(4, policy, 128).num_basis_values(num_values)
            num_tiles = -(-num_basis_values // TILE_VALUES)
            for rank, share in enumerate(shares):
                sizes = (ctypes.c_int64(num_values), ctypes.c_int64(num_basis_values))
                host.check_share(*sizes, world_size, 128, algorithm, rank, out)
                first, last = int(share[0]), int(share[-1])
                num_state_segments = world_size - 1 if algorithm == 3 else 0
                expected = [first, last + 1, first + num_basis_values, num_tiles, num_tiles, num_state_segments]
                assert list(out) == expected, (world_size, num_values, rank)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_reduce_scatter_keeps_state_of_the_other_ranks_shares(host, world_size):
    for rank in range(world_size):
        others = [segment for segment in range(world_size) if segment != rank]
        assert [host.check_state_segment(3, rank, segment) for segment in others] == list(range(world_size - 1))
        assert [host.check_state_segment(2, rank, segment) for segment in others] == others


@pytest.mark.parametrize(("world_size", "num_teams", "ring"), [(2, 8, 8), (3, 2, 16), (8, 3, 8), (1, 4, 8)])
def test_slots_of_a_workspace_are_apart_and_aligned(host, world_size, num_teams, ring):
    slot_bytes = 2304
    flag, num_bytes = ctypes.c_int64(), ctypes.c_int64()

    def offsets(stage: int, receiver: int, source: int, team: int, k: int) -> tuple[int, int]:
        slot = host.check_slot_offset(
            world_size, num_teams, ring, ctypes.c_int64(slot_bytes), stage, receiver, source, team, k,
            ctypes.byref(flag), ctypes.byref(num_bytes),
        )  # fmt: skip
        return slot, flag.value

    for receiver in range(world_size):
        sources = [rank for rank in range(world_size) if rank != receiver]
        where = list(itertools.product(range(2), [receiver], sources, range(num_teams), range(ring)))
        places = [offsets(*place) for place in where]
        slots, flags = sorted(slot for slot, _ in places), sorted(flag for _, flag in places)
        assert all(slot % 128 == 0 for slot in slots)
        assert all(after - before >= slot_bytes for before, after in itertools.pairwise(slots))
        assert all(flag % 8 == 0 for flag in flags)
        assert all(after - before >= 8 for before, after in itertools.pairwise(flags))
        if places:
            epochs_end = 4096 + 4 * num_teams
            assert flags[0] >= epochs_end and flags[-1] + 8 <= slots[0] and slots[-1] + slot_bytes == num_bytes.value
        for stage, _, source, team, k in where:  # a slot comes round after `ring` tiles, also as k wraps
            assert offsets(stage, receiver, source, team, k + 3 * ring) == offsets(stage, receiver, source, team, k)


def test_a_ring_is_a_power_of_two_and_holds_what_a_rank_may_send_ahead(host):
    for depth in range(1, 40):
        ring = host.check_ring_for(depth)
        assert ring >= 3 * depth + 2
        assert ring & (ring - 1) == 0


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.integers(0, 2**32 - 1), st.integers(2**32 - 80, 2**32 - 1)), st.integers(1, 16))
def test_tile_numbers_wrap(host, number, depth):
    """Over the wrap, too, neighbours lie in neighbouring slots, and records that follow in a slot have other flags."""
    ring = host.check_ring_for(depth)
    following = (number + 1) % 2**32
    assert following % ring == (number % ring + 1) % ring
    flags = [host.check_flag_value(ctypes.c_uint32((number + k) % 2**32)) for k in range(0, 5 * ring, ring)]
    assert len(set(flags)) == len(flags)
    assert flags[0] == following


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(0, 2**32 - 1), st.sampled_from((2**31 - 1, 2**32 - 2, 2**32 - 1))),
    st.one_of(st.integers(LOWEST_EXPONENT, HIGHEST_EXPONENT), st.sampled_from((-(2**15), -1, 0, 2**15 - 1))),
    st.integers(0, 2**32 - 1),
)
def test_flags_carry_number_exponent_and_signature(host, number, exponent, signature):
    """Each in bits of its own, whatever the others are; of the signature the low half."""
    parts = (ctypes.c_int64 * 3)()
    flag = host.check_flag(ctypes.c_uint32(number), exponent, ctypes.c_uint32(signature), parts)
    assert list(parts) == [(number + 1) % 2**32, exponent, signature % 2**16]
    assert flag == parts[0] | exponent % 2**16 << 32 | parts[2] << 48


# -- state


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_bytes_of_the_state(host, dtype):
    out = (ctypes.c_int * 3)()
    host.check_state(STATE_DTYPES.index(dtype), out)
    correction_bytes = {StateDtype.bf16: 2, StateDtype.fp32: 4, StateDtype.compact: 1}[dtype] * TILE_VALUES
    assert out[0] == correction_bytes
    definition = state_module.make_state(dtype, torch.Size((TILE_VALUES,)), torch.device("cpu"))
    assert out[1] == out[2] == definition.num_bytes()


def residual_of(exponent: int, generator: torch.Generator) -> Tensor:
    """u of a tile: every block of another size, down to zero."""
    blocks = TILE_VALUES // state_module.BLOCK_VALUES
    spread = torch.exp2(torch.randint(-30, 1, (blocks, 1), generator=generator).float())
    return (torch.randn(blocks, state_module.BLOCK_VALUES, generator=generator) * spread * 2.0**exponent).flatten()


@thorough
@given(
    st.sampled_from(STATE_DTYPES), seeds, st.integers(-140, 125), st.integers(1, 8), st.booleans(),
    st.floats(0.05, 1), st.floats(0, 1), st.floats(0, 0.95) | st.just(0.0), st.floats(0, 0.95) | st.just(0.0),
    st.booleans(),
)  # fmt: skip
def test_state_over_the_sites_of_a_pass(
    host, dtype, seed, exponent, num_sites, is_hostile, eta, a, beta1, beta2, by_copy
):
    """x' at every site is the definition's, which needs all of the state to be: c and m2 come from c and m2.

    A compact state comes with any gain, but with the last residual alone.
    By copy: a call reads what was copied of the state before, as kernels do with shared memory.
    """
    decays = {} if dtype is StateDtype.compact else {"beta1": beta1, "beta2": beta2}
    compensator = Compensator(EchoConfig(state_dtype=dtype, eta=eta, a=a, **decays))
    sizes = (ctypes.c_int * 3)()
    host.check_state(STATE_DTYPES.index(dtype), sizes)
    state = torch.full((sizes[1],), 255, dtype=torch.uint8)
    coefficients = torch.tensor(compensator.coefficients)
    generator = torch.Generator().manual_seed(seed)
    for site in range(num_sites + 1):
        x = torch.randn(TILE_VALUES, generator=generator) * 2.0**exponent
        residual = residual_of(exponent, generator)
        if is_hostile:
            residual[:32], residual[32:64], residual[64], residual[96] = 0.0, 1e-42, float("nan"), float("inf")
            residual[128:160] = residual[128].abs() * (1 if site % 2 else x[128:160].sign())  # all at their bound
        compensated = torch.empty(TILE_VALUES)
        inputs = map(pointer, (coefficients, state, x, residual, compensated))
        host.check_state_site(STATE_DTYPES.index(dtype), int(site == 0), int(by_copy), *inputs)
        assert same_bits(compensated, compensator.apply(x))
        compensator.update(residual)
        correction = compensator.correction(x.shape, x.device)
        assert correction is not None and same_bits(tile_corrections(state, dtype), correction)
        if dtype is StateDtype.compact:
            assert isinstance(compensator._state, state_module.CompactState)
            assert same_compact_state(state, compensator._state)


def same_compact_state(tile: Tensor, expected: state_module.CompactState) -> bool:
    """The bytes of a tile's state (cuda/state.cuh); of a block whose scale is NaN the scale alone."""
    chunks = tile[:TILE_VALUES].view(-1, TILE_VALUES // state_module.BLOCK_VALUES, 16)  # [chunk, block, 16]
    codes, scale = (
        torch.cat((chunks[0], chunks[1]), dim=-1).to(torch.int16) - 128,
        tile[TILE_VALUES:].view(torch.float32),
    )
    finite = ~scale.isnan()
    return same_bits(scale, expected.scale) and torch.equal(codes[finite], expected.codes[finite].to(torch.int16))


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.floats(0, width=32), st.sampled_from((2.0**119, 2.0**-119, float("nan")))))
def test_scale_of_the_compact_state(host, largest):
    expected = state_module.CompactState(torch.Size((1,)), torch.device("cpu"))
    expected.store(torch.tensor([largest]), torch.zeros(1))
    got = host.check_compact_scale(ctypes.c_float(largest))
    assert same_bits(torch.tensor([got]), expected.scale)
