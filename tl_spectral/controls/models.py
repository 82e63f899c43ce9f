"""Null models of whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from tl_spectral.controls.base import Null
from tl_spectral.model import reinitialised, weight_shuffled


@dataclass(frozen=True)
class Reinitialised(Null):
    """Fresh weights by the architecture's own scheme: is it learned?"""

    name: ClassVar[str] = "reinitialised"
    acts_on: ClassVar[str] = "model"
    keeps: ClassVar[str] = "architecture and initialisation scheme"
    breaks: ClassVar[str] = "everything that training did, the scale of the weights included"

    def draw(self, x: Any, seed: int) -> Any:
        """:func:`tl_spectral.reinitialised`."""
        return reinitialised(x, seed)


@dataclass(frozen=True)
class WeightShuffled(Null):
    """Trained weights in random places: is it where they are, or only how large?

    Attributes:
        embeddings: Also what lies outside the blocks.
        norms: Also the gains and biases of norms.
    """

    embeddings: bool = False
    norms: bool = False
    name: ClassVar[str] = "weight_shuffled"
    acts_on: ClassVar[str] = "model"
    keeps: ClassVar[str] = "architecture, and the values of every weight tensor as a set"
    breaks: ClassVar[str] = "which entry of a weight tensor sits where"

    def draw(self, x: Any, seed: int) -> Any:
        """:func:`tl_spectral.model.weight_shuffled`."""
        return weight_shuffled(x, seed, embeddings=self.embeddings, norms=self.norms)
