"""Figures of one operator's spectrum and of how its character changes with depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column, variants

CHARACTER = (
    "antisymmetric_energy",
    "rotation_index",
    "complex_fraction",
    "henrici",
    "self_alignment",
    "norm_ratio",
)
SIZE = (
    "effective_rank",
    "participation_ratio",
    "stable_rank",
    "spectral_radius",
    "spectral_norm",
    "expanding_fraction",
)
LABELS = {  # metric: (title, unit, log axis, axis from zero)
    "antisymmetric_energy": ("Antisymmetric energy", "share of ‖M‖²", False, True),
    "rotation_index": ("Rotation index", "Σ|Im λ| / Σ|λ|", False, True),
    "complex_fraction": ("Complex eigenvalues", "share", False, True),
    "symmetry_score": ("Symmetry score", "tr M² / ‖M‖²", False, False),
    "henrici": ("Henrici non-normality", "0 = normal", False, True),
    "self_alignment": ("Self-alignment", "writes where it reads", False, True),
    "norm_ratio": ("Update against block", "‖R‖ / ‖J‖", False, True),
    "effective_rank": ("Effective rank", "directions", False, True),
    "participation_ratio": ("Participation ratio", "directions", False, True),
    "stable_rank": ("Stable rank", "directions", False, True),
    "spectral_radius": ("Spectral radius", "max |λ|", True, False),
    "spectral_norm": ("Spectral norm", "σ₁", True, False),
    "numerical_abscissa": ("Numerical abscissa", "λ_max of S", False, False),
    "expanding_fraction": ("Expanding directions", "share |λ| > 1", False, True),
    "condition_number": ("Condition number", "σ₁ / σ_min", True, False),
    "eigenvector_condition": ("Eigenvector condition", "κ₂(V)", True, False),
    "frobenius": ("Frobenius norm", "‖M‖", True, False),
    "trace": ("Trace", "Σ λ", False, False),
}


def label(metric: str) -> tuple[str, str, bool, bool]:
    """Title, unit, whether the axis is logarithmic, whether it starts at zero."""
    return LABELS.get(metric, (metric.replace("_", " ").capitalize(), "", False, False))


def spectrum_figure(spectrum: Any, *, template: Any = None) -> go.Figure:
    """Eigenvalue cloud of one operator with the unit circle, and its singular values.

    Args:
        spectrum: A :class:`tl_spectral.spectrum.Spectrum`.
        template: A plotly template or its name.

    Returns:
        The figure: what lies outside the circle grows, what lies off the real axis turns.
    """
    eigenvalues = theme.as_array(spectrum.eigenvalues)
    sigma = np.sort(theme.as_array(spectrum.singular_values))[::-1]
    fig = theme.new_figure(template)
    _cloud(fig, eigenvalues, panel=0, colour=theme.BLUE, name="eigenvalues")
    fig.add_scatter(
        x=np.arange(1, len(sigma) + 1),
        y=theme.small(sigma),
        mode="lines+markers" if len(sigma) < 24 else "lines",
        line={"color": theme.BLUE, "width": 2},
        hovertemplate="σ<sub>%{x}</sub> = %{y:.4g}<extra></extra>",
        showlegend=False,
        xaxis="x2",
        yaxis="y2",
    )
    fig.update_layout(yaxis2=theme.log_ticks(sigma))
    titles = [
        theme.titled("Eigenvalues", f"{len(eigenvalues)}, {spectrum.units} units"),
        theme.titled("Singular values", "σ"),
    ]
    theme.arrange(fig, titles, columns=2, row_height=340, narrow_row_height=300, x_title=None)
    fig.update_layout(xaxis2={"title": {"text": "index, largest first"}})
    _plane_axes(fig, panels=1, reach=plane_reach([eigenvalues]))
    return fig


def eigenvalue_figure(
    clouds: Mapping[str, Any],
    *,
    discs: Mapping[str, float] | None = None,
    reach: tuple[float, float, float] | None = None,
    template: Any = None,
) -> go.Figure:
    """Eigenvalue clouds of several operators side by side, on the same scale.

    Args:
        clouds: Name (``"trained"``, ``"control"``, …) → complex eigenvalues ``[d]``.
        discs: Name → radius of the disc around 1 that a random update of the same size fills
            (circular law: ‖R‖_F/√d), drawn in grey.
        reach: Least real part, greatest real part and greatest imaginary part to show; fitted to
            the clouds when ``None``. Give it to compare layers on one scale.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    arrays = {name: theme.as_array(values).ravel() for name, values in clouds.items()}
    for panel, (name, values) in enumerate(arrays.items()):
        colour = theme.variant_colour(name)
        if discs and name in discs:
            radius = float(discs[name])
            fig.add_shape(
                type="circle",
                x0=1 - radius,
                x1=1 + radius,
                y0=-radius,
                y1=radius,
                xref=theme.axis("x", panel),
                yref=theme.axis("y", panel),
                line={"color": theme.BASELINE, "width": 1, "dash": "dot"},
                fillcolor=theme.NEUTRAL,
                layer="below",
            )
        _cloud(fig, values, panel=panel, colour=colour, name=name)
    titles = [
        theme.titled(name.capitalize(), f"{len(values)} eigenvalues")
        for name, values in arrays.items()
    ]
    theme.arrange(fig, titles, columns=2, row_height=380, narrow_row_height=300, x_title=None)
    _plane_axes(fig, panels=len(arrays), reach=reach or plane_reach(list(arrays.values())))
    return fig


def plane_reach(clouds: Sequence[Any]) -> tuple[float, float, float]:
    """A window around all clouds and the unit circle, with a little air."""
    values = np.concatenate([np.asarray(c).ravel() for c in clouds])
    values = values[np.isfinite(values.real) & np.isfinite(values.imag)]
    left = min(-1.1, float(values.real.min(initial=0)) * 1.08)
    right = max(1.1, float(values.real.max(initial=0)) * 1.08)
    return left, right, max(1.1, float(np.abs(values.imag).max(initial=0)) * 1.08)


def _cloud(fig: go.Figure, values: Any, *, panel: int, colour: str, name: str) -> None:
    x, y = theme.axis("x", panel), theme.axis("y", panel)
    fig.add_shape(
        type="circle",
        x0=-1,
        x1=1,
        y0=-1,
        y1=1,
        xref=x,
        yref=y,
        line={"color": theme.MUTED, "width": 1},
        layer="below",
    )
    fig.add_scatter(
        x=theme.small(values.real),
        y=theme.small(values.imag),
        mode="markers",
        name=name,
        showlegend=False,
        marker={"color": colour, "size": 5 if len(values) <= 1500 else 3, "opacity": 0.55},
        hovertemplate=f"<b>{name}</b><br>λ = %{{x:.3f}} + %{{y:.3f}} i<extra></extra>",
        xaxis=x,
        yaxis=y,
    )


def _plane_axes(fig: go.Figure, *, panels: int, reach: tuple[float, float, float]) -> None:
    left, right, top = reach
    for panel in range(panels):
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {"range": [left, right], "title": {"text": "Re λ"}},
                f"yaxis{number}": {
                    "range": [-top, top],
                    "scaleanchor": theme.axis("x", panel),
                    "title": {"text": "Im λ"},
                },
            }
        )


def profile_figure(
    table: pd.DataFrame,
    *,
    units: str = "natural",
    estimate: str = "per_sample",
    metrics: Sequence[str] = CHARACTER,
    template: Any = None,
) -> go.Figure:
    """How each metric of J and R changes with depth, beside its control and random baselines.

    Args:
        table: Tidy table with columns layer, operator, metric, value; and, where known, variant,
            units, estimate, standard_error, n_samples, baseline, skip_baseline.
        units: ``"natural"`` or ``"raw"``; the other one is drawn if the table has only that.
        estimate: ``"per_sample"`` or ``"mean_jacobian"``; likewise.
        metrics: One panel each; those that the table lacks are left out.
        template: A plotly template or its name.

    Returns:
        The figure. Bands are the mean ± 1.96 standard errors over samples; dotted grey is a random
        matrix of the same size and norm, dotted purple the identity skip plus a random update.
    """
    frame = narrowed(narrowed(table, "units", units), "estimate", estimate)
    present = [m for m in metrics if frame.loc[frame["metric"] == m, "value"].notna().any()]
    fig = theme.new_figure(template)
    if not present:
        return fig
    named: set[str] = set()
    for panel, metric in enumerate(present):
        rows = frame[frame["metric"] == metric]
        for variant in variants(rows):
            for operator in _operators(rows):
                part = rows[(rows["operator"] == operator)]
                if "variant" in rows:
                    part = part[part["variant"] == variant]
                part = part.sort_values("layer")
                if column(part, "value").size:
                    _metric_line(fig, part, metric, variant, operator, panel, named)
        _baselines(fig, rows, panel, named)
        _title, _unit, log, from_zero = label(metric)
        fig.update_layout(
            {
                f"yaxis{'' if panel == 0 else panel + 1}": {
                    "type": "log" if log else "linear",
                    "rangemode": "tozero" if from_zero else "normal",
                    "nticks": 6,
                },
                f"xaxis{'' if panel == 0 else panel + 1}": theme.layer_axis(column(rows, "layer")),
            }
        )
    titles = [theme.titled(*label(metric)[:2]) for metric in present]
    return theme.arrange(fig, titles, columns=3, row_height=200, narrow_row_height=190)


def narrowed(table: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """The rows where a column has a value; or, if none has it, those of the first value there."""
    if name not in table or table.empty:
        return table
    chosen = value if (table[name] == value).any() else table[name].iloc[0]
    return table[table[name] == chosen]


def _operators(rows: pd.DataFrame) -> list[str]:
    return [name for name in ("J", "R") if (rows["operator"] == name).any()]


def _metric_line(
    fig: go.Figure,
    part: pd.DataFrame,
    metric: str,
    variant: str,
    operator: str,
    panel: int,
    named: set[str],
) -> None:
    layer, value = column(part, "layer"), column(part, "value")
    error = 1.96 * column(part, "standard_error")
    colour, group = theme.variant_colour(variant), f"{variant} {operator}"
    for trace in theme.band(layer, value - error, value + error, colour, panel=panel, group=group):
        fig.add_trace(trace)
    alone = len(layer) == 1 and bool(np.isfinite(error).all())
    fig.add_scatter(
        x=layer,
        y=theme.small(value),
        customdata=theme.small(np.stack([error, column(part, "n_samples")], axis=1)),
        error_y={"type": "data", "array": theme.small(error), "visible": alone, "thickness": 1.5},
        mode="lines+markers" if len(layer) <= 16 else "lines",
        line={"color": colour, "width": 2, "dash": theme.OPERATOR_DASH.get(operator, "solid")},
        marker={"size": 8 if alone else 4, "color": colour},
        name=f"{variant} · {operator}",
        legendgroup=group,
        showlegend=group not in named,
        hovertemplate=(
            f"<b>{variant} · {operator}</b> · layer %{{x}}<br>{label(metric)[0].lower()} "
            "%{y:.4g} ± %{customdata[0]:.2g}<br>%{customdata[1]:.0f} samples<extra></extra>"
        ),
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )
    named.add(group)


def _baselines(fig: go.Figure, rows: pd.DataFrame, panel: int, named: set[str]) -> None:
    """References of the first variant: one random line per operator unless they coincide."""
    if "variant" in rows:
        rows = rows[rows["variant"] == variants(rows)[0]]
    drawn: list[Any] = []
    wanted = [("baseline", op) for op in _operators(rows)] + [("skip_baseline", "J")]
    for kind, operator in wanted:
        part = rows[rows["operator"] == operator].sort_values("layer")
        values = column(part, kind)
        known = np.isfinite(values)
        if not known.any() or any(
            len(values) == len(old) and np.allclose(values, old, rtol=1e-3, equal_nan=True)
            for old in drawn
        ):
            continue
        drawn.append(values)
        skip = kind == "skip_baseline"
        name = "skip + random update" if skip else "random matrix"
        fig.add_scatter(
            x=column(part, "layer")[known],
            y=theme.small(values[known]),
            mode="lines" if known.sum() > 1 else "markers",
            line={
                "color": theme.PURPLE if skip else theme.BASELINE,
                "width": 2 if skip else 1.5,
                "dash": "dot",
            },
            marker={"symbol": "line-ew-open", "size": 18},
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            hovertemplate=f"<b>{name}</b> ({operator})<br>layer %{{x}}: %{{y:.4g}}<extra></extra>",
            xaxis=theme.axis("x", panel),
            yaxis=theme.axis("y", panel),
        )
        named.add(name)
