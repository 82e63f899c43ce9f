"""Spectra and chains from products alone, beside forming the matrix and decomposing it.

Notes give the largest relative error of the leading singular values and eigenvalue moduli against
the dense ones, and how many of each had converged by the method's own account.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg
import torch

from benchmarks.measure import Row, Work, measured
from tl_spectral.jacobian import Operator
from tl_spectral.results import Provenance


class Known(Operator):
    """An operator over a matrix that is there already."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self.shape = (len(matrix), len(matrix))
        self.dtype = matrix.dtype
        self.provenance = Provenance()

    def _push(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._matrix.T

    def _pull(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self._matrix

    def _dense(self) -> torch.Tensor:
        return self._matrix


def rows(*, small: bool) -> list[Row]:
    """The table; ``small`` is of size 96 and a tiny block."""
    d, k, shape = (96, 4, "tiny") if small else (4096, 32, "llama-3-8b")
    table = []
    for case, inputs, forms in (
        (f"like a Jacobian, d = {d}, k = {k}", {"source": "alike", "d": d}, ""),
        (f"{shape} block, random weights, k = {k}", {"source": shape, "d": d}, "form it, "),
    ):
        for method, prepare, mine, bar in (
            ("tl_spectral.spectrum(op, k)", matrix_free, True, "≤ 1/10 of dense, errors ≤ 1e-3"),
            (f"{forms}tl_spectral.spectrum(op over it, k)", formed, True, ""),
            (f"{forms}scipy eigvals and svdvals", dense, False, ""),
            (f"{forms}tl_spectral.spectrum(matrix)", all_of_it, False, ""),
        ):
            if prepare is formed and not forms:
                continue
            table.append(
                measured(
                    prepare, table="operators", case=case, method=method, ours=mine, bar=bar,
                    k=k, **inputs,
                )
            )  # fmt: skip
    d, depth = (48, 3) if small else (2048, 8)
    case = f"chain of {depth} matrices like Jacobians, d = {d}, k = 10"
    for method, prepare, mine in (
        ("tl_spectral.chain(operators)", free_chain, True),
        ("tl_spectral.chain(matrices)", dense_chain, False),
    ):
        table.append(
            measured(
                prepare, table="operators", case=case, method=method, ours=mine, d=d, depth=depth
            )
        )
    return table


def matrix_free(source: str, d: int, k: int) -> Work:
    """The leading values by products; the dense truth is found before the clock starts."""
    make, form = _maker(source, d)
    return _leading(make, form(), k)


def formed(source: str, d: int, k: int) -> Work:
    """The same by products with the matrix, which is formed first."""
    _, form = _maker(source, d)
    return _leading(lambda: Known(form()), form(), k)


def _leading(make: Callable[[], Any], matrix: torch.Tensor, k: int) -> Work:
    import tl_spectral as tls

    sigma = scipy.linalg.svdvals(matrix.double().numpy())[:k]
    moduli = np.sort(np.abs(scipy.linalg.eigvals(matrix.double().numpy())))[::-1][:k]

    def work() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tls.TLSpectralWarning)  # the note says so
            found = tls.spectrum(make(), k=k)
        errors = (
            np.abs(found.singular_values.numpy() / sigma - 1).max(),
            np.abs(found.eigenvalues.abs().numpy()[:k] / moduli - 1).max(),
        )
        converged = (
            int(found.singular_values_converged.sum()),
            int(found.eigenvalues_converged[:k].sum()),
        )
        return (
            f"errors σ {errors[0]:.0e}, λ {errors[1]:.0e}; converged {converged[0]}, "
            f"{converged[1]} of {k}; {found.n_products} products"
        )

    return work


def dense(source: str, d: int, k: int) -> Work:
    """Form the matrix, then LAPACK's eigenvalues and singular values in float64."""
    _, form = _maker(source, d)

    def work() -> None:
        matrix = form().double().numpy()
        scipy.linalg.eigvals(matrix)
        scipy.linalg.svdvals(matrix)

    return work


def all_of_it(source: str, d: int, k: int) -> Work:
    """Form the matrix, then everything that this library says of one."""
    import tl_spectral as tls

    _, form = _maker(source, d)

    def work() -> None:
        tls.spectrum(form(), k=k)

    return work


def free_chain(d: int, depth: int) -> Work:
    """Ten leading singular values at every depth, by products."""
    import tl_spectral as tls

    matrices = [alike(d, seed) for seed in range(depth)]
    exact = tls.chain(matrices, k=10).log_singular_values
    operators = [Known(matrix) for matrix in matrices]

    def work() -> str:
        found = tls.chain(operators, k=10)
        error = (found.log_singular_values - exact).abs().max().item()
        return f"largest error of log σ {error:.0e}; all converged: {bool(found.converged.all())}"

    return work


def dense_chain(d: int, depth: int) -> Work:
    """All singular values at every depth, of the products."""
    import tl_spectral as tls

    matrices = [alike(d, seed) for seed in range(depth)]

    def work() -> None:
        tls.chain(matrices, k=10)

    return work


def alike(d: int, seed: int = 0) -> torch.Tensor:
    """Identity, a decaying low-rank part that reads near where it writes, and noise; float32."""
    rng = np.random.default_rng(seed)
    rank = d // 16
    U, W = np.split(np.linalg.qr(rng.standard_normal((d, 2 * rank)))[0], 2, axis=1)
    spikes = (U * 6 * 0.96 ** np.arange(rank)) @ (0.6 * U + 0.8 * W).T
    noise = 0.5 * rng.standard_normal((d, d)) / d**0.5
    return torch.from_numpy((np.eye(d) + spikes + noise).astype(np.float32))


def _maker(source: str, d: int) -> tuple[Callable[[], Any], Callable[[], torch.Tensor]]:
    """How the work gets its operator, and its matrix: one that is there, or a block's."""
    if source == "alike":
        matrix = alike(d)
        return lambda: Known(matrix), lambda: matrix
    import tl_spectral as tls
    from benchmarks.jacobian import bridged, llama

    hf, tokens = llama(source, 1, 16)
    model = bridged(hf)
    tls.capture(model, tokens)  # the model's facts are found once, at the first call
    return (
        lambda: tls.jacobian_operator(model, tokens, 0),
        lambda: tls.block_jacobian(model, tokens, 0).matrix,
    )
