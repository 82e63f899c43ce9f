"""Figures of steering: what an edit buys at which price, beside its rivals."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column

_COLOURS = {
    "steered": theme.BLUE,
    "additive at equal KL": theme.ORANGE,
}
_METHODS = {"weights": (theme.BLUE, "solid"), "hook": (theme.SKY, "dash")}


def steering_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Alignment with the direction against the price in KL, one mark per condition.

    Args:
        table: :meth:`tl_spectral.steering.SteeringReport.to_dataframe`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    for name, rows in table.groupby("condition", sort=False):
        fig.add_scatter(
            x=column(rows, "kl"),
            y=column(rows, "alignment"),
            mode="markers",
            cliponaxis=False,  # the original model lies on the axis
            marker={
                "size": 11,
                "color": _COLOURS.get(str(name), theme.BASELINE),
                "symbol": "circle" if name in _COLOURS else "circle-open",
            },
            name=str(name),
            hovertemplate=f"<b>{name}</b><br>KL %{{x:.4f}} nat<br>|cos| %{{y:.3f}}<extra></extra>",
        )
    chance = table.iloc[0]["chance"]
    fig.update_layout(
        yaxis={"rangemode": "tozero"},
        xaxis={"rangemode": "tozero"},
        shapes=[theme.level(chance)],
    )
    _note(fig, "chance", chance, 0)
    return theme.arrange(
        fig,
        [theme.titled("What steering buys, and its price", "mean |cos| with the direction")],
        columns=1,
        row_height=320,
        x_title="KL of the next-token distribution, nats",
    )


def sweep_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Alignment against KL, and perplexity against alignment, along the gaps.

    Grey lines are the mean over random directions, each aligned with itself; the level lines are
    chance, and the perplexity of the model as it was.

    Args:
        table: :meth:`tl_spectral.steering.SteeringSweep.to_dataframe`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    predicted = bool(table["perplexity"].notna().any())
    drawn = table[table["condition"].str.startswith("random")]
    columns = ["kl", "alignment", "perplexity"]
    drawn = drawn.groupby(["method", "gap"], as_index=False, sort=False)[columns].mean()
    for method, rows in table[table["condition"] == "steered"].groupby("method", sort=False):
        _curve(fig, rows, f"steered, {method}", *_METHODS[str(method)], predicted)
    added = table[table["condition"] == "additive at equal KL"].sort_values("strength")
    _curve(fig, added, "additive at equal KL", theme.ORANGE, "solid", predicted)
    for method, rows in drawn.groupby("method", sort=False):
        dash = _METHODS[str(method)][1]
        _curve(fig, rows, f"random directions, {method}", theme.BASELINE, dash, predicted)
    before = table.iloc[0]
    fig.update_layout(
        xaxis=theme.log_ticks(table["kl"]),
        yaxis={"rangemode": "tozero"},
        shapes=[theme.level(before["chance"])],
    )
    _note(fig, "chance", before["chance"], 0)
    titles = [theme.titled("What steering buys", "mean |cos| by KL, nats")]
    if predicted:
        titles.append(theme.titled("What it costs", "perplexity by mean |cos|"))
        values = [*table["perplexity"].dropna(), before["perplexity_before"]]
        fig.update_layout(xaxis2={"rangemode": "tozero"}, yaxis2=theme.log_ticks(values))
        fig.add_shape(theme.level(before["perplexity_before"], panel=1))
        _note(fig, "not steered", math.log10(before["perplexity_before"]), 1)
    theme.arrange(fig, titles, columns=2, row_height=320, narrow_row_height=260, x_title=None)
    narrow = fig.layout.meta["narrow"]
    x_titles = ("KL of the next-token distribution, nats", "mean |cos| with the direction")
    for panel, text in enumerate(x_titles[: len(titles)]):  # the grid knows one title for all
        axis = theme.axis("xaxis", panel)
        fig.layout[axis].title.text = narrow[axis]["title"]["text"] = text
    return fig.update_layout(meta={"narrow": narrow})


def _note(fig: go.Figure, text: str, y: float, panel: int) -> None:
    fig.add_annotation(
        text=text,
        x=1,
        y=y,
        xref=f"{theme.axis('x', panel)} domain",
        yref=theme.axis("y", panel),
        xanchor="right",
        yanchor="top",
        showarrow=False,
        font={"size": 11, "color": theme.MUTED},
    )


def _curve(
    fig: go.Figure, rows: pd.DataFrame, name: str, colour: str, dash: str, predicted: bool
) -> None:
    panels = [("kl", "alignment")] + [("alignment", "perplexity")] * predicted
    gaps = column(rows, "gap")
    for panel, (x, y) in enumerate(panels):
        fig.add_scatter(
            x=column(rows, x),
            y=theme.small(column(rows, y)),
            customdata=gaps,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 6},
            name=name,
            legendgroup=name,
            showlegend=panel == 0,
            hovertemplate=f"<b>{name}</b><br>gap %{{customdata:g}}<br>{x} %{{x:.3g}}<br>"
            f"{y} %{{y:.3g}}<extra></extra>",
            xaxis=theme.axis("x", panel),
            yaxis=theme.axis("y", panel),
        )
