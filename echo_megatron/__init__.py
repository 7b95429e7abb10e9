"""Echo: error-compensated 4-bit tensor-parallel communication for Megatron-core."""

from typing import TYPE_CHECKING, Any

from echo_megatron.config import PRESETS, EchoConfig

if TYPE_CHECKING:
    from echo_megatron.communicator import Communicator
    from echo_megatron.integrations.megatron import Installation, install

__version__ = "0.1.0.dev0"
__all__ = ["PRESETS", "Communicator", "EchoConfig", "Installation", "install"]

# torch and megatron-core take seconds to import; a script that only reads options does not pay for them.
_LAZY = {
    "Communicator": "echo_megatron.communicator",
    "Installation": "echo_megatron.integrations.megatron",
    "install": "echo_megatron.integrations.megatron",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'echo_megatron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
