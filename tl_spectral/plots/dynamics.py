"""The paper's dynamics through the layers of a model: how fast its tokens become one."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column, of_variant, variants

_PANELS = {  # column: (title, unit)
    "order": ("Order", "‖mean x̂‖, 1 is consensus"),
    "mean_cosine": ("Likeness", "mean cosine of two tokens"),
    "effective_rank": ("Width", "effective rank of the tokens"),
}
_DASH = {"real": "solid", "uniform": "dash", "identity": "dot"}


def dynamics_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Order, likeness and rank of the tokens by step, per variant and kind of attention.

    Args:
        table: The run's ``consensus`` table, for one start.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    panels = {name: words for name, words in _PANELS.items() if name in table}
    for variant in variants(table):
        mine = of_variant(table, variant)
        for attention, dash in _DASH.items():
            rows = mine[mine["attention"] == attention].sort_values("step")
            if rows.empty:
                continue
            name = f"{variant} · {attention} attention"
            ended = str(rows["kind"].iloc[-1])
            for panel, measure in enumerate(panels):
                fig.add_scatter(
                    x=column(rows, "step"),
                    y=theme.small(column(rows, measure)),
                    mode="lines",
                    line={"color": theme.variant_colour(variant), "width": 2, "dash": dash},
                    name=name,
                    legendgroup=name,
                    showlegend=panel == 0,
                    hovertemplate=(
                        f"<b>{name}</b>, ends in {ended}<br>after %{{x}} layers "
                        f"{_PANELS[measure][0].lower()} %{{y:.3f}}<extra></extra>"
                    ),
                    xaxis=theme.axis("x", panel),
                    yaxis=theme.axis("y", panel),
                )
    titles = [theme.titled(*words) for words in panels.values()]
    quiet = theme.layer_axis(column(table, "step"))
    fig.update_layout(
        {f"xaxis{'' if i == 0 else i + 1}": quiet for i in range(len(panels))},
        yaxis={"rangemode": "tozero"},
    )
    if "effective_rank" in panels:
        fig.update_layout(yaxis3=theme.log_ticks(column(table, "effective_rank")))
    return theme.arrange(
        fig, titles, columns=3, row_height=260, narrow_row_height=220, x_title="layers applied"
    )
