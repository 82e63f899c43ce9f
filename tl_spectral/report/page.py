"""What a report is made of: sections, panels with their switches, and tables of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go


@dataclass(frozen=True)
class Switch:
    """A choice the reader makes above a figure.

    Attributes:
        name: What is chosen, such as ``"Units"``.
        options: The choices, as written on the buttons.
        slider: Draw a slider (for layers) in place of buttons.
        start: Index of the option shown first.
    """

    name: str
    options: tuple[str, ...]
    slider: bool = False
    start: int = 0


@dataclass(frozen=True)
class Panel:
    """One figure of the page, in one or several versions that switches choose from.

    Attributes:
        title: Heading.
        caption: What to look for.
        alt: What the figure shows, for those who do not see it.
        figures: Choices (one option of each switch, in order) → figure.
        switches: The switches; none if there is one figure.
    """

    title: str
    caption: str
    alt: str
    figures: Mapping[tuple[str, ...], go.Figure]
    switches: tuple[Switch, ...] = ()

    @property
    def identity(self) -> str:
        """Name of the panel in the page's addresses."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())

    @property
    def sources(self) -> list[tuple[str, str]]:
        """Key and JSON of every version, safe inside a ``<script>`` element."""
        return [("|".join(key), embed(fig)) for key, fig in self.figures.items()]

    @property
    def height(self) -> int:
        """Height in pixels of the tallest version, kept free while the figure loads."""
        return max(int(fig.layout.height or 450) for fig in self.figures.values())


@dataclass(frozen=True)
class Numbers:
    """A table of numbers under a figure, folded away.

    Attributes:
        title: What it holds.
        head: Column names.
        rows: Cells, already formatted.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A chapter of the page.

    Attributes:
        identity: Its anchor.
        title: Heading.
        lead: One or two sentences on what it is about.
        panels: Its figures.
        numbers: Its tables.
        notes: Sentences on what this run lacks.
    """

    identity: str
    title: str
    lead: str
    panels: tuple[Panel, ...] = ()
    numbers: tuple[Numbers, ...] = ()
    notes: tuple[str, ...] = ()


def embed(fig: go.Figure) -> str:
    """JSON of a figure that cannot end the ``<script>`` element around it."""
    return str(fig.to_json()).replace("<", "\\u003c")


def show(value: Any) -> str:
    """A cell as a reader wants it: four significant digits, and a dash for what is missing."""
    if value is None or value is pd.NA or value == "":
        return "–"
    if isinstance(value, float) and math.isnan(value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    if hasattr(value, "item"):
        return show(value.item())
    if isinstance(value, float):
        return f"{value:.4g}".replace("-", "−")
    return str(value)


def numbers(title: str, table: pd.DataFrame, columns: Mapping[str, str] | None = None) -> Numbers:
    """A table of the run as :class:`Numbers`.

    Args:
        title: What it holds.
        table: The table.
        columns: Column → heading, for those to show; all columns when ``None``. Columns that the
            table lacks are left out.
    """
    names = columns or {str(name): str(name).replace("_", " ") for name in table.columns}
    present = [name for name in names if name in table]
    rows = table[present].astype(object).itertuples(index=False, name=None)
    return Numbers(
        title=title,
        head=tuple(names[name] for name in present),
        rows=tuple(tuple(show(cell) for cell in row) for row in rows),
    )
