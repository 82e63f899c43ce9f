"""What chance alone would give: spectra of random matrices, in closed form.

Every reference is deterministic and costs nothing at any width: limits of large ``d`` from random
matrix theory, where a finite-``d`` formula is not exact. Three matrices serve as reference:

* :func:`ginibre_reference`: independent Gaussian entries, of the same ``d`` and ‖M‖_F;
* :func:`skip_reference`: identity plus such a matrix, what the skip connection alone explains;
* :func:`product_reference`: a product of independent Ginibre matrices, for chains over depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import digamma, ellipe
from torch import Tensor

_NODES = 400  # quadrature nodes; the integrands are smooth after the substitutions made below


def ginibre_reference(d: int, frobenius: float, k: int) -> dict[str, float | None]:
    """Metrics of a real Ginibre matrix (independent Gaussian entries) of given size and norm.

    With ``r = frobenius / √d`` the eigenvalues fill the disc of radius ``r`` (circular law) and
    the squared singular values follow the Marchenko-Pastur law of a square matrix.

    Args:
        d: Size.
        frobenius: ‖M‖_F.
        k: Dimension of the subspaces in ``self_alignment``.

    Returns:
        Metric to expected value; ``None`` where the norm fixes it (``frobenius``) or the metric
        does not apply (``norm_ratio``).
    """
    r = frobenius / math.sqrt(d)
    antisymmetric = 0.5 - 0.5 / d
    return {
        # Edelman, Kostlan & Shub 1994, leading order: √(2d/π) eigenvalues are real
        "complex_fraction": 1 - math.sqrt(2 / (math.pi * d)),
        "rotation_index": 2 / math.pi,
        "antisymmetric_energy": antisymmetric,
        "symmetry_score": 1 - 2 * antisymmetric,
        "henrici": math.sqrt(0.5),
        "self_alignment": min(k, d) / d,
        "spectral_radius": r,
        "spectral_norm": 2 * r,
        "numerical_abscissa": math.sqrt(2) * r,
        "expanding_fraction": max(0.0, 1 - r**-2),
        "effective_rank": d * math.exp(-0.5),
        "participation_ratio": d / 2,
        "stable_rank": d / 4,
        # Edelman 1988: E ln κ = ln d + 1.537
        "condition_number": d * math.exp(1.537),
        # no closed form is known to us: geometric mean of draws at d = 16 … 256
        "eigenvector_condition": 1.2 * d,
        "norm_ratio": None,
        "frobenius": None,
        "trace": 0.0,
    }


def skip_reference(d: int, frobenius: float, k: int) -> dict[str, float | None]:
    """Metrics of ``I + G``, ``G`` a real Ginibre matrix of the update's norm.

    What a block with a skip connection shows whatever its update is: compare J with it before
    calling J near-symmetric. Singular values of ``I + rC`` (``C`` circular) are those of a shifted
    Ginibre matrix (Bai 1997; Dozier & Silverstein 2007), whose density solves a cubic equation.

    Args:
        d: Size.
        frobenius: ‖R‖_F of the update ``R = J − I``.
        k: Dimension of the subspaces in ``self_alignment``.

    Returns:
        Metric to expected value; ``None`` where the reference has no finite limit
        (``condition_number`` for r ≥ 1).
    """
    r = frobenius / math.sqrt(d)
    size = 1 + r**2  # ‖J‖_F² / d
    antisymmetric = r**2 / size * (0.5 - 0.5 / d)
    sigma = _ShiftedCircular(r)
    alignment = sigma.self_overlap(k / d) if k < d else 1.0
    ginibre = ginibre_reference(d, frobenius, k)
    return {
        "complex_fraction": ginibre["complex_fraction"],
        "rotation_index": r * 4 / (3 * math.pi) / _mean_modulus(r),
        "antisymmetric_energy": antisymmetric,
        "symmetry_score": 1 - 2 * antisymmetric,
        "henrici": r / math.sqrt(2 * size),
        "self_alignment": alignment,
        "spectral_radius": 1 + r,
        "spectral_norm": sigma.largest,
        "numerical_abscissa": 1 + math.sqrt(2) * r,
        "expanding_fraction": _share_outside_unit_circle(r),
        "effective_rank": d * math.exp(-sigma.entropy_deficit()),
        "participation_ratio": d * size**2 / (1 + 4 * r**2 + 2 * r**4),
        "stable_rank": d * size / sigma.largest**2,
        "condition_number": sigma.largest / sigma.smallest if r < 1 else None,
        "eigenvector_condition": ginibre["eigenvector_condition"],
        "norm_ratio": r / math.sqrt(size),
        "frobenius": math.sqrt(d * size),
        "trace": float(d),
    }


def product_reference(
    d: int, depths: Sequence[int]
) -> tuple[Float[Tensor, " depth"], Float[Tensor, " depth"]]:
    """Effective rank and participation ratio of a product of independent Ginibre matrices.

    Squared singular values of a product of ``L`` follow the Fuss-Catalan law, whose moments give
    ``d·exp(1 − H_{L+1})`` (``H`` the harmonic number) and ``d/(L + 1)``; limits for ``d ≫ L``.

    Args:
        d: Size.
        depths: Numbers of factors.

    Returns:
        Effective ranks and participation ratios, one per depth.
    """
    factors = np.asarray(depths, dtype=np.float64)
    harmonic = digamma(factors + 2) + np.euler_gamma
    return torch.from_numpy(d * np.exp(1 - harmonic)), torch.from_numpy(d / (factors + 1))


@dataclass(frozen=True)
class _ShiftedCircular:
    """Singular values of ``I + rC`` for large d; ``C`` has eigenvalues in the unit disc."""

    r: float

    @property
    def _edge(self) -> float:
        return math.sqrt(1 + 8 / self.r**2)

    @property
    def largest(self) -> float:
        return self.r * math.sqrt((self._edge + 3) ** 3 / (8 * (self._edge + 1)))

    @property
    def smallest(self) -> float:
        if self.r >= 1:  # the eigenvalue disc covers 0, and the density reaches it
            return 0.0
        return self.r * math.sqrt((self._edge - 3) ** 3 / (8 * (self._edge - 1)))

    def entropy_deficit(self) -> float:
        """``E[y ln y]`` of ``y = σ²/E σ²``: the effective rank is d·exp(−that)."""
        if self.r < 1e-2:  # σ² hardly varies: half its relative variance; the rest is O(r⁴)
            return (2 * self.r**2 + self.r**4) / (1 + self.r**2) ** 2 / 2
        sigma, _, weight = self._quadrature()
        y = sigma**2 / (weight @ sigma**2)
        return float(weight @ (y * np.log(y)))

    def self_overlap(self, share: float) -> float:
        """``‖U_kᵀV_k‖²/k`` for the top ``share = k/d`` of the singular directions."""
        if self.r < 1e-2:  # r → 0: U = V up to O(r) within the band, for any top subspace
            return 1.0
        sigma, overlap, weight = self._quadrature()
        order = np.argsort(-sigma)
        before = np.concatenate([[0.0], np.cumsum(weight[order])[:-1]])
        inside = np.clip(share - before, 0, weight[order])
        own = float(inside @ overlap[order] ** 2 / inside.sum())
        return own + (1 - own) * share  # what does not fall on its own partner is spread evenly

    def _quadrature(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes σ, mean overlap ⟨u, v⟩ at σ, and probability weights."""
        low, high = self.smallest / self.r, self.largest / self.r
        angle = (np.arange(_NODES) + 0.5) * math.pi / _NODES
        t = (low + high) / 2 - (high - low) / 2 * np.cos(angle)  # removes the square-root edges
        step = np.sin(angle)
        shift = 1 / self.r
        # Stieltjes transform m(t) of the symmetrised law: m³ + 2tm² + (t² − z² + 1)m + t = 0
        companion = np.zeros((_NODES, 3, 3))
        companion[:, 0] = np.stack([-2 * t, -(t**2) + shift**2 - 1, -t], axis=1)
        companion[:, 1, 0] = companion[:, 2, 1] = 1
        roots = np.linalg.eigvals(companion)
        m = roots[np.arange(_NODES), np.argmax(roots.imag, axis=1)]
        overlap = np.imag(shift * m / (t + m)) / m.imag
        weight = m.imag * step
        return self.r * t, overlap, weight / weight.sum()


def _mean_modulus(r: float) -> float:
    """Mean of ``|1 + z|`` over the disc ``|z| < r``."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    rho = r * (nodes + 1) / 2
    # mean of |1 + ρe^{iφ}| over φ is an elliptic integral; the disc gives ρ the weight 2ρ/r²
    ring = 2 / math.pi * (1 + rho) * ellipe(4 * rho / (1 + rho) ** 2)
    return float(weights @ (ring * rho) / r)


def _share_outside_unit_circle(r: float) -> float:
    """Share of the disc of radius r around 1 that lies outside the unit circle."""
    if r >= 2:
        return 1 - r**-2
    if r < 1e-3:  # the lens below cancels; the next term is O(r³)
        return 0.5 + r / (3 * math.pi)
    lens = r**2 * math.acos(r / 2) + 2 * math.asin(r / 2) - r / 2 * math.sqrt((2 - r) * (2 + r))
    return 1 - lens / (math.pi * r**2)
