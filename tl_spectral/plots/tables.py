"""Reading the tidy tables of a run, some columns of which may be missing."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray


def column(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    """A column as float64, NaN where a value is missing or where there is no such column."""
    if name not in table:
        return np.full(len(table), np.nan)
    values = pd.to_numeric(table[name], errors="coerce")
    return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan))


def variants(table: pd.DataFrame) -> list[str]:
    """The variants in a table, the trained model first."""
    if "variant" not in table:
        return ["trained"]
    names = [str(name) for name in table["variant"].unique()]
    return sorted(names, key=lambda name: (name != "trained", name != "control"))


def of_variant(table: pd.DataFrame, variant: str) -> pd.DataFrame:
    """The rows of one variant; all rows where the table does not tell variants apart."""
    return table[table["variant"] == variant] if "variant" in table else table
