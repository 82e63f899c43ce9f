"""Facts about a model that are found once and kept until a weight is written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

FactT = TypeVar("FactT")
_facts: weakref.WeakKeyDictionary[Any, dict[str, tuple[object, Any]]] = weakref.WeakKeyDictionary()


def remembered(model: Any, what: str, find: Callable[[], FactT]) -> FactT:
    """Return the fact found earlier, or find it; a fact must not refer to the model itself."""
    state = tuple((id(p), p.data_ptr(), p._version) for p in model.parameters())
    kept = _facts.setdefault(model, {})
    if what not in kept or kept[what][0] != state:
        kept[what] = (state, find())
    fact: FactT = kept[what][1]
    return fact
