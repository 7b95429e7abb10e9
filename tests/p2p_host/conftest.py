"""The host's part of the p2p transport, without a GPU: what reaches the operators, in which order, and what is raised.

The operators are stand-ins on the CPU with the schemas of cuda/binding.cpp; streams and events write a log.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from p2p_stand_ins import LOG, RECORDED, SIZES, STREAMS, SUM, Call, Event, Group, Stream, make_transport, schemas
from torch import Tensor

from echo_megatron import communicator as communicator_module
from echo_megatron.communicator import Communicator
from echo_megatron.ops import NAMESPACE
from echo_megatron.transports import failure_watch, p2p


@pytest.fixture
def calls():
    """The calls of the operators so far; stand-ins take the place of kernels."""
    library = getattr(torch.ops, NAMESPACE)
    is_real = hasattr(library, "all_reduce")  # loaded by another test
    fragment = torch.library.Library(NAMESPACE, "FRAGMENT")
    recorded: list[Call] = []

    def stand_in(name):
        def run(*args, **options):
            schema = getattr(library, name).default._schema
            names = [argument.name for argument in schema.arguments]
            call = Call(name, dict(zip(names, args, strict=False)) | options)
            recorded.append(call)
            LOG.append((name, STREAMS[-1]))
            if name != "consensus_update":
                output = call.arguments.get("y", call.arguments.get("x"))
                output.fill_(SUM)

        return run

    for name, schema in schemas().items():
        if name not in RECORDED and (is_real or name not in SIZES):
            continue
        if not is_real:
            fragment.define(schema)
        if name in RECORDED:
            fragment.impl(name, stand_in(name), "CPU")
        else:
            fragment.impl(name, SIZES[name], "CompositeExplicitAutograd")
    yield recorded
    fragment._destroy()


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    """Streams without a GPU; `capturing` says whether a graph is captured."""
    state = SimpleNamespace(capturing=False, num_created=0)

    def create(device):
        state.num_created += 1
        return Stream(f"side{state.num_created}")

    LOG.clear()
    STREAMS[:] = ["main"]
    monkeypatch.setattr(torch.cuda, "Stream", create)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(STREAMS[-1]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(p2p, "_current_raw_stream", lambda device: hash(STREAMS[-1]))
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: LOG.append(("record", self.data_ptr())))
    return state


@pytest.fixture(autouse=True)
def watch(monkeypatch):
    """One of the test's own, whose thread ends with it: tests that follow fork."""
    watch = failure_watch.FailureWatch()
    monkeypatch.setattr(p2p, "watch", watch)
    yield watch
    watch.close()


@pytest.fixture
def communicate(monkeypatch, calls):
    """Makes a communicator over the stand-ins."""
    monkeypatch.setattr(
        communicator_module, "_make_transport", lambda group, config: (make_transport(config), "for the test")
    )
    return lambda config, **options: Communicator(Group(), config, **options)
