"""One GPU, several ranks on it: every wait ends, the failure record says who waited for whom, outputs are NaN."""

import time

import pytest
import torch
from virtual_checks import CheckedRanks, contributions
from virtual_ranks import Call, VirtualRanks, numbers_of, poisoned_like
from virtual_workspaces import STAGES, VirtualWorkspaces

from echo_megatron.config import Algorithm, Direction, EchoConfig, Policy, Rescale
from echo_megatron.sites import Site

TIMEOUT_S = 1.0
# An aborted rank looks at the abort word every 64 polls, a few microseconds; the rest is launch and synchronization.
SOON_S = 0.3
SITE = Site(5, Direction.backward, chunk=2)
CYCLES_A_SECOND = 1_700_000_000


def run_some(ranks, xs, absent=(), sites=None):
    """The calls of the ranks that take part, all prepared before the first is launched, and how long they took."""
    sites = sites or [SITE] * ranks.world_size
    taking_part = [rank for rank in ranks.ranks if rank.rank not in absent]
    calls = {
        rank.rank: Call(rank, xs[rank.rank], poisoned_like(xs[rank.rank]), sites[rank.rank]) for rank in taking_part
    }
    for call in calls.values():
        call.out.fill_(7.0)  # so that NaN is the kernel's
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for rank, call in calls.items():
        with torch.cuda.stream(ranks.memory.streams[rank]):
            call.launch()
    torch.cuda.synchronize()
    return calls, time.perf_counter() - begin


def warm_up(ranks, num_values):
    """One good call, so that nothing is loaded or built while a clock runs."""
    xs = contributions(ranks.world_size, num_values)
    ranks.all_reduce(xs, Site(0, Direction.forward))
    ranks.memory.check()
    assert all(out.isfinite().all() for out in ranks.all_reduce(xs, Site(0, Direction.forward)))


CONFIGS = {
    "one_shot": EchoConfig(algorithm=Algorithm.one_shot),
    "two_shot": EchoConfig(algorithm=Algorithm.two_shot),
    "zero_aware": EchoConfig(policy=Policy.zero_aware, group_size=128),
    "rescale_group": EchoConfig(rescale=Rescale.group),
    "consensus": EchoConfig.preset("echo4_paper"),
}


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.parametrize("num_values", [1_000, 500_009])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_an_absent_rank_ends_the_others_within_the_limit(name, num_values, absent):
    ranks = VirtualRanks(3, CONFIGS[name], timeout_s=TIMEOUT_S)
    warm_up(ranks, num_values)
    calls, seconds = run_some(ranks, contributions(3, num_values), absent=[absent])
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + SOON_S, f"took {seconds:.2f} s"
    failures = ranks.memory.failures()
    assert failures[absent] is None
    present = [failures[rank] for rank in calls]
    assert all(failure is not None for failure in present)
    timeouts = [failure for failure in present if failure.code == "timeout"]
    assert timeouts, present
    for failure in present:
        assert failure.site == tuple(numbers_of(SITE))
        assert failure.code in ("timeout", "peer")
    stage = "rescale" if CONFIGS[name].rescale is Rescale.group else "push"
    assert any((failure.peer, failure.stage) == (absent, stage) for failure in timeouts), present
    assert all(failure.expected != failure.seen and failure.row >= 0 for failure in timeouts), present
    for rank, call in calls.items():
        assert call.out.isnan().any(), f"rank {rank}: a failed call must not look like a result"
        assert not (call.out == 7.0).any(), f"rank {rank}: every element is written, also after a failure"


def test_two_shot_says_that_it_waited_for_the_gather():
    """A rank that pushes its records and then never sends a sum: its peer's flags are all there but the gather's."""
    config = EchoConfig(algorithm=Algorithm.two_shot, eta=0.0)
    ranks = VirtualRanks(2, config, num_blocks=1, timeout_s=TIMEOUT_S)
    warm_up(ranks, 4096 * 8)
    xs = contributions(2, 4096 * 8)
    call = Call(ranks.ranks[0], xs[0], torch.full_like(xs[0], 7.0), SITE)
    memory = ranks.memory
    before = memory.buffers[0].clone()
    ranks.all_reduce(xs, SITE)  # leaves rank 1's push in rank 0's workspace
    memory.check()
    _restore_all_but_pushes(memory, before)
    with torch.cuda.stream(memory.streams[0]):
        call.launch()
    failure = memory.failures()[0]
    assert (failure.code, failure.peer, failure.stage) == ("timeout", 1, "gather"), failure


def _restore_all_but_pushes(memory, before):
    """Rank 0's workspace as it was before the call, except flags and slots of the push stage."""
    gather = STAGES.index("gather")
    for part in (slice(0, memory.epochs_at.stop), memory.flags_at(gather), memory.slots_at(gather)):
        memory.buffers[0][part].copy_(before[part])
    torch.cuda.synchronize()


def test_a_rank_that_did_not_wait_itself_ends_with_the_first_reporter():
    """Rank 0 gives up after its second; rank 1, launched late with a limit of a minute, ends at once."""
    ranks = VirtualRanks(3, EchoConfig(), timeout_s=TIMEOUT_S)
    warm_up(ranks, 10_000)
    xs = contributions(3, 10_000)
    patient = Call(ranks.ranks[1], xs[1], poisoned_like(xs[1]), SITE, timeout_s=60.0)
    hasty = Call(ranks.ranks[0], xs[0], poisoned_like(xs[0]), SITE)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for call in (hasty, patient):
        with torch.cuda.stream(call.rank.stream):
            call.launch()
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < TIMEOUT_S + SOON_S
    first, second, third = ranks.memory.failures()
    assert (first.code, first.peer) == ("timeout", 2), first
    assert second.code == "peer" and second.peer == 0, second
    assert third is None
    assert hasty.out.isnan().any() and patient.out.isnan().any()
    abort_words = [buffer[16:20].view(torch.int32).item() for buffer in ranks.memory.buffers]
    assert all(word > 0 for word in abort_words), "every rank is told, the absent one too"


def test_a_rank_that_comes_after_the_failure_ends_at_once():
    """Its first call may find the other's records and be right; the next one must not wait its whole limit."""
    ranks = VirtualRanks(2, EchoConfig(), timeout_s=TIMEOUT_S)
    warm_up(ranks, 100_000)
    xs = contributions(2, 100_000)
    run_some(ranks, xs, absent=[1])
    for idx in (5, 6):
        site = Site(idx, Direction.backward, chunk=2)
        _, seconds = run_some(ranks, xs, absent=[0], sites=[site, site])
        assert seconds < SOON_S, f"took {seconds:.2f} s"
    failure = ranks.memory.failures()[1]
    assert failure is not None and (failure.code, failure.peer) == ("peer", 0), failure


def test_new_workspaces_serve_after_a_failure():
    ranks = VirtualRanks(2, EchoConfig(), timeout_s=TIMEOUT_S)
    run_some(ranks, contributions(2, 10_000), absent=[0])
    assert ranks.memory.failures()[1].code == "timeout"
    checked = CheckedRanks(2, EchoConfig())
    for idx in range(3):
        checked.all_reduce(contributions(2, 10_000, seed=idx), Site(idx, Direction.forward))


def disagreements():
    """What rank 1 does differently, by name."""
    ones = EchoConfig()
    yield "elements", ones, 100_352, SITE
    yield "elements_far_fewer", ones, 17, SITE
    yield "bits", ones, 100_000, Site(5, Direction.backward, bits=8, chunk=2)
    yield "site", ones, 100_000, Site(6, Direction.backward, chunk=2)
    yield "direction", ones, 100_000, Site(5, Direction.forward, chunk=2)
    yield "chunk", ones, 100_000, Site(5, Direction.backward, chunk=1)
    yield "policy", EchoConfig(policy=Policy.symmetric), 100_000, SITE
    yield "group_size", EchoConfig(group_size=64), 100_000, SITE
    yield "rescale", EchoConfig(rescale=Rescale.none), 100_000, SITE


@pytest.mark.parametrize(
    ("config", "num_values", "site"), [pytest.param(*rest, id=name) for name, *rest in disagreements()]
)
@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
def test_ranks_that_disagree_are_told_so(config, num_values, site, algorithm):
    """A mismatch, not a hang and not a sum of different things. A rank with fewer tiles may miss it and time out."""
    memory = VirtualWorkspaces(2, timeout_s=TIMEOUT_S)
    ours = VirtualRanks(2, EchoConfig(algorithm=algorithm), memory=memory)
    theirs = VirtualRanks(2, config.replace(algorithm=algorithm), memory=memory)
    for ranks in (ours, theirs):
        warm_up(ranks, 100_000)
    xs = [contributions(1, 100_000)[0], contributions(1, num_values)[0]]
    calls = [
        Call(ours.ranks[0], xs[0], torch.full_like(xs[0], 7.0), SITE),
        Call(theirs.ranks[1], xs[1], torch.full_like(xs[1], 7.0), site),
    ]
    torch.cuda.synchronize()
    for call in calls:
        with torch.cuda.stream(call.rank.stream):
            call.launch()
    failures = memory.failures()
    assert all(failures), failures
    assert any(failure.code == "mismatch" for failure in failures), failures
    for rank, failure in enumerate(failures):
        if failure.code == "mismatch":
            assert failure.peer == 1 - rank
            assert failure.expected != failure.seen
    assert failures[0].site == tuple(numbers_of(SITE))
    assert calls[0].out.isnan().any() and calls[1].out.isnan().any()


def test_another_grid_or_dtype_is_a_disagreement():
    for change in ("num_blocks", "dtype"):
        memory = VirtualWorkspaces(2, timeout_s=TIMEOUT_S)
        ranks = VirtualRanks(2, EchoConfig(), memory=memory)
        warm_up(ranks, 300_000)
        xs = contributions(2, 300_000)
        options = {"num_blocks": memory.num_blocks - 1} if change == "num_blocks" else {}
        xs[1] = xs[1].half() if change == "dtype" else xs[1]
        calls = [
            Call(ranks.ranks[0], xs[0], poisoned_like(xs[0]), SITE),
            Call(ranks.ranks[1], xs[1], poisoned_like(xs[1]), SITE, **options),
        ]
        torch.cuda.synchronize()
        for call in calls:
            with torch.cuda.stream(call.rank.stream):
                call.launch()
        failures = memory.failures()
        assert any(failure is not None and failure.code == "mismatch" for failure in failures), (change, failures)


def test_an_exact_call_against_a_quantized_one_is_a_disagreement():
    memory = VirtualWorkspaces(2, timeout_s=TIMEOUT_S)
    ranks = VirtualRanks(2, EchoConfig(algorithm=Algorithm.one_shot), memory=memory)
    warm_up(ranks, 10_000)
    xs = contributions(2, 10_000)
    ranks.exact_all_reduce(xs, SITE)
    memory.check()
    call = Call(ranks.ranks[0], xs[0], poisoned_like(xs[0]), SITE)
    out = torch.full_like(xs[1], 7.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(memory.streams[0]):
        call.launch()
    with torch.cuda.stream(memory.streams[1]):
        torch.ops.echo_megatron.exact_all_reduce(
            *(xs[1], out, memory.buffers[1], memory.failure_records[1], memory.peers),
            rank=1,
            site=numbers_of(SITE),
            num_blocks=memory.num_blocks,
            num_teams=memory.num_teams,
            ring=memory.ring,
            slot_bytes=memory.slot_bytes,
            timeout_s=memory.timeout_s,
        )
    failures = memory.failures()
    assert any(failure is not None and failure.code == "mismatch" for failure in failures), failures
    assert call.out.isnan().any() or out.isnan().any()


@pytest.mark.parametrize("absent", [0, 1])
def test_an_absent_rank_ends_an_exact_call(absent):
    ranks = VirtualRanks(2, EchoConfig(), timeout_s=TIMEOUT_S)
    xs = contributions(2, 3_001)
    ranks.exact_all_reduce(xs, SITE)
    memory, rank = ranks.memory, 1 - absent
    memory.check()
    out = torch.full_like(xs[rank], 7.0)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.cuda.stream(memory.streams[rank]):
        torch.ops.echo_megatron.exact_all_reduce(
            *(xs[rank], out, memory.buffers[rank], memory.failure_records[rank], memory.peers),
            rank=rank,
            site=numbers_of(SITE),
            num_blocks=memory.num_blocks,
            num_teams=memory.num_teams,
            ring=memory.ring,
            slot_bytes=memory.slot_bytes,
            timeout_s=memory.timeout_s,
        )
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < TIMEOUT_S + SOON_S
    failure = memory.failures()[rank]
    assert (failure.code, failure.peer, failure.site) == ("timeout", absent, tuple(numbers_of(SITE)))
    assert out.isnan().all()


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_late_rank_within_the_limit_is_waited_for(name):
    checked = CheckedRanks(3, CONFIGS[name], timeout_s=3.0)
    for idx, late in enumerate((0, 1, 2)):
        delays = [CYCLES_A_SECOND // 2 if rank == late else 0 for rank in range(3)]
        xs = contributions(3, 60_001, seed=idx)
        checked.all_reduce(xs, Site(idx, Direction.forward), delays=delays)
