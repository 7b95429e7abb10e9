"""What tests need to know of a policy."""

from echo_megatron.config import Policy


def group_size(policy: Policy) -> int:
    """The group size at which the presets and the spec use the policy."""
    return 32 if policy in (Policy.rotated, Policy.rotated_asymmetric) else 128
