"""Figures of the OV circuits: one cell per head, and the principal mode of each layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column, of_variant, variants

OV_LABELS = {  # column: (title, hover name, range, diverging)
    "copying_score": ("Copying score", "Σ Re λ / Σ |λ|", (-1.0, 1.0), True),
    "rotation_index": ("Rotation index", "Σ |Im λ| / Σ |λ|", (0.0, 1.0), False),
    "complex_fraction": ("Complex eigenvalues", "share", (0.0, 1.0), False),
    "spectral_radius": ("Spectral radius", "max |λ|", None, False),
    "frobenius": ("Frobenius norm", "‖OV‖", None, False),
}


def ov_figure(copying_score: Any, *, template: Any = None) -> go.Figure:
    """Heat map of the copying score of every head.

    Args:
        copying_score: Score in [−1, 1], shape ``[layer, head]``.
        template: A plotly template or its name.
    """
    scores = theme.as_array(copying_score)
    layer, head = np.indices(scores.shape)
    table = pd.DataFrame(
        {"layer": layer.ravel(), "head": head.ravel(), "copying_score": scores.ravel()}
    )
    return ov_table_figure(table, template=template)


def ov_table_figure(
    table: pd.DataFrame, *, metric: str = "copying_score", template: Any = None
) -> go.Figure:
    """Heat map of one metric of the OV circuits, layer × head, one panel per variant.

    Args:
        table: The run's ``ov`` table.
        metric: Column to draw.
        template: A plotly template or its name.

    Returns:
        The figure. A dot marks a head whose copying score a random head would also reach (within
        two standard deviations of the random baseline).
    """
    title, unit, limits, diverging = OV_LABELS[metric]
    names = variants(table)
    low, high = limits or (0.0, float(np.nanmax(column(table, metric), initial=1e-12)))
    fig = theme.new_figure(template)
    tall = 0
    for panel, variant in enumerate(names):
        rows = of_variant(table, variant)
        grid = rows.pivot_table(index="layer", columns="head", values=metric, dropna=False)
        tall = max(tall, len(grid.index))
        heads, layers = [str(h) for h in grid.columns], [str(i) for i in grid.index]
        fig.add_heatmap(
            x=heads,
            y=layers,
            z=theme.small(grid.to_numpy(dtype=np.float64)),
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            hovertemplate=(
                f"<b>{variant}</b> · layer %{{y}}, head %{{x}}<br>"
                f"{title.lower()} %{{z:.3f}}<extra></extra>"
            ),
            xaxis=theme.axis("x", panel),
            yaxis=theme.axis("y", panel),
        )
        if metric == "copying_score":
            _like_random(fig, rows, panel)
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {
                    "type": "category",
                    "showgrid": False,
                    "nticks": 12,
                    "range": _edges(heads),
                },
                f"yaxis{number}": {
                    "type": "category",
                    "range": _edges(layers),
                    "showgrid": False,
                    "title": {"text": "layer" if panel == 0 else ""},
                    "nticks": 16,
                },
            }
        )
    fig.update_layout(coloraxis=theme.colour_axis(low, high, diverging=diverging))
    theme.arrange(
        fig,
        [
            theme.titled(
                variant.capitalize() if "variant" in table else "Heads", f"{title.lower()}, {unit}"
            )
            for variant in names
        ],
        columns=2,
        row_height=int(np.clip(15 * tall, 150, 460)),
        narrow_row_height=int(np.clip(12 * tall, 150, 380)),
        x_title="head",
    )
    return fig


def _edges(names: list[str]) -> list[float]:
    """The range of a category axis that ends where its outermost cells end."""
    return [-0.5, len(names) - 0.5]


def _like_random(fig: go.Figure, rows: pd.DataFrame, panel: int) -> None:
    distance = np.abs(column(rows, "copying_score") - column(rows, "baseline_copying_score"))
    chance = distance < 2 * column(rows, "baseline_sd")
    if not chance.any():
        return
    fig.add_scatter(
        x=rows["head"].astype(str)[chance].tolist(),
        y=rows["layer"].astype(str)[chance].tolist(),
        mode="markers",
        marker={"size": 4, "color": theme.MUTED},
        hoverinfo="skip",
        showlegend=False,
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def principal_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """The principal mode of each layer's OV matrix: its eigenvalue's size and its spectral gap.

    Args:
        table: The run's ``ov_layers`` table.
        template: A plotly template or its name.

    Returns:
        The figure. A disc is a real eigenvalue (tokens are drawn to an axis), a diamond a complex
        one (they turn in a plane).
    """
    fig = theme.new_figure(template)
    for variant in variants(table):
        for rule, dash in (("with_skip", "solid"), ("without_skip", "dot")):
            rows = of_variant(table, variant)
            rows = rows[rows["rule"] == rule].sort_values("layer")
            if rows.empty:
                continue
            real, imaginary = column(rows, "eigenvalue_re"), column(rows, "eigenvalue_im")
            kinds = rows["kind"].astype(str).tolist()
            name = f"{variant} · {rule.replace('_', ' ')}"
            size = np.hypot(real + (rule == "with_skip"), imaginary)
            for panel, values in enumerate((size, column(rows, "gap"))):
                fig.add_scatter(
                    x=column(rows, "layer"),
                    y=theme.small(values),
                    customdata=[
                        f"{k}, λ = {a:.3f} {'+' if b >= 0 else '−'} {abs(b):.3f} i"
                        for k, a, b in zip(kinds, real, imaginary, strict=True)
                    ],
                    mode="lines+markers",
                    line={"color": theme.variant_colour(variant), "width": 1.5, "dash": dash},
                    marker={
                        "size": 7,
                        "symbol": ["circle" if k == "real" else "diamond-open" for k in kinds],
                    },
                    name=name,
                    legendgroup=name,
                    showlegend=panel == 0,
                    hovertemplate=(
                        f"<b>{name}</b> · layer %{{x}}<br>%{{customdata}}<br>%{{y:.3f}}"
                        "<extra></extra>"
                    ),
                    xaxis=theme.axis("x", panel),
                    yaxis=theme.axis("y", panel),
                )
    titles = [
        theme.titled("Size of the principal mode", "|1 + λ| with skip, |λ| without"),
        theme.titled("Spectral gap", "ratio to the next mode"),
    ]
    quiet = theme.layer_axis(column(table, "layer"))
    fig.update_layout(xaxis=quiet, xaxis2=quiet, yaxis={"rangemode": "tozero"})
    return theme.arrange(fig, titles, columns=2, row_height=240, narrow_row_height=200)
