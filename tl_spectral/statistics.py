"""The few statistics the couplings rest on: partial rank correlation, permutations, intervals.

All functions are pure, work in float64 on NumPy arrays and take an explicit random generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize, stats

from tl_spectral.errors import InputError

Z95 = 1.959963984540054  # normal quantile of a two-sided 95 % interval
_RELATIVE_TOLERANCE = 1e-10  # below this, a direction of the confounds repeats the others


def fdr(p: Sequence[float] | Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Adjust p-values for the false discovery rate (Benjamini & Hochberg 1995).

    Args:
        p: p-values in [0, 1]. NaN (a test that could not be made) stays NaN and is not counted.

    Returns:
        q-values, in the order of ``p``.

    Raises:
        InputError: If a value lies outside [0, 1].
    """
    values = np.array(p, dtype=np.float64)
    made = ~np.isnan(values)
    if ((values[made] < 0) | (values[made] > 1)).any():
        raise InputError("p-values must lie in [0, 1]; check that no statistic was passed instead.")
    if made.any():
        values[made] = stats.false_discovery_control(values[made], method="bh")
    return values


def ranks(values: Float[np.ndarray, "row n"]) -> Float[np.ndarray, "row n"]:
    """Average ranks of each row, centred."""
    ranked = stats.rankdata(values, axis=1)
    return np.asarray(ranked - ranked.mean(axis=1, keepdims=True))


def rank_basis(confounds: Float[np.ndarray, "k n"], degree: int = 1) -> Float[np.ndarray, "n q"]:
    """Orthonormal basis of the span of the constant and of polynomials in the confounds' ranks.

    Degree 1 is textbook partial rank correlation, which lets a confound through whenever ranks
    depend on it other than linearly. Higher degrees (Legendre polynomials of the ranks scaled to
    [−1, 1]) follow any smooth dependence.

    Args:
        confounds: One confound per row.
        degree: Degree of the polynomials.

    Returns:
        The basis, constant first. Confounds that repeat each other or are constant add no
        direction, so ``q <= k · degree + 1``.
    """
    n = confounds.shape[1]
    constant = np.full((n, 1), 1 / math.sqrt(n))
    if confounds.shape[0] == 0:
        return constant
    scaled = ranks(confounds) * (2 / n)
    powers = np.polynomial.legendre.legvander(scaled, degree)[:, :, 1:]  # [k, n, degree]
    columns = np.moveaxis(powers, 1, 2).reshape(-1, n)
    columns = _unit_rows(columns - columns.mean(axis=1, keepdims=True))
    left, singular, _ = np.linalg.svd(columns.T, full_matrices=False)
    return np.hstack([constant, left[:, singular > _RELATIVE_TOLERANCE * math.sqrt(n)]])


def rank_residuals(
    values: Float[np.ndarray, "row n"], basis: Float[np.ndarray, "n q"]
) -> Float[np.ndarray, "row n"]:
    """Ranks of each row with the span of ``basis`` projected out, at unit length.

    A row that the basis explains entirely (a constant, or a copy of a confound) becomes NaN: it has
    no partial correlation with anything.
    """
    centred = ranks(values)
    left = centred - (centred @ basis) @ basis.T
    length = np.linalg.norm(left, axis=1, keepdims=True)
    explained = length <= 1e-9 * max(values.shape[1], 1) ** 1.5
    return np.asarray(left / np.where(explained, np.nan, length))


def partial_spearman(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    confounds: Float[np.ndarray, "k n"] | None = None,
    degree: int = 1,
) -> float:
    """Spearman correlation of ``x`` and ``y`` with the ranks of the confounds regressed out.

    Without confounds this is ``scipy.stats.spearmanr``; ``degree`` as in :func:`rank_basis`.

    Returns:
        The correlation; NaN if ``x`` or ``y`` is constant, or a function of the confounds alone.
    """
    basis = rank_basis(np.empty((0, x.size)) if confounds is None else confounds, degree)
    first, second = rank_residuals(np.stack([x, y]), basis)
    return float(first @ second)


def freedman_lane(
    x: Float[np.ndarray, " n"],
    y: Float[np.ndarray, " n"],
    basis: Float[np.ndarray, "n q"],
    permutations: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, " permutations"]:
    """Null distribution of the partial correlation by permuting residuals.

    Freedman & Lane 1983 (Winkler et al. 2014): permute the residuals of ``y``, add the fit back,
    regress the confounds out again. The fit cancels in the second regression, which leaves one
    scalar product per permutation.

    Args:
        x: Residuals orthogonal to ``basis``; of unit length, or an average of such vectors.
        y: Residuals orthogonal to ``basis``.
        basis: Orthonormal, from :func:`rank_basis`.
        permutations: How many.
        rng: The generator; advanced by the call.

    Returns:
        The statistic ``x · ŷ`` under each permutation.
    """
    null = np.empty(permutations)
    chunk = max(1, 4_000_000 // max(y.size, 1))  # 32 MB at a time
    energy = float(y @ y)
    for start in range(0, permutations, chunk):
        size = min(chunk, permutations - start)
        shuffled = rng.permuted(np.broadcast_to(y, (size, y.size)), axis=1)
        explained = np.square(shuffled @ basis).sum(axis=1)
        null[start : start + size] = (shuffled @ x) / np.sqrt(energy - explained)
    return null


def permutation_p(statistic: float, null: Float[np.ndarray, " m"]) -> float:
    """Two-sided p-value ``(b + 1) / (m + 1)`` of a statistic against its permutations.

    Phipson & Smyth 2010: never zero, since the observed arrangement is one of the permutations.
    """
    if math.isnan(statistic):
        return math.nan
    # an equal arrangement must count as equal although its sum was taken in another order
    return (1 + int((np.abs(null) >= abs(statistic) - 1e-12).sum())) / (null.size + 1)


def design_effect(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], labels: Int[np.ndarray, " n"]
) -> float:
    """By how much shared groups inflate the variance of a correlation.

    Units of one group resemble each other, so ``n`` units are fewer than ``n`` independent ones.
    With intra-class correlations ``ρx``, ``ρy`` (one-way ANOVA estimator) and group sizes ``m``:
    ``deff = 1 + ρx ρy (Σm²/n − 1)`` (Clifford, Richardson & Hémon 1989, for block correlation).
    ``y`` should be a residual, lest a real effect of ``x`` be taken for resemblance.

    Returns:
        The factor, at least 1 (a negative product would promise more units than there are).
    """
    _, group = np.unique(labels, return_inverse=True)
    sizes = np.bincount(group).astype(np.float64)
    if sizes.size < 2 or sizes.size == x.size:
        return 1.0
    shared = _intraclass(x, group, sizes) * _intraclass(y, group, sizes)
    return max(1.0, float(1 + shared * (sizes @ sizes / x.size - 1)))


def _intraclass(
    values: Float[np.ndarray, " n"], group: Int[np.ndarray, " n"], sizes: Float[np.ndarray, " c"]
) -> float:
    n, count = values.size, sizes.size
    means = np.bincount(group, values) / sizes
    between = float(sizes @ np.square(means - values.mean())) / (count - 1)
    within = float(np.square(values - means[group]).sum()) / (n - count)
    typical = (n - np.square(sizes).sum() / n) / (count - 1)
    total = between + (typical - 1) * within
    return (between - within) / total if total > 0 else 0.0


def fisher_interval(
    correlation: float, n: float, n_directions: int = 0, ceiling: float = 1.0
) -> tuple[float, float]:
    """95 % interval of a (partial) Spearman correlation.

    Fisher's z with the standard error of Bonett & Wright 2000, ``sqrt((1 + r²/2)/(n − k − 3))``.

    Args:
        correlation: The estimate.
        n: Number of units, or the effective number if they depend on one another.
        n_directions: How many directions (k) were regressed out, the constant not counted.
        ceiling: Largest value that the estimate can take: less than 1 for an average of
            correlations with vectors that disagree.

    Returns:
        Lower and upper end. With ``n − k <= 3`` the whole range: the data say nothing.
    """
    if math.isnan(correlation):
        return math.nan, math.nan
    spare = n - n_directions - 3
    r = correlation / ceiling
    if spare <= 0:
        return -ceiling, ceiling
    if abs(r) >= 1:
        return correlation, correlation
    half = Z95 * math.sqrt((1 + r * r / 2) / spare)
    return ceiling * math.tanh(math.atanh(r) - half), ceiling * math.tanh(math.atanh(r) + half)


def detectable_correlation(
    n: float | int,
    n_directions: int = 0,
    *,
    ceiling: float = 1.0,
    power: float = 0.8,
    alpha: float = 0.05,
) -> float:
    """Smallest (partial) Spearman correlation that a two-sided test finds with a given power.

    Solves ``atanh r = (z_{1−α/2} + z_power · sqrt(1 + r²/2)) / sqrt(n − k − 3)``: Fisher's z with
    the null's standard error, and Bonett & Wright's 2000 at the effect.

    Args:
        n: Number of units, or the effective number if they depend on one another.
        n_directions: How many directions (k) were regressed out, the constant not counted.
        ceiling: Largest value that the estimate can take, see :func:`fisher_interval`.
        power: Probability of finding it.
        alpha: Level of the test.

    Returns:
        The correlation, at most ``ceiling``; NaN with ``n − k <= 3``, where nothing can be found.

    Raises:
        InputError: Unless ``0 < alpha < power < 1``.
    """
    if not 0 < alpha < power < 1:
        raise InputError(f"0 < alpha < power < 1 is needed, got {alpha} and {power}.")
    spare = n - n_directions - 3
    if not spare > 0:
        return math.nan
    bar, reach = float(stats.norm.ppf(1 - alpha / 2)), float(stats.norm.ppf(power))

    def missing(z: float) -> float:
        r = math.tanh(z)
        return z - (bar + reach * math.sqrt(1 + r * r / 2)) / math.sqrt(spare)

    most = (bar + abs(reach) * math.sqrt(1.5)) / math.sqrt(spare)
    return ceiling * math.tanh(optimize.brentq(missing, 0.0, most + 1.0))


def cohens_d(
    first: Float[np.ndarray, " a"], second: Float[np.ndarray, " b"]
) -> tuple[float, tuple[float, float]]:
    """Standardised difference of two means (pooled deviation) and its 95 % interval.

    The interval is the large-sample one of Hedges & Olkin 1985:
    variance ``(a + b)/(a b) + d²/(2(a + b))``.

    Returns:
        ``d`` and ``(low, high)``; NaN when a group has fewer than two members or nothing varies.
    """
    a, b = first.size, second.size
    if min(a, b) < 2:
        return math.nan, (math.nan, math.nan)
    pooled = ((a - 1) * first.var(ddof=1) + (b - 1) * second.var(ddof=1)) / (a + b - 2)
    if pooled <= 0:
        return math.nan, (math.nan, math.nan)
    d = float((first.mean() - second.mean()) / math.sqrt(pooled))
    half = Z95 * math.sqrt((a + b) / (a * b) + d * d / (2 * (a + b)))
    return d, (d - half, d + half)


def shift_null(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " shifts"]:
    """Scalar products of ``x`` with every non-trivial circular shift of ``y``.

    A shift keeps the autocorrelation of both series and breaks only their alignment, so two smooth
    but unrelated profiles over depth are not taken for a relation.
    """
    return np.array([x @ np.roll(y, step) for step in range(1, y.size)])


def effective_length(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Effective number of independent pairs in two autocorrelated series.

    ``n / (1 + 2 Σ_k (1 − k/n) r_x(k) r_y(k))`` over lags up to n/3, with unbiased sample
    autocorrelations (Bartlett 1935; Pyper & Peterman 1998), at most ``n``.
    """
    n = x.size
    first, second = x - x.mean(), y - y.mean()

    def autocorrelation(values: Float[np.ndarray, " n"], lag: int) -> float:
        return float(values[lag:] @ values[:-lag] / (n - lag) / (values @ values / n))

    shared = sum(
        (1 - lag / n) * autocorrelation(first, lag) * autocorrelation(second, lag)
        for lag in range(1, n // 3 + 1)
    )
    return n / max(1.0, 1 + 2 * shared)


def series_mean_error(values: Float[np.ndarray, " n"]) -> float:
    """Half-width of the 95 % interval of the mean of a series whose neighbours resemble each other.

    The series is taken as autoregressive of order 1: ``n_eff = n (1 − r)/(1 + r)`` with the lag-1
    autocorrelation corrected for its bias, ``r = (n r₁ + 1)/(n − 4)`` (Kendall 1954), and the
    variance for what a short series hides of it, ``1/(1 − 1/n_eff)``. In simulated series of 24
    and more values it covers in 93–97 % for r up to 0.6; of 12 values in 97, 94 and 91 % for r = 0,
    0.3 and 0.6.

    Args:
        values: The series, at least 3 values.

    Returns:
        The half-width; 0 for a constant series.
    """
    n, apart = values.size, values - values.mean()
    energy = float(apart @ apart)
    if energy <= n * (1e-12 * max(1.0, float(np.abs(values).max()))) ** 2:
        return 0.0
    lag = float(apart[1:] @ apart[:-1]) / energy
    r = min(max((n * lag + 1) / max(n - 4, 1), 0.0), 1 - 2 / n)
    effective = max(2.0, n * (1 - r) / (1 + r))
    variance = energy / n / (1 - 1 / effective)
    return float(stats.t.ppf(0.975, effective - 1)) * math.sqrt(variance / effective)


def _unit_rows(values: Float[np.ndarray, "row n"]) -> Float[np.ndarray, "row n"]:
    """Rows at unit length; rows that are constant up to rounding become 0."""
    length = np.linalg.norm(values, axis=1, keepdims=True)
    return np.where(length > 1e-12 * values.shape[1], values / np.where(length > 0, length, 1), 0.0)
