"""Surgery: take a part out of an operator, keep the rest, and see what its chain then does.

[A] arXiv 2605.14258 asks how much of the collapse of rank over depth the non-normal part of each
block explains. Three controls keep something else the same instead; two further cuts keep only the
symmetric or only the antisymmetric part of the update.
:func:`tl_spectral.surgery_chains.surgery_table` runs them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.decompose import to_matrix
from tl_spectral.errors import InputError
from tl_spectral.threads import one_blas_thread

Surgery = Literal["normal", "matched", "shuffled", "rotated", "symmetric", "antisymmetric"]
RANDOM = ("shuffled", "rotated")
"""The kinds that draw random numbers."""


def schur_surgery(
    M: Any, kind: Surgery | str = "normal", seed: int = 0
) -> Float[Tensor, "d_model d_model"]:
    """Replace an operator by its normal part, or by one of the controls of that operation.

    ``M = Q T Qᵀ`` is the real Schur form in the order in which LAPACK's QR iteration deflates
    (``dgees`` without sorting). The order is not unique and the normal part of a non-normal matrix
    depends on it; this one is deterministic for a given matrix. ``N`` is ``T`` with everything
    outside the diagonal blocks removed and each 2 × 2 block replaced by the normal block
    ``[[a, b], [−b, a]]`` of the same conjugate pair.

    Args:
        M: A ``[d, d]`` tensor, a :class:`BlockJacobian`, or a ``FactoredMatrix``. For natural
            units pass ``D⁻¹ M D``: normality depends on the inner product.
        kind: ``"normal"``: ``Q N Qᵀ``, the same eigenvalues without the non-normal part;
            ``"matched"``: that, scaled to ‖M‖_F (the surgery lowers the norm);
            ``"shuffled"``: ``Q T' Qᵀ``, the part of T above its diagonal blocks replaced by
            Gaussian entries of the same norm: as non-normal, but without structure;
            ``"rotated"``: ``W N Wᵀ`` with a random orthogonal W: normal, in an unrelated basis.
            Two cuts read M as a block's J and part its update ``R = J − I``: ``"symmetric"`` is
            ``I + (R + Rᵀ)/2``, ``"antisymmetric"`` is ``I + (R − Rᵀ)/2``.
        seed: Seed of ``"shuffled"`` and ``"rotated"``.

    Returns:
        The new operator, float64 on the CPU.

    Raises:
        InputError: If ``kind`` does not exist, M is no valid matrix, or M is nilpotent and to be
            matched in norm.
    """
    if kind not in get_args(Surgery):
        raise InputError(f"kind must be one of {get_args(Surgery)}, got {kind!r}.")
    values = to_matrix(M).values
    with one_blas_thread(len(values)):
        return torch.from_numpy(operate(values, kind, np.random.default_rng(seed)))


def operate(
    M: Float[np.ndarray, "d d"], kind: str, rng: np.random.Generator
) -> Float[np.ndarray, "d d"]:
    """:func:`schur_surgery` on a checked array."""
    if kind in ("symmetric", "antisymmetric"):
        return part_of_update(M, kind)
    return Schur.of(M).rebuilt(kind, rng)


def part_of_update(J: Float[np.ndarray, "d d"], kind: str) -> Float[np.ndarray, "d d"]:
    """``I + (R ± Rᵀ)/2`` of a block's J: the symmetric or the antisymmetric half of its update."""
    if kind == "symmetric":
        return np.asarray((J + J.T) / 2)
    return np.asarray(np.eye(len(J)) + (J - J.T) / 2)


@dataclass(frozen=True, eq=False)
class Schur:
    """A real Schur form ``M = Q T Qᵀ``: computed once, it serves every kind of surgery."""

    T: Float[np.ndarray, "d d"]
    Q: Float[np.ndarray, "d d"]

    @classmethod
    def of(cls, M: Float[np.ndarray, "d d"]) -> Schur:
        """Decompose."""
        return cls(*scipy.linalg.schur(M, output="real"))

    def rebuilt(self, kind: str, rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """The operator after surgery.

        Raises:
            InputError: If it is nilpotent and to be matched in norm.
        """
        T, Q = self.T, self.Q
        if kind == "shuffled":
            return np.asarray(Q @ _shuffled(T, rng) @ Q.T)
        N = _normal(T)
        if kind == "rotated":
            Q = haar(len(T), rng)
        result = np.asarray(Q @ N @ Q.T)
        if kind == "matched":
            kept = np.linalg.norm(N)
            if kept == 0 and T.any():
                raise InputError(
                    "All eigenvalues are zero, so the normal part is zero and cannot be scaled to "
                    "the norm of M. Use kind='normal'."
                )
            result *= np.linalg.norm(T) / (kept or 1.0)
        return result


def haar(d: int, rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
    """A random orthogonal matrix, uniform over the group (Mezzadri 2007)."""
    Q, R = np.linalg.qr(rng.standard_normal((d, d)))
    return np.asarray(Q * np.sign(np.diagonal(R)))


def _shuffled(T: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
    """T with Gaussian entries of the same norm above its diagonal blocks."""
    T = T.copy()
    above = np.triu(np.ones_like(T, dtype=bool), 1)
    above[np.arange(len(T) - 1), np.arange(1, len(T))] &= np.diagonal(T, -1) == 0
    noise = rng.standard_normal(int(above.sum()))
    T[above], norm = noise, np.linalg.norm(T[above])
    T[above] *= norm / np.linalg.norm(noise) if noise.size else 1.0
    return T


def _normal(T: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Diagonal blocks of a standardised real Schur form, each made normal."""
    above, below = np.diagonal(T, 1), np.diagonal(T, -1)
    rotation = np.sqrt(np.where(below != 0, -above * below, 0)) * np.sign(above)
    return np.diag(np.diagonal(T)) + np.diag(rotation, 1) - np.diag(rotation, -1)
