"""Spectrum of an operator that is never formed: leading values and estimates, each with its error.

Leading eigen- and singular values come from block Krylov subspaces with their residuals
(:mod:`tl_spectral.krylov`); norms and traces from random probes with the leading singular
directions treated exactly (the deflation of Hutch++, Meyer et al. 2021); the effective rank from
the quadrature that the Krylov space gives for its starting vectors (stochastic Lanczos). Errors of
what is sampled are standard errors such that value ± 1.96 errors is a 95 % interval
(:mod:`tl_spectral.quadrature`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from tl_spectral.baselines import ginibre_reference
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.krylov import (
    Eigenvalues,
    Products,
    SingularValues,
    Space,
    block_size,
    is_operator,
    leading_eigenvalues,
    leading_singular_values,
)
from tl_spectral.quadrature import ranks, sampled
from tl_spectral.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_ABSCISSA = 60  # largest dimension of the search for the numerical abscissa

__all__ = ["OperatorSpectrum", "is_operator", "operator_spectrum"]


@dataclass(frozen=True, eq=False)
class OperatorSpectrum(Result):
    """What can be said of an operator from products with it.

    Attributes:
        eigenvalues: The k of largest modulus found, descending; k + 1 where the k-th is half of a
            complex pair.
        eigenvalue_residuals: ``‖Mv − λv‖`` for the unit Ritz vector: λ is an exact eigenvalue of a
            matrix that far from M.
        eigenvalue_conditions: Condition number of each, as the Krylov space sees it: the error of λ
            is about its residual times this.
        eigenvalues_converged: Whether that error is below ``rtol·|λ|`` (or the residual rounding).
        singular_values: The k largest, descending; never above the true ones.
        singular_residuals: ``‖Mᵀu − σv‖``: a true singular value lies that close (the error of a
            separated one is of the order of its square).
        singular_values_converged: Whether the residual is below ``rtol·σ``.
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
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``; its error includes the change of the
            quadrature when the space last grew.
        henrici_lower: Lower bound of ``√(‖M‖² − Σ|λ|²)/‖M‖``, see :func:`operator_spectrum`.
        henrici_upper: Upper bound of the same. The errors are those of the bounds.
        errors: Metric to error: a residual where the metric is a Ritz value, a standard error
            where it is estimated from probes (value ± 1.96 errors covers 95 %).
        baseline: The same metrics for a real Ginibre matrix of this size and norm.
        rtol: Relative error at which a leading value counts as converged.
        k: Number of leading values asked for.
        d: Size of the operator.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out because they do not vary.
        n_products: Products with M or Mᵀ spent, in columns (forming M takes d).
    """

    eigenvalues: Complex[Tensor, " n"]
    eigenvalue_residuals: Float[Tensor, " n"]
    eigenvalue_conditions: Float[Tensor, " n"]
    eigenvalues_converged: Bool[Tensor, " n"]
    singular_values: Float[Tensor, " k"]
    singular_residuals: Float[Tensor, " k"]
    singular_values_converged: Bool[Tensor, " k"]
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
    effective_rank: float
    henrici_lower: float
    henrici_upper: float
    errors: Mapping[str, float]
    baseline: Mapping[str, float | None]
    rtol: float
    k: int
    d: int
    units: Literal["raw", "natural"]
    n_dropped: int
    n_products: int

    @property
    def converged(self) -> bool:
        """Whether every leading value has converged to ``rtol``."""
        return bool(self.eigenvalues_converged.all() and self.singular_values_converged.all())

    def to_dataframe(self) -> pd.DataFrame:
        """One row per metric: value, error, baseline."""
        import pandas as pd

        rows = [
            (name, getattr(self, name), error, self.baseline[name.removesuffix("_lower")
             .removesuffix("_upper")])
            for name, error in self.errors.items()
        ]  # fmt: skip
        table: pd.DataFrame = pd.DataFrame(rows, columns=["metric", "value", "error", "baseline"])
        return table.astype(dict.fromkeys(("value", "error", "baseline"), "float64"))

    def plot(self) -> Figure:
        """The leading eigenvalues with the unit circle, and the leading singular values."""
        from tl_spectral.plots import spectrum_figure

        return spectrum_figure(self)


def operator_spectrum(
    op: Any,
    scale: Float[Tensor, " d"] | None = None,
    *,
    k: int = 10,
    rtol: float = 1e-3,
    subspace: int | None = None,
    probes: int = 32,
    seed: int = 0,
) -> OperatorSpectrum:
    """Leading eigen- and singular values of an operator, and estimates of its norms and traces.

    The Krylov spaces grow until all k values have converged, or to ``subspace`` at most. Values at
    the edge of a dense cloud (a random matrix, the bulk of a wide layer) converge slowly or not at
    all; then a warning says how many, and each value says whether it is one of them.

    Henrici's departure from normality needs every eigenvalue; from products it is enclosed. With
    ``R = M − (tr M/d) I``, which has the same departure, ``S`` and ``A`` its symmetric and
    antisymmetric parts, ``C = MMᵀ − MᵀM`` and the converged eigenvalues λ of R:

    * ``dep² ≤ 2 min(‖S‖² − Σ(Re λ)², ‖A‖² − Σ(Im λ)²)`` (from the Schur form: each part holds half
      of the strictly upper triangle), and ``dep² ≤ √((d³ − d)/12) ‖C‖`` (Henrici 1962);
    * ``dep² ≥ ‖R‖² − √(‖R‖⁴ − ‖C‖²/2)`` (Kress, de Vries & Wegmann 1974), and
      ``dep ≥ ‖C‖/(2σ + 2ρ)`` with σ, ρ bounds of R's spectral norm and radius (as
      ``C = [R, Nᵀ] + [N, Dᵀ]`` for ``R = D + N`` in Schur form).

    Args:
        op: A :class:`JacobianOperator`, a chain of them, or a SciPy ``LinearOperator`` with
            ``rmatmat``; square. Near the identity use ``op.update``.
        scale: Standard deviation of each coordinate, for natural units.
        k: How many leading values (at most d).
        rtol: Relative error at which a leading value counts as converged.
        subspace: Largest dimension of the Krylov spaces, by default ``16k + 64``; d is exact.
        probes: Number of random sign vectors.
        seed: Seed of the starting blocks and of the probes.

    Returns:
        The values, each with its error.

    Raises:
        InputError: If the operator is not square, gives NaN, or is zero; or for options out of
            range.
    """
    M = Products(op, scale)
    d = M.size
    _in_range("k", k, 1, d)
    most = min(d, 16 * k + 64) if subspace is None else subspace
    _in_range("subspace", most, k, d)
    _in_range("probes", probes, 2, None)
    if not 0 < rtol < 1:
        raise InputError(f"rtol must lie between 0 and 1, got {rtol!r}.")
    rng = np.random.default_rng(seed)
    start = _signs(rng, d, block_size(k, most))
    singular = leading_singular_values(M, k, start, rng, rtol=rtol, most=most)
    start = _signs(rng, d, block_size(k // 2, most))  # eigenvalues need the higher powers
    eigen = leading_eigenvalues(M, k, start, rng, rtol=rtol, most=most)
    _warn(eigen, singular, k, rtol, most, d)
    U, sigma, V = singular.left, singular.values, singular.right
    estimates, errors = _estimates(M, singular, eigen, probes, rng)
    abscissa = _abscissa(M, singular, eigen, rtol, rng)
    rank, rank_error = ranks(*singular.nodes)
    own = getattr(op, "provenance", None) or Provenance()
    options = {"k": k, "rtol": rtol, "subspace": most, "probes": probes}
    return OperatorSpectrum(
        eigenvalues=torch.from_numpy(eigen.values),
        eigenvalue_residuals=torch.from_numpy(eigen.residuals),
        eigenvalue_conditions=torch.from_numpy(eigen.conditions),
        eigenvalues_converged=torch.from_numpy(eigen.converged),
        singular_values=torch.from_numpy(sigma.copy()),
        singular_residuals=torch.from_numpy(singular.residuals),
        singular_values_converged=torch.from_numpy(singular.converged),
        spectral_radius=float(abs(eigen.values[0])),
        spectral_norm=float(sigma[0]),
        self_alignment=float(np.sum((U.T @ V) ** 2)) / k,
        numerical_abscissa=abscissa[0],
        effective_rank=rank.effective_rank,
        **estimates,
        errors={
            "spectral_radius": float(eigen.residuals[0]),
            "spectral_norm": float(singular.residuals[0]),
            "self_alignment": float(singular.residuals[-1] / max(sigma[-1], 1e-300)),
            "numerical_abscissa": abscissa[1],
            "effective_rank": rank_error.effective_rank,
            **errors,
        },
        baseline=ginibre_reference(d, estimates["frobenius"], k),
        rtol=rtol,
        k=k,
        d=d,
        units="raw" if scale is None else "natural",
        n_dropped=M.n_dropped,
        n_products=M.count,
        provenance=Provenance(**{**vars(own), "seed": seed, "options": {**own.options, **options}}),
    )


def _in_range(name: str, value: int, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        upto = f" to {most}" if most is not None else " on"
        raise InputError(f"{name} must be an integer from {least}{upto}, got {value!r}.")


def _signs(rng: np.random.Generator, d: int, count: int) -> Float[np.ndarray, "d count"]:
    return rng.integers(0, 2, (d, count)) * 2.0 - 1


def _warn(
    eigen: Eigenvalues, singular: SingularValues, k: int, rtol: float, subspace: int, d: int
) -> None:
    missing = {
        "eigenvalues": (int((~eigen.converged).sum()), len(eigen.converged)),
        "singular values": (int((~singular.converged).sum()), len(singular.converged)),
    }
    counts = [f"{n} of {total} {what}" for what, (n, total) in missing.items() if n]
    if counts:
        more = f"Raise subspace (now {subspace} of {d}), or ask" if subspace < d else "Ask"
        warnings.warn(
            f"{' and '.join(counts)} have not converged to a relative {rtol:g}: they lie in a "
            f"dense part of the spectrum, see their residuals. {more} for fewer than k = {k}.",
            TLSpectralWarning,
            stacklevel=3,
        )


def _estimates(
    M: Products,
    singular: SingularValues,
    eigen: Eigenvalues,
    probes: int,
    rng: np.random.Generator,
) -> tuple[dict[str, float], dict[str, float]]:
    """Norms, traces and bounds: exact on the leading singular directions, sampled on the rest."""
    W = _span(np.hstack([singular.right, singular.left]))
    signs = _signs(rng, M.size, probes)
    X = np.hstack([W, signs - W @ (W.T @ signs)])
    image, back = M.forward(X), M.backward(X)
    square, other = M.backward(image), M.forward(back)
    terms = np.stack(
        [
            np.sum(image**2, axis=0),  # ‖M‖²
            np.sum(back * image, axis=0),  # tr M²
            np.sum(square**2, axis=0),  # ‖MᵀM‖²
            np.sum(X * image, axis=0),  # tr M
            np.sum((other - square) ** 2, axis=0),  # ‖MMᵀ − MᵀM‖²
        ]
    )
    r = W.shape[1]
    sigma = float(singular.values[0] + singular.residuals[0])
    radius = abs(eigen.values[0]) * (1 + 1e-3) if eigen.converged[0] else math.inf
    found = eigen.values[eigen.converged]
    names = (
        "frobenius", "trace", "symmetry_score", "antisymmetric_energy",
        "participation_ratio", "stable_rank", "henrici_lower", "henrici_upper",
    )  # fmt: skip

    def derive(sums: Float[np.ndarray, "5 n"]) -> Float[np.ndarray, "q n"]:
        F, T, fourth, trace, _ = sums
        symmetry = T / F
        bounds = _departure(sums, M.size, sigma, radius, found)
        return np.stack(
            [
                np.sqrt(F), trace, symmetry, (1 - symmetry) / 2, F**2 / fourth,
                F / singular.values[0] ** 2, *np.sqrt(bounds / F),
            ]
        )  # fmt: skip

    values, errors = sampled(terms[:, :r].sum(axis=1), terms[:, r:], derive)
    rank = names.index("stable_rank")  # σ₁ has an error too
    doubt = 2 * values[rank] * float(singular.residuals[0] / singular.values[0])
    errors[rank] = math.hypot(errors[rank], doubt)
    as_floats = [dict(zip(names, column.tolist(), strict=True)) for column in (values, errors)]
    return as_floats[0], as_floats[1]


def _span(X: Float[np.ndarray, "d n"]) -> Float[np.ndarray, "d r"]:
    U, s, _ = np.linalg.svd(X, full_matrices=False)
    return U[:, s > 1e-6 * s[0]]


def _departure(
    sums: Float[np.ndarray, "5 n"],
    d: int,
    sigma: float,
    radius: float,
    found: Complex[np.ndarray, " f"],
) -> Float[np.ndarray, "2 n"]:
    """Lower and upper bound of dep², see :func:`operator_spectrum`."""
    F, T, _, trace, commutator = sums
    shift = trace / d
    F, T = F - trace**2 / d, T - trace**2 / d  # of R = M − shift
    real = np.square(found.real[:, None] - shift).sum(axis=0)
    imaginary = np.square(found.imag).sum()
    halves = np.minimum((F + T) / 2 - real, (F - T) / 2 - imaginary)
    by_commutator = math.sqrt((d**3 - d) / 12) * np.sqrt(commutator)
    upper = np.maximum(0, np.minimum(2 * halves, by_commutator))
    norm = np.minimum(sigma + np.abs(shift), np.sqrt(np.maximum(F, 0)))
    size = 2 * norm + 2 * np.minimum(norm, radius + np.abs(shift))
    by_size = np.divide(commutator, size**2, out=np.zeros_like(size), where=size > 0)
    lower = np.maximum(F - np.sqrt(np.maximum(F**2 - commutator / 2, 0)), by_size)
    return np.stack([np.clip(lower, 0, None), upper])


def _abscissa(
    M: Products,
    singular: SingularValues,
    eigen: Eigenvalues,
    rtol: float,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Largest eigenvalue of the symmetric part, and the residual of its Ritz vector.

    As ``zᵀSz = zᵀMz``, the two Krylov spaces give good directions without a product; a few blocks
    from there do the rest.
    """
    shared = eigen.basis.T @ singular.basis
    rest = singular.basis - eigen.basis @ shared
    squares, W = np.linalg.eigh(rest.T @ rest)
    new = squares > 1e-8  # directions that both spaces hold count once
    W = W[:, new] / np.sqrt(squares[new])
    Q = np.hstack([eigen.basis, rest @ W])
    H = Q.T @ np.hstack([eigen.image, (singular.image - eigen.image @ shared) @ W])
    start = Q @ np.linalg.eigh((H + H.T) / 2)[1][:, -8:]
    space = Space(lambda X: (M.forward(X) + M.backward(X)) / 2, start, _ABSCISSA, rng)
    while True:
        theta, Z = np.linalg.eigh(space.basis.T @ space.image)
        misfit = space.image @ Z[:, -1] - theta[-1] * (space.basis @ Z[:, -1])
        residual = float(np.linalg.norm(misfit))
        if space.full or residual <= 10 * rtol * abs(theta[-1]):  # the value errs by its square
            return float(theta[-1]), residual
        space.grow(1.1)
