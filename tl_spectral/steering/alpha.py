"""How strong a rank-1 edit must be for a gap in the spectrum of a layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, cached_property

import torch
from jaxtyping import Complex, Float
from scipy.optimize import brentq
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.threads import one_blas_thread

_NUDGE = 1e-6  # the root itself may lie a rounding below the gap


class GapSolver:
    """α for which ``F + α w rᵀ`` has a real dominant mode with a required gap.

    μ is an eigenvalue of ``F + α w rᵀ`` exactly if ``1 = α rᵀ(μ − F)⁻¹ w``, so α follows from μ in
    closed form, and the gap ``(μ + 1) / |1 + λ2| = gap`` is one equation in μ. λ2 hardly moves
    with it, so a secant takes three or four spectra; a bracket is the fallback.

    Args:
        F: Layer matrix, column convention, float64.
        w: Direction that is written, unit length.
        r: Direction that is read, ``⟨r, w⟩ > 0``.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.
    """

    def __init__(
        self,
        F: Float[Tensor, "d d"],
        w: Float[Tensor, " d"],
        r: Float[Tensor, " d"],
        skip: bool,
    ) -> None:
        self._F, self._w, self._r, self._keep = F, w, r, float(skip)
        self._guess: float | None = None  # λ2 of the last gap: the start for the next

    @cached_property
    def _strength(self) -> float:
        return (_eigenvalues(self._F) + self._keep).abs().max().item()

    def alpha(self, gap: float) -> float:
        """α for a gap above 1.

        Raises:
            InputError: If no finite α reaches it.
        """

        @cache
        def excess(mu: float) -> float:
            second = self._second(mu)
            if second is None:
                return -gap
            return math.inf if second == 0 else (mu + self._keep) / second - gap

        mu = self._secant(gap)
        if mu is None or excess(mu) < 0:
            mu = self._bracketed(gap, excess)
        return self._alpha(mu)

    def _alpha(self, mu: float) -> float:
        """α that puts an eigenvalue at μ; -1 if no positive one does."""
        identity = torch.eye(len(self._F), dtype=self._F.dtype)
        resolvent = (self._r @ torch.linalg.solve(mu * identity - self._F, self._w)).item()
        return 1 / resolvent if resolvent > 0 else -1.0

    def _second(self, mu: float) -> float | None:
        """The next strength once an eigenvalue lies at μ."""
        alpha = self._alpha(mu)
        if alpha < 0:
            return None
        values = _eigenvalues(self._F + alpha * torch.outer(self._w, self._r))
        rest = torch.cat([values[: (i := int((values - mu).abs().argmin()))], values[i + 1 :]])
        return (rest + self._keep).abs().max().item() if len(rest) else 0.0

    def _secant(self, gap: float) -> float | None:
        """Root of ``gap · second(μ) − 1 − μ``, a trifle above; ``None`` if it gets lost."""
        mu = gap * (self._guess or self._strength) - self._keep
        last: tuple[float, float] | None = None
        for _ in range(12):
            second = self._second(mu) if mu + self._keep > 0 else None
            if not second:
                return None
            error = gap * second - self._keep - mu
            if abs(error) <= 0.1 * _NUDGE * (mu + self._keep):
                self._guess = second
                return mu + _NUDGE * (mu + self._keep)
            step = error
            if last is not None and error != last[1]:
                step = error * (mu - last[0]) / (last[1] - error)
            last = (mu, error)
            mu += step
        return None

    def _bracketed(self, gap: float, excess: Callable[[float], float]) -> float:
        high = gap * max(self._strength, 1e-3)
        while excess(high) < 0:
            high *= 2
            if high > 1e12:
                raise InputError(
                    f"No finite edit reaches a gap of {gap}: ask for less, or use method='hook'."
                )
        low = high / 2
        while excess(low) >= 0 and low > 1e-9 * high:
            low /= 2
        if excess(low) >= 0:
            return low
        return float(brentq(excess, low, high, rtol=0.1 * _NUDGE)) * (1 + _NUDGE)


def _eigenvalues(F: Float[Tensor, "d d"]) -> Complex[Tensor, " d"]:
    with one_blas_thread(len(F)):
        values: Tensor = torch.linalg.eigvals(F)
    return values
