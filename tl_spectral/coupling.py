"""Does a unit's place between communities predict how the block amplifies it?

Per layer: partial rank correlation of participation and log gain, with the plain explanations
(norm gains, variance, strength, massive activations) regressed out. Across layers: does that
correlation follow the operator's rotational-to-symmetric character?
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_spectral import statistics
from tl_spectral.bridges import BridgeUnits, Rule, bridge_units, participation, require_same_graph
from tl_spectral.communities import Communities
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.graph import UnitGraph
from tl_spectral.jacobian.result import BlockJacobian
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Gain = Literal["column", "row"]
Operator = Literal["J", "R"]
Jacobian: TypeAlias = BlockJacobian | Float[Tensor, "d_model d_model"]
Vector: TypeAlias = Float[Tensor, " d_model"]
Scale: TypeAlias = Vector | tuple[Vector, Vector]
CONFOUNDS = ("norm_gain", "activation_std", "strength", "massive")
NO_PROJECTOR = "no projector gain: only log gains were given"
MASSIVE_RATIO = 10.0  # root mean square of a massive unit, in medians over the units
MIN_UNITS = 10
MIN_COMMUNITIES = 4
MAX_DEGREE = 5
_EXACT_COMMUNITIES = 7  # 7! = 5040 orders are enumerated


@dataclass(frozen=True, eq=False)
class CouplingResult(Result):
    """Coupling of bridge position and gain in one layer.

    Attributes:
        unit_rho: Partial Spearman correlation of participation and log gain over units, the mean
            over the runs of the community detection; NaN with the reason in ``note``.
        unit_p: Two-sided permutation p (Freedman–Lane, ``(b + 1)/(m + 1)``), its null widened by
            the design effect of the communities when ``dependence="community"``.
        unit_p_exchangeable: The same without widening: valid if units of a community are no more
            alike than others.
        unit_interval: 95 % interval of ``unit_rho``: Fisher z over ``n_effective`` units.
        raw_rho: Like ``unit_rho``, with nothing regressed out.
        run_agreement: Length of the mean of the runs' unit vectors, in (0, 1]: what ``unit_rho``
            can reach at most, given that the runs disagree.
        cohens_d: Difference of log gain, bridge minus other units, in pooled deviations, after
            the confounds are regressed out.
        cohens_interval: Its 95 % interval.
        raw_cohens_d: The same, with nothing regressed out.
        community_rho: Spearman correlation over communities of the means of the same residuals.
        community_p: Its two-sided permutation p (all orders up to 7 communities).
        projector_rho: Spearman correlation over communities of mean participation and
            ``‖M Π_c‖_F / √|c|`` (rows for ``gain="row"``), nothing regressed out.
        n_communities: Communities with at least two usable units.
        gain: The gain in words.
        operator: ``"J"`` or ``"R"``.
        units: ``"raw"`` or ``"natural"``.
        confounds: Names of what was regressed out.
        degree: Degree of the polynomials of their ranks.
        confounds_missing: Names of what is not known here (no states, no norm).
        confounds_constant: Names of what is known but does not vary.
        confound_table: Per confound: name, its Spearman correlation with participation (mean over
            runs) and with log gain.
        n_units: Units used.
        n_effective: Effective number of units, at most ``n_units``.
        excluded: Number of units left out, by reason.
        n_samples: Number of Jacobians whose gains were averaged.
        participation: Mean participation of each unit.
        log_gain: Log gain of each unit relative to the layer's median.
        used: Units that entered.
        is_bridge: Bridge units.
        community: Consensus community of each unit.
        layer: The layer.
        permutations: Number of permutations.
        note: Why a figure is missing, or empty.
    """

    unit_rho: float
    unit_p: float
    unit_p_exchangeable: float
    unit_interval: tuple[float, float]
    raw_rho: float
    run_agreement: float
    cohens_d: float
    cohens_interval: tuple[float, float]
    raw_cohens_d: float
    community_rho: float
    community_p: float
    projector_rho: float
    n_communities: int
    gain: str
    operator: str
    units: str
    confounds: tuple[str, ...]
    degree: int
    confounds_missing: tuple[str, ...]
    confounds_constant: tuple[str, ...]
    confound_table: tuple[tuple[str, float, float], ...]
    n_units: int
    n_effective: float
    excluded: dict[str, int]
    n_samples: int
    participation: Float[Tensor, " unit"]
    log_gain: Float[Tensor, " unit"]
    used: Bool[Tensor, " unit"]
    is_bridge: Bool[Tensor, " unit"]
    community: Int[Tensor, " unit"]
    layer: int | None
    permutations: int
    note: str = ""

    def to_dataframe(self) -> pd.DataFrame:
        """One row with every figure of the layer."""
        import pandas as pd

        row = {
            "layer": self.layer,
            "operator": self.operator,
            "units": self.units,
            "gain": self.gain,
            "n_samples_jacobian": self.n_samples,
            "n_units": self.n_units,
            "n_effective": self.n_effective,
            "unit_rho": self.unit_rho,
            "unit_low": self.unit_interval[0],
            "unit_high": self.unit_interval[1],
            "unit_p": self.unit_p,
            "unit_p_exchangeable": self.unit_p_exchangeable,
            "raw_rho": self.raw_rho,
            "run_agreement": self.run_agreement,
            "cohens_d": self.cohens_d,
            "cohens_low": self.cohens_interval[0],
            "cohens_high": self.cohens_interval[1],
            "raw_cohens_d": self.raw_cohens_d,
            "community_rho": self.community_rho,
            "community_p": self.community_p,
            "projector_rho": self.projector_rho,
            "n_communities": self.n_communities,
            "confounds": " ".join(self.confounds),
            "note": self.note,
        }
        return pd.DataFrame([row])

    def confounds_dataframe(self) -> pd.DataFrame:
        """One row per confound: its own correlations with participation and with log gain."""
        import pandas as pd

        columns = ["confound", "rho_participation", "rho_gain"]
        return pd.DataFrame(list(self.confound_table), columns=columns)

    def plot(self) -> go.Figure:
        """Log gain against participation, one point per unit."""
        from tl_spectral.plots import coupling_figure

        return coupling_figure(self)


def amplification(
    J: Jacobian,
    kind: Gain = "column",
    operator: Operator = "J",
    *,
    scale: Scale | None = None,
) -> Float[Tensor, " d_model"]:
    """Log gain of every unit relative to the median of its layer: > 0 amplified, < 0 suppressed.

    ``"column"`` is the out-gain ``log ‖M e_i‖`` (what the block makes of a push on unit i),
    ``"row"`` the in-gain ``log ‖e_iᵀ M‖`` (how strongly unit i answers).

    Args:
        J: A block Jacobian, row = output.
        kind: Column or row norm.
        operator: ``"J"``, or ``"R"`` = J − I.
        scale: Standard deviation of each coordinate: natural units ``D⁻¹ M D``. A pair
            ``(input, output)`` gives ``D_out⁻¹ M D_in``.

    Returns:
        Natural logarithms, float64. −∞ for a norm of exactly 0; NaN for coordinates of zero
        deviation, which have no natural unit.

    Raises:
        InputError: If an option is unknown, or J or the scale is of the wrong shape, not finite, or
            negative.
    """
    if kind not in ("column", "row"):
        raise InputError(f'kind must be "column" or "row", got {kind!r}.')
    norms, measured = _norms(_operator(J, operator), kind, scale)
    return _relative(norms.log().masked_fill(~measured, math.nan))


def coupling(
    J: Jacobian | Sequence[Jacobian] | Vector,
    g: UnitGraph,
    com: Communities,
    *,
    gain: Gain = "column",
    operator: Operator = "J",
    scale: Scale | None = None,
    confounds: Sequence[str] | None = None,
    degree: int | None = None,
    dependence: Literal["community", "none"] = "community",
    rule: Rule = "quantile",
    quantile: float = 0.9,
    permutations: int = 2000,
    seed: int = 0,
) -> CouplingResult:
    """Measure the coupling of participation and gain in one layer.

    Ranks throughout. Confounds are regressed out of the ranks of both sides (partial Spearman);
    the correlation is averaged over the runs of the community detection, because one run is noisy.
    The regression is polynomial in the confounds' ranks: with the textbook's straight line, a gain
    that merely follows a norm gain which follows participation was called a coupling in 15–90 % of
    simulated layers of 576 units; with degree 5 in 3–7 %, nominally 5.

    Units of one community share inputs, so they may share gains as well; then they are fewer than
    they seem and a plain permutation test finds couplings in noise. ``dependence="community"``
    widens null and interval by the design effect of the consensus communities
    (:func:`tl_spectral.statistics.design_effect`), estimated on what the coupling leaves over.

    Args:
        J: A block Jacobian or ``[d, d]`` tensor; or several of one layer, whose log gains are
            averaged; or a ``[d]`` tensor of log gains made by :func:`amplification`.
        g: The unit graph.
        com: Its communities.
        gain: ``"column"`` or ``"row"``, see :func:`amplification`.
        operator: ``"J"`` or ``"R"``.
        scale: Natural units, see :func:`amplification`.
        confounds: Names out of ``norm_gain``, ``activation_std``, ``strength`` and ``massive``
            (root mean square above 10 medians); ``None`` takes all that are known, ``()`` none.
        degree: Degree of that polynomial; ``None`` takes 5, or less where fewer than 10 units
            per direction would remain; 1 is the textbook's partial Spearman.
        dependence: See above; ``"none"`` takes units as exchangeable.
        rule: Which units are bridges, for Cohen's d: see :func:`~tl_spectral.bridges.bridge_units`.
        quantile: Quantile of that rule.
        permutations: Number of permutations.
        seed: Their seed.

    Returns:
        The coupling, at unit and at community level. NaN always comes with a ``note``.

    Raises:
        InputError: If sizes differ, a confound is unknown or not available, or an option is out
            of range.
        ProvenanceError: If Jacobian, graph and communities are of different layers or models.
    """
    if gain not in ("column", "row"):
        raise InputError(f'gain must be "column" or "row", got {gain!r}.')
    if dependence not in ("community", "none"):
        raise InputError(f'dependence must be "community" or "none", got {dependence!r}.')
    if degree is not None and degree < 1:
        raise InputError(f"degree must be at least 1, got {degree}.")
    if permutations < 1:
        raise InputError(f"permutations must be at least 1, got {permutations}.")
    require_same_graph(g, com)
    measured = _measure(J, g, gain, operator, scale)
    bridges = bridge_units(g, com, rule=rule, quantile=quantile)
    log_gain = measured.log_gain.numpy()
    reasons = np.array(bridges.reason, dtype=object)
    reasons[(reasons == "") & np.isnan(log_gain)] = "no natural unit (zero deviation)"
    reasons[(reasons == "") & np.isinf(log_gain)] = "gain of exactly zero"
    used = reasons == ""
    if not used.any():
        raise InputError(
            f"No unit can be used: {dict(Counter(reasons.tolist()))}. Check the Jacobian and graph."
        )
    known = _confounds(g, measured.norm_gain)
    names, constant = _chosen(confounds, known, used)

    runs = com.run_labels.numpy()
    spread = participation(g.adjacency().maximum(0), runs)[:, used]
    y = log_gain[used]
    controls = np.stack([known[name][used] for name in names]) if names else np.empty((0, y.size))
    if degree is None:
        degree = max(1, min(MAX_DEGREE, y.size // (10 * max(len(names), 1))))
    basis = statistics.rank_basis(controls, degree)
    rng = np.random.default_rng(seed)
    unit = _unit_level(spread, y, basis, com.labels.numpy()[used], dependence, permutations, rng)
    bridge = bridges.is_bridge.numpy()[used]
    adjusted = y - basis @ (basis.T @ y)
    d, d_interval = statistics.cohens_d(adjusted[bridge], adjusted[~bridge])
    raw_d, _ = statistics.cohens_d(y[bridge], y[~bridge])
    group = _community_level(unit, com.labels.numpy(), used, bridges, measured, permutations, rng)
    notes = [unit.note, group.note]
    if math.isnan(d):
        notes.append("no Cohen's d: fewer than 2 bridge or other units, or the gain is constant")
    plain = statistics.rank_basis(np.empty((0, y.size)))
    provenance = dataclasses.replace(
        com.provenance,
        seed=seed,
        options={**com.provenance.options, "gain": gain, "operator": operator, "rule": rule},
    )
    return CouplingResult(
        unit_rho=unit.rho,
        unit_p=unit.p,
        unit_p_exchangeable=unit.p_exchangeable,
        unit_interval=unit.interval,
        raw_rho=_mean_rho(spread, y, plain),
        run_agreement=unit.run_agreement,
        cohens_d=d,
        cohens_interval=d_interval,
        raw_cohens_d=raw_d,
        community_rho=group.rho,
        community_p=group.p,
        projector_rho=group.projector_rho,
        n_communities=group.n,
        gain=measured.text,
        operator=operator,
        units="raw" if scale is None else "natural",
        confounds=names,
        degree=degree,
        confounds_missing=tuple(name for name in CONFOUNDS if name not in known),
        confounds_constant=constant,
        confound_table=tuple(
            (name, _mean_rho(spread, row, plain), _mean_rho(y[None], row, plain))
            for name, row in zip(names, controls, strict=True)
        ),
        n_units=int(used.sum()),
        n_effective=unit.n_effective,
        excluded=dict(sorted(Counter(reasons[~used].tolist()).items())),
        n_samples=measured.n_samples,
        participation=bridges.participation,
        log_gain=measured.log_gain,
        used=torch.from_numpy(used.astype(bool)),
        is_bridge=bridges.is_bridge,
        community=com.labels,
        layer=measured.layer,
        permutations=permutations,
        note="; ".join(note for note in notes if note),
        provenance=provenance,
    )


@dataclass(frozen=True, eq=False)
class _Unit:
    rho: float
    p: float
    p_exchangeable: float
    interval: tuple[float, float]
    run_agreement: float
    n_effective: float
    x: Float[np.ndarray, " used"]
    y: Float[np.ndarray, " used"]
    note: str = ""


def _unit_level(
    spread: Float[np.ndarray, "run used"],
    gains: Float[np.ndarray, " used"],
    basis: Float[np.ndarray, "used q"],
    labels: Int[np.ndarray, " used"],
    dependence: str,
    permutations: int,
    rng: np.random.Generator,
) -> _Unit:
    n = gains.size
    nothing = np.full(n, math.nan)
    nan = math.nan

    def impossible(note: str) -> _Unit:
        return _Unit(nan, nan, nan, (nan, nan), nan, nan, nothing, nothing, note)

    if n < MIN_UNITS:
        return impossible(f"no unit coupling: {n} usable units, {MIN_UNITS} needed")
    x, missing = _mean_direction(spread, basis)
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
    return _Unit(
        rho=rho,
        p=statistics.permutation_p(rho, null * math.sqrt(inflation)),
        p_exchangeable=statistics.permutation_p(rho, null),
        interval=statistics.fisher_interval(rho, n / inflation, basis.shape[1] - 1, agreement),
        run_agreement=agreement,
        n_effective=n / inflation,
        x=x,
        y=y,
    )


def _mean_direction(
    spread: Float[np.ndarray, "run used"], basis: Float[np.ndarray, "used q"]
) -> tuple[Float[np.ndarray, " used"], bool]:
    """Mean over runs of the unit residuals of participation; a run without variation counts as 0.

    The mean of the runs' correlations with y is the scalar product of y with this vector.
    """
    residuals = statistics.rank_residuals(spread, basis)
    empty = np.isnan(residuals).any(axis=1)
    residuals[empty] = 0
    return residuals.mean(axis=0), bool(empty.all())


def _mean_rho(
    rows: Float[np.ndarray, "run used"],
    y: Float[np.ndarray, " used"],
    basis: Float[np.ndarray, "used q"],
) -> float:
    if y.size < MIN_UNITS:
        return math.nan
    x, missing = _mean_direction(rows, basis)
    return math.nan if missing else float(x @ statistics.rank_residuals(y[None], basis)[0])


@dataclass(frozen=True, eq=False)
class _Group:
    rho: float
    p: float
    projector_rho: float
    n: int
    note: str = ""


def _community_level(
    unit: _Unit,
    labels: Int[np.ndarray, " unit"],
    used: Bool[np.ndarray, " unit"],
    bridges: BridgeUnits,
    measured: _Gains,
    permutations: int,
    rng: np.random.Generator,
) -> _Group:
    size = np.bincount(labels[used], minlength=1)
    counted = np.flatnonzero(size >= 2)
    n = counted.size
    if n < MIN_COMMUNITIES:
        note = f"no community coupling: {n} communities, {MIN_COMMUNITIES} needed"
        return _Group(math.nan, math.nan, math.nan, n, note)

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
        return _Group(math.nan, math.nan, projector, n, note)
    x, y = statistics.rank_residuals(np.stack([means(unit.x), means(unit.y)]), basis)
    if n <= _EXACT_COMMUNITIES:
        orders = np.array(list(itertools.permutations(range(n))))[1:]
        null = y[orders] @ x
    else:
        null = statistics.freedman_lane(x, y, basis, permutations, rng)
    rho = float(x @ y)
    return _Group(rho, statistics.permutation_p(rho, null), projector, n, note)


@dataclass(frozen=True, eq=False)
class _Gains:
    """Log gains of one layer, averaged over its Jacobians, and where they come from."""

    log_gain: Float[Tensor, " d"]
    squares: Float[Tensor, " d"] | None  # mean squared norm, for projectors
    norm_gain: Float[Tensor, " d"] | None
    n_samples: int
    layer: int | None
    text: str


def _measure(
    J: Jacobian | Sequence[Jacobian] | Vector,
    g: UnitGraph,
    gain: Gain,
    operator: Operator,
    scale: Scale | None,
) -> _Gains:
    jacobians = [J] if isinstance(J, Tensor | BlockJacobian) else list(J)
    if not jacobians:
        raise InputError("There is no Jacobian to take gains from.")
    layer, norm_gain, count = g.layer, g.norm_gain, 0
    for one in jacobians:
        d = len(one.matrix if isinstance(one, BlockJacobian) else one)
        if d != g.n_units:
            raise InputError(f"The Jacobian has d_model = {d}, the graph {g.n_units} units.")
        if not isinstance(one, BlockJacobian):
            count += 1
            continue
        count += one.n_samples
        if layer is None:
            layer = one.layer
        if one.layer != layer:
            raise ProvenanceError(f"Jacobian of layer {one.layer}, graph or others of {layer}.")
        one.provenance.require_same_model(g.provenance, "Jacobian and graph")
        if norm_gain is None and one.norm_gain is not None:
            norm_gain = one.norm_gain.detach().to("cpu", torch.float64)
    units = "" if scale is None else ", natural units"
    text = f"log {gain} norm of {operator} over the layer's median{units}"
    if isinstance(J, Tensor) and J.ndim == 1:
        log_gain = _relative(J.detach().to("cpu", torch.float64))
        return _Gains(log_gain, None, norm_gain, count, layer, text)
    logs, squares = [], []
    for one in jacobians:
        norms, measured = _norms(_operator(one, operator), gain, scale)
        logs.append(_relative(norms.log().masked_fill(~measured, math.nan)))
        squares.append(norms.square())
    return _Gains(
        torch.stack(logs).mean(0), torch.stack(squares).mean(0), norm_gain, count, layer, text
    )


def _operator(J: Jacobian, operator: Operator) -> Float[Tensor, "d d"]:
    if operator not in ("J", "R"):
        raise InputError(f'operator must be "J" or "R", got {operator!r}.')
    if isinstance(J, BlockJacobian):
        matrix = J.matrix if operator == "J" else J.update
        return _checked(matrix)
    matrix = _checked(J)
    if operator == "R":
        matrix = matrix - torch.eye(len(matrix), dtype=torch.float64)
    return matrix


def _checked(matrix: Tensor) -> Float[Tensor, "d d"]:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"A Jacobian must be [d_model, d_model]; got {tuple(matrix.shape)}.")
    matrix = matrix.detach().to("cpu", torch.float64)
    if not bool(matrix.isfinite().all()):
        raise InputError("The Jacobian has entries that are not finite; check the model's dtype.")
    return matrix


def _norms(
    matrix: Float[Tensor, "d d"], kind: Gain, scale: Scale | None
) -> tuple[Float[Tensor, " d"], Bool[Tensor, " d"]]:
    """Column or row norms, and which of them are measured (have a unit of length)."""
    measured = torch.ones(len(matrix), dtype=torch.bool)
    if scale is not None:
        source, target = scale if isinstance(scale, tuple) else (scale, scale)
        source, target = (_checked_scale(side, len(matrix)) for side in (source, target))
        reachable = target > 0
        matrix = matrix * source
        matrix = torch.where(reachable[:, None], matrix / target[:, None], 0.0)
        measured = source > 0 if kind == "column" else reachable
    return torch.linalg.vector_norm(matrix, dim=0 if kind == "column" else 1), measured


def _checked_scale(scale: Tensor, d: int) -> Float[Tensor, " d"]:
    scale = scale.detach().to("cpu", torch.float64)
    if scale.shape != (d,) or not bool((scale.isfinite() & (scale >= 0)).all()):
        raise InputError(
            f"scale must hold {d} finite non-negative deviations; got shape {tuple(scale.shape)}."
        )
    if not bool(scale.any()):
        raise InputError("All coordinates have zero deviation; there are no natural units.")
    return scale


def _relative(logs: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Logs minus their median over the coordinates that have one."""
    known = logs[logs.isfinite()]
    return logs - known.quantile(0.5) if known.numel() else logs


def _confounds(
    g: UnitGraph, norm_gain: Float[Tensor, " d"] | None
) -> dict[str, Float[np.ndarray, " d"]]:
    known = {"strength": g.strength}
    if norm_gain is not None:
        known["norm_gain"] = norm_gain.abs()
    if g.unit_std is not None and g.unit_mean is not None:
        known["activation_std"] = g.unit_std
        size = torch.hypot(g.unit_mean, g.unit_std)
        known["massive"] = (size > MASSIVE_RATIO * size.median()).double()
    return {name: known[name].numpy() for name in CONFOUNDS if name in known}


def _chosen(
    wanted: Sequence[str] | None,
    known: dict[str, Float[np.ndarray, " d"]],
    used: Bool[np.ndarray, " d"],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = tuple(known) if wanted is None else tuple(wanted)
    for name in names:
        if name not in CONFOUNDS:
            raise InputError(f"Confound {name!r} is not one of {CONFOUNDS}.")
        if name not in known:
            raise InputError(
                f"Confound {name!r} is not known here. It comes with a graph built from "
                "ResidualStates (norm_gain also with a BlockJacobian)."
            )
    varying = tuple(n for n in names if used.any() and np.ptp(known[n][used]) > 0)
    return varying, tuple(n for n in names if n not in varying)
