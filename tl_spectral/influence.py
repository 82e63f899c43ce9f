"""Does a coupling rest on one community? Each is left out in turn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from tl_spectral import statistics
from tl_spectral.communities import Communities
from tl_spectral.coupling_levels import Dependence, Part, Prepared, UnitLevel, prepare, unit_level
from tl_spectral.gains import Gain, Jacobian, Operator, Scale, Vector
from tl_spectral.graph import UnitGraph
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(frozen=True, eq=False)
class CommunityInfluence(Result):
    """The unit coupling of one layer with each community left out.

    Attributes:
        unit_rho: The coupling with all communities, as in :class:`tl_spectral.CouplingResult`.
        unit_interval: Its 95 % interval.
        jackknife_se: Standard error by the delete-m jackknife over communities (Busing, Meijer &
            van der Leeden 1999): units of a community may depend on one another in any way.
        jackknife_interval: ``unit_rho ± t · jackknife_se`` with one degree of freedom less than
            there are communities, within [−1, 1].
        rows: One per community: ``community``, ``size`` (units that entered), and without it
            ``unit_rho``, ``low``, ``high``, ``p``; ``influence`` = the coupling minus this one, and
            ``flips``: the sign is another without it.
        layer: The layer.
        note: Why a figure is missing, or empty.
    """

    unit_rho: float
    unit_interval: tuple[float, float]
    jackknife_se: float
    jackknife_interval: tuple[float, float]
    rows: tuple[dict[str, Any], ...]
    layer: int | None
    note: str = ""

    @property
    def sign_holds(self) -> bool:
        """Whether the sign is the same whichever community is left out."""
        known = [row for row in self.rows if not math.isnan(row["unit_rho"])]
        return bool(known) and not any(row["flips"] for row in known)

    @property
    def most_influential(self) -> int:
        """The community whose absence changes the coupling most."""
        known = [row for row in self.rows if not math.isnan(row["influence"])]
        return max(known, key=lambda row: abs(row["influence"]))["community"] if known else -1

    def to_dataframe(self) -> pd.DataFrame:
        """One row per community, the largest first."""
        import pandas as pd

        return pd.DataFrame(list(self.rows)).assign(layer=self.layer)

    def plot(self, template: Any = None) -> go.Figure:
        """The coupling without each community, beside the whole."""
        from tl_spectral.plots.reliability import influence_figure

        return influence_figure(self, template=template)


def leave_one_community_out(
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
    permutations: int = 500,
    seed: int = 0,
) -> CommunityInfluence:
    """Repeat the coupling of one layer without the units of each community in turn.

    The graph stays whole, so every unit keeps its participation; only the correlation is taken over
    fewer units, with the confounds regressed out anew.

    Args:
        J: As in :func:`tl_spectral.coupling`, like all that follows.
        g: The unit graph.
        com: Its communities; those of the consensus are left out.
        gain: ``"column"`` or ``"row"``.
        operator: ``"J"`` or ``"R"``.
        scale: Natural units.
        confounds: Names of what is regressed out.
        degree: Degree of the polynomials of their ranks.
        dependence: Whether communities widen intervals.
        part: Positive or negative edges of a signed graph.
        permutations: Number of permutations behind each p.
        seed: Their seed.

    Returns:
        The coupling without each community, and the jackknife that follows.

    Raises:
        InputError: As :func:`tl_spectral.coupling` does.
        ProvenanceError: Likewise.
    """
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
    )
    rng = np.random.default_rng(seed)

    def over(kept: Any) -> UnitLevel:
        controls = ready.controls[:, kept]
        return unit_level(
            ready.spread[:, kept],
            ready.gain[kept],
            statistics.rank_basis(controls, ready.degree) if kept.any() else np.empty((0, 1)),
            ready.labels[kept],
            dependence,
            permutations,
            rng,
        )

    whole = over(np.ones(ready.gain.size, dtype=bool))
    rows = []
    for community in np.unique(ready.labels).tolist():
        kept = ready.labels != community
        without = over(kept)
        rows.append(
            {
                "community": community,
                "size": int((~kept).sum()),
                "unit_rho": without.rho,
                "low": without.interval[0],
                "high": without.interval[1],
                "p": without.p,
                "influence": whole.rho - without.rho,
                "flips": whole.rho * without.rho < 0,
                "note": without.note,
            }
        )
    error, interval, note = _jackknife(whole.rho, rows, ready)
    return CommunityInfluence(
        unit_rho=whole.rho,
        unit_interval=whole.interval,
        jackknife_se=error,
        jackknife_interval=interval,
        rows=tuple(rows),
        layer=ready.measured.layer,
        note="; ".join(text for text in (whole.note, note) if text),
        provenance=dataclasses.replace(com.provenance, seed=seed),
    )


def _jackknife(
    rho: float, rows: list[dict[str, Any]], ready: Prepared
) -> tuple[float, tuple[float, float], str]:
    """Standard error and interval from groups of unequal size."""
    without = np.array([row["unit_rho"] for row in rows])
    size = np.array([row["size"] for row in rows], dtype=float)
    groups = len(rows)
    if groups < 2 or np.isnan(without).any() or math.isnan(rho):
        note = "no jackknife: there is no coupling without one of the communities"
        return math.nan, (math.nan, math.nan), note
    share = ready.gain.size / size  # h_j = n / m_j
    centre = groups * rho - ((1 - 1 / share) * without).sum()
    pseudo = share * rho - (share - 1) * without
    error = math.sqrt((np.square(pseudo - centre) / (share - 1)).sum() / groups)
    half = float(stats.t.ppf(0.975, groups - 1)) * error
    return error, (max(-1.0, rho - half), min(1.0, rho + half)), ""
