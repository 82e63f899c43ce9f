"""Does a unit's place between communities predict how the block amplifies it?

Per layer: partial rank correlation of participation and log gain, with the plain explanations
(norm gains, variance, strength, massive activations) regressed out. Across layers: does that
correlation follow the operator's rotational-to-symmetric character?
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_spectral import statistics
from tl_spectral.bridges import Rule
from tl_spectral.communities import Communities
from tl_spectral.coupling_levels import (
    NO_PROJECTOR,
    Dependence,
    Part,
    community_level,
    mean_rho,
    prepare,
    unit_level,
)
from tl_spectral.errors import InputError
from tl_spectral.gains import CONFOUNDS, Gain, Jacobian, Operator, Scale, Vector, amplification
from tl_spectral.graph import UnitGraph
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

__all__ = ["NO_PROJECTOR", "CouplingResult", "amplification", "coupling"]


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

    @property
    def detectable_rho(self) -> float:
        """Smallest ``|unit_rho|`` that a test at 5 % finds in this layer in 80 % of the cases.

        :func:`tl_spectral.statistics.detectable_correlation` at ``n_effective`` units; NaN where
        there is no coupling.
        """
        ranked = [name for name in self.confounds if name != "massive"]  # that one is 0 or 1
        directions = self.degree * len(ranked) + ("massive" in self.confounds)
        return statistics.detectable_correlation(
            self.n_effective, directions, ceiling=self.run_agreement
        )

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
            "detectable_rho": self.detectable_rho,
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
    dependence: Dependence = "community",
    part: Part | str = "positive",
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
        part: Of a signed graph, participation over its positive edges or over its absolute negative
            ones (Rubinov & Sporns 2011); other graphs have positive edges only.
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
    if dependence not in ("community", "none"):
        raise InputError(f'dependence must be "community" or "none", got {dependence!r}.')
    if permutations < 1:
        raise InputError(f"permutations must be at least 1, got {permutations}.")
    ready = prepare(
        J,
        g,
        com,
        gain=gain,
        operator=operator,
        scale=scale,
        confounds=confounds,
        degree=degree,
        part=part,
        rule=rule,
        quantile=quantile,
    )
    measured, bridges, y, basis = ready.measured, ready.bridges, ready.gain, ready.basis
    rng = np.random.default_rng(seed)
    unit = unit_level(ready.spread, y, basis, ready.labels, dependence, permutations, rng)
    bridge = bridges.is_bridge.numpy()[ready.used]
    adjusted = y - basis @ (basis.T @ y)
    d, d_interval = statistics.cohens_d(adjusted[bridge], adjusted[~bridge])
    raw_d, _ = statistics.cohens_d(y[bridge], y[~bridge])
    group = community_level(
        unit, com.labels.numpy(), ready.used, bridges, measured, permutations, rng
    )
    notes = [unit.note, group.note]
    if math.isnan(d):
        notes.append("no Cohen's d: fewer than 2 bridge or other units, or the gain is constant")
    plain = statistics.rank_basis(np.empty((0, y.size)))
    options = {"gain": gain, "operator": operator, "rule": rule, "part": part}
    provenance = dataclasses.replace(
        com.provenance, seed=seed, options={**com.provenance.options, **options}
    )
    return CouplingResult(
        unit_rho=unit.rho,
        unit_p=unit.p,
        unit_p_exchangeable=unit.p_exchangeable,
        unit_interval=unit.interval,
        raw_rho=mean_rho(ready.spread, y, plain),
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
        confounds=ready.names,
        degree=ready.degree,
        confounds_missing=tuple(name for name in CONFOUNDS if name not in ready.known),
        confounds_constant=ready.constant,
        confound_table=tuple(
            (name, mean_rho(ready.spread, row, plain), mean_rho(y[None], row, plain))
            for name, row in zip(ready.names, ready.controls, strict=True)
        ),
        n_units=int(ready.used.sum()),
        n_effective=unit.n_effective,
        excluded=ready.reasons,
        n_samples=measured.n_samples,
        participation=bridges.participation,
        log_gain=measured.log_gain,
        used=torch.from_numpy(ready.used),
        is_bridge=bridges.is_bridge,
        community=com.labels,
        layer=measured.layer,
        permutations=permutations,
        note="; ".join(note for note in notes if note),
        provenance=provenance,
    )
