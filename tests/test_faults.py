"""What goes wrong around a run: killed ranks, full disks, damaged files; and docs/faults.md, which lists the tests."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echo_megatron.communicator import Communicator
from echo_megatron.config import Algorithm, Direction, EchoConfig
from echo_megatron.data.indexed import IndexedWriter, check_indexed_dataset
from echo_megatron.pretrain.preflight import preflight
from echo_megatron.pretrain.schema import PretrainConfig
from echo_megatron.run_folder import RunFolder, write_atomic
from echo_megatron.sites import Site
from echo_megatron.transports.collective import CollectiveTransport
from echo_megatron.transports.failure_watch import watch
from echo_megatron.transports.protocol import CommunicationError
from tests.distributed import run_with_losses
from tests.pages import missing_tests
from tests.pretrain_runs import (
    COLLECTIVE_TIMEOUT_S,
    checkpoint_tensors,
    log_path,
    losses,
    make_config,
    same,
    train,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
KILLED = -signal.SIGKILL


# -- the page


def test_every_fault_has_a_test_that_exists() -> None:
    text = PAGE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
    assert len(rows) > 30
    for row in rows:
        assert re.search(r"`[\w/]+\.py::test_\w+`|`[\w/]+\.py::Test\w+::test_\w+`", row), f"no test: {row}"
    assert missing_tests(text) == []


def test_small_messages_are_measured_to_be_no_slower_than_nccl_s() -> None:
    """Of the measured table: `auto` at up to 64 KiB."""
    rows = json.loads((ROOT / "docs" / "results" / "all_reduce_h200x2.json").read_text())["rows"]
    small = [row for row in rows if row["row"] == "auto" and row["bytes"] <= 65536]
    assert {row["bytes"] for row in small} >= {4096, 16384, 65536}
    assert all(row["nccl_ratio"] >= 1 for row in small)


# -- a rank that dies within a call


def killed_within_a_call(rank: int, world_size: int, kind: str, phase: str, dying: int) -> tuple[float, str]:
    """A rank has sent what comes before the phase, and dies instead of taking part in it."""
    communicator = Communicator(dist.group.WORLD, EchoConfig(timeout_s=15, algorithm=Algorithm.two_shot))
    call = getattr(communicator, kind)
    call(torch.ones(3 * 5000), Site(0, Direction.forward))
    if rank == dying:
        wait = CollectiveTransport._named_errors

        def die(self: CollectiveTransport, site: Site, reached: str) -> Any:
            if reached == phase:
                os.kill(os.getpid(), signal.SIGKILL)
            return wait(self, site, reached)

        CollectiveTransport._named_errors = die  # type: ignore[method-assign]  # in this process only
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        call(torch.ones(3 * 5000), Site(1, Direction.forward, name="layers.0.mlp.linear_fc2"))
    return time.monotonic() - start, str(caught.value)


@pytest.mark.parametrize(
    ("kind", "phase", "dying", "store"),
    [
        ("all_reduce", "gather", 1, "file"),
        ("all_reduce", "push", 2, "tcp"),
        ("reduce_scatter", "push", 1, "tcp"),
        ("all_gather", "gather", 0, "tcp"),  # with the store, which is in its process
    ],
)
def test_a_rank_killed_within_a_call_ends_it_on_the_others(
    tmp_path: Path, kind: str, phase: str, dying: int, store: str
) -> None:
    exits = run_with_losses(killed_within_a_call, 3, tmp_path, kind, phase, dying, store=store)
    survivors = [rank for rank in range(3) if rank != dying]
    assert exits == [KILLED if rank == dying else 0 for rank in range(3)]
    for rank, other in (survivors, survivors[::-1]):
        seconds, message = torch.load(tmp_path / f"result{rank}", weights_only=False)
        assert seconds < 20
        where = f"forward site 1 of chunk 0 (layers.0.mlp.linear_fc2), phase {phase}"
        assert message.startswith(f"rank {rank} of 3: {where}: rank {dying} has ended (process ")
        if dying == 0:
            assert "; the store of torch.distributed can't be reached: the process that hosts it (rank 0" in message
        else:
            assert f"; rank {other} gave up as well ({where}). A peer did not answer (timeout_s=15)" in message


# -- a run that dies


def short_run(folder: Path, data: dict[str, Any], name: str) -> PretrainConfig:
    """Four steps of two ranks, with checkpoints at 2 and 4."""
    four_bits = ("tp_comm.bits=4", "tp_comm.min_bytes=0")
    steps = ("trainer.max_steps=4", "trainer.save_interval=2", "trainer.val_interval=0")
    return make_config(folder, data, name, *four_bits, *steps)


@pytest.fixture(scope="module")
def whole(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> PretrainConfig:
    config = short_run(tmp_path_factory.mktemp("runs"), data, "whole")
    assert train(config) == [0, 0], log_path(config).read_text()
    return config


def kill_in_pass(direction: Direction, call: int) -> Callable[[], None]:
    """Rank 1 dies in the first site of its `call`-th pass in that direction."""

    def before() -> None:
        if os.environ["RANK"] != "1":
            return
        all_reduce, passes = CollectiveTransport.all_reduce, 0

        def counting(self: CollectiveTransport, x: torch.Tensor, site: Site, *rest: Any, **named: Any) -> Any:
            nonlocal passes
            if site.direction is direction and site.idx == 0:
                passes += 1
                if passes == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return all_reduce(self, x, site, *rest, **named)

        CollectiveTransport.all_reduce = counting  # type: ignore[method-assign]  # in the forked process only

    return before


class Failed:
    """A transport whose call failed on the GPU."""

    is_raised = False

    def failure(self) -> str:
        return "rank 0 of 2: planted"


def block_after_a_failure(call: int) -> Callable[[], None]:
    """Rank 0 never comes back from its `call`-th call, as from a wait for NCCL's kernels, and one before has failed."""

    def before() -> None:
        if os.environ["RANK"] != "0":
            return
        all_reduce, calls, failed = CollectiveTransport.all_reduce, 0, Failed()

        def blocking(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                watch.add(failed)
                time.sleep(1000)
            return all_reduce(*args, **options)

        CollectiveTransport.all_reduce = blocking  # type: ignore[method-assign]  # in the forked process only

    return before


def limit_files(rank: int, num_bytes: int, is_fatal: bool) -> Callable[[], None]:
    """Files that the rank writes while it saves end at num_bytes: as on a full disk, or it is killed there."""

    def before() -> None:
        if os.environ["RANK"] != str(rank):
            return
        from echo_megatron.pretrain import checkpoint

        save = checkpoint.dist_checkpointing.save

        def limited(*args: Any) -> Any:
            if is_fatal:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
            try:
                return save(*args)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

        checkpoint.dist_checkpointing.save = limited

    return before


def test_a_run_that_dies_in_every_way_ends_as_the_uninterrupted_one(
    whole: PretrainConfig, data: dict[str, Any], tmp_path: Path
) -> None:
    """In a forward or backward pass, hanging after a failure, within a checkpoint's file, for want of disk space."""
    config = short_run(tmp_path, data, "dying")
    checkpoints = config.run_dir / "checkpoints"

    def die(before: Callable[[], None], statuses: list[int], reason: str, latest: int | None) -> None:
        start = time.monotonic()
        assert train(config, before) == statuses, log_path(config).read_text()
        assert time.monotonic() - start < COLLECTIVE_TIMEOUT_S / 2, "nobody waits for the dead"
        run = RunFolder(config.run_dir).run()
        assert run["status"] == "stopped"
        assert reason in run["reason"]
        pointer = checkpoints / "latest.json"
        assert (json.loads(pointer.read_text())["step"] if pointer.exists() else None) == latest
        assert len(RunFolder(config.run_dir).train()) <= 4

    # Two microbatches a step: the third pass is step 2's, the fifth step 3's.
    die(kill_in_pass(Direction.forward, 3), [1, KILLED], "CommunicationError: rank 0 of 2: forward site 0", None)
    die(kill_in_pass(Direction.backward, 5), [1, KILLED], "CommunicationError: rank 0 of 2: backward site 0", 2)
    die(block_after_a_failure(10), [1, 1], "CommunicationError: rank 0 of 2: planted", 2)
    die(limit_files(1, 5000, True), [1, -signal.SIGXFSZ], "rank 0 of 2: checkpoint of step 4: a process has ended", 2)
    assert (checkpoints / "iter_0000004.tmp" / "__1_0.distcp").stat().st_size == 5000
    die(limit_files(0, 5000, False), [2, 2], "iter_0000004.tmp could not be written", 2)
    assert "make room, then start the run again" in log_path(config).read_text()
    assert train(config) == [0, 0], log_path(config).read_text()
    assert losses(config) == losses(whole)
    assert same(checkpoint_tensors(config, 4), checkpoint_tensors(whole, 4))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iter_0000002", "iter_0000004", "latest.json"]


# -- damaged checkpoints and run folders


@pytest.fixture
def copied(whole: PretrainConfig, data: dict[str, Any], tmp_path: Path) -> PretrainConfig:
    """The whole run, to be damaged."""
    shutil.copytree(whole.run_dir, tmp_path / "whole")
    return short_run(tmp_path, data, "whole")


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"])
def test_a_truncated_checkpoint_is_named_before_anything_starts(copied: PretrainConfig, name: str) -> None:
    path = copied.run_dir / "checkpoints" / "iter_0000004" / name
    content = path.read_bytes()
    preflight(copied)
    path.write_bytes(content[: len(content) // 2])
    expected = rf"{name}: expected {len(content):,} bytes, got"
    with pytest.raises(ValueError, match=f"{expected} {len(content) // 2:,}") as caught:
        preflight(copied)
    assert "write the step of iter_0000002 into" in str(caught.value)
    path.unlink()
    with pytest.raises(ValueError, match=f"{expected} no file"):
        preflight(copied)
    pointer = copied.run_dir / "checkpoints" / "latest.json"
    pointer.write_text('{"step": 2}')
    preflight(copied)  # the way out that the message names


@pytest.mark.parametrize("name", ["iter_0000004/settings.json", "iter_0000004/files.json", "latest.json"])
@pytest.mark.parametrize("content", ["", '{"step"', "[]"])
def test_a_damaged_note_of_a_checkpoint_is_named(copied: PretrainConfig, name: str, content: str) -> None:
    path = copied.run_dir / "checkpoints" / name
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"checkpoints/{name}: (is missing or damaged|expected)"):
        preflight(copied)


def test_a_checkpoint_with_other_bytes_ends_every_rank_with_its_name(copied: PretrainConfig) -> None:
    """Of the right length: found by the rank that reads it, told by all."""
    path = copied.run_dir / "checkpoints" / "iter_0000004" / "__1_0.distcp"
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes(200) + content[middle + 200 :])
    copied.trainer.max_steps, copied.trainer.accept_changes = 5, ["trainer.max_steps"]
    assert train(copied) == [2, 2], log_path(copied).read_text()
    log = log_path(copied).read_text()
    assert "iter_0000004: can't be read (rank 1: " in log and "restore" in log


@pytest.mark.parametrize("runs_dir", ["/proc/runs", "/dev/null/runs"])
def test_a_run_folder_that_cannot_be_written_is_refused(data: dict[str, Any], runs_dir: str) -> None:
    """Read-only for root as well."""
    with pytest.raises(
        OSError, match=rf"run folder {runs_dir}/a: cannot be written .* choose another runs_dir or name"
    ):
        preflight(make_config(Path(runs_dir), data, "a"))


# -- a full disk


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond num_bytes: writes end with an error in the middle of a block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_on_a_full_disk_a_file_keeps_its_old_content(tmp_path: Path) -> None:
    write_atomic(tmp_path / "run.json", "old")
    with full_disk(1000), pytest.raises(OSError):
        write_atomic(tmp_path / "run.json", "n" * 5000)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.json", "old")]


def test_on_a_full_disk_metrics_lose_the_last_line_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with full_disk(1000), pytest.raises(OSError):
        list(map(folder.append, ({"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 100))))
    written = folder.metrics_path.stat().st_size
    assert 900 < written <= 1000
    again = RunFolder(tmp_path)
    with pytest.warns(UserWarning, match="cut off, dropped"):
        steps = [record["step"] for record in again.train()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 10
    with pytest.warns(UserWarning, match="cut off, dropped"):
        again.append({"kind": "train", "step": steps[-1] + 1, "loss": 0.5})
    assert len(again.train()) == len(steps) + 1


@pytest.mark.parametrize("num_bytes", [500, 1400])
def test_on_a_full_disk_a_dataset_is_an_error_and_is_refused_afterwards(tmp_path: Path, num_bytes: int) -> None:
    """In .bin, and in .idx after it."""
    prefix = tmp_path / "tokens"

    def write() -> None:
        with IndexedWriter(prefix, 1000) as writer:
            for _ in range(100):
                writer.add_document(np.array([5, 6, 0]))
            writer.finish()

    with full_disk(num_bytes), pytest.raises(OSError):
        write()
    with pytest.raises(ValueError, match=r"tokens\.(idx|bin): "):
        check_indexed_dataset(prefix)
