"""Chains after surgery, and growth over depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column

_STYLE = {  # kind: (colour, dash)
    "original": (theme.BLUE, "solid"),
    "normal": (theme.VERMILLION, "solid"),
    "matched": (theme.VERMILLION, "dash"),
    "shuffled": (theme.ORANGE, "solid"),
    "rotated": (theme.ORANGE, "dash"),
    "symmetric": (theme.INK, "solid"),
    "antisymmetric": (theme.INK, "dash"),
    "fixed_skip": (theme.SKY, "dash"),
    "random_update": (theme.PURPLE, "dot"),
}
_LOG10 = float(np.log(10))
_GROWTH = {  # column: (name, colour, dash)
    "log_sigma": ("σ₁ of the product", theme.BLUE, "solid"),
    "log_sigma_bound": ("product of σ₁", theme.FAINT, "dash"),
    "log_radius_sum": ("product of spectral radii", theme.VERMILLION, "dash"),
    "log_radius": ("spectral radius of the product", theme.VERMILLION, "solid"),
    "baseline_log_sigma": ("σ₁, skip with random updates", theme.PURPLE, "dot"),
}
_ABSCISSAE = {
    "numerical_abscissa": ("numerical abscissa of R", theme.BLUE, "solid"),
    "spectral_abscissa": ("spectral abscissa of R", theme.VERMILLION, "solid"),
    "baseline_numerical_abscissa": ("numerical, random R", theme.BASELINE, "dot"),
    "baseline_spectral_abscissa": ("spectral, random R", theme.BASELINE, "dash"),
}


def surgery_figure(
    table: pd.DataFrame, *, estimate: str = "per_sample", template: Any = None
) -> go.Figure:
    """Effective rank and largest singular value by depth: medians over prompts and seeds.

    Args:
        table: The table of a :class:`tl_spectral.surgery_chains.SurgeryTable`.
        estimate: ``"per_sample"`` or ``"mean_jacobian"``; the other one if there is only that.
        template: A plotly template or its name.
    """
    mine = table[table["estimate"] == estimate]
    rows = table if mine.empty else mine
    fig = theme.new_figure(template)
    panels = (("effective_rank", 1.0, "effective rank"), ("log_sigma_1", _LOG10, "log₁₀ σ₁"))
    for kind, part in rows.groupby("kind", sort=False):
        colour, dash = _STYLE[str(kind)]
        by_layer = part.groupby("layer", as_index=False)
        middle = by_layer.median(numeric_only=True)
        name = str(kind).replace("_", " ")
        for panel, (value, unit, title) in enumerate(panels):
            fig.add_scatter(
                x=column(middle, "layer"),
                y=theme.small(column(middle, value) / unit),
                mode="lines+markers" if len(middle) == 1 else "lines",
                line={"color": colour, "width": 3 if kind == "original" else 2, "dash": dash},
                name=name,
                legendgroup=name,
                showlegend=panel == 0,
                hovertemplate=(
                    f"<b>{name}</b><br>through layer %{{x}}: {title} %{{y:.3g}}<extra></extra>"
                ),
                xaxis=theme.axis("x", panel),
                yaxis=theme.axis("y", panel),
            )
    first = rows.drop_duplicates("layer").sort_values("layer")
    _line(fig, first, "baseline_effective_rank", ("random blocks", theme.BASELINE, "dot"), 0, 1.0)
    titles = [
        theme.titled("Width of the funnel", "effective rank, directions"),
        theme.titled("Largest growth", "log₁₀ σ₁"),
    ]
    fig.update_layout(
        yaxis=theme.log_ticks(column(rows, "effective_rank")),
        yaxis2={"nticks": 7},
        xaxis=theme.layer_axis(column(rows, "layer")),
        xaxis2=theme.layer_axis(column(rows, "layer")),
    )
    return theme.arrange(
        fig, titles, columns=2, row_height=320, narrow_row_height=250, x_title="through layer"
    )


def growth_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Growth over depth against what eigenvalues promise, and the abscissae of each update.

    Args:
        table: The table of a :class:`tl_spectral.growth.Growth`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    if "baseline_low" in table:
        for trace in theme.band(
            column(table, "layer"),
            column(table, "baseline_low") / _LOG10,
            column(table, "baseline_high") / _LOG10,
            theme.PURPLE,
            panel=0,
            group=_GROWTH["baseline_log_sigma"][0],
        ):
            fig.add_trace(trace)
    for name, style in _GROWTH.items():
        if name in table:
            _line(fig, table, name, style, 0, _LOG10)
    for name, style in _ABSCISSAE.items():
        _line(fig, table, name, style, 1, 1.0)
    titles = [
        theme.titled("Growth of perturbations", "log₁₀, through layer"),
        theme.titled("Growth of one update", "at once (numerical), in the long run (spectral)"),
    ]
    quiet = theme.layer_axis(column(table, "layer"))
    fig.update_layout(xaxis=quiet, xaxis2=quiet, yaxis={"nticks": 7})
    return theme.arrange(
        fig, titles, columns=2, row_height=320, narrow_row_height=250, x_title="layer"
    )


def _line(
    fig: go.Figure,
    rows: pd.DataFrame,
    value: str,
    style: tuple[str, str, str],
    panel: int,
    unit: float,
) -> None:
    name, colour, dash = style
    fig.add_scatter(
        x=column(rows, "layer"),
        y=theme.small(column(rows, value) / unit),
        mode="lines+markers" if len(rows) == 1 else "lines",
        line={"color": colour, "width": 2, "dash": dash},
        name=name,
        legendgroup=name,
        hovertemplate=f"<b>{name}</b><br>layer %{{x}}: %{{y:.3g}}<extra></extra>",
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )
