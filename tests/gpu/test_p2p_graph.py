"""One GPU, several ranks on it: calls in CUDA graphs, on side streams, on two workspaces at once, with a late rank."""

import itertools
import math

import pytest
import torch
from feedbacks import AVERAGES
from virtual_checks import RecordedGroup, assert_same_bits, assert_same_state, contributions
from virtual_ranks import Call, VirtualRanks
from virtual_workspaces import VirtualWorkspaces, resident_blocks

from echo_megatron.config import Algorithm, Direction, EchoConfig, Residual
from echo_megatron.sites import Site

NUM_SITES = 3
NUM_REPLAYS = 50
MILLISECOND = 1_700_000  # GPU cycles


class CapturedPass:
    """One graph a rank of a pass of three sites; the first calls of all are made inside the capture."""

    def __init__(self, ranks, num_values, in_place):
        self.ranks, self.in_place = ranks, in_place
        shape = (NUM_SITES, num_values)
        options = {"dtype": torch.bfloat16, "device": "cuda"}
        self.xs = [torch.zeros(shape, **options) for _ in ranks.ranks]
        self.outs = [x if in_place else torch.zeros(shape, **options) for x in self.xs]
        self.sites = [Site(idx, Direction.forward, bits=ranks.config.bits) for idx in range(NUM_SITES)]
        self.calls, self.graphs = [], []
        for rank, x, out in zip(ranks.ranks, self.xs, self.outs, strict=True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=rank.stream):
                for row, site in enumerate(self.sites):
                    target = x[row]
                    if not in_place:
                        out[row].fill_(math.nan)
                    call = Call(rank, target, target if in_place else out[row], site)
                    call.launch()
                    call.finish()
                    self.calls.append(call)  # the graph writes to its tensors
            self.graphs.append(graph)

    def replay(self, inputs):
        """The outputs of every rank, [sites, values] each; `inputs` is the same of the contributions."""
        for x, new in zip(self.xs, inputs, strict=True):
            x.copy_(new)
        self.ranks.memory.fork()
        for graph, stream in zip(self.graphs, self.ranks.memory.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        self.ranks.memory.join()
        return self.outs


def check_replays(world_size, config, num_values, in_place=False, between=None):
    ranks, reference = VirtualRanks(world_size, config), RecordedGroup(world_size, config)
    captured = CapturedPass(ranks, num_values, in_place)
    for replay in range(NUM_REPLAYS):
        inputs = [
            torch.stack(contributions(NUM_SITES, num_values, seed=1000 * replay + rank)) for rank in range(world_size)
        ]
        outs = captured.replay(inputs)
        ranks.memory.check()
        for row, site in enumerate(captured.sites):
            expected = reference.all_reduce([x[row] for x in inputs], site)
            for rank, out in enumerate(outs):
                assert_same_bits(out[row], expected, f"output of rank {rank}, replay {replay}, {site}")
        if config.compensates:
            states = (ranks.state(Direction.forward), reference.state(Direction.forward))
            assert_same_state(*states, f"after replay {replay}")
        if between is not None:
            between(ranks, replay)


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
@pytest.mark.parametrize("preset", ["echo4", "echo8", "echo4_paper"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_fifty_replays_on_new_data(world_size, preset, algorithm):
    check_replays(world_size, EchoConfig.preset(preset, algorithm=algorithm), num_values=50_001)


@pytest.mark.parametrize(
    "options", [{}, AVERAGES, {"residual": Residual.consensus}], ids=["local", "averages", "consensus"]
)
def test_replays_in_place(options):
    check_replays(2, EchoConfig(**options), num_values=50_001, in_place=True)


def test_replays_between_other_calls():
    """Tile numbers live on the GPU: eager calls of other shapes between replays disturb neither."""
    reference = RecordedGroup(2, EchoConfig(eta=0.0))

    def call(ranks, replay):
        xs = contributions(2, 1 + 7_919 * replay, seed=replay)
        eager = VirtualRanks(2, reference.config, memory=ranks.memory)
        for out in eager.all_reduce(xs, Site(0, Direction.backward)):
            assert_same_bits(out, reference.all_reduce(xs, Site(0, Direction.backward)), f"eager call {replay}")

    check_replays(2, EchoConfig(), num_values=50_001, between=call)


def test_exact_calls_in_a_graph():
    ranks = VirtualRanks(2, EchoConfig())
    xs = contributions(2, 5_001, seed=0)
    outs = [torch.empty_like(x) for x in xs]
    ranks.exact_all_reduce(xs, Site(0, Direction.forward), outs=outs)
    graphs, memory = [], ranks.memory
    for rank, (x, out, stream) in enumerate(zip(xs, outs, memory.streams, strict=True)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out.fill_(math.nan)
            torch.ops.echo_megatron.exact_all_reduce(
                *(x, out, memory.buffers[rank], memory.failure_records[rank], memory.peers),
                rank=rank,
                site=[0, 0, 0],
                num_blocks=memory.num_blocks,
                num_teams=memory.num_teams,
                ring=memory.ring,
                slot_bytes=memory.slot_bytes,
                timeout_s=memory.timeout_s,
            )
        graphs.append(graph)
    for replay in range(NUM_REPLAYS):
        new = contributions(2, 5_001, seed=replay)
        for x, values in zip(xs, new, strict=True):
            x.copy_(values)
        memory.fork()
        for graph, stream in zip(graphs, memory.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        memory.join()
        memory.check()
        for out in outs:
            assert_same_bits(out, (new[0].float() + new[1].float()).bfloat16(), f"replay {replay}")


# -- streams


def expected_outputs(config, inputs):
    """The reference's output of each call of a pass; `inputs` has a list of contributions for each."""
    reference = RecordedGroup(len(inputs[0]), config)
    return [reference.all_reduce(xs, Site(idx, Direction.forward)) for idx, xs in enumerate(inputs)]


def check_outputs(outputs, expected):
    for idx, (outs, wanted) in enumerate(zip(outputs, expected, strict=True)):
        for rank, out in enumerate(outs):
            assert_same_bits(out, wanted, f"output of rank {rank}, call {idx}")


@pytest.mark.parametrize("residual", list(Residual))
def test_a_rank_s_calls_alternate_between_two_streams(residual):
    config = EchoConfig(residual=residual)
    inputs = [contributions(3, 999 if idx // 4 % 2 else 100_003, seed=idx) for idx in range(20)]
    ranks = VirtualRanks(3, config)
    sides = [ranks.memory.streams, [torch.cuda.Stream() for _ in range(3)]]
    outputs = []
    for idx, xs in enumerate(inputs):
        for stream, last in zip(sides[idx % 2], sides[1 - idx % 2], strict=True):
            stream.wait_stream(last)
        ranks.memory.streams = sides[idx % 2]
        outputs.append(ranks.all_reduce(xs, Site(idx, Direction.forward), wait=False))
    ranks.memory.check()
    check_outputs(outputs, expected_outputs(config, inputs))


@pytest.mark.parametrize("algorithm", [Algorithm.one_shot, Algorithm.two_shot])
def test_two_workspaces_take_turns_and_overlap(algorithm):
    """Rank 0 calls A then B, rank 1 B then A, on streams of their own: all four kernels are resident together."""
    config = EchoConfig(algorithm=algorithm)
    both = [VirtualRanks(2, config, num_blocks=resident_blocks(4)) for _ in range(2)]
    inputs = [[contributions(2, 150_001 + which, seed=2 * idx + which) for idx in range(12)] for which in range(2)]
    torch.cuda.synchronize()
    outputs = [[], []]
    for idx in range(12):
        calls = []
        for ranks, xs in zip(both, (inputs[0][idx], inputs[1][idx]), strict=True):
            ranks.memory.fork()
            outs = [torch.full_like(x, math.nan) for x in xs]
            calls.append(
                [Call(*part, Site(idx, Direction.forward)) for part in zip(ranks.ranks, xs, outs, strict=True)]
            )
        torch.cuda.synchronize()
        for which, rank in ((0, 0), (1, 0), (1, 1), (0, 1)):
            with torch.cuda.stream(both[which].memory.streams[rank]):
                calls[which][rank].launch()
                calls[which][rank].finish()
        for which in range(2):
            outputs[which].append([call.out for call in calls[which]])
    for which, ranks in enumerate(both):
        ranks.memory.check()
        check_outputs(outputs[which], expected_outputs(config, inputs[which]))


# -- a late rank


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("config", [EchoConfig(), EchoConfig.preset("echo4_paper")], ids=["echo4", "echo4_paper"])
def test_the_input_may_be_overwritten_as_soon_as_the_call_is_done(config, late):
    """all_reduce_(x), then x.fill_(nan) at once, while one rank is a millisecond late: nobody reads the NaN."""
    inputs = [contributions(3, (40_009, 300_007, 1_003)[idx % 3], seed=idx) for idx in range(24)]
    expected = expected_outputs(config, inputs)
    xs = [[x.clone() for x in row] for row in inputs]
    outputs = [[torch.empty_like(x) for x in row] for row in inputs]
    ranks = VirtualRanks(3, config)
    torch.cuda.synchronize()
    delays = [MILLISECOND if rank == late else 0 for rank in range(3)]
    for idx, row in enumerate(xs):
        ranks.all_reduce(row, Site(idx, Direction.forward), outs=row, delays=delays if idx % 2 else (), wait=False)
        for stream, x, out in zip(ranks.memory.streams, row, outputs[idx], strict=True):
            with torch.cuda.stream(stream):
                out.copy_(x)
                x.fill_(math.nan)
    ranks.memory.check()
    check_outputs(outputs, expected)


def test_forty_queued_calls_with_another_rank_late_each_time():
    config = EchoConfig()
    memory = VirtualWorkspaces(3, num_blocks=2)
    inputs = [contributions(3, 4_096 * 5 + idx, seed=idx) for idx in range(40)]
    ranks = VirtualRanks(3, config, memory=memory)
    outputs = []
    for idx, late in zip(range(40), itertools.cycle(range(3))):
        delays = [MILLISECOND // 2 if rank == late and idx % 4 == 0 else 0 for rank in range(3)]
        outputs.append(ranks.all_reduce(inputs[idx], Site(idx, Direction.forward), delays=delays, wait=False))
    memory.check()
    check_outputs(outputs, expected_outputs(config, inputs))
