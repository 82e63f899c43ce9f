"""The factorisations behind a spectrum: at most one eigen- and one singular value decomposition."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Complex, Float, Int
from scipy.linalg import lapack

from tl_spectral.errors import InputError, TLSpectralError, TLSpectralWarning
from tl_spectral.results import Provenance

_LARGEST = 1e100  # squares of larger (or, inversely, smaller) entries leave the float64 range
_CONSTANT = 1e-12  # a deviation this small next to the largest is rounding error of a constant


@dataclass(frozen=True)
class Matrix:
    """A checked real square matrix in float64, with what is known about it.

    Attributes:
        values: The matrix.
        factors: ``(A, B)`` with ``values = A @ B`` and an inner dimension below d, if known.
        eps: Rounding unit of the dtype that the entries came in.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out for lack of variance.
        provenance: Where it comes from.
        notes: Caveats by metric.
    """

    values: Float[np.ndarray, "d d"]
    factors: tuple[np.ndarray, np.ndarray] | None
    eps: float
    units: Literal["raw", "natural"] = "raw"
    n_dropped: int = 0
    provenance: Provenance = field(default_factory=Provenance)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The dimension d."""
        return len(self.values)

    @property
    def rank_bound(self) -> int:
        """The inner dimension of the factors, d without factors."""
        return self.size if self.factors is None else self.factors[0].shape[1]

    @property
    def mean(self) -> float:
        """The mean eigenvalue ``tr M / d``."""
        return float(np.trace(self.values)) / self.size

    @property
    def centred(self) -> Float[np.ndarray, "d d"]:
        """``M`` less its mean eigenvalue: differences of eigenvalues then keep their digits."""
        return self.values - self.mean * np.eye(self.size)

    def shifted(self, by: float) -> Matrix:
        """``M + by·I``."""
        return replace(self, values=self.values + by * np.eye(self.size), factors=None)

    def in_units(self, scale: Any) -> Matrix:
        """``D⁻¹ M D`` with ``D = diag(scale)``; unchanged if there is no scale.

        Raises:
            InputError: If the scale does not fit or leaves fewer than two coordinates.
        """
        if scale is None:
            return self
        kept, std = checked_scale(scale, self.size)
        if len(kept) < 2:
            raise InputError(
                f"Only {len(kept)} of {self.size} coordinates vary; natural units need two. "
                "Pass more samples, or leave scale out."
            )
        factors = None
        if self.factors is not None:
            A, B = self.factors
            factors = A[kept] / std[:, None], B[:, kept] * std
        return replace(
            self,
            values=self.values[np.ix_(kept, kept)] / std[:, None] * std,
            factors=factors,
            units="natural",
            n_dropped=self.size - len(kept),
        )


@dataclass(frozen=True)
class Eigen:
    """Eigenvalues of ``M − μI`` (``μ = tr M / d``) and a real basis of unit eigenvectors.

    Attributes:
        values: In LAPACK's order, conjugate pairs adjacent, positive imaginary part first.
        basis: A pair ``x ± iy`` is held as the columns ``√2x, √2y``: a unitary change of the two
            columns, so the condition number is that of the complex eigenvectors. ``None`` where
            the eigenvectors are not unique.
    """

    values: Complex[np.ndarray, " d"]
    basis: Float[np.ndarray, "d d"] | None

    @classmethod
    def of(cls, matrix: Matrix) -> Eigen:
        """Decompose; the non-zero eigenvalues of ``A @ B`` come from the small ``B @ A``."""
        mean = matrix.mean
        if matrix.factors is not None:
            A, B = matrix.factors
            values = np.zeros(matrix.size, dtype=np.complex128)
            values[: A.shape[1]] = scipy.linalg.eigvals(B @ A)
            return cls(values - mean, None)
        centred = matrix.centred
        workspace = int(lapack.dgeev_lwork(matrix.size, compute_vl=0)[0])
        real, imaginary, _, basis, info = lapack.dgeev(centred, compute_vl=0, lwork=workspace)
        if info != 0:
            raise TLSpectralError(
                f"LAPACK's eigenvalue iteration did not converge (dgeev info = {info}). Rescale "
                "the matrix (scale=...), or report its entries."
            )
        basis[:, imaginary != 0] *= math.sqrt(2)
        return cls(real + 1j * imaginary, basis)

    def in_units(self, scale: Float[np.ndarray, " d"]) -> Eigen:
        """Of ``D⁻¹ M D``: the same eigenvalues, eigenvectors ``D⁻¹ v`` at unit length."""
        if self.basis is None:
            return self
        basis = self.basis / scale[:, None]
        square = np.sum(basis**2, axis=0)
        (first,) = np.nonzero(self.values.imag > 0)
        square[first] = square[first + 1] = (square[first] + square[first + 1]) / 2
        return Eigen(self.values, basis / np.sqrt(square))

    def condition(self) -> float | None:
        """κ₂ of the unit eigenvectors; ``None`` if infinite to working precision."""
        if self.basis is None:
            return None
        sigma = scipy.linalg.svdvals(self.basis)
        if sigma[-1] <= len(sigma) * np.finfo(np.float64).eps * sigma[0]:
            return None
        return float(sigma[0] / sigma[-1])


def departure(centred: Float[np.ndarray, "d d"], eigenvalues: Complex[np.ndarray, " d"]) -> float:
    """Henrici's departure from normality, ``√(‖M‖² − Σ|λ|²)`` of a matrix of zero trace.

    Close to a normal matrix the difference cancels; there the strictly upper part of the real
    Schur form is summed instead (a standardised block ``[[a, b], [c, a]]`` departs by ``b + c``).
    """
    total = float(np.sum(centred**2))
    difference = total - float(np.sum(np.abs(eigenvalues) ** 2))
    if difference > 1e-8 * total:
        return math.sqrt(difference)
    T = scipy.linalg.schur(centred, output="real")[0]
    next_to_diagonal = np.diagonal(T, 1) + np.diagonal(T, -1)
    return float(np.hypot(np.linalg.norm(np.triu(T, 2)), np.linalg.norm(next_to_diagonal)))


def singular(matrix: Matrix, k: int) -> tuple[Float[np.ndarray, " d"], float, dict[str, str]]:
    """Singular values, and the overlap ``‖U_kᵀV_k‖²/k`` of the leading subspaces.

    Args:
        matrix: The operator.
        k: Dimension of the subspaces, at most d.

    Returns:
        Singular values (descending), overlap, caveats by metric.
    """
    if matrix.factors is None:
        U, sigma, Vt = np.linalg.svd(matrix.values)
    else:
        A, B = matrix.factors
        left, upper = np.linalg.qr(A)
        right, lower = np.linalg.qr(B.T)
        inner = np.linalg.svd(upper @ lower.T)
        U, Vt = left @ inner[0], inner[2] @ right.T
        sigma = np.zeros(matrix.size)
        sigma[: len(inner[1])] = inner[1]
    notes = {}
    resolution = matrix.size * np.finfo(np.float64).eps * sigma[0]
    if k < matrix.size and sigma[k - 1] - sigma[k] <= resolution:
        notes["self_alignment"] = f"σ_{k} and σ_{k + 1} coincide: the subspaces are not unique"
    overlap = float(np.sum((U[:, :k].T @ Vt[:k].T) ** 2)) / k
    return sigma, overlap, notes


def checked_scale(
    scale: Any, d: int
) -> tuple[Int[np.ndarray, " kept"], Float[np.ndarray, " kept"]]:
    """Indices of the coordinates that vary, and their standard deviations.

    Raises:
        InputError: If the scale has another length, is negative, or not finite.
    """
    std = torch.as_tensor(scale).detach().to("cpu", torch.float64).numpy()
    if std.shape != (d,):
        raise InputError(
            f"scale must hold one standard deviation per coordinate, [{d}], got {list(std.shape)}."
        )
    if not np.isfinite(std).all() or (std < 0).any():
        bad = int(np.argmin(np.isfinite(std) & (std >= 0)))
        raise InputError(f"scale[{bad}] = {std[bad]} is no standard deviation.")
    (kept,) = np.nonzero(std > _CONSTANT * std.max())
    return kept, std[kept]


def to_matrix(M: Any) -> Matrix:
    """Check an operator and bring it to float64 on the CPU.

    Args:
        M: A tensor or array ``[d, d]``, anything with a ``.matrix`` (a :class:`BlockJacobian`), or
            a ``FactoredMatrix`` (``.A``, ``.B``).

    Raises:
        InputError: If it is not a real, finite, square matrix with d ≥ 2 within range.
    """
    provenance = getattr(M, "provenance", None) or Provenance()
    if hasattr(M, "AB"):
        return _from_factors(M, provenance)
    values, eps = to_float64(getattr(M, "matrix", M))
    return Matrix(values, None, eps, provenance=provenance)


def _from_factors(M: Any, provenance: Provenance) -> Matrix:
    if M.A.ndim != 2 or M.B.ndim != 2:
        raise InputError(
            f"The FactoredMatrix holds a stack of shape {tuple(M.shape)}; pick one matrix, e.g. "
            "model.OV[layer, head]."
        )
    values, eps = to_float64(M.AB)
    if M.A.shape[1] >= len(values):
        return Matrix(values, None, eps, provenance=provenance)
    A, B = (F.detach().to("cpu", torch.float64).numpy() for F in (M.A, M.B))
    rank = A.shape[1]
    notes = {
        "eigenvector_condition": "the null space of a factored matrix has no unique eigenvectors",
        "effective_rank": f"rank at most {rank} by construction; the baseline has full rank",
    }
    return Matrix(A @ B, (A, B), eps, provenance=provenance, notes=notes)


def to_float64(M: Any) -> tuple[Float[np.ndarray, "d d"], float]:
    """A checked float64 copy of a square matrix, and the rounding unit of its entries.

    Raises:
        InputError: If it is not a real, finite, square matrix with d ≥ 2 within range.
    """
    try:
        tensor = torch.as_tensor(M).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            "Expected a [d, d] tensor, a BlockJacobian or a FactoredMatrix, got "
            f"{type(M).__name__}."
        ) from error
    if tensor.ndim != 2 or tensor.shape[0] != tensor.shape[1] or len(tensor) < 2:
        raise InputError(
            f"Expected a square matrix of at least 2 × 2, got shape {tuple(tensor.shape)}. For a "
            "batch of matrices, take one at a time."
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"Expected real numbers, got {tensor.dtype}.")
    eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 2.0**-52
    if eps > 1e-6:
        warnings.warn(
            f"The matrix is {tensor.dtype}: its entries carry {eps:.0e} relative rounding error. "
            "It is analysed in float64 as it is; compute it in float32 to trust small metrics.",
            TLSpectralWarning,
            stacklevel=3,
        )
    values: np.ndarray = tensor.to("cpu", torch.float64).numpy().copy()
    if not np.isfinite(values).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise InputError(
            f"Entry [{row}, {column}] is {values[row, column]}. Look for an overflow upstream "
            "(half precision, a masked position, NaN weights)."
        )
    largest = float(np.abs(values).max())
    if largest > 0 and not 1 / _LARGEST < largest < _LARGEST:
        raise InputError(
            f"The largest entry is {largest:.1e}: its square leaves the range of float64. Rescale "
            "the matrix."
        )
    return values, eps
