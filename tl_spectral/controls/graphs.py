"""Null models of the unit graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int

from tl_spectral.controls.base import Null
from tl_spectral.errors import InputError
from tl_spectral.graph import UnitGraph
from tl_spectral.partitions import Edges, rewired


@dataclass(frozen=True)
class Rewired(Null):
    """Edges swapped end by end, weights shuffled over them (Maslov & Sneppen 2002)."""

    name: ClassVar[str] = "rewired"
    acts_on: ClassVar[str] = "graph"
    keeps: ClassVar[str] = "the number of edges of every unit, and the weights as a set"
    breaks: ClassVar[str] = "who is joined to whom, hence communities and bridges"

    def draw(self, x: Any, seed: int) -> UnitGraph:
        """One rewired graph."""
        g = _graph(x)
        edges = Edges(g.n_units, g.row.numpy(), g.col.numpy(), g.weight.numpy())
        null = rewired(edges, np.random.default_rng(seed))
        return _with_edges(g, null.row, null.col, null.weight)


@dataclass(frozen=True)
class ShuffledWeights(Null):
    """The same edges, their weights (signs included) in random order."""

    name: ClassVar[str] = "shuffled_weights"
    acts_on: ClassVar[str] = "graph"
    keeps: ClassVar[str] = "who is joined to whom, and the weights as a set"
    breaks: ClassVar[str] = "which edge is how strong, hence the strength of units"

    def draw(self, x: Any, seed: int) -> UnitGraph:
        """One graph with shuffled weights."""
        g = _graph(x)
        weight = np.random.default_rng(seed).permutation(g.weight.numpy())
        return _with_edges(g, g.row.numpy(), g.col.numpy(), weight)


def _graph(x: Any) -> UnitGraph:
    if not isinstance(x, UnitGraph):
        raise InputError(
            f"This null acts on a UnitGraph (see tls.unit_graph), got {type(x).__name__}."
        )
    if x.n_edges < 2:
        raise InputError(f"The graph has {x.n_edges} edges; there is nothing to shuffle.")
    return x


def _with_edges(
    g: UnitGraph,
    row: Int[np.ndarray, " edge"],
    col: Int[np.ndarray, " edge"],
    weight: Float[np.ndarray, " edge"],
) -> UnitGraph:
    strength = np.bincount(row, np.abs(weight), g.n_units)
    strength += np.bincount(col, np.abs(weight), g.n_units)
    return replace(
        g,
        row=torch.from_numpy(row),
        col=torch.from_numpy(col),
        weight=torch.from_numpy(weight),
        strength=torch.from_numpy(strength),
    )
