"""Measures of single heads, all from products of size ``d_head × d_head``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor

REAL = 1e-9  # |Im λ| below this share of max|λ| counts as real (float64 eigenvalues)
DEGENERATE = 1.01  # leading moduli closer than this: which of them leads cannot be told
NILPOTENT = 1e-3  # Σ|λ| below this share of Σσ: the sign of the score is an accident
DRAWS = 64  # random heads behind a baseline


def measure_heads(
    W_V: Float[Tensor, "*batch d_model d_head"],
    W_O: Float[Tensor, "*batch d_head d_model"],
    tolerance: float,
) -> tuple[Complex[Tensor, "*batch d_head"], dict[str, Float[Tensor, "*batch"]]]:
    """Eigenvalues of ``W_V W_O`` and every measure of a head, in float64.

    Args:
        W_V: Value weights, float64.
        W_O: Output weights, float64.
        tolerance: Singular values above this share of the largest count towards the rank.

    Returns:
        The ``d_head`` eigenvalues that can differ from zero, and measures by name (see
        :class:`tl_spectral.ov.OVCircuits`).
    """
    return _measures(W_O @ W_V, W_V.mT @ W_V, W_O @ W_O.mT, tolerance)


def rank_tolerance(W: Float[Tensor, "*batch d_model d_head"]) -> float:
    """``max(d_model ε, 1e-6)``, ε the rounding unit of the weights (at most that of float32).

    Singular values come from Gram matrices in float64, which resolve them to about 1e-7 of the
    largest.
    """
    known = W.dtype if W.dtype in (torch.float32, torch.float64) else torch.float32
    return max(W.shape[-2] * torch.finfo(known).eps, 1e-6)


def _measures(
    small: Float[Tensor, "*batch k k"],
    gram_V: Float[Tensor, "*batch k k"],
    gram_O: Float[Tensor, "*batch k k"],
    tolerance: float,
) -> tuple[Complex[Tensor, "*batch k"], dict[str, Float[Tensor, "*batch"]]]:
    """All measures from ``W_O W_V``, ``W_Vᵀ W_V`` and ``W_O W_Oᵀ``; 0/0 is NaN."""
    eigenvalues = torch.linalg.eigvals(small)
    moduli = eigenvalues.abs()
    total = moduli.sum(dim=-1)
    ordered = moduli.sort(dim=-1, descending=True)
    imaginary = eigenvalues.imag.abs()
    radius = ordered.values[..., 0]
    turns = imaginary.gather(-1, ordered.indices[..., :1])[..., 0] > REAL * radius
    padded = torch.nn.functional.pad(ordered.values, (0, 2))
    second = torch.where(turns, padded[..., 2], padded[..., 1])  # a pair shares its modulus

    squares = _squared_singular_values(gram_V, gram_O)
    square = (gram_V * gram_O).sum(dim=(-2, -1))  # ‖W_V W_O‖² = tr(W_Vᵀ W_V · W_O W_Oᵀ)
    p = squares / squares.sum(dim=-1, keepdim=True)
    complex_share = (imaginary > REAL * radius[..., None]).double().mean(dim=-1)
    return eigenvalues, {
        "copying_score": eigenvalues.real.sum(dim=-1) / total,
        "rotation_index": imaginary.sum(dim=-1) / total,
        "complex_fraction": torch.where(radius > 0, complex_share, torch.nan),
        "spectral_radius": radius,
        "frobenius": square.sqrt(),
        "symmetry_score": (small * small.mT).sum(dim=(-2, -1)) / square,
        "rank": (squares > tolerance**2 * squares[..., -1:]).double().sum(dim=-1),
        "effective_rank": torch.special.entr(p).sum(dim=-1).exp(),
        "leading_gap": radius / second,
        "eigenvalue_share": total / squares.sqrt().sum(dim=-1),
    }


def _squared_singular_values(
    gram_V: Float[Tensor, "*batch k k"], gram_O: Float[Tensor, "*batch k k"]
) -> Float[Tensor, "*batch k"]:
    """``σ²`` of ``W_V W_O``, ascending: those of ``Lᵀ (W_O W_Oᵀ) L``, ``L Lᵀ = W_VᵀW_V``."""
    L, failed = torch.linalg.cholesky_ex(gram_V)
    if failed.any():  # value directions that are zero or repeat each other
        values, vectors = torch.linalg.eigh(gram_V)
        L = vectors * values.clamp(min=0).sqrt()[..., None, :]
    squares: Tensor = torch.linalg.eigvalsh(L.mT @ gram_O @ L).clamp(min=0)
    return squares


@lru_cache(maxsize=16)
def random_heads(d_model: int, d_head: int) -> Mapping[str, tuple[float, float]]:
    """Mean and standard deviation of each measure over random heads of a shape.

    ``DRAWS`` draws of independent Gaussian ``W_V``, ``W_O`` with a fixed seed. Their three small
    products have a known joint law, so the large factors are never drawn: with ``W_O = L Q`` (L
    triangular, Q orthonormal rows), ``W_O W_V = L G`` and ``W_VᵀW_V = GᵀG +`` an independent
    Wishart matrix (Bartlett 1933). Measures that have a unit are per ``‖W_V W_O‖_F``.

    Args:
        d_model: Width.
        d_head: Inner dimension.
    """
    rng = np.random.default_rng(0)
    L = _triangle(rng, d_model, d_head).mT
    G = torch.from_numpy(rng.standard_normal((DRAWS, d_head, d_head)))
    rest = _triangle(rng, d_model - d_head, d_head)
    _, found = _measures(L @ G, G.mT @ G + rest.mT @ rest, L @ L.mT, rank_tolerance(L))
    found["spectral_radius"] = found["spectral_radius"] / found.pop("frobenius")
    found["degenerate"] = is_degenerate(found["leading_gap"], found["eigenvalue_share"]).double()
    found["leading_gap"] = found["leading_gap"].clamp(max=1e6)  # inf if nothing else is there
    return MappingProxyType(
        {name: (values.mean().item(), values.std().item()) for name, values in found.items()}
    )


def copying_sd(d_model: int, d_head: int) -> float:
    """Standard deviation of the copying score over Gaussian heads of a shape; the mean is 0.

    From 8 dimensions on by the single-ring theorem (Haagerup & Larsen 2000): the trace of
    ``W_O W_V`` has variance ``d_head d_model``, and its eigenvalues the moduli ``d_head sqrt(t (t +
    a))``, t uniform on (0, 1), ``a = d_model/d_head − 1``; about ``1.5 / d_head``, within 2 % of
    draws. Below 8 by ``DRAWS`` draws.
    """
    if d_head < 8:
        return random_heads(d_model, d_head)["copying_score"][1]
    a = d_model / d_head - 1
    root = math.sqrt(1 + a)
    mean = (2 + a) / 4 * root
    if a > 0:
        mean -= a**2 / 8 * math.log((2 + a + 2 * root) / a)
    return root / (d_head * mean)


def _triangle(rng: np.random.Generator, rows: int, k: int) -> Float[Tensor, "draw rows k"]:
    """R with ``RᵀR`` distributed as ``XᵀX``, X Gaussian ``[rows, k]``: upper triangular, or X."""
    X = rng.standard_normal((DRAWS, min(rows, k), k))
    if rows >= k:
        X = np.triu(X, 1)
        index = np.arange(k)
        X[:, index, index] = np.sqrt(rng.chisquare(rows - index, size=(DRAWS, k)))
    return torch.from_numpy(X)


def is_degenerate(gap: Tensor, share: Tensor) -> Tensor:
    """Heads whose leading eigenvalue, or the sign of whose score, cannot be named reliably.

    Zero heads (NaN share) are among them.
    """
    return (gap < DEGENERATE) | ~(share > NILPOTENT)


def vocabulary_scores(
    W_V: Float[Tensor, "*batch d_model d_head"],
    W_O: Float[Tensor, "*batch d_head d_model"],
    through: Float[Tensor, "d_model d_model"],
) -> Float[Tensor, "*batch"]:
    """Copying score of ``W_E W_V W_O W_U``, by its eigenvalues ``W_O (W_U W_E) W_V``.

    Args:
        W_V: Value weights, float64.
        W_O: Output weights, float64.
        through: ``W_U W_E``, summed over the vocabulary.
    """
    eigenvalues = torch.linalg.eigvals(W_O @ (through @ W_V))
    scores: Tensor = eigenvalues.real.sum(dim=-1) / eigenvalues.abs().sum(dim=-1)
    return scores


def random_vocabulary_sd(through: Float[Tensor, "d_model d_model"], d_head: int) -> float:
    """Standard deviation of :func:`vocabulary_scores` over Gaussian heads, fixed seed."""
    generator = torch.Generator().manual_seed(0)
    scores = []
    for _ in range(DRAWS):  # one at a time: two are as large as a layer
        W_V, W_O = (
            torch.randn(len(through), d_head, generator=generator, dtype=torch.float64)
            for _ in range(2)
        )
        scores.append(vocabulary_scores(W_V, W_O.T, through))
    return float(torch.stack(scores).std())
