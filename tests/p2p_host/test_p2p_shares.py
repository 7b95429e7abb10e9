"""Reduce-scatter and all-gather through the p2p transport, and the bytes that each kind of call sends."""

from __future__ import annotations

import pytest
import torch
from feedbacks import AVERAGES
from p2p_stand_ins import (
    FORWARD,
    LOCAL,
    NONE,
    NUM_BLOCKS,
    RANK,
    SUM,
    make_rank,
    make_transport,
    options,
    site,
    values,
    without_tensors,
)

from echo_megatron.config import Algorithm, Collective, Policy, StateDtype
from echo_megatron.ops import index_of
from echo_megatron.reference import Segments, make_quantizer
from echo_megatron.transports import p2p
from echo_megatron.tuning import Choice, Table


class TestShares:
    """Sequence parallelism's reduce-scatter and all-gather."""

    @pytest.mark.parametrize("config", [LOCAL, NONE, LOCAL.replace(bits=8, **AVERAGES)])
    def test_reduce_scatter(self, calls, config):
        rank, x = make_rank(config), values(300_000).view(-1, 8)
        sites = [site(idx, bits=bits, chunk=2) for idx, bits in enumerate((config.bits, 8, 4))]
        compensator = rank.compensators[FORWARD] if config.compensates else None
        for where in sites:
            output = rank.transport.reduce_scatter(x, where, compensator)
            assert output.shape == (12_500, 8) and output.dtype == x.dtype and (output == SUM).all()
        tile_bytes = torch.ops.echo_megatron.state_tile_bytes(index_of(config.state_dtype_of(FORWARD)))
        for idx, (call, where) in enumerate(zip(calls, sites, strict=True)):
            assert call.name == "reduce_scatter" and call["x"] is x
            assert call["state"] is calls[0]["state"]
            if config.compensates:
                assert call["state"].numel() == 2 * 25 * tile_bytes, "two shares of other ranks of 100,000 values each"
            expected = options(config, where, Choice(Algorithm.two_shot, NUM_BLOCKS, 3), idx == 0 or config is NONE)
            del expected["algorithm"]
            assert without_tensors(call) == expected

    @pytest.mark.parametrize("bits", [4, 8])
    def test_all_gather(self, calls, bits):
        rank, x = make_rank(LOCAL), values(100_000).view(-1, 8)
        for idx in range(2):
            output = rank.transport.all_gather(x, site(idx, bits=bits))
            assert output.shape == (37_500, 8) and (output == SUM).all()
        expected = options(LOCAL, site(1, bits=bits), Choice(Algorithm.two_shot, NUM_BLOCKS, 3), fresh=True)
        for name in ("algorithm", "residual", "state_dtype", "fresh", "coefficients"):
            del expected[name]
        assert calls[1].name == "all_gather" and calls[1]["x"] is x and without_tensors(calls[1]) == expected
        assert rank.compensators[FORWARD].is_fresh, "nothing is fed back"

    def test_a_given_output_is_written_in_place_and_a_strided_input_is_copied(self, calls):
        rank, x = make_rank(NONE), torch.ones(300, 400, dtype=torch.bfloat16)
        share, whole = x.new_zeros(100, 400), x.new_zeros(900, 400)
        assert rank.transport.reduce_scatter(x, site(), None, share) is share and calls[0]["y"] is share
        assert rank.transport.all_gather(x, site(), whole) is whole and calls[1]["y"] is whole
        rank.transport.reduce_scatter(torch.ones(400, 300, dtype=torch.bfloat16).t(), site(), None)
        rank.transport.all_gather(torch.ones(400, 300, dtype=torch.bfloat16).t(), site())
        assert calls[2]["x"].is_contiguous() and calls[2]["y"].shape == (100, 400)
        assert calls[3]["x"].is_contiguous() and calls[3]["y"].shape == (900, 400)

    def test_the_larger_tensor_decides_how_a_call_runs(self, calls):
        rank = make_rank(NONE)
        small, large = Choice(Algorithm.one_shot, 16, 2), Choice(Algorithm.two_shot, NUM_BLOCKS, 3)
        for num_values, scattered, gathered in ((120_000, small, large), (30_000, small, small)):
            calls.clear()
            rank.transport.reduce_scatter(values(num_values), site(), None)
            rank.transport.all_gather(values(num_values), site())
            for call, choice in zip(calls, (scattered, gathered), strict=True):
                assert (call["num_blocks"], call["depth"]) == (choice.num_blocks, choice.depth)

    def test_a_reduce_scatter_and_an_all_reduce_do_not_share_a_pass(self, calls):
        """Of one working basis: their states are laid out differently."""
        rank, x = make_rank(LOCAL.replace(algorithm=Algorithm.two_shot)), values(300_000)
        compensator = rank.compensators[FORWARD]
        rank.transport.reduce_scatter(x, site(0), compensator)
        rank.transport.reduce_scatter(x, site(1), compensator)
        rank.transport.all_gather(x, site(1))
        rank.all_reduce(values(100_000), site(2))
        rank.transport.reduce_scatter(x, site(3), compensator)
        assert [call["fresh"] for call in calls if call.name != "all_gather"] == [True, False, True, True]

    def test_bits_that_the_workspace_has_no_room_for_are_named(self, calls, monkeypatch):
        transport = make_transport(NONE.replace(gather_bits=16))
        monkeypatch.setitem(transport._memory, "slot_bytes", 2500)
        with pytest.raises(
            ValueError, match=r"all_gather, forward site 3.* gather_bits 16\), got 8; set gather_bits=8"
        ):
            transport.all_gather(values(), site(3, bits=8))
        assert not calls

    def test_sent_bytes(self, calls):
        rank, x = make_rank(LOCAL), values(300_000)
        quantizer = {bits: make_quantizer(LOCAL, bits) for bits in (4, 8)}
        scattered = 2 * quantizer[4].num_bytes(100_000)
        gathered = 2 * quantizer[8].num_bytes(300_000)
        assert rank.transport.num_sent_bytes(x, site(), Collective.reduce_scatter) == scattered
        assert rank.transport.num_sent_bytes(x, site(bits=8), Collective.all_gather) == gathered
        rank.transport.reduce_scatter(x, site(), rank.compensators[FORWARD])
        rank.transport.all_gather(x, site(bits=8))
        assert rank.transport.take_sent_bytes() == scattered + gathered

    def test_correction_of_a_reduce_scatter_by_share(self, calls):
        """Zeros for the rank's own share, of which it rounds nothing; each share to the end of its last block."""
        rank, x = make_rank(LOCAL.replace(state_dtype=StateDtype.bf16)), values(3 * 100_001)
        compensator, kind = rank.compensators[FORWARD], Collective.reduce_scatter
        assert rank.transport.correction(x, site(0), compensator, kind) is None
        rank.transport.reduce_scatter(x, site(0), compensator)
        calls[0]["state"].view(2, -1).view(torch.bfloat16).copy_(torch.tensor([[1.5], [2.5]]))
        correction = rank.transport.correction(x, site(1), compensator, kind)
        assert correction.shape == (3, 100_032) and correction.dtype is torch.float32
        assert correction[0].eq(1.5).all() and correction[RANK].eq(0).all() and correction[2].eq(2.5).all()
        assert rank.transport.correction(values(300), site(1), compensator, kind) is None, "another size begins a pass"
        assert rank.transport.correction(x, site(1), compensator) is None, "so does an all-reduce"

    def test_plans_are_bounded_and_of_one_table(self, calls, monkeypatch):
        monkeypatch.setattr(p2p, "_MAX_PLANS", 3)
        rank = make_rank(NONE)
        for num_values in (*range(3, 30, 3), 3):
            rank.transport.reduce_scatter(values(num_values), site(), None)
            rank.transport.all_gather(values(num_values), site())
            assert len(rank.transport._share_plans) <= 3
        rank.transport.table = Table.always(Choice(Algorithm.one_shot, 5, 1))
        rank.transport.all_gather(values(3), site())
        assert (calls[-1]["num_blocks"], calls[-1]["depth"]) == (5, 1)


class TestSentBytes:
    """P = 3, rank 1."""

    @pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
    @pytest.mark.parametrize("num_values", [1, 40, 199_969])
    @pytest.mark.parametrize("policy", [Policy.rotated, Policy.zero_aware])
    def test_records_to_others_are_counted_once(self, calls, policy, num_values, algorithm):
        config = NONE.replace(algorithm=algorithm, policy=policy)
        rank, quantizer = make_rank(config), make_quantizer(config, 8)
        for idx in range(2):
            rank.all_reduce(values(num_values), site(idx, bits=8))
        records = quantizer.num_basis_values(num_values)
        if algorithm is Algorithm.one_shot:
            expected = 2 * quantizer.num_bytes(records)
        else:
            first, own, last = (quantizer.num_bytes(Segments.split(records, 3, 32).size(r)) for r in range(3))
            expected = first + last + 2 * own
        assert rank.transport.take_sent_bytes() == 2 * expected
        assert rank.transport.take_sent_bytes() == 0

    def test_exact_sums_send_the_values(self, calls):
        transport = make_transport(LOCAL)
        transport.exact_all_reduce(values(100), site())
        transport.exact_all_reduce(values(100, torch.float32), site())
        assert transport.take_sent_bytes() == 2 * 200 + 2 * 400
