"""Communities: known graphs, oracles, planted partitions, nulls and determinism."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from tl_spectral.communities import (
    Communities,
    _by_size,
    agreement,
    communities,
    modularity,
)
from tl_spectral.errors import InputError
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.partitions import Edges, rewired


def as_unit_graph(matrix: np.ndarray, sign: str = "abs") -> UnitGraph:
    row, col = np.nonzero(np.triu(matrix, 1))
    return UnitGraph(
        n_units=len(matrix),
        row=torch.from_numpy(row),
        col=torch.from_numpy(col),
        weight=torch.from_numpy(matrix[row, col].astype(float)),
        strength=torch.from_numpy(np.abs(matrix).sum(1).astype(float)),
        edges="pearson",
        sign=sign,
        rule="given",
    )


def planted_states(
    n_units: int = 60, n_groups: int = 4, strength: float = 1.0, seed: int = 0
) -> tuple[torch.Tensor, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(n_units) % n_groups
    shared = rng.normal(size=(300, n_groups))
    states = strength * shared[:, labels] + rng.normal(size=(300, n_units))
    return torch.from_numpy(states), labels


@pytest.fixture(scope="module")
def karate() -> UnitGraph:
    return as_unit_graph(nx.to_numpy_array(nx.karate_club_graph(), weight=None))


def test_karate_club_reaches_its_known_modularity(karate: UnitGraph) -> None:
    found = communities(karate, runs=40, nulls=20)
    best = modularity(karate.adjacency(), found.run_labels.numpy()).max()
    assert best == pytest.approx(0.4198, abs=1e-4)  # the optimum (Brandes et al. 2008)
    assert found.modularity == pytest.approx(0.415, abs=0.006)
    assert found.n_communities == 4
    assert found.z_score > 3


@pytest.mark.parametrize("resolution", [0.5, 1.0, 2.5])
def test_modularity_is_that_of_networkx(resolution: float) -> None:
    rng = np.random.default_rng(1)
    matrix = np.triu(rng.random((30, 30)) * (rng.random((30, 30)) < 0.3), 1)
    graph = as_unit_graph(matrix + matrix.T)
    labels = rng.integers(0, 5, size=(2, 30))
    ours = modularity(graph.adjacency(), labels, resolution)
    for row, value in zip(labels, ours, strict=True):
        blocks = [set(np.flatnonzero(row == label).tolist()) for label in range(5)]
        oracle = nx.community.modularity(graph.to_networkx(), blocks, resolution=resolution)
        assert value == pytest.approx(oracle)


def test_signed_modularity_is_that_of_its_definition() -> None:
    rng = np.random.default_rng(2)
    matrix = rng.normal(size=(12, 12))
    matrix = np.triu(matrix, 1) + np.triu(matrix, 1).T
    labels = rng.integers(0, 3, size=12)
    plus, minus = np.maximum(matrix, 0), np.maximum(-matrix, 0)
    total = 0.0
    for i, j in itertools.product(range(12), repeat=2):
        if labels[i] == labels[j]:
            total += matrix[i, j]
            total -= plus[i].sum() * plus[j].sum() / plus.sum()
            total += minus[i].sum() * minus[j].sum() / minus.sum()
    graph = as_unit_graph(matrix, "signed")
    value = modularity(graph.adjacency(), labels[None])[0]
    assert value == pytest.approx(total / (plus.sum() + minus.sum()))


def test_agreement_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(3)
    labels = np.stack([rng.integers(0, c, 40) for c in (2, 3, 7, 1)])
    labels = np.stack([_by_size(row) for row in labels])
    rand, information = agreement(labels)
    for i, j in itertools.product(range(4), repeat=2):
        assert rand[i, j] == pytest.approx(metrics.adjusted_rand_score(labels[i], labels[j]))
        oracle = metrics.normalized_mutual_info_score(labels[i], labels[j])
        assert information[i, j] == pytest.approx(oracle, abs=1e-9)


def test_planted_communities_are_found_stable_and_surprising() -> None:
    states, truth = planted_states()
    found = communities(unit_graph(states, top_k=5), runs=5, nulls=5)
    assert agreement(np.stack([found.labels.numpy(), truth]))[0][0, 1] == 1
    assert found.stability == found.stability_ari == found.stability_nmi == 1
    assert found.z_score > 20
    assert found.sizes.tolist() == [15] * 4
    assert bool((found.to_dataframe()["agreement"] == 1).all())


def test_noise_has_communities_but_no_surprise() -> None:
    scores = [
        communities(unit_graph(planted_states(80, strength=0.0, seed=seed)[0], top_k=5), runs=3)
        for seed in range(4)
    ]
    assert min(found.modularity for found in scores) > 0.25  # the trap
    assert max(abs(found.z_score) for found in scores) < 5
    assert max(found.stability_ari for found in scores) < 0.6


def test_same_seed_same_result_and_global_state_untouched() -> None:
    graph = unit_graph(planted_states(strength=0.3)[0], top_k=5)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = (communities(graph, runs=4, nulls=3, seed=7) for _ in range(2))
    assert torch.equal(first.run_labels, second.run_labels)
    assert first.null_mean == second.null_mean
    assert not torch.equal(first.run_labels, communities(graph, runs=4, nulls=3, seed=8).run_labels)
    assert bool((before == np.random.get_state()[1]).all())  # noqa: NPY002


def test_consensus_is_the_run_most_like_the_others() -> None:
    graph = unit_graph(planted_states(strength=0.25)[0], top_k=5)
    found = communities(graph, runs=8, nulls=0)
    runs = found.run_labels.numpy()
    likeness = agreement(runs)[0].sum(axis=1)
    assert torch.equal(found.labels, found.run_labels[int(likeness.argmax())])
    off = agreement(runs)[0][np.triu_indices(8, 1)]
    assert found.stability_ari == pytest.approx(off.mean())
    for row in runs:
        sizes = np.bincount(row)
        assert (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize("resolution", [0.5, 2.0])
def test_resolution_is_climbed_as_well_as_by_networkx(resolution: float) -> None:
    graph = unit_graph(planted_states(80, strength=0.0)[0], top_k=5)
    found = communities(graph, resolution=resolution, runs=5, nulls=0)
    reference = [
        nx.community.modularity(graph.to_networkx(), blocks, resolution=resolution)
        for seed in range(5)
        for blocks in [
            nx.community.louvain_communities(graph.to_networkx(), resolution=resolution, seed=seed)
        ]
    ]
    assert found.modularity == pytest.approx(np.mean(reference), abs=0.02)


def test_larger_resolution_means_more_communities() -> None:
    graph = unit_graph(planted_states(80, strength=0.3)[0], top_k=5)
    counts = [
        communities(graph, resolution=resolution, runs=3, nulls=0).n_communities
        for resolution in (0.3, 1.0, 3.0)
    ]
    assert counts[0] < counts[1] < counts[2]


def test_rewiring_keeps_degrees_and_weights_and_forgets_the_rest() -> None:
    states, truth = planted_states(100, strength=2.0)
    graph = unit_graph(states, top_k=6)
    edges = Edges(100, graph.row.numpy(), graph.col.numpy(), graph.weight.numpy())
    null = rewired(edges, np.random.default_rng(0))
    assert (null.row < null.col).all()
    pairs = set(zip(null.row.tolist(), null.col.tolist(), strict=True))
    assert len(pairs) == graph.n_edges
    degree = np.bincount(np.concatenate([null.row, null.col]), minlength=100)
    np.testing.assert_array_equal(degree, graph.degree.numpy())
    np.testing.assert_array_equal(np.sort(null.weight), np.sort(edges.weight))
    inside = (truth[edges.row] == truth[edges.col]).mean()
    assert inside > 0.99
    assert (truth[null.row] == truth[null.col]).mean() == pytest.approx(0.25, abs=0.06)
    again = rewired(edges, np.random.default_rng(0))
    np.testing.assert_array_equal(again.row, null.row)


def test_rewiring_visits_all_graphs_of_the_degrees_evenly() -> None:
    """Four units of degree one have three matchings."""
    edges = Edges(4, np.array([0, 2]), np.array([1, 3]), np.ones(2))
    rng = np.random.default_rng(0)
    partners = [int(null.col[0]) for null in (rewired(edges, rng) for _ in range(300))]
    share = np.bincount(partners, minlength=4)[1:] / 300
    np.testing.assert_allclose(share, 1 / 3, atol=0.08)


def test_isolated_units_belong_nowhere() -> None:
    states, _ = planted_states()
    states[:, 5] = 1.0
    states[:, 0] = 2.0
    found = communities(unit_graph(states, top_k=5), runs=3, nulls=2)
    assert (found.labels < 0).nonzero().flatten().tolist() == [0, 5]
    assert found.n_isolated == 2
    assert bool((found.run_labels[:, [0, 5]] == -1).all())
    assert found.n_communities == 4
    assert math.isnan(found.to_dataframe()["agreement"][5])


def test_without_nulls_there_is_a_reason_instead_of_a_score(karate: UnitGraph) -> None:
    found = communities(karate, runs=1, nulls=0)
    assert math.isnan(found.z_score)
    assert "null" in found.note
    assert found.modularity_std == 0
    ring = as_unit_graph(np.ones((4, 4)) - np.eye(4))  # one graph only has these degrees
    assert "same modularity" in communities(ring, runs=2, nulls=3).note


def test_result_survives_the_disk(karate: UnitGraph, tmp_path: Path) -> None:
    found = communities(karate, runs=3, nulls=2)
    loaded = Communities.load(found.save(tmp_path / "communities"))
    assert torch.equal(loaded.run_labels, found.run_labels)
    assert loaded.z_score == found.z_score
    assert loaded.provenance.seed == 0


def test_refusals(karate: UnitGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = unit_graph(planted_states()[0], top_k=5, sign="signed")
    with pytest.raises(InputError, match='sign="positive", or use method="leiden"'):
        communities(signed)
    empty = dataclasses.replace(
        karate, row=karate.row[:0], col=karate.col[:0], weight=karate.weight[:0]
    )
    with pytest.raises(InputError, match="no edges"):
        communities(empty)
    with pytest.raises(InputError, match="resolution"):
        communities(karate, resolution=0.0)
    with pytest.raises(InputError, match="runs"):
        communities(karate, runs=0)
    monkeypatch.setitem(sys.modules, "leidenalg", None)
    for method in ("leiden", "louvain-igraph"):
        with pytest.raises(InputError, match=r"tl-spectral\[leiden\]"):
            communities(karate, method=method)
    with pytest.raises(InputError, match="no meaning for negative weights"):
        communities(signed, method="louvain-igraph")


def weighted_graphs() -> list[UnitGraph]:
    """Planted groups strong and weak, noise, sparse and dense, and the karate club."""
    graphs = [as_unit_graph(nx.to_numpy_array(nx.karate_club_graph()))]
    for strength, options in ((1.0, {"top_k": 5}), (0.4, {"top_k": 8}), (0.0, {"density": 0.1}),
                              (0.6, {"density": 0.5})):  # fmt: skip
        states, _ = planted_states(200, 7, strength=strength, seed=int(10 * strength))
        graphs.append(unit_graph(states, **options))
    return graphs


@pytest.mark.parametrize("resolution", [1.0, 2.0])
def test_igraph_finds_partitions_as_good_as_those_of_python_louvain(resolution: float) -> None:
    pytest.importorskip("igraph")
    gains = []
    for graph in weighted_graphs():
        options = {"resolution": resolution, "runs": 10, "nulls": 0}
        quick = communities(graph, method="louvain-igraph", **options)
        slow = communities(graph, **options)
        gains.append(quick.modularity - slow.modularity)
        assert quick.modularity >= slow.modularity - 2 * slow.modularity_std - 1e-9
        assert quick.method == "louvain-igraph"
    assert np.mean(gains) > -1e-3, gains


def test_igraph_runs_follow_their_seed_and_not_the_global_generator() -> None:
    igraph = pytest.importorskip("igraph")
    graph = unit_graph(planted_states(strength=0.3)[0], top_k=5)
    options = {"method": "louvain-igraph", "runs": 4, "nulls": 2}
    before = random.getstate()
    random.seed(1)
    first = communities(graph, seed=7, **options)
    random.seed(2)
    second, other = (communities(graph, seed=seed, **options) for seed in (7, 8))
    assert torch.equal(first.run_labels, second.run_labels)
    assert first.null_mean == second.null_mean
    assert not torch.equal(first.run_labels, other.run_labels)
    drawn = []
    for _ in range(2):  # igraph draws from Python's generator again
        random.seed(3)
        drawn.append(igraph.Graph.Erdos_Renyi(n=30, p=0.2).get_edgelist())
    assert drawn[0] == drawn[1]
    random.setstate(before)


def test_igraph_takes_the_whole_pipeline() -> None:
    pytest.importorskip("igraph")
    states, truth = planted_states()
    found = communities(unit_graph(states, top_k=5), method="louvain-igraph", runs=5, nulls=5)
    assert agreement(np.stack([found.labels.numpy(), truth]))[0][0, 1] == 1
    assert found.z_score > 20


def test_leiden_separates_what_only_signs_tell_apart() -> None:
    """Two blocks joined by strong negative correlations: |r| sees one block, signs see two."""
    pytest.importorskip("leidenalg")
    rng = np.random.default_rng(0)
    side = np.repeat([1.0, -1.0], 20)
    states = torch.from_numpy(rng.normal(size=(300, 1)) * side + rng.normal(size=(300, 40)))
    signed = unit_graph(states, density=1.0, sign="signed")
    found = communities(signed, method="leiden", runs=4, nulls=4)
    truth = (side < 0).astype(int)
    assert agreement(np.stack([found.labels.numpy(), truth]))[0][0, 1] == 1
    assert found.z_score > 10
    again = communities(signed, method="leiden", runs=4, nulls=4)
    assert torch.equal(again.run_labels, found.run_labels)
