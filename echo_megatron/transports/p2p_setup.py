"""Whether the ranks of a group can write into each other's memory, and their transport where they can."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from echo_megatron import ops
from echo_megatron.config import EchoConfig
from echo_megatron.kernel_sources import LOWEST_CAPABILITY
from echo_megatron.transports.p2p import P2PTransport
from echo_megatron.transports.protocol import CommunicationError
from echo_megatron.tuning import Table, load_table
from echo_megatron.workspace import SymmetricWorkspace, all_or_none, gather_numbers, host_number

logger = logging.getLogger(__name__)


def why_unavailable(group: dist.ProcessGroup) -> str | None:
    """Why this rank cannot use the p2p transport, or None; then the ranks must still agree."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    if torch.cuda.get_device_capability() < LOWEST_CAPABILITY:
        return f"the GPU's compute capability {torch.cuda.get_device_capability()} is below 8.0"
    try:
        ops.load()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        return str(error) or type(error).__name__
    return None


def agree(group: dist.ProcessGroup) -> str | None:
    """Why the group cannot use the p2p transport, the same answer on every rank, or None. Collective."""
    reason = why_unavailable(group)
    if reason is not None:
        logger.warning("echo: rank %d cannot use the p2p transport: %s", group.rank(), reason)
    unable = [rank for rank, bad in enumerate(gather_numbers(group, int(reason is not None))) if bad]
    if unable:
        return (
            f"rank {unable[0]} cannot: {reason}" if group.rank() in unable else f"rank {unable[0]} cannot (see its log)"
        )
    if len(set(gather_numbers(group, host_number()))) > 1:
        return "the ranks are on several hosts"
    device = torch.cuda.current_device()
    identities = gather_numbers(group, device_number(device))
    if len(set(identities)) < len(identities):
        return "two ranks share a GPU"
    visible = {device_number(other): other for other in range(torch.cuda.device_count())}
    blocked = [
        number
        for number in identities
        if number in visible
        and visible[number] != device
        and not torch.cuda.can_device_access_peer(device, visible[number])
    ]
    if any(gather_numbers(group, int(bool(blocked)))):
        return "the GPUs have no peer access to each other"
    return None


def connect(group: dist.ProcessGroup, config: EchoConfig) -> P2PTransport:
    """The group's transport over PyTorch symmetric memory. Collective; the ranks must have `agree`d.

    Raises:
        CommunicationError: memory could not be allocated or mapped, or the ranks' tuning tables differ; on all ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    table: Table = all_or_none(group, "read its tuning table", lambda: load_table(name))
    if len(set(gather_numbers(group, table.fingerprint()))) > 1:
        raise CommunicationError(
            "p2p transport: the ranks have different tuning tables; write them anew with echo-megatron bench --tune"
        )
    return P2PTransport(SymmetricWorkspace(group, device, config), config, table)


def device_number(device: int) -> int:
    """The GPU's identity, which no permutation of CUDA_VISIBLE_DEVICES changes, as a number."""
    return int(str(torch.cuda.get_device_properties(device).uuid).replace("-", "")[-14:], 16)
