"""Leading modes of a layer matrix from products with its factors: nothing ``d × d`` is formed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_spectral.errors import InputError, TLSpectralError
from tl_spectral.modes import Mode, grouped_modes, uncertainty
from tl_spectral.threads import one_blas_thread

_RESTARTS = 1000
_SPARE = 4  # eigenvalues beyond those asked for: no pair or group is cut, and the gap is known


class FactoredMap:
    """``F = Σ_heads (W_V W_O)ᵀ`` as an operator on columns, through the heads' inner space.

    Args:
        W_V: Value weights.
        W_O: Output weights.
    """

    def __init__(
        self, W_V: Float[Tensor, "head d_model d_head"], W_O: Float[Tensor, "head d_head d_model"]
    ) -> None:
        self.read: np.ndarray = W_V.double().cpu().transpose(1, 2).flatten(0, 1).numpy()
        self.write: np.ndarray = W_O.double().cpu().flatten(0, 1).T.contiguous().numpy()
        self.d = len(self.write)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """``F x``."""
        product: np.ndarray = self.write @ (self.read @ x)
        return product

    def backward(self, x: np.ndarray) -> np.ndarray:
        """``Fᵀ x``."""
        product: np.ndarray = self.read.T @ (self.write.T @ x)
        return product

    def frobenius(self) -> float:
        """``‖F‖_F``, from the Gram matrices of both factors."""
        squared = np.sum((self.read @ self.read.T) * (self.write.T @ self.write))
        return math.sqrt(max(0.0, float(squared)))


def arnoldi_modes(F: FactoredMap, *, skip: bool = True, count: int = 1) -> tuple[Mode, ...]:
    """The leading modes of ``F``, strongest first, by implicitly restarted Arnoldi (ARPACK).

    Right vectors come from products with ``F`` (``I + F`` with skip), left ones from its transpose.
    From one deterministic start, as here, Arnoldi meets a second direction of a repeated eigenvalue
    only through rounding, so a multiplicity is a lower bound; the dense method counts them all.

    Args:
        F: The layer matrix by its factors.
        skip: Order by ``|1 + λ|`` instead of ``|λ|``.
        count: How many modes at most.

    Raises:
        InputError: If so many modes are asked of so small a matrix that Arnoldi cannot give them.
        TLSpectralError: If the iteration does not converge.
    """
    norm = F.frobenius()
    wanted = 2 * count + _SPARE
    while True:
        if wanted > F.d - 2:
            raise InputError(
                f"Arnoldi gives at most {F.d - 2} eigenvalues of a {F.d} × {F.d} matrix, and "
                f"{count} modes with their gaps need about {wanted}. Use method='dense'."
            )
        with one_blas_thread(F.d):
            values, vectors = _leading(F.forward, F.d, wanted, skip)
            left_values, left = _leading(F.backward, F.d, wanted, skip)
        rows = _paired(values, vectors, left_values, left)
        image = torch.from_numpy(F.forward(vectors.numpy()))
        residual = (image - values * vectors).norm(dim=0)

        def span(value: complex, near: float, group: list[int], found: Tensor = vectors) -> Tensor:
            both = torch.cat([found[:, group].real, found[:, group].imag], dim=1)
            U, sigma, _ = torch.linalg.svd(both, full_matrices=False)
            basis: Tensor = U[:, sigma > 1e-6 * sigma[0]][:, : len(group)].contiguous()
            return basis

        known = torch.where(rows.isnan().any(dim=1, keepdim=True), vectors.mH, rows)
        modes = grouped_modes(
            values, vectors, rows, uncertainty(norm, values, known, residual),
            skip=skip, count=len(values), eigenspace=span,
        )  # fmt: skip
        if len(modes) > count:  # the last one may have members that were not asked for
            return modes[:count]
        wanted *= 2


def _leading(
    apply: Callable[[np.ndarray], np.ndarray], d: int, count: int, skip: bool
) -> tuple[Complex[Tensor, " k"], Complex[Tensor, "d k"]]:
    """Leading eigenvalues of ``F`` by ``|λ + skip|``, unit vectors; no pair lacks its half."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    def step(x: np.ndarray) -> np.ndarray:
        return x + apply(x) if skip else apply(x)

    operator: Any = LinearOperator((d, d), matvec=step, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(d)
    try:
        values, vectors = eigs(
            operator, k=count, which="LM", v0=start,
            ncv=min(d, max(40, 4 * count)), maxiter=_RESTARTS,
        )  # fmt: skip
    except ArpackNoConvergence as error:
        raise TLSpectralError(
            f"Arnoldi found {len(error.eigenvalues)} of {count} leading eigenvalues of a {d} × {d} "
            f"layer matrix in {_RESTARTS} restarts: their moduli are too close. Ask for fewer "
            "modes, or use method='dense'."
        ) from error
    values = values - float(skip)
    size = np.abs(values).max(initial=np.finfo(float).tiny)
    turning = np.abs(values.imag) > 1e-12 * size
    alone = [
        i for i in np.flatnonzero(turning)
        if np.abs(values - values[i].conj()).min() > 1e-8 * size
    ]  # fmt: skip
    values = np.concatenate([values, values[alone].conj()])
    vectors = np.concatenate([vectors, vectors[:, alone].conj()], axis=1)
    vectors = vectors / np.linalg.norm(vectors, axis=0)
    return torch.from_numpy(values), torch.from_numpy(np.ascontiguousarray(vectors))


def _paired(
    values: Complex[Tensor, " k"],
    right: Complex[Tensor, "d k"],
    left_values: Complex[Tensor, " m"],
    left: Complex[Tensor, "d m"],
) -> Complex[Tensor, "k d"]:
    """For each eigenvalue the left vector as a row, scaled to give 1; NaN where none was found.

    ``Fᵀ z = λ z`` means ``zᵀ F = λ zᵀ``: the row is z itself, without conjugation.
    """
    rows = torch.full((len(values), len(right)), complex(math.nan, 0), dtype=right.dtype)
    near = 1e-6 * values.abs().max().clamp(min=1.0)
    for i, value in enumerate(values):
        own = ((values - value).abs() <= near).nonzero()[:, 0]
        theirs = ((left_values - value).abs() <= near).nonzero()[:, 0]
        if i == own[0] and len(own) == len(theirs):
            Z = left[:, theirs].T
            inner, _ = torch.linalg.inv_ex(Z @ right[:, own])
            rows[own] = inner @ Z
    return rows
