"""Spectra from products alone, against the dense ones.

Changed to see these tests fail: half a pair kept; convergence by the absolute residual; the larger
of the two halves as the bound of the departure, or a wrong factor in the lower one; clusters taken
for isolated values; the error of the quadrature left out.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from scipy.linalg import block_diag
from scipy.sparse.linalg import aslinearoperator

from tests.zoo import tiny
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian import jacobian_operator
from tl_spectral.matrix_free import OperatorSpectrum, operator_spectrum
from tl_spectral.spectrum import spectrum

EXACT = ("spectral_radius", "spectral_norm", "numerical_abscissa", "self_alignment")
ESTIMATED = ("frobenius", "trace", "symmetry_score", "antisymmetric_energy",
             "participation_ratio", "stable_rank")  # fmt: skip


def decaying(d=120, seed=0):
    """A matrix with a few dominant directions, as trained updates have."""
    G = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.diag(1.5 ** -torch.arange(d, dtype=torch.float64)) @ G + 0.02 * G.T / d**0.5


def operator(M):
    return aslinearoperator(M.numpy())


def unconverged(M, **options):
    """For tests of estimates, which must cover whatever the leading values do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TLSpectralWarning)
        return operator_spectrum(operator(M), **options)


def test_leading_values_are_those_of_the_dense_matrix():
    M = decaying()
    free, dense = operator_spectrum(operator(M), k=8, rtol=1e-10), spectrum(M, k=8)
    torch.testing.assert_close(free.singular_values, dense.singular_values[:8])
    torch.testing.assert_close(free.eigenvalues.abs(), dense.eigenvalues[:8].abs())
    for name in EXACT:
        assert getattr(free, name) == pytest.approx(getattr(dense, name), rel=1e-6), name
        assert free.errors[name] < 1e-4
    assert free.baseline["self_alignment"] == pytest.approx(8 / 120)


def test_estimates_lie_within_their_standard_errors():
    M = decaying(seed=1) + 0.3 * torch.eye(120, dtype=torch.float64)
    dense = spectrum(M, k=8)
    z = []
    for seed in range(40):
        free = unconverged(M, k=4, subspace=24, seed=seed)
        z.append([(getattr(free, n) - getattr(dense, n)) / free.errors[n] for n in ESTIMATED[:-1]])
    spread = np.sqrt(np.mean(np.square(z), axis=0))
    assert ((spread > 0.6) & (spread < 1.5)).all(), spread


def test_a_full_subspace_is_exact_even_without_decay():
    G = torch.randn(40, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    free, dense = operator_spectrum(operator(G), k=40, subspace=40), spectrum(G, k=40)
    torch.testing.assert_close(free.singular_values, dense.singular_values)
    torch.testing.assert_close(free.eigenvalues.abs(), dense.eigenvalues.abs())
    assert free.eigenvalue_residuals.max() < 1e-10
    for name in (*ESTIMATED, "numerical_abscissa"):
        assert getattr(free, name) == pytest.approx(getattr(dense, name), rel=1e-8), name


def test_residuals_confess_what_has_not_converged():
    G = torch.randn(150, 150, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with pytest.warns(
        TLSpectralWarning, match=r"\d of \d eigenvalues and 5 of 5 singular values have not"
    ):
        free = operator_spectrum(operator(G), k=5, subspace=16)
    dense = spectrum(G)
    assert not free.converged
    assert not free.singular_values_converged.any()
    error = dense.singular_values[:5] - free.singular_values
    assert (error > 0.01).all()  # Ritz values lie below
    distance = (free.singular_values[:, None] - dense.singular_values).abs().amin(dim=1)
    assert (distance <= free.singular_residuals).all()
    assert (free.eigenvalue_residuals > 0.1).all()


@pytest.mark.parametrize("M", [torch.eye(30), torch.diag(torch.tensor([1.0] * 3 + [0.0] * 27))])
def test_invariant_subspaces_do_not_stop_the_iteration(M):
    free = operator_spectrum(operator(M.double()), k=5)
    np.testing.assert_allclose(free.singular_values, torch.diagonal(M)[:5], atol=1e-12)
    assert free.trace == pytest.approx(float(M.trace()), abs=4 * free.errors["trace"] + 1e-12)
    assert free.stable_rank == pytest.approx(float(M.trace()), rel=0.1)


def test_natural_units_leave_out_what_does_not_vary():
    M, scale = decaying(60), torch.rand(60, dtype=torch.float64) + 0.5
    scale[7] = 0
    free, dense = operator_spectrum(operator(M), scale, k=4), spectrum(M, scale, k=4)
    torch.testing.assert_close(free.singular_values, dense.singular_values[:4])
    assert (free.d, free.n_dropped, free.units) == (59, 1, "natural")
    assert free.frobenius == pytest.approx(dense.frobenius, abs=4 * free.errors["frobenius"])


def test_spectrum_takes_the_jacobian_operator_of_a_model():
    op = jacobian_operator(tiny("gpt2"), torch.arange(5, 12)[None], layer=1)
    free, dense = spectrum(op, k=6), spectrum(op.to_dense(), k=6)
    assert isinstance(free, OperatorSpectrum)
    torch.testing.assert_close(free.singular_values, dense.singular_values[:6], rtol=1e-4, atol=0)
    torch.testing.assert_close(
        free.eigenvalues.abs(), dense.eigenvalues[:6].abs(), rtol=1e-4, atol=0
    )
    assert free.n_products > 0


def various(seed):
    """Small operators of eight kinds, from a random matrix to a multiple of a rotation."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(30, 100))
    G = rng.standard_normal((d, d)) / d**0.5
    u, v = rng.standard_normal((2, d, 3))
    return torch.from_numpy(
        [
            lambda: G,
            lambda: np.eye(d) + 0.3 * G,
            lambda: G + G.T,
            lambda: np.diag(2.0 * 0.9 ** np.arange(d)) @ G + 0.1 * np.eye(d),
            lambda: np.eye(d) + 2 * u @ v.T / d + 0.2 * G,
            lambda: np.triu(G, 1) * 2 + np.diag(rng.standard_normal(d)),
            lambda: np.linalg.qr(G)[0] * rng.uniform(0.5, 1),
            lambda: G @ np.diag(np.where(rng.random(d) < 0.1, 5.0, 0.5)),
        ][seed % 8]()
    )


def test_intervals_cover():
    """``value ± 1.96 errors`` holds the dense value in at least 93 % of 200 small operators."""
    names = (*ESTIMATED, "effective_rank")
    hits = {name: [] for name in (*names, "henrici")}
    for seed in range(200):
        M = various(seed)
        free, dense = unconverged(M, k=4, subspace=20, probes=24, seed=seed), spectrum(M, k=4)
        for name in names:
            exact = getattr(dense, name)
            miss = abs(getattr(free, name) - exact)
            hits[name].append(miss <= 1.96 * free.errors[name] + 1e-9 * abs(exact))
        low = free.henrici_lower - 1.96 * free.errors["henrici_lower"]
        high = free.henrici_upper + 1.96 * free.errors["henrici_upper"]
        hits["henrici"].append(low - 1e-6 <= dense.henrici <= high + 1e-6)
    shares = {name: float(np.mean(hit)) for name, hit in hits.items()}
    assert min(shares.values()) >= 0.93, shares
    assert shares["henrici"] > 0.98  # an interval between two bounds, not an estimate


@pytest.mark.parametrize("d", [20, 60])
def test_henrici_bounds_are_those_of_their_definition(d):
    """Of a full subspace everything is exact, so the bounds can be computed by hand."""
    G = torch.randn(d, d, generator=torch.Generator().manual_seed(d), dtype=torch.float64) / d**0.5
    M = 0.7 * torch.eye(d, dtype=torch.float64) + 0.5 * G
    free, dense = operator_spectrum(operator(M), k=d), spectrum(M, k=d)
    shift = M.trace() / d
    R, C = M - shift * torch.eye(d, dtype=torch.float64), M @ M.T - M.T @ M
    norm, radius = float(dense.spectral_norm + shift), float(dense.spectral_radius + shift)
    by_commutator = float(R.norm() ** 2 - (R.norm() ** 4 - C.norm() ** 2 / 2) ** 0.5)
    by_size = float(C.norm() / (2 * min(norm, float(R.norm())) + 2 * radius)) ** 2
    lower = math.sqrt(max(by_commutator, by_size)) / dense.frobenius
    assert free.henrici_lower == pytest.approx(lower, rel=2e-3)
    # every eigenvalue is known: the upper bound is the departure itself
    assert free.henrici_upper == pytest.approx(dense.henrici, rel=1e-6)


def test_henrici_is_enclosed_tightly_where_that_is_possible():
    d = 80
    rng = np.random.default_rng(0)
    spike = np.eye(d) + 9 * np.outer(*np.linalg.qr(rng.standard_normal((d, 2)))[0].T)
    free, dense = unconverged(torch.from_numpy(spike), k=2), spectrum(torch.from_numpy(spike))
    assert free.henrici_lower == pytest.approx(dense.henrici, rel=0.02)
    assert free.henrici_upper == pytest.approx(dense.henrici, rel=0.02)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]  # normal, with all its energy rotating
    assert unconverged(torch.from_numpy(turn), k=2).henrici_upper < 1e-3


def test_of_two_halves_the_smaller_bounds_the_departure():
    """What is nearly (anti)symmetric departs from normal by its small part at most."""
    G = torch.randn(80, 80, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    S, A = 0.05 * (G + G.T), G - G.T
    for M, part in ((S + A, S), (A.T @ A / 10 + 0.05 * A, 0.05 * A)):
        free, dense = unconverged(M, k=2), spectrum(M)
        bound = 2**0.5 * float(part.norm() / M.norm())
        assert dense.henrici < free.henrici_upper + 3 * free.errors["henrici_upper"]
        assert free.henrici_upper < 1.3 * bound


def test_convergence_does_not_depend_on_the_unit():
    M = decaying(80, seed=4) + 0.1 * torch.eye(80, dtype=torch.float64)
    one, small = (unconverged(size * M, k=6, subspace=34) for size in (1.0, 1e-5))
    assert torch.equal(one.eigenvalues_converged, small.eigenvalues_converged)
    assert torch.equal(one.singular_values_converged, small.singular_values_converged)
    assert 0 < one.eigenvalues_converged.sum() < len(one.eigenvalues)
    error = one.eigenvalue_residuals * one.eigenvalue_conditions
    assert torch.equal(one.eigenvalues_converged, error <= 1e-3 * one.eigenvalues.abs())


def test_complex_pairs_stay_together():
    blocks = [size * np.array([[np.cos(1), -np.sin(1)], [np.sin(1), np.cos(1)]])
              for size in (3.0, 2.0, 1.0)]  # fmt: skip
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((40, 40)))[0]
    M = Q @ block_diag(*blocks, 0.01 * np.eye(34)) @ Q.T
    for k, found in ((1, 2), (2, 2), (3, 4), (4, 4)):
        values = operator_spectrum(operator(torch.from_numpy(M)), k=k).eigenvalues
        assert len(values) == found
        assert values.imag.sum().abs() < 1e-12
        assert len(operator_spectrum(operator(torch.from_numpy(M)), k=k).singular_values) == k


def test_spaces_grow_only_as_far_as_needed():
    d = 300
    easy = torch.diag(2.0 ** -torch.arange(d, dtype=torch.float64))
    loose = operator_spectrum(operator(easy), k=6, rtol=1e-2).n_products
    tight = operator_spectrum(operator(easy), k=6, rtol=1e-12).n_products
    assert loose < tight < 3 * d


def test_wide_jacobian_like_operator_at_a_tenth_of_the_dense_products():
    """Identity, a decaying low-rank part that reads near where it writes, and noise."""
    d, k = 600, 8
    rng = np.random.default_rng(0)
    U, W = np.split(np.linalg.qr(rng.standard_normal((d, 80)))[0], 2, axis=1)
    spikes = (U * 6 * 0.9 ** np.arange(40)) @ (0.6 * U + 0.8 * W).T
    M = torch.from_numpy(np.eye(d) + spikes + 0.5 * rng.standard_normal((d, d)) / d**0.5)
    free, dense = operator_spectrum(operator(M), k=k), spectrum(M, k=k)
    assert free.converged
    torch.testing.assert_close(free.singular_values, dense.singular_values[:k], rtol=1e-3, atol=0)
    torch.testing.assert_close(
        free.eigenvalues[:k].abs(), dense.eigenvalues[:k].abs(), rtol=1e-3, atol=0
    )
    assert free.effective_rank == pytest.approx(dense.effective_rank, rel=0.02)


def test_seeds_decide():
    runs = [operator_spectrum(operator(decaying()), k=3, seed=s).trace for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_table_and_round_trip(tmp_path):
    free = operator_spectrum(operator(decaying()), k=3)
    table = free.to_dataframe().set_index("metric")
    assert table.loc["trace", "error"] == free.errors["trace"] > 0
    loaded = OperatorSpectrum.load(free.save(tmp_path / "o"))
    assert torch.equal(loaded.eigenvalues, free.eigenvalues)
    assert loaded.provenance.seed == 0


@pytest.mark.parametrize(
    ("M", "options", "message"),
    [
        (torch.ones(3, 4), {}, "square"),
        (torch.zeros(4, 4), {"k": 2}, "zero"),
        (torch.full((4, 4), math.nan), {"k": 2}, "not finite"),
        (torch.eye(4), {"k": 5}, "k must be an integer from 1 to 4"),
        (torch.eye(4), {"k": 2, "subspace": 1}, "subspace"),
        (torch.eye(4), {"k": 2, "rtol": 0.0}, "rtol must lie"),
        (torch.eye(4), {"k": 2, "probes": 1}, "probes must be an integer from 2 on"),
        (torch.eye(4), {"k": 2, "scale": torch.tensor([1.0, 0, 0, 0])}, "needs two"),
    ],
)
def test_refusals(M, options, message):
    with pytest.raises(InputError, match=message):
        operator_spectrum(operator(M), **options)


def test_a_tolerance_makes_no_sense_for_an_operator():
    with pytest.raises(InputError, match="only k"):
        spectrum(operator(torch.eye(4)), tol=1e-3)
