"""The specification curve: every setting's coupling, sorted, above the choices behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_spectral.errors import InputError
from tl_spectral.plots import theme

MOST = 600  # settings drawn; more would be thinner than a pixel
_WORDS = {
    "top_k": "top k",
    "resolution": "γ",
    "sign": "edges",
    "samples": "texts",
    "units": "units",
    "context": "context",
    "estimate": "estimate",
    "operator": "operator",
    "gain": "gain",
    "confounds": "confounds",
}


def multiverse_figure(
    multiverse: Any, layer: int | None = None, *, template: Any = None
) -> go.Figure:
    """Sorted couplings of one layer with 95 % intervals, and a grid of the choices behind each.

    Args:
        multiverse: A :class:`tl_spectral.multiverse.Multiverse`.
        layer: Which layer; the first by default.
        template: A plotly template or its name.

    Returns:
        The figure. Of more than 600 settings an even selection is drawn, which the title says.

    Raises:
        InputError: If the layer is not there or has no coupling.
    """
    layer = multiverse.layers[0] if layer is None else layer
    rows = [r for r in multiverse.rows if r["layer"] == layer and not np.isnan(r["rho"])]
    if not rows:
        raise InputError(f"There is no coupling of layer {layer}; layers: {multiverse.layers}.")
    rows.sort(key=lambda row: row["rho"])
    count = len(rows)
    if count > MOST:
        rows = [rows[i] for i in np.linspace(0, count - 1, MOST).round().astype(int)]
    rank = np.arange(len(rows))
    rho, low, high, p = (np.array([r[k] for r in rows]) for k in ("rho", "low", "high", "p"))
    fig = theme.new_figure(template)
    for band in theme.band(rank, low, high, theme.BLUE, panel=0, group="interval"):
        fig.add_trace(band)
    lines = {name: list(values) for name, values in multiverse.choices.items() if len(values) > 1}
    words = [", ".join(f"{_WORDS[name]} {row[name]}" for name in lines) for row in rows]
    for chosen, name, colour in (
        (p >= 0.05, "p ≥ 0.05", theme.FAINT),
        (p < 0.05, "p < 0.05", theme.BLUE),
    ):
        if chosen.any():
            fig.add_scatter(
                x=rank[chosen],
                y=theme.small(rho[chosen]),
                text=[words[i] for i in np.flatnonzero(chosen)],
                customdata=theme.small(np.stack([low, high, p], axis=1)[chosen]),
                mode="markers",
                marker={"size": 5, "color": colour},
                name=name,
                hovertemplate=(
                    "ρ = %{y:.3f} (%{customdata[0]:.2f} to %{customdata[1]:.2f}), "
                    "p = %{customdata[2]:.3g}<br>%{text}<extra></extra>"
                ),
            )
    labels, place = _grid(fig, rows, lines, rank)
    thin = f", every {count / len(rows):.1f}th of {count} settings" if count > len(rows) else ""
    titles = [
        theme.titled("Coupling in every setting", f"layer {layer}, partial Spearman ρ{thin}"),
        theme.titled("Choices behind it", "a mark where the setting has the choice"),
    ]
    theme.arrange(
        fig, titles, columns=1, row_height=300, narrow_row_height=300, x_title="settings, sorted"
    )
    fig.add_shape(theme.level(0.0))
    axis = {"range": [-1, len(rows)], "showgrid": False, "zeroline": False}
    return fig.update_layout(
        xaxis={**axis, "title": {"text": ""}},
        xaxis2=axis,
        yaxis={"zeroline": False},
        yaxis2={
            "tickvals": place,
            "ticktext": labels,
            "tickfont": {"size": 10},
            "showgrid": False,
            "zeroline": False,
            "range": [max(place, default=0) + 1, -1],
        },
    )


def _grid(
    fig: go.Figure, rows: list[dict[str, Any]], lines: dict[str, list[Any]], rank: Any
) -> tuple[list[str], list[float]]:
    """Marks in the second panel; the labels of its rows and where they are."""
    labels: list[str] = []
    place: list[float] = []
    at = 0.0
    for number, (name, values) in enumerate(lines.items()):
        colour = theme.MUTED if number % 2 else theme.BLUE
        for value in values:
            has = np.array([row[name] == value for row in rows])
            fig.add_scatter(
                x=rank[has],
                y=np.full(int(has.sum()), at, dtype=np.float32),
                mode="markers",
                marker={"symbol": "line-ns-open", "size": 8, "color": colour},
                showlegend=False,
                name=f"{_WORDS[name]} {value}",
                hoverinfo="name",
                xaxis="x2",
                yaxis="y2",
            )
            labels.append(f"{_WORDS[name]} {value}".replace("_", " "))
            place.append(at)
            at += 1
        at += 0.5
    return labels, place
