"""Times of calls as `echo-megatron plan` reads them from the results, in tests."""

from __future__ import annotations

from echo_megatron.plan_calls import CallTimes
from echo_megatron.plan_machine import Measured, gpus


def times_of(measured: Measured, world_size: int, gpu: str = "h200") -> CallTimes:
    return CallTimes(measured, measured.ceilings_of(gpus()[gpu]), world_size)
