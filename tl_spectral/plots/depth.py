"""The funnel: how many directions of a perturbation survive the composition of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.spectra import narrowed
from tl_spectral.plots.tables import column, of_variant, variants

_LOG10 = float(np.log(10))


def chain_figure(chain: Any, *, template: Any = None) -> go.Figure:
    """Effective rank and leading singular values of a product of Jacobians, by depth.

    Args:
        chain: A :class:`tl_spectral.chain.ChainResult`.
        template: A plotly template or its name.
    """
    layers = np.asarray(chain.layers)
    fig = theme.new_figure(template)
    for values, name, dash in (
        (chain.effective_rank, "effective rank", "solid"),
        (chain.participation_ratio, "participation ratio", "dash"),
        (chain.baseline_effective_rank, "effective rank of random matrices", "dot"),
    ):
        colour = theme.BASELINE if dash == "dot" else theme.BLUE
        fig.add_scatter(
            x=layers,
            y=theme.small(theme.as_array(values)),
            mode="lines+markers" if len(layers) <= 16 else "lines",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 5},
            name=name,
            legendgroup=name,
            hovertemplate=f"through layer %{{x}}<br>{name} %{{y:.2f}}<extra></extra>",
        )
    sigma = theme.as_array(chain.log_singular_values) / _LOG10
    for i in range(min(5, sigma.shape[1])):
        _sigma_line(fig, layers, sigma[:, i], i, theme.BLUE, "")
    titles = [
        theme.titled("Width of the funnel", "directions"),
        theme.titled("Leading singular values", "log₁₀ σ"),
    ]
    fig.update_layout(
        yaxis=theme.log_ticks(theme.as_array(chain.effective_rank)),
        yaxis2={"nticks": 6},
        xaxis=theme.layer_axis(layers),
        xaxis2=theme.layer_axis(layers),
    )
    return theme.arrange(
        fig, titles, columns=2, row_height=300, narrow_row_height=240, x_title="through layer"
    )


def funnel_figure(
    table: pd.DataFrame, *, units: str = "natural", template: Any = None
) -> go.Figure:
    """The funnel of a run: every sample, their median, and the product of mean Jacobians.

    Args:
        table: The run's ``chain`` table.
        units: ``"natural"`` or ``"raw"``; the other one is drawn if the table has only that.
        template: A plotly template or its name.

    Returns:
        The figure: effective rank by depth (log axis), and the five leading singular values of the
        median sample.
    """
    frame = narrowed(table, "units", units)
    fig = theme.new_figure(template)
    for variant in variants(frame):
        rows = of_variant(frame, variant)
        colour = theme.variant_colour(variant)
        samples = rows[rows["estimate"] == "per_sample"]
        mean = rows[rows["estimate"] == "mean_jacobian"].sort_values("layer")
        _sample_lines(fig, samples, variant, colour)
        if len(samples):
            median = samples.groupby("layer", as_index=False).median(numeric_only=True)
            _rank_line(fig, median, f"{variant} · median sample", colour, "solid", 3)
            for i in range(5):
                sigma = column(median, f"log_sigma_{i + 1}") / _LOG10
                _sigma_line(fig, column(median, "layer"), sigma, i, colour, variant)
        if len(mean):
            _rank_line(fig, mean, f"{variant} · mean Jacobian", colour, "dash", 2)
    _product_baseline(fig, frame)
    titles = [
        theme.titled("Width of the funnel", "effective rank, directions"),
        theme.titled("Growth of the leading directions", "log₁₀ σ₁ … σ₅"),
    ]
    fig.update_layout(
        yaxis=theme.log_ticks(column(frame, "effective_rank")),
        yaxis2={"nticks": 7},
        xaxis=theme.layer_axis(column(frame, "layer")),
        xaxis2=theme.layer_axis(column(frame, "layer")),
    )
    return theme.arrange(
        fig,
        titles,
        columns=2,
        row_height=330,
        narrow_row_height=260,
        x_title="through layer",
    )


def _sample_lines(fig: go.Figure, samples: pd.DataFrame, variant: str, colour: str) -> None:
    """All samples as one trace, so that a hundred of them stay light."""
    x: list[float | None] = []
    y: list[float | None] = []
    for _, rows in samples.groupby("sample"):
        ordered = rows.sort_values("layer")
        x += [*column(ordered, "layer"), None]
        y += [*np.round(column(ordered, "effective_rank"), 3), None]
    if not x:
        return
    fig.add_scatter(
        x=x[:-1],
        y=y[:-1],
        mode="lines" if samples["layer"].nunique() > 1 else "markers",
        line={"color": colour, "width": 1},
        opacity=0.3,
        name=f"{variant} · each sample",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=f"{variant} · median sample",
    )


def _rank_line(
    fig: go.Figure, rows: pd.DataFrame, name: str, colour: str, dash: str, width: int
) -> None:
    fig.add_scatter(
        x=column(rows, "layer"),
        y=theme.small(column(rows, "effective_rank")),
        customdata=theme.small(column(rows, "resolved_rank")),
        mode="lines+markers" if len(rows) == 1 else "lines",
        line={"color": colour, "width": width, "dash": dash},
        name=name,
        legendgroup=name,
        hovertemplate=(
            f"<b>{name}</b><br>through layer %{{x}}: effective rank %{{y:.1f}}"
            "<br>%{customdata:.0f} singular values resolved<extra></extra>"
        ),
    )


def _sigma_line(
    fig: go.Figure, layers: Any, values: Any, index: int, colour: str, variant: str
) -> None:
    if not np.isfinite(values).any():
        return
    head = f"<b>{variant}</b> · " if variant else ""
    fig.add_scatter(
        x=layers,
        y=theme.small(values),
        mode="lines+markers" if len(values) == 1 else "lines",
        opacity=1 - 0.17 * index,
        line={"color": colour, "width": 2.4 - 0.35 * index},
        showlegend=False,
        legendgroup=f"{variant} · median sample",
        hovertemplate=(
            f"{head}through layer %{{x}}<br>log₁₀ σ<sub>{index + 1}</sub> = %{{y:.2f}}"
            "<extra></extra>"
        ),
        xaxis="x2",
        yaxis="y2",
    )


def _product_baseline(fig: go.Figure, frame: pd.DataFrame) -> None:
    first = of_variant(frame, variants(frame)[0]).drop_duplicates("layer").sort_values("layer")
    values = column(first, "baseline_effective_rank")
    if not np.isfinite(values).any():
        return
    fig.add_scatter(
        x=column(first, "layer"),
        y=theme.small(values),
        mode="lines" if len(values) > 1 else "markers",
        line={"color": theme.BASELINE, "width": 1.5, "dash": "dot"},
        name="product of random blocks",
        legendgroup="product of random blocks",
        hovertemplate="<b>random blocks</b><br>%{x}: %{y:.1f} directions<extra></extra>",
    )
