"""Spectra from products alone, against the dense ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator

from tests.zoo import tiny
from tl_spectral.errors import InputError
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


def test_leading_values_are_those_of_the_dense_matrix():
    M = decaying()
    free, dense = operator_spectrum(operator(M), k=8), spectrum(M, k=8)
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
        free = operator_spectrum(operator(M), k=4, subspace=12, probes=24, seed=seed)
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
    free, dense = operator_spectrum(operator(G), k=5, subspace=16), spectrum(G)
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
