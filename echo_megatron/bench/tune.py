"""`echo-megatron bench --tune`: measures the p2p transport's choices and writes the table that it reads.

For each bits and quantizer: forward, the fastest of algorithm x blocks x depth at each size; backward, the fastest of
the same beside a matmul, as the call runs in training. A choice holds from its size up to half way, geometrically, to
the next size. Below `exact_below_bytes` the exact sum is no slower than the group's own, nor than the quantized one by
more than a tenth; from `min_bytes` on the quantized one is faster than the group's own, to which what lies between is
left.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_megatron.bench.echo_calls import EchoCall
from echo_megatron.bench.memory import Memory
from echo_megatron.bench.rows import ITEMSIZE, KIB, MIB
from echo_megatron.bench.timing import Inputs, Timer
from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy
from echo_megatron.result_files import made_by
from echo_megatron.run_folder import write_atomic
from echo_megatron.sites import Site
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.tuning import Choice, Entry, Table, user_table_path

SIZES = tuple(kib * KIB for kib in (4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144))
BLOCKS = (8, 16, 32, 64, 96)  # thread blocks, and one for every multiprocessor
DEPTHS = (1, 2, 4)
SMALLEST_DEEP = 16 * MIB  # below it a team has few tiles: depth 1
POLICIES = {Policy.rotated: 32, Policy.zero_aware: 128}
AS_GOOD = 1.03  # of choices within 3 % of the fastest, the one with fewer blocks, then the greater depth
EXACT_MAY_TAKE = 1.1
# Of the matmul beside a backward call: hidden size and a rank's outputs, between those of models of 0.6 B and 8 B
# parameters. Beside a longer one a call of few blocks is hidden, and looks as good as any.
WGRAD = (2048, 4096)

Measure = Callable[[Choice], float]


def tune(group: dist.ProcessGroup, device: torch.device, out: Path | None) -> int:
    """Measures and writes the table of this GPU for this number of ranks; returns the exit status."""
    memory = Memory(SIZES[-1], group, device)
    timer = Timer(device, warmup=5, iterations=15, max_s=0.5, barrier=memory.barrier)
    entries: list[Entry] = []
    exact_sizes, quantized_sizes = [], []
    native = _native_times(memory, group, timer)
    for (policy, group_size), bits in itertools.product(POLICIES.items(), (4, 8)):
        config = EchoConfig(bits=bits, policy=policy, group_size=group_size)
        for direction in Direction:
            chosen, times = _tune_direction(config, direction, memory, group, timer)
            key = Entry(chosen[SIZES[0]], group.size(), policy, bits, direction)
            entries += thresholds(key, chosen)
            if direction is Direction.forward:
                exact = _exact_times(config, memory, group, timer)
                found = {size for size, ms in exact.items() if ms <= min(times[size] * EXACT_MAY_TAKE, native[size])}
                exact_sizes.append(found)
                quantized_sizes.append({size for size in SIZES if times[size] < native[size]} - found)
        if group.rank() == 0:
            print(f"tuned: {policy.name} {bits} bits", flush=True)
    table = Table(
        tuple(entries), {group.size(): exact_below(exact_sizes)}, {group.size(): quantized_from(quantized_sizes)}
    )
    if group.rank() == 0:
        gpu = torch.cuda.get_device_name(device)
        path = out or user_table_path(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        made = made_by("-m echo_megatron.cli bench --tune", {}, device, "torch")
        write_atomic(path, dump({**table.to_json(), "made_by": made}))
        print(f"written: {path}")
    return 0


def dump(content: Mapping[str, Any]) -> str:
    """A table's JSON with one entry a line."""
    lines = ",\n  ".join(json.dumps(entry) for entry in content["entries"])
    text = json.dumps({**content, "entries": []}, indent=1)
    return text.replace('"entries": []', f'"entries": [\n  {lines}\n ]') + "\n"


def candidates(num_bytes: int, multiprocessors: int) -> list[Choice]:
    """The choices that are measured at a size."""
    blocks = (*(few for few in BLOCKS if few < multiprocessors), multiprocessors)
    depths = DEPTHS if num_bytes >= SMALLEST_DEEP else (1,)
    algorithms = (Algorithm.one_shot, Algorithm.two_shot)
    return [Choice(*values) for values in itertools.product(algorithms, blocks, depths)]


def fastest(times: Mapping[Choice, float]) -> Choice:
    """The choice with the fewest blocks, then the greatest depth, among those as good as the fastest.

    Depth costs no multiprocessor, and calls that move less state than those measured here gain by it.
    """
    limit = min(times.values()) * AS_GOOD
    good = [choice for choice, ms in times.items() if ms <= limit]
    return min(good, key=lambda choice: (choice.num_blocks, -choice.depth, times[choice]))


def thresholds(key: Entry, chosen: Mapping[int, Choice]) -> list[Entry]:
    """Entries for sizes with their choices: each up to the geometric middle to the next, equal neighbours as one."""
    sizes = sorted(chosen)
    entries: list[Entry] = []
    for size, following in zip(sizes, [*sizes[1:], None], strict=True):
        below = None if following is None else math.isqrt(size * following)
        if entries and entries[-1].choice == chosen[size]:
            entries.pop()
        entries.append(replace(key, choice=chosen[size], below_bytes=below))
    return entries


def exact_below(exact_sizes: Sequence[set[int]]) -> int:
    """The threshold under which the exact sum is as good for every configuration: sizes without a gap from below."""
    common = set.intersection(*exact_sizes)
    leading = list(itertools.takewhile(common.__contains__, SIZES))
    if not leading:
        return 0
    following = SIZES[min(len(leading), len(SIZES) - 1)]
    return math.isqrt(leading[-1] * following)


def quantized_from(quantized_sizes: Sequence[set[int]]) -> int:
    """The threshold from which the quantized sum is the fastest in every configuration: no gap up to the largest."""
    common = set.intersection(*quantized_sizes)
    num_faster = len(list(itertools.takewhile(common.__contains__, reversed(SIZES))))
    if num_faster == len(SIZES):
        return 0
    last_other = len(SIZES) - num_faster - 1
    following = SIZES[last_other + 1] if num_faster else 4 * SIZES[-1]  # beyond what was measured it may be the faster
    return math.isqrt(SIZES[last_other] * following)


def _tune_direction(
    config: EchoConfig, direction: Direction, memory: Memory, group: dist.ProcessGroup, timer: Timer
) -> tuple[dict[int, Choice], dict[int, float]]:
    """The choice, and its milliseconds, at each size."""
    call = EchoCall(group, config, direction=direction)
    transport = call.communicator.transport
    if not isinstance(transport, P2PTransport):
        raise ValueError(f"--tune: expected the p2p transport, got {transport.name}; it needs GPUs with peer access")
    chosen, best = {}, {}
    for size in SIZES:
        inputs = Inputs(memory.values, size // ITEMSIZE, timer.calls, group.size())
        measure = _forward_measure(call, inputs, timer)
        if direction is Direction.backward:
            measure = _backward_measure(call, inputs, timer, size, group.size())
        times = {}
        for choice in candidates(size, transport.workspace.max_blocks):
            transport.table = Table.always(choice)
            inputs.fill()
            times[choice] = measure()
            call.check()
        chosen[size] = fastest(times)
        best[size] = times[chosen[size]]
    call.close()
    return chosen, best


def _forward_measure(call: EchoCall, inputs: Inputs, timer: Timer) -> Callable[[], float]:
    return lambda: timer.measure(lambda: call(inputs.next()), inputs.before).ms


def _backward_measure(call: EchoCall, inputs: Inputs, timer: Timer, size: int, world_size: int) -> Callable[[], float]:
    """Milliseconds of the call on a stream of its own and a weight gradient of as many tokens beside it."""
    hidden, ffn = WGRAD
    tokens = max(16, size // ITEMSIZE // hidden)
    device = inputs.buffers[0].device
    gradient, activation = (torch.randn(tokens, width, device=device).bfloat16() for width in (hidden, ffn))
    weight = torch.empty(hidden, ffn, dtype=torch.bfloat16, device=device)
    side = torch.cuda.Stream(device)

    def step() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            call(inputs.next())
        torch.mm(gradient.t(), activation, out=weight)
        main.wait_stream(side)

    return lambda: timer.measure(step, inputs.before).ms


def _native_times(memory: Memory, group: dist.ProcessGroup, timer: Timer) -> dict[int, float]:
    """Milliseconds of the group's own all-reduce at each size."""
    return _in_place_times(SIZES, lambda x: dist.all_reduce(x, group=group), memory, group, timer)


def _exact_times(config: EchoConfig, memory: Memory, group: dist.ProcessGroup, timer: Timer) -> dict[int, float]:
    """Milliseconds of the exact sum at each size up to 1 MiB."""
    call, site = EchoCall(group, config), Site(0, Direction.forward, bits=config.bits)
    sizes = [size for size in SIZES if size <= MIB]
    communicator = call.communicator
    times = _in_place_times(sizes, lambda x: communicator.exact_all_reduce(x, site, out=x), memory, group, timer)
    call.close()
    return times


def _in_place_times(
    sizes: Sequence[int],
    call: Callable[[torch.Tensor], object],
    memory: Memory,
    group: dist.ProcessGroup,
    timer: Timer,
) -> dict[int, float]:
    times = {}
    for size in sizes:
        inputs = Inputs(memory.values, size // ITEMSIZE, timer.calls, group.size())
        inputs.fill()

        def step(inputs: Inputs = inputs) -> None:
            call(inputs.next())

        times[size] = timer.measure(step, inputs.before).ms
    return times
