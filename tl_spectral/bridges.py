"""Bridge units: coordinates whose edges spread over several communities."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import sparse
from torch import Tensor

from tl_spectral.communities import Communities
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.graph import UnitGraph
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Rule = Literal["quantile", "connector"]
CONNECTOR = 0.62
HUB = 2.5
_NON_HUBS = (
    (0.05, "ultra-peripheral"),
    (0.62, "peripheral"),
    (0.80, "connector"),
    (1.0, "kinless"),
)
_HUBS = ((0.30, "provincial hub"), (0.75, "connector hub"), (1.0, "kinless hub"))


@dataclass(frozen=True, eq=False)
class BridgeUnits(Result):
    """Where each unit sits between communities: the z–P plane of Guimerà & Amaral 2005.

    Attributes:
        participation: ``P_i = 1 − Σ_c (s_ic / s_i)²``, mean over the runs of the community
            detection; NaN where there is nothing to spread, see ``reason``. For signed graphs over
            the positive edges.
        participation_std: Its standard deviation over the runs.
        participation_negative: The same over the absolute negative edges (Rubinov & Sporns 2011);
            ``None`` for graphs without signs.
        within_z: ``(s_i,own − mean) / deviation`` over the units of the own community, mean over
            the runs; 0 in a community whose units are all alike.
        is_bridge: The bridge units by ``rule``.
        role: One of Guimerà & Amaral's seven roles per unit; ``""`` where P is NaN.
        reason: Why P is NaN, or ``""``.
        strength: Sum of ``|weight|`` of each unit.
        community: Consensus community, −1 for isolated units.
        n_communities: C of the consensus: P cannot exceed ``1 − 1/C``.
        rule: ``"quantile"`` or ``"connector"``.
        threshold: Smallest P of a bridge by the rule.
        layer: Layer of the graph.
    """

    participation: Float[Tensor, " unit"]
    participation_std: Float[Tensor, " unit"]
    participation_negative: Float[Tensor, " unit"] | None
    within_z: Float[Tensor, " unit"]
    is_bridge: Bool[Tensor, " unit"]
    role: tuple[str, ...]
    reason: tuple[str, ...]
    strength: Float[Tensor, " unit"]
    community: Int[Tensor, " unit"]
    n_communities: int
    rule: str
    threshold: float
    layer: int | None = None

    @property
    def n_bridges(self) -> int:
        """Number of bridge units."""
        return int(self.is_bridge.sum())

    def to_dataframe(self) -> pd.DataFrame:
        """One row per unit."""
        import pandas as pd

        frame = pd.DataFrame(
            {
                "unit": np.arange(len(self.role)),
                "community": self.community.numpy(),
                "participation": self.participation.numpy(),
                "participation_sd": self.participation_std.numpy(),
                "within_z": self.within_z.numpy(),
                "is_bridge": self.is_bridge.numpy(),
                "role": self.role,
                "strength": self.strength.numpy(),
                "reason": self.reason,
            }
        )
        if self.participation_negative is not None:
            frame["participation_negative"] = self.participation_negative.numpy()
        return frame

    def top(self, k: int = 10) -> pd.DataFrame:
        """The ``k`` units with the highest participation; of equals the lower index first."""
        frame = self.to_dataframe().dropna(subset=["participation"])
        ordered = frame.sort_values("participation", ascending=False, kind="stable")
        return ordered.head(k).reset_index(drop=True)

    def plot(self) -> go.Figure:
        """The z–P cartography with the bridge units marked."""
        from tl_spectral.plots import cartography_figure

        return cartography_figure(self)


def participation(
    adjacency: sparse.csr_array, labels: Int[np.ndarray, "run unit"]
) -> Float[np.ndarray, "run unit"]:
    """Participation coefficient of every unit under each partition.

    ``P_i = 1 − Σ_c (s_ic / s_i)²`` with ``s_ic`` the weight from unit i into community c
    (Guimerà & Amaral 2005 for weights); NaN for units without weight.

    Args:
        adjacency: Symmetric, non-negative, without diagonal.
        labels: One partition per row; units labelled −1 belong nowhere and must have no edges.
    """
    into, starts = _into_communities(adjacency, labels)
    strength = np.add.reduceat(into, starts, axis=1)  # of these very terms: one community gives 0
    squares = np.add.reduceat(np.square(into), starts, axis=1)
    return np.asarray(1 - squares / np.where(strength > 0, strength, np.nan) ** 2).T


def within_degree_z(
    adjacency: sparse.csr_array, labels: Int[np.ndarray, "run unit"]
) -> Float[np.ndarray, "run unit"]:
    """z-score of each unit's weight into its own community, among the units of that community.

    The deviation is that of the population (ddof = 0), as in the Brain Connectivity Toolbox; where
    it vanishes z is 0. NaN for units labelled −1.
    """
    into, starts = _into_communities(adjacency, labels)
    z = np.full(labels.shape, np.nan)
    for run, row in enumerate(labels):
        member = row >= 0
        label = row[member]
        own = into[np.flatnonzero(member), starts[run] + label]
        size = np.bincount(label)
        mean = np.bincount(label, own) / size
        apart = own - mean[label]
        deviation = np.sqrt(np.bincount(label, np.square(apart)) / size)[label]
        alike = deviation <= 1e-12 * np.maximum(1, np.abs(mean[label]))
        z[run, member] = np.where(alike, 0.0, apart / np.where(alike, 1.0, deviation))
    return z


def _into_communities(
    adjacency: sparse.csr_array, labels: Int[np.ndarray, "run unit"]
) -> tuple[Float[np.ndarray, "unit column"], Int[np.ndarray, " run"]]:
    """Weight of each unit into each community of each run, and where the runs start."""
    counts = labels.max(axis=1) + 1
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    run, unit = np.nonzero(labels >= 0)
    onehot = np.zeros((labels.shape[1], int(counts.sum())))
    onehot[unit, starts[run] + labels[run, unit]] = 1
    return adjacency @ onehot, starts


def bridge_units(
    g: UnitGraph, com: Communities, *, rule: Rule = "quantile", quantile: float = 0.9
) -> BridgeUnits:
    """Score every unit by how its edges spread over communities, and name the bridges.

    Args:
        g: The graph.
        com: Its communities.
        rule: ``"quantile"``: the units with P at or above the quantile of all P, and P > 0.
            ``"connector"``: P > 0.62, the connectors of Guimerà & Amaral.
        quantile: The quantile, in (0, 1).

    Returns:
        Participation, within-community z, roles and bridges.

    Raises:
        InputError: If the sizes differ or an option is out of range.
        ProvenanceError: If graph and communities are of different layers or models.
    """
    if rule not in get_args(Rule):
        raise InputError(f"rule={rule!r} is not one of {get_args(Rule)}.")
    if not 0 < quantile < 1:
        raise InputError(f"quantile must lie in (0, 1), got {quantile}.")
    require_same_graph(g, com)
    adjacency = g.adjacency()
    runs = com.run_labels.numpy()
    positive = adjacency.maximum(0)
    spread = participation(positive, runs)
    mean, negative = spread.mean(axis=0), None
    if g.sign == "signed":
        negative = torch.from_numpy(participation((-adjacency).maximum(0), runs).mean(axis=0))
    z = within_degree_z(positive, runs).mean(axis=0)
    scored = ~np.isnan(mean)
    if rule == "connector":
        threshold = CONNECTOR
        bridge = scored & (mean > CONNECTOR)
    else:
        threshold = float(np.quantile(mean[scored], quantile))
        bridge = scored & (mean >= threshold) & (mean > 0)
    return BridgeUnits(
        participation=torch.from_numpy(mean),
        participation_std=torch.from_numpy(spread.std(axis=0)),
        participation_negative=negative,
        within_z=torch.from_numpy(z),
        is_bridge=torch.from_numpy(bridge),
        role=tuple(_role(p, score) for p, score in zip(mean, z, strict=True)),
        reason=_reasons(g, scored),
        strength=g.strength,
        community=com.labels,
        n_communities=com.n_communities,
        rule=rule if rule == "connector" else f"quantile={quantile:g}",
        threshold=threshold,
        layer=g.layer,
        provenance=dataclasses.replace(
            com.provenance, options={**com.provenance.options, "bridges": rule}
        ),
    )


def require_same_graph(g: UnitGraph, com: Communities) -> None:
    """Raise unless the communities can be those of the graph."""
    if g.n_units != com.n_units:
        raise InputError(f"The graph has {g.n_units} units, the communities {com.n_units}.")
    if g.layer != com.layer:
        raise ProvenanceError(f"Graph of layer {g.layer}, communities of layer {com.layer}.")
    g.provenance.require_same_model(com.provenance, "Graph and communities")


def _role(p: float, z: float) -> str:
    if np.isnan(p):
        return ""
    table = _HUBS if z >= HUB else _NON_HUBS
    return next(name for bound, name in table if p <= bound)


def _reasons(g: UnitGraph, scored: Bool[np.ndarray, " unit"]) -> tuple[str, ...]:
    reasons = np.full(g.n_units, "", dtype=object)
    reasons[~scored] = "no positive edge"
    reasons[g.isolated.numpy()] = "no edge survives the sparsification"
    reasons[list(g.constant_units)] = "does not vary over the samples"
    return tuple(reasons.tolist())
