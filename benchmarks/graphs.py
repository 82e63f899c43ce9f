"""Communities, participation and the unit graph itself, beside the libraries that have them.

The graph is the strongest 5 % of the correlations of planted data. Every Louvain row starts from
the arrays of edges: building a library's graph is part of its time. The note is the modularity of
the partition, for all by the same formula.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.measure import Row, Work, measured


def rows(*, small: bool) -> list[Row]:
    """The table; ``small`` is a graph of 128 units."""
    n = 128 if small else 4096
    case = f"Louvain, {n} units, 5 % of pairs"
    table = [
        measured(
            prepare, table="graphs", case=case, method=method, ours=prepare is ours, bar=bar,
            n=n, **inputs,
        )
        for method, prepare, inputs, bar in (
            ("tl_spectral, louvain", ours, {"algorithm": "louvain"}, "≤ 1.1 × python-louvain"),
            ("tl_spectral, louvain-igraph", ours, {"algorithm": "louvain-igraph"}, "≥ 4 × faster"),
            ("networkx graph, python-louvain", python_louvain, {}, ""),
            ("networkx graph, networkx Louvain", networkx_louvain, {}, ""),
            ("igraph graph, multilevel", igraph_multilevel, {}, ""),
        )
    ]  # fmt: skip
    n = 64 if small else 1024
    case = f"participation, {n} units"
    for method, prepare, mine in (
        ("tl_spectral", participation, True),
        ("bctpy participation_coef", bct_participation, False),
    ):
        table.append(measured(prepare, table="graphs", case=case, method=method, ours=mine, n=n))
    n, samples = (128, 200) if small else (4096, 1000)
    table.append(
        measured(
            participation, table="graphs", case=f"participation, {n} units",
            method="tl_spectral", ours=True, bar="≤ 0.05 s", n=n,
        )
    )  # fmt: skip
    case = f"unit graph, {n} units, {samples} samples, top 10"
    for method, prepare, mine in (
        ("tl_spectral", unit_graph, True),
        ("numpy corrcoef and argsort", corrcoef, False),
    ):
        table.append(
            measured(
                prepare, table="graphs", case=case, method=method, ours=mine, n=n, samples=samples
            )
        )
    return table


def ours(n: int, algorithm: str) -> Work:
    """One run, as :func:`tl_spectral.communities` does it."""
    import tl_spectral as tls

    graph = _graph(n)

    def work() -> str:
        found = tls.communities(graph, method=algorithm, runs=1, nulls=0)
        return f"Q = {found.modularity:.4f}"

    return work


def python_louvain(n: int) -> Work:
    """``best_partition`` of a graph made with ``add_weighted_edges_from``."""
    import community

    graph = _graph(n)

    def work() -> str:
        partition = community.best_partition(_networkx(graph), random_state=0)
        return _quality(graph, [partition[unit] for unit in range(n)])

    return work


def networkx_louvain(n: int) -> Work:
    """``networkx.community.louvain_communities`` of the same graph."""
    import networkx as nx

    graph = _graph(n)

    def work() -> str:
        labels = np.empty(n, dtype=np.int64)
        for label, block in enumerate(nx.community.louvain_communities(_networkx(graph), seed=0)):
            labels[list(block)] = label
        return _quality(graph, labels)

    return work


def igraph_multilevel(n: int) -> Work:
    """``community_multilevel`` of a graph made from pairs."""
    import igraph

    graph = _graph(n)

    def work() -> str:
        pairs = list(zip(graph.row.tolist(), graph.col.tolist(), strict=True))
        g = igraph.Graph(n=n, edges=pairs)
        found = g.community_multilevel(weights=graph.weight.tolist())
        return _quality(graph, found.membership)

    return work


def participation(n: int) -> Work:
    """The participation coefficient of every unit."""
    from tl_spectral.bridges import participation as coefficient

    adjacency, labels = _everyone(n).adjacency(), np.arange(n)[None] // 3 % 8
    return lambda: f"mean {coefficient(adjacency, labels).mean():.6f}"


def bct_participation(n: int) -> Work:
    """The same from the Brain Connectivity Toolbox, dense."""
    import bct

    dense, labels = _everyone(n).adjacency().toarray(), np.arange(n) // 3 % 8 + 1
    return lambda: f"mean {bct.participation_coef(dense, labels).mean():.6f}"


def unit_graph(n: int, samples: int) -> Work:
    """Correlations and the ten strongest of every unit."""
    import tl_spectral as tls

    states = _states(n, samples)
    return lambda: f"{tls.unit_graph(states).n_edges} edges"


def corrcoef(n: int, samples: int) -> Work:
    """What one writes by hand."""
    states = _states(n, samples).double().numpy()

    def work() -> str:
        r = np.abs(np.corrcoef(states.T))
        np.fill_diagonal(r, 0)
        keep = np.zeros(r.shape, dtype=bool)
        np.put_along_axis(keep, np.argsort(-r, axis=1)[:, :10], True, axis=1)
        return f"{int(np.triu(keep | keep.T, 1).sum())} edges"

    return work


def _states(n: int, samples: int = 1000) -> torch.Tensor:
    rng = np.random.default_rng(0)
    shared = 0.7 * rng.standard_normal((samples, 8))[:, np.arange(n) % 8]
    return torch.from_numpy(shared + rng.standard_normal((samples, n)))


def _graph(n: int) -> Any:
    import tl_spectral as tls

    return tls.unit_graph(_states(n), density=0.05)


def _everyone(n: int) -> Any:
    import tl_spectral as tls

    return tls.unit_graph(_states(n), top_k=n // 40)  # nobody isolated


def _networkx(graph: Any) -> Any:
    import networkx as nx

    g: Any = nx.Graph()
    g.add_nodes_from(range(graph.n_units))
    columns = (graph.row.tolist(), graph.col.tolist(), graph.weight.tolist())
    g.add_weighted_edges_from(zip(*columns, strict=True))
    return g


def _quality(graph: Any, labels: Any) -> str:
    from tl_spectral.communities import modularity

    return f"Q = {modularity(graph.adjacency(), np.asarray(labels)[None])[0]:.4f}"
