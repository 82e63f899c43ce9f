"""Products of block Jacobians: how many directions of a perturbation survive the depth.

The product is formed in float64, rescaled by a power of two after every factor (exactly, the
exponent is carried), and its singular values are taken directly: they are right down to 1e-15 of
the largest, hence so is every rank. The logarithms of the R factors of a QR recursion ("Lyapunov
spectrum") are *not* singular values at the depth of a transformer and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.special import entr
from torch import Tensor

from tl_spectral.baselines import product_reference
from tl_spectral.decompose import checked_scale, to_float64
from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.jacobian.operator import Operator
from tl_spectral.operator_chain import OperatorChain, operator_chain
from tl_spectral.results import Provenance, Result
from tl_spectral.surgery import Surgery, operate, schur_surgery
from tl_spectral.threads import one_blas_thread

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

__all__ = ["ChainResult", "OperatorChain", "chain", "schur_surgery"]

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class ChainResult(Result):
    """Spectrum of ``P_l = J_l … J_0`` at every depth. Row i is the product up to ``layers[i]``.

    Attributes:
        layers: Layer of each factor (positions in the list for plain matrices).
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``.
        participation_ratio: ``(Σσ²)²/Σσ⁴``.
        log_singular_values: Natural logarithms of the k largest. NaN beyond the resolved rank
            unless refined: below ``d·eps·σ₁`` the product holds rounding error only. Above, the
            error of log σ is about ``d·eps·σ₁/σ``.
        log_frobenius: Natural logarithm of ‖P‖_F.
        resolved_rank: Number of singular values above ``d·eps·σ₁``.
        refinement_error: Largest change of a refined log σ in the last sweep; NaN where nothing
            had to be refined.
        baseline_effective_rank: Of a product of as many independent Ginibre matrices.
        baseline_participation_ratio: Likewise.
        d_model: Size of the factors.
        units: ``"raw"``, or ``"natural"`` if scales were given.
        n_dropped_input: Coordinates of the input left out for lack of variance.
        n_dropped_output: The same for each output.
        surgery: What was done to the factors, if anything.
        truncate: Rank kept after every step, if the product was truncated.
    """

    layers: tuple[int, ...]
    effective_rank: Float[Tensor, " depth"]
    participation_ratio: Float[Tensor, " depth"]
    log_singular_values: Float[Tensor, "depth k"]
    log_frobenius: Float[Tensor, " depth"]
    resolved_rank: Int[Tensor, " depth"]
    refinement_error: Float[Tensor, " depth"]
    baseline_effective_rank: Float[Tensor, " depth"]
    baseline_participation_ratio: Float[Tensor, " depth"]
    d_model: int
    units: str
    n_dropped_input: int
    n_dropped_output: tuple[int, ...]
    surgery: str | None
    truncate: int | None

    @property
    def growth_rates(self) -> Float[Tensor, "depth k"]:
        """Log singular values per factor: finite-depth Lyapunov exponents."""
        factors = torch.arange(1, len(self.layers) + 1, dtype=torch.float64)
        return self.log_singular_values / factors[:, None]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per depth."""
        import pandas as pd

        columns = {
            "layer": list(self.layers),
            "effective_rank": self.effective_rank.numpy(),
            "participation_ratio": self.participation_ratio.numpy(),
            "log_frobenius": self.log_frobenius.numpy(),
            "resolved_rank": self.resolved_rank.numpy(),
            "refinement_error": self.refinement_error.numpy(),
            "baseline_effective_rank": self.baseline_effective_rank.numpy(),
            "baseline_participation_ratio": self.baseline_participation_ratio.numpy(),
        }
        for i, column in enumerate(self.log_singular_values.T.numpy(), start=1):
            columns[f"log_sigma_{i}"] = column
        return pd.DataFrame(columns)

    def plot(self) -> Figure:
        """Ranks and leading singular values over depth."""
        from tl_spectral.plots import chain_figure

        return chain_figure(self)


@overload
def chain(matrices: Sequence[Operator], *, k: int = 10, **options: Any) -> OperatorChain: ...


@overload
def chain(
    matrices: Any,
    tokens: Any = None,
    *,
    k: int = 10,
    surgery: Surgery | str | None = None,
    seed: int = 0,
    truncate: int | None = None,
    refine: int = 0,
    scales: Sequence[Float[Tensor, " d"]] | None = None,
    **options: Any,
) -> ChainResult: ...


def chain(
    matrices: Any,
    tokens: Any = None,
    *,
    k: int = 10,
    surgery: Surgery | str | None = None,
    seed: int = 0,
    truncate: int | None = None,
    refine: int = 0,
    scales: Sequence[Float[Tensor, " d"]] | None = None,
    **options: Any,
) -> ChainResult | OperatorChain:
    """Singular values of the product of block Jacobians, at every depth.

    A chain drops the paths through other positions; :func:`tl_spectral.span_jacobian` keeps them.

    Args:
        matrices: Factors in the order of application (layer 0 first): tensors, ``BlockJacobian``s,
            or any iterable of them (one is in memory at a time). Or a model, with ``tokens``. Or a
            list of operators, which are never formed: see
            :func:`tl_spectral.operator_chain.operator_chain` for what can be told then.
        tokens: One prompt, if the first argument is a model. For the chain of mean Jacobians
            pass ``block_jacobians(model, prompts)``: averaging can raise the rank several-fold.
        k: How many singular values to report (at most d).
        surgery: Applied to every factor first, see :func:`schur_surgery`.
        seed: Seed of the random surgeries; each factor draws its own numbers.
        truncate: Keep only this rank after every step ([A] arXiv 2605.14258 uses 512).
        refine: Sweeps of QR iteration over the factors (Stewart 1997) for singular values among
            the k that float64 products cannot resolve; 0 is off, 6 is usually enough. Keeps all
            factors in memory and costs a QR per factor, sweep and depth where needed.
        scales: ``depth + 1`` vectors of standard deviations, of the first input and of every
            output: natural units, ``D_out⁻¹ P D_in``. The surgery acts in raw units.
        **options: Passed to :func:`tl_spectral.block_jacobians` if the first argument is a model;
            ``rtol`` and ``subspace`` for operators.

    Returns:
        The chain.

    Raises:
        InputError: For an empty chain, sizes that differ, layers that do not follow each other,
            factors that are no block Jacobians, several prompts, or a product that is zero.
        ProvenanceError: If the factors come from different models, texts or options.
    """
    if isinstance(matrices, (list, tuple)) and any(isinstance(op, Operator) for op in matrices):
        unused = {"surgery": surgery, "truncate": truncate, "refine": refine, "scales": scales}
        return _of_operators(matrices, unused, k=k, seed=seed, **options)
    links = _links(matrices, tokens, options)
    if surgery is not None and surgery not in get_args(Surgery):
        raise InputError(f"surgery must be one of {get_args(Surgery)}, got {surgery!r}.")
    for name, value, least in (("k", k, 1), ("truncate", truncate, 1), ("refine", refine, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise InputError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if refine == 1 or (refine and truncate is not None):
        raise InputError(
            "refine needs two sweeps at least (the change in the last one is the error), and a "
            "product that is not truncated."
        )
    product = _Product(truncate)
    factors: list[np.ndarray] = []
    layers, rows, dropped = [], [], []
    provenance = Provenance()
    for step, link in enumerate(links):
        factor = link.matrix
        if step == 0:
            provenance = link.provenance
            entry = _Frame.at(scales, 0, len(factor))
        exit_ = _Frame.at(scales, step + 1, len(factor))
        with one_blas_thread(len(factor)):
            if surgery is not None:
                factor = operate(factor, surgery, np.random.default_rng([seed, step]))
            product.multiply(factor)
            row = product.measure(entry, exit_, k, link.layer)
            if refine:
                factors.append(factor)
                row = _refined(row, factors, entry, exit_, refine)
        rows.append(row)
        layers.append(link.layer)
        dropped.append(exit_.n_dropped)
    if not rows:
        raise InputError("The chain has no factors.")
    if scales is not None and len(scales) != len(rows) + 1:
        raise InputError(
            f"{len(rows)} factors need {len(rows) + 1} scales (the first input and every output), "
            f"got {len(scales)}."
        )
    d = len(factor)
    reference = product_reference(d, range(1, len(rows) + 1))
    chosen = {"k": k, "surgery": surgery, "truncate": truncate, "refine": refine}
    return ChainResult(
        layers=tuple(layers),
        effective_rank=_column([row.effective_rank for row in rows]),
        participation_ratio=_column([row.participation_ratio for row in rows]),
        log_singular_values=torch.from_numpy(np.stack([row.log_sigma for row in rows])),
        log_frobenius=_column([row.log_frobenius for row in rows]),
        resolved_rank=torch.tensor([row.resolved for row in rows]),
        refinement_error=_column([row.error for row in rows]),
        baseline_effective_rank=reference[0],
        baseline_participation_ratio=reference[1],
        d_model=d,
        units="raw" if scales is None else "natural",
        n_dropped_input=entry.n_dropped,
        n_dropped_output=tuple(dropped),
        surgery=surgery,
        truncate=truncate,
        provenance=replace(
            provenance,
            seed=seed if surgery in ("shuffled", "rotated") else provenance.seed,
            options={**provenance.options, **chosen},
        ),
    )


def _of_operators(
    operators: Sequence[Any], unused: dict[str, Any], **options: Any
) -> OperatorChain:
    asked = sorted(name for name, value in unused.items() if value)
    strange = sorted(options.keys() - {"k", "seed", "rtol", "subspace"})
    if asked or strange:
        raise InputError(
            f"{asked + strange} cannot be had of operators that are never formed; pass the "
            "matrices (op.to_dense(), or block_jacobians)."
        )
    for step, op in enumerate(operators):
        if not isinstance(op, Operator):
            raise InputError(f"Factor {step}: operators and matrices cannot be mixed.")
    return operator_chain(operators, **options)


def _column(values: list[float]) -> Float[Tensor, " depth"]:
    return torch.tensor(values, dtype=torch.float64)


@dataclass(frozen=True)
class _Row:
    """What is reported of the product at one depth."""

    effective_rank: float
    participation_ratio: float
    log_sigma: Float[np.ndarray, " k"]
    log_frobenius: float
    resolved: int
    error: float = math.nan


@dataclass(frozen=True)
class _Frame:
    """Coordinates that vary at one depth, and their standard deviations."""

    kept: Int[np.ndarray, " kept"]
    std: Float[np.ndarray, " kept"]
    d: int

    @property
    def n_dropped(self) -> int:
        return self.d - len(self.kept)

    @classmethod
    def at(cls, scales: Sequence[Any] | None, depth: int, d: int) -> _Frame:
        if scales is None:
            return cls(np.arange(d), np.ones(d), d)
        if depth >= len(scales):
            raise InputError(
                f"scales holds {len(scales)} vectors, but the chain is longer: one of the first "
                "input and one of every output are needed."
            )
        kept, std = checked_scale(scales[depth], d)
        if len(kept) == 0:
            raise InputError(f"No coordinate varies in scales[{depth}]; pass more samples.")
        return cls(kept, std, d)


class _Product:
    """The running product, ``values · 2^exponent``."""

    def __init__(self, truncate: int | None) -> None:
        self.truncate = truncate
        self.exponent = 0
        self.values: np.ndarray = np.ones((1, 1))  # the empty product; the first factor replaces it

    def multiply(self, factor: Float[np.ndarray, "d d"]) -> None:
        """Put a factor on the left."""
        values = factor @ self.values if len(self.values) == len(factor) else factor
        exponent = int(np.frexp(np.abs(values).max())[1])
        values = np.ldexp(values, -exponent)
        if self.truncate is not None and self.truncate < len(values):
            U, sigma, Vt = np.linalg.svd(values)
            values = (U[:, : self.truncate] * sigma[: self.truncate]) @ Vt[: self.truncate]
        self.exponent += exponent
        self.values = values

    def measure(self, entry: _Frame, exit_: _Frame, k: int, layer: int) -> _Row:
        """Ranks and singular values in the units of the two frames."""
        P = self.values[np.ix_(exit_.kept, entry.kept)] / exit_.std[:, None] * entry.std
        sigma = np.linalg.svd(P, compute_uv=False)
        if sigma[0] == 0:
            raise InputError(
                f"The product is zero from layer {layer} on: no perturbation passes. Check that "
                "block (for instance for weights that are zero)."
            )
        resolved = int(np.sum(sigma > max(P.shape) * _EPS * sigma[0]))
        if self.truncate is not None:
            resolved = min(resolved, self.truncate)
        energy = sigma**2 / np.sum(sigma**2)
        log_sigma = np.full(min(k, len(self.values)), math.nan)
        known = min(len(log_sigma), resolved)
        log_sigma[:known] = np.log(sigma[:known]) + self.exponent * math.log(2)
        return _Row(
            effective_rank=math.exp(float(np.sum(entr(energy)))),
            participation_ratio=float(1 / np.sum(energy**2)),
            log_sigma=log_sigma,
            log_frobenius=math.log(float(np.linalg.norm(P))) + self.exponent * math.log(2),
            resolved=resolved,
        )


def _refined(
    row: _Row, factors: list[np.ndarray], entry: _Frame, exit_: _Frame, sweeps: int
) -> _Row:
    """Fill in the singular values that the product does not resolve.

    Each sweep is a QR factorisation carried through the factors, followed by a transposition:
    orthogonal iteration on PᵀP and PPᵀ in turn, in which no small number meets a large one.
    """
    rank = min(len(entry.kept), len(exit_.kept))
    k, known = min(len(row.log_sigma), rank), row.resolved
    if known >= k:
        return row
    links = list(factors)
    links[0] = links[0][:, entry.kept] * entry.std
    links[-1] = links[-1][exit_.kept] / exit_.std[:, None]
    estimate = np.full(k, math.nan)
    for _ in range(sweeps):
        Q = np.eye(links[0].shape[1])
        triangles = []
        for link in links:
            Q, R = np.linalg.qr(link @ Q)
            triangles.append(R)
        diagonals = np.abs([np.diagonal(R)[:rank] for R in triangles])
        with np.errstate(divide="ignore"):  # a singular factor: log σ = −∞ is the truth
            total = np.sort(np.log(diagonals).sum(axis=0))[::-1]
        previous, estimate = estimate, total[:k]
        links = [R.T for R in reversed(triangles)]
    direct = np.full(k, math.inf)  # error of the log σ of the product itself
    direct[:known] = max(exit_.d, entry.d) * _EPS * np.exp(row.log_sigma[0] - row.log_sigma[:known])
    change = np.zeros(k)  # −∞ is exact
    both = np.isfinite(previous) & np.isfinite(estimate)
    np.subtract(estimate, previous, out=change, where=both)
    swept = np.abs(change) < direct
    log_sigma = row.log_sigma.copy()
    log_sigma[:k][swept] = estimate[swept]
    return replace(row, log_sigma=log_sigma, error=float(np.abs(change)[swept].max()))


@dataclass(frozen=True)
class _Link:
    """One factor, checked."""

    matrix: Float[np.ndarray, "d d"]
    layer: int
    provenance: Provenance


def _links(matrices: Any, tokens: Any, options: dict[str, Any]) -> Iterator[_Link]:
    if tokens is not None:
        matrices = _of_model(matrices, tokens, options)
    elif options:
        raise InputError(f"{sorted(options)} are options of chain(model, tokens), not of matrices.")
    elif isinstance(matrices, (str, bytes)) or not isinstance(matrices, (Iterable, Tensor)):
        raise InputError(
            f"Expected matrices in the order of layers, or chain(model, tokens); got "
            f"{type(matrices).__name__} alone."
        )
    elif hasattr(matrices, "matrix"):
        raise InputError("A chain needs a sequence of Jacobians; got a single one.")
    return _checked(iter(matrices))


def _of_model(model: Any, tokens: Any, options: dict[str, Any]) -> Iterator[Any]:
    from tl_spectral.jacobian import block_jacobians
    from tl_spectral.model import ModelView

    if len(ModelView(model).tokens(tokens)) != 1:
        raise InputError(
            "chain(model, tokens) takes one prompt. Call it per prompt, or pass "
            "block_jacobians(model, prompts) for the chain of mean Jacobians."
        )
    return block_jacobians(model, tokens, **options)


def _checked(factors: Iterator[Any]) -> Iterator[_Link]:
    first: Any = None
    d: int | None = None
    previous: Any = None
    for step, factor in enumerate(factors):
        first = factor if step == 0 else first
        labelled = hasattr(factor, "matrix")
        if labelled != hasattr(first, "matrix"):
            raise InputError(
                f"Factor {step}: block Jacobians and plain matrices cannot be mixed; pass the "
                ".matrix of each."
            )
        if labelled:
            _require_next(factor, previous, first)
        matrix, _ = to_float64(factor.matrix if labelled else factor)
        d = len(matrix) if d is None else d
        if len(matrix) != d:
            raise InputError(f"Factor {step} is {len(matrix)} wide, the first one {d}.")
        yield _Link(
            matrix,
            factor.layer if labelled else step,
            factor.provenance if labelled else Provenance(),
        )
        previous = factor


def _require_next(factor: Any, previous: Any, first: Any) -> None:
    if factor.scope != "block" or factor.pos != factor.source_pos:
        raise InputError(
            f"Layer {factor.layer}: a chain multiplies Jacobians of whole blocks at one position; "
            f"this one has scope {factor.scope!r}, pos {factor.pos}, source_pos "
            f"{factor.source_pos}."
        )
    if previous is None:
        return
    if factor.layer != previous.layer + 1:
        raise InputError(
            f"Layer {factor.layer} follows layer {previous.layer}: the factors of a chain must be "
            "consecutive, first layer first."
        )
    what = f"The Jacobians of layers {first.layer} and {factor.layer}"
    first.provenance.require_same_model(factor.provenance, what)
    if first.provenance.texts != factor.provenance.texts:
        raise ProvenanceError(f"{what} come from different texts.")
    for name in ("pos", "context", "n_samples"):
        mine, theirs = getattr(first, name), getattr(factor, name)
        if mine != theirs:
            raise ProvenanceError(f"{what} differ in {name}: {mine!r} and {theirs!r}.")
