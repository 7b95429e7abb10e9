"""Ranks with different options are told so when they make a communicator: every option, every rank, on real groups."""

import time
from dataclasses import fields
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed import run_ranks, run_with_losses
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from echo_megatron.communicator import Communicator
from echo_megatron.config import (
    GROUP_SIZES,
    Algorithm,
    Direction,
    EchoConfig,
    Phase,
    Policy,
    Rescale,
    Residual,
    StateDtype,
    TransportName,
)
from echo_megatron.sites import Site
from echo_megatron.transports import options
from echo_megatron.transports.protocol import CommunicationError

WORLD_SIZE = 3
fractions = st.floats(0, 1, exclude_max=True)
VALUES = {
    "bits": st.sampled_from((4, 8, 16)),
    "policy": st.sampled_from(Policy),
    "group_size": st.sampled_from(GROUP_SIZES),
    "algorithm": st.sampled_from(Algorithm),
    "transport": st.sampled_from((TransportName.auto, TransportName.collective)),
    "residual": st.sampled_from(Residual),
    "backward_residual": st.sampled_from((None, *Residual)),
    "rescale": st.sampled_from(Rescale),
    "eta": st.none() | fractions,
    "a": fractions,
    "beta1": st.none() | fractions,
    "beta2": st.none() | fractions,
    "state_dtype": st.sampled_from((None, *StateDtype)),
    "min_bytes": st.none() | st.integers(0, 1 << 40),
    "directions": st.lists(st.sampled_from(Direction), unique=True),
    "phases": st.lists(st.sampled_from(Phase), unique=True),
    "early_bits": st.sampled_from((None, 4, 8)),
    "early_fraction": fractions,
    "last_bits": st.sampled_from((None, 4, 8)),
    "last_layers": st.integers(1, 9),
    "gather_bits": st.sampled_from((4, 8, 16)),
}


def serve(rank, folder, connection):
    """Makes a communicator of every config that comes; sends back what that raised, or the mean of a sum."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    while (config := connection.recv()) is not None:
        try:
            communicator = Communicator(dist.group.WORLD, config)
            site = Site(0, Direction.forward, bits=config.bits)
            answer = communicator.all_reduce(torch.zeros(100), site).sum().item()
        except ValueError as error:
            answer = str(error)
        connection.send(answer)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Hands each of the ranks, which live as long as this module's tests, its config; what each of them answers."""
    context, folder = mp.get_context("fork"), tmp_path_factory.mktemp("ranks")
    pipes = [context.Pipe() for _ in range(WORLD_SIZE)]
    processes = [
        context.Process(target=serve, args=(rank, str(folder), theirs)) for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()

    def call(configs):
        for (ours, _), config in zip(pipes, configs, strict=True):
            ours.send(config)
        assert all(ours.poll(60) for ours, _ in pipes), "a rank hangs"
        return [ours.recv() for ours, _ in pipes]

    yield call
    for (ours, _), process in zip(pipes, processes, strict=True):
        ours.send(None)
        process.join(20)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * WORLD_SIZE


def changed(config, name, value):
    """The config with another value of one option, where the two are legal together."""
    try:
        other = config.replace(**{name: value})
    except ValueError:
        assume(False)
    assume(options.options_of(other) != options.options_of(config))
    return other


def configs_where(draw, names):
    """A config, and one that differs from it in these options."""
    base = EchoConfig()
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True)):
        base = changed(base, name, draw(VALUES[name]))
    other = base
    for name in names:
        other = changed(other, name, draw(VALUES[name]))
    return base, other


def check_told(answers, name, values):
    """Every rank says the option and each rank's value."""
    assert len(set(answers)) == 1, "the same words on every rank"
    assert f"expected the same options on all {WORLD_SIZE} ranks" in answers[0]
    assert "give every rank the same EchoConfig" in answers[0]
    ((told,),) = [[part for part in answers[0].split("got ", 1)[1].split("; ") if part.startswith(f"{name}: ")]]
    for value in set(values):
        ranks = [str(rank) for rank, its in enumerate(values) if its == value]
        assert f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" in told


@pytest.mark.parametrize("name", sorted({field.name for field in fields(EchoConfig)} - options.NOT_COMPARED))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_option_is_compared(make, name, data):
    base, other = configs_where(data.draw, [name])
    who = data.draw(st.integers(0, WORLD_SIZE - 1))
    configs = [other if rank == who else base for rank in range(WORLD_SIZE)]
    check_told(make(configs), name, [options.options_of(config)[name] for config in configs])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), names=st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True))
def test_any_options_that_differ_are_told_to_all_and_equal_ones_serve(make, data, names):
    """Also after refusals: the group is as good as before."""
    configs = list(configs_where(data.draw, names))
    configs += [data.draw(st.sampled_from(configs)).replace(timeout_s=data.draw(st.floats(30, 300)))]
    configs = data.draw(st.permutations(configs))
    answers = make(configs)
    compared = [options.options_of(config) for config in configs]
    differing = [name for name in compared[0] if len({its[name] for its in compared}) > 1]
    assert set(differing) <= set(names)
    for name in differing:
        check_told(answers, name, [its[name] for its in compared])
    if not differing:
        refused = "bits: expected 4 or 8 for a quantized all-reduce, got 16"
        assert answers == [refused if configs[0].bits == 16 else 0.0] * WORLD_SIZE


def test_every_option_is_drawn_or_left_out_for_a_reason():
    assert set(VALUES) | options.NOT_COMPARED == {field.name for field in fields(EchoConfig)}


def test_what_counts_as_different():
    def told(*configs):
        return options.differences([options.options_of(config) for config in configs])

    forward_first, backward_first = list(Direction), list(reversed(Direction))
    assert told(EchoConfig(directions=forward_first), EchoConfig(directions=backward_first, timeout_s=1)) == ""
    assert told(EchoConfig(), EchoConfig(eta=0.5), EchoConfig()) == "eta: none on ranks 0, 2 and 0.5 on rank 1"
    older = options.options_of(EchoConfig()) | {options.VERSION: "0.0.1", "gone": "7"}
    del older["gather_bits"]
    different = options.differences([options.options_of(EchoConfig()), older])
    assert different.startswith("version of echo_megatron: ") and "0.0.1 on rank 1" in different
    assert "gather_bits: 8 on rank 0 and no such option on rank 1; gone: no such option on rank 0" in different


def groups_of_all_kinds(rank, world_size):
    """Groups have comparisons of their own, whatever their ranks do in others."""
    halves = [dist.new_group([0, 2]), dist.new_group([1])]
    again = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else halves[1]
    sums = []
    for _ in range(2):
        for group, config in ((halves[rank % 2], EchoConfig()), (again, EchoConfig.preset("echo8"))):
            communicator = Communicator(group, config)
            sums.append(communicator.all_reduce(torch.zeros(64), Site(0, Direction.forward)).sum().item())
    store = dist.distributed_c10d._get_default_store()
    keys_before = store.num_keys()
    for group_size in GROUP_SIZES * 3:
        Communicator(dist.group.WORLD, EchoConfig(group_size=group_size))
    dist.barrier()
    return sums, store.num_keys() - keys_before


def test_groups_and_communicators_one_after_the_other():
    for sums, num_new_keys in run_ranks(groups_of_all_kinds, 3):
        assert sums == [0.0] * 4
        assert num_new_keys < 20, "of 12 communicators of 3 ranks; their options do not stay in the store for ever"


def absent(rank, world_size):
    """Rank 1 makes no communicator; then one behind the others, whom it finds gone on."""
    start = time.monotonic()
    if rank == 1:
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        return None
    try:
        with pytest.raises(CommunicationError) as caught:
            Communicator(dist.group.WORLD, EchoConfig(timeout_s=0.5))
        return time.monotonic() - start, str(caught.value)
    finally:
        dist.monitored_barrier(timeout=timedelta(seconds=30))


def test_a_rank_that_makes_no_communicator_is_named_within_the_limit():
    results = run_ranks(absent, 3)
    for rank in (0, 2):
        seconds, message = results[rank]
        assert 0.5 <= seconds < 4
        assert f"rank {rank} of 3: a communicator of this group: rank 1 did not come to make it within 0.5 s" in message
        assert "quantizes nothing (bits=16, tp_comm=nccl)" in message


def without_a_store(rank, world_size):
    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("mpi", None)
    with pytest.raises(ValueError, match=r"process group: expected one with a store \(backends gloo, nccl\)"):
        Communicator(dist.group.WORLD, EchoConfig())
    return True


def test_a_group_without_a_store_is_refused(tmp_path):
    assert run_with_losses(without_a_store, 2, tmp_path) == [0, 0]
    assert torch.load(tmp_path / "result0") is True


def hosted_by_a_rank_that_has_ended(rank, world_size):
    """The store went with rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        return None
    while True:
        try:
            store.check(["any"])
            time.sleep(0.02)
        except RuntimeError:
            break
    with pytest.raises(CommunicationError) as caught:
        Communicator(dist.group.WORLD, EchoConfig(timeout_s=5))
    return str(caught.value)


def test_a_store_that_went_with_its_host_is_said(tmp_path):
    assert run_with_losses(hosted_by_a_rank_that_has_ended, 2, tmp_path, store="tcp") == [0, 0]
    message = torch.load(tmp_path / "result1")
    assert "the store of torch.distributed can't be reached: the process that hosts it (rank 0 of the job" in message
