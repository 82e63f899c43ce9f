"""Parts of captured states: one layer, some of the texts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.capture import ResidualStates
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.graph import UnitGraph

States: TypeAlias = ResidualStates | Float[Tensor, "_ _"]


def one_layer(states: States, layer: int | None) -> States:
    """The states of one layer; plain tensors are of one layer already.

    Raises:
        InputError: If the layer is not there, or not named where there are several.
    """
    if isinstance(states, Tensor):
        return states
    if layer is None:
        if len(states.layers) != 1:
            raise InputError(f"These states hold layers {states.layers}; say which: layer=…")
        return states
    row = states.index(layer)

    def of(stack: Tensor | None) -> Tensor | None:
        return None if stack is None else stack[row : row + 1]

    return dataclasses.replace(
        states,
        resid_pre=states.resid_pre[row : row + 1],
        resid_post=states.resid_post[row : row + 1],
        resid_mid=of(states.resid_mid),
        norm_gain=of(states.norm_gain),
        layers=(layer,),
    )


def count(states: States) -> int:
    """Number of samples."""
    return len(states) if isinstance(states, Tensor) else states.n_samples


def take(states: States, rows: Int[np.ndarray, " row"]) -> States:
    """The states of some samples, in the order given; a sample may come twice."""
    index = torch.from_numpy(rows)
    if isinstance(states, Tensor):
        return states[index]
    mid = states.resid_mid
    return dataclasses.replace(
        states,
        resid_pre=states.resid_pre[:, index],
        resid_post=states.resid_post[:, index],
        resid_mid=None if mid is None else mid[:, index],
    )


def method_for(g: UnitGraph) -> str:
    """The community detection that has a meaning for a graph: Leiden for signed ones."""
    return "leiden" if g.sign == "signed" else "louvain"


@contextmanager
def told_before() -> Iterator[None]:
    """No warnings of ours: what follows repeats, on fewer samples, what was warned of once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TLSpectralWarning)
        yield
