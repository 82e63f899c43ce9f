"""The causal check as a figure: bridge units beside matched ones, and how good the match is."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_spectral.plots import theme

_TITLES = (
    ("Change of the block's output", "‖Δy‖ / ‖y‖"),
    ("Gain of the push", "‖Δy‖ / ‖Δx‖"),
    ("Change of the prediction", "KL, nats"),
)


def intervention_figure(intervention: Any, *, template: Any = None) -> go.Figure:
    """Mean effect of the bridge units and of every matched set; then the balance of the match.

    Args:
        intervention: A :class:`tl_spectral.causal.BridgeIntervention`.
        template: A plotly template or its name.

    Returns:
        The figure. Bars at the bridge units are the 95 % interval of the paired difference over
        texts; the last panel holds the covariates before and after matching.
    """
    effects = theme.as_array(intervention.effects)
    fig = theme.new_figure(template)
    titles = []
    for panel, (row, (title, unit)) in enumerate(zip(intervention.rows, _TITLES, strict=True)):
        place = {"xaxis": theme.axis("x", panel), "yaxis": theme.axis("y", panel)}
        means = effects[panel].mean(axis=1)
        spread = np.linspace(-0.15, 0.15, len(means) - 1) if len(means) > 2 else np.zeros(1)
        fig.add_scatter(
            x=theme.small(1 + spread),
            y=theme.small(np.sort(means[1:])),
            mode="markers",
            marker={"size": 7, "color": theme.BASELINE, "opacity": 0.7},
            name="a matched set",
            legendgroup="control",
            showlegend=panel == 0,
            hovertemplate="matched set: %{y:.4g}<extra></extra>",
            **place,
        )
        half = (row["text_high"] - row["text_low"]) / 2
        fig.add_scatter(
            x=[0],
            y=theme.small(means[:1]),
            error_y={
                "type": "data",
                "array": theme.small([half]),
                "color": theme.BLUE,
                "thickness": 1.8,
                "width": 0,
            },
            mode="markers",
            marker={"size": 10, "color": theme.BLUE},
            name="bridge units, 95 % of the difference over texts",
            legendgroup="bridge",
            showlegend=panel == 0,
            hovertemplate="bridge units: %{y:.4g}<extra></extra>",
            **place,
        )
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {
                    "tickvals": [0, 1],
                    "ticktext": ["bridges", "matched"],
                    "range": [-0.5, 1.5],
                    "showgrid": False,
                    "zeroline": False,
                },
                f"yaxis{number}": {"rangemode": "tozero", "nticks": 6},
            }
        )
        titles.append(theme.titled(title, f"{unit}, p = {row['p']:.2g}"))
    rows = list(intervention.balance_rows)[::-1]
    names = [row["covariate"].replace("_", " ") for row in rows]
    for key, colour, words in (
        ("before", theme.ORANGE, "before matching"),
        ("after", theme.INK, "after matching"),
        ("worst", theme.FAINT, "worst matched set"),
    ):
        fig.add_scatter(
            x=theme.small([row[key] for row in rows]),
            y=names,
            mode="markers",
            marker={"size": 9, "color": colour},
            name=words,
            xaxis="x4",
            yaxis="y4",
            hovertemplate=f"{words}, %{{y}}: %{{x:.2f}} sd<extra></extra>",
        )
    titles.append(theme.titled("Quality of the match", "difference in standard deviations"))
    theme.arrange(fig, titles, columns=2, row_height=230, x_title="")
    fig.add_shape(theme.upright(0.0, panel=3))
    return fig.update_layout(
        xaxis4={"zeroline": False}, yaxis4={"type": "category", "showgrid": False}
    )
