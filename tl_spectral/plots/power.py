"""Figures of the power method: alignment by layer, the road to consensus, and oversmoothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column, of_variant, variants

_CONTROLS = {"other layer": "dash", "random F": "dot", "v2": "dashdot"}
_LIKENESS = {
    "order": ("Order", "‖mean x̂‖"),
    "mean_cosine": ("Mean cosine", "of two tokens"),
    "effective_rank": ("Effective rank", "of the tokens"),
    "stable_rank": ("Stable rank", "of the tokens"),
    "residual": ("Residual", "‖X − 1x̄ᵀ‖ / ‖X‖"),
}


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
    for name, dash in _CONTROLS.items():
        rows = text[text["target"] == name]
        lines += [(rows, f"{name}, text", "rho", theme.BASELINE, dash, 1)]
    lines += [(v1, "v1, text", "rho", theme.BLUE, "solid", 1)]
    drawn = table[(table["tokens"] == "random") & (table["target"].isin(["v1", "random F"]))]
    for target, colour in (("v1", theme.BLUE), ("random F", theme.BASELINE)):
        rows = drawn[drawn["target"] == target]
        lines += [(rows, f"{target}, random tokens", "rho", colour, "dash", 2)]
    foretold = drawn[drawn["target"] == "v1"]
    lines += [(foretold, "v1, predicted from M", "predicted_rho", theme.INK, "dot", 2)]
    lines += [(v1, "‖Mᵀv1‖", "criterion_left", theme.BLUE, "solid", 3)]
    lines += [(v1, "‖M‖ / √d", "criterion_right", theme.BASELINE, "dot", 3)]
    bounds = column(v1, "rho_low"), column(v1, "rho_high")
    fig.add_traces(theme.band(layers, *bounds, theme.BLUE, panel=1, group="v1, text"))
    for rows, name, measure, colour, dash, panel in lines:
        if len(rows):
            _line(fig, column(rows, "layer"), column(rows, measure), name, colour, dash, panel)
            if panel == 1 and colour == theme.BASELINE:  # three of them cross each other
                fig.data[-1].line.width = 1.25
    axes = {f"xaxis{'' if i == 0 else i + 1}": theme.layer_axis(layers) for i in range(4)}
    share = {"range": [-0.02, 1.02]}
    fig.update_layout(
        axes,
        shapes=[theme.level(0.5, panel=1), theme.level(0.5, panel=2)],
        yaxis={"rangemode": "tozero"},
        yaxis2=share,
        yaxis3=share,
        yaxis4={"rangemode": "tozero"},
    )
    titles = [
        theme.titled("Alignment with v1", "γ, text tokens"),
        theme.titled("Text tokens that tilt towards it", "share ρ"),
        theme.titled("Random tokens that do", "share ρ, through M alone"),
        theme.titled("Why they do", "ρ > ½ where the line is above the dots"),
    ]
    return theme.arrange(fig, titles, columns=2, row_height=230, narrow_row_height=210)


def consensus_figure(result: Any, *, template: Any = None) -> go.Figure:
    """Order, alignment, rank and distance to the dominant mode by step.

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
    _line(fig, steps, theme.as_array(result.effective_rank), "rank", theme.BLUE, "solid", 1)
    fig.data[-1].update(showlegend=False, legendgroup=None)
    titles = [
        theme.titled("Road to consensus", result.kind),
        theme.titled("Effective rank", "of the tokens"),
    ]
    fig.update_layout(yaxis={"range": [0, 1.03]}, yaxis2={"rangemode": "tozero"})
    if result.distance is not None:
        distance = theme.as_array(result.distance)
        _line(fig, steps, distance, "distance to the mode", theme.BLUE, "solid", 2)
        if result.predicted_rate is not None:
            line = distance[0] * result.predicted_rate**steps
            shown = line > max(distance.min(), 1e-16) / 10
            _line(fig, steps[shown], line[shown], "predicted rate", theme.BASELINE, "dot", 2)
        titles.append(theme.titled("Distance to the mode", "log scale"))
        fig.update_layout(yaxis3={"type": "log", "exponentformat": "power", "nticks": 7})
    return theme.arrange(
        fig, titles, columns=len(titles), row_height=300, narrow_row_height=240, x_title="step"
    )


def oversmoothing_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """How alike the tokens of a text are, by layer boundary, beside isotropic tokens.

    Args:
        table: :meth:`tl_spectral.oversmoothing.Oversmoothing.to_dataframe`, or some of its rows;
            dashed lines are all tokens where there are also those without the first.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    panels = {name: words for name, words in _LIKENESS.items() if (table["measure"] == name).any()}
    several = table["tokens"].nunique() > 1
    for panel, measure in enumerate(panels):
        measured = table[table["measure"] == measure]
        for variant in variants(table):
            colour = theme.variant_colour(variant)
            for tokens, rows in of_variant(measured, variant).groupby("tokens", sort=False):
                words = {"all": "all tokens", "rest": "without the first"}[str(tokens)]
                name = f"{variant}, {words}" if several else variant
                dash = "dash" if several and tokens == "all" else "solid"
                at = column(rows, "boundary")
                bounds = column(rows, "low"), column(rows, "high")
                fig.add_traces(theme.band(at, *bounds, colour, panel=panel, group=name))
                _line(fig, at, column(rows, "value"), name, colour, dash, panel)
                fig.data[-1].update(showlegend=panel == 0)
        rows = of_variant(measured, variants(table)[0])
        rows = rows[rows["tokens"] == rows["tokens"].iloc[-1]]
        name = "isotropic tokens"
        at, level = column(rows, "boundary"), column(rows, "baseline")
        _line(fig, at, level, name, theme.BASELINE, "dot", panel)
        fig.data[-1].update(showlegend=panel == 0, mode="lines")
    quiet = theme.layer_axis(column(table, "boundary"))
    fig.update_layout(
        {f"xaxis{'' if i == 0 else i + 1}": quiet for i in range(len(panels))},
        **{f"yaxis{'' if i == 0 else i + 1}": {"rangemode": "tozero"} for i in range(len(panels))},
    )
    return theme.arrange(
        fig,
        [theme.titled(*words) for words in panels.values()],
        columns=3,
        row_height=220,
        x_title="blocks passed",
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
