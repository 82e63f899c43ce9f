"""Influence of communities, stability of partitions, learning curves: planted truth and oracles."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from test_coupling import UNITS, Toy, blurred_states, jacobian, make_toy, standard
from torch import Tensor

from tl_spectral.bridges import bridge_units, participation
from tl_spectral.capture import ResidualStates
from tl_spectral.communities import communities
from tl_spectral.coupling import coupling
from tl_spectral.errors import InputError
from tl_spectral.graph import unit_graph
from tl_spectral.influence import CommunityInfluence, leave_one_community_out
from tl_spectral.learning import LearningCurve, learning_curve
from tl_spectral.stability import (
    PartitionStability,
    _pair,
    partition_stability,
    variation_of_information,
)


@pytest.fixture(scope="module")
def toy() -> Toy:
    return make_toy(0)


def as_states(states: Tensor, layers: tuple[int, ...] = (3,)) -> ResidualStates:
    stack = states.float()[None].repeat(len(layers), 1, 1)
    stack[1:] = 0.0
    return ResidualStates(stack, stack, None, torch.ones(len(layers), UNITS), layers, -1)


# ------------------------------------------------------------------ one community left out


def test_a_coupling_of_one_community_is_found_out(toy: Toy) -> None:
    """Only community 2 couples; without it the coupling is gone, without another it stays."""
    inside = toy.com.labels.numpy() == 2
    place = toy.participation - toy.participation[inside].mean()
    without = []
    for seed in range(8):
        gain = 0.1 * np.random.default_rng(seed).normal(size=UNITS) + 8 * place * inside
        result = leave_one_community_out(
            jacobian(gain), toy.graph, toy.com, confounds=(), permutations=9
        )
        assert result.most_influential == 2
        assert sum(row["size"] for row in result.rows) == UNITS
        influence = [row["influence"] for row in result.rows]
        assert [result.unit_rho - rho for rho in rhos(result)] == pytest.approx(influence)
        without.append(rhos(result))
    mean = np.mean(without, axis=0)
    assert abs(mean[2]) < 0.1
    assert (np.delete(mean, 2) > 0.15).all()


def rhos(result: CommunityInfluence) -> list[float]:
    return [row["unit_rho"] for row in result.rows]


def test_a_coupling_of_all_communities_survives_each(toy: Toy) -> None:
    rng = np.random.default_rng(1)
    gain = 0.3 * standard(toy.participation) + 0.3 * rng.normal(size=UNITS)
    J = jacobian(gain)
    result = leave_one_community_out(J, toy.graph, toy.com, permutations=99)
    whole = coupling(J, toy.graph, toy.com, permutations=99)
    assert result.unit_rho == pytest.approx(whole.unit_rho)
    assert result.unit_interval == pytest.approx(whole.unit_interval)
    assert result.sign_holds
    assert all(row["p"] < 0.05 for row in result.rows)
    low, high = result.jackknife_interval
    assert 0 < low < result.unit_rho < high
    left_out = np.array(rhos(result))  # six communities of 16: the textbook's delete-one jackknife
    variance = 5 / 6 * np.square(left_out - left_out.mean()).sum()
    assert result.jackknife_se == pytest.approx(math.sqrt(variance))
    assert high - result.unit_rho == pytest.approx(stats.t.ppf(0.975, 5) * math.sqrt(variance))
    fewer = toy.com.labels.numpy() != 1
    by_hand = leave_one_community_out(J, toy.graph, toy.com, confounds=(), permutations=99)
    kept = [
        stats.spearmanr(run[fewer], torch.as_tensor(gain).numpy()[fewer]).statistic
        for run in _spread(toy)
    ]
    assert by_hand.rows[1]["unit_rho"] == pytest.approx(np.mean(kept))


def _spread(toy: Toy) -> np.ndarray:
    return participation(toy.graph.adjacency(), toy.com.run_labels.numpy())


def test_the_jackknife_knows_that_communities_share_gains() -> None:
    """With gains alike inside communities its error covers where the units' own would not."""
    labels = np.repeat(np.arange(12), 8)
    rng = np.random.default_rng(2)
    covered = []
    for seed in range(40):
        states = blurred_states(np.random.default_rng(seed), labels % 6)
        graph = unit_graph(states, top_k=8)
        com = communities(graph, runs=1, nulls=0)
        gain = rng.normal(size=12)[labels] + 0.3 * rng.normal(size=UNITS)
        result = leave_one_community_out(
            torch.from_numpy(gain), graph, com, confounds=(), permutations=1
        )
        low, high = result.jackknife_interval
        covered.append(low <= 0 <= high)
    assert np.mean(covered) >= 0.85


def test_influence_needs_two_communities(toy: Toy) -> None:
    alone = dataclasses.replace(
        toy.com,
        labels=torch.zeros_like(toy.com.labels),
        run_labels=toy.com.run_labels,
    )
    gain = torch.from_numpy(standard(toy.participation))
    result = leave_one_community_out(gain, toy.graph, alone, permutations=9)
    assert math.isnan(result.jackknife_se)
    assert "no jackknife" in result.note
    assert result.most_influential == -1
    assert not result.sign_holds


# ------------------------------------------------------------------ partitions


def test_variation_of_information_is_what_sklearn_implies() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 5, (2, 200))

    def entropy(labels: np.ndarray) -> float:
        return float(metrics.mutual_info_score(labels, labels))

    shared = metrics.mutual_info_score(first, second)
    expected = entropy(first) + entropy(second) - 2 * shared
    assert variation_of_information(first, second) == pytest.approx(expected)
    assert variation_of_information(first, (first + 2) % 5) == 0
    one, all_apart = np.zeros(8, int), np.arange(8)
    assert variation_of_information(one, all_apart) == pytest.approx(math.log(8))


def test_clear_communities_are_stable_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 4
    signal = rng.normal(size=(200, 4))[:, labels] + 0.5 * rng.normal(size=(200, 48))
    clear = partition_stability(torch.from_numpy(signal), top_k=6, runs=4, bootstraps=5)
    for source in ("seeds", "bootstrap"):
        assert clear.value(source) == 1
        assert clear.value(source, "nmi") == 1
        assert clear.value(source, "vi") == 0
    noise = partition_stability(
        torch.from_numpy(rng.normal(size=(200, 48))), top_k=6, runs=4, bootstraps=5
    )
    table = noise.to_dataframe().set_index(["source", "measure"])
    assert table["value"]["bootstrap", "ari"] < 0.6 < clear.value("bootstrap")
    assert table["value"]["bootstrap", "vi"] > 0.5
    assert (table["low"] <= table["value"]).all()
    assert (table["value"] <= table["high"]).all()
    assert table["chance"]["seeds", "ari"] == pytest.approx(0, abs=0.1)
    assert table["chance"]["seeds", "vi"] <= noise.vi_largest
    assert table["n_pairs"]["seeds", "ari"] == 6
    assert table["n_pairs"]["bootstrap", "ari"] == 5


def test_seeds_may_agree_on_a_partition_that_other_texts_would_not_give() -> None:
    rng = np.random.default_rng(1)
    few = rng.normal(size=(60, 4))[:, np.arange(48) % 4] + 1.5 * rng.normal(size=(60, 48))
    result = partition_stability(torch.from_numpy(few), top_k=4, runs=4, bootstraps=6)
    assert result.value("seeds") > 0.95
    assert result.value("bootstrap") < 0.7


def test_stability_of_a_layer_of_states_and_its_refusals(tmp_path: Path) -> None:
    states = as_states(blurred_states(np.random.default_rng(0), np.arange(UNITS) % 6), (3, 7))
    result = partition_stability(states, 3, top_k=8, runs=3, bootstraps=2)
    again = partition_stability(states, 3, top_k=8, runs=3, bootstraps=2)
    assert result.pairs == again.pairs
    assert result.layer == 3
    loaded = PartitionStability.load(result.save(tmp_path / "stability"))
    assert loaded.rows == result.rows
    with pytest.raises(InputError, match="say which"):
        partition_stability(states)
    with pytest.raises(InputError, match="at least 2 runs"):
        partition_stability(states, 3, runs=1)
    with pytest.raises(InputError, match="no 'rand'"):
        result.value("seeds", "rand")
    none = partition_stability(states, 3, top_k=8, runs=2, bootstraps=0)
    assert "no bootstrap" in none.note
    assert {row["source"] for row in none.rows} == {"seeds"}


def test_signed_graphs_are_stable_by_leiden() -> None:
    pytest.importorskip("leidenalg")
    states = blurred_states(np.random.default_rng(0), np.arange(UNITS) % 6)
    result = partition_stability(states, top_k=8, sign="signed", runs=2, bootstraps=2)
    assert result.value("seeds") > 0.5


def test_units_without_edges_on_either_side_are_left_out_of_a_comparison() -> None:
    first, second = np.array([0, 0, 1, 1, -1, 2]), np.array([4, 4, 2, 2, 1, -1])
    row = _pair("seeds", 0, 1, first, second, np.random.default_rng(0))
    assert row["n_units"] == 4
    assert row["ari"] == 1
    assert row["vi"] == 0


# ------------------------------------------------------------------ learning curve


def test_a_planted_coupling_grows_with_the_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    labels = np.arange(UNITS) % 6
    shared = rng.normal(size=(1600, 6))
    loading = np.eye(6)[labels] + rng.uniform(0, 1.0, (UNITS, 1)) * rng.random((UNITS, 6))
    states = torch.from_numpy(shared @ loading.T + 1.2 * rng.normal(size=(1600, UNITS)))
    exact = make_exact_participation(states)
    gain = torch.from_numpy(0.3 * standard(exact))
    curve = learning_curve(
        gain,
        states,
        fractions=(1 / 32, 1 / 8, 1 / 2, 1),
        subsets=4,
        top_k=8,
        runs=2,
        confounds=(),
        permutations=20,
    )
    table = curve.to_dataframe().set_index("n_samples")
    assert list(table.index) == [50, 200, 800, 1600]
    assert list(table["n_subsets"]) == [4, 4, 2, 1]
    assert table["unit_rho"].is_monotonic_increasing
    assert table["unit_rho"][1600] > 0.9 > table["unit_rho"][50] + 0.2
    assert table["ari"][1600] == 1
    assert table["ari"][50] < table["ari"][800]
    assert table["reliability"][50] < table["reliability"][200] < table["reliability"][800]
    half = table["reliability"][800]
    assert table["reliability"][1600] == pytest.approx(2 * half / (1 + half))
    true = table["detectable_rho"] / np.sqrt(table["reliability"])
    np.testing.assert_allclose(table["detectable_true_rho"], true)
    assert (table["low"] <= table["unit_rho"]).all()
    assert (table["unit_rho"] <= table["high"]).all()
    loaded = LearningCurve.load(curve.save(tmp_path / "curve"))
    assert [row["unit_rho"] for row in loaded.rows] == list(table["unit_rho"])


def make_exact_participation(states: Tensor) -> np.ndarray:
    graph = unit_graph(states, top_k=8)
    return bridge_units(graph, communities(graph, runs=2, nulls=0)).participation.numpy()


def test_the_last_point_of_a_curve_is_the_coupling_itself() -> None:
    states = as_states(blurred_states(np.random.default_rng(0), np.arange(UNITS) % 6))
    J = jacobian(np.random.default_rng(1).normal(size=UNITS))
    curve = learning_curve(J, states, 3, fractions=(0.5, 1.0), top_k=8, runs=2, seed=4)
    graph = unit_graph(states, 3, top_k=8)
    com = communities(graph, runs=2, nulls=0, seed=4)
    whole = coupling(J, graph, com, permutations=200, seed=4)
    last = curve.rows[-1]
    assert last["unit_rho"] == pytest.approx(whole.unit_rho)
    assert (last["low"], last["high"]) == pytest.approx(whole.unit_interval)
    assert curve.subsets[-1]["p"] == whole.unit_p
    assert curve.layer == 3


def test_learning_curve_refuses_what_cannot_be_measured() -> None:
    states = torch.zeros(20, UNITS)
    gain = torch.zeros(UNITS)
    with pytest.raises(InputError, match="20 samples are 2"):
        learning_curve(gain, states, fractions=(0.1,))
    for fractions in ((), (0.0,), (1.5,)):
        with pytest.raises(InputError, match=r"\(0, 1\]"):
            learning_curve(gain, states, fractions=fractions)
    with pytest.raises(InputError, match="subsets"):
        learning_curve(gain, states, subsets=0)


def test_figures_show_the_figures(toy: Toy) -> None:
    gain = torch.from_numpy(standard(toy.participation))
    influence = leave_one_community_out(gain, toy.graph, toy.com, permutations=9)
    drawn = influence.plot().data[0]
    assert sorted(drawn.x) == pytest.approx(sorted(r["unit_rho"] for r in influence.rows), abs=1e-6)
    states = blurred_states(np.random.default_rng(0), np.arange(UNITS) % 6)
    stability = partition_stability(states, top_k=8, runs=3, bootstraps=3)
    names = [trace.name for trace in stability.plot().data]
    assert names.count("units shuffled") == 6
    curve = learning_curve(gain, states, fractions=(0.5, 1), top_k=8, runs=1, permutations=9)
    line = next(t for t in curve.plot().data if t.name == "coupling, 95 %")
    assert list(line.x) == [150, 300]


def test_influence_survives_the_disk(toy: Toy, tmp_path: Path) -> None:
    gain = torch.from_numpy(standard(toy.participation))
    influence = leave_one_community_out(gain, toy.graph, toy.com, permutations=9)
    loaded = CommunityInfluence.load(influence.save(tmp_path / "influence"))
    assert loaded.rows == influence.rows
