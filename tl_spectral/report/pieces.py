"""What the sections of the report are put together from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots.tables import variants
from tl_spectral.report.page import Panel, Section, Switch

Figures = dict[tuple[str, ...], go.Figure]

_MAX_POINTS = 60_000  # per slider: beyond this, layers are thinned to keep the page light


def table_of(run: Any, name: str) -> pd.DataFrame:
    """A table of the run; an empty one if the run has none."""
    table = run.tables.get(name)
    return pd.DataFrame() if table is None else table


def make_panel(
    title: str,
    caption: str,
    alt: str,
    figures: Figures,
    names: tuple[str, ...],
    *,
    slider: str = "",
) -> tuple[Panel, ...]:
    """A panel with a switch for each real choice; no panel at all without figures."""
    if not figures:
        return ()
    options = [tuple(dict.fromkeys(key[i] for key in figures)) for i in range(len(names))]
    varying = [i for i, found in enumerate(options) if len(found) > 1]
    switches = tuple(
        Switch(names[i], options[i], slider=names[i] == slider and len(options[i]) > 3)
        for i in varying
    )
    kept = {tuple(key[i] for i in varying): figure for key, figure in figures.items()}
    return (Panel(title, caption, alt, kept, switches),)


def empty_section(identity: str, title: str, lead: str, note: str) -> Section:
    """A section without figures, and the sentence that says why."""
    return Section(identity, title, lead, notes=(note,))


def choices(table: pd.DataFrame, name: str, known: Mapping[str, str]) -> list[str]:
    """Values of a column in the order of ``known``; its first where there is no such column."""
    if name not in table:
        return [next(iter(known))]
    return [value for value in known if (table[name] == value).any()]


def by_layer(arrays: Mapping[str, Any], kind: str) -> dict[int, dict[str, Any]]:
    """``kind/variant/layer`` → layer → variant → array, the trained model first."""
    found: dict[int, dict[str, Any]] = {}
    for key in sorted(arrays, key=lambda name: "/trained/" not in name):
        if key.startswith(f"{kind}/"):
            _, variant, layer = key.split("/")
            found.setdefault(int(layer), {})[variant] = arrays[key]
    return found


def thinned(layers: list[int], points_per_layer: int) -> list[int]:
    """Evenly spread layers, first and last included, within the page's budget of points."""
    most = max(2, _MAX_POINTS // max(1, points_per_layer))
    if len(layers) <= most:
        return layers
    chosen = np.unique(np.linspace(0, len(layers) - 1, most).round().astype(int))
    return [layers[i] for i in chosen]


def thinning_note(layers: list[int], everyone: Any) -> tuple[str, ...]:
    """The sentence that says which share of the layers can be chosen."""
    if len(layers) == len(everyone):
        return ()
    return (
        f"{len(layers)} of {len(everyone)} layers can be chosen here, to keep this page light; "
        "the run directory has all of them.",
    )


def missing_control(table: pd.DataFrame) -> tuple[str, ...]:
    """The sentence a run without control deserves."""
    if table.empty or "control" in variants(table):
        return ()
    return (
        "This run has no control model, so that nothing here can be called learned. Add one with "
        "--control random-init.",
    )


def single_layer(table: pd.DataFrame) -> tuple[str, ...]:
    """The sentence a run of one layer deserves."""
    one = "layer" in table and table["layer"].nunique() == 1
    return ("This run looked at one layer: there is no gradient over depth to see.",) if one else ()


def spoken(table: pd.DataFrame) -> str:
    """The variants in words."""
    return " and ".join(variants(table))


def reasons_of(table: pd.DataFrame) -> list[str]:
    """Why a variant has no rows, where a row says so."""
    return [str(reason) for reason in table["reason"].dropna()] if "reason" in table else []


def answered(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows with a value in the named column."""
    return table[table[name].notna()] if name in table else table.iloc[:0]
