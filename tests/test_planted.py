"""Planted truth is recovered: rotation, funnel, non-normality, communities, bridges, coupling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import adjusted_rand_score

import tl_spectral as tls
from tl_spectral.chain import chain
from tl_spectral.coupling import CouplingResult, coupling
from tl_spectral.errors import InputError
from tl_spectral.growth import growth
from tl_spectral.model import ModelView
from tl_spectral.profile import profile
from tl_spectral.spectrum import block_spectra, spectrum
from tl_spectral.surgery_chains import surgery_table
from tl_spectral.testing import planted_activations, planted_coupling, rotating_blocks
from tl_spectral.trend import coupling_trend

ANGLES = (1.4, 1.0, 0.6, 0.3, 0.1, -0.2)
FUNNEL = (20.0, 14.0, 10.0, 7.0, 5.0, 4.0)
D = 24
TOKENS = torch.tensor([[5, 9, 2, 30]])


# ---------------------------------------------------------------------------------------- blocks


def test_rotation_and_funnel_are_recovered() -> None:
    planted = rotating_blocks(D, ANGLES, funnel=FUNNEL, seed=3)
    measured = chain(planted.matrices)
    np.testing.assert_allclose(measured.effective_rank, FUNNEL, rtol=1e-10)
    for J, angle, truth, eigenvalues in zip(
        planted.matrices, ANGLES, planted.antisymmetric_energy, planted.eigenvalues, strict=True
    ):
        spectra = block_spectra(J)
        found = spectra["J", "raw"].eigenvalues
        np.testing.assert_allclose(found.angle().abs(), abs(angle), atol=1e-9)
        np.testing.assert_allclose(np.sort(found.abs()), np.sort(eigenvalues.abs()), rtol=1e-9)
        assert spectra["R", "raw"].antisymmetric_energy == pytest.approx(float(truth), rel=1e-9)
        assert spectra["J", "raw"].antisymmetric_energy == pytest.approx(math.sin(angle) ** 2)
        assert spectra["J", "raw"].rotation_index == pytest.approx(abs(math.sin(angle)))
        assert spectra["J", "raw"].henrici < 1e-7


def test_without_a_funnel_blocks_only_rotate() -> None:
    planted = rotating_blocks(8, [0.5, -0.3])
    for J in planted.matrices:
        torch.testing.assert_close(J @ J.T, torch.eye(8, dtype=torch.float64))
    assert planted.effective_rank.tolist() == [8, 8]
    turned = planted.matrices[1] @ planted.matrices[0]
    np.testing.assert_allclose(torch.linalg.eigvals(turned).angle().abs(), 0.2, atol=1e-12)


@pytest.mark.parametrize("shares", [0.6, (0.1, 0.5, 0.9, 0.0, 0.3, 0.7)])
def test_non_normality_is_recovered_and_moves_no_eigenvalue(shares: Any) -> None:
    planted = rotating_blocks(D, ANGLES, funnel=FUNNEL, non_normality=shares, seed=1)
    expected = [shares] * 6 if isinstance(shares, float) else list(shares)
    assert planted.henrici.tolist() == expected
    for J, henrici, eigenvalues in zip(
        planted.matrices, expected, planted.eigenvalues, strict=True
    ):
        s = spectrum(J)
        assert s.henrici == pytest.approx(henrici, abs=1e-6)
        found = np.sort_complex(s.eigenvalues.numpy())
        np.testing.assert_allclose(found, np.sort_complex(eigenvalues.numpy()), atol=1e-5)
    np.testing.assert_allclose(chain(planted.matrices).effective_rank, planted.effective_rank)
    assert torch.isnan(planted.antisymmetric_energy).all()


def test_surgery_finds_the_funnel_beneath_the_non_normal_part() -> None:
    """Without the non-normal part the chain has the funnel of the moduli, by construction.

    That holds where the Schur order leaves the planted bases alone: one pair per block is planted
    in one hidden basis, and surgery on a normal matrix changes nothing.
    """
    normal = rotating_blocks(D, ANGLES, funnel=FUNNEL, seed=1)
    table = surgery_table(normal.matrices, seeds=(0,)).summary().set_index("kind")
    assert table.loc["original", "effective_rank"] == pytest.approx(4)
    for kind in ("normal", "matched", "shuffled"):
        assert table.loc[kind, "ratio"] == pytest.approx(1, rel=1e-6)
    assert table.loc["rotated", "ratio"] > 1.5  # the funnel needs bases that agree


def test_growth_beyond_the_eigenvalues_is_planted_non_normality() -> None:
    still = growth(rotating_blocks(D, ANGLES, seed=1).matrices)
    torch.testing.assert_close(still.log_sigma, torch.zeros(6, dtype=torch.float64))
    assert float(still.reactivity.abs().max()) < 1e-9
    planted = rotating_blocks(D, ANGLES, funnel=FUNNEL, non_normality=0.7, seed=1)
    moved = growth(planted.matrices)
    radii = planted.moduli.amax(dim=1).log().cumsum(0)
    np.testing.assert_allclose(moved.log_radius_sum, radii, atol=1e-6)
    np.testing.assert_allclose(moved.log_radius, 0, atol=1e-6)  # all share the leading plane
    assert float(moved.transient[-1]) > 0.5
    assert bool((moved.reactivity > 0.1).all())


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_the_model_has_the_planted_jacobians_at_every_token(engine: str) -> None:
    planted = rotating_blocks(12, ANGLES[:3], funnel=(10, 8, 5), non_normality=0.3, seed=2)
    model = planted.model()
    for pos in (0, -1):
        for J, truth in zip(
            tls.block_jacobians(model, TOKENS, pos=pos, engine=engine),
            planted.matrices,
            strict=True,
        ):
            torch.testing.assert_close(J.matrix, truth, atol=1e-12, rtol=0)
    for J, truth in zip(
        tls.block_jacobians(model, TOKENS, context="isolated"), planted.matrices, strict=True
    ):
        torch.testing.assert_close(J.matrix, truth, atol=1e-12, rtol=0)
    span = tls.span_jacobian(model, TOKENS, 0, 3)
    product = planted.matrices[2] @ planted.matrices[1] @ planted.matrices[0]
    torch.testing.assert_close(span.matrix, product, atol=1e-12, rtol=0)


def test_the_model_runs_through_the_whole_library() -> None:
    planted = rotating_blocks(12, ANGLES, funnel=(11, 9, 7, 6, 5, 4), seed=2)
    model = planted.model(torch.float32)
    assert ModelView(model).name == "planted blocks"
    found = chain(model, TOKENS)
    np.testing.assert_allclose(found.effective_rank, planted.effective_rank, rtol=1e-4)
    prompts = torch.randint(0, 32, (3, 4), generator=torch.Generator().manual_seed(0))
    table = profile(model, prompts).to_dataframe().query("operator == 'R'")
    truth = planted.antisymmetric_energy.numpy()
    np.testing.assert_allclose(table["antisymmetric_energy"], truth, rtol=1e-4)
    assert (table["antisymmetric_energy_se"] < 1e-5).all()  # every prompt has the same blocks


def test_model_leaves_the_global_random_state() -> None:
    state = torch.get_rng_state()
    model = rotating_blocks(8, [0.2]).model()
    assert torch.equal(torch.get_rng_state(), state)
    again = rotating_blocks(8, [0.2]).model()
    assert ModelView(model).fingerprint == ModelView(again).fingerprint


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d": 7}, "even"),
        ({"angles_by_depth": []}, "one angle per layer"),
        ({"angles_by_depth": [4.0]}, "one angle per layer"),
        ({"funnel": [3.0, 3.0]}, "one per layer"),
        ({"non_normality": [0.1, 0.2]}, "one per layer"),
        ({"funnel": [2.0]}, r"\(2, 8\]"),
        ({"funnel": [9.0]}, r"\(2, 8\]"),
        ({"non_normality": 1.0}, r"\[0, 1\)"),
    ],
)
def test_blocks_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        rotating_blocks(**{"d": 8, "angles_by_depth": [0.3], **options})


# ----------------------------------------------------------------------------------- activations


def test_planted_correlations_are_those_of_the_samples() -> None:
    planted = planted_activations(20_000, communities=3, bridges=4, units_per_community=5, seed=2)
    measured = torch.corrcoef(planted.states.T)
    assert float((measured - planted.correlation).abs().max()) < 5 / math.sqrt(20_000)
    assert planted.is_bridge.sum() == 4
    assert bool((planted.second[planted.is_bridge] != planted.labels[planted.is_bridge]).all())
    assert bool((planted.second[~planted.is_bridge] == -1).all())


@pytest.mark.parametrize("seed", range(3))
def test_communities_and_bridges_are_recovered(seed: int) -> None:
    planted = planted_activations(seed=seed)
    graph = tls.unit_graph(planted.states, top_k=25)
    com = tls.communities(graph, runs=5, nulls=3)
    plain = ~planted.is_bridge
    assert com.n_communities == 6
    assert adjusted_rand_score(planted.labels[plain], com.labels[plain]) > 0.99
    assert com.z_score > 10
    share = planted.is_bridge.double().mean().item()
    bridges = tls.bridge_units(graph, com, quantile=1 - share)
    assert torch.equal(bridges.is_bridge, planted.is_bridge)
    for unit in planted.is_bridge.nonzero().flatten().tolist():  # beside one of the two it joins
        peers = {int(planted.labels[plain][i]) for i in
                 (com.labels[plain] == com.labels[unit]).nonzero().flatten()}  # fmt: skip
        assert peers <= {int(planted.labels[unit]), int(planted.second[unit])}


def test_few_edges_per_unit_hide_bridges() -> None:
    """With fewer edges than its communities have units, a bridge shows the stronger side alone."""
    planted = planted_activations(seed=0)
    found = []
    for top_k in (10, 25):
        graph = tls.unit_graph(planted.states, top_k=top_k)
        bridges = tls.bridge_units(graph, tls.communities(graph, runs=3, nulls=0))
        found.append(float(bridges.participation[planted.is_bridge].min()))
    assert found[0] < 0.1
    assert found[1] > 0.45


def test_participation_of_the_population_ranks_that_of_the_graph() -> None:
    planted = planted_activations(4000, bridges=30, seed=1)
    graph = tls.unit_graph(planted.states, density=1.0)
    row = planted.labels[None]
    com = dataclasses.replace(
        tls.communities(graph, runs=1, nulls=0), labels=planted.labels, run_labels=row
    )
    found = tls.bridge_units(graph, com).participation
    bridge = planted.is_bridge
    assert float(found[bridge].min()) > float(found[~bridge].max())
    assert float(planted.participation[bridge].min()) > float(planted.participation[~bridge].max())


def test_activations_that_cannot_be() -> None:
    with pytest.raises(InputError, match="2 communities"):
        planted_activations(communities=1)
    with pytest.raises(InputError, match="strength"):
        planted_activations(strength=1.0)


# -------------------------------------------------------------------------------------- coupling


@pytest.mark.parametrize("rho", [-0.5, 0.5])
def test_a_planted_coupling_has_its_sign_and_size(rho: float) -> None:
    planted = planted_coupling(rho, 240, seed=4)
    result = coupling(planted.jacobian, planted.graph, planted.communities, permutations=499)
    assert result.unit_interval[0] <= rho <= result.unit_interval[1]
    assert result.unit_p == pytest.approx(1 / 500)
    assert result.cohens_d * rho > 0
    torch.testing.assert_close(result.log_gain, planted.log_gain - planted.log_gain.quantile(0.5))
    assert result.confounds == ("norm_gain", "activation_std", "strength")


def test_confounds_are_present_where_nothing_is_planted() -> None:
    found = [measured(planted_coupling(0.0, 160, seed=seed)) for seed in range(6)]
    assert np.mean([result.raw_rho for result in found]) > 0.25
    assert abs(np.mean([result.unit_rho for result in found])) < 0.1
    table = found[0].confounds_dataframe().set_index("confound")
    assert (table["rho_participation"] > 0.05).all()
    assert table.loc["norm_gain", "rho_participation"] > 0.3
    assert (table["rho_gain"] > 0.2).all()
    none = planted_coupling(0.0, 160, confounds=(), seed=1)
    assert abs(stats.spearmanr(none.log_gain, none.graph.norm_gain).statistic) < 0.25
    assert none.confounds == ()


def test_same_seed_same_coupling() -> None:
    one, two = planted_coupling(0.2, 80, seed=5), planted_coupling(0.2, 80, seed=5)
    assert torch.equal(one.jacobian, two.jacobian)
    assert torch.equal(one.states, two.states)
    assert not torch.equal(one.states, planted_coupling(0.2, 80, seed=6).states)


def test_couplings_that_cannot_be() -> None:
    for options, message in (
        ({"rho": 0.95}, "rho must"),
        ({"n_units": 20}, "5 units"),
        ({"confounds": ("massive",)}, "'massive' cannot be planted"),
        ({"confounds": ("size",)}, "'size' cannot be planted"),
    ):
        with pytest.raises(InputError, match=message):
            planted_coupling(**options)


def measured(planted: Any, seed: int = 0) -> CouplingResult:
    return coupling(
        planted.jacobian, planted.graph, planted.communities, permutations=199, seed=seed
    )


TRIALS = 200
# two-sided 99 % range of a binomial share with p = 0.05 in 200 trials, and its floor for a coverage
LOW, HIGH = (stats.binom.ppf(q, TRIALS, 0.05) / TRIALS for q in (0.005, 0.995))
LEAST = 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    ("confounding", "shared"), [(1.0, 0.0), (2.0, 0.0), (1.0, 1.0)], ids=["usual", "strong", "own"]
)
def test_false_positives_are_at_their_level(confounding: float, shared: float) -> None:
    """200 layers without coupling, each with its own graph and its own confounds."""
    found = [
        measured(planted_coupling(confounding=confounding, shared=shared, seed=seed), seed)
        for seed in range(TRIALS)
    ]
    raw = np.mean([result.raw_rho for result in found])
    assert raw > 0.25  # what is not there would be found by whoever forgets the confounds
    for name in ("unit_p", "community_p"):
        share = np.mean([getattr(result, name) <= 0.05 for result in found])
        assert LOW <= share <= HIGH, (name, share)
    assert covers([result.unit_interval for result in found], 0.0) >= LEAST
    assert covers([result.cohens_interval for result in found], 0.0) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("rho", [-0.5, -0.2, 0.3])
def test_intervals_cover_the_planted_coupling(rho: float) -> None:
    found = [measured(planted_coupling(rho, seed=1000 + seed), seed) for seed in range(TRIALS)]
    assert covers([result.unit_interval for result in found], rho) >= LEAST
    assert np.mean([result.unit_rho for result in found]) == pytest.approx(rho, abs=0.05)
    assert np.mean([np.sign(result.unit_rho) == np.sign(rho) for result in found]) > 0.98


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("true", [0.0, 0.7])
def test_trends_over_depth_err_at_their_level(memory: float, true: float) -> None:
    """200 pairs of autoregressive profiles of 40 layers, unrelated or related by a known ρ."""
    rng = np.random.default_rng(7)
    base = measured(planted_coupling(n_units=48, communities=4))
    target = 6 / math.pi * math.asin(true / 2)
    trends = []
    for _ in range(TRIALS):
        x, z = profile_over_depth(rng, 40, memory), profile_over_depth(rng, 40, memory)
        y = true * x + math.sqrt(1 - true**2) * z
        trends.append(coupling_trend(layers_of(base, x), y.tolist(), permutations=9))
    assert covers([trend.interval for trend in trends], target) >= LEAST
    if true == 0:
        share = np.mean([trend.p_shift <= 0.05 for trend in trends])
        assert LOW <= share <= HIGH
        assert np.mean([trend.verdict == "holds" for trend in trends]) <= HIGH
    else:
        assert np.mean([trend.rho > 0 for trend in trends]) > 0.95


def covers(intervals: Sequence[tuple[float, float]], truth: float) -> float:
    return float(np.mean([low <= truth <= high for low, high in intervals]))


def layers_of(base: CouplingResult, rho: np.ndarray) -> list[CouplingResult]:
    return [
        dataclasses.replace(base, layer=layer, unit_rho=float(value))
        for layer, value in enumerate(rho)
    ]


def profile_over_depth(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    noise = rng.normal(size=n + 60)
    values = np.zeros_like(noise)
    for step in range(1, n + 60):
        values[step] = memory * values[step - 1] + noise[step]
    return values[60:] * math.sqrt(1 - memory**2)
