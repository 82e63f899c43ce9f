"""Finite-depth growth: what eigenvalues promise, and what singular values of the product show.

Eigenvalues decide growth in the long run of one repeated block. A transformer has some tens of
different ones, so a perturbation can grow although no block has an eigenvalue outside the unit
circle: transient growth, the mark of non-normality (Trefethen & Embree 2005).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.linalg
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.chain import _Product
from tl_spectral.errors import InputError
from tl_spectral.results import Result
from tl_spectral.surgery_chains import Blocks, chains_of, random_update
from tl_spectral.threads import one_blas_thread

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_LOG2 = math.log(2)
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Growth(Result):
    """Growth of perturbations through ``P_l = J_l … J_0``. Logarithms are natural.

    Attributes:
        layers: Layer of each factor.
        log_sigma: ``log σ₁(P_l)``: the largest growth of any perturbation.
        log_sigma_bound: ``Σ log σ₁(J_i)``: what it cannot exceed.
        log_radius_sum: ``Σ log ρ(J_i)``, ρ the spectral radius: the growth if all blocks were
            normal and shared their dominant eigenvector.
        log_radius: ``log ρ(P_l)``; NaN where ρ(P_l) lies below the rounding error of P_l. Of a
            strongly non-normal product read it as an upper bound: rounding errors move the
            eigenvalues of a nearly defective matrix outwards.
        numerical_abscissa: Largest eigenvalue of the symmetric part of ``R_l = J_l − I``: the
            fastest growth at once.
        spectral_abscissa: Largest real part of the eigenvalues of R_l: the growth in the long run.
        baseline_numerical_abscissa: Of a Ginibre matrix of the same norm, ``√2·‖R‖_F/√d``.
        baseline_spectral_abscissa: Likewise, ``‖R‖_F/√d``.
        baseline_log_sigma: ``log σ₁`` of products of identity plus Gaussian noise of the norms of
            the updates, ``[draw, depth]``.
        d_model: Size of the factors.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out for lack of variance.
        note: Why a figure is missing, or empty.
    """

    layers: tuple[int, ...]
    log_sigma: Float[Tensor, " depth"]
    log_sigma_bound: Float[Tensor, " depth"]
    log_radius_sum: Float[Tensor, " depth"]
    log_radius: Float[Tensor, " depth"]
    numerical_abscissa: Float[Tensor, " depth"]
    spectral_abscissa: Float[Tensor, " depth"]
    baseline_numerical_abscissa: Float[Tensor, " depth"]
    baseline_spectral_abscissa: Float[Tensor, " depth"]
    baseline_log_sigma: Float[Tensor, "draw depth"]
    d_model: int
    units: str
    n_dropped: int
    note: str = ""

    @property
    def transient(self) -> Float[Tensor, " depth"]:
        """``log σ₁(P_l) − log ρ(P_l) ≥ 0``: growth that the product's eigenvalues do not show."""
        return self.log_sigma - self.log_radius

    @property
    def reactivity(self) -> Float[Tensor, " depth"]:
        """``numerical_abscissa − spectral_abscissa ≥ 0``; 0 for a normal update."""
        return self.numerical_abscissa - self.spectral_abscissa

    def to_dataframe(self) -> pd.DataFrame:
        """One row per depth."""
        import pandas as pd

        columns: dict[str, Any] = {"layer": self.layers}
        for name in (
            "log_sigma",
            "log_sigma_bound",
            "log_radius_sum",
            "log_radius",
            "transient",
            "numerical_abscissa",
            "baseline_numerical_abscissa",
            "spectral_abscissa",
            "baseline_spectral_abscissa",
            "reactivity",
        ):
            columns[name] = getattr(self, name).numpy()
        draws = self.baseline_log_sigma.numpy()
        if len(draws):
            columns["baseline_log_sigma"] = draws.mean(axis=0)
            columns["baseline_low"], columns["baseline_high"] = draws.min(axis=0), draws.max(axis=0)
        return pd.DataFrame(columns)

    def plot(self, template: Any = None) -> go.Figure:
        """Growth over depth, and the abscissae of every update."""
        from tl_spectral.plots.surgery import growth_figure

        return growth_figure(self.to_dataframe(), template=template)


def growth(
    blocks: Any,
    tokens: Any = None,
    *,
    scale: Float[Tensor, " d"] | None = None,
    draws: int = 5,
    seed: int = 0,
    **options: Any,
) -> Growth:
    """Compare the growth of perturbations over depth with what eigenvalues say about it.

    Args:
        blocks: Block Jacobians in the order of layers (or ``[d, d]`` tensors, taken as J). Or a
            model, with ``tokens``.
        tokens: One prompt, if the first argument is a model.
        scale: Standard deviation of each coordinate: natural units ``D⁻¹ J D``, one D for all
            layers. Spectral radii and spectral abscissae stay, the rest changes.
        draws: Random chains to compare with.
        seed: Their seed.
        **options: Passed to :func:`tl_spectral.block_jacobians` if the first argument is a model.

    Returns:
        The growth at every depth.

    Raises:
        InputError: For several prompts, blocks that are no chain (see :func:`tl_spectral.chain`),
            or a product that is zero.
    """
    if type(draws) is not int or draws < 0:
        raise InputError(f"draws must be an integer of at least 0, got {draws!r}.")
    found = list(chains_of(blocks, tokens, scale, options))
    if len(found) > 1:
        raise InputError(
            "growth(model, tokens) takes one prompt. Call it per prompt, or pass "
            "block_jacobians(model, prompts) for the chain of mean Jacobians."
        )
    source = found[0]
    d = len(source.matrices[0])
    rows = []
    product = _Product(None)
    for J, layer in zip(source.matrices, source.layers, strict=True):
        with one_blas_thread(d):
            product.multiply(J)
            rows.append(_row(J, product, layer))
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    for name in ("log_sigma_bound", "log_radius_sum"):
        columns[name] = np.cumsum(columns[name])
    null = [_random_chain(source.matrices, seed, draw) for draw in range(draws)]
    lost = [layer for layer, r in zip(source.layers, columns["log_radius"], strict=True) if r != r]
    return Growth(
        **{name: torch.from_numpy(values) for name, values in columns.items()},
        layers=source.layers,
        baseline_log_sigma=torch.tensor(null, dtype=torch.float64).reshape(draws, len(rows)),
        d_model=d,
        units="raw" if scale is None else "natural",
        n_dropped=source.n_dropped,
        note=f"ρ(P) lies below rounding error through layers {lost}" if lost else "",
        provenance=replace(source.provenance, seed=seed),
    )


def _row(J: Float[np.ndarray, "d d"], product: _Product, layer: int) -> dict[str, float]:
    d = len(J)
    R = J - np.eye(d)
    values = np.linalg.eigvals(R)
    r = float(np.linalg.norm(R)) / math.sqrt(d)
    P, shift = product.values, product.exponent * _LOG2
    sigma = float(np.linalg.norm(P, 2))
    if sigma == 0:
        raise InputError(f"The product is zero from layer {layer} on: no perturbation passes.")
    radius = float(np.abs(np.linalg.eigvals(P)).max())
    resolved = radius > d * _EPS * sigma
    own = float(np.abs(1 + values).max())
    top = [d - 1, d - 1]
    return {
        "log_sigma": math.log(sigma) + shift,
        "log_sigma_bound": math.log(float(np.linalg.norm(J, 2))),
        "log_radius_sum": math.log(own) if own > 0 else -math.inf,
        "log_radius": math.log(radius) + shift if resolved else math.nan,
        "numerical_abscissa": float(scipy.linalg.eigvalsh((R + R.T) / 2, subset_by_index=top)[0]),
        "spectral_abscissa": float(values.real.max()),
        "baseline_numerical_abscissa": math.sqrt(2) * r,
        "baseline_spectral_abscissa": r,
    }


def _random_chain(matrices: Blocks, seed: int, draw: int) -> list[float]:
    product, sigmas = _Product(None), []
    for step, J in enumerate(matrices):
        with one_blas_thread(len(J)):
            product.multiply(random_update(J, np.random.default_rng([seed, draw, step])))
            sigma = float(np.linalg.norm(product.values, 2))
        sigmas.append(math.log(sigma) + product.exponent * _LOG2)
    return sigmas
