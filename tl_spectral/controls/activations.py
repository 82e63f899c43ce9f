"""Null models of activations: what a correlation graph looks like where there is no structure."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.capture import ResidualStates
from tl_spectral.controls.base import Null
from tl_spectral.errors import InputError


@dataclass(frozen=True)
class ActivationNull(Null):
    """Takes :class:`ResidualStates` (every layer and site by itself), or ``[sample, unit]``."""

    acts_on: ClassVar[str] = "activations"

    def draw(self, x: Any, seed: int) -> Any:
        """One draw; see :class:`Null`."""
        rng = np.random.default_rng(seed)
        if isinstance(x, ResidualStates):

            def of(stack: Tensor | None) -> Tensor | None:
                return None if stack is None else torch.stack([self._one(s, rng) for s in stack])

            return replace(
                x,
                resid_pre=torch.stack([self._one(s, rng) for s in x.resid_pre]),
                resid_post=torch.stack([self._one(s, rng) for s in x.resid_post]),
                resid_mid=of(x.resid_mid),
            )
        if not isinstance(x, Tensor) or x.ndim != 2:
            raise InputError(
                "This null acts on ResidualStates or a [sample, unit] tensor, got "
                f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}."
            )
        return self._one(x, rng)

    def _one(
        self, x: Float[Tensor, "sample unit"], rng: np.random.Generator
    ) -> Float[Tensor, "sample unit"]:
        if len(x) < 3:
            raise InputError(f"{len(x)} samples have no order to break; capture more texts.")
        drawn = self.of(x.detach().cpu().double().numpy(), rng)
        return torch.from_numpy(drawn).to(x.dtype)

    @abstractmethod
    def of(
        self, x: Float[np.ndarray, "sample unit"], rng: np.random.Generator
    ) -> Float[np.ndarray, "sample unit"]:
        """A draw for an array."""


@dataclass(frozen=True)
class SampleShuffled(ActivationNull):
    """The samples of every unit in an order of its own."""

    name: ClassVar[str] = "sample_shuffled"
    keeps: ClassVar[str] = "the values of every unit as a set"
    breaks: ClassVar[str] = "which values of two units belong to one sample: all correlations"

    def of(
        self, x: Float[np.ndarray, "sample unit"], rng: np.random.Generator
    ) -> Float[np.ndarray, "sample unit"]:
        """Permute each column."""
        return np.asarray(rng.permuted(x, axis=0))


@dataclass(frozen=True)
class PhaseRandomised(ActivationNull):
    """Random phases of the Fourier transform along the samples, unit by unit (Theiler 1992).

    Meant for samples that have an order, such as the positions of one text.
    """

    name: ClassVar[str] = "phase_randomised"
    keeps: ClassVar[str] = "mean, variance and autocorrelation along the samples of every unit"
    breaks: ClassVar[str] = "correlations between units, and the shape of each distribution"

    def of(
        self, x: Float[np.ndarray, "sample unit"], rng: np.random.Generator
    ) -> Float[np.ndarray, "sample unit"]:
        """Rotate each Fourier coefficient but the mean, and of even lengths the last, by itself."""
        n = len(x)
        transformed = np.fft.rfft(x, axis=0)
        free = slice(1, (n + 1) // 2)
        phase = rng.uniform(0, 2 * np.pi, transformed[free].shape)
        transformed[free] *= np.exp(1j * phase)
        return np.asarray(np.fft.irfft(transformed, n, axis=0))
