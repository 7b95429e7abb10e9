"""Types of command-line options, for argparse."""

from __future__ import annotations

import argparse
import math

from echo_megatron.bench.rows import ITEMSIZE, KIB, MIB


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def positive_number(text: str, below: float = math.inf) -> float:
    """A number above 0 and under `below`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def message_size(text: str) -> int:
    """`64K`, `16M`, `1G` or plain bytes, as bytes of BF16 values."""
    factors = {"K": KIB, "M": MIB, "G": KIB * MIB}
    digits, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    if not digits.isdecimal() or not int(digits) or int(digits) * factor % ITEMSIZE:
        raise argparse.ArgumentTypeError(
            f"size: expected an even number of bytes such as 65536, 64K, 16M or 1G; got {text!r}"
        )
    return int(digits) * factor
