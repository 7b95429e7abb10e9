"""The kernels of cuda/all_reduce.cuh compiled for the host, and ranks that call them: no nvcc, no GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from compiler import COMPILER
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Direction, EchoConfig, Rescale, StateDtype
from echo_megatron.quantizer import TILE_VALUES
from echo_megatron.reference import make_quantizer

ROOT = Path(__file__).resolve().parent.parent
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ONE_SHOT, TWO_SHOT, REDUCE_SCATTER, ALL_GATHER = 1, 2, 3, 4  # cuda/layout.cuh, Algorithm
LOCAL, NONE = 0, 2  # Residual
RING = 16
MAX_RANKS = 8

# -- the headers, their assembly replaced by calls of tests/cuda_host/emulator.h

MEANINGS: list[tuple[str, Callable[..., str]]] = [
    (r"(max|min)\.NaN\.f32", lambda found, r, a, b: f"{r} = host_{found[1]}_NaN_f32({a}, {b})"),
    (r"lop3\.b32 .*0xea", lambda _, r, a, b, c: f"{r} = host_lop3_b32({a}, {b}, {c}, 0xea)"),
    (
        r"cp\.async\.c.*\[%0 \+ %2\], \[%1 \+ %3\], (\d+)",
        lambda found, to, source, *at: f"emulator::copy_async({to} + {at[0]}, {source} + {at[1]}, {found[1]})",
    ),
    (
        r"cp\.async\.c[ag].*\[%0\], \[%1\], (\d+)",
        lambda found, to, source: f"emulator::copy_async({to}, {source}, {found[1]})",
    ),
    (r"cp\.async\.commit_group", lambda _: "emulator::commit_group()"),
    (r"cp\.async\.wait_group", lambda _, pending: f"emulator::wait_group({pending})"),
    (
        r"st\.global\.cs\.v4\.u32",
        lambda _, to, *words: f"*reinterpret_cast<uint4*>({to} + {words[4]}) = make_uint4({', '.join(words[:4])})",
    ),
    (r"bar\.sync", lambda _, number, count: f"emulator::wait_named({number}, {count})"),
    (r"st\.release\.cta", lambda _, address, value: f"emulator::store_shared({address}, {value})"),
    (r"ld\.acquire\.cta", lambda _, value, address: f"{value} = emulator::load_shared({address})"),
    (r"st\.(release|relaxed)\.sys", lambda _, place, value: f"*{place} = {value}"),
    (r"ld\.acquire\.sys", lambda _, value, place: f"{value} = emulator::load_acquired({place})"),
    (r"fence\.acq_rel\.sys", lambda _: "static_cast<void>(0)"),
    (r"mov\.u64 .*globaltimer", lambda _, now: f"{now} = emulator::now"),
]
SHARED = {
    "extern __shared__ __align__(128) uint8_t shared[];": "uint8_t* shared = emulator::current->block->shared;",
    "__shared__ uint32_t failed;": "uint32_t& failed = emulator::current->block->variable(0);",
    "__shared__ uint32_t block_amax, all_amax;": "uint32_t &block_amax = emulator::current->block->variable(1), "
    "&all_amax = emulator::current->block->variable(2);",
    "__shared__ int failed;": "int& failed = reinterpret_cast<int&>(emulator::current->block->variable(3));",
}


def for_emulator(header: str) -> str:
    """A header of cuda/ as the emulator's compiler takes it.

    Raises:
        ValueError: it has assembly or shared memory of a kind that is not known here.
    """
    parts, at = [], 0
    for found in re.finditer(r"\basm( volatile)?\(", header):
        end = _closing(header, found.end())
        parts += [header[at : found.start()], _meaning(header[found.end() : end])]
        at = end + 1
    text = "".join([*parts, header[at:]])
    for written, meant in SHARED.items():
        text = text.replace(written, meant)
    if "__shared__" in text:
        raise ValueError(f"shared memory of an unknown kind: {text[text.index('__shared__') :][:80]!r}")
    return text


def _closing(text: str, at: int) -> int:
    """Where the bracket that is open at `at` closes."""
    depth, quoted = 1, False
    while True:
        if text[at] == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _meaning(assembly: str) -> str:
    template = re.match(r'\s*"([^"]*)"', assembly)
    assert template is not None
    operands = [
        assembly[found.end() : _closing(assembly, found.end())] for found in re.finditer(r'"=?[a-z]"\s*\(', assembly)
    ]
    for pattern, as_call in MEANINGS:
        if found := re.match(pattern, template[1]):
            return as_call(found, *operands)
    raise ValueError(f"assembly of an unknown kind: {template[1]!r}")


def build(folder: Path, policy: str, bits: int) -> ctypes.CDLL:
    """tests/cuda_host/emulated_calls.cpp for one quantizer."""
    for header in (ROOT / "cuda").glob("*.cuh"):
        (folder / header.name).write_text(for_emulator(header.read_text()))
    target = folder / f"emulated_{policy}_{bits}.so"
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    places = [f"-I{ROOT / 'tests' / 'cuda_host'}", f"-I{folder}", f"-DECHO_POLICY={policy}", f"-DECHO_BITS={bits}"]
    source = ROOT / "tests" / "cuda_host" / "emulated_calls.cpp"
    command = [str(COMPILER), *flags, *places, str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    library = ctypes.CDLL(str(target))
    library.emulated_workspace_bytes.restype = library.emulated_slot_bytes.restype = ctypes.c_int64
    library.emulated_state_tiles.restype = ctypes.c_int64
    return library


# -- ranks

Pointers = ctypes.c_void_p * MAX_RANKS


class Call(ctypes.Structure):
    """tests/cuda_host/emulated_calls.cpp, Call."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("algorithm", "residual", "state_dtype", "dtype", "rescale")),
        *((name, ctypes.c_int32) for name in ("group_size", "depth", "num_blocks", "fresh", "aligned")),
        ("num_values", ctypes.c_int64),
        ("num_basis_values", ctypes.c_int64),
        ("coefficients", ctypes.c_float * 5),
        ("signature", ctypes.c_uint32),
        *((name, Pointers) for name in ("x", "y", "state")),
    ]


def aligned_empty(num_values: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """NaN, `offset` values behind a multiple of 128 bytes."""
    storage = torch.full((num_values + 128 + offset,), float("nan"), dtype=dtype)
    first = -storage.data_ptr() % 128 // storage.element_size() + offset
    return storage[first : first + num_values]


class EmulatedRanks:
    """P ranks of one config on one workspace each; calls are noted, then run one behind the other.

    Args:
        library: see `build`; of the config's policy and bits.
        world_size: P.
        config: the options.
        num_blocks: thread blocks of a rank.
    """

    def __init__(self, library: ctypes.CDLL, world_size: int, config: EchoConfig, num_blocks: int) -> None:
        self.library, self.world_size, self.config, self.num_blocks = library, world_size, config, num_blocks
        self.slot_bytes = library.emulated_slot_bytes(config.group_size)
        geometry = (world_size, num_blocks * 4, RING, ctypes.c_int64(self.slot_bytes))
        num_bytes = library.emulated_workspace_bytes(*geometry)
        self.workspaces = [aligned_empty(num_bytes // 4, torch.float32).zero_() for _ in range(world_size)]
        self.failures = torch.zeros(world_size, 16, dtype=torch.int64)
        self.states: dict[tuple[int, int], list[Tensor]] = {}
        self.calls: list[Call] = []
        self.tensors: list[Tensor] = []

    def note(self, algorithm: int, xs: Sequence[Tensor], fresh: bool, depth: int, offset: int = 0) -> list[Tensor]:
        """A call whose outputs, returned, are there after `run`; they lie `offset` values off alignment."""
        x, scatters, gathers = xs[0], algorithm == REDUCE_SCATTER, algorithm == ALL_GATHER
        num_values = x.numel() // self.world_size if scatters else x.numel()
        size = num_values * self.world_size if gathers else num_values
        outs = [aligned_empty(size, x.dtype, offset) for _ in xs]
        compensates = self.config.compensates and not gathers
        starts_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (*xs, *outs))
        in_shares = scatters or gathers
        call = Call(
            algorithm=algorithm,
            residual=LOCAL if compensates else NONE,
            state_dtype=list(StateDtype).index(self.config.state_dtype_of(Direction.forward)) if compensates else 0,
            dtype=DTYPES.index(x.dtype),
            rescale=list(Rescale).index(self.config.rescale),
            group_size=self.config.group_size,
            depth=depth,
            num_blocks=self.num_blocks,
            fresh=fresh,
            aligned=starts_aligned and not (in_shares and num_values * x.element_size() % 16),
            num_values=num_values,
            num_basis_values=make_quantizer(self.config, self.config.bits).num_basis_values(num_values),
            coefficients=(ctypes.c_float * 5)(*Compensator(self.config).coefficients),
            signature=17 * len(self.calls) + algorithm,
        )
        states = self._states(call) if compensates else [None] * self.world_size
        for place, tensors in ((call.x, xs), (call.y, outs), (call.state, states)):
            for rank, tensor in enumerate(tensors):
                place[rank] = None if tensor is None else tensor.data_ptr()
        self.calls.append(call)
        self.tensors += [*xs, *outs]
        return outs

    def run(self, copies_at_once: bool, seed: int) -> None:
        """All calls that were noted since; no rank waits for another between them but in the kernels."""
        workspaces = Pointers(*(workspace.data_ptr() for workspace in self.workspaces))
        failures = ctypes.c_void_p(self.failures.data_ptr())
        geometry = (self.world_size, self.num_blocks, RING, ctypes.c_int64(self.slot_bytes))
        calls = (Call * len(self.calls))(*self.calls)
        ended = self.library.emulate(*geometry, workspaces, failures, len(calls), calls, int(copies_at_once), seed)
        assert ended and not self.failures[:, 0].any(), f"failures by rank: {self.failures[:, :9].tolist()}"
        self.calls.clear()
        self.tensors.clear()

    def _states(self, call: Call) -> list[Tensor]:
        """The buffers of a layout, as the transport keeps them; garbage where a pass begins."""
        num_tiles = self.library.emulated_state_tiles(ctypes.byref(call), self.world_size)
        num_bytes = num_tiles * self.library.emulated_state_tile_bytes(call.state_dtype)
        assert num_bytes >= num_tiles * TILE_VALUES
        key = (call.algorithm, num_bytes)
        if key not in self.states:
            made = (aligned_empty(num_bytes // 4, torch.float32) for _ in range(self.world_size))
            self.states[key] = list(made)
        return self.states[key]
