"""Figures of how far partitions and couplings can be trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_spectral.plots import theme

_NAMES = {
    "ari": ("Adjusted Rand index", "1 = the same"),
    "nmi": ("Mutual information", "normalised"),
    "vi": ("Variation of information", "nats"),
}
_WORDS = {"seeds": "seeds", "bootstrap": "bootstrap samples"}


def influence_figure(influence: Any, *, template: Any = None) -> go.Figure:
    """The coupling without each community, with 95 % intervals; the band is the whole one's.

    Args:
        influence: A :class:`tl_spectral.influence.CommunityInfluence`.
        template: A plotly template or its name.
    """
    rows = list(influence.rows)[::-1]
    names = [f"without {row['community']} ({row['size']})" for row in rows]
    rho, low, high = (
        np.array([row[name] for row in rows], float) for name in ("unit_rho", "low", "high")
    )
    fig = theme.new_figure(template)
    colours = [theme.VERMILLION if row["flips"] else theme.BLUE for row in rows]
    fig.add_scatter(
        x=theme.small(rho),
        y=names,
        customdata=theme.small(np.stack([low, high], axis=1)),
        error_x={
            "type": "data",
            "symmetric": False,
            "array": theme.small(high - rho),
            "arrayminus": theme.small(rho - low),
            "color": theme.BASELINE,
            "thickness": 1.6,
            "width": 0,
        },
        mode="markers",
        marker={"size": 9, "color": colours},
        showlegend=False,
        hovertemplate=(
            "%{y}: ρ = %{x:.3f} (%{customdata[0]:.2f} to %{customdata[1]:.2f})<extra></extra>"
        ),
    )
    where = "" if influence.layer is None else f"layer {influence.layer}, "
    theme.arrange(
        fig,
        [theme.titled("One community left out", f"{where}partial Spearman ρ")],
        columns=1,
        row_height=28 * len(rows) + 30,
        x_title="",
    )
    fig.add_shape(theme.upright(0.0))
    whole = theme.upright(influence.unit_rho)
    fig.add_shape({**whole, "line": {"color": theme.BLUE, "width": 1.6, "dash": "dot"}})
    fig.add_annotation(
        text="all",
        x=influence.unit_rho,
        y=1,
        yref="y domain",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": theme.BLUE},
    )
    return fig.update_layout(
        xaxis={"zeroline": False}, yaxis={"type": "category", "showgrid": False}
    )


def stability_figure(stability: Any, *, template: Any = None) -> go.Figure:
    """Agreement of partitions over seeds and bootstrap samples, each pair a point.

    Args:
        stability: A :class:`tl_spectral.stability.PartitionStability`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    for panel, (measure, (title, _)) in enumerate(_NAMES.items()):
        place = {"xaxis": theme.axis("x", panel), "yaxis": theme.axis("y", panel)}
        for row in (row for row in stability.rows if row["measure"] == measure):
            source = row["source"]
            values = [pair[measure] for pair in stability.pairs if pair["source"] == source]
            spread = np.linspace(-0.16, 0.16, len(values)) if len(values) > 1 else np.zeros(1)
            at = list(_WORDS).index(source)
            fig.add_scatter(
                x=theme.small(at + spread),
                y=theme.small(np.sort(values)),
                mode="markers",
                marker={"size": 5, "color": theme.SKY, "opacity": 0.6},
                name="a pair",
                legendgroup="pair",
                showlegend=panel == 0 and at == 0,
                hovertemplate=f"{title}: %{{y:.3f}}<extra></extra>",
                **place,
            )
            fig.add_scatter(
                x=[at],
                y=theme.small([row["value"]]),
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": theme.small([row["high"] - row["value"]]),
                    "arrayminus": theme.small([row["value"] - row["low"]]),
                    "color": theme.BLUE,
                    "thickness": 1.8,
                    "width": 0,
                },
                mode="markers",
                marker={"size": 10, "color": theme.BLUE},
                cliponaxis=False,
                name="mean, middle 95 %",
                legendgroup="mean",
                showlegend=panel == 0 and at == 0,
                hovertemplate=f"{title}: mean %{{y:.3f}}<extra></extra>",
                **place,
            )
            fig.add_scatter(
                x=[at - 0.25, at + 0.25],
                y=theme.small([row["chance"]] * 2),
                mode="lines",
                line={"color": theme.BASELINE, "width": 2},
                name="units shuffled",
                legendgroup="chance",
                showlegend=panel == 0 and at == 0,
                hovertemplate="shuffled: %{y:.3f}<extra></extra>",
                **place,
            )
        number = "" if panel == 0 else str(panel + 1)
        fig.update_layout(
            {
                f"xaxis{number}": {
                    "tickvals": [0, 1],
                    "ticktext": list(_WORDS.values()),
                    "range": [-0.5, 1.5],
                    "showgrid": False,
                    "zeroline": False,
                },
                f"yaxis{number}": {"rangemode": "tozero"},
            }
        )
    titles = [theme.titled(*words) for words in _NAMES.values()]
    return theme.arrange(fig, titles, columns=3, row_height=280, x_title="")


def learning_figure(curve: Any, *, template: Any = None) -> go.Figure:
    """The coupling by number of samples, and how reliable the graph is by then.

    Args:
        curve: A :class:`tl_spectral.learning.LearningCurve`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    rows = list(curve.rows)

    def of(name: str) -> np.ndarray:
        return np.array([row[name] for row in rows], float)

    n = of("n_samples")
    for band in theme.band(n, of("low"), of("high"), theme.BLUE, panel=0, group="coupling"):
        fig.add_trace(band)
    fig.add_scatter(
        x=n,
        y=theme.small(of("unit_rho")),
        mode="lines+markers",
        line={"color": theme.BLUE, "width": 2},
        name="coupling, 95 %",
        legendgroup="coupling",
        hovertemplate="%{x} samples: ρ = %{y:.3f}<extra></extra>",
    )
    parts = [(row["n_samples"], row["unit_rho"]) for row in curve.subsets]
    fig.add_scatter(
        x=[size for size, _ in parts],
        y=theme.small([rho for _, rho in parts]),
        mode="markers",
        marker={"size": 5, "color": theme.SKY, "opacity": 0.8},
        name="one subset",
        hovertemplate="%{x} samples: ρ = %{y:.3f}<extra></extra>",
    )
    for sign in (1, -1):
        fig.add_scatter(
            x=n,
            y=theme.small(sign * of("detectable_rho")),
            mode="lines",
            line={"color": theme.BASELINE, "width": 1.4, "dash": "dot"},
            name="smallest detectable (80 % power)",
            legendgroup="detectable",
            showlegend=sign > 0,
            hovertemplate="%{x} samples: |ρ| = %{y:.3f}<extra></extra>",
        )
    for name, colour, words in (
        ("reliability", theme.INK, "participation, between subsets"),
        ("ari", theme.ORANGE, "partition, with that of all (ARI)"),
    ):
        fig.add_scatter(
            x=n,
            y=theme.small(of(name)),
            mode="lines+markers",
            line={"color": colour, "width": 2},
            name=words,
            xaxis="x2",
            yaxis="y2",
            hovertemplate="%{x} samples: %{y:.2f}<extra></extra>",
        )
    where = "" if curve.layer is None else f"layer {curve.layer}, "
    titles = [
        theme.titled("Coupling by sample count", f"{where}partial Spearman ρ"),
        theme.titled("Reliability of the graph", "1 = the same from other texts"),
    ]
    axis = {"type": "log", "tickvals": n.tolist(), "ticktext": [f"{int(v)}" for v in n]}
    theme.arrange(fig, titles, columns=2, row_height=300, x_title="samples behind the graph")
    fig.add_shape(theme.level(0.0))
    return fig.update_layout(
        xaxis=axis, xaxis2=axis, yaxis={"zeroline": False}, yaxis2={"range": [-0.05, 1.05]}
    )
