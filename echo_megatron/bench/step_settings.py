"""Settings of `bench_step`: how the sites of a model sum over the ranks while a step is timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echo_megatron.communicator import Communicator
from echo_megatron.config import Collective, EchoConfig, StateDtype, TransportName
from echo_megatron.integrations.linears import set_tensor_parallel_group, tensor_parallel_group
from echo_megatron.integrations.megatron import Installation, install
from echo_megatron.integrations.megatron_sites import find_sites
from echo_megatron.process_group import EchoProcessGroup
from echo_megatron.sites import Site

NCCL, SKIPPED = "nccl16", "skipped"
SKIPS_ALL = EchoConfig()  # the sites of both directions


@dataclass(frozen=True)
class Setting:
    """One of the ways.

    Attributes:
        name: what the results call it.
        config: Echo's options; None: the group's own all-reduce, or none at all (`skipped`).
    """

    name: str
    config: EchoConfig | None = None


def all_settings(timeout_s: float, transport: TransportName) -> dict[str, Setting]:
    """Every setting by name; the group's own all-reduce, what the others are compared with, is the first."""
    echo4, echo8 = (EchoConfig.preset(name, timeout_s=timeout_s, transport=transport) for name in ("echo4", "echo8"))
    settings = [
        Setting(NCCL),
        Setting("echo4", echo4),
        Setting("echo4_bf16", echo4.replace(state_dtype=StateDtype.bf16)),
        Setting("echo8", echo8),
        Setting(SKIPPED),
    ]
    return {setting.name: setting for setting in settings}


def chosen(known: Mapping[str, Setting], names: Sequence[str] | None) -> list[Setting]:
    """The settings of `names` and the group's own all-reduce, which they are compared with; all where None."""
    return [setting for name, setting in known.items() if names is None or name in (NCCL, *names)]


class SkippingCommunicator:
    """Does nothing where `Communicator` sums: a site's tensor stays this rank's own. Times the rest of a step.

    Args:
        group: the tensor-parallel group; everything that is not a site's sum goes to it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_skipped = 0
        self.site_groups: list[EchoProcessGroup] = []

    def min_bytes(self, dtype: torch.dtype, collective: Collective = Collective.all_reduce) -> int:
        return 0

    def sums_exactly(self, x: Tensor) -> bool:
        return False

    def all_reduce(self, x: Tensor, site: Site, *, out: Tensor | None = None) -> Tensor:
        """`x` as it is, which is also `out` where a linear calls."""
        self.num_skipped += 1
        return x if out is None or out is x else out.copy_(x)


@contextmanager
def skipping(model: nn.Module) -> Iterator[SkippingCommunicator]:
    """Leaves out the all-reduce of every site of `model`."""
    found = list(find_sites([model], SKIPS_ALL))
    group = tensor_parallel_group(found[0].linear)
    communicator = SkippingCommunicator(group)
    groups = []
    try:
        for one in found:
            own = EchoProcessGroup(cast(Communicator, communicator), one.site, one.hidden_size, lambda: True)
            groups.append(own)
            set_tensor_parallel_group(one.linear, own)
        yield communicator
    finally:
        for one, own in zip(found, groups, strict=False):
            own.close()
            set_tensor_parallel_group(one.linear, group)


@contextmanager
def installed(setting: Setting, model: nn.Module) -> Iterator[Installation | None]:
    """`model` with the setting, and as it was afterwards. Collective; yields Echo's installation where there is one."""
    if setting.name == SKIPPED:
        with skipping(model):
            yield None
    elif setting.config is None:
        yield None
    else:
        installation = install(model, setting.config)
        try:
            yield installation
        finally:
            installation.uninstall()


def memory_of(installation: Installation | None) -> dict[str, Any]:
    """What Echo holds: `state_bytes` of the compensators and `workspace_bytes`, and how its messages travel."""
    communicator = None if installation is None else installation.communicator
    if communicator is None:
        return {"state_bytes": 0, "workspace_bytes": 0, "transport": None}
    return {
        "state_bytes": communicator.num_state_bytes(),
        "workspace_bytes": communicator.transport.num_bytes(),
        "transport": communicator.transport.name,
    }


def num_sites(model: nn.Module) -> dict[str, int]:
    """Sites by direction."""
    counts: dict[str, int] = {}
    for found in find_sites([model], SKIPS_ALL):
        name = found.site.direction.name
        counts[name] = counts.get(name, 0) + 1
    return counts
