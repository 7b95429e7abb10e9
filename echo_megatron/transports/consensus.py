"""The consensus residual's update, which the p2p transport launches behind its call (cuda/update.cu)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ConsensusUpdate:
    """The consensus residual's update of one direction: on a side stream, beside the next matmul (paper Sec. 5.1).

    The next call of the direction waits for it. In a graph capture it runs on the call's own stream: a fork that is
    not joined before the capture ends is an error.

    Args:
        device: of the group's tensors.
        beside: False runs every update on the call's own stream.
    """

    def __init__(self, device: torch.device, beside: bool = True) -> None:
        self._beside = beside
        self._captured: list[Tensor] = []  # buffers that graphs use
        self._update = torch.ops.echo_megatron.consensus_update.default
        self._stream = torch.cuda.Stream(device)
        self._begun, self._done = torch.cuda.Event(), torch.cuda.Event()
        self._is_pending = False
        self._codes = torch.empty(0, dtype=torch.uint8, device=device)
        self._copy = torch.empty(0, dtype=torch.uint8, device=device)
        self._copy_view = self._copy

    def codes(self, num_bytes: int) -> Tensor:
        """A buffer for the call's records."""
        if self._codes.numel() < num_bytes:
            self._codes = self._allocate(num_bytes)
        return self._codes

    def copy_of(self, x: Tensor) -> Tensor:
        """A flat buffer for x's values: a call in place overwrites x before the update has read it."""
        if self._copy_view.dtype != x.dtype or self._copy_view.numel() != x.numel():
            num_bytes = x.numel() * x.element_size()
            if self._copy.numel() < num_bytes:
                self._copy = self._allocate(num_bytes)
            with torch.inference_mode(False):
                self._copy_view = self._copy[:num_bytes].view(x.dtype)
        return self._copy_view

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Orders `stream`, the current one, behind the last update."""
        assert stream is not None
        if self._is_pending and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._done)

    def launch(
        self, stream: torch.cuda.Stream | None, x: Tensor, codes: Tensor | None, state: Tensor | None, **options: Any
    ) -> None:
        """Starts the update behind the call on `stream`, the current one."""
        assert stream is not None and codes is not None and state is not None
        is_captured = torch.cuda.is_current_stream_capturing()
        if is_captured or not self._beside:
            self._update(x, codes, state, **options)
            self._is_pending = False
            if is_captured:
                self._captured += [self._codes, self._copy]
            return
        self._begun.record(stream)
        self._stream.wait_event(self._begun)
        with self._stream:
            self._update(x, codes, state, **options)
        self._done.record(self._stream)
        self._is_pending = True
        for tensor in (x, codes, state):
            if tensor is not self._codes and tensor is not self._copy_view:
                tensor.record_stream(self._stream)

    def _allocate(self, num_bytes: int) -> Tensor:
        """A buffer whose memory is not used anew before the last update has read it."""
        with torch.inference_mode(False):  # see Compensator.apply
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._codes.device)
        buffer.record_stream(self._stream)
        return buffer

    def num_bytes(self) -> int:
        """Device memory that is kept between calls."""
        return self._codes.numel() + self._copy.numel()
