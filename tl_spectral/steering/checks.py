"""Checks of arguments, before anything is run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tl_spectral.errors import InputError


def check_gap(gap: Any) -> None:
    """Raise ``InputError`` unless it is a number above 1."""
    if not is_number(gap) or not 1 < gap < math.inf:
        raise InputError(
            f"gap must be a number above 1, got {gap!r}: it is the ratio of the dominant modulus "
            "to the next, and at 1 no mode is dominant."
        )


def check_count(name: str, value: Any) -> None:
    """Raise ``InputError`` unless it is a whole number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{name} must be a whole number, 0 or more, got {value!r}.")


def check_cutoff(cutoff: Any) -> None:
    """Raise ``InputError`` unless it is a number from 0 to below 1."""
    if not is_number(cutoff) or not 0 <= cutoff < 1:
        raise InputError(f"cutoff must lie between 0 and 1, got {cutoff!r}.")


def is_number(value: Any) -> bool:
    """Whether it is a plain number (True is none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def checked_sequence(name: str, values: Any) -> tuple[Any, ...]:
    """The values as a tuple; ``InputError`` unless there is one, and none comes twice."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(f"{name} must be a sequence, got {values!r}.")
    chosen = tuple(values)
    if not chosen:
        raise InputError(f"{name} is empty. Name at least one.")
    if len(set(chosen)) != len(chosen):
        raise InputError(f"{name} names one twice: {list(chosen)}.")
    return chosen
