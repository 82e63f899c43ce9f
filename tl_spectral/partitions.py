"""Algorithms that cut a weighted graph into communities, and the graphs they are judged against."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import sparse

from tl_spectral.errors import InputError

_SWEEPS = 10  # how often each edge is offered for a swap, per end
_IGRAPH = threading.Lock()  # igraph has one random number generator for the process


def _neighbours(graph: Any, node: int) -> Any:
    return graph._adj[node]  # the plain dict instead of a view of it: a fifth of Louvain's time


def _itself(graph: Any, as_view: bool = False) -> Any:
    return graph  # python-louvain copies a graph that it never changes


_PlainGraph: Any = type("_PlainGraph", (nx.Graph,), {"__getitem__": _neighbours, "copy": _itself})


@dataclass(frozen=True, eq=False)
class Edges:
    """Edges among the ``n`` units that have any, numbered 0 … n−1 in index order."""

    n: int
    row: Int[np.ndarray, " edge"]
    col: Int[np.ndarray, " edge"]
    weight: Float[np.ndarray, " edge"]

    def adjacency(self) -> sparse.csr_array:
        """The symmetric weighted adjacency matrix."""
        upper = sparse.csr_array((self.weight, (self.row, self.col)), shape=(self.n, self.n))
        adjacency: sparse.csr_array = upper + upper.T
        return adjacency

    def to_networkx(self) -> Any:
        """For networkx' and python-louvain's algorithms; not to be changed."""
        graph = _PlainGraph()
        graph.add_nodes_from(range(self.n))  # Louvain's result depends on the order of nodes
        adjacency = graph._adj  # twice as fast as add_weighted_edges_from
        row, col, weight = self.row.tolist(), self.col.tolist(), self.weight.tolist()
        for i, j, w in zip(row, col, weight, strict=True):
            adjacency[i][j] = adjacency[j][i] = {"weight": w}
        return graph

    def to_igraph(self, keep: Bool[np.ndarray, " edge"] | None = None) -> Any:
        """For igraph's and leidenalg's algorithms: ``|weight|`` of the edges to keep."""
        try:
            import igraph
            import leidenalg  # noqa: F401 - both or neither: they are one extra
        except ImportError as error:
            raise InputError(
                'method="leiden" and "louvain-igraph" need the packages of an extra: '
                'pip install "tl-spectral[leiden]". Or use method="louvain" on a graph with '
                'sign="abs" or "positive".'
            ) from error
        keep = np.ones(len(self.weight), dtype=bool) if keep is None else keep
        pairs = zip(self.row[keep].tolist(), self.col[keep].tolist(), strict=True)
        graph = igraph.Graph(n=self.n, edges=list(pairs))  # from an array takes twice as long
        graph.es["weight"] = np.abs(self.weight[keep]).tolist()
        return graph


def louvain(edges: Edges, resolution: float, seeds: list[int]) -> list[Int[np.ndarray, " unit"]]:
    """python-louvain at γ = 1, networkx' implementation else (see :func:`communities`)."""
    from community import best_partition

    graph = edges.to_networkx()
    found = []
    for seed in seeds:
        labels = np.empty(edges.n, dtype=np.int64)
        if resolution == 1:
            partition = best_partition(graph, random_state=seed)
            labels[list(partition)] = list(partition.values())
        else:
            blocks = nx.community.louvain_communities(graph, resolution=resolution, seed=seed)
            for label, block in enumerate(blocks):
                labels[list(block)] = label
        found.append(labels)
    return found


def multilevel(edges: Edges, resolution: float, seeds: list[int]) -> list[Int[np.ndarray, " unit"]]:
    """Louvain as igraph has it, in C.

    igraph draws from one generator for the whole process and does not tell which; it is replaced
    for these runs, and by igraph's default (Python's ``random``, untouched) after them.
    """
    graph = edges.to_igraph()
    import igraph

    found = []
    with _IGRAPH:
        try:
            for seed in seeds:
                igraph.set_random_number_generator(random.Random(seed))
                clusters = graph.community_multilevel(weights="weight", resolution=resolution)
                found.append(np.array(clusters.membership))
        finally:
            igraph.set_random_number_generator(random)
    return found


def leiden(edges: Edges, resolution: float, seeds: list[int]) -> list[Int[np.ndarray, " unit"]]:
    """Constant Potts model on positive edges, minus the same at γ = 0 on negative ones."""
    positive = edges.to_igraph(edges.weight > 0)
    negative = edges.to_igraph(edges.weight < 0)
    import leidenalg

    gamma = resolution * sum(positive.es["weight"]) / math.comb(edges.n, 2)
    found = []
    for seed in seeds:
        layers = [
            leidenalg.CPMVertexPartition(graph, weights="weight", resolution_parameter=strength)
            for graph, strength in ((positive, gamma), (negative, 0.0))
        ]
        optimiser = leidenalg.Optimiser()
        optimiser.set_rng_seed(seed % 2**31)
        optimiser.optimise_partition_multiplex(layers, layer_weights=[1, -1])
        found.append(np.array(layers[0].membership))
    return found


PARTITIONS: dict[str, Callable[[Edges, float, list[int]], list[Int[np.ndarray, " unit"]]]] = {
    "louvain": louvain,
    "louvain-igraph": multilevel,
    "leiden": leiden,
}
"""Method to function of edges, resolution and seeds; one partition per seed."""


def rewired(edges: Edges, rng: np.random.Generator) -> Edges:
    """A graph of the same degrees with shuffled weights (Maslov & Sneppen 2002).

    Every round pairs the edges at random and swaps one end of each pair; swaps that would make a
    loop or a double edge are left out. All pairs of a round are swapped at once.
    """
    n, row, col = edges.n, edges.row.copy(), edges.col.copy()
    half = len(row) // 2
    for _ in range(2 * _SWEEPS):  # an edge is one of two in its pair
        order = rng.permutation(len(row))
        one, two = order[:half], order[half : 2 * half]
        flipped = rng.random(half) < 0.5
        a, b = row[one], col[one]
        c, d = np.where(flipped, col[two], row[two]), np.where(flipped, row[two], col[two])
        first, second = _key(a, d, n), _key(c, b, n)
        proposed = np.concatenate([first, second])
        taken = np.isin(proposed, _key(row, col, n))
        values, inverse, counts = np.unique(proposed, return_inverse=True, return_counts=True)
        bad = taken | (counts[inverse] > 1) | (values // n == values % n)[inverse]
        good = ~(bad[:half] | bad[half:])
        row[one[good]], col[one[good]] = first[good] // n, first[good] % n
        row[two[good]], col[two[good]] = second[good] // n, second[good] % n
    order = np.lexsort((col, row))
    return Edges(n, row[order], col[order], rng.permutation(edges.weight))


def _key(i: Int[np.ndarray, " m"], j: Int[np.ndarray, " m"], n: int) -> Int[np.ndarray, " m"]:
    return np.asarray(np.minimum(i, j) * n + np.maximum(i, j))
