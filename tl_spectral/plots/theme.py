"""One visual language for every figure: colours, template, and a grid that reflows on a phone.

Colour means the same thing everywhere: blue is the trained model, vermillion its control, grey the
random reference, purple the identity skip with a random update. A solid line is J, a dashed one R.
All are from the Okabe-Ito palette, which colour-blind readers can tell apart. Green and purple
are kept for diverging scales, so that no heat map is mistaken for a variant.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import ArrayLike, NDArray

BLUE, SKY, VERMILLION, ORANGE = "#0072B2", "#56B4E9", "#D55E00", "#E69F00"
GREEN, PURPLE = "#009E73", "#CC79A7"
INK, MUTED, GRID, SURFACE, NEUTRAL = "#1B1F24", "#5B6470", "#E4E7EB", "#FFFFFF", "#F0F1F3"
BASELINE, FAINT, DEEP = "#7C8591", "#C2C8CF", "#06304A"

VARIANT_COLOURS = {"trained": BLUE, "control": VERMILLION}
OPERATOR_DASH = {"J": "solid", "R": "dash"}
DIVERGING = [[0.0, PURPLE], [0.5, NEUTRAL], [1.0, GREEN]]
SEQUENTIAL = [[0.0, SURFACE], [0.35, SKY], [1.0, DEEP]]

# The report redraws its figures with these when the reader's system is dark.
DARK = {
    INK: "#E6E8EB",
    MUTED: "#A0AAB6",
    GRID: "#2B323B",
    SURFACE: "#161A20",
    NEUTRAL: "#272E37",
    BASELINE: "#929CA9",
    FAINT: "#4A5462",
    DEEP: "#E3F3FD",
    BLUE: SKY,
    SKY: "#2A7FB0",
    VERMILLION: ORANGE,
}

_WIDE, _NARROW = 1040, 290  # pixels that a legend may use
_LEGEND_ROW = 20
_NARROW_TITLE = 42  # characters that fit on a line
_BAR_BELOW = {
    "orientation": "h",
    "x": 0.5,
    "xanchor": "center",
    "len": 1,
    "y": 0,
    "yanchor": "bottom",
    "yref": "container",
    "title": {"side": "top"},
}

_AXIS = {
    "gridcolor": GRID,
    "zerolinecolor": GRID,
    "linecolor": GRID,
    "ticks": "",
    "automargin": True,
    "title": {"standoff": 6, "font": {"size": 12, "color": MUTED}},
    "tickfont": {"size": 11, "color": MUTED},
}
TEMPLATE = go.layout.Template(
    layout={
        "font": {
            "family": 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif',
            "size": 13,
            "color": INK,
        },
        "paper_bgcolor": SURFACE,
        "plot_bgcolor": SURFACE,
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "hoverlabel": {
            "bgcolor": SURFACE,
            "bordercolor": MUTED,
            "align": "left",
            "font": {"size": 12, "color": INK},
        },
        "hovermode": "closest",
        "legend": {"font": {"size": 12}, "bgcolor": "rgba(0,0,0,0)"},
    }
)


def new_figure(template: Any = None) -> go.Figure:
    """An empty figure in the house style.

    Args:
        template: A plotly template or its name; the house template when ``None``.
    """
    return go.Figure(layout={"template": TEMPLATE if template is None else template})


def variant_colour(variant: str) -> str:
    """Colour of a variant; an unknown one is drawn in green, never in another's colour."""
    return VARIANT_COLOURS.get(variant, GREEN)


def axis(name: str, index: int) -> str:
    """Plotly's reference of the panel-th axis: ``x``, ``x2``, ``x3`` and so on."""
    return name if index == 0 else f"{name}{index + 1}"


def small(values: ArrayLike) -> NDArray[np.float32]:
    """Values in single precision: half the bytes in the page, and more digits than anyone reads."""
    return np.asarray(values, dtype=np.float64).astype(np.float32)


def as_array(values: Any) -> NDArray[Any]:
    """A numpy array from a tensor, a list or an array, on the CPU and without gradient."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def arrange(
    fig: go.Figure,
    titles: Sequence[str],
    *,
    columns: int,
    narrow_columns: int = 1,
    row_height: int = 220,
    narrow_row_height: int | None = None,
    x_title: str | None = "layer",
) -> go.Figure:
    """Place the panels of a figure on a grid, and note beside it how they stack on a phone.

    Args:
        fig: A figure with all its traces, which use axes ``x``, ``x2``, … (a pair for each title),
            and with its colour axis, if it has one.
        titles: Title of each panel, set above it at its left edge.
        columns: Panels in a row.
        narrow_columns: Panels in a row where the page is narrow.
        row_height: Height of a panel in pixels.
        narrow_row_height: The same where the page is narrow; defaults to ``row_height``.
        x_title: Title of the x axes, drawn under the lowest panel of each column.

    Returns:
        The same figure. ``layout.meta["narrow"]`` holds the layout for a narrow page.
    """
    names = [t.name for t in fig.data if t.name and t.showlegend is not False]
    legend = len(names) > 1
    bar = fig.layout.coloraxis.cmin is not None and fig.layout.coloraxis.showscale is not False
    notes = [note.to_plotly_json() for note in fig.layout.annotations]
    fig.layout.annotations = ()  # an update would merge them with the titles one by one
    wide = _grid(titles, min(columns, len(titles)), row_height, x_title)
    narrow = _grid(titles, narrow_columns, narrow_row_height or row_height, x_title)
    for layout, width in ((wide, _WIDE), (narrow, _NARROW)):
        layout["annotations"] += notes
        above = _LEGEND_ROW * _legend_rows(names, width) if legend else 0
        below = 46 if bar and layout is narrow else 0
        layout["margin"]["t"] += above
        layout["margin"]["b"] += below
        layout["height"] += above + below
    wide["margin"].update(l=52, r=84 if bar else 16)
    narrow["margin"].update(l=44, r=12)
    for i, title in enumerate(narrow["annotations"][: len(titles)]):
        title["xshift"] = -36  # a phone has no width to lose
        if len(re.sub("<[^>]*>", "", title["text"])) > _NARROW_TITLE:
            title["text"] = title["text"].replace("</b>  ", "</b><br>")
            if i == 0:
                narrow["margin"]["t"] += 16
                narrow["height"] += 16
    if bar:
        narrow["coloraxis"] = {"colorbar": _BAR_BELOW}
    place = {"orientation": "h", "x": 0, "xanchor": "left", "xref": "container"}
    place |= {"y": 1, "yanchor": "top", "yref": "container", "tracegroupgap": 0}
    return fig.update_layout(wide, legend=place, showlegend=legend, meta={"narrow": narrow})


def _legend_rows(names: Sequence[str], width: int) -> int:
    """Rows that a horizontal legend takes, by an estimate of the width of its names."""
    rows, used = 1, 0.0
    for name in names:
        needed = 52 + 6.4 * len(name)
        if used and used + needed > width:
            rows, used = rows + 1, 0.0
        used += needed
    return rows


def _grid(
    titles: Sequence[str], columns: int, row_height: int, x_title: str | None
) -> dict[str, Any]:
    rows = -(-len(titles) // columns)
    gap_x, gap_y = (0.0 if columns == 1 else 0.2 / columns), 62
    inner = rows * row_height + (rows - 1) * gap_y
    top, bottom = 34, 44
    width = (1 - gap_x * (columns - 1)) / columns
    layout: dict[str, Any] = {
        "height": inner + top + bottom,
        "margin": {"t": top, "b": bottom},
        "annotations": [],
    }
    for i, title in enumerate(titles):
        row, column = divmod(i, columns)
        left = column * (width + gap_x)
        low = 1 - (row * (row_height + gap_y) + row_height) / inner
        high = min(1.0, low + row_height / inner)
        number = "" if i == 0 else str(i + 1)
        last = i + columns >= len(titles)
        layout[f"xaxis{number}"] = {
            "domain": [left, min(1.0, left + width)],
            "anchor": axis("y", i),
            "title": {"text": x_title if last and x_title else ""},
        }
        layout[f"yaxis{number}"] = {"domain": [max(0.0, low), high], "anchor": axis("x", i)}
        layout["annotations"].append(
            {
                "text": title,
                "x": left,
                "y": high,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "left",
                "yanchor": "bottom",
                "yshift": 5,
                "showarrow": False,
                "align": "left",
                "font": {"size": 13},
            }
        )
    return layout


def colour_axis(
    low: float, high: float, *, diverging: bool, title: str = "", shown: bool = True
) -> dict[str, Any]:
    """A colour axis with the house scale and a slim bar."""
    return {
        "cmin": low,
        "cmax": high,
        "colorscale": DIVERGING if diverging else SEQUENTIAL,
        "showscale": shown,
        "colorbar": {
            "title": {"text": title, "font": {"size": 12, "color": MUTED}},
            "tickfont": {"size": 11, "color": MUTED},
            "outlinewidth": 0,
            "thickness": 10,
            "len": 0.9,
            "nticks": 5,
        },
    }


def titled(title: str, unit: str = "") -> str:
    """A panel title with its unit in a lighter hand."""
    return f"<b>{title}</b>" + (f'  <span style="color:{MUTED}">{unit}</span>' if unit else "")


def band(
    x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: str, *, panel: int, group: str
) -> list[go.Scatter]:
    """The shaded interval around a line; where a value is missing the band is interrupted."""
    xs, lows, highs = (np.asarray(v, dtype=np.float64) for v in (x, low, high))
    finite = np.isfinite(lows) & np.isfinite(highs)
    outline_x: list[float | None] = []
    outline_y: list[float | None] = []
    for run in np.split(np.arange(len(xs)), np.flatnonzero(np.diff(finite.astype(int))) + 1):
        if len(run) < 2 or not finite[run[0]]:
            continue
        outline_x += [*xs[run], *xs[run][::-1], None]
        outline_y += [*np.round(highs[run], 6), *np.round(lows[run][::-1], 6), None]
    if not outline_x:
        return []
    return [
        go.Scatter(
            x=outline_x[:-1],
            y=outline_y[:-1],
            fill="toself",
            fillcolor=colour,
            opacity=0.16,
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=group,
            xaxis=axis("x", panel),
            yaxis=axis("y", panel),
        )
    ]


def log_ticks(values: ArrayLike) -> dict[str, Any]:
    """An axis on a log scale with plain numbers 1, 2, 5, 10, … (plotly writes 100, 5, 2, 10)."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite) & (finite > 0)]
    if not finite.size:
        return {"type": "log"}
    decades = range(int(np.floor(np.log10(finite.min()))), int(np.log10(finite.max())) + 1)
    steps = (1, 2, 5) if len(decades) < 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in decades for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def layer_axis(layers: ArrayLike) -> dict[str, Any]:
    """An axis of layers: ticks at whole numbers only, about seven of them."""
    known = np.asarray(layers, dtype=np.float64)
    span = float(np.ptp(known)) if known.size else 0.0
    step = next((s for s in (1, 2, 5, 10, 20) if span / s <= 7), 50)
    return {"tick0": 0, "dtick": step, "zeroline": False}


def level(y: float, *, panel: int = 0) -> dict[str, Any]:
    """A horizontal reference line across one panel, as a layout shape."""
    place = {"x0": 0, "x1": 1, "xref": f"{axis('x', panel)} domain"}
    return _REFERENCE | place | {"y0": y, "y1": y, "yref": axis("y", panel)}


def upright(x: float, *, panel: int = 0) -> dict[str, Any]:
    """A vertical reference line across one panel, as a layout shape."""
    place = {"y0": 0, "y1": 1, "yref": f"{axis('y', panel)} domain"}
    return _REFERENCE | place | {"x0": x, "x1": x, "xref": axis("x", panel)}


_REFERENCE = {"type": "line", "line": {"color": MUTED, "width": 1}, "layer": "below"}
