"""Two-timescale error feedback (paper Sec. 5.1): one recurrence for both residuals, and its closed forms.

The paper keeps two moving averages m1 (slow, beta1) and m2 (fast, beta2) of the residual u:

    c = eta (a m1 + (1-a) m2)        x' = x + c        m_j <- beta_j m_j + (1 - beta_j) u

The state kept here is (c, m2), which carries the same information, so that the entry of a call reads one tensor:

    c  <- (beta1 c + eta (1-a) (beta2 - beta1) m2) + eta w_0 u,     w_0 = a (1-beta1) + (1-a) (1-beta2)
    m2 <- beta2 m2 + (1-beta2) u

Arithmetic is FP32 in this order; `state.py` says how the state is stored. At the first site of a pass nothing is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo_megatron.config import Direction, EchoConfig, Feedback
from echo_megatron.state import State, make_state


class Compensator:
    """The state of one pass direction; row by row, so it serves one rank [n] or P simulated ranks [P, n].

    A transport either calls `apply` and `update`, or keeps the state in a layout of its own: `raw_state` is its buffer,
    and `mark_updated` says that it was written. A call of the other kind starts a new pass.

    Args:
        config: eta, a, beta1, beta2 and the state's dtype.
        direction: whose state it is.
    """

    def __init__(self, config: EchoConfig, direction: Direction = Direction.forward) -> None:
        feedback = config.feedback_of(direction)
        eta, a, beta1, beta2 = feedback.eta, feedback.a, feedback.beta1, feedback.beta2
        self.correction_decay = beta1
        self.correction_from_average = eta * (1 - a) * (beta2 - beta1)
        self.correction_from_residual = eta * (a * (1 - beta1) + (1 - a) * (1 - beta2))
        self.average_decay = beta2
        self.average_from_residual = 1 - beta2
        kept = torch.tensor([self.correction_decay, self.correction_from_average], dtype=torch.float32)
        # c is of the last residual alone (beta1 = 0, and beta2 = 0 or a = 1), in the recurrence's precision: `update`
        # reads no old state.
        self.is_memoryless = not kept.any()
        self.dtype = config.state_dtype_of(direction)
        self._state: State | None = None
        self._raw: Tensor | None = None
        self._captured: dict[tuple[object, ...], Tensor] = {}  # by size and device
        self._layout: tuple[object, ...] | None = None
        self._fresh = True

    def reset(self) -> None:
        """Forgets the pass. The buffers stay allocated; the next site does not read them."""
        self._fresh = True

    @property
    def is_fresh(self) -> bool:
        """True at the first site of a pass: the correction is zero and nothing is read."""
        return self._fresh

    @property
    def coefficients(self) -> list[float]:
        """The recurrence's numbers in the order in which kernels take them (cuda/arguments.cuh)."""
        return [
            self.correction_decay,
            self.correction_from_average,
            self.correction_from_residual,
            self.average_decay,
            self.average_from_residual,
        ]

    @property
    def average(self) -> Tensor:
        """m2 after the last `update`, fp32."""
        assert self._state is not None
        return self._state.average()

    def apply(self, values: Tensor) -> Tensor:
        """x' = x + c (paper Eqn. 10).

        Args:
            values: fp32 contribution in the working basis; another shape than the last site's starts a new pass.
        """
        layout = (values.shape, values.device)
        if self._state is None or self._layout != layout:
            # An evaluation may allocate in inference mode what the next training pass writes: that needs plain tensors.
            with torch.inference_mode(False):
                self._state = make_state(self.dtype, values.shape, values.device)
            self._raw = None
            self._layout = layout
            self._fresh = True
        return values if self._fresh else values + self._state.correction()

    def update(self, residual: Tensor) -> None:
        """Feeds the residual u back (paper Eqn. 11); fp32, the shape that `apply` saw."""
        assert self._state is not None
        correction = residual * self.correction_from_residual
        average = residual * self.average_from_residual
        if not (self._fresh or self.is_memoryless):
            old_average = self._state.average()
            kept = self._state.correction() * self.correction_decay + old_average * self.correction_from_average
            correction = kept + correction
            average = old_average * self.average_decay + average
        self._state.store(correction, average)
        self._fresh = False

    def raw_state(
        self, key: tuple[object, ...], num_bytes: int, device: torch.device, is_captured: bool = False
    ) -> Tensor:
        """The buffer of a transport that reads and writes the state in its own layout; not to be read while `is_fresh`.

        Args:
            key: what the layout of a call depends on. Another key, size or device than the last site's starts a new
                pass.
            num_bytes: size of the buffer.
            device: where it lives.
            is_captured: the call is recorded into a CUDA graph, so the buffer lives on and serves its size from now on.

        Returns:
            uint8 [num_bytes], the same memory while size and device stay.
        """
        layout = (key, num_bytes, device)
        if self._raw is None or self._layout != layout:
            if self._raw is None or self._layout is None or self._layout[1:] != layout[1:]:
                self._raw = self._captured.get(layout[1:])
                if self._raw is None:
                    with torch.inference_mode(False):
                        self._raw = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._state = None
            self._layout = layout
            self._fresh = True
        if is_captured:
            self._captured[layout[1:]] = self._raw
        return self._raw

    def correction(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        """A copy of c as the next `apply` adds it to values of this shape, fp32; None where it adds nothing."""
        if self._fresh or self._state is None or self._layout != (shape, device):
            return None
        return self._state.correction().clone()  # an FP32 state gives itself, which `update` overwrites

    def written_state(self, key: tuple[object, ...], num_bytes: int, device: torch.device) -> Tensor | None:
        """What `raw_state` returns of the same arguments, where the next call reads it; None where it reads nothing."""
        if self._fresh or self._raw is None or self._layout != (key, num_bytes, device):
            return None
        return self._raw

    def mark_updated(self) -> None:
        """The buffer of `raw_state` holds the state for the next site."""
        assert self._raw is not None
        self._fresh = False

    def num_bytes(self) -> int:
        """Device memory that the state holds."""
        if self._raw is not None:
            kept = {buffer.data_ptr(): buffer.numel() for buffer in (self._raw, *self._captured.values())}
            return sum(kept.values())
        return 0 if self._state is None else self._state.num_bytes()


# -- closed forms of the analysis (paper Secs. 5.2 and 6); tests hold the recurrence to them


def weight(feedback: Feedback, age: int) -> float:
    """w_r: the weight of an error `age` sites old in the correction (Eqn. 12)."""
    a, beta1, beta2 = feedback.a, feedback.beta1, feedback.beta2
    return a * (1 - beta1) * beta1**age + (1 - a) * (1 - beta2) * beta2**age


def tail(feedback: Feedback, age: int) -> float:
    """T_m = sum of w_r for r >= m: what of an error is still uncorrected at gain one after m sites."""
    return feedback.a * feedback.beta1**age + (1 - feedback.a) * feedback.beta2**age


def remaining(feedback: Feedback, age: int) -> float:
    """phi_m: the fraction of an error that remains in the partial sum m sites later (Eqn. 13)."""
    return 1 - feedback.eta * (1 - tail(feedback, age))


def tail_sum(feedback: Feedback) -> float:
    """1 + mu_w = sum of T_m, the window of errors that stays in the sum at gain one."""
    return feedback.a / (1 - feedback.beta1) + (1 - feedback.a) / (1 - feedback.beta2)


def tail_square_sum(feedback: Feedback) -> float:
    """tau_2 = sum of T_m^2."""
    a, beta1, beta2 = feedback.a, feedback.beta1, feedback.beta2
    cross = 2 * a * (1 - a) / (1 - beta1 * beta2)
    return a**2 / (1 - beta1**2) + cross + (1 - a) ** 2 / (1 - beta2**2)


def source_bound(feedback: Feedback, num_sites: int, q: float) -> float:
    """max_t |S_t| for any errors |delta_k| <= q over a pass of `num_sites` sites (Eqn. 21)."""
    return (1 - feedback.eta) * num_sites * q + feedback.eta * tail_sum(feedback) * q


def source_variance(feedback: Feedback, num_sites: int) -> float:
    """E|S_N|^2 in units of q^2 for uncorrelated errors of variance q^2: sum of phi_m^2 (Eqn. 13)."""
    return sum(remaining(feedback, age) ** 2 for age in range(num_sites))
