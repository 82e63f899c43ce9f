"""Figures of the coupling between a unit's place in the graph and its gain under the Jacobian."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from tl_spectral.plots import theme
from tl_spectral.plots.spectra import label, narrowed
from tl_spectral.plots.tables import column, of_variant, variants

SIGNIFICANT_Q = 0.05


def coupling_figure(coupling: Any, *, template: Any = None) -> go.Figure:
    """One layer: the correlations, and the gain and participation of every unit behind them.

    Args:
        coupling: A :class:`tl_spectral.coupling.CouplingResult`.
        template: A plotly template or its name.

    Returns:
        The figure. On the left, the coupling with its 95 % interval, the same before anything was
        regressed out and over communities, and below them how each confound goes with gain.
    """
    used = theme.as_array(coupling.used).astype(bool)
    participation, gain = (theme.as_array(v) for v in (coupling.participation, coupling.log_gain))
    bridge = theme.as_array(coupling.is_bridge).astype(bool)
    fig = theme.new_figure(template)
    for chosen, name, colour in (
        (used & ~bridge, "other units", theme.BASELINE),
        (used & bridge, "bridge units", theme.GREEN),
    ):
        fig.add_scatter(
            x=theme.small(participation[chosen]),
            y=theme.small(gain[chosen]),
            customdata=np.flatnonzero(chosen).astype(np.int32),
            mode="markers",
            marker={"size": 6, "color": colour, "opacity": 0.7},
            name=name,
            xaxis="x2",
            yaxis="y2",
            hovertemplate=(
                "<b>unit %{customdata}</b><br>P = %{x:.3f}, log gain %{y:.3f}<extra></extra>"
            ),
        )
    low, high = coupling.unit_interval
    rows = [
        ("units, confounds out", coupling.unit_rho, low, high, theme.BLUE),
        ("units, raw", coupling.raw_rho, np.nan, np.nan, theme.BLUE),
        ("communities", coupling.community_rho, np.nan, np.nan, theme.BLUE),
    ]
    rows += [
        (f"{name.replace('_', ' ')} with gain", with_gain, np.nan, np.nan, theme.BASELINE)
        for name, _with_participation, with_gain in coupling.confound_table
    ]
    rows.reverse()
    names, values, lows, highs, colours = zip(*rows, strict=True)
    rho = np.array(values, dtype=float)
    fig.add_scatter(
        x=theme.small(rho),
        y=list(names),
        error_x={
            "type": "data",
            "symmetric": False,
            "array": theme.small(np.array(highs) - rho),
            "arrayminus": theme.small(rho - np.array(lows)),
            "color": theme.BLUE,
            "thickness": 1.6,
            "width": 0,
        },
        mode="markers",
        marker={"size": 9, "color": list(colours)},
        showlegend=False,
        hovertemplate="%{y}: ρ = %{x:.3f}<extra></extra>",
    )
    where = "" if coupling.layer is None else f"layer {coupling.layer}, {coupling.operator}"
    titles = [theme.titled("Correlations", "Spearman ρ"), theme.titled("Gain of units", where)]
    theme.arrange(
        fig,
        titles,
        columns=2,
        row_height=320,
        narrow_row_height=260,
        x_title="",
    )
    fig.add_shape(theme.upright(0.0))
    return fig.update_layout(
        xaxis={"range": [-1.05, 1.05], "zeroline": False},
        yaxis={"type": "category", "showgrid": False},
        xaxis2={"title": {"text": "participation P"}},
        yaxis2={"title": {"text": "log gain, median = 0"}},
    )


def coupling_layers_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """The coupling at every layer: unit level, effect size, and community level.

    Args:
        table: The run's ``coupling`` table.
        template: A plotly template or its name.

    Returns:
        The figure. Bars are 95 % intervals; a filled disc is a layer with q < 0.05 over all layers;
        a small dash is the correlation before the confounds were partialled out.
    """
    fig = theme.new_figure(template)
    names = variants(table)
    panels = (
        ("unit_rho", "unit_low", "unit_high", "unit_q"),
        ("cohens_d", "cohens_low", "cohens_high", ""),
        ("community_rho", "", "", "community_q"),
    )
    titles = (
        ("Units", "partial Spearman ρ(P, log gain)"),
        ("Bridges against the rest", "Cohen's d of log gain"),
        ("Communities", "Spearman ρ of their means"),
    )
    shown = [i for i, p in enumerate(panels) if np.isfinite(column(table, p[0])).any()]
    for panel, i in enumerate(shown):
        value, low, high, q = panels[i]
        for k, variant in enumerate(names):
            rows = of_variant(table, variant).sort_values("layer")
            shift = 0.3 * (k - (len(names) - 1) / 2)  # side by side, so that bars do not overlap
            _layer_points(fig, rows, variant, panel, (value, low, high, q), shift)
            if value == "unit_rho":
                _raw_marks(fig, rows, variant, panel, shift)
        fig.add_shape(theme.level(0.0, panel=panel))
        number = "" if panel == 0 else str(panel + 1)
        quiet = theme.layer_axis(column(table, "layer")) | {"showgrid": False}
        upward = {"nticks": 6, "zeroline": False}
        fig.update_layout({f"xaxis{number}": quiet, f"yaxis{number}": upward})
    if not shown:
        return fig
    return theme.arrange(
        fig,
        [theme.titled(*titles[i]) for i in shown],
        columns=3,
        row_height=280,
        narrow_row_height=210,
    )


def _layer_points(
    fig: go.Figure,
    rows: pd.DataFrame,
    variant: str,
    panel: int,
    names: tuple[str, str, str, str],
    shift: float,
) -> None:
    value, low, high = (column(rows, name) for name in names[:3])
    q = column(rows, names[3])
    colour, layer = theme.variant_colour(variant), column(rows, "layer")
    filled = q < SIGNIFICANT_Q if names[3] else np.sign(low) * np.sign(high) > 0
    fig.add_scatter(
        x=theme.small(layer + shift),
        y=theme.small(value),
        customdata=theme.small(np.stack([layer, low, high, q], axis=1)),
        error_y={
            "type": "data",
            "symmetric": False,
            "array": theme.small(high - value),
            "arrayminus": theme.small(value - low),
            "thickness": 1.4,
            "width": 0,
            "color": colour,
        },
        mode="markers",
        marker={
            "size": 7,
            "color": [colour if f else theme.SURFACE for f in filled],
            "line": {"width": 1.6, "color": colour},
        },
        name=variant,
        legendgroup=variant,
        showlegend=panel == 0,
        hovertemplate=(
            f"<b>{variant}</b> · layer %{{customdata[0]:.0f}}<br>%{{y:.3f}}"
            + (" (%{customdata[1]:.3f} to %{customdata[2]:.3f})" if names[1] else "")
            + ("<br>q = %{customdata[3]:.2g}" if names[3] else "")
            + "<extra></extra>"
        ),
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def _raw_marks(fig: go.Figure, rows: pd.DataFrame, variant: str, panel: int, shift: float) -> None:
    raw = column(rows, "raw_rho")
    if not np.isfinite(raw).any():
        return
    fig.add_scatter(
        x=theme.small(column(rows, "layer") + shift),
        y=theme.small(raw),
        mode="markers",
        marker={
            "symbol": "line-ew-open",
            "size": 7,
            "line": {"width": 1.6},
            "color": theme.variant_colour(variant),
        },
        opacity=0.6,
        name=f"{variant}, nothing partialled out",
        legendgroup=f"{variant}, nothing partialled out",
        hovertemplate=f"<b>{variant}</b>, nothing partialled out<br>%{{y:.3f}}<extra></extra>",
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def character_figure(
    coupling: pd.DataFrame,
    spectra: pd.DataFrame,
    *,
    character: str = "antisymmetric_energy",
    operator: str = "R",
    units: str = "natural",
    trend: pd.DataFrame | None = None,
    template: Any = None,
) -> go.Figure:
    """The headline: coupling of each layer against its rotational or symmetric character.

    Args:
        coupling: The run's ``coupling`` table.
        spectra: The run's ``spectra`` table.
        character: Metric on the x axis.
        operator: ``"J"`` or ``"R"``.
        units: ``"natural"`` or ``"raw"``.
        trend: The run's ``trend`` table, for the correlation written above each panel. A line is
            drawn only where its interval excludes zero.
        template: A plotly template or its name.
    """
    metric = spectra[(spectra["metric"] == character) & (spectra["operator"] == operator)]
    metric = narrowed(narrowed(metric, "units", units), "estimate", "per_sample")
    fig = theme.new_figure(template)
    titles: list[str] = []
    for variant in variants(coupling):
        rows = of_variant(coupling, variant)
        known = of_variant(metric, variant)[["layer", "value"]]
        joined = rows.merge(known, on="layer").sort_values("layer")
        joined = joined[joined["value"].notna() & joined["unit_rho"].notna()]
        if joined.empty:
            continue
        panel = len(titles)
        found = _trend_row(trend, variant, character, operator, units)
        x, y = column(joined, "value"), column(joined, "unit_rho")
        interval = (column(joined, "unit_low"), column(joined, "unit_high"))
        layers = column(joined, "layer")
        _character_points(fig, x, y, layers, variant, panel, interval=interval)
        if found is not None and found["low"] * found["high"] > 0:
            _least_squares(fig, x, y, variant, panel)
        fig.add_shape(theme.level(0.0, panel=panel))
        number = "" if panel == 0 else str(panel + 1)
        quiet = {"zeroline": False, "nticks": 7}
        fig.update_layout({f"xaxis{number}": quiet, f"yaxis{number}": {"zeroline": False}})
        said = "" if found is None else _interval(found["rho"], found["low"], found["high"])
        titles.append(theme.titled(variant.capitalize(), said))
    if not titles:
        return fig
    title, _unit, _log, _zero = label(character)
    theme.arrange(
        fig,
        titles,
        columns=2,
        row_height=340,
        narrow_row_height=270,
        x_title=f"{title.lower()} of {operator}, {units} units",
    )
    fig.update_layout(yaxis={"title": {"text": "partial ρ(P, log gain)"}})
    if len(titles) > 1:
        fig.update_layout(xaxis2={"matches": "x"}, yaxis2={"matches": "y"})
    return fig


def _interval(value: float, low: float, high: float) -> str:
    words = f"ρ = {value:+.2f}"
    if np.isfinite(low) and np.isfinite(high):
        words += f", 95 % interval {low:+.2f} to {high:+.2f}"
    return words.replace("-", "−")


def _trend_row(
    trend: pd.DataFrame | None, variant: str, character: str, operator: str, units: str
) -> dict[str, float] | None:
    if trend is None or trend.empty:
        return None
    rows = of_variant(trend, variant)
    for name, value in (("character", character), ("operator", operator), ("units", units)):
        if name in rows:
            rows = rows[rows[name] == value]
    if rows.empty:
        return None
    return {name: float(column(rows, name)[0]) for name in ("rho", "low", "high")}


def _character_points(
    fig: go.Figure,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    layers: NDArray[np.float64],
    variant: str,
    panel: int,
    *,
    interval: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None,
) -> None:
    bars = {}
    if interval is not None:
        low, high = interval
        bars = {
            "type": "data",
            "symmetric": False,
            "array": theme.small(high - y),
            "arrayminus": theme.small(y - low),
            "color": theme.FAINT,
            "thickness": 1.2,
            "width": 0,
        }
    fig.add_scatter(
        x=theme.small(x),
        y=theme.small(y),
        text=[f"{layer:.0f}" for layer in layers],
        textposition="top right",
        textfont={"size": 10, "color": theme.MUTED},
        error_y=bars or None,
        mode="markers+text",
        marker={"size": 8, "color": theme.variant_colour(variant)},
        name=variant,
        showlegend=False,
        hovertemplate=(
            f"<b>{variant}</b> · layer %{{text}}<br>character %{{x:.3f}}<br>coupling %{{y:.3f}}"
            "<extra></extra>"
        ),
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def _least_squares(
    fig: go.Figure, x: NDArray[np.float64], y: NDArray[np.float64], variant: str, panel: int
) -> None:
    if len(x) < 3 or np.ptp(x) == 0:
        return
    slope, offset = np.polyfit(x, y, 1)
    ends: NDArray[np.float64] = np.array([x.min(), x.max()])
    fig.add_scatter(
        x=theme.small(ends),
        y=theme.small(slope * ends + offset),
        mode="lines",
        line={"color": theme.variant_colour(variant), "width": 1.5},
        hoverinfo="skip",
        showlegend=False,
        xaxis=theme.axis("x", panel),
        yaxis=theme.axis("y", panel),
    )


def trend_figure(trend: Any, *, template: Any = None) -> go.Figure:
    """Coupling of each layer against one property of the layers.

    Args:
        trend: A :class:`tl_spectral.coupling.CouplingTrend`.
        template: A plotly template or its name.

    Returns:
        The figure. The line is drawn only if the interval of the trend excludes zero.
    """
    x, y = (theme.as_array(v).astype(float) for v in (trend.character, trend.coupling))
    fig = theme.new_figure(template)
    _character_points(fig, x, y, np.asarray(trend.layers, dtype=float), "trained", 0)
    low, high = trend.interval
    if low * high > 0:
        _least_squares(fig, x, y, "trained", 0)
    fig.add_shape(theme.level(0.0))
    name = str(trend.name).replace("_", " ")
    theme.arrange(
        fig,
        [theme.titled("Coupling by layer", _interval(trend.rho, low, high))],
        columns=1,
        row_height=360,
        x_title=name,
    )
    return fig.update_layout(
        xaxis={"zeroline": False},
        yaxis={"zeroline": False, "title": {"text": "partial ρ(P, log gain)"}},
    )


def trend_table_figure(table: pd.DataFrame, *, template: Any = None) -> go.Figure:
    """Does the trend depend on how character is measured? One row per choice, with intervals.

    Args:
        table: The run's ``trend`` table.
        template: A plotly template or its name.
    """
    frame = table.copy()
    parts = [frame["character"].astype(str).str.replace("_", " ")]
    parts += [frame[name].astype(str) for name in ("operator", "units") if name in frame]
    frame["choice"] = [" · ".join(words) for words in zip(*parts, strict=True)]
    choices = list(dict.fromkeys(frame["choice"]))[::-1]
    fig = theme.new_figure(template)
    names = variants(frame)
    for k, variant in enumerate(names):
        rows = of_variant(frame, variant)
        shift = 0.22 * ((len(names) - 1) / 2 - k)
        place = np.array([choices.index(c) for c in rows["choice"]], dtype=float) + shift
        rho, low, high = (column(rows, name) for name in ("rho", "low", "high"))
        colour = theme.variant_colour(variant)
        clear = low * high > 0
        fig.add_scatter(
            x=theme.small(rho),
            y=theme.small(place),
            text=rows["choice"].tolist(),
            customdata=theme.small(np.stack([low, high, column(rows, "p_shift")], axis=1)),
            error_x={
                "type": "data",
                "symmetric": False,
                "array": theme.small(high - rho),
                "arrayminus": theme.small(rho - low),
                "color": colour,
                "thickness": 1.6,
                "width": 0,
            },
            mode="markers",
            marker={
                "size": 9,
                "color": [colour if c else theme.SURFACE for c in clear],
                "line": {"width": 1.6, "color": colour},
            },
            name=variant,
            hovertemplate=(
                f"<b>{variant}</b> · %{{text}}<br>ρ = %{{x:.2f}} (%{{customdata[0]:.2f}} to "
                "%{customdata[1]:.2f})<br>p = %{customdata[2]:.3g} (circular shifts)<extra></extra>"
            ),
        )
    theme.arrange(
        fig,
        [theme.titled("Trend over layers", "Spearman ρ of coupling and character")],
        columns=1,
        row_height=34 * len(choices) + 20,
        narrow_row_height=38 * len(choices) + 20,
        x_title="",
    )
    fig.add_shape(theme.upright(0.0))
    fig.update_layout(
        xaxis={"range": [-1.05, 1.05], "zeroline": False},
        yaxis={
            "tickvals": list(range(len(choices))),
            "ticktext": choices,
            "range": [-0.6, len(choices) - 0.4],
            "showgrid": False,
            "zeroline": False,
        },
    )
    return fig
