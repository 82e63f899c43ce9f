"""Schur surgery and its controls."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tl_spectral.errors import InputError
from tl_spectral.spectrum import spectrum
from tl_spectral.surgery import schur_surgery


def gaussian(d=20, seed=0):
    return torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eigenvalues(M):
    return np.sort_complex(np.linalg.eigvals(M.numpy()))


@pytest.mark.parametrize("kind", ["normal", "shuffled", "rotated"])
def test_eigenvalues_stay(kind):
    M = gaussian()
    np.testing.assert_allclose(eigenvalues(schur_surgery(M, kind)), eigenvalues(M), atol=1e-9)


@pytest.mark.parametrize("kind", ["normal", "matched", "rotated"])
def test_the_result_is_normal(kind):
    N = schur_surgery(gaussian(), kind)
    torch.testing.assert_close(N @ N.T, N.T @ N)
    assert spectrum(N).henrici < 1e-12


@pytest.mark.parametrize("kind", ["matched", "shuffled"])
def test_norm_controls_keep_the_norm(kind):
    M = gaussian()
    assert float(schur_surgery(M, kind).norm()) == pytest.approx(float(M.norm()), rel=1e-12)


def test_matched_is_the_normal_part_scaled():
    normal, matched = schur_surgery(gaussian()), schur_surgery(gaussian(), "matched")
    ratio = matched / normal
    assert float(ratio.std()) < 1e-9
    assert float(ratio.mean()) > 1


def test_shuffled_is_as_non_normal_but_another_matrix():
    M = gaussian()
    S = schur_surgery(M, "shuffled", seed=3)
    assert spectrum(S).henrici == pytest.approx(spectrum(M).henrici, rel=1e-8)
    assert float((S - M).norm()) > 0.3 * float(M.norm())


def test_rotated_has_the_singular_values_of_the_normal_part():
    torch.testing.assert_close(
        torch.linalg.svdvals(schur_surgery(gaussian(), "rotated")),
        torch.linalg.svdvals(schur_surgery(gaussian())),
    )


def test_rotated_turns_either_way():
    """A QR factor without its sign correction is a reflection at every seed."""
    quarter = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    turns = {round(float(schur_surgery(quarter, "rotated", seed)[1, 0])) for seed in range(20)}
    assert turns == {-1, 1}


def test_normal_matrices_are_left_alone():
    symmetric = gaussian() + gaussian().T
    rotation = torch.linalg.qr(gaussian())[0]
    for M in (symmetric, rotation, torch.eye(3, dtype=torch.float64)):
        torch.testing.assert_close(schur_surgery(M), M, atol=1e-12, rtol=0)
        torch.testing.assert_close(schur_surgery(M, "matched"), M, atol=1e-12, rtol=0)


def test_a_triangular_matrix_keeps_its_diagonal():
    M = torch.triu(gaussian())
    torch.testing.assert_close(schur_surgery(M), torch.diag(torch.diagonal(M)))
    only_upper = schur_surgery(M, "shuffled") - torch.diag(torch.diagonal(M))
    assert float(torch.tril(only_upper).norm()) < 1e-12


def test_seeds_decide_the_random_controls():
    M = gaussian()
    for kind in ("shuffled", "rotated"):
        assert torch.equal(schur_surgery(M, kind, seed=1), schur_surgery(M, kind, seed=1))
        assert not torch.allclose(schur_surgery(M, kind, seed=1), schur_surgery(M, kind, seed=2))


def test_refusals():
    with pytest.raises(InputError, match="kind"):
        schur_surgery(gaussian(), "usual")
    with pytest.raises(InputError, match="All eigenvalues are zero"):
        schur_surgery(torch.triu(gaussian(), 1), "matched")
    assert not schur_surgery(torch.triu(gaussian(), 1)).any()
