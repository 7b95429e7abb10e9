"""Calls small enough for compute-sanitizer: sanitized_calls.py record|replay FOLDER.

Under a sanitizer kernels need not run side by side, and a rank's kernel waits for its peers'. So `record` makes the
calls with all ranks and keeps what each rank's workspace then holds: its peers' records and flags. `replay`, under the
sanitizer, puts that into place and launches every rank alone; what it waits for is there. Its result is the recorded.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from feedbacks import AVERAGES
from virtual_checks import assert_same_bits
from virtual_ranks import Call, VirtualRanks, numbers_of
from virtual_shares import ShareCall, SharingRanks, poisoned_output
from virtual_workspaces import VirtualWorkspaces

from echo_megatron.config import Algorithm, Collective, Direction, EchoConfig, Policy, Rescale, Residual, StateDtype
from echo_megatron.sites import Site

NUM_VALUES = 20_011
SITES = [Site(0, Direction.forward, bits=4), Site(1, Direction.forward, bits=8)]


def cases():
    """(ranks, config, dtype, in place, misaligned): every policy, algorithm, residual, state and data type once.

    States that can hold averages do: those are read beside c.
    """
    compensations = [
        {"state_dtype": StateDtype.bf16, **AVERAGES},
        {"state_dtype": StateDtype.compact},
        {"state_dtype": StateDtype.fp32, **AVERAGES},
        {"residual": Residual.consensus},
        {"eta": 0.0},
    ]
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    pairs = itertools.product(Policy, (Algorithm.one_shot, Algorithm.two_shot))
    for number, (policy, algorithm) in enumerate(pairs):
        for shift, world_size in enumerate((2, 3)):
            turn = number + shift
            config = EchoConfig(
                policy=policy,
                algorithm=algorithm,
                rescale=list(Rescale)[turn % 3],
                **compensations[turn % 5],
            )
            # Two ranks, bf16 and aligned is a kernel of its own.
            yield world_size, config, dtypes[0 if shift == 0 else turn % 3], turn % 4 == 1, turn % 3 == 2 and shift == 1


def contributions(world_size, dtype, is_misaligned, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    storage = [torch.randn(NUM_VALUES + 1, generator=generator, device="cuda").to(dtype) for _ in range(world_size)]
    return [x[1:] if is_misaligned else x[:-1] for x in storage]


def calls_of(case, number):
    """The case's calls: for each site the ranks, the contributions and what happens in place."""
    world_size, config, dtype, in_place, is_misaligned = case
    ranks = VirtualRanks(world_size, config, num_blocks=1)
    for site in SITES:
        yield ranks, site, contributions(world_size, dtype, is_misaligned, 10 * number + site.idx), in_place


def share_calls():
    """Reduce-scatters and all-gathers: name, ranks, which, site and inputs; every policy and state with either once."""
    kinds = (Collective.reduce_scatter, Collective.all_gather)
    states = [{"state_dtype": dtype, **({} if dtype is StateDtype.compact else AVERAGES)} for dtype in StateDtype]
    for number, (policy, kind) in enumerate(itertools.product(Policy, kinds)):
        for shift, world_size in enumerate((2, 3)):
            config = EchoConfig(
                policy=policy,
                rescale=list(Rescale)[(number + shift) % 3],
                **states[(number // 2 + shift) % 3],
            )
            ranks, dtype = SharingRanks(world_size, config, num_blocks=1), (torch.bfloat16, torch.float32)[shift]
            for site in SITES:
                xs = contributions(world_size, dtype, shift == 1, 100 + 10 * number + site.idx)
                num_values = 10_000 if shift == 0 else 9_999  # the second's shares are not on 16 bytes
                if kind is Collective.reduce_scatter:
                    xs = [x[: num_values // world_size * world_size] for x in xs]
                else:
                    xs = [x[:num_values] for x in xs]
                yield f"{kind.name}_{policy.name}_{world_size}_{site.idx}", ranks, kind, site, xs


def record(folder):
    """Makes every call with all ranks; the workspaces as they are afterwards, and the output."""
    for number, case in enumerate(cases()):
        for ranks, site, xs, in_place in calls_of(case, number):
            outs = ranks.all_reduce(xs, site, outs=xs if in_place else None, keep_codes=True)
            ranks.memory.check()
            after = [buffer.cpu() for buffer in ranks.memory.buffers]
            torch.save({"out": outs[0].cpu(), "workspaces": after}, folder / f"{number}_{site.idx}.pt")
    for name, ranks, kind, site, xs in share_calls():
        outs = ranks.run(kind, xs, site)
        ranks.virtual.memory.check()
        after = [buffer.cpu() for buffer in ranks.virtual.memory.buffers]
        torch.save({"outs": [out.cpu() for out in outs], "workspaces": after}, folder / f"{name}.pt")
    ranks = VirtualRanks(2, EchoConfig(), num_blocks=1)
    xs = contributions(2, torch.bfloat16, False, 0)
    out = ranks.exact_all_reduce(xs, SITES[0])[0]
    ranks.memory.check()
    torch.save({"out": out.cpu(), "workspaces": [buffer.cpu() for buffer in ranks.memory.buffers]}, folder / "exact.pt")


def put_into_place(memory: VirtualWorkspaces, recorded):
    """What the peers wrote, but the rank's own counts as before the call."""
    for buffer, after in zip(memory.buffers, recorded["workspaces"], strict=True):
        control, epochs = buffer[:20].clone(), buffer[memory.epochs_at].clone()
        buffer.copy_(after)
        buffer[:20].copy_(control)
        buffer[memory.epochs_at].copy_(epochs)
    torch.cuda.synchronize()


def replay(folder):
    """Launches every rank of every call alone."""
    num_launches = 0
    for number, case in enumerate(cases()):
        for ranks, site, xs, in_place in calls_of(case, number):
            recorded = torch.load(folder / f"{number}_{site.idx}.pt")
            put_into_place(ranks.memory, recorded)
            for rank, x in zip(ranks.ranks, xs, strict=True):
                call = Call(rank, x, x if in_place else torch.full_like(x, float("nan")), site, keep_codes=True)
                call.launch()
                call.finish()
                decoded = call.decode()
                torch.cuda.synchronize()
                what = f"output of rank {rank.rank}, case {number}, {site}"
                assert_same_bits(call.out.cpu(), recorded["out"], what)
                assert_same_bits(decoded.cpu(), recorded["out"], f"decoded {what}")
                num_launches += 1
            ranks.memory.check()
    for name, sharing, kind, site, xs in share_calls():
        recorded, memory = torch.load(folder / f"{name}.pt"), sharing.virtual.memory
        put_into_place(memory, recorded)
        for rank, x in zip(sharing.virtual.ranks, xs, strict=True):
            call = ShareCall(rank, x, poisoned_output(x, kind, len(xs)), site, kind)
            call.launch()
            call.finish()
            torch.cuda.synchronize()
            assert_same_bits(call.out.cpu(), recorded["outs"][rank.rank], f"output of rank {rank.rank}, {name}")
            num_launches += 1
        memory.check()
    ranks, recorded = VirtualRanks(2, EchoConfig(), num_blocks=1), torch.load(folder / "exact.pt")
    memory = ranks.memory
    put_into_place(memory, recorded)
    for rank, x in enumerate(contributions(2, torch.bfloat16, False, 0)):
        out = torch.full_like(x, float("nan"))
        torch.ops.echo_megatron.exact_all_reduce(
            *(x, out, memory.buffers[rank], memory.failure_records[rank], memory.peers),
            rank=rank,
            site=numbers_of(SITES[0]),
            num_blocks=memory.num_blocks,
            num_teams=memory.num_teams,
            ring=memory.ring,
            slot_bytes=memory.slot_bytes,
            timeout_s=memory.timeout_s,
        )
        torch.cuda.synchronize()
        assert_same_bits(out.cpu(), recorded["out"], f"exact output of rank {rank}")
        num_launches += 1
    memory.check()
    print(f"sanitized_calls.py: {num_launches} launches of the collectives' kernels, results as recorded")


if __name__ == "__main__":
    {"record": record, "replay": replay}[sys.argv[1]](Path(sys.argv[2]))
