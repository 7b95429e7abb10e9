"""The errors along one pass, and what a grid could not hold: the mathematics that `diagnostics.Inspector` measures.

At site k of a pass rank i contributes x_i, the compensator adds c_i, and the call returns y. Then, over the ranks,

    net error        rho_k   = y - sum x_i                        what the layer sees
    injected error   delta_k = y - sum (x_i + c_i)                what quantization did (paper Eqn. 1)
    accumulated      S_t     = sum of rho_k for k <= t            (paper Eqn. 6)

The compensator makes S_t the sum of phi_{t-s} delta_s (Eqn. 13), hence |S_t| <= (1-eta) N q + eta (1+mu_w) q with N the
sites so far and q the largest |delta_s| of them (Eqn. 21). Both are about exact arithmetic: they hold as far as the
state is exact (`state_dtype: fp32`) and all of delta is fed back. Rotated policies don't feed the rounding r_k of y to
its dtype back: the bound here is larger by the sum of what earlier |r_k| can be, as S_t is by that of (1 - phi) r. A
state in bf16 or compact is rounded itself, which adds an error of that size at every site; the bound leaves it out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_megatron.compensator import source_bound
from echo_megatron.config import Feedback
from echo_megatron.quantizer import Quantizer

# A code at the end of the grid is half a step off by rounding alone; the margin is for FP32's.
CLIPPED_STEPS = 0.5 * (1 + 2.0**-10)
# Of a group's largest magnitude; a scale that fits costs at most 0.2 of it (1.5 of 15 steps over twice the magnitude).
LOST_SHARE = 0.5


class PassErrors:
    """Running errors of one pass direction; norms are over all values of the tensor, FP64.

    Args:
        feedback: the compensator's coefficients; gain 0 where nothing is compensated.

    Attributes:
        accumulated: S_t, fp32 [values]; None before the first site.
        largest: q, a scalar.
        rounded: sum of what was rounded off and is not fed back, a scalar.
        num_sites: N.
    """

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self.begin()

    def begin(self) -> None:
        """A pass begins: nothing is accumulated."""
        self.accumulated: Tensor | None = None
        self.largest: Tensor | None = None
        self.rounded: Tensor | None = None
        self.num_sites = 0

    def add(self, exact: Tensor, correction: Tensor | None, returned: Tensor, roundoff: float = 0.0) -> Tensor:
        """One site; a tensor of another size than the last site's begins a pass, as it does for the compensator.

        Args:
            exact: fp32 [values], the sum of x_i.
            correction: fp32 [values], the sum of c_i; None where nothing was added.
            returned: fp32 [values], y.
            roundoff: what y may be rounded by without being fed back, relative to it.

        Returns:
            fp64 [4]: |rho| / |sum x_i|, |delta| / |sum x_i|, |S_t|, and its bound.
        """
        if self.accumulated is not None and self.accumulated.shape != exact.shape:
            self.begin()
        net = returned - exact
        injected = net if correction is None else net - correction
        self.accumulated = net if self.accumulated is None else self.accumulated + net
        self.num_sites += 1
        size = norm(injected)
        self.largest = size if self.largest is None else torch.maximum(self.largest, size)
        bound = source_bound(self._feedback, self.num_sites, 1.0) * self.largest
        bound = bound if self.rounded is None else bound + self.rounded
        rounded = roundoff * norm(returned)
        self.rounded = rounded if self.rounded is None else self.rounded + rounded
        whole = norm(exact)
        return torch.stack((ratio(norm(net), whole), ratio(size, whole), norm(self.accumulated), bound))


def norm(values: Tensor) -> Tensor:
    """Euclidean norm, an fp64 scalar: squares of small gradients underflow in FP32."""
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole for scalars >= 0; 0 / 0 is 0."""
    return torch.where(part == 0, part, part / whole)


def grid_use(quantizer: Quantizer, values: Tensor, exponent: Tensor | None) -> Tensor:
    """What the grid of a rank's codes could not hold.

    Args:
        quantizer: of the site.
        values: fp32 [n], x_i + c_i in the working basis.
        exponent: int32 scalar for `rescale: group`, else None.

    Returns:
        fp64 [2]: the shares of groups that are saturated and that underflowed; see `diagnostics.QUANTITIES`.
    """
    group_size, num_values = quantizer.group_size, values.shape[-1]
    num_groups = -(-num_values // group_size)
    quantized = quantizer.quantize(values, exponent)
    decoded = quantizer.dequantize(quantized)

    def by_group(flat: Tensor) -> Tensor:
        return F.pad(flat, (0, num_groups * group_size - num_values)).view(num_groups, group_size)

    magnitude, errors = by_group(values.abs()).amax(-1), by_group((values - decoded).abs())
    scale = quantized.scale.flatten()[:num_groups]
    step = (quantized.scale.double() * torch.exp2(quantized.exponent.double()).unsqueeze(-1)).flatten()[:num_groups]
    codes = quantized.codes.flatten()[: num_groups * group_size].view(num_groups, group_size)
    lowest = quantizer.code_offset - (quantizer.highest_code if quantizer.is_symmetric else 0)
    at_end = (codes == lowest) | (codes == quantizer.code_offset + quantizer.highest_code)
    clipped = at_end & (errors > CLIPPED_STEPS * step.unsqueeze(-1))
    overflowed = scale.isnan() & (magnitude < float("inf"))  # False for a group that holds NaN
    saturated = clipped.any(-1) | overflowed
    underflowed = (errors.amax(-1) >= LOST_SHARE * magnitude) & (magnitude > 0)
    return torch.stack((saturated.double().mean(), underflowed.double().mean()))
