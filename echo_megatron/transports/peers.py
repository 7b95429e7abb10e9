"""What the ranks of a group tell each other beside its collectives: their options before, and who is left after one.

It goes through the group's store, where a rank that is not there can be named. `torch.distributed` keeps the store in
the process of rank 0 of the job (or in a file), under torchrun in its agent. A value is UTF-8 text of JSON.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from echo_megatron.transports.options import differences, numbered
from echo_megatron.transports.processes import Process
from echo_megatron.transports.protocol import CommunicationError

ROLL_CALL_S = 3.0  # ranks that make the same call fail at it within milliseconds
_READ_S = 0.5  # for the others to read what this rank wrote, before it ends and perhaps takes the store with it
_STORE_S = 2.0  # for the store's own answers
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

_num_meetings: dict[str, int] = {}  # by group: a process group of the same name and ranks may be made again


class Peers:
    """The ranks of a group. Collective: all of them make it together, once for each communicator.

    Args:
        group: the process group.
        options: what has to be the same on all ranks (`options.options_of`).
        timeout_s: seconds to wait for the other ranks to come.

    Raises:
        ValueError: the options differ, on every rank; or the group has no store.
        CommunicationError: a rank did not come.
    """

    def __init__(self, group: dist.ProcessGroup, options: Mapping[str, str], timeout_s: float) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        store = _get_process_group_store(group)
        if store is None:
            raise ValueError(
                "process group: expected one with a store (backends gloo, nccl), in which its ranks compare their "
                f"options; got none with the backend {dist.get_backend_config(group)}"
            )
        self._store = store
        self._prefix = f"echo_megatron/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
        self.processes = self._meet(f"{group.group_name} {self._prefix}", options, timeout_s)

    def _meet(self, name: str, options: Mapping[str, str], timeout_s: float) -> list[Process]:
        """Compares the options; the ranks' processes."""
        number = _num_meetings[name] = _num_meetings.get(name, 0) + 1
        key = f"options/{number}"
        mine = json.dumps({"options": options, "process": asdict(Process.this())})

        def meet() -> list[str | None]:
            for stale in (self._key("gave_up", self.rank), self._key("read", self.rank)):
                self._store.delete_key(stale)  # of a group that failed, and was made again since
            self._store.set(self._key(key, self.rank), mine)
            self._wait_until(lambda: not self._missing(key), timeout_s)
            texts = self._texts(key)
            if None not in texts:  # so every rank is done with the communicator before
                self._store.delete_key(self._key(f"options/{number - 1}", self.rank))
            return texts

        where = f"rank {self.rank} of {self.world_size}: a communicator of this group"
        try:
            texts = _bounded(meet, timeout_s + _STORE_S)
        except _StoreError as error:
            raise CommunicationError(f"{where}: {error}") from error
        absent = [rank for rank, text in enumerate(texts) if text is None]
        if absent:
            raise CommunicationError(
                f"{where}: {numbered(absent)} did not come to make it within {timeout_s:g} s (timeout_s): the rank has "
                "ended, hangs, works longer, or makes none because it quantizes nothing (bits=16, tp_comm=nccl)"
            )
        contents = [json.loads(text) for text in texts if text is not None]
        if different := differences([content["options"] for content in contents]):
            raise ValueError(
                f"echo: expected the same options on all {self.world_size} ranks of a group, got {different}; give "
                "every rank the same EchoConfig (tp_comm): one command line, configuration and version for all hosts"
            )
        return [Process(**content["process"]) for content in contents]

    def roll_call(self, where: str) -> str:
        """Who is left, in words, after a collective of the group failed on this rank.

        A rank that meets the failure answers. One that does not is what the others waited for. Takes a few seconds
        at most, and no time beyond the last answer where all who do not answer are known to have ended.

        Args:
            where: what this rank was doing; the others say it.
        """
        answers: list[str | None] = [None] * self.world_size
        ended: set[int] = set()

        def some_have_ended() -> bool:
            ended.update(self._ended())
            return bool(ended)

        def everybody_is_known() -> bool:
            some_have_ended()  # before the answers are read: an answer is written before its rank ends
            answers[:] = self._texts("gave_up")
            return all(answers[rank] is not None or rank in ended for rank in self._others)

        def call() -> None:
            self._store.set(self._key("gave_up", self.rank), where)
            self._wait_until(everybody_is_known, ROLL_CALL_S)

        def leave() -> None:
            self._store.set(self._key("read", self.rank), "")
            answered = {rank for rank in self._others if answers[rank] is not None}
            self._wait_until(lambda: answered.isdisjoint(set(self._missing("read")) - set(self._ended())), _READ_S)

        unreachable = ""
        try:
            _bounded(call, ROLL_CALL_S + _STORE_S)
            with suppress(_StoreError):  # it went with a rank that knows enough, as this one does
                _bounded(leave, _READ_S + _STORE_S)
        except _StoreError as error:
            unreachable = str(error)
            # Its host closes connections some time before its process has ended; and a rank that ends because of this
            # failure must not pass for its cause.
            self._wait_until(some_have_ended, ROLL_CALL_S)
            time.sleep(_READ_S)
        left = [self._left(rank, rank in ended, answers[rank], not unreachable) for rank in self._others]
        missing_first = sorted(zip(self._others, left, strict=True), key=lambda one: answers[one[0]] is not None)
        return "; ".join([words for _, words in missing_first if words] + ([unreachable] if unreachable else []))

    def _left(self, rank: int, has_ended: bool, answer: str | None, was_asked: bool) -> str:
        """What is known of a rank; nothing where it could not be asked."""
        process = self.processes[rank]
        if answer is not None:
            return f"rank {rank} gave up as well ({answer})"
        if has_ended:
            return f"rank {rank} has ended (process {process.pid})"
        if not was_asked:
            return ""
        silent = f"rank {rank} does not answer a roll call of {ROLL_CALL_S:g} s"
        if process.is_neighbour_of(self.processes[self.rank]):
            return f"{silent}: its process {process.pid} runs, but hangs or is busy outside of this call"
        return f"{silent}: it has ended, hangs, or is busy outside of this call"

    def _ended(self) -> list[int]:
        """Ranks on this host whose processes have ended."""
        mine = self.processes[self.rank]
        processes = ((rank, self.processes[rank]) for rank in self._others)
        return [rank for rank, process in processes if process.is_neighbour_of(mine) and process.has_ended()]

    # -- the store

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _missing(self, name: str) -> list[int]:
        return [rank for rank in range(self.world_size) if not self._store.check([self._key(name, rank)])]

    def _texts(self, name: str) -> list[str | None]:
        """What each rank wrote; None where it did not."""
        missing = self._missing(name)
        ranks = range(self.world_size)
        return [None if r in missing else self._store.get(self._key(name, r)).decode(errors="replace") for r in ranks]

    def _wait_until(self, holds: Callable[[], bool], seconds: float) -> None:
        """Asks again and again: a wait in the store would keep its connection from PyTorch's own threads."""
        deadline, pause_s = time.monotonic() + seconds, _SHORTEST_PAUSE_S
        while not holds() and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _StoreError(Exception):
    """The store can't be reached."""


def _bounded(action: Callable[[], Any], seconds: float) -> Any:
    """The action's result. A store whose host is gone may answer with an error, or never.

    Raises:
        _StoreError: the store did not answer, or not in time.
    """
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(seconds, threading.TIMEOUT_MAX))
    if results:
        return results[0]
    if errors and not isinstance(errors[0], RuntimeError):  # PyTorch's own, of a store, are
        raise errors[0]
    reason = str(errors[0]).partition("\n")[0] if errors else f"no answer within {seconds:g} s"
    raise _StoreError(
        "the store of torch.distributed can't be reached: the process that hosts it (rank 0 of the job, or torchrun's "
        f"agent) may be the one that has ended ({reason})"
    )
