"""Leading eigen- and singular values of an operator from block Krylov subspaces.

Rayleigh-Ritz on spaces that grow until what was asked for has converged (Musco & Musco 2015 for the
singular values; block Arnoldi without restarts for the eigenvalues). No restarts: at the sizes that
a residual stream has, a basis of a few hundred vectors is small next to one block's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float

from tl_spectral.decompose import checked_scale
from tl_spectral.errors import InputError
from tl_spectral.threads import one_blas_thread

_GROWTH = 1.2  # the basis grows by this factor between two looks at what has converged

Apply = Callable[[np.ndarray], np.ndarray]  # [d, n] → [d, n]


def is_operator(M: Any) -> bool:
    """Whether M is one of this library's operators or a SciPy ``LinearOperator``."""
    return hasattr(M, "to_scipy") or (hasattr(M, "rmatmat") and hasattr(M, "matmat"))


def block_size(k: int, most: int) -> int:
    """Vectors per product for k leading values in a space of at most this dimension.

    Large blocks make better use of memory bandwidth (32 vectors cost a matrix of 4096 rows one and
    a half times what 8 do), small ones reach higher powers with the same number of products.
    """
    return min(max(k, 8), 32, max(1, most // 2))


class Products:
    """Products with an operator in float64 and in the chosen units, checked and counted.

    Args:
        op: The operator.
        scale: Standard deviation of each coordinate, for natural units.

    Attributes:
        size: Number of coordinates that are left.
        n_dropped: Number of coordinates left out because they do not vary.
        count: Vectors multiplied so far.
        eps: Precision of the products.

    Raises:
        InputError: If the operator is not square or fewer than two coordinates are left.
    """

    def __init__(self, op: Any, scale: Any = None) -> None:
        if len(op.shape) != 2 or op.shape[0] != op.shape[1]:
            raise InputError(f"Expected a square operator, got shape {tuple(op.shape)}.")
        d = op.shape[0]
        self._of_torch = hasattr(op, "to_scipy")
        self._op, self._transposed = op, op.T
        self._kept, self._std = np.arange(d), np.ones(d)
        if scale is not None:
            self._kept, self._std = checked_scale(scale, d)
        self.size, self.n_dropped, self.count = len(self._kept), d - len(self._kept), 0
        if self.size < 2:
            raise InputError(f"{self.size} coordinates are left; a spectrum needs two that vary.")
        single = str(op.dtype).removeprefix("torch.") in ("float32", "float16", "bfloat16")
        self.eps = float(np.finfo(np.float32 if single else np.float64).eps)

    def forward(self, X: np.ndarray) -> np.ndarray:
        """``D⁻¹ M D X``."""
        return np.asarray(self._apply(self._op, X * self._std[:, None]) / self._std[:, None])

    def backward(self, X: np.ndarray) -> np.ndarray:
        """``D Mᵀ D⁻¹ X``."""
        product = self._apply(self._transposed, X / self._std[:, None])
        return np.asarray(product * self._std[:, None])

    def _apply(self, op: Any, X: np.ndarray) -> np.ndarray:
        self.count += X.shape[1]
        full = X
        if self.n_dropped:
            full = np.zeros((self.size + self.n_dropped, X.shape[1]))
            full[self._kept] = X
        product: np.ndarray
        if self._of_torch:
            product = (op @ torch.from_numpy(full)).detach().to("cpu", torch.float64).numpy()
        else:
            product = np.asarray(op @ full, dtype=np.float64)
        if not np.isfinite(product).all():
            raise InputError("A product with the operator is not finite; look for NaN upstream.")
        return np.asarray(product[self._kept] if self.n_dropped else product)


class Space:
    """A growing orthonormal basis of a block Krylov space, and its image.

    Args:
        apply: Product with the operator.
        start: The first block; its span is in the space.
        most: Largest dimension; at most d, at least the first block.
        rng: Fills in where the space is exhausted: an invariant subspace does not stop it.
    """

    def __init__(
        self,
        apply: Apply,
        start: Float[np.ndarray, "d block"],
        most: int,
        rng: np.random.Generator,
    ) -> None:
        self._apply, self._rng = apply, rng
        self._block = start.shape[1]
        self._most = min(len(start), max(most, self._block))
        self.basis = np.empty((len(start), 0))
        self.image = np.empty((len(start), 0))
        self._extend(start)

    @property
    def size(self) -> int:
        """Dimension of the space."""
        return self.basis.shape[1]

    @property
    def full(self) -> bool:
        """Whether the space cannot grow."""
        return bool(self.size == self._most)

    def grow(self, factor: float) -> None:
        """Make the space this much larger, if it may, by whole blocks."""
        size = min(factor * self.size, self._most)
        while self.size < size:
            self._extend(self.image[:, -self._block :][:, : self._most - self.size])

    def _extend(self, candidates: np.ndarray) -> None:
        fresh = new_directions(candidates, self.basis, self._rng)
        self.image = np.hstack([self.image, self._apply(fresh)])
        self.basis = np.hstack([self.basis, fresh])


def new_directions(
    candidates: Float[np.ndarray, "d n"],
    basis: Float[np.ndarray, "d m"],
    rng: np.random.Generator,
) -> Float[np.ndarray, "d n"]:
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


@dataclass(frozen=True)
class Eigenvalues:
    """Ritz values of largest modulus; of a complex pair both or none.

    Attributes:
        values: Descending in modulus; k of them, or k + 1 where the last is half of a pair.
        residuals: ``‖Mv − λv‖`` of the unit Ritz vectors.
        conditions: ``‖y‖ ‖v‖/|yᴴv|`` of the Ritz vectors y and v: the error of λ is about its
            residual times this.
        converged: Whether that error is below ``rtol·|λ|``, or the residual is mere rounding.
        basis: Of the space.
        image: ``M @ basis``.
    """

    values: Complex[np.ndarray, " k"]
    residuals: Float[np.ndarray, " k"]
    conditions: Float[np.ndarray, " k"]
    converged: Bool[np.ndarray, " k"]
    basis: Float[np.ndarray, "d m"]
    image: Float[np.ndarray, "d m"]


@dataclass(frozen=True)
class SingularValues:
    """Ritz singular values, and the quadrature that the space gives for ``tr f(MᵀM)``.

    Attributes:
        left: Unit left vectors of the k largest.
        values: The k largest, descending; never above the true ones.
        right: Their right vectors.
        residuals: ``‖Mᵀu − σv‖``: a true singular value lies that close.
        converged: Whether the residual is below ``rtol·σ``, or mere rounding.
        nodes: Quadrature of the space without its last block, and of all of it.
        basis: Of the space.
        image: ``M @ basis``.
    """

    left: Float[np.ndarray, "d k"]
    values: Float[np.ndarray, " k"]
    right: Float[np.ndarray, "d k"]
    residuals: Float[np.ndarray, " k"]
    converged: Bool[np.ndarray, " k"]
    nodes: tuple[Nodes, Nodes]
    basis: Float[np.ndarray, "d m"]
    image: Float[np.ndarray, "d m"]


@dataclass(frozen=True)
class Nodes:
    """``sᵀ f(MᵀM) s`` for every starting vector s: ``Σ f(squares) · weights``.

    Attributes:
        squares: Squares of all Ritz singular values of a space.
        isolated: Which belong to one true singular vector. Of a cluster, the space holds what the
            starting vectors have of it, so its members say nothing of how many there are.
        weights: Squared overlaps of the Ritz vectors with the starting vectors.
    """

    squares: Float[np.ndarray, " m"]
    isolated: Bool[np.ndarray, " m"]
    weights: Float[np.ndarray, "m start"]


def leading_eigenvalues(
    M: Products,
    k: int,
    start: Float[np.ndarray, "d block"],
    rng: np.random.Generator,
    *,
    rtol: float,
    most: int,
) -> Eigenvalues:
    """The k eigenvalues of largest modulus, by block Arnoldi.

    Args:
        M: The operator.
        k: How many.
        start: Random vectors.
        rng: See :class:`Space`.
        rtol: Relative error at which a value counts as converged.
        most: Largest dimension of the space.
    """
    space = Space(M.forward, start, most, rng)
    space.grow(4 * k / space.size)
    while True:
        found = _ritz(space, k, rtol, M.eps)
        if found.converged.all() or space.full:
            return found
        space.grow(_GROWTH)


def _ritz(space: Space, k: int, rtol: float, eps: float) -> Eigenvalues:
    H = space.basis.T @ space.image
    with one_blas_thread(len(H)):
        theta, Z = np.linalg.eig(H)
    order = np.argsort(-np.abs(theta), kind="stable")
    count = min(k, len(theta))
    last = theta[order[count - 1]]
    if last.imag and np.sum(theta[order[:count]] == last.conj()) < np.sum(
        theta[order[:count]] == last
    ):
        count += 1
    try:
        conditions = np.linalg.norm(np.linalg.inv(Z), axis=1)[order[:count]]
    except np.linalg.LinAlgError:  # defective to the last bit
        conditions = np.full(count, np.inf)
    values, Z = theta[order[:count]].astype(np.complex128), Z[:, order[:count]]
    residuals = np.linalg.norm(space.image @ Z - (space.basis @ Z) * values, axis=0)
    rounding = 8 * eps * np.linalg.norm(space.image, axis=0).max(initial=0)
    converged = (residuals <= rtol * np.abs(values) / conditions) | (residuals <= rounding)
    return Eigenvalues(values, residuals, conditions, converged, space.basis, space.image)


def leading_singular_values(
    M: Products,
    k: int,
    start: Float[np.ndarray, "d block"],
    rng: np.random.Generator,
    *,
    rtol: float,
    most: int,
    hints: Float[np.ndarray, "d n"] | None = None,
) -> SingularValues:
    """The k largest singular values, from a block Krylov space of ``MᵀM``.

    Args:
        M: The operator.
        k: How many.
        start: Random signs; the quadrature is that of these vectors.
        rng: See :class:`Space`.
        rtol: Relative residual at which a value counts as converged.
        most: Largest dimension of the space.
        hints: Directions near the right singular vectors, if any are known.

    Raises:
        InputError: If the operator is zero.
    """
    left: list[np.ndarray] = []

    def gram(X: np.ndarray) -> np.ndarray:
        left.append(M.forward(X))
        return M.backward(left[-1])

    first = start if hints is None else np.hstack([start, hints])[:, : M.size]
    space = Space(gram, first, most, rng)
    space.grow(1 + k / space.size)
    while True:
        L = np.hstack(left)
        if not L.any():
            raise InputError("The operator is zero; it has no direction to describe.")
        sigma, Z = _gram_values(L)
        if space.full or _settled(space, Z[:, :k], sigma[:k], rtol, M.eps).all():
            break
        space.grow(1.01)  # by one block: this look is cheap
    last = _nodes(space, L, start, M.eps)
    before = _nodes(space, np.hstack(left[:-1]), start, M.eps) if len(left) > 1 else last
    U, sigma, Zt = np.linalg.svd(L, full_matrices=False)  # small values to their last digits
    U, sigma, V = U[:, :k], sigma[:k], space.basis @ Zt[:k].T
    residuals = np.linalg.norm(M.backward(U) - V * sigma, axis=0)
    floor = max(8 * M.eps, 1e-13) * sigma[0]
    return SingularValues(
        left=U,
        values=sigma,
        right=V,
        residuals=residuals,
        converged=residuals <= np.maximum(rtol * sigma, floor),
        nodes=(before, last),
        basis=space.basis,
        image=L,
    )


def _gram_values(
    L: Float[np.ndarray, "d m"],
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, "m m"]]:
    """Singular values of ``MQ`` and their right vectors, large ones accurately."""
    gram = L.T @ L
    with one_blas_thread(len(gram)):
        squares, Z = np.linalg.eigh(gram)
    return np.sqrt(np.maximum(squares[::-1], 0)), Z[:, ::-1]


def _nodes(
    space: Space, L: Float[np.ndarray, "d m"], start: Float[np.ndarray, "d s"], eps: float
) -> Nodes:
    sigma, Z = _gram_values(L)
    overlaps = Z.T @ (space.basis[:, : len(Z)].T @ start)
    return Nodes(sigma**2, _isolated(_misfit(space, Z, sigma), sigma), overlaps**2)


def _misfit(
    space: Space, Z: Float[np.ndarray, "m n"], sigma: Float[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """``‖MᵀMv − σ²v‖`` of Ritz vectors ``v = QZ``, without a product more."""
    basis, image = space.basis[:, : len(Z)], space.image[:, : len(Z)]
    return np.asarray(np.linalg.norm(image @ Z - basis @ (Z * sigma**2), axis=0))


def _settled(
    space: Space,
    Z: Float[np.ndarray, "m n"],
    sigma: Float[np.ndarray, " n"],
    rtol: float,
    eps: float,
) -> Bool[np.ndarray, " n"]:
    """Whether ``‖Mᵀu − σv‖`` is below ``rtol·σ``, or growing would not show any more."""
    rounding = max(8 * eps, 1e-13) * sigma[0] ** 2
    return np.asarray(_misfit(space, Z, sigma) <= np.maximum(rtol * sigma**2, rounding))


def _isolated(
    misfit: Float[np.ndarray, " n"], sigma: Float[np.ndarray, " n"]
) -> Bool[np.ndarray, " n"]:
    """Which vectors are known to about 3 %: they err by the misfit over the gap to the next."""
    gaps = np.append(np.inf, -np.diff(sigma**2))
    gaps = np.minimum(gaps, np.append(gaps[1:], np.inf))
    return np.asarray(misfit <= 0.03 * gaps)
