"""Pairs of units that are alike in what could explain a difference between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment

from tl_spectral.errors import InputError

NEIGHBOURS = 3
"""A drawn match is one of so many nearest units that are still free."""


def standardised(
    covariates: Mapping[str, Float[np.ndarray, " unit"]], units: Int[np.ndarray, " used"]
) -> Float[np.ndarray, "covariate unit"]:
    """Logarithms, centred and in standard deviations over the units used.

    Sizes spread over orders of magnitude, so their ratios count. A covariate that does not vary
    becomes 0.
    """
    rows = []
    for values in covariates.values():
        size = np.abs(values)
        largest = size[units].max()
        logs = np.log(np.maximum(size, 1e-12 * largest if largest > 0 else 1.0))
        spread = logs[units].std()
        rows.append((logs - logs[units].mean()) / spread if spread > 1e-9 else np.zeros(len(logs)))
    return np.array(rows).reshape(len(covariates), -1)


def matched(
    places: Float[np.ndarray, "covariate unit"],
    of: Int[np.ndarray, " pair"],
    pool: Int[np.ndarray, " candidate"],
    draws: int,
    rng: np.random.Generator,
) -> Int[np.ndarray, "draw pair"]:
    """A partner from the pool for each unit, none used twice, in several ways.

    The first match has the least sum of distances of all (optimal matching). The others go through
    the units in random order and give each one of the three nearest that are still free, at random.

    Args:
        places: Where each unit lies, from :func:`standardised`.
        of: The units.
        pool: Their possible partners.
        draws: How many matches.
        rng: Advanced by the call.

    Raises:
        InputError: If the pool is smaller than the group to be matched.
    """
    if len(pool) < len(of):
        raise InputError(
            f"{len(of)} units cannot be matched with {len(pool)} others without using one twice. "
            "Use a stricter rule for bridges."
        )
    distance = np.linalg.norm(places[:, of, None] - places[:, None, pool], axis=0)
    _, best = linear_sum_assignment(distance)
    found = [pool[best]]
    for _ in range(draws - 1):
        free = distance.copy()
        partner = np.empty(len(of), dtype=np.int64)
        for unit in rng.permutation(len(of)):
            left = min(NEIGHBOURS, int(np.isfinite(free[unit]).sum()))
            near = np.argsort(free[unit], kind="stable")[:left]
            partner[unit] = near[rng.integers(left)]
            free[:, partner[unit]] = np.inf
        found.append(pool[partner])
    return np.array(found)


def balance(
    names: tuple[str, ...],
    places: Float[np.ndarray, "covariate unit"],
    of: Int[np.ndarray, " pair"],
    pool: Int[np.ndarray, " candidate"],
    partners: Int[np.ndarray, "draw pair"],
) -> list[dict[str, Any]]:
    """How alike the groups are: differences of means in standard deviations of the covariate.

    Returns:
        One row per covariate: ``covariate``, ``before`` (against the whole pool), ``after`` (the
        first match), ``worst`` (the largest of all matches, with its sign).
    """
    rows = []
    for name, place in zip(names, places, strict=True):
        after = place[of].mean() - place[partners].mean(axis=1)
        rows.append(
            {
                "covariate": name,
                "before": float(place[of].mean() - place[pool].mean()),
                "after": float(after[0]),
                "worst": float(after[np.abs(after).argmax()]),
            }
        )
    return rows
