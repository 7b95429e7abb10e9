"""The consensus update beside the next call, what diagnostics read of a state, and the order of calls on streams."""

from __future__ import annotations

import pytest
import torch
from p2p_stand_ins import BACKWARD, CONSENSUS, FORWARD, LOCAL, LOG, PEERS, STREAMS, make_rank, site, sizes, values

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, StateDtype
from echo_megatron.ops import index_of


class TestConsensus:
    def test_in_place_keeps_x_for_the_update(self, calls):
        rank, x = make_rank(CONSENSUS), values().view(50, -1)
        for idx in range(2):
            rank.all_reduce(x, site(idx), out=x)
        assert [call.name for call in calls] == ["all_reduce_", "consensus_update"] * 2
        for reduce, update, fresh in zip(calls[::2], calls[1::2], (True, False), strict=True):
            kept = reduce["kept_x"]
            assert kept.numel() == x.numel() and kept.dtype == x.dtype and kept.is_contiguous()
            assert update["x"] is kept and update["codes"] is reduce["codes"] and update["state"] is reduce["state"]
            _, num_bytes = sizes(CONSENSUS, x.numel(), Algorithm.two_shot)
            assert reduce["codes"].numel() == num_bytes
            left = {name: value for name, value in update.arguments.items() if name not in ("x", "codes", "state")}
            assert left == {
                "world_size": len(PEERS),
                "bits": 4,
                "policy": index_of(CONSENSUS.policy),
                "group_size": CONSENSUS.group_size,
                "algorithm": index_of(Algorithm.two_shot),
                "state_dtype": index_of(CONSENSUS.state_dtype_of(FORWARD)),
                "fresh": fresh,
                "coefficients": Compensator(CONSENSUS).coefficients,
            }
        assert calls[0]["kept_x"].data_ptr() == calls[2]["kept_x"].data_ptr(), "one buffer a direction"
        assert calls[0]["codes"] is calls[2]["codes"]

    def test_out_of_place_reads_x_itself(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site())
        assert calls[0]["kept_x"] is None and calls[1]["x"] is x

    def test_kept_x_follows_size_and_dtype(self, calls):
        rank = make_rank(CONSENSUS)
        shapes = [(1000, torch.bfloat16), (1000, torch.float32), (500, torch.float32), (1000, torch.bfloat16)]
        for idx, (num_values, dtype) in enumerate(shapes):
            x = values(num_values, dtype)
            rank.all_reduce(x, site(idx), out=x)
        assert [(call["kept_x"].numel(), call["kept_x"].dtype) for call in calls[::2]] == shapes
        assert len({call["kept_x"].data_ptr() for call in calls[2::2]}) == 1, "a buffer large enough serves"

    def test_directions_have_their_own_buffers(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        for direction in Direction:
            rank.all_reduce(x, site(direction=direction), out=x)
        forward, backward = calls[::2]
        assert forward["kept_x"].data_ptr() != backward["kept_x"].data_ptr()
        assert forward["codes"] is not backward["codes"]
        kept = sum(call[name].nbytes for call in (forward, backward) for name in ("codes", "kept_x"))
        assert rank.transport.num_bytes() == 64 + kept

    def test_kept_codes_serve_the_update_too(self, calls):
        rank, x = make_rank(CONSENSUS), values(dtype=torch.float32)
        first, second = (rank.all_reduce(x, site(idx), keep=True) for idx in range(2))
        assert calls[0]["codes"] is first.codes and calls[1]["codes"] is first.codes
        assert calls[3]["codes"] is second.codes and second.codes is not first.codes

    def test_the_update_runs_beside_and_the_next_call_waits(self, calls, cuda):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(0), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0] == ("all_reduce_", "main") and waits[2] == ("consensus_update", "side1")
        assert waits[1][:2] == ("wait", "side1") and waits[1][2].startswith("main at")
        LOG.clear()
        rank.all_reduce(x, site(0, BACKWARD), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0] == ("all_reduce_", "main"), "the other direction's update is not waited for"
        LOG.clear()
        rank.all_reduce(x, site(1), out=x)
        waits = [entry for entry in LOG if entry[0] != "record"]
        assert waits[0][:2] == ("wait", "main") and waits[0][2].startswith("side1 at")
        assert waits[1] == ("all_reduce_", "main") and cuda.num_created == 2, "a stream a direction"

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("keep", [False, True])
    def test_memory_that_the_update_reads_is_not_used_anew(self, calls, keep, in_place):
        rank = make_rank(CONSENSUS)
        for idx in range(2):
            x = values(dtype=torch.float32)
            LOG.clear()
            rank.all_reduce(x, site(idx), out=x if in_place else None, keep=keep)
            recorded = {entry[1] for entry in LOG if entry[0] == "record"}
            read = {name for name in ("x", "codes", "state") if calls[-1][name].data_ptr() in recorded}
            buffers = ({"x"} if in_place else set()) | (set() if keep else {"codes"})
            # The allocator knows of buffers that stay from when they were allocated.
            assert read == {"x", "codes", "state"} - (buffers if idx else set())

    def test_in_a_graph_the_update_follows_on_the_call_s_stream(self, calls, cuda):
        rank, x = make_rank(CONSENSUS), values()
        rank.all_reduce(x, site(0), out=x)
        cuda.capturing = True
        LOG.clear()
        for idx in range(2):
            rank.all_reduce(x, site(idx), out=x)
        assert LOG == [("all_reduce_", "main"), ("consensus_update", "main")] * 2
        cuda.capturing = False
        LOG.clear()
        rank.all_reduce(x, site(2), out=x)
        assert LOG[0] == ("all_reduce_", "main"), "there is no update beside to wait for"

    def test_training_after_inference(self, calls):
        rank, x = make_rank(CONSENSUS), values()
        with torch.inference_mode():
            rank.all_reduce(x, site(0), out=x)
        rank.all_reduce(x, site(1), out=x)
        assert not any(calls[0][name].is_inference() for name in ("codes", "kept_x", "state"))
        calls[2]["kept_x"].fill_(0)


class TestCorrection:
    """What the next call adds, for diagnostics."""

    @pytest.mark.parametrize(
        "config", [LOCAL.replace(state_dtype=StateDtype.bf16), CONSENSUS], ids=["local", "consensus"]
    )
    def test_it_is_read_behind_what_writes_it_and_where_the_next_call_reads(self, calls, config):
        rank, x = make_rank(config), values(100_001)
        compensator = rank.compensators[FORWARD]
        assert rank.transport.correction(x, site(0), compensator) is None, "nothing is added at the first site"
        rank.all_reduce(x, site(0), out=x)
        calls[0]["state"].view(torch.bfloat16).fill_(2.5)
        LOG.clear()
        STREAMS[:] = ["other"]
        correction = rank.transport.correction(x, site(1), compensator)
        assert correction.dtype is torch.float32 and correction.shape == (100_032,) and correction.eq(2.5).all()
        assert LOG[0] == ("wait", "other", "main")
        assert [entry[2][:8] for entry in LOG[1:]] == (["side1 at"] if config is CONSENSUS else [])
        assert rank.transport.correction(values(1000), site(1), compensator) is None, "another size begins a pass"
        assert rank.compensators[BACKWARD].is_fresh and not compensator.is_fresh, "asking changes nothing"
        rank.all_reduce(x, site(1), out=x)
        assert not [call for call in calls if call.name == "all_reduce_"][1]["fresh"]
        compensator.reset()
        assert rank.transport.correction(x, site(1), compensator) is None

    def test_bytes_are_those_that_the_call_counts(self, calls):
        rank, x = make_rank(LOCAL), values()
        expected = rank.transport.num_sent_bytes(x, site(0))
        rank.all_reduce(x, site(0), out=x)
        assert rank.transport.take_sent_bytes() == expected > 0


class TestStreams:
    def test_calls_run_in_their_order_whatever_their_streams(self, calls):
        rank, x = make_rank(LOCAL), values()
        for idx, name in enumerate(("main", "main", "other", "other", "main")):
            STREAMS[:] = [name]
            if idx == 3:
                rank.transport.exact_all_reduce(x, site(idx), out=x)
            else:
                rank.all_reduce(x, site(idx), out=x)
        assert LOG == [
            ("all_reduce_", "main"),
            ("all_reduce_", "main"),
            ("wait", "other", "main"),
            ("all_reduce_", "other"),
            ("exact_all_reduce_", "other"),
            ("wait", "main", "other"),
            ("all_reduce_", "main"),
        ]

    def test_a_capture_does_not_wait_for_what_is_outside(self, calls, cuda):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(0), out=x)
        STREAMS[:], cuda.capturing = ["capture"], True
        rank.all_reduce(x, site(1), out=x)
        assert [entry for entry in LOG if entry[0] == "wait"] == []
