"""Runs side by side: metrics by depth, and over training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from tl_spectral.plots import theme
from tl_spectral.plots.tables import column

HEADLINES = (  # family, metric, operator, units, title, unit
    ("spectra", "antisymmetric_energy", "R", "natural", "Antisymmetric energy", "of R, natural"),
    ("spectra", "rotation_index", "R", "raw", "Rotation index", "of R"),
    ("spectra", "henrici", "R", "natural", "Henrici non-normality", "of R, natural"),
    ("spectra", "norm_ratio", "J", "raw", "Update against block", "‖R‖ / ‖J‖"),
    ("chain", "effective_rank", "J", "raw", "Effective rank so far", "of the product, raw"),
    ("coupling", "unit_rho", "J", "raw", "Coupling", "partial ρ(P, log gain)"),
    ("communities", "z_score", "", "", "Communities", "z of modularity"),
    ("ov", "copying_score", "", "raw", "Copying score", "mean over heads"),
)
_PALETTE = (
    theme.BLUE,
    theme.VERMILLION,
    theme.SKY,
    theme.ORANGE,
    theme.INK,
    theme.BASELINE,
    theme.FAINT,
)
_TRAINING = [[0.0, theme.FAINT], [0.5, theme.SKY], [1.0, theme.DEEP]]
_KEYS = ("family", "metric", "operator", "units")


def headline_rows(table: pd.DataFrame) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The main metrics that a table of a comparison holds, with their rows."""
    found: list[tuple[tuple[str, ...], pd.DataFrame]] = []
    for line in HEADLINES:
        mask = np.ones(len(table), dtype=bool)
        for name, value in zip(_KEYS, line[:4], strict=True):
            mask &= (table[name].fillna("") == value).to_numpy()
        if mask.any():
            found.append((line, table[mask]))
    return found


def compare_figure(
    table: pd.DataFrame,
    labels: Sequence[str],
    steps: Sequence[float | int | None],
    *,
    template: Any = None,
) -> go.Figure:
    """The main metrics by depth, one line per run, with 95 % bands where they are known.

    Args:
        table: :meth:`tl_spectral.compare.Comparison.to_dataframe`.
        labels: The runs, in order.
        steps: Their training steps; runs that have one are coloured by it, from pale to dark.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    lines = headline_rows(table)
    colours = _colours(steps)
    by_layer = table.groupby("run")["layer"].unique().map(lambda v: tuple(sorted(v))).nunique() == 1
    at = "layer" if by_layer else "depth"
    titles = []
    for panel, (line, rows) in enumerate(lines):
        for label, colour in zip(labels, colours, strict=True):
            of = rows[rows["run"] == label].sort_values("layer")
            x = column(of, at)
            place = {"xaxis": theme.axis("x", panel), "yaxis": theme.axis("y", panel)}
            if len(labels) <= 4:
                for band in theme.band(
                    x, column(of, "low"), column(of, "high"), colour, panel=panel, group=label
                ):
                    fig.add_trace(band)
            fig.add_scatter(
                x=x,
                y=theme.small(column(of, "value")),
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"size": 4},
                name=label,
                legendgroup=label,
                showlegend=panel == 0,
                hovertemplate=f"<b>{label}</b><br>{at} %{{x:.3g}}: %{{y:.4g}}<extra></extra>",
                **place,
            )
        titles.append(theme.titled(line[4], line[5]))
        number = "" if panel == 0 else str(panel + 1)
        ticks = theme.layer_axis(column(table, "layer")) if by_layer else {"range": [-0.03, 1.03]}
        fig.update_layout({f"xaxis{number}": ticks, f"yaxis{number}": {"nticks": 6}})
    if lines:
        theme.arrange(
            fig,
            titles,
            columns=3,
            row_height=200,
            x_title="layer" if by_layer else "relative depth",
        )
    return fig


def trajectory_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """The main metrics over training: mean over layers, and the first and last third of them.

    Args:
        table: :meth:`tl_spectral.compare.Comparison.trajectory`.
        template: A plotly template or its name.

    Returns:
        The figure; steps on a log scale, step 0 one place left of the first.
    """
    fig = theme.new_figure(template)
    titles = []
    lines = headline_rows(table)
    steps = np.unique(column(table, "step"))
    place, words = _step_axis(steps)
    for panel, (line, rows) in enumerate(lines):
        rows = rows.sort_values("step")
        x = [place[step] for step in rows["step"]]
        for name, colour, dash, text in (
            ("mean", theme.BLUE, "solid", "all layers"),
            ("early", theme.VERMILLION, "dot", "first third"),
            ("late", theme.INK, "dash", "last third"),
            ("baseline", theme.FAINT, "solid", "baseline"),
        ):
            if rows[name].isna().all():
                continue
            fig.add_scatter(
                x=x,
                y=theme.small(column(rows, name)),
                text=[f"{step:g}" for step in rows["step"]],
                mode="lines+markers" if name != "baseline" else "lines",
                line={"color": colour, "width": 2 if name == "mean" else 1.4, "dash": dash},
                marker={"size": 5},
                name=text,
                legendgroup=text,
                showlegend=panel == 0,
                hovertemplate=f"{text}, step %{{text}}: %{{y:.4g}}<extra></extra>",
                xaxis=theme.axis("x", panel),
                yaxis=theme.axis("y", panel),
            )
        titles.append(theme.titled(line[4], line[5]))
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {**words, "zeroline": False},
                f"yaxis{number}": {"nticks": 6},
            }
        )
    if lines:
        theme.arrange(fig, titles, columns=3, row_height=200, x_title="training step")
    return fig


def _step_axis(steps: np.ndarray) -> tuple[dict[float, float], dict[str, Any]]:
    """Where each step lies on a log axis that has room for 0, and its ticks."""
    positive = steps[steps > 0]
    least = np.log10(positive.min()) if positive.size else 0.0
    gap = max(0.3, (np.log10(positive.max()) - least) / 12) if positive.size else 1.0
    place = {float(s): float(np.log10(s)) if s > 0 else float(least - gap) for s in steps}
    shown, last = [], -np.inf
    for step in steps:
        if place[float(step)] - last >= gap:
            shown.append(float(step))
            last = place[float(step)]
    return place, {
        "tickvals": [place[step] for step in shown],
        "ticktext": [f"{step:g}" for step in shown],
    }


def _colours(steps: Sequence[float | int | None]) -> list[str]:
    trained = sorted(step for step in steps if step is not None)
    others = iter(_PALETTE[1:] * len(steps) if trained else _PALETTE * len(steps))
    return [
        next(others)
        if step is None
        else str(
            sample_colorscale(
                _TRAINING, [trained.index(step) / max(1, len(trained) - 1)], colortype="rgb"
            )[0]
        )
        for step in steps
    ]
