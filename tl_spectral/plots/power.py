"""Figures of the power method: alignment by layer, the road to consensus, and steering."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column

_CONTROLS = {"other layer": "dash", "random F": "dot", "v2": "dashdot"}


def power_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """γ and ρ by layer beside their controls, and both sides of the criterion.

    Args:
        table: :meth:`tl_spectral.power.PowerAlignment.to_dataframe`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    text = table[table["tokens"] == "all"]
    v1 = text[text["target"] == "v1"]
    layers = column(v1, "layer")
    lines = [(v1, "v1, after", "gamma_after", theme.BLUE, "solid", 0)]
    lines += [(v1, "v1, before", "gamma_before", theme.SKY, "solid", 0)]
    lines += [(v1, "chance", "chance", theme.BASELINE, "dot", 0)]
    lines += [(v1, "v1, text", "rho", theme.BLUE, "solid", 1)]
    for name, dash in _CONTROLS.items():
        rows = text[text["target"] == name]
        lines += [(rows, f"{name}, text", "rho", theme.BASELINE, dash, 1)]
    drawn = table[(table["tokens"] == "random") & (table["target"].isin(["v1", "random F"]))]
    for target, colour in (("v1", theme.ORANGE), ("random F", theme.VERMILLION)):
        rows = drawn[drawn["target"] == target]
        lines += [(rows, f"{target}, random tokens", "rho", colour, "dash", 1)]
    lines += [(v1, "‖Mᵀv1‖", "criterion_left", theme.BLUE, "solid", 2)]
    lines += [(v1, "‖M‖ / √d", "criterion_right", theme.BASELINE, "dot", 2)]
    bounds = column(v1, "rho_low"), column(v1, "rho_high")
    fig.add_traces(theme.band(layers, *bounds, theme.BLUE, panel=1, group="v1, text"))
    for rows, name, measure, colour, dash, panel in lines:
        if len(rows):
            _line(fig, column(rows, "layer"), column(rows, measure), name, colour, dash, panel)
    axes = {f"xaxis{'' if i == 0 else i + 1}": theme.layer_axis(layers) for i in range(3)}
    fig.update_layout(axes, shapes=[theme.level(0.5, panel=1)])
    titles = [
        theme.titled("Alignment with v1", "γ, text tokens"),
        theme.titled("Tokens that tilt towards it", "ρ, share"),
        theme.titled("Why random tokens do", "ρ > ½ if above the dots"),
    ]
    return theme.arrange(fig, titles, columns=3, row_height=300, narrow_row_height=240)


def consensus_figure(result: Any, *, template: Any = None) -> go.Figure:
    """Order, alignment and distance to the dominant mode by step.

    Args:
        result: A :class:`tl_spectral.consensus.ConsensusResult`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    steps = np.arange(len(result.order))
    for values, name, colour in (
        (result.order, "order ‖mean x̂‖", theme.BLUE),
        (result.axis_share, "share on one line", theme.ORANGE),
        (result.gamma, "γ, alignment with v1", theme.GREEN),
    ):
        _line(fig, steps, theme.as_array(values), name, colour, "solid", 0)
    titles = [theme.titled("Road to consensus", result.kind)]
    if result.distance is not None:
        distance = theme.as_array(result.distance)
        _line(fig, steps, distance, "distance to the mode", theme.BLUE, "solid", 1)
        if result.predicted_rate is not None:
            line = distance[0] * result.predicted_rate**steps
            shown = line > max(distance.min(), 1e-16) / 10
            _line(fig, steps[shown], line[shown], "predicted rate", theme.BASELINE, "dot", 1)
        titles.append(theme.titled("Distance", "log scale"))
        fig.update_layout(yaxis2={"type": "log", "exponentformat": "power", "nticks": 7})
    return theme.arrange(
        fig, titles, columns=2, row_height=300, narrow_row_height=240, x_title="step"
    )


def steering_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Alignment with the direction against the price in KL, one mark per condition.

    Args:
        table: :meth:`tl_spectral.steering.SteeringReport.to_dataframe`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    colours = {"steered": theme.BLUE, "additive at equal KL": theme.ORANGE}
    for name, rows in table.groupby("condition", sort=False):
        fig.add_scatter(
            x=column(rows, "kl"),
            y=column(rows, "alignment"),
            mode="markers",
            marker={
                "size": 11,
                "color": colours.get(str(name), theme.BASELINE),
                "symbol": "circle" if name in colours else "circle-open",
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


def _line(fig: go.Figure, x: Any, y: Any, name: str, colour: str, dash: str, panel: int) -> None:
    fig.add_scatter(
        x=x,
        y=theme.small(y),
        mode="lines+markers" if len(x) <= 16 else "lines",
        line={"color": colour, "width": 2, "dash": dash},
        marker={"size": 5},
        name=name,
        legendgroup=name,
        hovertemplate=f"%{{x}}<br>{name} %{{y:.3g}}<extra></extra>",
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )
