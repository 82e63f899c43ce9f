"""Null models of operators.

A draw takes and gives one matrix, or a sequence of them (a chain, each factor with its own random
numbers): tensors, :class:`BlockJacobian` or ``FactoredMatrix`` in, float64 tensors out.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from jaxtyping import Float

from tl_spectral.baselines import ginibre_reference, skip_reference
from tl_spectral.controls.base import Null
from tl_spectral.decompose import to_matrix
from tl_spectral.errors import InputError
from tl_spectral.spectrum import spectrum
from tl_spectral.surgery import RANDOM, Surgery, haar, operate
from tl_spectral.threads import one_blas_thread

_SURGERIES = {
    "normal": ("eigenvalues", "the non-normal part, and with it part of the norm"),
    "matched": ("eigenvalues up to one factor, and the norm", "the non-normal part"),
    "shuffled": ("eigenvalues, norm and non-normality", "the structure of the non-normal part"),
    "rotated": ("eigenvalues", "the non-normal part, and the basis"),
    "symmetric": ("skip and symmetric part of the update", "its antisymmetric part: rotation"),
    "antisymmetric": ("skip and antisymmetric part of the update", "its symmetric part"),
}
_OF_SINGULAR_VALUES = (
    "spectral_norm",
    "effective_rank",
    "participation_ratio",
    "stable_rank",
    "condition_number",
    "frobenius",
)


@dataclass(frozen=True)
class MatrixNull(Null):
    """A null model of one operator, or factor by factor of a chain."""

    acts_on: ClassVar[str] = "matrix"

    def draw(self, x: Any, seed: int) -> Any:
        """One draw; see :class:`Null`."""
        if isinstance(x, (list, tuple)):
            return [self._one(M, np.random.default_rng([seed, i])) for i, M in enumerate(x)]
        return self._one(x, np.random.default_rng(seed))

    def _one(self, x: Any, rng: np.random.Generator) -> Float[torch.Tensor, "d d"]:
        values = to_matrix(x).values
        with one_blas_thread(len(values)):
            return torch.from_numpy(self.of(values, rng))

    @abstractmethod
    def of(self, M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """A draw for a checked array."""


@dataclass(frozen=True)
class Gaussian(MatrixNull):
    """Independent Gaussian entries, scaled to the norm: a real Ginibre matrix."""

    name: ClassVar[str] = "gaussian"
    keeps: ClassVar[str] = "size and Frobenius norm"
    breaks: ClassVar[str] = "everything else: singular values, eigenvalues and their bases"

    def of(self, M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """``G · ‖M‖/‖G‖``."""
        return _gaussian(M, rng)

    def expected(self, x: Any, metric: str, k: int) -> float | None:
        """:func:`tl_spectral.baselines.ginibre_reference`: limits of large d."""
        values = to_matrix(x).values
        frobenius = float(np.linalg.norm(values))
        return (
            frobenius
            if metric == "frobenius"
            else _of(ginibre_reference(len(values), frobenius, k), metric)
        )


@dataclass(frozen=True)
class RandomBases(MatrixNull):
    """The same singular values between two independent random bases."""

    name: ClassVar[str] = "random_bases"
    keeps: ClassVar[str] = "singular values, hence every rank and norm"
    breaks: ClassVar[str] = "the relation of what is read to what is written, hence eigenvalues"

    def of(self, M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """``U Σ Vᵀ`` with U, V uniform over the orthogonal group."""
        sigma = np.linalg.svd(M, compute_uv=False)
        return np.asarray((haar(len(M), rng) * sigma) @ haar(len(M), rng).T)

    def expected(self, x: Any, metric: str, k: int) -> float | None:
        """Exact at every d, from invariance: ``E tr(M²) = ‖M‖²/d``, ``E ‖U_kᵀV_k‖²/k = k/d``."""
        d = to_matrix(x).size
        if metric in _OF_SINGULAR_VALUES:
            return _of(vars(spectrum(x, k=k)), metric)
        exact = {
            "symmetry_score": 1 / d,
            "antisymmetric_energy": 0.5 - 0.5 / d,
            "self_alignment": min(k, d) / d,
            "trace": 0.0,
        }
        return exact.get(metric)


@dataclass(frozen=True)
class SkipPlusGaussian(MatrixNull):
    """Identity plus independent Gaussian entries of the update's norm."""

    name: ClassVar[str] = "skip"
    keeps: ClassVar[str] = "the skip connection and the norm of the update R = J − I"
    breaks: ClassVar[str] = "everything that the update has learned"

    def of(self, M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """``I + G · ‖M − I‖/‖G‖``."""
        identity = np.eye(len(M))
        return np.asarray(identity + _gaussian(M - identity, rng))

    def expected(self, x: Any, metric: str, k: int) -> float | None:
        """:func:`tl_spectral.baselines.skip_reference`: limits of large d."""
        update = to_matrix(x).shifted(-1.0).values
        frobenius = float(np.linalg.norm(update))
        return _of(skip_reference(len(update), frobenius, k), metric) if frobenius else None


@dataclass(frozen=True)
class Operated(MatrixNull):
    """What :func:`tl_spectral.schur_surgery` leaves; by default the normal part.

    Attributes:
        kind: The kind of surgery.
    """

    kind: Surgery | str = "normal"
    name: ClassVar[str] = "surgery"

    @property
    def keeps(self) -> str:  # type: ignore[override]
        """Depends on the kind."""
        return _SURGERIES[self.kind][0]

    @property
    def breaks(self) -> str:  # type: ignore[override]
        """Depends on the kind."""
        return _SURGERIES[self.kind][1]

    def __post_init__(self) -> None:
        if self.kind not in get_args(Surgery):
            raise InputError(f"kind must be one of {get_args(Surgery)}, got {self.kind!r}.")

    @property
    def random(self) -> bool:  # type: ignore[override]
        """Only two kinds draw random numbers."""
        return self.kind in RANDOM

    def of(self, M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
        """The surgery."""
        return operate(M, self.kind, rng)

    def expected(self, x: Any, metric: str, k: int) -> float | None:
        """Of what no seed changes there is one value, not a mean."""
        return None if self.random else _of(vars(spectrum(self.draw(x, 0), k=k)), metric)


def _gaussian(M: Float[np.ndarray, "d d"], rng: np.random.Generator) -> Float[np.ndarray, "d d"]:
    noise = rng.standard_normal(M.shape)
    return np.asarray(noise * (np.linalg.norm(M) / np.linalg.norm(noise)))


def _of(values: Any, metric: str) -> float | None:
    value = values.get(metric)
    return None if value is None or math.isnan(value) else float(value)
