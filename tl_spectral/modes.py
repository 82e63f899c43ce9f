"""Dominant modes of an iteration ``x ← N(x + F x)`` or ``x ← N(F x)``, degenerate ones included."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_spectral.threads import one_blas_thread

_SAME = 1e-9  # eigenvalues closer than this share of max|λ| count as one
_ROUNDING = 5 * torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Mode:
    """One eigenvalue (or conjugate pair) with its real eigenspace.

    Attributes:
        eigenvalue: λ, ``Im λ >= 0``; the mean of the eigenvalues that count as one.
        subspace: Orthonormal columns: the eigenvector, the real plane of a pair, or the whole
            eigenspace if it has more dimensions.
        multiplicity: How many eigenvalues it stands for (a simple pair: 2).
        strength: ``|1 + λ|`` or ``|λ|``, by the rule of dominance.
        condition: ``‖y‖ ‖x‖ / |yᴴx|`` of its left and right eigenvectors, ≥ 1: by how much a
            perturbation of ``F`` moves λ; 1 for a normal ``F``, infinite if defective. Of a
            repeated eigenvalue the norm of the projector on its eigenspace, which is the same for
            one. NaN if no left eigenvector was found.
    """

    eigenvalue: complex
    subspace: Float[Tensor, "d dim"]
    multiplicity: int
    strength: float
    condition: float

    @property
    def rotates(self) -> bool:
        """Whether it is a conjugate pair."""
        return self.eigenvalue.imag != 0

    @property
    def defective(self) -> bool:
        """Fewer eigenvectors than eigenvalues (a Jordan block): convergence is only algebraic."""
        return self.subspace.shape[1] < self.multiplicity


def eigensystem(
    F: Float[Tensor, "d d"],
) -> tuple[Complex[Tensor, " d"], Complex[Tensor, "d d"]]:
    """Eigenvalues and right eigenvectors in float64, on one BLAS thread where that is faster."""
    with one_blas_thread(len(F)):
        values, vectors = torch.linalg.eig(F.detach().double().cpu())
    return values, vectors


def dominant_modes(
    F: Float[Tensor, "d d"],
    *,
    skip: bool = True,
    count: int = 1,
    system: tuple[Complex[Tensor, " d"], Complex[Tensor, "d d"]] | None = None,
    left: Complex[Tensor, "d d"] | None = None,
) -> tuple[Mode, ...]:
    """The leading modes of ``F``, strongest first.

    Args:
        F: Square matrix, column convention, float64.
        skip: Order by ``|1 + λ|`` (skip connection kept) instead of ``|λ|``.
        count: How many modes at most.
        system: Eigenvalues and eigenvectors of ``F``, if they are known.
        left: :func:`left_vectors` of the eigenvectors, if they are known.
    """
    values, vectors = eigensystem(F) if system is None else system
    left = left_vectors(vectors) if left is None else left
    blur = uncertainty(F.norm().item(), values, left)
    modes = grouped_modes(
        values, vectors, left, blur,
        skip=skip, count=count, eigenspace=lambda value, near, _: _eigenspace(F, value, near),
    )  # fmt: skip
    # One exact Jordan block spoils the inverse for all; then each mode is asked by itself.
    return tuple(
        replace(mode, condition=_condition(F, mode)) if math.isnan(mode.condition) else mode
        for mode in modes
    )


def _condition(F: Tensor, mode: Mode) -> float:
    """``‖(UᴴV)⁻¹‖₂``, U and V bases of the left and right null spaces of ``F − λ``."""
    own = mode.multiplicity // 2 if mode.rotates else mode.multiplicity
    shifted = F.to(torch.complex128) - mode.eigenvalue * torch.eye(len(F), dtype=torch.complex128)
    U, _, Vh = torch.linalg.svd(shifted)
    least = torch.linalg.svdvals(Vh[-own:] @ U[:, -own:])[-1].item()
    return 1 / least if least > _ROUNDING else math.inf


def left_vectors(vectors: Complex[Tensor, "d d"]) -> Complex[Tensor, "d d"]:
    """Left eigenvectors as rows, scaled so that each gives 1 with its right eigenvector.

    Not finite where the matrix is defective beyond rounding.
    """
    left: Tensor = torch.linalg.inv_ex(vectors)[0]
    return left


def uncertainty(
    norm: float,
    values: Complex[Tensor, " k"],
    left: Complex[Tensor, "k d"],
    residual: Float[Tensor, " k"] | None = None,
) -> Float[Tensor, " k"]:
    """How far rounding may have moved each eigenvalue: ``ε ‖F‖`` times its condition number.

    It splits a Jordan block of size k by about ``ε^(1/k)``, and a conjugate pair born of that is no
    rotation. The condition ``‖y‖ ‖x‖ / |yᴴx|`` of the fragments is then as large as their distance
    demands.

    Args:
        norm: ``‖F‖_F``.
        values: Eigenvalues.
        left: Their left eigenvectors (see :func:`left_vectors`), right ones of length 1.
        residual: ``‖Fx − λx‖``, where it exceeds rounding.
    """
    condition = left.norm(dim=1).nan_to_num(nan=math.inf).clamp(1.0, 1e12)
    least = _SAME * max(values.abs().max().item(), torch.finfo(torch.float64).tiny)
    error = _ROUNDING * norm + (0.0 if residual is None else residual)
    blur: Tensor = (error * condition).clamp(min=least)
    return blur


def grouped_modes(
    values: Complex[Tensor, " k"],
    vectors: Complex[Tensor, "d k"],
    left: Complex[Tensor, "k d"],
    blur: Float[Tensor, " k"],
    *,
    skip: bool,
    count: int,
    eigenspace: Callable[[complex, float, list[int]], Tensor],
) -> tuple[Mode, ...]:
    """Eigenpairs as modes, strongest first: pairs and repeated eigenvalues count as one.

    Args:
        values: Eigenvalues, conjugates included.
        vectors: Right eigenvectors of length 1, as columns.
        left: Left eigenvectors as rows (see :func:`left_vectors`).
        blur: Eigenvalues closer than this count as one.
        skip: Order by ``|1 + λ|`` instead of ``|λ|``.
        count: How many modes at most.
        eigenspace: Real eigenspace of a repeated eigenvalue, from its mean, its blur and the
            indices of its members.
    """
    strength = (values + float(skip)).abs()
    order = torch.argsort(strength, descending=True, stable=True).tolist()
    modes: list[Mode] = []
    while order and len(modes) < count:
        first = order[0]
        near = blur[first].item()
        group = [i for i in order if (values[i] - values[first]).abs() <= near]
        value = complex(values[group].mean().item())
        real, own = abs(value.imag) <= near, group
        if not real:
            group = group + [i for i in order if (values[i] - values[first].conj()).abs() <= near]
            value = complex(value.real, abs(value.imag))
        else:
            value = complex(value.real, 0.0)
        if len(group) == (1 if real else 2):
            vector = vectors[:, first]
            plane = vector.real[:, None] if real else torch.stack([vector.real, vector.imag], 1)
            subspace, _ = torch.linalg.qr(plane)
        else:
            subspace = eigenspace(value, near, group)
        condition = math.inf
        if subspace.shape[1] == len(group):
            condition = _projector_norm(vectors[:, own], left[own])
        modes.append(Mode(value, subspace, len(group), abs(value + float(skip)), condition))
        taken = set(group)
        order = [i for i in order if i not in taken]
    return tuple(modes)


def _projector_norm(right: Complex[Tensor, "d m"], left: Complex[Tensor, "m d"]) -> float:
    """``‖X Y‖₂`` with ``Y X = 1``: of one pair of vectors ``‖y‖ ‖x‖ / |yᴴx|``."""
    if not torch.isfinite(torch.view_as_real(left)).all():
        return math.nan
    _, R = torch.linalg.qr(right)
    _, S = torch.linalg.qr(left.mH)
    product = R @ S.mH
    if not torch.isfinite(torch.view_as_real(product)).all():
        return math.inf
    return max(1.0, float(torch.linalg.matrix_norm(product, ord=2)))


def _eigenspace(F: Tensor, value: complex, near: float) -> Float[Tensor, "d dim"]:
    """Null space of ``F − λ``, or of ``(F − λ)(F − λ̄)`` for a pair."""
    identity = torch.eye(len(F), dtype=F.dtype)
    if value.imag == 0:
        annihilator, threshold, least = F - value.real * identity, near, 1
    else:
        annihilator = F @ F - 2 * value.real * F + abs(value) ** 2 * identity
        threshold, least = near * abs(value), 2
    _, singular, right = torch.linalg.svd(annihilator)
    dimension = max(least, int((singular <= threshold).sum()))
    basis: Tensor = right[-dimension:].T.contiguous()
    return basis


def left_vector(F: Float[Tensor, "d d"], eigenvalue: float) -> Float[Tensor, " d"]:
    """Left eigenvector of a real eigenvalue, whose product with x decides the sign of the limit.

    Its own sign is chosen so that it agrees with the right eigenvector where that is possible.
    """
    left, _, right = torch.linalg.svd(F - eigenvalue * torch.eye(len(F), dtype=F.dtype))
    vector: Tensor = left[:, -1] * (-1.0 if left[:, -1] @ right[-1] < 0 else 1.0)
    return vector


def layer_matrix(
    W_V: Float[Tensor, "head d_model d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "d_model d_model"]:
    """``F = Σ_heads (W_V W_O)ᵀ``, column convention, float64 ([B] arXiv 2605.25619)."""
    values = W_V.double().cpu().transpose(0, 1).flatten(1)
    F: Tensor = (values @ W_O.double().cpu().flatten(0, 1)).T.contiguous()
    return F


def chance_alignment(d: int, dim: int = 1) -> float:
    """Mean length of the projection of a random unit vector on a ``dim``-dimensional subspace.

    ``Γ((m+1)/2) Γ(d/2) / (Γ(m/2) Γ((d+1)/2))``; for one direction about ``sqrt(2/(πd))``.
    """
    if dim >= d:
        return 1.0
    return math.exp(
        math.lgamma((dim + 1) / 2)
        + math.lgamma(d / 2)
        - math.lgamma(dim / 2)
        - math.lgamma((d + 1) / 2)
    )
