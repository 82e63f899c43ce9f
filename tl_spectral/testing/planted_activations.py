"""Activations with known communities and known bridge units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_spectral.errors import InputError


@dataclass(frozen=True, eq=False)
class PlantedActivations:
    """Samples of a factor model, and the truth about it.

    Attributes:
        states: ``[sample, unit]``, float64.
        labels: Community of each unit; of a bridge the first of the two that it joins.
        second: The other community of a bridge; −1 for other units.
        is_bridge: The bridge units.
        correlation: Correlation of all pairs of units in the population.
        participation: ``1 − Σ_c (s_ic/s_i)²`` of each unit, s the absolute population correlations
            with all other units.
    """

    states: Float[Tensor, "sample unit"]
    labels: Int[Tensor, " unit"]
    second: Int[Tensor, " unit"]
    is_bridge: Bool[Tensor, " unit"]
    correlation: Float[Tensor, "unit unit"]
    participation: Float[Tensor, " unit"]


def planted_activations(
    n_samples: int = 1000,
    communities: int = 6,
    bridges: int = 8,
    *,
    units_per_community: int = 20,
    strength: float = 0.6,
    seed: int = 0,
) -> PlantedActivations:
    """Draw activations in which some units belong to one community and a few to two.

    Each community has one hidden signal. A unit is ``√strength`` times the signal of its community
    (a bridge: of two communities in equal parts) plus independent noise, at unit variance, then
    shifted and scaled at random, which no correlation sees.

    A graph shows a bridge only if it keeps more edges per unit than a community has units
    (``top_k`` above ``units_per_community``, or a threshold): the sample correlations of a bridge
    with its two sides differ by chance, alike for all units of a side, and its strongest few edges
    then go to one side alone.

    Args:
        n_samples: Samples.
        communities: Number of communities.
        bridges: Number of bridge units, at the end of the list of units.
        units_per_community: Units of each community that are no bridges.
        strength: Share of a unit's variance that is signal: the correlation within a community.
        seed: Seed.

    Returns:
        The activations and their truth.

    Raises:
        InputError: If a count is too small or strength does not lie in (0, 1).
    """
    if min(n_samples, units_per_community) < 3 or communities < 2 or bridges < 0:
        raise InputError(
            "At least 3 samples, 3 units in each of 2 communities and no negative number of "
            f"bridges are needed; got {n_samples}, {units_per_community}, {communities}, {bridges}."
        )
    if not 0 < strength < 1:
        raise InputError(f"strength must lie in (0, 1), got {strength}.")
    rng = np.random.default_rng(seed)
    plain = np.repeat(np.arange(communities), units_per_community)
    first = np.arange(bridges) % communities
    apart = 1 + (np.arange(bridges) // communities) % (communities - 1)
    second = (first + apart) % communities
    labels = np.concatenate([plain, first])
    loading = np.eye(communities)[labels]
    loading[plain.size :] += np.eye(communities)[second]
    loading[plain.size :] /= np.sqrt(2)
    signal = rng.standard_normal((n_samples, communities)) @ loading.T
    noise = rng.standard_normal(signal.shape)
    states = np.sqrt(strength) * signal + np.sqrt(1 - strength) * noise
    n = labels.size
    states = states * np.exp(0.5 * rng.standard_normal(n)) + rng.standard_normal(n)
    correlation = strength * loading @ loading.T
    np.fill_diagonal(correlation, 1)
    is_bridge = np.arange(n) >= plain.size
    return PlantedActivations(
        states=torch.from_numpy(states),
        labels=torch.from_numpy(labels),
        second=torch.from_numpy(np.concatenate([np.full(plain.size, -1), second])),
        is_bridge=torch.from_numpy(is_bridge),
        correlation=torch.from_numpy(correlation),
        participation=torch.from_numpy(_participation(correlation, labels)),
    )


def _participation(
    correlation: Float[np.ndarray, "unit unit"], labels: Int[np.ndarray, " unit"]
) -> Float[np.ndarray, " unit"]:
    weight = np.abs(correlation - np.eye(len(labels)))
    into = weight @ np.eye(labels.max() + 1)[labels]
    return np.asarray(1 - np.sum((into / weight.sum(axis=1, keepdims=True)) ** 2, axis=1))
