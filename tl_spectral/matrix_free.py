"""Spectrum of an operator that is never formed: leading values and estimates, each with its error.

Leading eigen- and singular values come from block Krylov subspaces (Rayleigh-Ritz; Musco & Musco
2015 for the singular values) with their residuals; norms and traces from random probes with the
leading singular directions treated exactly (the deflation of Hutch++, Meyer et al. 2021), with
jackknife standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_spectral.baselines import ginibre_reference
from tl_spectral.decompose import checked_scale
from tl_spectral.errors import InputError
from tl_spectral.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_Products = Callable[[np.ndarray], np.ndarray]  # [d, n] → [d, n]
_BLOCK = 8  # columns per product: small blocks reach higher powers with the same subspace


@dataclass(frozen=True, eq=False)
class OperatorSpectrum(Result):
    """What can be said of an operator from products with it.

    Attributes:
        eigenvalues: The k of largest modulus found, descending.
        eigenvalue_residuals: ``‖Mv − λv‖`` for the unit Ritz vector: λ is an exact eigenvalue of a
            matrix that far from M. Near the size of ``|λ|`` it means "not converged".
        singular_values: The k largest, descending; never above the true ones.
        singular_residuals: ``‖Mᵀu − σv‖``: a true singular value lies that close.
        spectral_radius: Modulus of the first eigenvalue found.
        spectral_norm: First singular value.
        self_alignment: Overlap of the leading k left and right singular subspaces found.
        numerical_abscissa: Largest eigenvalue of the symmetric part, from below.
        frobenius: ‖M‖_F.
        trace: tr M.
        symmetry_score: ``tr(M²)/‖M‖_F²``.
        antisymmetric_energy: ``(1 − symmetry_score)/2``.
        participation_ratio: ``(Σσ²)²/Σσ⁴``.
        stable_rank: ``‖M‖_F²/σ₁²``.
        errors: Metric to error: a residual where the metric is a Ritz value, one standard error
            where it is estimated from probes.
        baseline: The same metrics for a real Ginibre matrix of this size and norm.
        k: Number of leading values.
        d: Size of the operator.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out because they do not vary.
        n_products: Products with M or Mᵀ spent, in columns (forming M takes d).
    """

    eigenvalues: Complex[Tensor, " k"]
    eigenvalue_residuals: Float[Tensor, " k"]
    singular_values: Float[Tensor, " k"]
    singular_residuals: Float[Tensor, " k"]
    spectral_radius: float
    spectral_norm: float
    self_alignment: float
    numerical_abscissa: float
    frobenius: float
    trace: float
    symmetry_score: float
    antisymmetric_energy: float
    participation_ratio: float
    stable_rank: float
    errors: Mapping[str, float]
    baseline: Mapping[str, float | None]
    k: int
    d: int
    units: Literal["raw", "natural"]
    n_dropped: int
    n_products: int

    def to_dataframe(self) -> pd.DataFrame:
        """One row per metric: value, error, baseline."""
        import pandas as pd

        rows = [(name, getattr(self, name), self.errors[name], self.baseline[name])
                for name in self.errors]  # fmt: skip
        table: pd.DataFrame = pd.DataFrame(rows, columns=["metric", "value", "error", "baseline"])
        return table.astype(dict.fromkeys(("value", "error", "baseline"), "float64"))

    def plot(self) -> Figure:
        """The leading eigenvalues with the unit circle, and the leading singular values."""
        from tl_spectral.plots import spectrum_figure

        return spectrum_figure(self)


def is_operator(M: Any) -> bool:
    """Whether M is a :class:`JacobianOperator` or a SciPy ``LinearOperator``."""
    return hasattr(M, "to_scipy") or (hasattr(M, "rmatmat") and hasattr(M, "matmat"))


def operator_spectrum(
    op: Any,
    scale: Float[Tensor, " d"] | None = None,
    *,
    k: int = 10,
    subspace: int | None = None,
    probes: int = 64,
    seed: int = 0,
) -> OperatorSpectrum:
    """Leading eigen- and singular values of an operator, and estimates of its norms and traces.

    Args:
        op: A :class:`JacobianOperator` or a SciPy ``LinearOperator`` with ``rmatmat``; square.
        scale: Standard deviation of each coordinate, for natural units.
        k: How many leading values (at most d).
        subspace: Dimension of the Krylov subspaces, by default ``6k + 20``; larger is more
            accurate, d is exact.
        probes: Number of random sign vectors.
        seed: Seed of the starting block and of the probes.

    Returns:
        The values, each with its error.

    Raises:
        InputError: If the operator is not square, gives NaN, or is zero; or for options out of
            range.
    """
    if len(op.shape) != 2 or op.shape[0] != op.shape[1]:
        raise InputError(f"Expected a square operator, got shape {tuple(op.shape)}.")
    M = _Counted(op, scale)
    d = M.size
    subspace = min(d, 6 * k + 20) if subspace is None else subspace
    for name, value, least, most in (
        ("k", k, 1, d), ("subspace", subspace, k, d), ("probes", probes, 2, None)
    ):  # fmt: skip
        if type(value) is not int or value < least or (most is not None and value > most):
            upto = f" to {most}" if most is not None else " on"
            raise InputError(f"{name} must be an integer from {least}{upto}, got {value!r}.")
    rng = np.random.default_rng(seed)

    Q, image = _krylov(M.forward, d, subspace, rng)
    theta, Z = np.linalg.eig(Q.T @ image)
    first = np.argsort(-np.abs(theta), kind="stable")[:k]
    theta, Z = theta[first].astype(np.complex128), Z[:, first]
    eigen_residuals = np.linalg.norm(image @ Z - (Q @ Z) * theta, axis=0)

    left: list[np.ndarray] = []

    def gram(X: np.ndarray) -> np.ndarray:
        left.append(M.forward(X))
        return M.backward(left[-1])

    V, gram_image = _krylov(gram, d, subspace, rng)
    U, sigma, Zt = np.linalg.svd(np.hstack(left), full_matrices=False)
    if sigma[0] == 0:
        raise InputError("The operator is zero; it has no direction to describe.")
    U, sigma, Zt = U[:, :k], sigma[:k], Zt[:k]
    V, MtMV = V @ Zt.T, gram_image @ Zt.T
    safe = np.maximum(sigma, np.finfo(np.float64).tiny)
    singular_residuals = np.where(sigma > 0, np.linalg.norm(MtMV / safe - V * sigma, axis=0), 0)

    abscissa, abscissa_residual = _abscissa(M, min(d, 60), rng)
    estimates, errors = _estimates(M, V, U * sigma, MtMV, float(sigma[0]), probes, rng)
    own = getattr(op, "provenance", None) or Provenance()
    return OperatorSpectrum(
        eigenvalues=torch.from_numpy(theta),
        eigenvalue_residuals=torch.from_numpy(eigen_residuals),
        singular_values=torch.from_numpy(sigma.copy()),
        singular_residuals=torch.from_numpy(singular_residuals),
        spectral_radius=float(abs(theta[0])),
        spectral_norm=float(sigma[0]),
        self_alignment=float(np.sum((U.T @ V) ** 2)) / k,
        numerical_abscissa=abscissa,
        **estimates,
        errors={
            "spectral_radius": float(eigen_residuals[0]),
            "spectral_norm": float(singular_residuals[0]),
            "self_alignment": float(singular_residuals[-1] / safe[-1]),
            "numerical_abscissa": abscissa_residual,
            **errors,
        },
        baseline=ginibre_reference(d, estimates["frobenius"], k),
        k=k,
        d=d,
        units="raw" if scale is None else "natural",
        n_dropped=M.n_dropped,
        n_products=M.count,
        provenance=Provenance(
            **{**vars(own), "seed": seed, "options": {"subspace": subspace, "probes": probes}}
        ),
    )


class _Counted:
    """Products in float64 and in the chosen units, checked and counted."""

    def __init__(self, op: Any, scale: Any) -> None:
        d = op.shape[0]
        self._of_torch = hasattr(op, "to_scipy")
        self._op, self._transposed = op, op.T
        self._kept, self._std = np.arange(d), np.ones(d)
        if scale is not None:
            self._kept, self._std = checked_scale(scale, d)
        self.size, self.n_dropped, self.count = len(self._kept), d - len(self._kept), 0
        if self.size < 2:
            raise InputError(f"{self.size} coordinates are left; a spectrum needs two that vary.")

    def forward(self, X: np.ndarray) -> np.ndarray:
        """``D⁻¹ M D X``."""
        return self._apply(self._op, X * self._std[:, None]) / self._std[:, None]

    def backward(self, X: np.ndarray) -> np.ndarray:
        """``D Mᵀ D⁻¹ X``."""
        return self._apply(self._transposed, X / self._std[:, None]) * self._std[:, None]

    def _apply(self, op: Any, X: np.ndarray) -> np.ndarray:
        self.count += X.shape[1]
        full = np.zeros((self.size + self.n_dropped, X.shape[1]))
        full[self._kept] = X
        product: np.ndarray
        if self._of_torch:
            product = (op @ torch.from_numpy(full)).detach().to("cpu", torch.float64).numpy()
        else:
            product = np.asarray(op @ full, dtype=np.float64)
        if not np.isfinite(product).all():
            raise InputError("A product with the operator is not finite; look for NaN upstream.")
        return product[self._kept]


def _krylov(
    apply: _Products, d: int, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal basis of a block Krylov space and its image, both ``[d, size]``."""
    basis = np.empty((d, 0))
    images = []
    candidates = rng.standard_normal((d, min(_BLOCK, size)))
    while True:
        frontier = _new_directions(candidates, basis, rng)
        images.append(apply(frontier))
        basis = np.hstack([basis, frontier])
        room = size - basis.shape[1]
        if room == 0:
            return basis, np.hstack(images)
        candidates = images[-1][:, :room]


def _new_directions(
    candidates: np.ndarray, basis: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Orthonormal directions outside the basis; random ones where candidates bring none."""
    fresh = candidates / np.maximum(np.linalg.norm(candidates, axis=0), np.finfo(float).tiny)
    while True:
        for _ in range(2):  # once is not enough in floating point
            fresh = fresh - basis @ (basis.T @ fresh)
        Q, R = np.linalg.qr(fresh)
        exhausted = np.abs(np.diagonal(R)) < 1e-10
        if not exhausted.any():
            for _ in range(2):  # what was nearly inside is magnified by the QR
                Q = np.linalg.qr(Q - basis @ (basis.T @ Q))[0]
            return Q
        fresh[:, exhausted] = rng.standard_normal((len(fresh), int(exhausted.sum())))
        fresh /= np.linalg.norm(fresh, axis=0)


def _abscissa(M: _Counted, size: int, rng: np.random.Generator) -> tuple[float, float]:
    """Largest eigenvalue of the symmetric part, and the residual of its Ritz vector."""
    Q, image = _krylov(lambda X: (M.forward(X) + M.backward(X)) / 2, M.size, size, rng)
    H = Q.T @ image
    theta, Z = np.linalg.eigh((H + H.T) / 2)
    return float(theta[-1]), float(np.linalg.norm(image @ Z[:, -1] - theta[-1] * (Q @ Z[:, -1])))


def _estimates(
    M: _Counted,
    V: np.ndarray,
    MV: np.ndarray,
    MtMV: np.ndarray,
    sigma_1: float,
    probes: int,
    rng: np.random.Generator,
) -> tuple[dict[str, float], dict[str, float]]:
    """Norms and traces: exact on span V, by random signs on its complement."""
    signs = rng.integers(0, 2, (M.size, probes)) * 2.0 - 1
    rest = signs - V @ (V.T @ signs)
    image, back = M.forward(rest), M.backward(rest)
    exact = np.array([np.sum(MV**2), np.sum(M.backward(V) * MV), np.sum(MtMV**2), np.sum(V * MV)])
    sampled = np.stack(
        [
            np.sum(image**2, axis=0),  # ‖M‖²
            np.sum(back * image, axis=0),  # tr M²
            np.sum(M.backward(image) ** 2, axis=0),  # ‖MᵀM‖²
            np.sum(rest * image, axis=0),  # tr M
        ]
    )
    mean = sampled.mean(axis=1, keepdims=True)
    without_one = (mean * probes - sampled) / (probes - 1)
    values = _derived(exact[:, None] + mean, sigma_1)
    jackknife = _derived(exact[:, None] + without_one, sigma_1)
    errors = {
        name: math.sqrt((probes - 1) * float(np.var(column))) for name, column in jackknife.items()
    }
    return {name: float(value[0]) for name, value in values.items()}, errors


def _derived(totals: Float[np.ndarray, "4 n"], sigma_1: float) -> dict[str, np.ndarray]:
    square, trace_of_square, fourth, trace = totals
    symmetry = trace_of_square / square
    return {
        "frobenius": np.sqrt(square),
        "trace": trace,
        "symmetry_score": symmetry,
        "antisymmetric_energy": (1 - symmetry) / 2,
        "participation_ratio": square**2 / fourth,
        "stable_rank": square / sigma_1**2,
    }
