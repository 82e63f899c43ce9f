"""Facts about a model that are found once and kept until a weight is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_FEW = 16
FactT = TypeVar("FactT")
_facts: weakref.WeakKeyDictionary[Any, dict[str, tuple[object, Any]]] = weakref.WeakKeyDictionary()


def remembered(model: Any, what: str, find: Callable[[], FactT]) -> FactT:
    """Return the fact found earlier, or find it; a fact must not refer to the model itself."""
    state = tuple(map(_trace_of_writes, model.parameters()))
    kept = _facts.setdefault(model, {})
    if what not in kept or kept[what][0] != state:
        kept[what] = (state, find())
    fact: FactT = kept[what][1]
    return fact


def _trace_of_writes(parameter: torch.Tensor) -> tuple[object, ...]:
    """What changes when a parameter is replaced or written to.

    A write through ``parameter.data`` leaves the version as it is, so a few values are looked at:
    scaling, re-initialising and low-rank edits show in them, an edit of one entry by that
    route may not.
    """
    few = spread_values(parameter, _FEW).double().cpu()
    return (id(parameter), parameter.data_ptr(), parameter._version, few.numpy().tobytes())


def spread_values(parameter: torch.Tensor, count: int) -> torch.Tensor:
    """About so many values of a tensor, evenly spread; a strided tensor is not copied for them."""
    tensor, step = parameter.detach(), max(1, parameter.numel() // count)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    index = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(index, tensor.shape)]
