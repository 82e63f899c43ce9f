"""How far a partition of the units can be trusted: over random orders, and over the samples."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from tl_spectral.communities import Method, agreement, communities
from tl_spectral.errors import InputError
from tl_spectral.graph import Edges, Hook, Sign, unit_graph
from tl_spectral.results import Result
from tl_spectral.samples import States, count, method_for, one_layer, take, told_before

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

MEASURES = ("ari", "nmi", "vi")
SOURCES = ("seeds", "bootstrap")


@dataclass(frozen=True, eq=False)
class PartitionStability(Result):
    """Agreement of partitions that differ in chance alone.

    Attributes:
        rows: One per source and measure: ``source`` (``"seeds"``: pairs of runs on the same graph;
            ``"bootstrap"``: the graph of resampled texts against the consensus of all texts),
            ``measure`` (``ari``: adjusted Rand index; ``nmi``: normalised mutual information,
            arithmetic mean; ``vi``: variation of information in nats), ``value`` (mean over pairs),
            ``low`` and ``high`` (the middle 95 % of the pairs), ``chance`` (mean with the units of
            one side shuffled) and ``n_pairs``.
        pairs: One per pair of partitions: ``source``, ``first``, ``second``, the measures, and
            ``n_units`` with edges in both.
        n_communities: Communities of the consensus.
        vi_largest: The largest variation of information, log of the number of units.
        layer: The layer.
        note: Why a figure is missing, or empty.
    """

    rows: tuple[dict[str, Any], ...]
    pairs: tuple[dict[str, Any], ...]
    n_communities: int
    vi_largest: float
    layer: int | None
    note: str = ""

    def to_dataframe(self) -> pd.DataFrame:
        """One row per source and measure."""
        import pandas as pd

        return pd.DataFrame(list(self.rows)).assign(layer=self.layer)

    def value(self, source: str, measure: str = "ari") -> float:
        """Mean of one measure.

        Raises:
            InputError: If there is no such source or measure.
        """
        for row in self.rows:
            if (row["source"], row["measure"]) == (source, measure):
                found: float = row["value"]
                return found
        raise InputError(
            f"There is no {measure!r} over {source!r}; sources are {SOURCES}, measures {MEASURES}."
        )

    def plot(self, template: Any = None) -> go.Figure:
        """Agreement over seeds and over bootstrap samples, beside chance."""
        from tl_spectral.plots.reliability import stability_figure

        return stability_figure(self, template=template)


def variation_of_information(first: Int[np.ndarray, " n"], second: Int[np.ndarray, " n"]) -> float:
    """``H(X|Y) + H(Y|X)`` of two partitions, in nats: 0 if equal, at most ``log n`` (Meilă 2007).

    Args:
        first: Non-negative labels.
        second: Likewise, of the same units.
    """
    joint = np.zeros((first.max() + 1, second.max() + 1))
    np.add.at(joint, (first, second), 1 / first.size)

    def entropy(share: np.ndarray) -> float:
        share = share[share > 0]
        return float(-(share * np.log(share)).sum())

    return max(0.0, 2 * entropy(joint) - entropy(joint.sum(0)) - entropy(joint.sum(1)))


def partition_stability(
    states: States,
    layer: int | None = None,
    *,
    edges: Edges = "pearson",
    top_k: int | None = None,
    sign: Sign = "abs",
    hook: Hook = "resid_pre",
    method: Method | None = None,
    resolution: float = 1.0,
    runs: int = 10,
    bootstraps: int = 20,
    seed: int = 0,
) -> PartitionStability:
    """Compare partitions over seeds of the algorithm and over bootstrap samples of the texts.

    Seeds say how much the algorithm decides by chance; bootstrap samples also how much the graph
    itself would change with other texts. Both are set against chance: the same partitions with the
    units of one side shuffled, which has the sizes of the communities and nothing else in common.

    Args:
        states: Residual states, or a tensor ``[sample, d_model]``.
        layer: Which layer of the states.
        edges: As in :func:`tl_spectral.unit_graph`, like the next three.
        top_k: Strongest edges kept per unit.
        sign: Sign policy.
        hook: Which residual states.
        method: As in :func:`tl_spectral.communities`; by default Leiden for signed graphs, Louvain
            for others.
        resolution: γ.
        runs: Runs on the graph of all texts.
        bootstraps: Bootstrap samples of the texts, one run each; 0 for none.
        seed: Seed of runs and samples.

    Returns:
        Adjusted Rand index, normalised mutual information and variation of information.

    Raises:
        InputError: If there are fewer than 2 runs or a negative number of samples, or as
            :func:`tl_spectral.unit_graph` and :func:`tl_spectral.communities` do.
    """
    if runs < 2 or bootstraps < 0:
        raise InputError(
            f"Stability needs at least 2 runs and no negative number of bootstraps, got {runs} and "
            f"{bootstraps}."
        )
    states = one_layer(states, layer)
    graph = unit_graph(states, layer=layer, edges=edges, top_k=top_k, sign=sign, hook=hook)
    method = method or method_for(graph)  # type: ignore[assignment]
    options: dict[str, Any] = {"method": method, "resolution": resolution, "nulls": 0}
    whole = communities(graph, runs=runs, seed=seed, **options)
    rng = np.random.default_rng(seed)
    labels = whole.run_labels.numpy()
    pairs = [_pair("seeds", i, j, labels[i], labels[j], rng) for i in range(runs) for j in range(i)]
    with told_before():
        for index in range(bootstraps):
            rows = rng.integers(0, count(states), count(states))
            other = unit_graph(
                take(states, rows), layer=layer, edges=edges, top_k=top_k, sign=sign, hook=hook
            )
            found = communities(other, runs=1, seed=int(rng.integers(2**31)), **options)
            consensus = whole.labels.numpy()
            pairs.append(_pair("bootstrap", index, -1, found.labels.numpy(), consensus, rng))
    return PartitionStability(
        rows=tuple(_summary(pairs)),
        pairs=tuple(pairs),
        n_communities=whole.n_communities,
        vi_largest=math.log(int((whole.labels >= 0).sum())),
        layer=graph.layer,
        note="" if bootstraps else "no bootstrap samples were asked for",
        provenance=dataclasses.replace(whole.provenance, seed=seed),
    )


def _pair(
    source: str,
    i: int,
    j: int,
    first: Int[np.ndarray, " unit"],
    second: Int[np.ndarray, " unit"],
    rng: np.random.Generator,
) -> dict[str, Any]:
    both = (first >= 0) & (second >= 0)
    first, second = (np.unique(side[both], return_inverse=True)[1] for side in (first, second))
    row: dict[str, Any] = {"source": source, "first": i, "second": j, "n_units": int(both.sum())}
    for prefix, other in (("", second), ("chance_", rng.permutation(second))):
        rand, information = agreement(np.stack([first, other]))
        values = (rand[0, 1], information[0, 1], variation_of_information(first, other))
        row |= {prefix + name: float(v) for name, v in zip(MEASURES, values, strict=True)}
    return row


def _summary(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for source in SOURCES:
        of = [pair for pair in pairs if pair["source"] == source]
        for measure in MEASURES if of else ():
            values = np.array([pair[measure] for pair in of])
            low, high = np.quantile(values, [0.025, 0.975])
            rows.append(
                {
                    "source": source,
                    "measure": measure,
                    "value": float(values.mean()),
                    "low": float(low),
                    "high": float(high),
                    "chance": float(np.mean([pair[f"chance_{measure}"] for pair in of])),
                    "n_pairs": len(of),
                }
            )
    return rows
