"""One operator's character: eigenvalues, singular values, and what they say next to chance.

Lengths and angles depend on the unit of each coordinate. ``units="raw"`` takes the residual
coordinates as they are; ``units="natural"`` measures each in its standard deviation over samples,
``D⁻¹ M D``, which keeps the eigenvalues and stops a few huge coordinates from deciding the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Complex, Float
from scipy.special import entr
from torch import Tensor

from tl_spectral.baselines import ginibre_reference, skip_reference
from tl_spectral.decompose import Eigen, Matrix, checked_scale, departure, singular, to_matrix
from tl_spectral.errors import InputError
from tl_spectral.matrix_free import OperatorSpectrum, is_operator, operator_spectrum
from tl_spectral.metrics import METRICS, Metric
from tl_spectral.results import Provenance, Result
from tl_spectral.threads import one_blas_thread

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

    from tl_spectral.jacobian import JacobianOperator

__all__ = ["METRICS", "Metric", "OperatorSpectrum", "Spectrum", "block_spectra", "spectrum"]

Units = Literal["raw", "natural"]


@dataclass(frozen=True, eq=False)
class Spectrum(Result):
    """Spectrum and metrics of one ``d × d`` operator. Definitions are in :data:`METRICS`.

    A metric that cannot be computed is ``None`` and ``notes`` says why.

    Attributes:
        eigenvalues: Sorted by descending modulus.
        singular_values: Descending.
        complex_fraction: Share of eigenvalues off the real axis, by ``tol``.
        rotation_index: ``Σ|Im λ|/Σ|λ|``.
        antisymmetric_energy: ``‖(M − Mᵀ)/2‖²/‖M‖²``.
        symmetry_score: ``tr(M²)/‖M‖²``.
        henrici: Departure from normality relative to ‖M‖_F. Public code gives that name to three
            formulas; here it is ``√(‖M‖² − Σ|λ|²)/‖M‖`` with the numerator taken after a shift by
            the mean eigenvalue, which changes nothing but the rounding error.
        self_alignment: Overlap of the top-k left and right singular subspaces.
        spectral_radius: Largest modulus of an eigenvalue.
        spectral_norm: Largest singular value.
        numerical_abscissa: Largest eigenvalue of the symmetric part.
        expanding_fraction: Share of eigenvalues outside the unit circle.
        effective_rank: Exponential of the entropy of σ² (not of σ, as Roy & Vetterli have it).
        participation_ratio: ``(Σσ²)²/Σσ⁴``.
        stable_rank: ``‖M‖_F²/σ₁²``.
        condition_number: ``σ₁/σ_d``.
        eigenvector_condition: Condition number of the matrix of unit eigenvectors.
        norm_ratio: ``‖R‖_F/‖J‖_F`` where the operator is known to belong to a block.
        frobenius: ‖M‖_F.
        trace: Sum of the eigenvalues.
        tol: An eigenvalue counts as complex if ``|Im λ| > tol·max|λ|``.
        k: Dimension used in ``self_alignment``.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out because they do not vary (natural units only).
        baseline: The same metrics for a real Ginibre matrix of this size and norm.
        skip_baseline: The same metrics for identity plus a Ginibre matrix of the update's norm;
            only for J of a block.
        notes: Metric to reason, where a value is missing or needs a caveat.
    """

    eigenvalues: Complex[Tensor, " d"]
    singular_values: Float[Tensor, " d"]
    complex_fraction: float | None
    rotation_index: float | None
    antisymmetric_energy: float
    symmetry_score: float
    henrici: float
    self_alignment: float
    spectral_radius: float
    spectral_norm: float
    numerical_abscissa: float
    expanding_fraction: float
    effective_rank: float
    participation_ratio: float
    stable_rank: float
    condition_number: float | None
    eigenvector_condition: float | None
    norm_ratio: float | None
    frobenius: float
    trace: float
    tol: float
    k: int
    units: Units
    n_dropped: int
    baseline: Mapping[str, float | None]
    skip_baseline: Mapping[str, float | None] | None
    notes: Mapping[str, str]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per metric: value, baselines, note, definition."""
        import pandas as pd

        skip = self.skip_baseline or {}
        rows = [
            {
                "metric": name,
                "value": getattr(self, name),
                "baseline": self.baseline[name],
                "skip_baseline": skip.get(name),
                "note": self.notes.get(name, ""),
                "definition": metric.definition,
            }
            for name, metric in METRICS.items()
        ]
        numbers = dict.fromkeys(("value", "baseline", "skip_baseline"), "float64")
        table: pd.DataFrame = pd.DataFrame(rows).astype(numbers)
        return table

    def plot(self) -> Figure:
        """Eigenvalue cloud with the unit circle, and the singular values."""
        from tl_spectral.plots import spectrum_figure

        return spectrum_figure(self)


@overload
def spectrum(
    M: JacobianOperator,
    scale: Float[Tensor, " d"] | None = None,
    *,
    tol: float | None = None,
    k: int = 10,
) -> OperatorSpectrum: ...


@overload
def spectrum(
    M: Any,
    scale: Float[Tensor, " d"] | None = None,
    *,
    tol: float | None = None,
    k: int = 10,
) -> Spectrum: ...


def spectrum(
    M: Any,
    scale: Float[Tensor, " d"] | None = None,
    *,
    tol: float | None = None,
    k: int = 10,
) -> Spectrum | OperatorSpectrum:
    """Eigenvalues, singular values and metrics of one operator, in float64 on the CPU.

    Args:
        M: A ``[d, d]`` tensor (row = output), a :class:`BlockJacobian`, or a TransformerLens
            ``FactoredMatrix`` (its zero eigenvalues are then exact, from the small product). A
            :class:`JacobianOperator` or SciPy ``LinearOperator`` is not formed: see
            :func:`tl_spectral.matrix_free.operator_spectrum` for what can be told then.
        scale: Standard deviation of each coordinate: switches to natural units ``D⁻¹ M D``.
            Coordinates of zero deviation are left out and counted.
        tol: Relative size of an imaginary part that counts; by default 1e-6 for entries that were
            float32 or less, 1e-12 for float64.
        k: Dimension of the subspaces in ``self_alignment`` (at most d, and the inner dimension of a
            factored matrix; a note says when it was reduced). Of an operator, also the number of
            leading eigen- and singular values.

    Returns:
        The spectrum.

    Raises:
        InputError: If M is not a finite, non-zero, real square matrix with d ≥ 2, or ``scale``
            does not fit it.
    """
    if is_operator(M):
        if tol is not None:
            raise InputError("tol counts complex eigenvalues among all; an operator shows only k.")
        return operator_spectrum(M, scale, k=k)
    matrix = to_matrix(M).in_units(scale)
    tol = _checked(tol, k, matrix)
    with one_blas_thread(matrix.size):
        return _measure(matrix, _Shape.of(matrix, Eigen.of(matrix)), tol, k)


def block_spectra(
    J: Any,
    scale: Float[Tensor, " d"] | None = None,
    *,
    tol: float | None = None,
    k: int = 10,
) -> dict[tuple[str, str], Spectrum]:
    """Spectra of a block's Jacobian J and of its update ``R = J − I``, raw and natural.

    The eigenvalues are computed once (those of J are those of R plus 1) and shared, as is
    everything else that a shift or a change of units leaves alone.

    Args:
        J: A :class:`BlockJacobian` or a ``[d, d]`` tensor.
        scale: Standard deviation of each coordinate of the block's input; adds natural units.
        tol: As in :func:`spectrum`.
        k: As in :func:`spectrum`.

    Returns:
        ``(operator, units)`` to spectrum; operator ``"J"`` or ``"R"``, units ``"raw"`` or, if
        ``scale`` is given, ``"natural"``. Between two different positions there is no skip: then
        R is J.

    Raises:
        InputError: As :func:`spectrum`, and if the block is the identity (R = 0).
    """
    block = to_matrix(J)
    tol = _checked(tol, k, block)
    skip = getattr(J, "pos", None) == getattr(J, "source_pos", None)
    update = block.shifted(-1.0) if skip else block
    if not update.values.any():
        raise InputError("The block is the identity: its update R = J − I is zero.")
    with one_blas_thread(update.size):
        spectra = _of_block(update, skip, scale, tol, k)
    return {key: spectra[key] for key in sorted(spectra, key=lambda key: (key[1] != "raw", key[0]))}


def _of_block(
    update: Matrix, skip: bool, scale: Float[Tensor, " d"] | None, tol: float, k: int
) -> dict[tuple[str, str], Spectrum]:
    eigen = Eigen.of(update)
    bases = [(update, eigen)]
    if scale is not None:
        natural = update.in_units(scale)
        if natural.n_dropped:  # another operator: fewer coordinates, other eigenvalues
            bases.append((natural, Eigen.of(natural)))
        else:
            bases.append((natural, eigen.in_units(checked_scale(scale, update.size)[1])))
    spectra: dict[tuple[str, str], Spectrum] = {}
    for R, eigen in bases:
        shape = _Shape.of(R, eigen)
        J_matrix = R.shifted(1.0) if skip else R
        frobenius_R = float(np.linalg.norm(R.values))
        frobenius_J = float(np.linalg.norm(J_matrix.values))
        ratio = frobenius_R / frobenius_J if frobenius_J else None
        of_J, of_R = (replace(_measure(M, shape, tol, k), norm_ratio=ratio) for M in (J_matrix, R))
        if skip:
            of_J = replace(of_J, skip_baseline=skip_reference(R.size, frobenius_R, of_J.k))
        spectra["J", R.units], spectra["R", R.units] = of_J, of_R
    return spectra


@dataclass(frozen=True)
class _Shape:
    """What ``M`` and ``M + cI`` share; eigenvalues and abscissa are those of ``M − μI``."""

    eigenvalues: Complex[np.ndarray, " d"]
    departure: float
    antisymmetric: float
    abscissa: float
    eigenvector_condition: float | None

    @classmethod
    def of(cls, matrix: Matrix, eigen: Eigen) -> _Shape:
        M = matrix.centred
        top = [matrix.size - 1, matrix.size - 1]
        return cls(
            eigenvalues=eigen.values,
            departure=departure(M, eigen.values),
            antisymmetric=float(np.linalg.norm(M - M.T)) / 2,
            abscissa=float(scipy.linalg.eigvalsh((M + M.T) / 2, subset_by_index=top)[0]),
            eigenvector_condition=eigen.condition(),
        )


def _checked(tol: float | None, k: int, matrix: Matrix) -> float:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a positive integer, got {k!r}.")
    if tol is None:
        return 1e-12 if matrix.eps < 1e-12 else 1e-6
    if not 0 <= tol < 1:
        raise InputError(f"tol must lie in [0, 1), got {tol!r}.")
    return float(tol)


def _measure(matrix: Matrix, shape: _Shape, tol: float, k: int) -> Spectrum:
    M, d = matrix.values, matrix.size
    if not M.any():
        raise InputError("The matrix is zero; it has no direction to describe.")
    notes = dict(matrix.notes)
    mean = matrix.mean
    eigenvalues = shape.eigenvalues + mean
    eigenvalues = eigenvalues[np.argsort(-np.abs(eigenvalues), kind="stable")]
    modulus = np.abs(eigenvalues)
    if k > matrix.rank_bound:
        notes["self_alignment"] = f"k = {k} exceeds the rank; {matrix.rank_bound} is used"
        k = matrix.rank_bound
    sigma, overlap, singular_notes = singular(matrix, k)
    notes |= singular_notes
    frobenius = float(np.linalg.norm(M))
    energy = sigma**2 / np.sum(sigma**2)
    antisymmetric = (shape.antisymmetric / frobenius) ** 2

    complex_fraction = rotation_index = None
    if modulus[0] > 0:
        complex_fraction = float(np.mean(np.abs(eigenvalues.imag) > tol * modulus[0]))
        rotation_index = float(np.abs(eigenvalues.imag).sum() / modulus.sum())
    else:
        notes["complex_fraction"] = notes["rotation_index"] = "all eigenvalues are zero"

    condition = None
    if sigma[-1] <= d * np.finfo(np.float64).eps * sigma[0]:
        notes["condition_number"] = "singular to working precision"
    else:
        condition = float(sigma[0] / sigma[-1])
        if condition * matrix.eps > 1:
            notes["condition_number"] = (
                "beyond what the precision of the entries resolves: read it as 'at least 1/eps'"
            )
    if shape.eigenvector_condition is None:
        notes.setdefault("eigenvector_condition", "defective to working precision")
    return Spectrum(
        eigenvalues=torch.from_numpy(eigenvalues),
        singular_values=torch.from_numpy(sigma),
        complex_fraction=complex_fraction,
        rotation_index=rotation_index,
        antisymmetric_energy=antisymmetric,
        symmetry_score=1 - 2 * antisymmetric,
        henrici=shape.departure / frobenius,
        self_alignment=overlap,
        spectral_radius=float(modulus[0]),
        spectral_norm=float(sigma[0]),
        numerical_abscissa=shape.abscissa + mean,
        expanding_fraction=float(np.mean(modulus > 1)),
        effective_rank=math.exp(float(np.sum(entr(energy)))),
        participation_ratio=float(1 / np.sum(energy**2)),
        stable_rank=(frobenius / float(sigma[0])) ** 2,
        condition_number=condition,
        eigenvector_condition=shape.eigenvector_condition,
        norm_ratio=None,
        frobenius=frobenius,
        trace=mean * d,
        tol=tol,
        k=k,
        units=matrix.units,
        n_dropped=matrix.n_dropped,
        baseline=ginibre_reference(d, frobenius, k),
        skip_baseline=None,
        notes=notes,
        provenance=_provenance(matrix.provenance, tol, k, matrix.units),
    )


def _provenance(source: Provenance, tol: float, k: int, units: str) -> Provenance:
    return replace(source, options={**source.options, "tol": tol, "k": k, "units": units})
