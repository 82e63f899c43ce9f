"""The sections of the report, each built from the tables and arrays of a run.

A section never shows an empty figure: what a run lacks is said in a sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from tl_spectral import plots
from tl_spectral.plots.spectra import CHARACTER, LABELS, SIZE
from tl_spectral.plots.tables import column, of_variant, variants
from tl_spectral.plots.theme import as_array
from tl_spectral.report.page import Numbers, Panel, Section, numbers, show
from tl_spectral.report.pieces import (
    Figures,
    answered,
    by_layer,
    choices,
    empty_section,
    make_panel,
    missing_control,
    reasons_of,
    single_layer,
    spoken,
    table_of,
    thinned,
    thinning_note,
)
from tl_spectral.report.power import power

_UNITS = {"natural": "natural", "raw": "raw"}
_ESTIMATES = {"per_sample": "each sample, averaged", "mean_jacobian": "mean Jacobian"}
_METRIC_SETS = {"character": CHARACTER, "size and rank": SIZE}


def all_sections(run: Any) -> list[Section]:
    """The figures of a run, in reading order."""
    chapters = (gradient, clouds, funnel, circuits, power, topology, coupling)
    return [chapter(run) for chapter in chapters]


def gradient(run: Any) -> Section:
    """The character of J and R over depth."""
    table = table_of(run, "spectra")
    lead = (
        "The Jacobian J of a block says how it moves a small change of the residual stream; "
        "R = J − I is what the block adds to the skip. Rotation, non-normality and size of both, "
        "block by block, each beside what a random matrix would give."
    )
    if table.empty:
        return empty_section("gradient", "Spectral gradient", lead, "This run has no spectra.")
    figures: Figures = {}
    for units, estimate, chosen in product(
        choices(table, "units", _UNITS), choices(table, "estimate", _ESTIMATES), _METRIC_SETS
    ):
        rows = table
        for name, value in (("units", units), ("estimate", estimate)):
            rows = rows[rows[name] == value] if name in rows else rows
        figure = plots.profile_figure(
            rows, units=units, estimate=estimate, metrics=_METRIC_SETS[chosen]
        )
        if figure.data:
            figures[chosen, _UNITS[units], _ESTIMATES[estimate]] = figure
    panel = make_panel(
        "Character of each block",
        "Look for blue lines that leave both the dotted grey one (chance) and the control: only "
        "there has training made something. "
        "A change in J (solid) that R (dashed) does not show comes from the identity skip, not "
        "from what the block learned; dotted purple is what the skip and a random update of the "
        "same size would give. Bands are 95 % intervals over samples.",
        f"Line charts of spectral metrics against depth for {spoken(table)}, for J and R, with "
        "random baselines.",
        figures,
        ("Show", "Units", "Estimate"),
    )
    return Section(
        "gradient",
        "Spectral gradient",
        lead,
        panels=panel,
        numbers=(_profile_numbers(table),),
        notes=missing_control(table) + single_layer(table),
    )


def _profile_numbers(table: pd.DataFrame) -> Numbers:
    rows = of_variant(table, variants(table)[0])
    for name, value in (("operator", "R"), ("units", "natural"), ("estimate", "per_sample")):
        if name in rows and (rows[name] == value).any():
            rows = rows[rows[name] == value]
    wide = rows.pivot_table(index="layer", columns="metric", values="value").reset_index()
    heads = {"layer": "layer"} | {name: LABELS[name][0] for name in LABELS if name in wide}
    return numbers("Update R by layer, natural units, mean over samples", wide, heads)


def clouds(run: Any) -> Section:
    """Eigenvalues of J by layer."""
    lead = (
        "Each point is an eigenvalue of J for one sample. Outside the unit circle a direction "
        "grows through the block, inside it shrinks; off the real axis it turns."
    )
    found = by_layer(run.arrays, "eigenvalues")
    if not found:
        return empty_section("eigenvalues", "Eigenvalues", lead, "This run kept no eigenvalues.")
    arrays = {layer: {v: as_array(a).ravel() for v, a in f.items()} for layer, f in found.items()}
    size = max(len(a) for f in arrays.values() for a in f.values())
    per_layer = max(sum(len(a) for a in f.values()) for f in arrays.values())
    layers = thinned(sorted(arrays), per_layer)
    spectra = table_of(run, "spectra")
    discs = {i: _discs(spectra, i, size) for i in layers}
    edges = [1 + r * np.array([1, -1, 1j]) for found in discs.values() for r in found.values()]
    reach = plots.plane_reach([*edges, *(a for i in layers for a in arrays[i].values())])
    figures: Figures = {
        (f"layer {i}",): plots.eigenvalue_figure(arrays[i], discs=discs[i], reach=reach)
        for i in layers
    }
    panel = make_panel(
        "Eigenvalues of J",
        "The circle is |λ| = 1. Where the grey disc is drawn, the identity plus a random update of "
        "the same size would fill it evenly: points far outside it, or a gap within it, are "
        "structure. All blocks are drawn on one scale.",
        f"Scatter of {size} complex eigenvalues per block with the unit circle.",
        figures,
        ("Layer",),
        slider="Layer",
    )
    return Section(
        "eigenvalues", "Eigenvalues", lead, panels=panel, notes=thinning_note(layers, arrays)
    )


def _discs(spectra: pd.DataFrame, layer: int, d: int) -> dict[str, float]:
    """Radius ‖R‖_F/√d of the circular law, where the run measured ‖R‖_F in raw units."""
    if spectra.empty or "metric" not in spectra:
        return {}
    rows = spectra[(spectra["metric"] == "frobenius") & (spectra["operator"] == "R")]
    for name, value in (("units", "raw"), ("estimate", "per_sample"), ("layer", layer)):
        rows = rows[rows[name] == value] if name in rows else rows
    radii = {v: column(of_variant(rows, v), "value") / np.sqrt(d) for v in variants(rows)}
    return {v: float(r[0]) for v, r in radii.items() if r.size and np.isfinite(r[0])}


def funnel(run: Any) -> Section:
    """Effective rank of the chain of Jacobians."""
    table = table_of(run, "chain")
    lead = (
        "Multiply the Jacobians of successive blocks: how many directions of a perturbation of "
        "the first block's input can still be told apart after each block?"
    )
    if table.empty:
        return empty_section("funnel", "Funnel", lead, "This run has no chain of Jacobians.")
    figures: Figures = {
        (_UNITS[units],): plots.funnel_figure(
            table[table["units"] == units] if "units" in table else table, units=units
        )
        # Raw units first: the chains of random blocks are matched to those.
        for units in reversed([*choices(table, "units", _UNITS)])
    }
    panel = make_panel(
        "Directions that survive",
        "Thin lines are single samples, the thick line their median. The dashed line multiplies "
        "mean Jacobians: it is another number, often larger, since each prompt keeps directions "
        "of its own. Products of random blocks narrow too (dotted): compare the slope with them.",
        f"Effective rank of the product of Jacobians by depth, log scale, for {spoken(table)}; "
        "and the leading singular values.",
        figures,
        ("Units",),
    )
    last = table[table["layer"] == table["layer"].max()]
    heads = {
        "variant": "variant",
        "estimate": "estimate",
        "units": "units",
        "sample": "sample",
        "effective_rank": "effective rank",
        "participation_ratio": "participation ratio",
        "resolved_rank": "resolved rank",
    }
    return Section(
        "funnel",
        "Funnel",
        lead,
        panels=panel,
        numbers=(numbers("After the last block", last, heads),),
        notes=missing_control(table) + single_layer(table),
    )


def circuits(run: Any) -> Section:
    """OV circuits, read off the weights."""
    table, layers = table_of(run, "ov"), table_of(run, "ov_layers")
    lead = (
        "What each attention head writes for what it reads, from the weights alone: a copying "
        "score near +1 repeats its input, near −1 it reverses it."
    )
    refusals = reasons_of(table) + reasons_of(layers)  # rows that say why there is nothing
    table, layers = answered(table, "copying_score"), answered(layers, "rule")
    if table.empty and layers.empty:
        note = "This run has no OV circuits: the heads could not be read off the weights."
        note += "".join(f" {reason}" for reason in dict.fromkeys(refusals))
        return empty_section("ov", "OV circuits", lead, note)
    panels: tuple[Panel, ...] = ()
    if not table.empty:
        wanted = {"copying_score": "copying score", "rotation_index": "rotation index"}
        figures: Figures = {
            (name,): plots.ov_table_figure(table, metric=metric)
            for metric, name in (wanted | {"spectral_radius": "spectral radius"}).items()
            if np.isfinite(column(table, metric)).any()
        }
        panels += make_panel(
            "Heads",
            "A dot marks a head whose copying score a random head of the same shape would also "
            "reach (within two standard deviations). Look for rows or blocks of green (copying) "
            "or purple (reversing) without dots.",
            f"Heat map of OV metrics, layer by head, for {spoken(table)}.",
            figures,
            ("Metric",),
        )
    if not layers.empty:
        panels += make_panel(
            "Leading modes of each layer",
            "Summed over heads, a layer acts on the token mean like a step of the power method. A "
            "disc is a real eigenvalue (tokens are drawn to an axis), a diamond a complex pair "
            "(they turn in a plane); hollow ones cannot be named reliably. Where lines run close "
            "no mode stands out, and one step aligns tokens little. Below the dotted grey, a "
            "random matrix of the same norm does as much. A high condition means that the mode's "
            "direction hangs on small changes of the weights.",
            f"Strength and condition of the leading OV modes by layer for {spoken(layers)}.",
            {(): plots.layer_modes_figure(layers)},
            (),
        )
    notes = ("This run has no table of single heads.",) if table.empty else ()
    shown = layers if table.empty else table
    tables = () if layers.empty else (_mode_numbers(layers),)
    return Section("ov", "OV circuits", lead, panels, tables, notes + missing_control(shown))


def _mode_numbers(layers: pd.DataFrame) -> Numbers:
    leading = layers[layers["rank"] == 1]
    heads = {
        "variant": "variant",
        "layer": "layer",
        "rule": "rule",
        "eigenvalue_re": "Re λ",
        "eigenvalue_im": "Im λ",
        "gap": "ratio to the next",
        "strength": "strength",
        "baseline_strength": "random matrix",
        "condition": "condition",
        "note": "note",
    }
    return numbers("Principal mode by layer", leading, heads)


def topology(run: Any) -> Section:
    """Communities and bridges of the unit graph."""
    communities, units = table_of(run, "communities"), table_of(run, "units")
    lead = (
        "Coordinates of the residual stream that vary together over samples are joined. The graph "
        "falls into communities; a bridge unit spreads its edges over several of them."
    )
    if communities.empty and units.empty:
        return empty_section(
            "communities", "Communities and bridges", lead, "This run has no unit graph."
        )
    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()
    if not communities.empty:
        panels += make_panel(
            "Is there a community structure?",
            "Modularity says something only above its null (dotted: the same degrees, rewired). "
            "Low stability means that the partition depends on the seed, and so do its bridges.",
            f"Modularity, stability and number of communities by layer for {spoken(communities)}.",
            {(): plots.communities_figure(communities)},
            (),
        )
    adjacency = by_layer(run.arrays, "adjacency")
    figures = Figures()
    for layer, graphs in sorted(adjacency.items()):
        labels = {v: _labels(units, v, layer) for v in graphs}
        known = {v: (graphs[v], found) for v, found in labels.items() if found is not None}
        if known:
            figures[(f"layer {layer}",)] = plots.adjacency_figure(known)
    if figures:
        panels += make_panel(
            "The graph, ordered by community",
            "Squares on the diagonal are communities, ordered by size; weight outside them is "
            "carried by bridges.",
            "Adjacency matrix of the unit graph with its communities outlined.",
            figures,
            ("Layer",),
        )
    else:
        notes += ("This run kept no adjacency matrices.",)
    if not units.empty:
        everyone = sorted(int(i) for i in units["layer"].unique())
        layers = thinned(everyone, int(units.groupby("layer").size().max()))
        panels += make_panel(
            "Cartography of units",
            "To the right, units whose edges spread over many communities; at the top, hubs of "
            "their own. Outlined markers are bridge units, the strongest by number. Colour is the "
            "gain of J on a unit: if topology predicts gain, colours change from left to right.",
            "Scatter of participation and within-community degree of every unit.",
            {
                (f"layer {i}",): plots.cartography_table_figure(units[units["layer"] == i])
                for i in layers
            },
            ("Layer",),
            slider="Layer",
        )
        notes += thinning_note(layers, everyone) + _isolated(units)
    tables = () if communities.empty else (numbers("Communities by layer", communities),)
    return Section(
        "communities",
        "Communities and bridges",
        lead,
        panels,
        tables,
        notes + missing_control(units if communities.empty else communities),
    )


def _labels(units: pd.DataFrame, variant: str, layer: int) -> Any:
    if units.empty or "community" not in units:
        return None
    rows = of_variant(units, variant)
    rows = rows[rows["layer"] == layer].sort_values("unit")
    labels = column(rows, "community")
    return None if rows.empty else np.where(np.isfinite(labels), labels, -1).astype(int)


def _isolated(units: pd.DataFrame) -> tuple[str, ...]:
    rows = of_variant(units, variants(units)[0])
    lost = int(rows["participation"].isna().sum())
    if not lost:
        return ()
    share = lost / len(rows)
    return (
        f"{lost:,} of {len(rows):,} unit × layer pairs ({share:.1%}) have no edges: their "
        "participation is undefined and they are not drawn.",
    )


def coupling(run: Any) -> Section:
    """Does topology predict gain, and does its sign follow the operator?"""
    table, trend = table_of(run, "coupling"), table_of(run, "trend")
    spectra = table_of(run, "spectra")
    lead = (
        "Does a unit's place in the graph predict whether the block amplifies it, and does the "
        "sign of that coupling follow the block's character from rotational to symmetric?"
    )
    if table.empty:
        return empty_section("coupling", "Coupling", lead, "This run has no couplings.")
    panels = make_panel(
        "Coupling at every layer",
        "Each point is one block: above zero, bridge units are amplified; below, suppressed. "
        "Filled: q < 0.05 over all layers. Dashes: before the confounds were partialled out. "
        "Effects at a single layer are small; the trend below is the question.",
        f"Coupling with 95 % intervals by layer for {spoken(table)}.",
        {(): plots.coupling_layers_figure(table)},
        (),
    )
    notes: tuple[str, ...] = ()
    if not spectra.empty and table["layer"].nunique() > 2:
        figure = plots.character_figure(table, spectra, trend=trend)
        if figure.data:
            panels += make_panel(
                "Coupling against character",
                "Numbers are layers. Left, blocks whose update is nearer to symmetric; right, "
                "nearer to random or rotational (0.5). A line is drawn only where the interval of "
                "the trend excludes zero.",
                "Scatter of coupling against antisymmetric energy, one point per layer.",
                {(): figure},
                (),
            )
    else:
        notes += ("A trend over layers needs at least three layers.",)
    tables = [numbers("Coupling by layer", table)]
    if not trend.empty:
        panels += make_panel(
            "Does the answer depend on the measure?",
            "The same trend for other measures of character. An effect that only one row shows is "
            "an effect of that choice. Filled: the 95 % interval excludes zero.",
            "Forest plot of the trend for several measures of character.",
            {(): plots.trend_table_figure(trend)},
            (),
        )
        tables.append(numbers("Trend over layers", trend))
    return Section(
        "coupling", "Coupling", lead, panels, tuple(tables), notes + missing_control(table)
    )


def words_of_findings(run: Any) -> Iterator[dict[str, str]]:
    """The findings, each with a class for its verdict."""
    table = run.findings
    for row in [] if table is None else table.to_dict("records"):
        cells = {str(name): show(value) for name, value in row.items()}
        cells["kind"] = cells.get("verdict", "cannot tell").replace(" ", "-")
        yield cells
