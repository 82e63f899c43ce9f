"""A coupling of bridge position and gain of known size and sign, with confounds present."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import stats
from torch import Tensor

from tl_spectral.bridges import bridge_units
from tl_spectral.communities import Communities
from tl_spectral.errors import InputError
from tl_spectral.gains import CONFOUNDS
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.statistics import rank_basis, rank_residuals

_DEGREE = 5


@dataclass(frozen=True, eq=False)
class PlantedCoupling:
    """One layer with a known coupling.

    Attributes:
        rho: The planted partial Spearman correlation of participation and log gain.
        states: Activations, ``[sample, unit]``.
        graph: Their unit graph, with the planted norm gains.
        communities: The true communities, as if found by one run.
        jacobian: A matrix with exactly the planted column norms, in random directions.
        log_gain: Logarithms of those norms, less their median.
        labels: The true communities.
        confounds: Names of what drives the gains besides.
    """

    rho: float
    states: Float[Tensor, "sample unit"]
    graph: UnitGraph
    communities: Communities
    jacobian: Float[Tensor, "unit unit"]
    log_gain: Float[Tensor, " unit"]
    labels: Int[Tensor, " unit"]
    confounds: tuple[str, ...]


def planted_coupling(
    rho: float = 0.0,
    n_units: int = 192,
    *,
    confounds: Sequence[str] = ("norm_gain", "activation_std", "strength"),
    confounding: float = 1.0,
    shared: float = 0.0,
    communities: int = 8,
    n_samples: int = 300,
    seed: int = 0,
) -> PlantedCoupling:
    """Draw a layer in which gain follows bridge position by a given correlation.

    Units load on the signal of their community and, each by its own measure, on the others, so that
    participation varies. The log gain is

    ``confounding · Σ confounds + r · place + √(1 − r²) · noise``, plus ``shared`` times a draw per
    community, with ``place`` the normal scores of what the confounds leave of participation, and
    ``r = 2 sin(π rho/6)``, the Pearson correlation of normal variables whose Spearman correlation
    is rho. Norm gains follow participation (Spearman about 0.5), standard deviations follow the
    norm gains, and strengths follow participation a little of themselves. So with ``rho=0`` the raw
    correlation is about 0.35, and a test that finds a coupling errs. On average rho is recovered to
    within 0.05 at ``confounding=1``; stronger confounds bend the ranks, and the estimate is drawn
    to 0 (−0.25 of −0.3 at ``confounding=2``).

    Args:
        rho: The coupling, in [−0.9, 0.9].
        n_units: Number of units.
        confounds: What drives gains besides, out of ``"norm_gain"``, ``"activation_std"`` and
            ``"strength"``.
        confounding: How strongly, in standard deviations of the log gain.
        shared: How far the units of a community share a gain. Not part of the truth: with it
            ``rho`` is that within communities.
        communities: Number of communities.
        n_samples: Samples.
        seed: Seed.

    Returns:
        The layer and its truth.

    Raises:
        InputError: If a value is out of range or a confound is unknown.
    """
    if not abs(rho) <= 0.9:
        raise InputError(f"rho must lie in [−0.9, 0.9], got {rho}.")
    if n_units < 5 * communities or communities < 2 or n_samples < 10:
        raise InputError(
            f"{n_units} units in {communities} communities, {n_samples} samples: at least 5 units "
            "in each of 2 communities and 10 samples are needed."
        )
    for name in confounds:
        if name not in CONFOUNDS or name == "massive":
            raise InputError(f"Confound {name!r} cannot be planted; there are {CONFOUNDS[:3]}.")
    rng = np.random.default_rng(seed)
    labels = np.arange(n_units) % communities
    reach = rng.uniform(0, 1, (n_units, 1)) * rng.random((n_units, communities))
    loading = np.eye(communities)[labels] + reach
    signal = rng.standard_normal((n_samples, communities)) @ loading.T
    states = signal + 0.8 * rng.standard_normal(signal.shape)
    plain = unit_graph(torch.from_numpy(states), top_k=min(10, n_units // 5))
    place = bridge_units(plain, _known(plain, labels)).participation.numpy()
    drive = _scores(place) + 1.3 * rng.standard_normal(n_units)
    spread = np.exp(0.3 * (drive + rng.standard_normal(n_units)) / math.sqrt(1 + 1.3**2))
    states = (states - states.mean(axis=0)) * (spread / states.std(axis=0))
    graph = unit_graph(torch.from_numpy(states), top_k=min(10, n_units // 5))
    graph = dataclasses.replace(graph, norm_gain=torch.from_numpy(np.exp(0.3 * drive)))
    found = _known(graph, labels)
    assert graph.norm_gain is not None
    assert graph.unit_std is not None
    known = {
        "norm_gain": graph.norm_gain.numpy(),
        "activation_std": graph.unit_std.numpy(),
        "strength": graph.strength.numpy(),
    }
    place = bridge_units(graph, found).participation.numpy()
    basis = rank_basis(np.stack(list(known.values())), _DEGREE)
    direction = _scores(rank_residuals(place[None], basis)[0])
    r = 2 * math.sin(math.pi * rho / 6)
    log_gain = r * direction + math.sqrt(1 - r * r) * rng.standard_normal(n_units)
    for name in confounds:
        log_gain += confounding / math.sqrt(len(confounds)) * _scores(known[name])
    log_gain += shared * rng.standard_normal(communities)[labels]
    log_gain -= np.median(log_gain)
    columns = rng.standard_normal((n_units, n_units))
    columns *= np.exp(log_gain) / np.linalg.norm(columns, axis=0)
    return PlantedCoupling(
        rho=rho,
        states=torch.from_numpy(states),
        graph=graph,
        communities=found,
        jacobian=torch.from_numpy(columns),
        log_gain=torch.from_numpy(log_gain),
        labels=torch.from_numpy(labels),
        confounds=tuple(confounds),
    )


def _known(graph: UnitGraph, labels: Int[np.ndarray, " unit"]) -> Communities:
    """The truth in the shape of a result."""
    row = torch.from_numpy(labels)
    nan = math.nan
    return Communities(
        labels=row,
        run_labels=row[None],
        modularity=nan,
        modularity_std=0.0,
        null_mean=nan,
        null_std=nan,
        z_score=nan,
        stability_ari=1.0,
        stability_nmi=1.0,
        method="planted",
        resolution=1.0,
        n_nulls=0,
        layer=graph.layer,
        note="the planted communities; no modularity was taken",
    )


def _scores(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Normal scores (van der Waerden): the ranks as if the values were normal."""
    return np.asarray(stats.norm.ppf(stats.rankdata(values) / (values.size + 1)))
