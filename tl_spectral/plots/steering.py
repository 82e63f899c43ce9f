"""Figures of steering: what an edit buys at which price, beside its rivals."""

from __future__ import annotations

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
            marker={
                "size": 11,
                "color": _COLOURS.get(str(name), theme.BASELINE),
                "symbol": "circle" if name in _COLOURS else "circle-open",
            },
            name=str(name),
            hovertemplate=f"<b>{name}</b><br>KL %{{x:.4f}} nat<br>|cos| %{{y:.3f}}<extra></extra>",
        )
    fig.update_layout(yaxis={"rangemode": "tozero"}, xaxis={"rangemode": "tozero"})
    return theme.arrange(
        fig,
        [theme.titled("What steering buys, and its price", "mean |cos| with the direction")],
        columns=1,
        row_height=320,
        x_title="KL of the next-token distribution, nats",
    )


def sweep_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Alignment against KL, and perplexity against alignment, along the gaps.

    Lines are methods; grey ones are the mean over random directions, each aligned with itself; the
    dots are chance.

    Args:
        table: :meth:`tl_spectral.steering.SteeringSweep.to_dataframe`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    predicted = bool(table["perplexity"].notna().any())
    for method, rows in table.groupby("method", sort=False):
        colour, dash = _METHODS[str(method)]
        steered = rows[rows["condition"] == "steered"]
        _curve(fig, steered, f"steered, {method}", colour, dash, predicted)
        drawn = rows[rows["condition"].str.startswith("random")]
        if len(drawn):
            mean = drawn.groupby("gap", as_index=False)[["kl", "alignment", "perplexity"]].mean()
            _curve(fig, mean, f"random directions, {method}", theme.BASELINE, dash, predicted)
    added = table[table["condition"] == "additive at equal KL"].sort_values("strength")
    _curve(fig, added, "additive at equal KL", theme.ORANGE, "solid", predicted)
    before = table.iloc[0]
    fig.update_layout(
        xaxis=theme.log_ticks(table["kl"]),
        yaxis={"rangemode": "tozero"},
        shapes=[theme.level(before["chance"])],
    )
    titles = [theme.titled("What steering buys", "mean |cos| by KL, nats")]
    if predicted:
        titles.append(theme.titled("What it costs", "perplexity by mean |cos|"))
        values = [*table["perplexity"].dropna(), before["perplexity_before"]]
        fig.update_layout(xaxis2={"rangemode": "tozero"}, yaxis2=theme.log_ticks(values))
        fig.add_shape(theme.level(before["perplexity_before"], panel=1))
    theme.arrange(fig, titles, columns=2, row_height=320, narrow_row_height=260, x_title=None)
    narrow = fig.layout.meta["narrow"]
    x_titles = ("KL of the next-token distribution, nats", "mean |cos| with the direction")
    for panel, text in enumerate(x_titles[: len(titles)]):  # the grid knows one title for all
        axis = theme.axis("xaxis", panel)
        fig.layout[axis].title.text = narrow[axis]["title"]["text"] = text
    return fig.update_layout(meta={"narrow": narrow})


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
