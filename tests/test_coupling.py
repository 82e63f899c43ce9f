"""Coupling: planted truth with confounds, error rates under the null, invariance, refusals."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_communities import as_unit_graph
from test_graph import block_jacobian
from torch import Tensor

from tl_spectral.bridges import bridge_units
from tl_spectral.communities import Communities, communities
from tl_spectral.coupling import (
    CouplingResult,
    amplification,
    coupling,
)
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.results import Provenance
from tl_spectral.trend import CouplingTrend, coupling_trend

UNITS = 96


@dataclasses.dataclass(frozen=True)
class Toy:
    """Activations with blurred communities, so that participation varies; and their graph."""

    graph: UnitGraph
    com: Communities
    participation: np.ndarray
    labels: np.ndarray


@pytest.fixture(scope="module")
def toy() -> Toy:
    return make_toy(0)


def blurred_states(rng: np.random.Generator, labels: np.ndarray) -> Tensor:
    """Every unit loads on its own group's signal and, by its own measure, on the others'."""
    n = labels.size
    shared = rng.normal(size=(300, 6))
    loading = np.eye(6)[labels] + rng.uniform(0, 1.0, (n, 1)) * rng.random((n, 6))
    states = shared @ loading.T + 0.8 * rng.normal(size=(300, n))
    return torch.from_numpy(states * rng.uniform(1, 3, n))


def make_toy(seed: int) -> Toy:
    rng = np.random.default_rng(seed)
    labels = np.arange(UNITS) % 6
    states = blurred_states(rng, labels)
    gain = torch.from_numpy(rng.uniform(0.5, 2.0, UNITS))
    graph = dataclasses.replace(unit_graph(states, top_k=8), norm_gain=gain)
    com = communities(graph, runs=4, nulls=0)
    spread = bridge_units(graph, com).participation.numpy()
    return Toy(graph, com, spread, labels)


def jacobian(log_gain: np.ndarray, seed: int = 0) -> Tensor:
    """A matrix with exactly these log column norms."""
    columns = np.random.default_rng(seed).normal(size=(log_gain.size, log_gain.size))
    return torch.from_numpy(columns / np.linalg.norm(columns, axis=0) * np.exp(log_gain))


def standard(values: np.ndarray) -> np.ndarray:
    return np.asarray((values - values.mean()) / values.std())


def test_amplification_closed_form() -> None:
    J = torch.diag(torch.tensor([1.0, 2.0, 4.0]))
    expected = torch.tensor([-math.log(2), 0.0, math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(amplification(J), expected)
    upper = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    column, row = amplification(upper), amplification(upper, "row")
    assert (column[0] - column[1]).item() == pytest.approx(math.log(3 / math.sqrt(17)))
    assert (row[0] - row[1]).item() == pytest.approx(math.log(5))
    update = amplification(torch.diag(torch.tensor([1.5, 3.0, 1.0])), operator="R")
    assert update.tolist()[2] == -math.inf  # norm 0: a logarithm, not an error
    assert (update[1] - update[0]).item() == pytest.approx(math.log(4))


def test_amplification_in_natural_units() -> None:
    J = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 1.0], [5.0, 1.0, 2.0]], dtype=torch.float64)
    scale = torch.tensor([2.0, 0.5, 0.0])
    gains = amplification(J, scale=scale)
    natural = torch.tensor([[1.0, 2.0 * 0.5 / 2], [3.0 * 2 / 0.5, 1.0]], dtype=torch.float64)
    expected = natural.norm(dim=0).log()
    torch.testing.assert_close(gains[:2], expected - expected.mean())
    assert math.isnan(gains[2])
    pair = amplification(J, scale=(scale, scale))
    torch.testing.assert_close(pair, gains, equal_nan=True)
    wider = amplification(J, scale=(torch.ones(3), torch.tensor([1.0, 1.0, 1e9])))
    torch.testing.assert_close(wider[:2], _relative(J[:2].norm(dim=0))[:2])


def _relative(norms: Tensor) -> Tensor:
    return norms.log() - norms.log().quantile(0.5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("operator", ["J", "R"])
def test_planted_coupling_is_recovered_with_its_sign(toy: Toy, sign: float, operator: Any) -> None:
    noise = np.random.default_rng(1).normal(size=UNITS)
    J = jacobian(0.1 * (sign * standard(toy.participation) + noise))
    if operator == "R":
        J = J + torch.eye(UNITS, dtype=torch.float64)
    result = coupling(J, toy.graph, toy.com, operator=operator, permutations=499)
    assert 0.4 < sign * result.unit_rho < 0.9
    assert result.unit_p == pytest.approx(1 / 500)
    low, high = result.unit_interval
    assert low < result.unit_rho < high
    assert low * high > 0
    assert sign * result.cohens_d > 0.3
    assert result.n_units == UNITS
    assert result.note == ""


@pytest.mark.parametrize("confound", ["norm_gain", "activation_std", "strength"])
def test_a_confound_is_not_taken_for_coupling(toy: Toy, confound: str) -> None:
    """Gain follows the confound, the confound follows participation: nothing else is left."""
    rng = np.random.default_rng(2)
    driver = np.exp(0.5 * (standard(toy.participation) + 0.7 * rng.normal(size=UNITS)))
    field = {"norm_gain": "norm_gain", "activation_std": "unit_std", "strength": "strength"}
    graph = dataclasses.replace(toy.graph, **{field[confound]: torch.from_numpy(driver)})
    J = jacobian(np.log(driver) + 0.3 * rng.normal(size=UNITS))
    result = coupling(J, graph, toy.com, permutations=499)
    assert result.raw_rho > 0.5
    assert abs(result.unit_rho) < 0.2
    assert result.unit_p > 0.05
    assert abs(result.cohens_d) < result.raw_cohens_d
    assert confound in result.confounds
    row = result.confounds_dataframe().set_index("confound").loc[confound]
    assert row["rho_participation"] > 0.5
    assert row["rho_gain"] > 0.7
    blind = coupling(J, graph, toy.com, confounds=(), permutations=499)
    assert blind.unit_rho == pytest.approx(result.raw_rho)
    assert blind.unit_p < 0.01


def test_coupling_survives_confounds_that_do_not_explain_it(toy: Toy) -> None:
    rng = np.random.default_rng(3)
    assert toy.graph.norm_gain is not None
    gain = standard(np.log(toy.graph.norm_gain.numpy()))
    J = jacobian(gain - 0.5 * standard(toy.participation) + 0.3 * rng.normal(size=UNITS))
    result = coupling(J, toy.graph, toy.com, permutations=499)
    assert result.unit_rho < -0.6
    assert result.unit_rho < result.raw_rho


def test_unit_rho_is_the_mean_over_runs_of_partial_spearman(toy: Toy) -> None:
    """One run at a time, by regression of ranks, against the vectorised computation."""
    rng = np.random.default_rng(4)
    labels = toy.com.run_labels[0].numpy()
    blurred = [np.where(rng.random(UNITS) < 0.2, rng.integers(0, 6, UNITS), labels)] * 2
    runs = torch.from_numpy(np.stack([labels, *blurred]))
    com = dataclasses.replace(toy.com, run_labels=runs)
    log_gain = rng.normal(size=UNITS)
    result = coupling(jacobian(log_gain), toy.graph, com, degree=1, permutations=9)
    assert result.run_agreement < 1
    known = {
        "norm_gain": toy.graph.norm_gain,
        "activation_std": toy.graph.unit_std,
        "strength": toy.graph.strength,
    }
    assert result.confounds == tuple(known)
    design = np.column_stack(
        [np.ones(UNITS), *(stats.rankdata(v.numpy()) for v in known.values() if v is not None)]
    )

    def left(values: np.ndarray) -> np.ndarray:
        ranked = stats.rankdata(values)
        return np.asarray(ranked - design @ np.linalg.lstsq(design, ranked, rcond=None)[0])

    partials, plains = [], []
    for row in runs:
        one = dataclasses.replace(com, labels=row, run_labels=row[None])
        spread = bridge_units(toy.graph, one).participation.numpy()
        partials.append(np.corrcoef(left(spread), left(log_gain))[0, 1])
        plains.append(stats.spearmanr(spread, log_gain).statistic)
    assert result.unit_rho == pytest.approx(np.mean(partials))
    assert result.raw_rho == pytest.approx(np.mean(plains))


def test_false_positives_are_rare_under_the_null(toy: Toy) -> None:
    """Gain depends on confounds only; 5 % of the tests may call that a coupling."""
    rng = np.random.default_rng(5)
    trials, found, covered = 240, 0, 0
    assert toy.graph.norm_gain is not None
    drive = np.log(toy.graph.norm_gain.numpy()) - 0.5 * standard(toy.graph.strength.numpy())
    for seed in range(trials):
        log_gain = torch.from_numpy(drive + rng.normal(size=UNITS))
        result = coupling(log_gain, toy.graph, toy.com, permutations=199, seed=seed)
        found += result.unit_p <= 0.05
        covered += result.unit_interval[0] <= 0 <= result.unit_interval[1]
    assert 0.01 <= found / trials <= 0.085
    assert covered / trials >= 0.92


def test_confounds_need_not_act_along_a_straight_line() -> None:
    """Gain adds up confounds on another scale than ranks; one follows participation."""
    rng = np.random.default_rng(16)
    n = 288
    graph = unit_graph(blurred_states(rng, np.arange(n) % 6), top_k=10)
    com = communities(graph, runs=1, nulls=0)
    place = standard(bridge_units(graph, com).participation.numpy())
    strength = standard(np.log(graph.strength.numpy()))
    trials, straight, curved = 50, 0, 0
    for seed in range(trials):
        driver = standard(0.3 * place + 0.5 * rng.normal(size=n))
        known = dataclasses.replace(graph, norm_gain=torch.from_numpy(np.exp(driver)))
        gain = 0.6 * np.exp(driver) + 0.5 * np.exp(strength)
        gain = torch.from_numpy(standard(gain) + 0.3 * rng.normal(size=n))
        options: dict[str, Any] = {"permutations": 199, "seed": seed, "dependence": "none"}
        straight += coupling(gain, known, com, degree=1, **options).unit_p <= 0.05
        result = coupling(gain, known, com, **options)
        curved += result.unit_p <= 0.05
        assert result.degree == 5
    assert straight / trials > 0.3
    assert curved / trials <= 0.12


def test_units_that_share_gains_within_communities_do_not_fake_a_coupling() -> None:
    """Gain and participation differ between communities, independently of each other."""
    rng = np.random.default_rng(6)
    n_groups, size = 12, 30
    labels = np.repeat(np.arange(n_groups), size)
    graph, com = clustered(labels, rng)
    trials, exchangeable, adjusted = 120, 0, 0
    for seed in range(trials):
        gain = 2 * rng.normal(size=n_groups)[labels] + rng.normal(size=labels.size)
        result = coupling(torch.from_numpy(gain), graph, com, permutations=199, seed=seed)
        exchangeable += result.unit_p_exchangeable <= 0.05
        adjusted += result.unit_p <= 0.05
        assert result.n_effective < 360
    assert exchangeable / trials > 0.3  # what a plain permutation test would claim
    assert adjusted / trials <= 0.12


def test_a_real_coupling_is_not_taken_for_resemblance() -> None:
    """Gain follows participation, which differs between communities: the units still count."""
    rng = np.random.default_rng(17)
    labels = np.repeat(np.arange(12), 30)
    graph, com = clustered(labels, rng)
    place = standard(bridge_units(graph, com).participation.numpy())
    gain = torch.from_numpy(place + 0.5 * rng.normal(size=labels.size))
    result = coupling(gain, graph, com, confounds=(), permutations=199)
    assert result.n_effective > 0.6 * labels.size
    assert result.unit_p == pytest.approx(1 / 200)


def clustered(labels: np.ndarray, rng: np.random.Generator) -> tuple[UnitGraph, Communities]:
    """A graph whose communities differ in how much their units reach out."""
    n = labels.size
    inside = labels[:, None] == labels
    outward = rng.uniform(0.002, 0.04, labels.max() + 1)[labels]
    chance = np.where(inside, 0.4, (outward[:, None] + outward) / 2)
    matrix = np.triu(rng.random((n, n)) < chance, 1).astype(float)
    graph = as_unit_graph(matrix + matrix.T)
    com = communities(graph, runs=1, nulls=0)
    row = torch.from_numpy(labels)
    return graph, dataclasses.replace(com, labels=row, run_labels=row[None])


def test_community_level(toy: Toy) -> None:
    means = np.array([toy.participation[toy.labels == c].mean() for c in range(6)])
    log_gain = 2 * stats.rankdata(means)[toy.labels]
    J = jacobian(log_gain + 0.01 * np.random.default_rng(7).normal(size=UNITS))
    result = coupling(J, toy.graph, toy.com, confounds=(), permutations=99)
    assert result.n_communities == 6
    assert result.community_rho == pytest.approx(1)
    assert result.community_p == pytest.approx(1 / 360)  # 2 of the 720 orders
    assert result.projector_rho == pytest.approx(1)
    alone = toy.com.labels.clone()
    alone[0] = 6
    single = dataclasses.replace(toy.com, labels=alone, run_labels=alone[None])
    assert coupling(J, toy.graph, single, permutations=9).n_communities == 6
    few = dataclasses.replace(toy.com, labels=toy.com.labels % 2, run_labels=toy.com.run_labels % 2)
    assert math.isnan(coupling(J, toy.graph, few, permutations=9).community_rho)
    assert "2 communities, 4 needed" in coupling(J, toy.graph, few, permutations=9).note


def test_projector_gain_is_the_frobenius_norm(toy: Toy) -> None:
    J = jacobian(np.random.default_rng(8).normal(size=UNITS))
    result = coupling(J, toy.graph, toy.com, permutations=9)
    labels = toy.com.labels.numpy()
    gains = [
        (J @ torch.diag(torch.from_numpy((labels == c).astype(float)))).norm().item()
        / math.sqrt((labels == c).sum())
        for c in range(6)
    ]
    means = [toy.participation[labels == c].mean() for c in range(6)]
    assert result.projector_rho == pytest.approx(stats.spearmanr(means, gains).statistic)


def test_relabelling_units_changes_nothing(toy: Toy) -> None:
    rng = np.random.default_rng(9)
    J = jacobian(rng.normal(size=UNITS))
    order = torch.from_numpy(rng.permutation(UNITS))
    place = torch.argsort(order)
    row, col = place[toy.graph.row], place[toy.graph.col]
    assert toy.graph.norm_gain is not None
    assert toy.graph.unit_std is not None
    assert toy.graph.unit_mean is not None
    graph = dataclasses.replace(
        toy.graph,
        row=torch.minimum(row, col),
        col=torch.maximum(row, col),
        strength=toy.graph.strength[order],
        norm_gain=toy.graph.norm_gain[order],
        unit_std=toy.graph.unit_std[order],
        unit_mean=toy.graph.unit_mean[order],
    )
    com = dataclasses.replace(
        toy.com, labels=toy.com.labels[order], run_labels=toy.com.run_labels[:, order]
    )
    first = coupling(J, toy.graph, toy.com, permutations=999)
    second = coupling(J[order][:, order], graph, com, permutations=999)
    for name in ("unit_rho", "raw_rho", "cohens_d", "community_rho", "n_effective"):
        assert getattr(second, name) == pytest.approx(getattr(first, name))
    assert second.unit_p == pytest.approx(first.unit_p, abs=0.05)


def test_several_jacobians_are_averaged_in_logs(toy: Toy) -> None:
    first, second = (jacobian(np.random.default_rng(s).normal(size=UNITS), s) for s in (1, 2))
    both = coupling([first, second], toy.graph, toy.com, permutations=99)
    mean = (amplification(first) + amplification(second)) / 2
    torch.testing.assert_close(both.log_gain, mean)
    ready = coupling(mean, toy.graph, toy.com, permutations=99)
    assert ready.unit_rho == pytest.approx(both.unit_rho)
    assert ready.unit_p == both.unit_p
    assert both.n_samples == 2
    assert math.isnan(ready.projector_rho)
    assert "only log gains" in ready.note


def test_units_without_graph_or_gain_are_left_out_and_counted(toy: Toy) -> None:
    rng = np.random.default_rng(10)
    states = blurred_states(rng, np.arange(40) % 6)
    states[:, 7] = 1.0
    graph = unit_graph(states, top_k=4)
    com = communities(graph, runs=2, nulls=0)
    J = jacobian(rng.normal(size=40))
    J[:, 9] = 0
    result = coupling(J, graph, com, permutations=99)
    assert result.n_units == 38
    assert result.excluded == {"does not vary over the samples": 1, "gain of exactly zero": 1}
    assert (~result.used).nonzero().flatten().tolist() == [7, 9]
    assert math.isfinite(result.unit_rho)
    scale = states.std(0)
    scale[9] = 0
    natural = coupling(J, graph, com, scale=scale, permutations=99)
    assert natural.units == "natural"
    assert natural.excluded["no natural unit (zero deviation)"] == 1


def test_massive_activations_are_a_confound(toy: Toy) -> None:
    assert toy.graph.unit_mean is not None
    mean = toy.graph.unit_mean.clone()
    mean[:3] = 1000.0
    graph = dataclasses.replace(toy.graph, unit_mean=mean)
    J = jacobian(np.random.default_rng(11).normal(size=UNITS))
    assert "massive" in coupling(J, graph, toy.com, permutations=9).confounds
    plain = coupling(J, toy.graph, toy.com, permutations=9)
    assert plain.confounds_constant == ("massive",)


def test_what_is_not_known_is_named(toy: Toy) -> None:
    J = jacobian(np.zeros(UNITS) + np.arange(UNITS) / 50)
    bare = dataclasses.replace(toy.graph, norm_gain=None, unit_std=None, unit_mean=None)
    result = coupling(J, bare, toy.com, permutations=9)
    assert result.confounds == ("strength",)
    assert result.confounds_missing == ("norm_gain", "activation_std", "massive")
    with pytest.raises(InputError, match="'norm_gain' is not known here"):
        coupling(J, bare, toy.com, confounds=("norm_gain",))
    with pytest.raises(InputError, match="'colour' is not one of"):
        coupling(J, bare, toy.com, confounds=("colour",))
    gain = torch.linspace(1, 2, UNITS)
    block = dataclasses.replace(block_jacobian(J), norm_gain=gain)
    assert "norm_gain" in coupling(block, bare, toy.com, permutations=9).confounds


def test_nothing_varies_says_so(toy: Toy) -> None:
    flat = coupling(torch.eye(UNITS), toy.graph, toy.com, permutations=9)
    assert math.isnan(flat.unit_rho)
    assert math.isnan(flat.unit_p)
    assert "gain does not vary" in flat.note
    nothing = torch.zeros(UNITS, dtype=torch.int64)
    single = dataclasses.replace(toy.com, labels=nothing, run_labels=nothing[None])
    alone = coupling(jacobian(np.arange(UNITS) / 50), toy.graph, single, permutations=9)
    assert "participation does not vary" in alone.note
    assert math.isnan(alone.unit_rho)


def test_mismatches_are_refused(toy: Toy) -> None:
    J = jacobian(np.zeros(UNITS))
    with pytest.raises(InputError, match="d_model = 95"):
        coupling(J[:95, :95], toy.graph, toy.com)
    with pytest.raises(InputError, match="no Jacobian"):
        coupling([], toy.graph, toy.com)
    elsewhere = [dataclasses.replace(each, layer=2) for each in (toy.graph, toy.com)]
    with pytest.raises(ProvenanceError, match="layer 3"):
        coupling(block_jacobian(J), *elsewhere)
    other = dataclasses.replace(toy.graph, provenance=Provenance(model="other"))
    with pytest.raises(ProvenanceError, match="different models"):
        coupling(block_jacobian(J), other, toy.com)
    with pytest.raises(InputError, match="not finite"):
        coupling(J * torch.nan, toy.graph, toy.com)
    with pytest.raises(InputError, match="scale must hold"):
        amplification(J, scale=-torch.ones(UNITS))
    with pytest.raises(InputError, match="permutations"):
        coupling(J, toy.graph, toy.com, permutations=0)


def test_results_survive_the_disk(toy: Toy, tmp_path: Path) -> None:
    result = coupling(jacobian(np.arange(UNITS) / 50), toy.graph, toy.com, permutations=99)
    loaded = CouplingResult.load(result.save(tmp_path / "coupling"))
    assert loaded.unit_interval == result.unit_interval
    assert loaded.confound_table == result.confound_table
    assert torch.equal(loaded.used, result.used)
    assert loaded.to_dataframe().equals(result.to_dataframe())
    trend = coupling_trend(layers(result, np.arange(12.0)), list(np.arange(12.0)))
    again = CouplingTrend.load(trend.save(tmp_path / "trend"))
    assert again.sentence == trend.sentence
    assert torch.equal(again.coupling, trend.coupling)


def layers(result: CouplingResult, rho: np.ndarray) -> list[CouplingResult]:
    return [
        dataclasses.replace(result, layer=layer, unit_rho=float(value))
        for layer, value in enumerate(rho)
    ]


def signed_states(rng: np.random.Generator, labels: np.ndarray) -> Tensor:
    """Groups in two opposed camps; every unit is drawn to the other camp by its own measure."""
    n = labels.size
    shared = rng.normal(size=(300, 6))
    loading = np.eye(6)[labels] - rng.uniform(0, 1.0, (n, 1)) * rng.random((n, 6))
    return torch.from_numpy(shared @ loading.T + 0.8 * rng.normal(size=(300, n)))


def test_signed_graphs_couple_by_either_sign() -> None:
    pytest.importorskip("leidenalg")
    rng = np.random.default_rng(5)
    states = signed_states(rng, np.arange(UNITS) % 6)
    graph = unit_graph(states, top_k=20, sign="signed")
    assert bool((graph.weight < 0).any())
    com = communities(graph, method="leiden", runs=4, nulls=0)
    bridges = bridge_units(graph, com)
    negative = bridges.participation_negative
    assert negative is not None
    for part, spread in (("positive", bridges.participation), ("negative", negative)):
        known = ~torch.isnan(spread)
        assert known.sum() > 60
        planted = np.where(known, spread, 0.0)
        J = jacobian(0.3 * standard(planted) + 0.3 * rng.normal(size=UNITS))
        result = coupling(J, graph, com, part=part, permutations=200)
        torch.testing.assert_close(result.participation, spread, equal_nan=True)
        assert result.unit_rho > 0.4
        assert result.unit_p < 0.02
        missing = int((~known).sum())
        assert sum(result.excluded.values()) == missing
        assert missing == 0 or f"no {part} edge" in " ".join(result.excluded)


def test_negative_part_needs_negative_edges(toy: Toy) -> None:
    with pytest.raises(InputError, match="signed"):
        coupling(torch.zeros(UNITS), toy.graph, toy.com, part="negative")
    with pytest.raises(InputError, match="part must be"):
        coupling(torch.zeros(UNITS), toy.graph, toy.com, part="both")


def test_smallest_detectable_coupling(toy: Toy) -> None:
    rng = np.random.default_rng(0)
    result = coupling(torch.from_numpy(rng.normal(size=UNITS)), toy.graph, toy.com)
    low, high = result.unit_interval
    assert result.detectable_rho == result.to_dataframe()["detectable_rho"][0]
    half = (high - low) / 2  # 1.96 standard errors; 80 % power takes 2.80, tanh bends both
    assert result.detectable_rho == pytest.approx(half * 2.80 / 1.96, rel=0.15)


@pytest.fixture(scope="module")
def one_layer(toy: Toy) -> CouplingResult:
    return coupling(jacobian(np.arange(UNITS) / 50), toy.graph, toy.com, permutations=9)


def test_trend_is_found_with_its_sign(one_layer: CouplingResult) -> None:
    rng = np.random.default_rng(12)
    rotation = rng.random(30)
    rho = 0.1 - 0.2 * rotation + 0.02 * rng.normal(size=30)
    trend = coupling_trend(layers(one_layer, rho), rotation, name="antisymmetric_energy")
    assert trend.rho == pytest.approx(stats.spearmanr(rho, rotation).statistic)
    assert trend.pearson == pytest.approx(np.corrcoef(rho, rotation)[0, 1])
    assert trend.p_shift == pytest.approx(1 / 30)
    assert trend.smallest_p_shift == pytest.approx(1 / 30)
    assert trend.p_permutation < 0.001
    assert trend.interval[1] < 0
    assert trend.verdict == "holds"
    assert "falls with antisymmetric energy" in trend.sentence
    shuffled = rng.permutation(30)
    again = coupling_trend(
        [layers(one_layer, rho)[i] for i in shuffled], torch.from_numpy(rotation[shuffled])
    )
    assert again.rho == pytest.approx(trend.rho)
    assert again.p_shift == trend.p_shift
    assert again.layers == tuple(range(30))


def test_no_trend_is_said_plainly(one_layer: CouplingResult) -> None:
    rng = np.random.default_rng(13)
    trend = coupling_trend(layers(one_layer, rng.normal(size=30)), rng.random(30))
    assert trend.verdict == "no effect"
    assert trend.sentence.startswith("No effect shown")
    assert trend.interval[0] < 0 < trend.interval[1]


def test_smooth_unrelated_profiles_are_rarely_called_a_trend(one_layer: CouplingResult) -> None:
    """Autoregressive profiles: permutations are fooled, the verdict is not."""
    rng = np.random.default_rng(14)
    trials, naive, called, covered = 150, 0, 0, 0
    for _ in range(trials):
        x, y = autoregressive(rng, 30, 0.8), autoregressive(rng, 30, 0.8)
        trend = coupling_trend(layers(one_layer, x), y, permutations=99)
        naive += trend.p_permutation <= 0.05
        called += trend.verdict == "holds"
        covered += trend.interval[0] <= 0 <= trend.interval[1]
    assert naive / trials > 0.15
    assert called / trials <= 0.07
    assert covered / trials >= 0.93


def autoregressive(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    noise = rng.normal(size=n + 50)
    values = np.zeros_like(noise)
    for step in range(1, n + 50):
        values[step] = memory * values[step - 1] + noise[step]
    return values[50:]


def test_periodic_profiles_are_no_trend(one_layer: CouplingResult) -> None:
    """Every fifth shift fits as well as the observed one, so the fit proves nothing."""
    wave = np.arange(30.0) % 5
    trend = coupling_trend(layers(one_layer, wave / 10), wave, permutations=99)
    assert trend.rho == pytest.approx(1)
    assert trend.p_shift == pytest.approx(6 / 30)
    assert trend.verdict == "no effect"


def test_layers_without_a_coupling_are_left_out_and_named(one_layer: CouplingResult) -> None:
    rho = np.random.default_rng(15).normal(size=12)
    rho[[2, 5]] = np.nan
    trend = coupling_trend(layers(one_layer, rho), np.arange(12.0).tolist())
    assert trend.n_layers == 10
    assert 2 not in trend.layers
    assert trend.note == "layers without a value: [2, 5]"


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_layers_cannot_tell(one_layer: CouplingResult, count: int) -> None:
    trend = coupling_trend(
        layers(one_layer, np.arange(count) / 10.0), np.arange(float(count)).tolist()
    )
    assert trend.verdict == "cannot tell"
    assert "Cannot tell" in trend.sentence
    assert len(trend.to_dataframe()) == 1


def test_trends_that_make_no_sense_are_refused(one_layer: CouplingResult) -> None:
    with pytest.raises(InputError, match="1 couplings and 2 values"):
        coupling_trend([one_layer], [0.0, 1.0])
    with pytest.raises(InputError, match="layer of its own"):
        coupling_trend([one_layer, one_layer], [0.0, 1.0])
    mixed = layers(one_layer, np.zeros(2))
    mixed[1] = dataclasses.replace(mixed[1], operator="R")
    with pytest.raises(InputError, match="different gains"):
        coupling_trend(mixed, [0.0, 1.0])
