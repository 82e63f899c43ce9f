"""Products of block Jacobians that are never formed: leading singular values at every depth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spectral.baselines import product_reference
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian.operator import ChainOperator, JacobianOperator, Operator, chain_operator
from tl_spectral.krylov import Products, block_size, leading_singular_values
from tl_spectral.quadrature import Ranks, ranks
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_LEAST_BLOCK = 16  # the starting vectors are the samples of the ranks, too


@dataclass(frozen=True, eq=False)
class OperatorChain(Result):
    """Spectrum of ``P_l = J_l … J_0`` at every depth, from products alone.

    What a :class:`tl_spectral.ChainResult` holds exactly is here estimated, each figure with its
    error: value ± 1.96 errors covers. Raw units.

    Attributes:
        layers: Layer of each factor (positions in the list where it has none).
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``.
        effective_rank_error: Its standard error.
        participation_ratio: ``(Σσ²)²/Σσ⁴``.
        participation_ratio_error: Its standard error.
        log_singular_values: Natural logarithms of the k largest; NaN for what drowns in the
            rounding of the products (about ``8 eps·σ₁`` of the operators' dtype).
        log_singular_errors: A true log σ lies this close (relative residual of the Ritz value).
        converged: Whether that is below ``rtol``, or the value drowns in rounding.
        log_frobenius: Natural logarithm of ‖P‖_F.
        log_frobenius_error: Its standard error.
        baseline_effective_rank: Of a product of as many independent Ginibre matrices.
        baseline_participation_ratio: Likewise.
        d_model: Size of the factors.
        rtol: See ``converged``.
        n_products: Products with single factors, in vectors (forming all factors takes d each).
    """

    layers: tuple[int, ...]
    effective_rank: Float[Tensor, " depth"]
    effective_rank_error: Float[Tensor, " depth"]
    participation_ratio: Float[Tensor, " depth"]
    participation_ratio_error: Float[Tensor, " depth"]
    log_singular_values: Float[Tensor, "depth k"]
    log_singular_errors: Float[Tensor, "depth k"]
    converged: Bool[Tensor, "depth k"]
    log_frobenius: Float[Tensor, " depth"]
    log_frobenius_error: Float[Tensor, " depth"]
    baseline_effective_rank: Float[Tensor, " depth"]
    baseline_participation_ratio: Float[Tensor, " depth"]
    d_model: int
    rtol: float
    n_products: int

    @property
    def growth_rates(self) -> Float[Tensor, "depth k"]:
        """Log singular values per factor: finite-depth Lyapunov exponents."""
        factors = torch.arange(1, len(self.layers) + 1, dtype=torch.float64)
        return self.log_singular_values / factors[:, None]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per depth."""
        import pandas as pd

        names = (
            "effective_rank", "effective_rank_error", "participation_ratio",
            "participation_ratio_error", "log_frobenius", "log_frobenius_error",
            "baseline_effective_rank", "baseline_participation_ratio",
        )  # fmt: skip
        columns: dict[str, Any] = {"layer": list(self.layers)}
        columns |= {name: getattr(self, name).numpy() for name in names}
        columns["all_converged"] = self.converged.all(dim=1).numpy()
        for i, column in enumerate(self.log_singular_values.T.numpy(), start=1):
            columns[f"log_sigma_{i}"] = column
        return pd.DataFrame(columns)

    def plot(self) -> Figure:
        """Ranks and leading singular values over depth."""
        from tl_spectral.plots import chain_figure

        return chain_figure(self)


def operator_chain(
    operators: Sequence[Operator],
    *,
    k: int = 10,
    rtol: float = 1e-3,
    subspace: int | None = None,
    seed: int = 0,
) -> OperatorChain:
    """Leading singular values of a product of operators, at every depth; :func:`chain` calls this.

    At every depth anew a block Krylov space of ``PᵀP`` from random signs, which also are the
    samples of the ranks. A space of dimension m costs ``2m`` products with each of the factors so
    far, ``m L²`` for L layers: memory is that of the operators and ``4md`` floats.

    Args:
        operators: Of consecutive layers, first layer first.
        k: How many singular values (at most d).
        rtol: Relative residual at which a value counts as converged.
        subspace: Largest dimension of the spaces, by default ``8k + 48``; d is exact.
        seed: Seed of the starting vectors.

    Raises:
        InputError: For an empty chain, operators that do not follow each other, options out of
            range, or a product that is zero.
        ProvenanceError: If the operators come from different models or texts.
    """
    whole = chain_operator(operators)
    d = whole.shape[0]
    subspace = min(d, 8 * k + 48) if subspace is None else subspace
    for name, number, least in (("k", k, 1), ("subspace", subspace, k)):
        if type(number) is not int or not least <= number <= d:
            raise InputError(f"{name} must be an integer from {least} to {d}, got {number!r}.")
    if not 0 < rtol < 1:
        raise InputError(f"rtol must lie between 0 and 1, got {rtol!r}.")
    block = block_size(max(k, _LEAST_BLOCK), subspace)
    rng = np.random.default_rng(seed)
    values, errors, settled = [], [], []
    found: list[Ranks] = []
    spread: list[Ranks] = []
    spent = 0
    for depth in range(1, len(whole.factors) + 1):
        M = Products(ChainOperator(whole.factors[:depth]))
        start = rng.integers(0, 2, (d, block)) * 2.0 - 1
        top = leading_singular_values(M, k, start, rng, rtol=rtol, most=subspace)
        spent += depth * M.count
        known = top.values > 8 * M.eps * top.values[0]
        values.append(np.log(np.where(known, top.values, math.nan)))
        errors.append(np.where(known, top.residuals / np.where(known, top.values, 1), math.nan))
        settled.append(top.converged)
        rank, rank_error = ranks(*top.nodes)
        found.append(rank)
        spread.append(rank_error)
    converged = np.stack(settled)
    if not converged.all():
        depths = np.flatnonzero(~converged.all(axis=1)) + 1
        warnings.warn(
            f"Not all {k} singular values have converged to a relative {rtol:g} at {len(depths)} "
            f"of {len(converged)} depths (the first: {depths[0]} factors). See converged; raise "
            f"subspace (now {subspace} of {d}) or ask for fewer.",
            TLSpectralWarning,
            stacklevel=3,
        )
    layers = tuple(
        factor.start if isinstance(factor, JacobianOperator) else step
        for step, factor in enumerate(whole.factors)
    )
    reference = product_reference(d, range(1, len(layers) + 1))
    return OperatorChain(
        layers=layers,
        **_columns(found, ""),
        **_columns(spread, "_error"),
        log_singular_values=torch.from_numpy(np.stack(values)),
        log_singular_errors=torch.from_numpy(np.stack(errors)),
        converged=torch.from_numpy(converged),
        baseline_effective_rank=reference[0],
        baseline_participation_ratio=reference[1],
        d_model=d,
        rtol=rtol,
        n_products=spent,
        provenance=replace(
            whole.provenance,
            seed=seed,
            options={**whole.provenance.options, "k": k, "rtol": rtol, "subspace": subspace},
        ),
    )


def _columns(rows: list[Ranks], suffix: str) -> dict[str, Any]:
    return {
        name + suffix: torch.tensor([getattr(row, name) for row in rows], dtype=torch.float64)
        for name in ("effective_rank", "participation_ratio", "log_frobenius")
    }
