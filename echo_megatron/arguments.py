"""Types of command-line options, for argparse."""

from __future__ import annotations

import argparse
import math


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
