"""Figures of the OV circuits: one cell per head, and the modes of each layer."""

from __future__ import annotations

from collections.abc import Mapping
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


_RULES = (("with_skip", "|1 + λ|, skip kept"), ("without_skip", "|λ|, skip left out"))
_DASHES = ("solid", "dash", "dot", "dashdot")


def layer_modes_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Strength of the leading modes of each layer's OV matrix under both rules, and condition.

    Args:
        table: :meth:`tl_spectral.ov.OVCircuits.modes_dataframe`, or a run's table of that form.
        template: A plotly template or its name.

    Returns:
        The figure. Lines that run close have no gap between them; a disc is a real mode, a diamond
        a complex one, hollow where the direction cannot be named reliably. Grey dots are a random
        matrix of the same norm. The condition is that of the principal mode.
    """
    fig = theme.new_figure(template)
    for variant in variants(table):
        rows = of_variant(table, variant)
        for panel, (rule, _) in enumerate(_RULES):
            of_rule = rows[rows["rule"] == rule].sort_values("layer")
            for rank in sorted(of_rule["rank"].unique()):
                modes = of_rule[of_rule["rank"] == rank]
                name = f"{variant} · mode {rank}" if "variant" in table else f"mode {rank}"
                dash = _DASHES[min(int(rank), len(_DASHES)) - 1]
                _mode_line(fig, modes, "strength", name, variant, dash, panel, named=panel == 0)
            leading = of_rule[of_rule["rank"] == 1]
            fig.add_scatter(
                x=column(leading, "layer"),
                y=theme.small(column(leading, "baseline_strength")),
                mode="lines",
                line={"color": theme.BASELINE, "width": 1.5, "dash": "dot"},
                name="random matrix of the same norm",
                legendgroup="random",
                showlegend=panel == 0 and variant == variants(table)[0],
                hovertemplate="layer %{x}<br>random matrix %{y:.3f}<extra></extra>",
                xaxis=theme.axis("x", panel),
                yaxis=theme.axis("y", panel),
            )
            dash = _DASHES[panel]
            name = f"{variant}, {rule.replace('_', ' ')}"
            _mode_line(fig, leading, "condition", name, variant, dash, 2, named=False)
    quiet = theme.layer_axis(column(table, "layer"))
    scale = theme.log_ticks(column(table, "condition"))
    fig.update_layout(xaxis=quiet, xaxis2=quiet, xaxis3=quiet, yaxis3=scale)
    titles = [
        theme.titled("Strength with skip", _RULES[0][1]),
        theme.titled("Strength without", _RULES[1][1]),
        theme.titled("Condition of mode 1", "‖y‖‖x‖ / |yᴴx|"),
    ]
    return theme.arrange(fig, titles, columns=3, row_height=260, narrow_row_height=220)


def _mode_line(
    fig: go.Figure,
    rows: pd.DataFrame,
    value: str,
    name: str,
    variant: str,
    dash: str,
    panel: int,
    *,
    named: bool,
) -> None:
    complex_ = (rows["kind"] == "complex").tolist()
    vague = rows["degenerate"].astype(bool).tolist()
    details = [
        f"λ = {a:.3f}{f' ± {b:.3f} i' if b else ''}, gap {gap:.3f}, condition {condition:.3g}"
        + (f"<br>{note}" if note else "")
        for a, b, gap, condition, note in zip(
            column(rows, "eigenvalue_re"),
            column(rows, "eigenvalue_im"),
            column(rows, "gap"),
            column(rows, "condition"),
            rows["note"].astype(object).fillna("").astype(str),
            strict=True,
        )
    ]
    fig.add_scatter(
        x=column(rows, "layer"),
        y=theme.small(column(rows, value)),
        customdata=details,
        mode="lines+markers",
        line={"color": theme.variant_colour(variant), "width": 1.5, "dash": dash},
        marker={
            "size": 7,
            "symbol": [
                ("diamond" if turns else "circle") + ("-open" if unsure else "")
                for turns, unsure in zip(complex_, vague, strict=True)
            ],
        },
        name=name,
        legendgroup=name,
        showlegend=named,
        hovertemplate=(
            f"<b>{name}</b> · layer %{{x}}<br>{value} %{{y:.4g}}<br>%{{customdata}}<extra></extra>"
        ),
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def layer_spectrum_figure(
    eigenvalues: Mapping[Any, Any], norms: Mapping[Any, float], *, template: Any = None
) -> go.Figure:
    """All eigenvalues of ``F_l`` in the complex plane, one panel each, on one scale.

    Args:
        eigenvalues: Layer, or variant of one layer → its
            :meth:`tl_spectral.ov.OVCircuits.layer_eigenvalues`.
        norms: The same → ``‖F_l‖_F``.
        template: A plotly template or its name.

    Returns:
        The figure. The grey disc, of radius ``‖F‖_F / √d``, is what a random matrix of the same
        norm fills (circular law). With the skip connection the dominant eigenvalue is the one
        farthest from the cross at −1, without it the one farthest from 0.
    """
    fig = theme.new_figure(template)
    clouds = {_name(key): theme.as_array(values).ravel() for key, values in eigenvalues.items()}
    sizes = {_name(key): float(norm) for key, norm in norms.items()}
    reach_x, reach_y = [-1.1, 0.1], [0.1]
    for panel, (name, values) in enumerate(clouds.items()):
        x, y = theme.axis("x", panel), theme.axis("y", panel)
        colour = theme.VARIANT_COLOURS.get(name, theme.BLUE)
        radius = sizes[name] / np.sqrt(len(values))
        reach_x += [-radius, radius, values.real.min(), values.real.max()]
        reach_y += [radius, np.abs(values.imag).max()]
        fig.add_shape(
            type="circle",
            **{"x0": -radius, "x1": radius, "y0": -radius, "y1": radius, "xref": x, "yref": y},
            line={"color": theme.BASELINE, "width": 1, "dash": "dot"},
            fillcolor=theme.NEUTRAL,
            layer="below",
        )
        fig.add_scatter(
            x=theme.small(values.real),
            y=theme.small(values.imag),
            mode="markers",
            marker={"color": colour, "size": 5 if len(values) <= 1500 else 3, "opacity": 0.55},
            hovertemplate=(f"<b>{name}</b><br>λ = %{{x:.3f}} + %{{y:.3f}} i<extra></extra>"),
            showlegend=False,
            xaxis=x,
            yaxis=y,
        )
        fig.add_scatter(
            x=[-1],
            y=[0],
            mode="markers",
            marker={"color": theme.INK, "size": 9, "symbol": "x-thin", "line": {"width": 2}},
            hovertemplate="−1: the skip rule measures from here<extra></extra>",
            showlegend=False,
            xaxis=x,
            yaxis=y,
        )
    titles = [
        theme.titled(name.capitalize(), f"{len(values)} eigenvalues")
        for name, values in clouds.items()
    ]
    theme.arrange(fig, titles, columns=3, row_height=300, narrow_row_height=280, x_title=None)
    left, right, top = 1.05 * min(reach_x), 1.05 * max(reach_x), 1.05 * max(reach_y)
    for panel in range(len(clouds)):
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {"range": [left, right], "title": {"text": "Re λ"}},
                f"yaxis{number}": {
                    "range": [-top, top],
                    "scaleanchor": theme.axis("x", panel),
                    "title": {"text": "Im λ" if panel % 3 == 0 else ""},
                },
            }
        )
    return fig


def _name(key: Any) -> str:
    return key if isinstance(key, str) else f"layer {key}"
