"""What users of the p2p transport see: its errors, the communicator, a site's process group."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from p2p_stand_ins import BACKWARD, CONSENSUS, FORWARD, LOCAL, SUM, make_rank, site, values
from torch.distributed import distributed_c10d

from echo_megatron import communicator as communicator_module
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.sites import Site
from echo_megatron.transports import failure_watch
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.transports.protocol import CommunicationError


def fail(transport: P2PTransport, code: int, *fields: int) -> None:
    """As a kernel that gives up a wait."""
    transport.workspace.failure[: 1 + len(fields)] = torch.tensor([code, *fields])


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "text"),
        [
            (
                1,
                r"rank 1 of 3: forward site 2 of chunk 0 \(layer\), phase gather, tile 9: waited 4\.5 s \(timeout_s\) "
                r"for rank 2: expected epoch 17, seen 16\. The rank died, hangs, or makes fewer calls\. The outputs of "
                r"this call are NaN; create a new communicator to go on",
            ),
            (
                2,
                r"rank 2 makes another call: expected call 0x0011, got 0x0010\. The ranks must agree on collective",
            ),
            (3, r"forward site 2 .*: rank 2 gave up; see its error"),
        ],
    )
    def test_a_failure_record_is_raised_by_check_and_by_the_next_call(self, calls, code, text):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(2), out=x)
        rank.transport.check()
        fail(rank.transport, code, 2, 1, 9, 17, 16, 2, 0, 0)
        with pytest.raises(CommunicationError, match=text):
            rank.transport.check()
        with pytest.raises(CommunicationError, match=text):
            rank.all_reduce(x, site(3), out=x)
        with pytest.raises(CommunicationError, match=text):
            rank.transport.exact_all_reduce(x, site(3), out=x)
        assert len(calls) == 1, "nothing is launched behind a failure"

    def test_a_destroyed_communicator_says_so(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(2), out=x)
        rank.transport.destroy()
        rank.transport.workspace.peers = []  # as a SymmetricWorkspace leaves it
        for call in (rank.all_reduce, rank.transport.exact_all_reduce):
            with pytest.raises(CommunicationError, match=r"forward site 3 .*: this communicator was destroyed; create"):
                call(x, site(3), out=x)
        assert len(calls) == 2 and rank.transport.num_bytes() == 64

    def test_a_tensor_elsewhere_is_refused(self, calls):
        with pytest.raises(ValueError, match="expected a tensor on cpu, this communicator's GPU, got meta"):
            make_rank(LOCAL).all_reduce(torch.ones(8, dtype=torch.bfloat16, device="meta"), site())
        assert not calls


class TestFailureWatch:
    """A host that is blocked in a wait for the GPU makes no next call that would raise."""

    LIMIT_S = failure_watch.GRACE_S + 60.0  # for what has to come
    QUIET_S = failure_watch.GRACE_S + 4 * failure_watch.PERIOD_S  # for what must not

    def wait_for(self, caplog, number: int) -> list[str]:
        """What was logged, once there are so many lines, or the limit is over."""
        begin = time.monotonic()
        while len(caplog.messages) < number and time.monotonic() - begin < self.LIMIT_S:
            time.sleep(0.05)
        return list(caplog.messages)

    def test_what_nobody_raises_is_logged_once(self, calls, caplog):
        rank, other, x = make_rank(LOCAL), make_rank(LOCAL), values()
        rank.all_reduce(x, site(2), out=x)
        fail(rank.transport, 1, 2, 1, 9, 17, 16, 2, 0, 0)
        (message,) = self.wait_for(caplog, 1)
        assert message.startswith("error: rank 1 of 3: forward site 2") and "for rank 2" in message
        fail(other.transport, 3, 0, 0, 1, 2, 3, 4, 0, 0)
        self.wait_for(caplog, 2)
        time.sleep(self.QUIET_S)
        assert len(caplog.messages) == 2, "the other one's, and nothing twice"
        with pytest.raises(CommunicationError, match="for rank 2"):
            rank.transport.check()

    @pytest.mark.parametrize("end", ["check", "destroy", "abandon"])
    def test_what_is_raised_or_over_is_not_logged(self, calls, caplog, end):
        rank = make_rank(LOCAL)
        fail(rank.transport, 1, 2, 1, 9, 17, 16, 2, 0, 0)
        with pytest.raises(CommunicationError) if end == "check" else nullcontext():
            getattr(rank.transport, end)()
        time.sleep(self.QUIET_S)
        assert caplog.messages == []

    def test_a_process_that_asks_for_it_is_ended_when_its_host_is_blocked(self, calls, caplog, watch):
        rank, raising, ended = make_rank(LOCAL), make_rank(LOCAL), []
        with watch.ending(ended.append):
            fail(raising.transport, 1, 2, 1, 9, 17, 16, 2, 0, 0)
            with pytest.raises(CommunicationError):
                raising.transport.check()
            fail(rank.transport, 3, 0, 0, 1, 2, 3, 4, 0, 0)
            self.wait_for(caplog, 1)
            assert not ended, "it may yet be raised"
            begin = time.monotonic()
            while not ended and time.monotonic() - begin < failure_watch.BLOCKED_S + self.LIMIT_S:
                time.sleep(0.05)
        assert len(ended) == 1 and "rank 0 gave up" in ended[0]

    def test_no_transport_is_kept_alive_and_the_thread_ends_with_the_last(self, calls):
        ranks = [make_rank(LOCAL) for _ in range(3)]
        references = [weakref.ref(rank.transport) for rank in ranks]
        (thread,) = (one for one in threading.enumerate() if one.name == "echo-failure-watch")
        del ranks
        begin = time.monotonic()
        while any(one() is not None for one in references) and time.monotonic() - begin < self.LIMIT_S:
            gc.collect()
            time.sleep(0.05)  # the thread may be looking at them
        assert all(one() is None for one in references)
        thread.join(self.LIMIT_S)
        assert not thread.is_alive()
        make_rank(LOCAL)
        assert any(one.name == "echo-failure-watch" for one in threading.enumerate()), "it starts again"


class TestCommunicator:
    @pytest.mark.parametrize("config", [LOCAL, CONSENSUS], ids=["local", "consensus"])
    def test_the_first_call_of_a_pass_is_fresh(self, communicate, calls, config):
        communicator, x = communicate(config), values()
        order = [(0, FORWARD), (1, FORWARD), (0, BACKWARD), (2, FORWARD), (1, BACKWARD), (0, FORWARD), (1, FORWARD)]
        for idx, direction in order:
            assert communicator.all_reduce(x, site(idx, direction), out=x) is x
        reduces = [call for call in calls if call.name == "all_reduce_"]
        assert [call["fresh"] for call in reduces] == [True, False, True, False, False, True, False]
        communicator.reset()
        communicator.all_reduce(x, site(2), out=x)
        assert [call for call in calls if call.name == "all_reduce_"][-1]["fresh"]

    def test_a_recomputed_site_is_decoded_inside_the_backward_pass(self, communicate, calls, monkeypatch):
        communicator, x = communicate(LOCAL, is_recomputed=lambda: True), values(dtype=torch.float32)
        communicator.all_reduce(x, site(0), out=x)
        communicator.all_reduce(x, site(0, BACKWARD), out=x)
        assert calls[0]["codes"] is not None and calls[1]["codes"] is None
        monkeypatch.setattr(communicator_module, "inside_backward", lambda: True)
        out = torch.zeros_like(x)
        assert communicator.all_reduce(x, site(0), out=out) is out and (out == SUM).all()
        assert [call.name for call in calls] == ["all_reduce_", "all_reduce_", "decode"]
        assert calls[2]["codes"] is calls[0]["codes"]

    @pytest.mark.parametrize("exact", [False, True])
    @pytest.mark.parametrize("grad", [False, True])
    def test_no_call_is_recorded_for_autograd(self, communicate, grad, exact):
        communicator, x = communicate(LOCAL), values().requires_grad_()
        call = communicator.exact_all_reduce if exact else communicator.all_reduce
        with torch.set_grad_enabled(grad):
            y = call(x, site(0))
            assert not y.requires_grad and torch.is_grad_enabled() is grad
            assert call(x, site(1), out=x) is x, "a leaf, in place"

    def test_exact_sums(self, communicate, calls):
        communicator, x = communicate(LOCAL), values(100)
        assert communicator.exact_all_reduce(x, site(3), out=x) is x
        assert [call.name for call in calls] == ["exact_all_reduce_"]
        with pytest.raises(ValueError, match=r"expected a tensor of bfloat16, float16 or float32, got torch\.int32"):
            communicator.exact_all_reduce(x.int(), site(3))
        empty = torch.ones(0, 8)
        assert communicator.exact_all_reduce(empty, site(3)).shape == (0, 8) and len(calls) == 1


@pytest.fixture
def group(communicate, monkeypatch):
    """A site's process group; messages under 2,048 bytes are not quantized."""
    communicator = communicate(LOCAL.replace(min_bytes=2048))
    world = distributed_c10d._world
    monkeypatch.setitem(world.pg_map, communicator.group, ("fake", None))
    monkeypatch.setitem(world.pg_group_ranks, communicator.group, {})
    group = EchoProcessGroup(communicator, site(6), 64, lambda: True)
    yield group
    group.close()


class TestProcessGroup:
    def test_the_site_s_sum_is_quantized(self, group, calls):
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        tensors = [x]
        work = group.allreduce(tensors)
        assert [call.name for call in calls] == ["all_reduce_"] and calls[0]["x"] is x
        assert calls[0]["site"] == [6, 0, 0] and (x == SUM).all() and not group.real_group.calls
        assert work.wait() and work.is_completed() and work.is_success() and work.result() == tensors
        assert work.get_future().wait() == tensors

    @pytest.mark.parametrize("sums_exactly", [False, True])
    def test_a_small_sum_is_exact_where_that_is_as_fast(self, group, calls, monkeypatch, sums_exactly):
        monkeypatch.setattr(group.communicator, "sums_exactly", lambda x: sums_exactly)
        x = torch.ones(15, 64, dtype=torch.bfloat16)
        assert group.takes(x, dist.ReduceOp.SUM) is sums_exactly
        work = group.allreduce([x])
        assert [call.name for call in calls] == ["exact_all_reduce_"] * sums_exactly
        assert (work == "native") is not sums_exactly and len(group.real_group.calls) == (not sums_exactly)

    def test_other_sums_are_the_real_group_s(self, group, calls):
        opts = dist.AllreduceOptions()
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        others = [[x, x], [x.view(64, 16)], [x.view(-1)], [x.int()], [x[:0]]]
        for tensors in others:
            assert group.allreduce(tensors, opts) == "native"
        opts.reduceOp = dist.ReduceOp.MAX
        assert group.allreduce([x], opts) == "native"
        assert not calls and len(group.real_group.calls) == len(others) + 1

    def test_nothing_is_taken_in_a_phase_that_is_not_quantized(self, group, calls):
        group._is_active = lambda: False
        assert group.allreduce([torch.ones(16, 64, dtype=torch.bfloat16)]) == "native" and not calls

    def test_an_error_of_the_call_is_raised(self, group, calls):
        fail(group.communicator.transport, 3, 2, 0, 0)
        with pytest.raises(CommunicationError, match="rank 2 gave up"):
            group.allreduce([torch.ones(16, 64, dtype=torch.bfloat16)])


def test_the_numbers_of_a_site():
    assert Site(3, BACKWARD, "name", 8, 2).numbers == (3, 1, 2)
    assert math.prod(Site(1, FORWARD).numbers) == 0
    used, new = Site(3, BACKWARD), Site(3, BACKWARD)
    assert used.numbers and used == new and hash(used) == hash(new)
