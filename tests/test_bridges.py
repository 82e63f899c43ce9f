"""Bridge units: closed forms, the Brain Connectivity Toolbox, planted bridges, invariance."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from test_communities import as_unit_graph, planted_states

from tl_spectral.bridges import BridgeUnits, bridge_units, participation, within_degree_z
from tl_spectral.communities import Communities, communities
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.results import Provenance


def partition(labels: np.ndarray, *others: np.ndarray) -> Communities:
    return Communities(
        labels=torch.from_numpy(labels),
        run_labels=torch.from_numpy(np.stack([labels, *others])),
        modularity=0.0,
        modularity_std=0.0,
        null_mean=math.nan,
        null_std=math.nan,
        z_score=math.nan,
        stability_ari=1.0,
        stability_nmi=1.0,
        method="given",
        resolution=1.0,
        n_nulls=0,
    )


@pytest.fixture
def matrix() -> np.ndarray:
    rng = np.random.default_rng(0)
    upper = np.triu(rng.random((24, 24)) * (rng.random((24, 24)) < 0.4), 1)
    return np.asarray(upper + upper.T)


@pytest.fixture
def labels() -> np.ndarray:
    return np.arange(24) % 3


def two_cliques_and_a_bridge() -> tuple[UnitGraph, np.ndarray]:
    """Units 0-5 and 6-11 form cliques; unit 12 has four edges into each, and is of the first."""
    adjacency = np.zeros((13, 13))
    adjacency[:6, :6] = adjacency[6:12, 6:12] = 1
    adjacency[12, [0, 1, 2, 3, 6, 7, 8, 9]] = 1
    adjacency = np.maximum(adjacency, adjacency.T)
    np.fill_diagonal(adjacency, 0)
    return as_unit_graph(adjacency), np.array([0] * 6 + [1] * 6 + [0])


def test_closed_form() -> None:
    graph, labels = two_cliques_and_a_bridge()
    bridges = bridge_units(graph, partition(labels))
    spread = bridges.participation
    assert spread[12] == pytest.approx(0.5)  # the most that two communities allow
    assert spread[4] == spread[11] == 0
    assert spread[6] == pytest.approx(1 - (25 + 1) / 36)
    assert bridges.top(1)["unit"].tolist() == [12]
    assert bridges.n_communities == 2


def test_participation_is_that_of_the_toolbox(matrix: np.ndarray, labels: np.ndarray) -> None:
    bct = pytest.importorskip("bct")
    ours = participation(sparse.csr_array(matrix), labels[None])[0]
    np.testing.assert_allclose(ours, bct.participation_coef(matrix, labels + 1), atol=1e-12)


def test_within_z_is_that_of_the_toolbox(matrix: np.ndarray, labels: np.ndarray) -> None:
    bct = pytest.importorskip("bct")
    ours = within_degree_z(sparse.csr_array(matrix), labels[None])[0]
    np.testing.assert_allclose(ours, bct.module_degree_zscore(matrix, labels + 1), atol=1e-12)


def test_signed_participation_is_that_of_the_toolbox(labels: np.ndarray) -> None:
    bct = pytest.importorskip("bct")
    rng = np.random.default_rng(4)
    signed = np.triu(rng.normal(size=(24, 24)), 1)
    signed = signed + signed.T
    bridges = bridge_units(as_unit_graph(signed, "signed"), partition(labels))
    positive, negative = bct.participation_coef_sign(signed, labels + 1)
    np.testing.assert_allclose(bridges.participation.numpy(), positive, atol=1e-12)
    assert bridges.participation_negative is not None
    np.testing.assert_allclose(bridges.participation_negative.numpy(), negative, atol=1e-12)
    assert "participation_negative" in bridges.to_dataframe()


def test_mean_and_deviation_over_runs(matrix: np.ndarray, labels: np.ndarray) -> None:
    other = (np.arange(24) // 6) % 4
    graph = as_unit_graph(matrix)
    both = bridge_units(graph, partition(labels, other))
    first, second = (bridge_units(graph, partition(each)) for each in (labels, other))
    pair = torch.stack([first.participation, second.participation])
    torch.testing.assert_close(both.participation, pair.mean(0))
    torch.testing.assert_close(both.participation_std, pair.std(0, unbiased=False))
    torch.testing.assert_close(both.within_z, (first.within_z + second.within_z) / 2)
    assert bool((first.participation_std == 0).all())


def test_participation_stays_below_its_bound(matrix: np.ndarray) -> None:
    for count in (1, 2, 3, 8):
        spread = participation(sparse.csr_array(matrix), (np.arange(24) % count)[None])
        assert spread.max() <= 1 - 1 / count + 1e-12
    assert (participation(sparse.csr_array(matrix), np.zeros((1, 24), dtype=int)) == 0).all()


def test_one_community_has_no_bridges(matrix: np.ndarray) -> None:
    bridges = bridge_units(as_unit_graph(matrix), partition(np.zeros(24, dtype=int)))
    assert bridges.n_bridges == 0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_scale_of_weights_does_not_matter(
    matrix: np.ndarray, labels: np.ndarray, scale: float
) -> None:
    reference = bridge_units(as_unit_graph(matrix), partition(labels))
    scaled = bridge_units(as_unit_graph(matrix * scale), partition(labels))
    torch.testing.assert_close(scaled.participation, reference.participation)
    torch.testing.assert_close(scaled.within_z, reference.within_z)


def test_relabelling_units_relabels_the_scores(matrix: np.ndarray, labels: np.ndarray) -> None:
    order = np.random.default_rng(1).permutation(24)
    reference = bridge_units(as_unit_graph(matrix), partition(labels))
    moved = bridge_units(as_unit_graph(matrix[np.ix_(order, order)]), partition(labels[order]))
    torch.testing.assert_close(moved.participation, reference.participation[order])
    torch.testing.assert_close(moved.within_z, reference.within_z[order])
    assert moved.role == tuple(reference.role[i] for i in order)


def test_rules(matrix: np.ndarray, labels: np.ndarray) -> None:
    graph, com = as_unit_graph(matrix), partition(labels)
    top = bridge_units(graph, com, quantile=0.75)
    assert top.n_bridges == 6
    assert top.participation[top.is_bridge].min() > top.participation[~top.is_bridge].max()
    connectors = bridge_units(graph, com, rule="connector")
    assert torch.equal(connectors.is_bridge, connectors.participation > 0.62)
    assert (top.rule, connectors.rule) == ("quantile=0.75", "connector")
    assert connectors.threshold == 0.62


def test_roles_of_the_cartography() -> None:
    """A hub inside one community, a hub across, a connector and plain units."""
    n, size = 60, 20
    adjacency = np.zeros((n, n))
    labels = np.repeat([0, 1, 2], size)
    for start in (0, 20, 40):  # rings
        for i in range(size):
            adjacency[start + i, start + (i + 1) % size] = 1
    adjacency[0, 1:20] = 1
    adjacency[20, 21:40] = 1
    adjacency[20, 0:8] = 1
    adjacency[20, 41:49] = 1
    adjacency[50, [5, 30, 31]] = 1
    adjacency = np.maximum(adjacency, adjacency.T)
    bridges = bridge_units(as_unit_graph(adjacency), partition(labels))
    assert bridges.role[0] == "provincial hub"
    assert bridges.role[20] == "connector hub"
    assert bridges.role[50] == "connector"
    assert bridges.role[15] == "ultra-peripheral"


def test_isolated_units_have_a_reason_instead_of_a_score(tmp_path: Path) -> None:
    states, _ = planted_states()
    states[:, 3] = 0.5
    graph = unit_graph(states, top_k=5)
    bridges = bridge_units(graph, communities(graph, runs=3, nulls=0))
    assert math.isnan(bridges.participation[3])
    assert math.isnan(bridges.within_z[3])
    assert bridges.reason[3] == "does not vary over the samples"
    assert bridges.role[3] == ""
    assert not bridges.is_bridge[3]
    assert int(bridges.participation.isnan().sum()) == 1
    assert 3 not in bridges.top(60)["unit"].tolist()
    loaded = BridgeUnits.load(bridges.save(tmp_path / "bridges"))
    assert loaded.role == bridges.role
    assert torch.equal(loaded.is_bridge, bridges.is_bridge)


def test_planted_bridges_are_found() -> None:
    """Units that mix the signals of several groups come out on top."""
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 4
    shared = rng.normal(size=(600, 4))
    states = shared[:, labels].copy()
    planted = np.arange(6)
    for unit, pair in enumerate(itertools.combinations(range(4), 2)):
        states[:, unit] = shared[:, list(pair)].sum(axis=1) / math.sqrt(2)
    states += 0.4 * rng.normal(size=states.shape)
    graph = unit_graph(torch.from_numpy(states), threshold=0.3)
    bridges = bridge_units(graph, communities(graph, runs=5, nulls=0))
    assert set(bridges.top(6)["unit"]) == set(planted.tolist())


def test_refusals(matrix: np.ndarray, labels: np.ndarray) -> None:
    graph, com = as_unit_graph(matrix), partition(labels)
    with pytest.raises(InputError, match="quantile"):
        bridge_units(graph, com, quantile=1.0)
    with pytest.raises(InputError, match="24 units, the communities 23"):
        bridge_units(graph, partition(labels[:23]))
    with pytest.raises(ProvenanceError, match="layer 2"):
        bridge_units(dataclasses.replace(graph, layer=2), com)
    with pytest.raises(ProvenanceError, match="different models"):
        bridge_units(
            dataclasses.replace(graph, provenance=Provenance(model="a")),
            dataclasses.replace(com, provenance=Provenance(model="b")),
        )
