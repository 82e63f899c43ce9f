"""Null models by name."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tl_spectral.controls.activations import PhaseRandomised, SampleShuffled
from tl_spectral.controls.base import Null
from tl_spectral.controls.graphs import Rewired, ShuffledWeights
from tl_spectral.controls.matrices import Gaussian, Operated, RandomBases, SkipPlusGaussian
from tl_spectral.controls.models import Reinitialised, WeightShuffled
from tl_spectral.controls.order import CircularShift, LabelPermutation
from tl_spectral.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

NULLS: dict[str, type[Null]] = {
    null.name: null
    for null in (
        Gaussian,
        RandomBases,
        SkipPlusGaussian,
        Operated,
        Reinitialised,
        WeightShuffled,
        Rewired,
        ShuffledWeights,
        LabelPermutation,
        CircularShift,
        SampleShuffled,
        PhaseRandomised,
    )
}
"""All null models by name."""


def null_of(name: str, **options: Any) -> Null:
    """A null model by its name; :func:`null_table` lists them.

    Args:
        name: Such as ``"gaussian"``, ``"reinitialised"`` or ``"rewired"``.
        **options: Its options: ``kind`` of ``"surgery"``; ``embeddings`` and ``norms`` of
            ``"weight_shuffled"``.

    Raises:
        InputError: If there is no such null, or it has no such option.
    """
    if name not in NULLS:
        raise InputError(f"There is no null model {name!r}. There are {', '.join(NULLS)}.")
    known = tuple(field.name for field in fields(NULLS[name]))
    for option in options:
        if option not in known:
            has = f"its options are {', '.join(known)}" if known else "it has no options"
            raise InputError(f"The null {name!r} has no option {option!r}; {has}.")
    return NULLS[name](**options)


def null_table() -> pd.DataFrame:
    """One row per null model: name, what it acts on, what it keeps and what it breaks."""
    import pandas as pd

    columns = ("name", "acts_on", "keeps", "breaks")
    return pd.DataFrame([{c: getattr(null(), c) for c in columns} for null in NULLS.values()])
