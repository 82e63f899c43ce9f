"""Principal and further modes of a layer's OV map ``F = Σ_heads (W_V W_O)ᵀ``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.modes import Mode, dominant_modes, eigensystem, layer_matrix, left_vectors
from tl_spectral.ov.heads import DEGENERATE
from tl_spectral.results import Provenance, Result
from tl_spectral.threads import one_blas_thread

Method = Literal["auto", "dense", "arnoldi"]
LARGE = 2048  # from this width on "auto" means "arnoldi"
_FRAGILE = 1e6  # conditions above this: the eigenvalue has lost half of float32's digits or more


@dataclass(frozen=True, eq=False)
class PrincipalMode(Result):
    """One mode of one layer's OV map, by the rule of the iteration that is run.

    Attributes:
        eigenvalue: λ of F (with ``Im λ ≥ 0`` when complex).
        subspace: Orthonormal columns ``[d_model, 1]`` (real) or ``[d_model, 2]`` spanning
            (Re v, Im v) (complex), more if the eigenvalue is repeated; defined up to a rotation
            within it.
        gap: Ratio of its strength to that of the next mode, ≥ 1; for the first mode its distance
            from 1 sets how fast the iteration aligns. ``None`` if there is no other mode.
        kind: ``"real"`` or ``"complex"``.
        skip: Whether dominance is by ``|1 + λ|`` (skip connection kept) or by ``|λ|``.
        layer: Layer.
        rank: 1 for the principal mode, 2 for the next, …
        strength: ``|1 + λ|`` or ``|λ|``.
        condition: ``‖y‖ ‖x‖ / |yᴴx|`` of the left and right eigenvectors, ≥ 1: a change of F by ε
            moves λ by up to ε times this. 1 for a normal F. ``None`` if it is infinite (defective)
            or no left eigenvector was found; :attr:`note` says which.
        multiplicity: How many eigenvalues it stands for (a simple pair: 2). With
            ``method="arnoldi"`` a lower bound.
        defective: Fewer eigenvectors than eigenvalues (a Jordan block).
        degenerate: The direction cannot be named reliably: repeated, defective, or another mode
            is within 1 % of its strength.
        residual: ``‖F Q − Q Qᵀ F Q‖_F`` of the subspace Q: F plus a change of this norm has exactly
            this mode.
        method: ``"dense"`` or ``"arnoldi"``.
        note: What a careful reader should know of this mode, or empty.
    """

    eigenvalue: complex
    subspace: Float[Tensor, "d_model dim"]
    gap: float | None
    kind: str
    skip: bool
    layer: int
    rank: int
    strength: float
    condition: float | None
    multiplicity: int
    defective: bool
    degenerate: bool
    residual: float
    method: str
    note: str


class DenseLayer:
    """``F`` with one eigendecomposition, shared by both rules of dominance.

    Args:
        W_V: Value weights of the layer.
        W_O: Output weights of the layer.
    """

    def __init__(
        self, W_V: Float[Tensor, "head d_model d_head"], W_O: Float[Tensor, "head d_head d_model"]
    ) -> None:
        self.F = layer_matrix(W_V, W_O)
        self.values, self.vectors = eigensystem(self.F)
        with one_blas_thread(len(self.F)):
            self.left = left_vectors(self.vectors)

    def modes(self, skip: bool, count: int) -> tuple[Mode, ...]:
        """The leading modes, strongest first."""
        system = (self.values, self.vectors)
        return dominant_modes(self.F, skip=skip, count=count, system=system, left=self.left)


def layer_eigenvalues(F: Float[Tensor, "d d"]) -> Complex[Tensor, " d"]:
    """All eigenvalues, without eigenvectors, on one BLAS thread where that is faster."""
    with one_blas_thread(len(F)):
        values: Tensor = torch.linalg.eigvals(F)
    return values


def checked_method(method: Method | str, k: int, d: int) -> str:
    """``"dense"`` or ``"arnoldi"``.

    Raises:
        InputError: If there is no such method, or k is not an integer from 1 to d.
    """
    if method not in ("auto", "dense", "arnoldi"):
        raise InputError(f"method must be 'auto', 'dense' or 'arnoldi', got {method!r}.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= d:
        raise InputError(f"k must be an integer from 1 to {d} (d_model), got {k!r}.")
    if method == "auto":
        return "arnoldi" if d >= LARGE else "dense"
    return method


def as_results(
    modes: tuple[Mode, ...],
    images: Sequence[Float[Tensor, "d_model _"]],
    *,
    skip: bool,
    layer: int,
    method: str,
    provenance: Provenance,
) -> tuple[PrincipalMode, ...]:
    """The first modes as results, each with its gap to the next, its residual and its note.

    Args:
        modes: The leading modes, with one more than asked for if there is one.
        images: ``F Q`` of the subspaces of the modes asked for.
        skip: Rule of dominance.
        layer: Layer.
        method: How the modes were found.
        provenance: Of the circuits.
    """
    strengths = [*(mode.strength for mode in modes), 0.0]
    gaps = [a / b if b > 0 else None for a, b in itertools.pairwise(strengths)]
    results = []
    for i, (mode, image) in enumerate(zip(modes, images, strict=False)):
        gap = gaps[i]
        Q = mode.subspace
        repeated = mode.multiplicity > (2 if mode.rotates else 1)
        close = any(g is not None and g < DEGENERATE for g in gaps[max(0, i - 1) : i + 1])
        results.append(
            PrincipalMode(
                eigenvalue=mode.eigenvalue,
                subspace=Q,
                gap=gap,
                kind="complex" if mode.rotates else "real",
                skip=skip,
                layer=layer,
                rank=i + 1,
                strength=mode.strength,
                condition=mode.condition if math.isfinite(mode.condition) else None,
                multiplicity=mode.multiplicity,
                defective=mode.defective,
                degenerate=repeated or mode.defective or close,
                residual=(image - Q @ (Q.T @ image)).norm().item(),
                method=method,
                note=_note(mode, repeated, close),
                provenance=provenance,
            )
        )
    return tuple(results)


def _note(mode: Mode, repeated: bool, close: bool) -> str:
    remarks = []
    if mode.defective:
        remarks.append("defective: convergence to it is algebraic and its condition infinite")
    elif repeated:
        remarks.append(f"repeated eigenvalue: any direction of {mode.subspace.shape[1]} dimensions")
    if close:
        remarks.append("another mode is within 1 %: which of them leads is an accident")
    if not mode.defective:
        if math.isnan(mode.condition):
            remarks.append("no left eigenvector was found: condition unknown")
        elif mode.condition > _FRAGILE:
            remarks.append("ill-conditioned: rounding of the weights moves this eigenvalue")
    return "; ".join(remarks)
