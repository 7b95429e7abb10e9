"""Communicators come and go on real gloo groups; ranks that die, come late or make another call are reported."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from communicator_runs import ROUGHLY
from distributed import run_ranks, run_with_losses

from echo_megatron.communicator import Communicator
from echo_megatron.config import Direction, EchoConfig
from echo_megatron.sites import Site
from echo_megatron.transports import peers
from echo_megatron.transports.processes import Process, _state_and_start
from echo_megatron.transports.protocol import CommunicationError


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


def killed_peer(rank, world_size, timeout_s, num_hosts):
    if num_hosts > 1:  # whose processes are unknown here; only the roll call tells
        this = Process.this()
        Process.this = classmethod(lambda cls: replace(this, namespace=f"host {rank}"))
        peers.ROLL_CALL_S = 0.5
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


@pytest.mark.parametrize("num_hosts", [1, 3])
def test_a_killed_peer_is_reported_by_the_survivors_within_the_limit(tmp_path, num_hosts):
    assert run_with_losses(killed_peer, 3, tmp_path, 15.0, num_hosts) == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        seconds, message = torch.load(tmp_path / f"result{rank}", weights_only=False)
        assert seconds < 20
        assert f"rank {rank} of 3" in message and "backward site 1" in message and "linear_qkv" in message
        dead = (
            "has ended (process " if num_hosts == 1 else "does not answer a roll call of 0.5 s: it has ended, hangs, or"
        )
        assert f"phase agree: rank 1 {dead}" in message and "timeout_s=15" in message
        assert f"; rank {2 - rank} gave up as well (backward site 1 of chunk 0 (" in message


class StuckStore:
    """Of a host that was switched off: no connection is closed, and no answer comes."""

    def set(self, key, value):
        time.sleep(60)


def stuck(rank, world_size):
    communicator = Communicator(dist.group.WORLD, EchoConfig())
    peers.ROLL_CALL_S, peers._READ_S, peers._STORE_S = 0.2, 0.1, 0.2
    communicator.transport.peers._store = StuckStore()
    start = time.time()
    words = communicator.transport.peers.roll_call("here")
    dist.barrier()
    return time.time() - start, words


def test_a_store_that_never_answers_delays_the_error_by_a_bounded_time():
    for seconds, words in run_ranks(stuck, 2):
        assert seconds < 5
        assert words.startswith("the store of torch.distributed can't be reached: ")
        assert words.endswith("may be the one that has ended (no answer within 0.4 s)")


def test_what_is_known_of_a_process():
    this = Process.this()
    assert not this.has_ended() and this.is_neighbour_of(this)
    assert replace(this, start=this.start - 1).has_ended(), "another process had the number before"
    assert not this.is_neighbour_of(replace(this, namespace="another host"))
    unknown = replace(this, namespace="")
    assert not unknown.is_neighbour_of(unknown)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    its = Process(this.namespace, child, _state_and_start(child)[1])
    assert not its.has_ended()
    os.kill(child, signal.SIGKILL)
    while not its.has_ended():  # a zombie: nobody has waited for it yet
        time.sleep(0.01)
    os.waitpid(child, 0)
    assert its.has_ended()


def late_peer(rank, world_size, done):
    peers.ROLL_CALL_S = 0.5
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=1.0))
    if rank == 1:
        while not done.exists():
            time.sleep(0.02)
        return None
    start = time.time()
    try:
        communicator.all_reduce(torch.ones(5000), Site(0, Direction.forward))
    except CommunicationError as error:
        return time.time() - start, str(error)
    raise AssertionError("the call succeeded without its peer")


def test_a_late_peer_ends_the_wait(tmp_path):
    assert run_with_losses(late_peer, 2, tmp_path, tmp_path / "result0") == [0, 0]
    seconds, message = torch.load(tmp_path / "result0", weights_only=False)
    assert 1.4 < seconds < 4
    assert "rank 0 of 2" in message and "forward site 0" in message and "timeout_s=1" in message
    assert "rank 1 does not answer a roll call of 0.5 s: its process " in message
    assert "runs, but hangs or is busy outside of this call" in message


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
