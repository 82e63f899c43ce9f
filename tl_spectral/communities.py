"""Communities of the unit graph, and what one run does not tell: how stable, how surprising.

Louvain depends on its random order, so it runs many times and the result keeps every run. Its
modularity is positive on pure noise too, so it is set against rewired graphs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy import sparse
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.graph import UnitGraph
from tl_spectral.partitions import PARTITIONS, Edges, rewired
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

Method = Literal["louvain", "louvain-igraph", "leiden"]
NULL = "degree-preserving rewiring, weights shuffled"


@dataclass(frozen=True, eq=False)
class Communities(Result):
    """A partition of the units, its stability over runs and its modularity against a null.

    Attributes:
        labels: Community of each unit: 0 is the largest; −1 for units without edges. It is the
            medoid of the runs: the partition with the highest mean adjusted Rand index to the
            others, hence one that the algorithm really found.
        run_labels: The partition of every run, labelled likewise.
        modularity: Newman–Girvan modularity Q at ``resolution`` (for signed graphs the signed Q of
            Gómez, Jensen & Arenas 2009), mean over the runs.
        modularity_std: Its standard deviation over the runs.
        null_mean: Mean Q of the same method on null graphs, one run each.
        null_std: Standard deviation of Q over the null graphs.
        z_score: ``(modularity − null_mean) / null_std``; NaN without nulls, see ``note``.
        stability_ari: Mean adjusted Rand index over all pairs of runs (1 = always the same).
        stability_nmi: Mean normalised mutual information (arithmetic) over all pairs of runs.
        method: ``"louvain"``, ``"louvain-igraph"`` or ``"leiden"``.
        resolution: The resolution γ.
        n_nulls: Number of null graphs.
        null: How they were made.
        layer: Layer of the graph.
        note: Why a figure is missing, or empty.
    """

    labels: Int[Tensor, " unit"]
    run_labels: Int[Tensor, "run unit"]
    modularity: float
    modularity_std: float
    null_mean: float
    null_std: float
    z_score: float
    stability_ari: float
    stability_nmi: float
    method: str
    resolution: float
    n_nulls: int
    null: str = NULL
    layer: int | None = None
    note: str = ""

    @property
    def n_units(self) -> int:
        """Number of units, isolated ones included."""
        return self.labels.numel()

    @property
    def stability(self) -> float:
        """Mean pairwise adjusted Rand index of the runs: 1 if all agree, 0 as if by chance."""
        return self.stability_ari

    @property
    def n_communities(self) -> int:
        """Number of communities of the consensus partition."""
        return int(self.labels.max()) + 1

    @property
    def n_isolated(self) -> int:
        """Number of units without edges, which belong to no community."""
        return int((self.labels < 0).sum())

    @property
    def sizes(self) -> Int[Tensor, " community"]:
        """Number of units of each community, in descending order."""
        return torch.bincount(self.labels[self.labels >= 0])

    def to_dataframe(self) -> pd.DataFrame:
        """One row per unit: ``unit``, ``community``, and how often its runs agree with it.

        ``agreement`` is the share of runs in which a unit shares its community with those it
        shares it with in the consensus, averaged over them (NaN for isolated units and for
        communities of one).
        """
        import pandas as pd

        labels = self.labels.numpy()
        together = labels[:, None] == labels
        np.fill_diagonal(together, False)
        together[labels < 0] = False
        same = np.zeros(together.shape)
        for run in self.run_labels.numpy():
            same += run[:, None] == run
        peers = together.sum(axis=1)
        shared = (same * together).sum(axis=1) / len(self.run_labels)
        agreement = np.divide(shared, peers, out=np.full(len(labels), np.nan), where=peers > 0)
        return pd.DataFrame(
            {"unit": np.arange(len(labels)), "community": labels, "agreement": agreement}
        )

    def plot(self, graph: UnitGraph) -> go.Figure:
        """The adjacency matrix of ``graph`` ordered by community."""
        return graph.plot(self.labels)


def communities(
    g: UnitGraph,
    *,
    method: Method = "louvain",
    resolution: float = 1.0,
    runs: int = 20,
    seed: int = 0,
    nulls: int = 10,
) -> Communities:
    """Find the communities of a unit graph.

    ``"louvain"`` is python-louvain. Its release 0.16 climbs the modularity at γ but stops by a
    different quality whenever γ ≠ 1 (at γ = ½ it gives up after the first level), so for γ ≠ 1
    networkx's implementation of the same algorithm runs instead. γ is the γ of Reichardt &
    Bornholdt 2006 in both: larger means more and smaller communities.

    ``"louvain-igraph"`` (extra ``leiden``) is the same algorithm in C: the modularities are alike,
    the partitions of a seed are not, and it is several times faster. igraph has one random number
    generator for the process; after the runs it is igraph's default again, whatever it was.

    ``"leiden"`` is leidenalg's signed recipe: the constant Potts model on the positive edges minus
    the same at γ = 0 on the absolute negative ones. Potts resolution is a density, so here
    ``resolution`` is in units of the mean positive weight over all pairs of units with edges.

    Nulls keep every unit's degree (edges swapped, ``10 × edges`` attempts) and shuffle the weights,
    signs included.

    Args:
        g: The graph.
        method: ``"louvain"`` or ``"louvain-igraph"`` (need ``sign="abs"`` or ``"positive"``), or
            ``"leiden"``.
        resolution: γ > 0.
        runs: Runs with different random orders.
        seed: Seed of the runs and of the nulls.
        nulls: Null graphs for the z-score, whose own relative error is ``1/sqrt(2 (nulls − 1))``;
            0 for none.

    Returns:
        Partitions, modularity, stability and z-score.

    Raises:
        InputError: If the graph is signed (Louvain), has no edges, an option is out of range, or
            the ``leiden`` extra is not installed.
    """
    _check(g, method, resolution, runs, nulls)
    seeds = np.random.SeedSequence(seed).generate_state(runs + nulls + 1)
    rng = np.random.default_rng(int(seeds[-1]))
    partition = PARTITIONS[method]
    adjacency = g.adjacency()
    linked = np.flatnonzero(~g.isolated.numpy())
    edges = Edges(
        len(linked),
        np.searchsorted(linked, g.row.numpy()),
        np.searchsorted(linked, g.col.numpy()),
        g.weight.numpy(),
    )
    found = partition(edges, resolution, [int(s) for s in seeds[:runs]])
    run_labels = np.full((runs, g.n_units), -1)
    run_labels[:, linked] = [_by_size(labels) for labels in found]
    quality = modularity(adjacency, run_labels, resolution)
    rand, information = agreement(run_labels[:, linked])
    null = np.empty(nulls)
    for index in range(nulls):
        surrogate = rewired(edges, rng)
        labels = partition(surrogate, resolution, [int(seeds[runs + index])])
        null[index] = modularity(surrogate.adjacency(), np.array(labels), resolution)[0]
    mean, deviation, z, note = _against(float(quality.mean()), null)
    medoid = int(rand.sum(axis=1).round(12).argmax())
    options = {"method": method, "resolution": resolution, "runs": runs, "nulls": nulls}
    return Communities(
        labels=torch.from_numpy(run_labels[medoid]),
        run_labels=torch.from_numpy(run_labels),
        modularity=float(quality.mean()),
        modularity_std=float(quality.std(ddof=1)) if runs > 1 else 0.0,
        null_mean=mean,
        null_std=deviation,
        z_score=z,
        stability_ari=_mean_of_pairs(rand),
        stability_nmi=_mean_of_pairs(information),
        method=method,
        resolution=float(resolution),
        n_nulls=nulls,
        layer=g.layer,
        note=note,
        provenance=dataclasses.replace(
            g.provenance, seed=seed, options={**g.provenance.options, "communities": options}
        ),
    )


def modularity(
    adjacency: sparse.csr_array, labels: Int[np.ndarray, "run unit"], resolution: float = 1.0
) -> Float[np.ndarray, " run"]:
    """Modularity of partitions of a weighted, possibly signed graph.

    Unsigned: ``Q = Σ_c [w_c/w − γ (s_c/2w)²]``. Signed: ``(w⁺Q⁺ − w⁻Q⁻)/(w⁺ + w⁻)`` with the two
    parts taken separately (Gómez, Jensen & Arenas 2009).

    Args:
        adjacency: Symmetric, without diagonal.
        labels: One partition per row; units labelled −1 must have no edges.
        resolution: γ.
    """
    signed = np.zeros(len(labels))
    weight = 0.0
    for sign in (1, -1):
        part = (adjacency * sign).maximum(0)
        strength = part.sum(axis=1)
        total = strength.sum()  # 2w
        if total == 0:
            continue
        entries = part.tocoo()
        start, end = entries.coords
        for run, row in enumerate(labels):
            within = entries.data[row[start] == row[end]].sum()
            expected = np.square(np.bincount(row[row >= 0], strength[row >= 0])).sum()
            signed[run] += sign * (within - resolution * expected / total)
        weight += total
    return signed / weight


def agreement(
    labels: Int[np.ndarray, "run unit"],
) -> tuple[Float[np.ndarray, "run run"], Float[np.ndarray, "run run"]]:
    """Adjusted Rand index and normalised mutual information of all pairs of partitions.

    Hubert & Arabie 1985; NMI with the arithmetic mean of the entropies. Two partitions that both
    consist of one block (or of singletons) agree entirely: 1.

    Args:
        labels: Non-negative labels, one partition per row.
    """
    runs, n = labels.shape
    counts = labels.max(axis=1) + 1
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    columns = (labels + starts[:, None]).ravel()
    rows = np.tile(np.arange(n), runs)
    onehot = sparse.csr_array((np.ones(runs * n), (rows, columns)), shape=(n, int(counts.sum())))
    table = (onehot.T @ onehot).toarray()  # all contingency tables at once
    size = table.diagonal()

    def per_pair(values: Float[np.ndarray, "c c"]) -> Float[np.ndarray, "run run"]:
        summed: np.ndarray = np.add.reduceat(np.add.reduceat(values, starts, 0), starts, 1)
        return summed

    joint = per_pair(table * (table - 1) / 2)
    alone = joint.diagonal()
    expected = np.outer(alone, alone) / math.comb(n, 2) if n > 1 else np.zeros((runs, runs))
    best = (alone[:, None] + alone) / 2
    rand = _ratio(joint - expected, best - expected)
    share = table / n
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    log_size = np.log(size / n, out=np.zeros_like(size), where=size > 0)
    mutual = per_pair(share * (logs - log_size[:, None] - log_size))
    entropy = mutual.diagonal()
    return rand, _ratio(mutual, (entropy[:, None] + entropy) / 2)


def _ratio(
    above: Float[np.ndarray, "r r"], below: Float[np.ndarray, "r r"]
) -> Float[np.ndarray, "r r"]:
    """Quotient with 0/0 = 1, the value for two identical trivial partitions."""
    defined = np.abs(below) > 1e-12
    return np.asarray(np.divide(above, below, out=np.ones_like(above), where=defined))


def _mean_of_pairs(values: Float[np.ndarray, "r r"]) -> float:
    runs = len(values)
    return float(values[np.triu_indices(runs, 1)].mean()) if runs > 1 else 1.0


def _against(quality: float, null: Float[np.ndarray, " nulls"]) -> tuple[float, float, float, str]:
    if null.size < 2:
        return math.nan, math.nan, math.nan, "no z-score: it needs at least 2 null graphs"
    mean, deviation = float(null.mean()), float(null.std(ddof=1))
    if deviation <= 1e-12:
        return mean, deviation, math.nan, "no z-score: all null graphs have the same modularity"
    return mean, deviation, (quality - mean) / deviation, ""


def _by_size(labels: Int[np.ndarray, " unit"]) -> Int[np.ndarray, " unit"]:
    """Number communities by descending size; of equals, the one with the lowest unit first."""
    _, first, inverse, counts = np.unique(
        labels, return_index=True, return_inverse=True, return_counts=True
    )
    rank = np.empty(len(counts), dtype=np.int64)
    rank[np.lexsort((first, -counts))] = np.arange(len(counts))
    return rank[inverse]


def _check(g: UnitGraph, method: str, resolution: float, runs: int, nulls: int) -> None:
    if method not in get_args(Method):
        raise InputError(f"method={method!r} is not one of {get_args(Method)}.")
    if not 0 < resolution < math.inf:
        raise InputError(f"resolution must be positive, got {resolution}.")
    if runs < 1 or nulls < 0:
        raise InputError(f"runs must be at least 1 and nulls at least 0, got {runs} and {nulls}.")
    if g.n_edges == 0:
        raise InputError("The graph has no edges; loosen its threshold or raise its density.")
    if method != "leiden" and (g.sign == "signed" or bool((g.weight < 0).any())):
        raise InputError(
            'Louvain has no meaning for negative weights. Build the graph with sign="abs" or '
            'sign="positive", or use method="leiden".'
        )
