"""Closed-form references against Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tl_spectral.baselines import ginibre_reference, product_reference, skip_reference
from tl_spectral.metrics import METRICS
from tl_spectral.spectrum import spectrum

D, DRAWS, K = 200, 6, 10
# edges of a spectrum fluctuate and lie inside their limit by O(d^-2/3)
RELATIVE = {
    "spectral_radius": 0.06,
    "spectral_norm": 0.03,
    "numerical_abscissa": 0.03,
    "stable_rank": 0.05,
    "expanding_fraction": 0.05,
    "henrici": 0.01,
    "effective_rank": 0.01,
    "participation_ratio": 0.01,
    "rotation_index": 0.02,
    "antisymmetric_energy": 0.02,
    "complex_fraction": 0.02,
    "self_alignment": 0.1,
    "frobenius": 0.01,
    "norm_ratio": 0.01,
}


def draws(r, skip):
    for seed in range(DRAWS):
        G = np.random.default_rng(seed).standard_normal((D, D))
        G *= r * math.sqrt(D) / np.linalg.norm(G)
        yield spectrum(torch.from_numpy(G + np.eye(D) * skip), k=K)


@pytest.mark.parametrize(
    ("r", "skip"),
    [(1.5, False), (0.004, True), (0.1, True), (0.6, True), (1.4, True), (3.0, True)],
)
def test_references_are_what_random_matrices_give(r, skip):
    reference = (skip_reference if skip else ginibre_reference)(D, r * math.sqrt(D), K)
    measured = list(draws(r, skip))
    for name, tolerance in RELATIVE.items():
        if reference[name] is None or name == "norm_ratio":
            continue
        mean = np.mean([getattr(s, name) for s in measured])
        assert mean == pytest.approx(reference[name], rel=tolerance, abs=0.01 if skip else 0.02), (
            name
        )


def test_symmetry_and_trace_have_their_exact_means():
    reference = ginibre_reference(8, 3.0, 2)
    G = np.random.default_rng(0).standard_normal((20_000, 8, 8))
    square, norm = np.einsum("nij,nji->n", G, G), np.sum(G**2, axis=(1, 2))
    standard_error = np.std(square / norm) / math.sqrt(len(G))
    assert np.mean(square / norm) == pytest.approx(
        reference["symmetry_score"], abs=4 * standard_error
    )
    assert reference["trace"] == 0


@pytest.mark.parametrize("d", [32, 100])
def test_condition_numbers_are_geometric_means(d):
    logs = []
    for seed in range(60):
        s = spectrum(torch.from_numpy(np.random.default_rng(seed).standard_normal((d, d))))
        logs.append((math.log(s.condition_number), math.log(s.eigenvector_condition)))
    reference = ginibre_reference(d, 1.0, 10)
    expected = [reference["condition_number"], reference["eigenvector_condition"]]
    np.testing.assert_allclose(np.mean(logs, axis=0), np.log(expected), atol=0.3)


def test_condition_number_of_skip_reference():
    measured = np.mean([s.condition_number for s in draws(0.5, True)])
    reference = skip_reference(D, 0.5 * math.sqrt(D), K)["condition_number"]
    assert measured == pytest.approx(reference, rel=0.05)
    assert skip_reference(D, 1.5 * math.sqrt(D), K)["condition_number"] is None


def test_skip_reference_joins_the_identity_and_the_ginibre_matrix():
    small = skip_reference(100, 1e-6, 10)
    for name in ("effective_rank", "participation_ratio", "stable_rank"):
        assert small[name] == pytest.approx(100)
    assert small["self_alignment"] == pytest.approx(1)
    assert small["expanding_fraction"] == pytest.approx(0.5, abs=1e-6)
    huge, ginibre = skip_reference(100, 1e5, 10), ginibre_reference(100, 1e5, 10)
    for name, value in ginibre.items():
        if value and huge[name] is not None and name not in ("frobenius", "trace"):
            assert huge[name] == pytest.approx(value, rel=1e-2), name


def test_skip_reference_has_no_seam_where_its_formulas_change():
    for r in (1e-3, 1e-2, 2.0):
        below, above = (skip_reference(64, r * f * 8, 10) for f in (1 - 1e-9, 1 + 1e-9))
        for name, value in below.items():
            if value is not None:
                assert above[name] == pytest.approx(value, rel=2e-3), name


def test_a_small_update_expands_a_little_more_than_half():
    """The unit circle bends away from the disc of eigenvalues: 1/2 + r/(3π) to first order."""
    for r in (5e-4, 2e-3):
        excess = skip_reference(64, r * 8, 10)["expanding_fraction"] - 0.5
        assert excess == pytest.approx(r / (3 * math.pi), rel=1e-4)


def test_every_metric_has_a_baseline_entry():
    assert list(ginibre_reference(9, 1.0, 2)) == list(METRICS) == list(skip_reference(9, 1.0, 2))


def test_product_reference_is_fuss_catalan():
    d, depth = 300, 4
    P, rng = np.eye(d), np.random.default_rng(0)
    effective, participation = product_reference(d, range(1, depth + 1))
    for i in range(depth):
        P = rng.standard_normal((d, d)) @ P
        s = spectrum(torch.from_numpy(P / np.linalg.norm(P)))
        assert s.effective_rank == pytest.approx(float(effective[i]), rel=0.04)
        assert s.participation_ratio == pytest.approx(float(participation[i]), rel=0.06)
    assert float(effective[0]) == pytest.approx(d * math.exp(-0.5))
    assert float(participation[0]) == d / 2
