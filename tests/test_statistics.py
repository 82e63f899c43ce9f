"""Closed forms, brute force and SciPy as oracles for the statistics of the couplings."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tl_spectral import statistics
from tl_spectral.errors import InputError


def test_fdr_is_benjamini_hochberg_and_skips_what_was_not_tested() -> None:
    p = np.array([0.01, np.nan, 0.04, 0.03, 0.5])
    expected = np.minimum.accumulate((np.array([0.01, 0.03, 0.04, 0.5]) * 4 / [1, 2, 3, 4])[::-1])
    q = statistics.fdr(p)
    assert np.isnan(q[1])
    np.testing.assert_allclose(q[[0, 3, 2, 4]], expected[::-1])
    assert np.isnan(statistics.fdr([math.nan, math.nan])).all()


def test_fdr_refuses_what_is_no_p_value() -> None:
    with pytest.raises(InputError, match=r"\[0, 1\]"):
        statistics.fdr([0.1, 1.5])


def test_partial_spearman_without_confounds_is_spearman(rng: np.random.Generator) -> None:
    x = rng.integers(0, 12, 60).astype(float)  # ties
    y = x + rng.normal(size=60) * 4
    assert statistics.partial_spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_partial_spearman_of_one_confound_is_the_textbook_formula(
    rng: np.random.Generator,
) -> None:
    z = rng.normal(size=80)
    x, y = z + rng.normal(size=80), z + rng.normal(size=80)
    xy, xz, yz = (stats.spearmanr(a, b).statistic for a, b in ((x, y), (x, z), (y, z)))
    expected = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    assert statistics.partial_spearman(x, y, z[None]) == pytest.approx(expected)


def test_repeated_and_constant_confounds_change_nothing(rng: np.random.Generator) -> None:
    x, y, z = rng.normal(size=(3, 40))
    once = statistics.partial_spearman(x, y, z[None])
    more = np.stack([z, np.exp(z), np.ones(40), -z])
    assert statistics.partial_spearman(x, y, more) == pytest.approx(once)
    assert statistics.rank_basis(more).shape == (40, 2)


def test_polynomials_of_ranks_remove_what_a_line_leaves(rng: np.random.Generator) -> None:
    z = rng.normal(size=2000)
    x, y = z**2 + 0.3 * rng.normal(size=(2, 2000))
    assert statistics.partial_spearman(x, y, z[None]) > 0.6
    assert abs(statistics.partial_spearman(x, y, z[None], degree=4)) < 0.1
    basis = statistics.rank_basis(np.stack([z, z > 0]), degree=3)
    assert basis.shape == (2000, 1 + 3 + 1)
    np.testing.assert_allclose(basis.T @ basis, np.eye(5), atol=1e-12)


def test_what_the_confounds_explain_entirely_has_no_partial_correlation(
    rng: np.random.Generator,
) -> None:
    x, z = rng.normal(size=(2, 500))
    assert math.isnan(statistics.partial_spearman(x, np.exp(z), z[None]))
    assert math.isnan(statistics.partial_spearman(x, np.ones(500)))


def test_freedman_lane_is_the_regression_it_stands_for(rng: np.random.Generator) -> None:
    """Permute residuals, add the fit back, regress again: one by one, with full regressions."""
    z, x, y = rng.normal(size=(3, 25))
    basis = statistics.rank_basis(z[None])
    first, second = statistics.rank_residuals(np.stack([x, y]), basis)
    null = statistics.freedman_lane(first, second, basis, 20, np.random.default_rng(3))

    design = np.column_stack([np.ones(25), stats.rankdata(z)])
    ranked = stats.rankdata(y)
    fit = design @ np.linalg.lstsq(design, ranked, rcond=None)[0]
    orders = np.random.default_rng(3).permuted(np.tile(np.arange(25), (20, 1)), axis=1)
    for order, value in zip(orders, null, strict=True):
        surrogate = fit + (ranked - fit)[order]
        left = surrogate - design @ np.linalg.lstsq(design, surrogate, rcond=None)[0]
        assert value == pytest.approx(first @ left / np.linalg.norm(left))


def test_permutation_p_counts_the_observed_arrangement() -> None:
    null = np.array([0.1, -0.3, 0.2, -0.05])
    assert statistics.permutation_p(0.25, null) == pytest.approx(2 / 5)
    assert statistics.permutation_p(-0.9, null) == pytest.approx(1 / 5)
    assert math.isnan(statistics.permutation_p(math.nan, null))


def test_design_effect_counts_groups_when_units_copy_each_other(rng: np.random.Generator) -> None:
    labels = np.repeat(np.arange(20), 30)
    x, y = rng.normal(size=(2, 20))
    assert statistics.design_effect(x[labels], y[labels], labels) == pytest.approx(30)
    noise = rng.normal(size=(2, 600))
    assert statistics.design_effect(*noise, labels) == pytest.approx(1, abs=0.1)
    assert statistics.design_effect(*noise, np.arange(600)) == 1
    assert statistics.design_effect(*noise, np.zeros(600, dtype=int)) == 1


def test_fisher_interval_covers(rng: np.random.Generator) -> None:
    n, trials, covered = 60, 600, 0
    mixing = 0.5
    truth = 6 / math.pi * math.asin(mixing / 2)  # Spearman of a normal pair
    x = rng.normal(size=(trials, n))
    y = mixing * x + math.sqrt(1 - mixing**2) * rng.normal(size=(trials, n))
    for a, b in zip(x, y, strict=True):
        low, high = statistics.fisher_interval(statistics.partial_spearman(a, b), float(n))
        covered += low <= truth <= high
    assert 0.93 <= covered / trials <= 0.97


def test_fisher_interval_says_nothing_without_data_and_respects_its_ceiling() -> None:
    assert statistics.fisher_interval(0.2, 4.0, 1) == (-1, 1)
    low, high = statistics.fisher_interval(0.35, 10.0, ceiling=0.4)
    assert -0.4 <= low < 0.35 < high <= 0.4
    assert statistics.fisher_interval(1.0, 10.0) == (1, 1)


@pytest.mark.parametrize(("n", "k", "power"), [(60, 0, 0.8), (60, 10, 0.8), (200, 0, 0.5)])
def test_detectable_correlation_is_detected_that_often(
    rng: np.random.Generator, n: int, k: int, power: float
) -> None:
    r = statistics.detectable_correlation(n, k, power=power)
    pearson = 2 * math.sin(math.pi * r / 6)  # its Spearman correlation is r, for normal pairs
    confounds = rng.normal(size=(k, n))
    basis = statistics.rank_basis(confounds)
    hits, runs = 0, 1000
    for _ in range(runs):
        x, noise = rng.normal(size=(2, n))
        y = pearson * x + math.sqrt(1 - pearson**2) * noise
        first, second = statistics.rank_residuals(np.stack([x, y]), basis)
        found = float(first @ second)
        spare = n - k - 2
        hits += stats.t.sf(abs(found) * math.sqrt(spare / (1 - found**2)), spare) < 0.025
    assert hits / runs == pytest.approx(power, abs=0.045)


def test_detectable_correlation_has_its_limits() -> None:
    assert math.isnan(statistics.detectable_correlation(13, 10))
    assert statistics.detectable_correlation(100, ceiling=0.5) == pytest.approx(
        0.5 * statistics.detectable_correlation(100)
    )
    plain = statistics.detectable_correlation(4000)
    assert plain == pytest.approx((1.9600 + 0.8416) / math.sqrt(4000), rel=2e-3)
    assert 0.9 < statistics.detectable_correlation(4.5) < 1
    for power, alpha in ((1.0, 0.05), (0.05, 0.05), (0.8, 0.0), (math.nan, 0.05)):
        with pytest.raises(InputError, match="alpha < power"):
            statistics.detectable_correlation(50, power=power, alpha=alpha)


@pytest.mark.parametrize(
    ("n", "smooth", "least"), [(24, 0.0, 0.93), (24, 0.6, 0.9), (12, 0.3, 0.9)]
)
def test_the_mean_of_a_smooth_series_is_covered(
    rng: np.random.Generator, n: int, smooth: float, least: float
) -> None:
    covered, widths = [], []
    for _ in range(600):
        series = np.zeros(n + 20)
        for i, noise in enumerate(rng.normal(size=n + 19)):
            series[i + 1] = smooth * series[i] + noise
        width = statistics.series_mean_error(series[20:])
        covered.append(abs(series[20:].mean()) <= width)
        widths.append(width)
    assert np.mean(covered) >= least
    if smooth == 0:
        assert np.median(widths) == pytest.approx(1.96 / math.sqrt(n), rel=0.25)
    assert statistics.series_mean_error(np.full(5, 0.3)) == 0


def test_cohens_d_closed_form() -> None:
    first, second = np.array([1.0, 2, 3]), np.array([0.0, 1, 2, 3, 4])
    d, (low, high) = statistics.cohens_d(first + 1, second)
    pooled = math.sqrt((2 * 1 + 4 * 2.5) / 6)
    assert d == pytest.approx(1 / pooled)
    half = 1.959964 * math.sqrt(8 / 15 + d**2 / 16)
    assert (low, high) == pytest.approx((d - half, d + half))
    assert math.isnan(statistics.cohens_d(first[:1], second)[0])
    assert math.isnan(statistics.cohens_d(np.ones(3), np.ones(4))[0])


def test_shift_null_holds_every_rotation_but_the_observed_one() -> None:
    x, y = np.array([1.0, 2, 4, 8]), np.array([1.0, 0, 0, 0])
    np.testing.assert_array_equal(statistics.shift_null(x, y), [2, 4, 8])


def test_effective_length_of_white_and_of_smooth_series(rng: np.random.Generator) -> None:
    noise = rng.normal(size=(2, 2000))
    assert statistics.effective_length(*noise) == pytest.approx(2000, rel=0.1)
    memory = 0.8
    smooth = np.zeros_like(noise)
    for step in range(1, 2000):
        smooth[:, step] = memory * smooth[:, step - 1] + noise[:, step]
    expected = 2000 * (1 - memory**2) / (1 + memory**2)
    assert statistics.effective_length(*smooth) == pytest.approx(expected, rel=0.4)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
