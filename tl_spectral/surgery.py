"""Schur surgery: take the non-normal part out of an operator, keep its eigenvalues.

[A] arXiv 2605.14258 asks how much of the collapse of rank over depth the non-normal part of each
block explains. The three controls keep something else the same instead.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.decompose import to_matrix
from tl_spectral.errors import InputError
from tl_spectral.threads import one_blas_thread

Surgery = Literal["normal", "matched", "shuffled", "rotated"]


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
    T, Q = scipy.linalg.schur(M, output="real")
    result: np.ndarray
    if kind == "shuffled":
        above = np.triu(np.ones_like(T, dtype=bool), 1)
        above[np.arange(len(T) - 1), np.arange(1, len(T))] &= np.diagonal(T, -1) == 0
        noise = rng.standard_normal(int(above.sum()))
        T[above], norm = noise, np.linalg.norm(T[above])
        T[above] *= norm / np.linalg.norm(noise) if noise.size else 1.0
        result = Q @ T @ Q.T
        return result
    N = _normal(T)
    if kind == "rotated":
        Q, R = np.linalg.qr(rng.standard_normal(M.shape))
        Q *= np.sign(np.diagonal(R))  # Haar (Mezzadri 2007)
    result = Q @ N @ Q.T
    if kind == "matched":
        kept = np.linalg.norm(N)
        if kept == 0 and M.any():
            raise InputError(
                "All eigenvalues are zero, so the normal part is zero and cannot be scaled to the "
                "norm of M. Use kind='normal'."
            )
        result *= np.linalg.norm(M) / (kept or 1.0)
    return result


def _normal(T: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d d"]:
    """Diagonal blocks of a standardised real Schur form, each made normal."""
    above, below = np.diagonal(T, 1), np.diagonal(T, -1)
    rotation = np.sqrt(np.where(below != 0, -above * below, 0)) * np.sign(above)
    return np.diag(np.diagonal(T)) + np.diag(rotation, 1) - np.diag(rotation, -1)
