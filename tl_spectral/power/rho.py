"""ρ, the share of tokens that tilt: estimated with its interval, and foretold from the weights."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.statistics import Z95

_STEP = 0.25  # of the trapezoid rule below, whose error is e^(−π²/step)
_LOG_RANGE = 40.0  # e^−40 is below rounding


def criterion_sides(
    M: Float[Tensor, "d d"], subspace: Float[Tensor, "d dim"]
) -> tuple[float, float]:
    """Both sides of the criterion for ρ > ½: ``‖MᵀQ‖_F/√m`` and ``‖M‖_F/√d``.

    Args:
        M: Linear map of column vectors.
        subspace: Orthonormal columns Q, m of them; one column v1 gives ``‖Mᵀv1‖``.
    """
    d, dim = subspace.shape
    left: float = (M.T @ subspace).norm().item() / math.sqrt(dim)
    return left, M.norm().item() / math.sqrt(d)


def predicted_rho(M: Float[Tensor, "rows columns"], subspace: Float[Tensor, "size dim"]) -> float:
    r"""ρ of isotropic random tokens through ``x → M x``, from M and the subspace alone [ours].

    A token tilts if ``‖QᵀMx‖/‖Mx‖ > ‖Qᵀx‖/‖x‖``. In high dimension ``‖Mx‖/‖x‖ → k = ‖M‖_F/√d``,
    and what is left is the sign of the Gaussian quadratic form
    ``‖QᵀMx‖² − k²‖Qᵀx‖² = Σ μ_i z_i²`` of rank at most 2m. For one direction v, with
    ``s = ‖Mᵀv‖`` and ``c = vᵀMv``, the two Gaussians ``⟨Mᵀv,x⟩ ± k⟨v,x⟩`` must agree in sign:

    ``ρ = ½ + arcsin(r)/π,  r = (s² − k²) / sqrt((s² + k²)² − 4k²c²)``,

    which exceeds ½ exactly if ``s > k``: the criterion. For planes and wider there is no elementary
    form; the one integral left (Imhof 1961) is taken by the trapezoid rule in ``log u``:

    ``ρ = ½ + (1/π) ∫ sin(½ Σ arctan μ_i u) / Π(1 + μ_i²u²)^¼ du/u``.

    Only ``‖Mx‖/‖x‖ ≈ k`` is approximate. It is good where many singular values share ``‖M‖_F`` (to
    0.01 for Gaussian matrices from d ≈ 200 on), and poor where one of them carries most of it.

    Args:
        M: Linear map of column vectors: ``I + F``, or ``F`` without skip.
        subspace: Orthonormal columns.

    Returns:
        The share of tokens, in [0, 1]; 0 for a multiple of the identity (or zero), which tilts
        nothing.

    Raises:
        InputError: If shapes do not fit.
    """
    if M.ndim != 2 or M.shape[0] != M.shape[1] or subspace.ndim != 2 or len(subspace) != len(M):
        raise InputError(
            f"Expected a square matrix and columns of its size, got {tuple(M.shape)} and "
            f"{tuple(subspace.shape)}."
        )
    M, Q = M.detach().double(), subspace.detach().double()
    k2 = M.square().sum().item() / len(M)
    pulled = M.T @ Q
    if Q.shape[1] == 1:
        s2, c = pulled.square().sum().item(), (Q.T @ pulled).item()
        # (s² + k²)² − 4k²c² as a sum of two terms that cannot be negative, as c² ≤ s²
        spread = math.sqrt((s2 - k2) ** 2 + 4 * k2 * max(s2 - c**2, 0.0))
        if spread <= 1e-12 * (s2 + k2):
            return 0.0
        return 0.5 + math.asin(max(-1.0, min(1.0, (s2 - k2) / spread))) / math.pi
    _, triangle = torch.linalg.qr(torch.cat([pulled, Q], dim=1))
    signs = torch.cat([torch.ones(Q.shape[1]), torch.full((Q.shape[1],), -k2)]).double()
    return _share_positive(torch.linalg.eigvalsh(triangle * signs @ triangle.T).numpy(), k2)


def _share_positive(weights: np.ndarray, scale: float) -> float:
    """``P(Σ μ_i z_i² > 0)`` for independent standard normal z, by Imhof's integral."""
    mu = weights[np.abs(weights) > 1e-12 * max(scale, float(np.abs(weights).max()))]
    if not mu.size or (mu < 0).all():
        return 0.0
    if (mu > 0).all():
        return 1.0
    moduli = np.abs(mu)
    # On the right the integrand falls like e^(−s·n/2), past the reciprocal of the last weight.
    low = -_LOG_RANGE - math.log(moduli.max())
    high = 2 * _LOG_RANGE / mu.size - math.log(moduli.min())
    scaled = mu * np.exp(np.arange(low, high, _STEP))[:, None]
    phase = np.arctan(scaled).sum(axis=1) / 2
    log_decay = np.log1p(scaled**2).sum(axis=1) / 4
    return float(0.5 + _STEP / math.pi * (np.sin(phase) * np.exp(-log_decay)).sum())


def effective_count(grown: Float[Tensor, " token"], cluster: Tensor | None) -> float:
    """Number of independent tokens: n divided by the design effect of sampling whole texts.

    The variance of a share over clusters is ``C/(C−1) Σ_c (y_c − ρ n_c)² / n²`` (ratio estimator,
    Cochran 1977); its ratio to ``ρ(1−ρ)/n`` is the design effect, taken as at least 1.

    Args:
        grown: 1 for a token that tilts, 0 for one that does not (or a mean of such).
        cluster: Text of each token; ``None`` if tokens are independent.
    """
    n = len(grown)
    if cluster is None:
        return float(n)
    rho = grown.mean()
    groups, index = torch.unique(cluster, return_inverse=True)
    binomial = (rho * (1 - rho) / n).item()
    if len(groups) < 2 or binomial == 0:
        return float(n)
    excess = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, grown - rho)
    variance = len(groups) / (len(groups) - 1) * excess.square().sum().item() / n**2
    return n / max(1.0, variance / binomial)


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z2 = Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
