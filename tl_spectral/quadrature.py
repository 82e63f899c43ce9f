"""Estimates that are partly exact and partly sampled, with standard errors that cover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import stats
from scipy.special import entr

from tl_spectral.krylov import Nodes


def sampled(
    exact: Float[np.ndarray, " m"],
    samples: Float[np.ndarray, "m sample"],
    derive: Callable[[Float[np.ndarray, "m n"]], Float[np.ndarray, "q n"]],
) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, " q"]]:
    """Functions of sums, and their errors.

    Args:
        exact: The part of each sum that is known.
        samples: Independent samples of the rest.
        derive: From columns of sums to the quantities.

    Returns:
        Values, and jackknife standard errors times Student's t at 95 % over 1.96: value ± 1.96
        errors covers, also with few samples.
    """
    n = samples.shape[1]
    mean = samples.mean(axis=1, keepdims=True)
    without_one = (mean * n - samples) / (n - 1)
    value = derive(exact[:, None] + mean)[:, 0]
    spread = derive(exact[:, None] + without_one).var(axis=1)
    return value, np.sqrt((n - 1) * spread) * stats.t.ppf(0.975, n - 1) / 1.96


@dataclass(frozen=True)
class Ranks:
    """Ranks and norm of an operator, or their errors.

    Attributes:
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``.
        participation_ratio: ``(Σσ²)²/Σσ⁴``.
        log_frobenius: ``½ ln Σσ²``.
    """

    effective_rank: float
    participation_ratio: float
    log_frobenius: float


def ranks(before: Nodes, last: Nodes) -> tuple[Ranks, Ranks]:
    """Ranks by stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017), and their errors.

    Isolated singular values count as they are, the rest is the mean over the starting vectors.

    Args:
        before: Quadrature of the space without its last block; the change is taken for the error of
            the quadrature, beside that of the sampling.
        last: Quadrature of the last space.
    """
    value, error = sampled(*_sums(last), _derived)
    change = value - sampled(*_sums(before), _derived)[0]
    return Ranks(*value.tolist()), Ranks(*np.hypot(error, change).tolist())


def _sums(nodes: Nodes) -> tuple[Float[np.ndarray, " 3"], Float[np.ndarray, "3 start"]]:
    """Σσ², Σσ⁴ and Σσ²lnσ²."""
    f = np.stack([nodes.squares, nodes.squares**2, -entr(nodes.squares)])
    rest = ~nodes.isolated
    return f[:, nodes.isolated].sum(axis=1), f[:, rest] @ nodes.weights[rest]


def _derived(sums: Float[np.ndarray, "3 n"]) -> Float[np.ndarray, "3 n"]:
    square, fourth, entropy = sums
    log = np.log(square)
    return np.stack([np.exp(log - entropy / square), square**2 / fourth, log / 2])
