"""A value and the draws of its null model."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from tl_spectral.plots import theme


def null_figure(comparison: Any, *, template: Any = None) -> go.Figure:
    """Histogram of the draws in grey, the value in blue, the closed form dotted.

    Args:
        comparison: A :class:`tl_spectral.controls.NullComparison`.
        template: A plotly template or its name.
    """
    fig = theme.new_figure(template)
    values = theme.as_array(comparison.values)
    counts, edges = np.histogram(values, bins="auto") if values.size else (np.zeros(0), np.zeros(1))
    top = float(counts.max()) if counts.size else 1.0
    if counts.size:
        fig.add_bar(
            x=theme.small((edges[:-1] + edges[1:]) / 2),
            y=counts,
            width=theme.small(np.diff(edges)),
            marker={"color": theme.FAINT, "line": {"width": 0}},
            name=f"null: {comparison.null}",
            hovertemplate="%{y} draws near %{x:.4g}<extra></extra>",
        )
    marks = [(comparison.value, "value", theme.BLUE, "solid")]
    if comparison.closed_form is not None:
        marks.append((comparison.closed_form, "null in closed form", theme.BASELINE, "dot"))
    for x, name, colour, dash in marks:
        fig.add_scatter(
            x=[x, x],
            y=[0, top],
            mode="lines",
            line={"color": colour, "width": 2.5, "dash": dash},
            name=name,
            hovertemplate=f"{name} {x:.4g}<extra></extra>",
        )
    title = theme.titled(comparison.metric.replace("_", " "), f"draws that keep {comparison.keeps}")
    fig.update_layout(yaxis={"rangemode": "tozero"}, bargap=0)
    return theme.arrange(fig, [title], columns=1, row_height=280)
