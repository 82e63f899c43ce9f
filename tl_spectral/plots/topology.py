"""Figures of the unit graph: adjacency by community, communities over depth, cartography."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column, of_variant, variants

_CELLS = 180  # an adjacency matrix is drawn in at most this many bins a side
_NAMED = 8  # bridge units whose number is written beside them
HUB_Z = 2.5  # Guimera & Amaral 2005
ROLE_BORDERS = ((0.05, 0.62, 0.80), (0.30, 0.75))  # of participation: non-hubs, hubs


def graph_figure(graph: Any, labels: Any = None, *, template: Any = None) -> go.Figure:
    """Adjacency matrix of a unit graph, its units ordered by community.

    Args:
        graph: A :class:`tl_spectral.graph.UnitGraph`.
        labels: Community of each unit (−1: isolated); index order when ``None``.
        template: A plotly template or its name.
    """
    edges = {name: theme.as_array(getattr(graph, name)) for name in ("row", "col", "weight")}
    n = int(graph.n_units)
    communities = np.zeros(n, dtype=int) if labels is None else theme.as_array(labels)
    return adjacency_figure({"trained": (edges, communities)}, named=False, template=template)


def adjacency_figure(
    graphs: Mapping[str, tuple[Mapping[str, Any], Any]],
    *,
    named: bool = True,
    template: Any = None,
) -> go.Figure:
    """Adjacency matrices side by side, ordered by community, with each community outlined.

    Args:
        graphs: Variant → (edges, labels): ``edges`` has arrays ``row``, ``col`` and ``weight``;
            ``labels`` is the community of each unit, −1 for isolated ones.
        named: Whether to write the variant above its panel.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    titles = []
    for panel, (variant, (edges, labels)) in enumerate(graphs.items()):
        communities = theme.as_array(labels).astype(int)
        order = _community_order(communities)
        density, centres = _binned(edges, order)
        fig.add_heatmap(
            x=theme.small(centres),
            y=theme.small(centres),
            z=density,
            coloraxis="coloraxis",
            hoverinfo="skip",
            xaxis=theme.axis("x", panel),
            yaxis=theme.axis("y", panel),
        )
        _outlines(fig, communities[order], panel)
        count = len(np.unique(communities[communities >= 0]))
        title = variant.capitalize() if named else "Unit graph"
        n_edges = len(theme.as_array(edges["weight"]))
        unit = f"{count} communities, {n_edges:,} edges" if count > 1 else f"{n_edges:,} edges"
        titles.append(theme.titled(title, unit))
    fig.update_layout(coloraxis=theme.colour_axis(0.0, 100.0, diverging=False, shown=False))
    theme.arrange(
        fig,
        titles,
        columns=2,
        row_height=430,
        narrow_row_height=300,
        x_title="units, ordered by community",
    )
    for panel in range(len(graphs)):
        number, x = ("" if panel == 0 else str(panel + 1)), theme.axis("x", panel)
        hidden = {"showgrid": False, "zeroline": False, "showticklabels": False}
        square = {"scaleanchor": x, "autorange": "reversed", "constrain": "domain"}
        fig.update_layout(
            {
                f"xaxis{number}": hidden | {"constrain": "domain"},
                f"yaxis{number}": hidden | square,
            }
        )
    return fig


def _community_order(labels: NDArray[Any]) -> NDArray[Any]:
    """Units by community, isolated ones last; a stable sort keeps index order inside."""
    return np.argsort(np.where(labels < 0, labels.max(initial=0) + 1, labels), kind="stable")


def _binned(
    edges: Mapping[str, Any], order: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Edge weight per cell of the ordered matrix, in per cent of the fullest, and cell centres."""
    n = len(order)
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    row, col = (place[theme.as_array(edges[name]).astype(np.int64)] for name in ("row", "col"))
    weight = np.abs(theme.as_array(edges["weight"]).astype(np.float64))
    bins = min(n, _CELLS)
    borders = np.linspace(0, n, bins + 1)
    both = (np.concatenate([row, col]) + 0.5, np.concatenate([col, row]) + 0.5)
    total, _, _ = np.histogram2d(*both, bins=(borders, borders), weights=np.tile(weight, 2))
    full = float(np.quantile(total[total > 0], 0.99)) if (total > 0).any() else 1.0
    shade = np.clip(total / full, 0, 1) ** 0.6  # lift faint cells: the graph is sparse
    return np.round(100 * shade).astype(np.uint8), (borders[:-1] + borders[1:]) / 2


def _outlines(fig: go.Figure, sorted_labels: NDArray[Any], panel: int) -> None:
    borders = np.flatnonzero(np.diff(sorted_labels)) + 1
    starts = np.concatenate([[0], borders])
    ends = np.concatenate([borders, [len(sorted_labels)]])
    x: list[float | None] = []
    y: list[float | None] = []
    centres: list[float] = []
    names: list[str] = []
    for start, end in zip(starts, ends, strict=True):
        if sorted_labels[start] < 0 or end - start < 2:
            continue
        x += [start, end, end, start, start, None]
        y += [start, start, end, end, start, None]
        centres.append((start + end) / 2)
        names.append(f"community {sorted_labels[start]}: {end - start} units")
    if not x:
        return
    fig.add_scatter(
        x=centres,
        y=centres,
        text=names,
        mode="markers",
        marker={"size": 26, "opacity": 0},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )
    fig.add_scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines",
        line={"color": theme.VERMILLION, "width": 1.2},
        hoverinfo="skip",
        showlegend=False,
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def communities_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Modularity against its null, stability and number of communities, by layer.

    Args:
        table: The run's ``communities`` table.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    panels = (
        ("modularity", "modularity_sd", theme.titled("Modularity", "Q ± 1 sd over runs")),
        ("stability_ari", "", theme.titled("Stability", "adjusted Rand between runs")),
        ("n_communities", "", theme.titled("Communities", "count")),
    )
    for variant in variants(table):
        rows = of_variant(table, variant).sort_values("layer")
        layer, colour = column(rows, "layer"), theme.variant_colour(variant)
        for panel, (name, spread, _) in enumerate(panels):
            fig.add_scatter(
                x=layer,
                y=theme.small(column(rows, name)),
                customdata=theme.small(column(rows, "z_score")),
                error_y=_bars(column(rows, spread), colour) if spread else None,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"size": 5},
                name=variant,
                legendgroup=variant,
                showlegend=panel == 0,
                hovertemplate=(
                    f"<b>{variant}</b> · layer %{{x}}<br>%{{y:.3f}}"
                    + ("<br>z against null %{customdata:.1f}" if panel == 0 else "")
                    + "<extra></extra>"
                ),
                xaxis=theme.axis("x", panel),
                yaxis=theme.axis("y", panel),
            )
        null, name = column(rows, "null_mean"), f"rewired null of {variant}"
        if np.isfinite(null).any():
            fig.add_scatter(
                x=layer,
                y=theme.small(null),
                error_y=_bars(column(rows, "null_sd"), colour),
                mode="lines+markers",
                line={"color": colour, "width": 1.2, "dash": "dot"},
                marker={"size": 4, "symbol": "circle-open"},
                name=name,
                legendgroup=name,
                hovertemplate=f"<b>{name}</b> · layer %{{x}}<br>%{{y:.3f}}<extra></extra>",
            )
    for panel in range(len(panels)):
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": theme.layer_axis(column(table, "layer")),
                f"yaxis{number}": {"rangemode": "tozero", "nticks": 6},
            }
        )
    return theme.arrange(
        fig,
        [title for _, _, title in panels],
        columns=3,
        row_height=210,
        narrow_row_height=180,
    )


def _bars(values: NDArray[np.float64], colour: str) -> dict[str, Any]:
    bars = {"type": "data", "array": theme.small(values), "color": colour}
    return bars | {"thickness": 1.2, "width": 0}


def cartography_figure(bridges: Any, *, template: Any = None) -> go.Figure:
    """Cartography of one graph: participation against within-community degree.

    Args:
        bridges: A :class:`tl_spectral.bridges.BridgeUnits`.
        template: A plotly template or its name.
    """
    participation = theme.as_array(bridges.participation)
    table = pd.DataFrame(
        {
            "unit": np.arange(len(participation)),
            "participation": participation,
            "within_z": theme.as_array(bridges.within_z),
            "is_bridge": theme.as_array(bridges.is_bridge),
            "role": list(bridges.role),
        }
    )
    return cartography_table_figure(table, template=template)


def cartography_table_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Cartography of the units of one layer, a panel per variant.

    Args:
        table: Rows of one layer of the run's ``units`` table.
        template: A plotly template or its name.

    Returns:
        The figure. Filled markers are bridge units, the strongest are named; their colour is the
        gain of J on the unit relative to the layer's median, where it is known.
    """
    fig = theme.new_figure(template)
    names = variants(table)
    gain = column(table, "log_gain_J")
    extent = float(np.nanquantile(np.abs(gain), 0.98)) if np.isfinite(gain).any() else 0.0
    notes: list[dict[str, Any]] = []
    titles = []
    z = column(table, "within_z")
    top = max(HUB_Z + 0.8, float(np.nanmax(z, initial=0)) * 1.12)
    bottom = min(-1.0, float(np.nanmin(z, initial=0)) * 1.12)
    for panel, variant in enumerate(names):
        rows = of_variant(table, variant)
        bridge = rows["is_bridge"].eq(True)
        _role_borders(fig, panel, bottom, top)
        for chosen, is_bridge in ((rows[~bridge], False), (rows[bridge], True)):
            _units(fig, chosen, panel, is_bridge=is_bridge, coloured=extent > 0)
        best = rows[bridge].nlargest(_NAMED, "participation")
        notes += _unit_names(best, panel)
        titles.append(
            theme.titled(
                variant.capitalize() if "variant" in table else "Units",
                f"{int(bridge.sum())} bridges of {len(rows)} units",
            )
        )
    fig.update_layout(annotations=notes)
    if extent:
        scale = theme.colour_axis(-extent, extent, diverging=True, title="log gain of J")
        fig.update_layout(coloraxis=scale)
    theme.arrange(
        fig,
        titles,
        columns=2,
        row_height=360,
        narrow_row_height=300,
        x_title="participation P",
    )
    for panel in range(len(names)):
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {"range": [-0.02, 1.0], "showgrid": False, "zeroline": False},
                f"yaxis{number}": {
                    "range": [bottom, top],
                    "showgrid": False,
                    "title": {"text": "within-community degree z" if panel == 0 else ""},
                },
            }
        )
    return fig


def _units(
    fig: go.Figure, rows: pd.DataFrame, panel: int, *, is_bridge: bool, coloured: bool
) -> None:
    if rows.empty:
        return
    marker: dict[str, Any] = {"size": 8 if is_bridge else 5}
    if coloured:
        marker |= {"color": theme.small(column(rows, "log_gain_J")), "coloraxis": "coloraxis"}
    else:
        marker |= {"color": theme.GREEN if is_bridge else theme.BASELINE}
    line = {
        "width": 1.2 if is_bridge else 0.6,
        "color": theme.INK if is_bridge else theme.BASELINE,
    }
    # the regions are labelled, so that only bridges repeat their role: a page has 10⁵ units
    named = is_bridge and "role" in rows
    units = column(rows, "unit")
    fig.add_scatter(
        x=theme.small(column(rows, "participation")),
        y=theme.small(column(rows, "within_z")),
        customdata=units.astype(np.uint16 if units.max() < 2**16 else np.int32),
        text=rows["role"].fillna("").astype(str).tolist() if named else None,
        mode="markers",
        marker=marker | {"line": line, "opacity": 1.0 if is_bridge else 0.75},
        showlegend=False,
        hovertemplate=(
            "<b>unit %{customdata}</b>"
            + (" · %{text}" if named else "")
            + "<br>P = %{x:.3f}, z = %{y:.2f}"
            + ("<br>log gain %{marker.color:.3f}" if coloured else "")
            + "<extra></extra>"
        ),
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def _unit_names(best: pd.DataFrame, panel: int) -> list[dict[str, Any]]:
    """Numbers of the strongest bridge units, pushed apart so that they can be read."""
    ordered = best.sort_values("within_z")
    return [
        {
            "text": str(int(unit)),
            "x": float(x),
            "y": float(y),
            "xref": theme.axis("x", panel),
            "yref": theme.axis("y", panel),
            "ax": 30 + 14 * (i % 2),
            "ay": 36 - 11 * i,
            "showarrow": True,
            "arrowhead": 0,
            "arrowwidth": 0.8,
            "arrowcolor": theme.MUTED,
            "font": {"size": 11},
        }
        for i, (unit, x, y) in enumerate(
            zip(
                column(ordered, "unit"),
                column(ordered, "participation"),
                column(ordered, "within_z"),
                strict=True,
            )
        )
    ]


def _role_borders(fig: go.Figure, panel: int, bottom: float, top: float) -> None:
    """The borders between the roles of Guimera & Amaral: hubs above, kinless to the right."""
    x, y = theme.axis("x", panel), theme.axis("y", panel)
    line = {"color": theme.BASELINE, "width": 0.8, "dash": "dot"}
    shapes = [{"x0": 0, "x1": 1, "y0": HUB_Z, "y1": HUB_Z}]
    shapes += [{"x0": p, "x1": p, "y0": bottom, "y1": HUB_Z} for p in ROLE_BORDERS[0]]
    shapes += [{"x0": p, "x1": p, "y0": HUB_Z, "y1": top} for p in ROLE_BORDERS[1]]
    for shape in shapes:
        fig.add_shape(type="line", xref=x, yref=y, line=line, layer="below", **shape)
    fig.add_scatter(
        x=[0.335, 0.71, 0.9, 0.0],
        y=[HUB_Z - 0.02 * (top - bottom)] * 3 + [top],
        text=["peripheral", "connector", "kinless", "hubs"],
        textposition=["bottom center"] * 3 + ["bottom right"],
        textfont={"size": 10, "color": theme.MUTED},
        mode="text",
        hoverinfo="skip",
        showlegend=False,
        xaxis=x,
        yaxis=y,
    )
