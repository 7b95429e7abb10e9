"""Feedbacks that tests draw, and the state types that go with them."""

from echo_megatron.config import Direction, EchoConfig, StateDtype

AVERAGES = {"eta": 0.75, "beta1": 0.7, "beta2": 0.3}  # the paper's: for the local residual not the default
# The options of a feedback: the residual's own, none, averages, one average alone, the last residual alone.
FEEDBACKS = (
    {},
    {"eta": 0.0},
    AVERAGES,
    {"eta": 1.0, "a": 1.0, "beta1": 0.9, "beta2": 0.0},
    {"eta": 0.9, "a": 0.0, "beta1": 0.0, "beta2": 0.5},
    {"eta": 0.6, "beta1": 0.0, "beta2": 0.0},
)


def state_dtypes(config: EchoConfig) -> list[StateDtype | None]:
    """What `state_dtype` may be with the config's other options, None included."""
    defaults = {config.replace(state_dtype=None).state_dtype_of(direction) for direction in Direction}
    compact = [StateDtype.compact] if defaults == {StateDtype.compact} else []
    return [None, StateDtype.bf16, StateDtype.fp32, *compact]
