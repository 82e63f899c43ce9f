"""The unit graph: closed forms, oracles, sparsification, invariance and refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tl_spectral.capture import ResidualStates
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.jacobian.result import BlockJacobian
from tl_spectral.results import Provenance

SAMPLES, UNITS = 60, 20


@pytest.fixture
def states() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(SAMPLES, 4, generator=generator)
    mixing = torch.randn(4, UNITS, generator=generator)
    noise = torch.randn(SAMPLES, UNITS, generator=generator)
    return shared @ mixing + noise + torch.randn(UNITS, generator=generator)


def dense(graph: UnitGraph) -> np.ndarray:
    return np.asarray(graph.adjacency().toarray())


def off_diagonal(matrix: np.ndarray) -> np.ndarray:
    return matrix - np.diag(np.diag(matrix))


def cosine(x: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(x, axis=0)
    return np.asarray(x.T @ x / np.outer(norms, norms))


@pytest.mark.parametrize(
    ("edges", "oracle"),
    [
        ("pearson", lambda x: np.corrcoef(x.T)),
        ("spearman", lambda x: stats.spearmanr(x).statistic),
        ("cosine", cosine),
    ],
)
def test_weights_are_those_of_numpy_and_scipy(states: Tensor, edges: Any, oracle: Any) -> None:
    graph = unit_graph(states, edges=edges, density=1.0, sign="signed")
    expected = off_diagonal(oracle(states.double().numpy()))
    np.testing.assert_allclose(dense(graph), expected, atol=1e-12)
    assert graph.n_edges == math.comb(UNITS, 2)
    assert graph.density == 1


def test_partial_correlation_is_the_regression_of_the_rest(states: Tensor) -> None:
    """With many samples shrinkage vanishes and OLS residuals give the same number."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40_000, 4, generator=generator) @ torch.randn(4, 4, generator=generator)
    graph = unit_graph(x, edges="partial", density=1.0, sign="signed")
    assert graph.shrinkage is not None
    assert graph.shrinkage < 1e-3
    centred = (x - x.mean(0)).double().numpy()
    rest = centred[:, 2:]
    left = centred[:, :2] - rest @ np.linalg.lstsq(rest, centred[:, :2], rcond=None)[0]
    assert dense(graph)[0, 1] == pytest.approx(np.corrcoef(left.T)[0, 1], abs=5e-3)


def test_shrinkage_is_that_of_scikit_learn(states: Tensor) -> None:
    covariance = pytest.importorskip("sklearn.covariance")
    few = states[:12].double()
    standard = ((few - few.mean(0)) / few.std(0, unbiased=False)).numpy()
    shrunk, amount = covariance.ledoit_wolf(standard, assume_centered=True)
    with pytest.warns(TLSpectralWarning, match="12 samples for 20 units"):
        graph = unit_graph(few, edges="partial", density=1.0, sign="signed")
    assert graph.shrinkage == pytest.approx(amount)
    precision = np.linalg.inv(shrunk)
    scale = np.sqrt(np.diag(precision))
    expected = off_diagonal(-precision / np.outer(scale, scale))
    np.testing.assert_allclose(dense(graph), expected, atol=1e-10)


def test_jacobian_edges_ignore_the_skip(states: Tensor) -> None:
    J = states[:UNITS].double()
    graph = unit_graph(J, edges="jacobian", density=1.0)
    R = J - torch.eye(UNITS, dtype=torch.float64)
    expected = off_diagonal(((R.abs() + R.abs().T) / 2).numpy())
    np.testing.assert_allclose(dense(graph), expected)
    block = block_jacobian(J)
    again = unit_graph(block, edges="jacobian", density=1.0)
    assert torch.equal(again.weight, graph.weight)
    assert again.layer == 3
    assert again.norm_gain is not None


def test_top_k_keeps_the_strongest_of_either_end(states: Tensor) -> None:
    graph = unit_graph(states, top_k=3)
    full = np.abs(off_diagonal(np.corrcoef(states.double().numpy().T)))
    expected = np.zeros_like(full, dtype=bool)
    for i in range(UNITS):
        expected[i, np.argsort(-full[i])[:3]] = True
    expected |= expected.T
    np.testing.assert_array_equal(dense(graph) != 0, expected)
    np.testing.assert_allclose(graph.strength.numpy(), (full * expected).sum(1))
    assert graph.rule == "top_k=3"
    assert unit_graph(states).rule == "top_k=10"


def test_threshold_and_density(states: Tensor) -> None:
    full = np.abs(off_diagonal(np.corrcoef(states.double().numpy().T)))
    above = unit_graph(states, threshold=0.5)
    np.testing.assert_array_equal(dense(above) != 0, full >= 0.5)
    sparse = unit_graph(states, density=0.1)
    assert sparse.n_edges == round(0.1 * math.comb(UNITS, 2))
    assert sparse.weight.min() >= np.sort(full[np.triu_indices(UNITS, 1)])[-sparse.n_edges] - 1e-12


def test_equal_weights_are_kept_in_index_order() -> None:
    J = torch.ones(6, 6)
    graph = unit_graph(J, edges="jacobian", top_k=1)
    assert list(zip(graph.row.tolist(), graph.col.tolist(), strict=True)) == [
        (0, j) for j in range(1, 6)
    ]
    dense_rule = unit_graph(J, edges="jacobian", density=3 / 15)
    assert dense_rule.col.tolist() == [1, 2, 3]


def test_rows_at_a_time_are_the_whole(states: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where blocks of rows end in the middle of equal weights."""
    ties = (states.T @ states)[:UNITS, :UNITS].round() % 3
    for options in ({"top_k": 3}, {"threshold": 0.5}, {"density": 0.3}):
        whole = unit_graph(ties, edges="jacobian", **options)
        monkeypatch.setattr("tl_spectral.graph._ROWS", 7)
        parts = unit_graph(ties, edges="jacobian", **options)
        monkeypatch.undo()
        assert torch.equal(parts.row, whole.row)
        assert torch.equal(parts.col, whole.col)
        assert torch.equal(parts.weight, whole.weight)


def test_the_input_is_left_alone(states: Tensor) -> None:
    J = states[:UNITS].double()
    for sample, edges in ((J, "jacobian"), (states.double(), "pearson")):
        before = sample.clone()
        unit_graph(sample, edges=edges, top_k=2)  # type: ignore[arg-type]
        assert torch.equal(sample, before)


def test_sign_policies(states: Tensor) -> None:
    correlation = off_diagonal(np.corrcoef(states.double().numpy().T))
    absolute = dense(unit_graph(states, density=1.0, sign="abs"))
    np.testing.assert_allclose(absolute, np.abs(correlation), atol=1e-12)
    positive = dense(unit_graph(states, density=1.0, sign="positive"))
    np.testing.assert_allclose(positive, np.maximum(correlation, 0), atol=1e-12)
    signed = unit_graph(states, top_k=3, sign="signed")
    absolute_graph = unit_graph(states, top_k=3, sign="abs")
    assert bool((signed.weight < 0).any())
    assert torch.equal(signed.weight.abs(), absolute_graph.weight)
    assert torch.equal(signed.strength, absolute_graph.strength)


@pytest.mark.parametrize("edges", ["pearson", "spearman", "partial", "cosine"])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e6])
def test_constant_units_are_isolated_and_listed(states: Tensor, edges: Any, offset: float) -> None:
    frozen = states.clone()
    frozen[:, 4] = offset
    frozen[:, 7] = offset + offset * 2e-7 * torch.randn(
        SAMPLES, generator=torch.Generator().manual_seed(2)
    )  # rounding noise of float32
    graph = unit_graph(frozen, edges=edges, top_k=3)
    assert graph.constant_units == (4, 7)
    assert graph.isolated.nonzero().flatten().tolist() == [4, 7]
    assert bool(graph.weight.isfinite().all())
    rest = [unit for unit in range(UNITS) if unit not in (4, 7)]
    without = unit_graph(frozen[:, rest], edges=edges, top_k=3)
    np.testing.assert_allclose(dense(graph)[np.ix_(rest, rest)], dense(without), atol=1e-12)


def test_no_unit_varies() -> None:
    graph = unit_graph(torch.ones(30, 5))
    assert graph.n_edges == 0
    assert graph.constant_units == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("options", [{"top_k": 3}, {"threshold": 0.4}, {"density": 0.2}])
def test_relabelling_units_relabels_the_graph(states: Tensor, options: Any) -> None:
    order = torch.randperm(UNITS, generator=torch.Generator().manual_seed(5))
    graph, moved = unit_graph(states, **options), unit_graph(states[:, order], **options)
    np.testing.assert_allclose(dense(moved), dense(graph)[np.ix_(order, order)], atol=1e-12)


def test_shift_and_scale_of_units_do_not_matter(states: Tensor) -> None:
    scaled = states.double() * torch.linspace(0.1, 9, UNITS) + 40
    np.testing.assert_allclose(
        dense(unit_graph(scaled)), dense(unit_graph(states.double())), atol=1e-9
    )


def test_networkx_nodes_come_in_index_order(states: Tensor) -> None:
    graph = unit_graph(states, threshold=0.6)
    other = graph.to_networkx()
    assert list(other.nodes) == list(range(UNITS))
    np.testing.assert_allclose(nx.to_numpy_array(other), dense(graph))
    assert other.nodes[3]["std"] == pytest.approx(states.double().std(0)[3].item())
    assert len(graph.to_dataframe()) == graph.n_edges == other.number_of_edges()
    assert graph.degree.tolist() == [degree for _, degree in other.degree()]


def test_residual_states_bring_layer_gain_and_provenance(states: Tensor, tmp_path: Path) -> None:
    captured = residual_states(states)
    graph = unit_graph(captured, layer=5, hook="resid_post", top_k=3)
    assert torch.equal(graph.weight, unit_graph(states + 1, top_k=3).weight)
    assert (graph.layer, graph.hook, graph.n_samples) == (5, "resid_post", SAMPLES)
    assert graph.norm_gain is not None
    assert graph.norm_gain.tolist() == [2.0] * UNITS
    assert graph.provenance.model == "toy"
    loaded = UnitGraph.load(graph.save(tmp_path / "graph"))
    assert torch.equal(loaded.weight, graph.weight)
    assert loaded.constant_units == graph.constant_units
    assert loaded.provenance == graph.provenance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3, "density": 0.1}, "one of top_k, threshold and density"),
        ({"top_k": 0}, "at least 1"),
        ({"threshold": -0.1}, "positive"),
        ({"density": 1.1}, "density must lie"),
        ({"edges": "kendall"}, "edges='kendall' is not one of"),
        ({"sign": "both"}, "sign='both' is not one of"),
    ],
)
def test_options_that_make_no_sense_are_refused(states: Tensor, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        unchecked_unit_graph(states, **options)


def test_inputs_that_make_no_graph_are_refused(states: Tensor) -> None:
    with pytest.raises(InputError, match="at least 3 samples"):
        unit_graph(states[:2])
    broken = states.clone()
    broken[3, 5] = torch.nan
    with pytest.raises(InputError, match=r"1 values are not finite, the first at \(3, 5\)"):
        unit_graph(broken)
    with pytest.raises(InputError, match="must be"):
        unit_graph(states, edges="jacobian")
    with pytest.raises(InputError, match="no signs"):
        unit_graph(states[:UNITS], edges="jacobian", sign="signed")
    with pytest.raises(InputError, match="needs a BlockJacobian"):
        unit_graph(residual_states(states), edges="jacobian")
    with pytest.raises(InputError, match="needs states"):
        unit_graph(block_jacobian(states[:UNITS]))
    with pytest.raises(InputError, match="say which"):
        unit_graph(residual_states(states))
    with pytest.raises(InputError, match="Layer 7"):
        unit_graph(residual_states(states), layer=7)
    with pytest.raises(InputError, match="resid_mid"):
        unit_graph(residual_states(states), layer=5, hook="resid_mid")
    with pytest.raises(InputError, match="layer=2 was asked"):
        unit_graph(block_jacobian(states[:UNITS]), layer=2, edges="jacobian")


def test_few_samples_warn(states: Tensor) -> None:
    with pytest.warns(TLSpectralWarning, match="rank-deficient"):
        unit_graph(states[:10])


def unchecked_unit_graph(states: Tensor, **options: Any) -> UnitGraph:
    """Past the runtime type checks of the test suite, which users do not have."""
    return getattr(unit_graph, "__wrapped__", unit_graph)(states, **options)


def residual_states(states: Tensor) -> ResidualStates:
    stack = torch.stack([states * 2, states])
    return ResidualStates(
        resid_pre=stack,
        resid_post=stack + 1,
        resid_mid=None,
        norm_gain=torch.stack([torch.ones(UNITS), torch.full((UNITS,), 2.0)]),
        layers=(4, 5),
        pos=-1,
        provenance=Provenance(model="toy", fingerprint="abc"),
    )


def block_jacobian(matrix: Tensor) -> BlockJacobian:
    return BlockJacobian(
        matrix=matrix,
        layer=3,
        stop=4,
        pos=-1,
        source_pos=-1,
        context="full",
        scope="block",
        n_samples=1,
        norm_gain=torch.ones(len(matrix)),
        engine="reference",
        engine_reason="",
        provenance=Provenance(model="toy", fingerprint="abc"),
    )
