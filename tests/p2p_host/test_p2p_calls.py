"""What the p2p transport hands to the operators: arguments, passes, outputs, kept codes, exact sums."""

from __future__ import annotations

import pytest
import torch
from feedbacks import AVERAGES
from p2p_stand_ins import (
    BACKWARD,
    FORWARD,
    LOCAL,
    NONE,
    NUM_BLOCKS,
    PEERS,
    RANK,
    RING,
    SLOT_BYTES,
    SUM,
    TIMEOUT_S,
    Call,
    make_rank,
    make_transport,
    options,
    site,
    sizes,
    values,
    without_tensors,
)
from torch import Tensor

from echo_megatron.compensator import Compensator
from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual, StateDtype
from echo_megatron.ops import index_of
from echo_megatron.transports import p2p
from echo_megatron.tuning import Choice, Table
from echo_megatron.workspace import TEAMS_A_BLOCK


class TestArguments:
    @pytest.mark.parametrize(
        ("num_values", "choice"),
        [(1000, Choice(Algorithm.one_shot, 16, 2)), (200_000, Choice(Algorithm.two_shot, NUM_BLOCKS, 3))],
    )
    def test_out_of_place_without_compensation(self, calls, num_values, choice):
        rank, x, where = make_rank(NONE), values(num_values).view(-1, 8), site(5, chunk=2)
        reduced = rank.all_reduce(x, where)
        (call,) = calls
        assert call.name == "all_reduce" and call["x"] is x and call["y"] is reduced.output
        assert call["state"] is None and call["codes"] is None and call["kept_x"] is None
        assert without_tensors(call) == options(NONE, where, choice, fresh=True)
        assert reduced.output.shape == x.shape and reduced.codes is reduced.output
        assert (x == 1).all() and (reduced.output == SUM).all()

    @pytest.mark.parametrize("changes", [{}, {"bits": 8, **AVERAGES}, {"group_size": 128, "state_dtype": "fp32"}])
    def test_in_place_with_the_local_residual(self, calls, changes):
        config, x = LOCAL.replace(**changes), values()
        rank = make_rank(config)
        sites = [site(idx, bits=config.bits) for idx in range(3)]
        for where in sites:
            assert rank.all_reduce(x, where, out=x).output is x
        state_bytes, _ = sizes(config, x.numel(), Algorithm.two_shot, config.bits)
        assert calls[0]["state"].numel() == state_bytes
        for idx, (call, where) in enumerate(zip(calls, sites, strict=True)):
            assert call.name == "all_reduce_" and call["x"] is x and "y" not in call.arguments
            assert call["state"] is calls[0]["state"] and call["codes"] is None and call["kept_x"] is None
            choice = Choice(Algorithm.two_shot, NUM_BLOCKS, 3)
            assert without_tensors(call) == options(config, where, choice, fresh=idx == 0)

    def test_bits_of_a_site_change_neither_state_nor_choice(self, calls):
        config = LOCAL.replace(bits=8)
        rank, x = make_rank(config), values()
        for idx, bits in enumerate((8, 4, 8)):
            rank.all_reduce(x, site(idx, bits=bits), out=x)
        assert [call["bits"] for call in calls] == [8, 4, 8]
        assert [call["fresh"] for call in calls] == [True, False, False]
        assert len({(id(call["state"]), call["algorithm"], call["num_blocks"]) for call in calls}) == 1

    def test_directions_have_their_own_choice_and_state(self, calls):
        rank, x = make_rank(LOCAL), values()
        for direction in (FORWARD, BACKWARD, FORWARD, BACKWARD):
            rank.all_reduce(x, site(1, direction), out=x)
        assert [call["num_blocks"] for call in calls] == [NUM_BLOCKS, 8, NUM_BLOCKS, 8]
        assert [call["fresh"] for call in calls] == [True, True, False, False]
        assert [call["site"][1] for call in calls] == [0, 1, 0, 1]
        assert calls[0]["state"] is calls[2]["state"] and calls[1]["state"] is calls[3]["state"]
        assert calls[0]["state"] is not calls[1]["state"]

    def test_directions_have_the_coefficients_of_their_residual(self, calls):
        config = LOCAL.replace(backward_residual=Residual.consensus, bits=8)
        rank, x = make_rank(config), values()
        sites = [site(idx, direction, bits=8) for idx in range(2) for direction in Direction]
        for where in sites:
            rank.all_reduce(x, where)
        sums = [call for call in calls if call.name == "all_reduce"]
        choices = {FORWARD: Choice(Algorithm.two_shot, NUM_BLOCKS, 3), BACKWARD: Choice(Algorithm.one_shot, 8, 1)}
        for call, where in zip(sums, sites, strict=True):
            assert without_tensors(call) == options(config, where, choices[where.direction], fresh=where.idx == 0)
        assert {tuple(call["coefficients"]) for call in sums[::2]} == {(0.0, 0.0, 1.0, 0.0, 1.0)}
        updates = [call for call in calls if call.name == "consensus_update"]
        assert len(updates) == 2, "of the backward calls"
        for call in updates:
            assert call["coefficients"] == Compensator(EchoConfig(residual=Residual.consensus)).coefficients
            assert call["state_dtype"] == index_of(StateDtype.bf16)

    def test_a_plan_serves_one_dtype(self, calls):
        """The records are smaller than the sum in fp32 only."""
        config = NONE.replace(algorithm=Algorithm.one_shot, bits=8)
        rank = make_rank(config)
        kept = []
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            reduced = rank.all_reduce(values(dtype=dtype), site(bits=8), keep=True)
            assert (reduced.codes is reduced.output) is (calls[-1]["codes"] is None)
            kept.append(reduced.codes.numel())
        assert kept == [200_000, sizes(config, 200_000, Algorithm.one_shot, bits=8)[1], 200_000]

    def test_a_plan_is_with_or_without_compensation(self, calls):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(1))
        rank.transport.all_reduce(x, site(2), None)
        rank.all_reduce(x, site(3))
        assert [call["state"] is None for call in calls] == [False, True, False]
        assert [call["coefficients"] == [0.0] * 5 for call in calls] == [False, True, False]
        assert [call["fresh"] for call in calls] == [True, True, False]

    def test_another_table_takes_effect(self, calls):
        rank, x = make_rank(LOCAL), values()
        rank.all_reduce(x, site(0), out=x)
        rank.transport.table = Table.always(Choice(Algorithm.one_shot, 5, 1))
        rank.all_reduce(x, site(1), out=x)
        assert (calls[1]["num_blocks"], calls[1]["depth"]) == (5, 1)
        assert calls[1]["algorithm"] == index_of(Algorithm.one_shot) and calls[1]["fresh"], "the state's layout changed"

    def test_plans_are_bounded(self, calls, monkeypatch):
        monkeypatch.setattr(p2p, "_MAX_PLANS", 3)
        rank = make_rank(NONE)
        for num_values in (*range(1, 9), 1):
            rank.all_reduce(values(num_values), site())
            assert len(rank.transport._plans) <= 3
        assert [call["x"].numel() for call in calls] == [*range(1, 9), 1]


class TestPasses:
    def test_a_reset_starts_a_pass_in_the_same_buffer(self, calls):
        rank, x = make_rank(LOCAL), values()
        for idx in (0, 1, 0, 1):
            if idx == 0:
                rank.compensators[FORWARD].reset()
            rank.all_reduce(x, site(idx), out=x)
        assert [call["fresh"] for call in calls] == [True, False, True, False]
        assert len({id(call["state"]) for call in calls}) == 1

    def test_another_shape_within_a_pass_starts_anew(self, calls):
        rank = make_rank(LOCAL)
        for idx, num_values in enumerate((200_000, 200_000, 100_000, 100_000, 200_000)):
            rank.all_reduce(values(num_values), site(idx))
        assert [call["fresh"] for call in calls] == [True, False, True, False, True]
        assert calls[0]["state"] is calls[1]["state"] and calls[2]["state"] is calls[3]["state"]
        for call in calls:
            algorithm = list(Algorithm)[call["algorithm"]]
            assert call["state"].numel() == sizes(LOCAL, call["x"].numel(), algorithm)[0]

    def test_the_layout_counts_values_of_the_basis(self, calls):
        """Rotated values come in whole blocks of 32: the state of one length serves the other."""
        rank = make_rank(LOCAL)
        for idx, num_values in enumerate((199_970, 199_969, 199_900)):
            rank.all_reduce(values(num_values), site(idx))
        assert [call["fresh"] for call in calls] == [True, False, True]

    def test_a_failed_launch_leaves_the_pass_fresh(self, calls, monkeypatch):
        rank, x = make_rank(LOCAL), values()

        def fail(*_, **__):
            raise RuntimeError("CUDA error at launch")

        with monkeypatch.context() as broken:
            broken.setattr(rank.transport, "_all_reduce_", fail)
            with pytest.raises(RuntimeError, match="at launch"):
                rank.all_reduce(x, site(0), out=x)
        rank.all_reduce(x, site(1), out=x)
        assert [call["fresh"] for call in calls] == [True]


class TestOutputs:
    def test_another_tensor(self, calls):
        rank, x, out = make_rank(LOCAL), values(), torch.zeros(200_000, dtype=torch.bfloat16)
        assert rank.all_reduce(x, site(), out=out).output is out
        assert calls[0].name == "all_reduce" and calls[0]["y"] is not out and (out == SUM).all() and (x == 1).all()

    def test_another_tensor_of_the_same_memory(self, calls):
        rank, x = make_rank(LOCAL), values()
        out = x.view(x.shape)
        assert rank.all_reduce(x, site(), out=out).output is out
        assert calls[0].name == "all_reduce_" and calls[0]["x"] is x

    @pytest.mark.parametrize("exact", [False, True])
    def test_strided_in_place(self, calls, exact):
        rank, x = make_rank(LOCAL), torch.ones(500, 400, dtype=torch.bfloat16).t()
        if exact:
            assert rank.transport.exact_all_reduce(x, site(), out=x) is x
        else:
            assert rank.all_reduce(x, site(), out=x).output is x
        assert calls[0].name == ("exact_all_reduce" if exact else "all_reduce")
        assert calls[0]["x"].is_contiguous() and calls[0]["x"].shape == x.shape and calls[0]["y"].is_contiguous()
        assert (x == SUM).all() and x.stride() == (1, 400)

    def test_new_output_of_a_strided_input_is_contiguous(self, calls):
        reduced = make_rank(LOCAL).all_reduce(torch.ones(500, 400, dtype=torch.bfloat16).t(), site())
        assert reduced.output.is_contiguous() and reduced.output.shape == (400, 500)


class TestCodes:
    def test_kept_codes_are_decoded_with_the_call_s_options(self, calls):
        config = LOCAL.replace(algorithm=Algorithm.two_shot)
        rank, x = make_rank(config), values(dtype=torch.float32).view(100, -1)
        reduced = rank.all_reduce(x, site(), out=x, keep=True)
        _, num_bytes = sizes(config, x.numel(), Algorithm.two_shot)
        assert calls[0]["codes"] is reduced.codes and reduced.codes.numel() == num_bytes and calls[0]["kept_x"] is None
        restored = reduced.restore(reduced.codes)
        assert restored.shape == x.shape and restored.dtype == x.dtype and (restored == SUM).all()
        decode = calls[1]
        assert decode.name == "decode" and decode["codes"] is reduced.codes and decode["y"] is restored
        left = {name: value for name, value in decode.arguments.items() if name not in ("codes", "y")}
        assert left == {
            "world_size": len(PEERS),
            "bits": 4,
            "policy": index_of(config.policy),
            "group_size": config.group_size,
            "algorithm": index_of(Algorithm.two_shot),
        }

    def test_every_call_keeps_its_own(self, calls):
        rank, x = make_rank(LOCAL), values(dtype=torch.float32)
        first, second = (rank.all_reduce(x, site(idx), keep=True) for idx in range(2))
        assert first.codes is not second.codes and first.codes.data_ptr() != second.codes.data_ptr()

    def test_a_sum_smaller_than_its_records_is_kept_itself(self, calls):
        reduced = make_rank(LOCAL).all_reduce(values(10), site(), keep=True)
        assert calls[0]["codes"] is None
        assert reduced.codes is reduced.output and reduced.restore(reduced.codes) is reduced.output


class TestExact:
    def check(self, call: Call, name: str, x: Tensor) -> None:
        assert call.name == name and call["x"] is x
        assert without_tensors(call) == {
            "rank": RANK,
            "site": [4, 1, 0],
            "num_blocks": NUM_BLOCKS,
            "num_teams": NUM_BLOCKS * TEAMS_A_BLOCK,
            "ring": RING,
            "slot_bytes": SLOT_BYTES,
            "timeout_s": TIMEOUT_S,
        }

    def test_in_place(self, calls):
        transport, x = make_transport(LOCAL), values(100)
        assert transport.exact_all_reduce(x, site(4, BACKWARD), out=x) is x
        (call,) = calls
        self.check(call, "exact_all_reduce_", x)

    @pytest.mark.parametrize("has_out", [False, True])
    def test_out_of_place(self, calls, has_out):
        transport, x = make_transport(LOCAL), values(100)
        out = torch.zeros_like(x) if has_out else None
        y = transport.exact_all_reduce(x, site(4, BACKWARD), out=out)
        (call,) = calls
        self.check(call, "exact_all_reduce", x)
        assert (y is out) if has_out else (y is call["y"])
        assert (y == SUM).all() and (x == 1).all()
