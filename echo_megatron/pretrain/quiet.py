"""Keeps the libraries' start-up chatter out of a run's output: what Megatron-core lacks here is not missing."""

from __future__ import annotations

import logging
import warnings


def quieten_libraries() -> None:
    """Call before megatron.core is imported. Errors still come through."""
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\..*|torch\.distributed\..*")
