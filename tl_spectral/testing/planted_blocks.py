"""Blocks with a known rotation, a known funnel and a known non-normality, and a model made of them.

All blocks are block-diagonal in one hidden orthonormal basis, up to a strictly upper part:
``J_l = Q (⊕_j s_lj · Rot(θ_l) + N_l) Qᵀ``. So every eigenvalue is ``s_lj e^{±iθ_l}``, whatever the
non-normal part N_l; without it the singular values of the chain are ``Π_l s_lj``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float
from scipy import optimize
from scipy.special import entr
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.surgery import haar


@dataclass(frozen=True, eq=False)
class PlantedBlocks:
    """Blocks and the truth about them.

    Attributes:
        matrices: J of each layer, row = output, float64.
        angles: Rotation angle of each layer in radians.
        moduli: Modulus ``s_lj`` of each pair of eigenvalues.
        effective_rank: Of the chain up to each layer: as asked for, or, with a non-normal part, of
            the product itself.
        henrici: ``√(‖J‖² − Σ|λ|²)/‖J‖`` of each J.
        antisymmetric_energy: ``‖A‖²/‖R‖²`` of each update ``R = J − I``; NaN with a non-normal
            part, which has a symmetric and an antisymmetric half of its own.
        basis: The hidden Q.
        seed: Seed of Q and of the non-normal parts.
    """

    matrices: tuple[Float[Tensor, "d d"], ...]
    angles: Float[Tensor, " layer"]
    moduli: Float[Tensor, "layer pair"]
    effective_rank: Float[Tensor, " layer"]
    henrici: Float[Tensor, " layer"]
    antisymmetric_energy: Float[Tensor, " layer"]
    basis: Float[Tensor, "d d"]
    seed: int

    @property
    def eigenvalues(self) -> Complex[Tensor, "layer d"]:
        """Of each J: ``s e^{iθ}``, then ``s e^{−iθ}``."""
        upper = torch.polar(self.moduli, self.angles[:, None].expand_as(self.moduli))
        return torch.cat([upper, upper.conj()], dim=1)

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        """A ``TransformerBridge`` whose block l maps every state h to ``J_l h``.

        It has 32 tokens and room for 16 positions; every token and position has the Jacobians given
        here. See :func:`tl_spectral.model.linear.boot_linear` for how.

        Args:
            dtype: dtype of the weights.
        """
        from tl_spectral.model.linear import boot_linear

        return boot_linear(self.matrices, seed=self.seed, dtype=dtype, name="planted blocks")


def rotating_blocks(
    d: int,
    angles_by_depth: Sequence[float | int],
    *,
    funnel: Sequence[float | int] | None = None,
    non_normality: float | int | Sequence[float | int] = 0.0,
    seed: int = 0,
) -> PlantedBlocks:
    """Blocks that rotate by given angles, narrow by a given funnel, and are not quite normal.

    Args:
        d: Size, even.
        angles_by_depth: Angle of each layer in radians, in (−π, π]; 0 makes a layer symmetric.
        funnel: Effective rank of the chain after each layer, each above 2 and at most d; by default
            d throughout (every modulus is 1). Exact without a non-normal part.
        non_normality: Henrici's departure from normality of J, relative to its norm, in [0, 1): one
            for all layers, or one for each.
        seed: Seed of the hidden basis and of the non-normal parts.

    Returns:
        The blocks and their truth.

    Raises:
        InputError: If d is odd, a length differs from the number of layers, or a value is out of
            range.
    """
    depth = len(angles_by_depth)
    if d < 4 or d % 2:
        raise InputError(f"d must be even and at least 4, got {d}.")
    if not depth or not all(-math.pi < angle <= math.pi for angle in angles_by_depth):
        raise InputError("angles_by_depth needs one angle per layer, each in (−π, π].")
    ranks = [float(d)] * depth if funnel is None else [float(rank) for rank in funnel]
    share = [non_normality] * depth if isinstance(non_normality, float | int) else non_normality
    if len(ranks) != depth or len(share) != depth:
        raise InputError(
            f"{depth} angles, {len(ranks)} ranks, {len(share)} departures: one per layer is needed."
        )
    if not all(2 < rank <= d for rank in ranks):
        raise InputError(f"The effective ranks of the funnel must lie in (2, {d}]: {ranks}.")
    if not all(0 <= h < 1 for h in share):
        raise InputError(f"non_normality must lie in [0, 1): {tuple(share)}.")
    rng = np.random.default_rng(seed)
    Q = haar(d, rng)
    log_sigma = np.stack([np.zeros(d // 2), *(_profile(d // 2, rank / 2) for rank in ranks)])
    moduli = np.exp(np.diff(log_sigma, axis=0))
    inner = [
        _block(s, angle, h, rng) for s, angle, h in zip(moduli, angles_by_depth, share, strict=True)
    ]
    angles = np.array(angles_by_depth, dtype=np.float64)
    normal = not any(share)
    return PlantedBlocks(
        matrices=tuple(torch.from_numpy(Q @ B @ Q.T) for B in inner),
        angles=torch.from_numpy(angles),
        moduli=torch.from_numpy(moduli),
        effective_rank=torch.tensor(ranks if normal else _ranks(inner), dtype=torch.float64),
        henrici=torch.tensor(share, dtype=torch.float64),
        antisymmetric_energy=torch.from_numpy(
            _antisymmetric(moduli, angles) if normal else np.full(depth, np.nan)
        ),
        basis=torch.from_numpy(Q),
        seed=seed,
    )


def _profile(pairs: int, rank: float) -> Float[np.ndarray, " pair"]:
    """``log σ_j = −c j`` with the c that gives this effective rank."""
    j = np.arange(pairs, dtype=np.float64)

    def excess(c: float) -> float:
        weight = np.exp(-2 * c * j)
        return float(np.sum(entr(weight / weight.sum()))) - math.log(rank)

    if rank >= pairs:
        return np.zeros(pairs)
    return np.asarray(-optimize.brentq(excess, 0.0, 50.0, xtol=1e-15) * j)


def _block(
    moduli: Float[np.ndarray, " pair"], angle: float, henrici: float, rng: np.random.Generator
) -> Float[np.ndarray, "d d"]:
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    normal = np.kron(np.diag(moduli), rotation)
    above = np.kron(np.triu(np.ones((len(moduli), len(moduli))), 1), np.ones((2, 2)))
    noise = rng.standard_normal(normal.shape) * above
    size = henrici / math.sqrt(1 - henrici**2) * np.linalg.norm(normal)
    return np.asarray(normal + noise * (size / np.linalg.norm(noise)))


def _antisymmetric(
    moduli: Float[np.ndarray, "layer pair"], angles: Float[np.ndarray, " layer"]
) -> Float[np.ndarray, " layer"]:
    """``Σ s² sin²θ / Σ (s² − 2 s cos θ + 1)``; NaN for a block that is the identity."""
    s, angle = moduli, angles[:, None]
    turning = np.sum((s * np.sin(angle)) ** 2, axis=1)
    size = np.sum((s * np.cos(angle) - 1) ** 2, axis=1) + turning
    return np.asarray(np.divide(turning, size, out=np.full(len(size), np.nan), where=size > 0))


def _ranks(inner: Sequence[Float[np.ndarray, "d d"]]) -> list[float]:
    product, ranks = np.eye(len(inner[0])), []
    for B in inner:
        product = B @ product
        product /= np.linalg.norm(product)
        energy = np.linalg.svd(product, compute_uv=False) ** 2
        ranks.append(math.exp(float(np.sum(entr(energy / energy.sum())))))
    return ranks
