"""The vocabulary: every metric of one operator, its definition, source and random baseline."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """One line of the definitions table.

    Attributes:
        definition: Formula, with λ eigenvalues, σ singular values, ``A = (M − Mᵀ)/2``.
        source: Where it is from; "ours" when no paper fixes the formula.
        baseline: Value for a real Ginibre matrix of the same size and ‖M‖_F, ``r = ‖M‖_F/√d``.
        needs_metric: Whether it depends on the inner product, so that raw and natural units differ.
    """

    definition: str
    source: str
    baseline: str
    needs_metric: bool


_A = "arXiv 2605.14258"
METRICS: dict[str, Metric] = {
    "complex_fraction": Metric(
        "share of eigenvalues with |Im λ| > tol·max|λ|", _A, "1 − √(2/(πd))", False
    ),
    "rotation_index": Metric("Σ|Im λ| / Σ|λ|", "ours", "2/π", False),
    "antisymmetric_energy": Metric(
        "‖A‖_F² / ‖M‖_F²; 0 symmetric, 1 a pure generator of rotations",
        "ours",
        "1/2 − 1/(2d)",
        True,
    ),
    "symmetry_score": Metric(
        "tr(M²) / ‖M‖_F² = 1 − 2·antisymmetric_energy; 1 symmetric, −1 antisymmetric",
        "ours",
        "1/d",
        True,
    ),
    "henrici": Metric(
        "√(‖M − μI‖_F² − Σ|λ − μ|²) / ‖M‖_F with μ = tr M / d; 0 only if normal",
        f"Henrici 1962; named in {_A}",
        "1/√2",
        True,
    ),
    "self_alignment": Metric(
        "‖U_kᵀV_k‖_F² / k over the top k singular vectors: does it write where it reads?",
        f"ours; named in {_A}",
        "k/d",
        True,
    ),
    "spectral_radius": Metric("max|λ|", "standard", "r", False),
    "spectral_norm": Metric("σ₁", "standard", "2r", True),
    "numerical_abscissa": Metric("largest eigenvalue of (M + Mᵀ)/2", "standard", "√2·r", True),
    "expanding_fraction": Metric(
        "share of eigenvalues with |λ| > 1: expanding directions of a discrete map (read it on J)",
        _A,
        "max(0, 1 − 1/r²)",
        False,
    ),
    "effective_rank": Metric("exp(−Σ p ln p), p = σ²/Σσ²", _A, "d/√e", True),
    "participation_ratio": Metric("(Σσ²)² / Σσ⁴", "standard", "d/2", True),
    "stable_rank": Metric("‖M‖_F² / σ₁²", "standard", "d/4", True),
    "condition_number": Metric("σ₁ / σ_d", _A, "d·e^1.537 (geometric mean; Edelman 1988)", True),
    "eigenvector_condition": Metric(
        "κ₂(V), columns of V unit eigenvectors: how far the eigenbasis is from orthogonal",
        "standard",
        "about 1.2·d (geometric mean of draws; no closed form)",
        True,
    ),
    "norm_ratio": Metric("‖R‖_F / ‖J‖_F of a block", _A, "none (not a property of M alone)", True),
    "frobenius": Metric("‖M‖_F", "standard", "none (the reference has the same)", True),
    "trace": Metric("Σλ", "standard", "0", False),
}
