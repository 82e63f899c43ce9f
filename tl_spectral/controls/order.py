"""Null models of an order: which unit has which label, which layer has which value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tl_spectral.communities import Communities
from tl_spectral.controls.base import Null
from tl_spectral.errors import InputError


@dataclass(frozen=True)
class LabelPermutation(Null):
    """Labels or values handed out to the units anew.

    Takes :class:`Communities` (all runs are permuted alike, units without edges stay out), or a
    tensor or array whose first dimension is the units.
    """

    name: ClassVar[str] = "label_permutation"
    acts_on: ClassVar[str] = "units"
    keeps: ClassVar[str] = "the labels (or values) as a set, hence the sizes of communities"
    breaks: ClassVar[str] = "which unit has which"

    def draw(self, x: Any, seed: int) -> Any:
        """One permutation."""
        rng = np.random.default_rng(seed)
        if not isinstance(x, Communities):
            values = _at_least_two(x)
            return values[rng.permutation(len(values))]
        order = np.arange(x.n_units)
        linked = np.flatnonzero(x.labels.numpy() >= 0)
        order[linked] = rng.permutation(linked)
        return replace(x, labels=x.labels[order], run_labels=x.run_labels[:, order])


@dataclass(frozen=True)
class CircularShift(Null):
    """A profile over layers, moved round by some layers.

    Takes a tensor, an array or a list whose first dimension is the layers. There are only
    ``layers − 1`` draws: seed ``s`` shifts by ``1 + s mod (layers − 1)``.
    """

    name: ClassVar[str] = "circular_shift"
    acts_on: ClassVar[str] = "layers"
    keeps: ClassVar[str] = "the values, and how alike neighbouring layers are (but for one seam)"
    breaks: ClassVar[str] = "which layer has which value"

    def draw(self, x: Any, seed: int) -> Any:
        """One shift."""
        values = _at_least_two(x)
        step = 1 + seed % (len(values) - 1)
        if isinstance(values, Tensor):
            return torch.roll(values, step, dims=0)
        return np.roll(values, step, axis=0)

    def n_draws(self, x: Any) -> int:
        """All shifts but the one by nothing."""
        return len(_at_least_two(x)) - 1


def _at_least_two(x: Any) -> Any:
    values = x if isinstance(x, (Tensor, np.ndarray)) else np.asarray(x)
    if values.ndim == 0 or len(values) < 2 or values.dtype == object:
        raise InputError(
            f"Expected Communities, or a tensor or array of two values or more, got "
            f"{type(x).__name__}."
        )
    return values
