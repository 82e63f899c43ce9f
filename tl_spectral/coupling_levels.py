"""The two levels at which a coupling is measured, units and communities, and what they rest on.

:func:`prepare` gathers once what every coupling of one layer needs; the levels then work on arrays.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from tl_spectral import statistics
from tl_spectral.bridges import BridgeUnits, Rule, bridge_units, participation, require_same_graph
from tl_spectral.communities import Communities
from tl_spectral.errors import InputError
from tl_spectral.gains import (
    Gain,
    Gains,
    Jacobian,
    Operator,
    Scale,
    Vector,
    chosen_confounds,
    known_confounds,
    measure,
)
from tl_spectral.graph import UnitGraph

Part = Literal["positive", "negative"]
Dependence = Literal["community", "none"]
NO_PROJECTOR = "no projector gain: only log gains were given"
MIN_UNITS = 10
MIN_COMMUNITIES = 4
MAX_DEGREE = 5
_EXACT_COMMUNITIES = 7  # 7! = 5040 orders are enumerated


@dataclass(frozen=True, eq=False)
class Prepared:
    """One layer's participation, gains and confounds, reduced to the units that can be used.

    Attributes:
        measured: Gains of all units.
        bridges: Bridge position of all units.
        used: Units that enter.
        reasons: Why the others do not.
        spread: Participation of the used units under each run of the community detection.
        gain: Their log gain.
        labels: Their consensus community.
        controls: Their confounds, one per row.
        names: Names of those.
        known: Names of the confounds that are known here.
        constant: Names of those that do not vary.
        degree: Degree of the polynomials of their ranks.
    """

    measured: Gains
    bridges: BridgeUnits
    used: Bool[np.ndarray, " unit"]
    reasons: dict[str, int]
    spread: Float[np.ndarray, "run used"]
    gain: Float[np.ndarray, " used"]
    labels: Int[np.ndarray, " used"]
    controls: Float[np.ndarray, "k used"]
    names: tuple[str, ...]
    known: tuple[str, ...]
    constant: tuple[str, ...]
    degree: int

    @property
    def basis(self) -> Float[np.ndarray, "used q"]:
        """Orthonormal basis of what is regressed out."""
        return statistics.rank_basis(self.controls, self.degree)


def position(
    g: UnitGraph, com: Communities, part: Part | str, rule: Rule = "quantile", quantile: float = 0.9
) -> tuple[BridgeUnits, Float[np.ndarray, "run unit"]]:
    """Bridge position over the positive or over the absolute negative edges, and run by run.

    Raises:
        InputError: If the part is unknown, or negative where no edge is.
    """
    if part not in ("positive", "negative"):
        raise InputError(f'part must be "positive" or "negative", got {part!r}.')
    if part == "negative":
        if not bool((g.weight < 0).any()):
            raise InputError(
                'part="negative" needs negative edges: build the graph with sign="signed".'
            )
        g = replace(g, weight=-g.weight)
    bridges = bridge_units(g, com, rule=rule, quantile=quantile)
    if part == "negative":
        reason = tuple(text.replace("positive", "negative") for text in bridges.reason)
        bridges = replace(bridges, reason=reason)
    return bridges, participation(g.adjacency().maximum(0), com.run_labels.numpy())


def prepare(
    J: Jacobian | Sequence[Jacobian] | Vector,
    g: UnitGraph,
    com: Communities,
    *,
    gain: Gain = "column",
    operator: Operator = "J",
    scale: Scale | None = None,
    confounds: Sequence[str] | None = None,
    degree: int | None = None,
    part: Part | str = "positive",
    rule: Rule = "quantile",
    quantile: float = 0.9,
) -> Prepared:
    """Check the options of :func:`tl_spectral.coupling` and gather what it works on.

    Raises:
        InputError: If sizes differ, a confound is unknown or not available, an option is out of
            range, or no unit can be used.
        ProvenanceError: If Jacobian, graph and communities are of different layers or models.
    """
    if gain not in ("column", "row"):
        raise InputError(f'gain must be "column" or "row", got {gain!r}.')
    if degree is not None and degree < 1:
        raise InputError(f"degree must be at least 1, got {degree}.")
    require_same_graph(g, com)
    measured = measure(J, g, gain, operator, scale)
    bridges, spread = position(g, com, part, rule, quantile)
    log_gain = measured.log_gain.numpy()
    reasons = np.array(bridges.reason, dtype=object)
    reasons[(reasons == "") & np.isnan(log_gain)] = "no natural unit (zero deviation)"
    reasons[(reasons == "") & np.isinf(log_gain)] = "gain of exactly zero"
    used = (reasons == "").astype(bool)
    if not used.any():
        raise InputError(
            f"No unit can be used: {dict(Counter(reasons.tolist()))}. Check the Jacobian and graph."
        )
    known = known_confounds(g, measured.norm_gain)
    names, constant = chosen_confounds(confounds, known, used)
    n = int(used.sum())
    controls = np.stack([known[name][used] for name in names]) if names else np.empty((0, n))
    if degree is None:
        degree = max(1, min(MAX_DEGREE, n // (10 * max(len(names), 1))))
    return Prepared(
        measured=measured,
        bridges=bridges,
        used=used,
        reasons=dict(sorted(Counter(reasons[~used].tolist()).items())),
        spread=spread[:, used],
        gain=log_gain[used],
        labels=com.labels.numpy()[used],
        controls=controls,
        names=names,
        known=tuple(known),
        constant=constant,
        degree=degree,
    )


@dataclass(frozen=True, eq=False)
class UnitLevel:
    """Coupling over units, and the residuals that it correlates."""

    rho: float
    p: float
    p_exchangeable: float
    interval: tuple[float, float]
    run_agreement: float
    n_effective: float
    x: Float[np.ndarray, " used"]
    y: Float[np.ndarray, " used"]
    note: str = ""


def unit_level(
    spread: Float[np.ndarray, "run used"],
    gains: Float[np.ndarray, " used"],
    basis: Float[np.ndarray, "used q"],
    labels: Int[np.ndarray, " used"],
    dependence: str,
    permutations: int,
    rng: np.random.Generator,
) -> UnitLevel:
    """Partial rank correlation over units: its p, its interval, or why there is none.

    Args:
        spread: Participation under each run of the community detection.
        gains: Log gains.
        basis: What is regressed out, from :func:`tl_spectral.statistics.rank_basis`.
        labels: Consensus community.
        dependence: Whether the communities widen null and interval.
        permutations: How many.
        rng: Advanced by the call.
    """
    n = gains.size
    nothing = np.full(n, math.nan)
    nan = math.nan

    def impossible(note: str) -> UnitLevel:
        return UnitLevel(nan, nan, nan, (nan, nan), nan, nan, nothing, nothing, note)

    if n < MIN_UNITS:
        return impossible(f"no unit coupling: {n} usable units, {MIN_UNITS} needed")
    x, missing = mean_direction(spread, basis)
    y = statistics.rank_residuals(gains[None], basis)[0]
    if missing:
        return impossible("no unit coupling: participation does not vary beyond the confounds")
    if np.isnan(y).any():
        return impossible("no unit coupling: the gain does not vary beyond the confounds")
    rho, agreement = float(x @ y), float(np.linalg.norm(x))
    null = statistics.freedman_lane(x, y, basis, permutations, rng)
    inflation = 1.0
    if dependence == "community":
        left = y - rho / agreement**2 * x
        inflation = statistics.design_effect(x, left, labels)
    return UnitLevel(
        rho=rho,
        p=statistics.permutation_p(rho, null * math.sqrt(inflation)),
        p_exchangeable=statistics.permutation_p(rho, null),
        interval=statistics.fisher_interval(rho, n / inflation, basis.shape[1] - 1, agreement),
        run_agreement=agreement,
        n_effective=n / inflation,
        x=x,
        y=y,
    )


def mean_direction(
    spread: Float[np.ndarray, "run used"], basis: Float[np.ndarray, "used q"]
) -> tuple[Float[np.ndarray, " used"], bool]:
    """Mean over runs of the unit residuals of participation; a run without variation counts as 0.

    The mean of the runs' correlations with y is the scalar product of y with this vector.
    """
    residuals = statistics.rank_residuals(spread, basis)
    empty = np.isnan(residuals).any(axis=1)
    residuals[empty] = 0
    return residuals.mean(axis=0), bool(empty.all())


def mean_rho(
    rows: Float[np.ndarray, "run used"],
    y: Float[np.ndarray, " used"],
    basis: Float[np.ndarray, "used q"],
) -> float:
    """Mean over rows of the partial rank correlation with ``y``; NaN where nothing varies."""
    if y.size < MIN_UNITS:
        return math.nan
    x, missing = mean_direction(rows, basis)
    return math.nan if missing else float(x @ statistics.rank_residuals(y[None], basis)[0])


@dataclass(frozen=True, eq=False)
class CommunityLevel:
    """Coupling over the means of communities."""

    rho: float
    p: float
    projector_rho: float
    n: int
    note: str = ""


def community_level(
    unit: UnitLevel,
    labels: Int[np.ndarray, " unit"],
    used: Bool[np.ndarray, " unit"],
    bridges: BridgeUnits,
    measured: Gains,
    permutations: int,
    rng: np.random.Generator,
) -> CommunityLevel:
    """Rank correlation over communities of the means of the units' residuals.

    Args:
        unit: The level of units.
        labels: Consensus community of all units.
        used: Units that enter.
        bridges: Their participation, for the projector gain.
        measured: Their gains.
        permutations: How many, where not all orders are enumerated.
        rng: Advanced by the call.
    """
    size = np.bincount(labels[used], minlength=1)
    counted = np.flatnonzero(size >= 2)
    n = counted.size
    if n < MIN_COMMUNITIES:
        note = f"no community coupling: {n} communities, {MIN_COMMUNITIES} needed"
        return CommunityLevel(math.nan, math.nan, math.nan, n, note)

    def means(values: Float[np.ndarray, " used"]) -> Float[np.ndarray, " community"]:
        return np.asarray(np.bincount(labels[used], values)[counted] / size[counted])

    basis = statistics.rank_basis(np.empty((0, n)))
    projector, note = math.nan, ""
    if measured.squares is None:
        note = NO_PROJECTOR
    else:
        power = means(measured.squares.numpy()[used])  # ‖M Π_c‖²_F / |c|
        place = means(bridges.participation.numpy()[used])
        first, second = statistics.rank_residuals(np.stack([place, power]), basis)
        projector = float(first @ second)
    if math.isnan(unit.rho):
        return CommunityLevel(math.nan, math.nan, projector, n, note)
    x, y = statistics.rank_residuals(np.stack([means(unit.x), means(unit.y)]), basis)
    if n <= _EXACT_COMMUNITIES:
        orders = np.array(list(itertools.permutations(range(n))))[1:]
        null = y[orders] @ x
    else:
        null = statistics.freedman_lane(x, y, basis, permutations, rng)
    rho = float(x @ y)
    return CommunityLevel(rho, statistics.permutation_p(rho, null), projector, n, note)
