"""The power-method chapter of the report."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tl_spectral import plots
from tl_spectral.plots.tables import of_variant, variants
from tl_spectral.plots.theme import as_array
from tl_spectral.report.page import Panel, Section, numbers
from tl_spectral.report.pieces import (
    Figures,
    answered,
    by_layer,
    empty_section,
    make_panel,
    missing_control,
    reasons_of,
    spoken,
    table_of,
    thinned,
    thinning_note,
)

_STARTS = {"text": "tokens of a text", "random": "random tokens"}
_LEAD = (
    "Summed over heads, the OV circuits of a layer make one matrix F. If the layer acts like a "
    "step of the power method, tokens tilt to the dominant mode v1 of I + F. Whether they do, next "
    "to every control that could also make them."
)


def power(run: Any) -> Section:
    """Alignment with each layer's mode, spectra of F, and where the dynamics lead."""
    table, likeness = table_of(run, "power"), table_of(run, "oversmoothing")
    dynamics = table_of(run, "consensus")
    reasons = dict.fromkeys(reasons_of(table) + reasons_of(likeness))
    table, dynamics = answered(table, "rho"), answered(dynamics, "order")
    likeness = answered(likeness, "value")
    if table.empty and likeness.empty and dynamics.empty:
        note = " ".join(["This run has not followed the power method.", *reasons])
        return empty_section("power", "Power method", _LEAD, note)
    spectra, notes = _spectra(run)
    panels = _alignment(table) + spectra + _dynamics(dynamics) + _likeness(likeness)
    shown = next(found for found in (table, likeness, dynamics) if not found.empty)
    tables = () if table.empty else (_numbers(table),)
    return Section(
        "power",
        "Power method",
        _LEAD,
        panels,
        tables,
        (*reasons, *notes, *missing_control(shown)),
    )


def _alignment(table: pd.DataFrame) -> tuple[Panel, ...]:
    if table.empty:
        return ()
    figures: Figures = {
        (variant,): plots.power_figure(of_variant(table, variant)) for variant in variants(table)
    }
    return make_panel(
        "Do tokens tilt to the layer's mode?",
        "γ is the mean |cos| of tokens with v1, ρ the share whose |cos| grows through the layer. "
        "Look for blue above the dashed greys: those are other layers' modes, later modes of this "
        "layer and modes of a random matrix. Random tokens tilt wherever the criterion is met "
        "(below), as its closed form foretells, and random matrices meet it too: ρ above ½ by "
        "itself says nothing about training.",
        f"Alignment of tokens with each layer's dominant OV mode for {spoken(table)}.",
        figures,
        ("Model",),
    )


def _spectra(run: Any) -> tuple[tuple[Panel, ...], tuple[str, ...]]:
    found = by_layer(run.arrays, "layer_matrix")
    if not found:
        return (), ()
    arrays = {layer: {v: as_array(a).ravel() for v, a in f.items()} for layer, f in found.items()}
    layers = thinned(sorted(arrays), max(sum(map(len, f.values())) for f in arrays.values()))
    modes = answered(table_of(run, "ov_layers"), "rule")
    norms = {layer: _norms(modes, layer) for layer in layers}
    figures: Figures = {
        (f"layer {layer}",): plots.layer_spectrum_figure(arrays[layer], norms[layer])
        for layer in layers
        if norms[layer].keys() == arrays[layer].keys()
    }
    panel = make_panel(
        "Eigenvalues of F",
        "The eigenvalue furthest from −1 (cross) dominates the iteration that keeps the skip "
        "connection. The disc is what a random matrix of F's norm fills: only what lies outside "
        "it can be told from chance.",
        "Scatter of the complex eigenvalues of the layer matrix, block by block.",
        figures,
        ("Layer",),
        slider="Layer",
    )
    return panel, thinning_note(layers, arrays)


def _norms(modes: pd.DataFrame, layer: int) -> dict[str, float]:
    """‖F‖_F of one layer, by variant."""
    rows = modes[modes["layer"] == layer] if len(modes) else modes
    return {v: float(of_variant(rows, v)["frobenius"].iloc[0]) for v in variants(rows)}


def _dynamics(table: pd.DataFrame) -> tuple[Panel, ...]:
    if table.empty:
        return ()
    figures: Figures = {
        (words,): plots.dynamics_figure(table[table["start"] == start])
        for start, words in _STARTS.items()
        if (table["start"] == start).any()
    }
    return make_panel(
        "Where the bare dynamics lead",
        "Attention and L2 normalisation alone, the layers applied once in order: no FFN, no "
        "learned norm, no positions. Identity attention (dotted) is the power method itself; "
        "attention that averages pulls tokens together as soon as F is large, whatever its modes.",
        f"Order, mean cosine and effective rank by layer of the bare dynamics for {spoken(table)}.",
        figures,
        ("Start",),
    )


def _likeness(table: pd.DataFrame) -> tuple[Panel, ...]:
    if table.empty:
        return ()
    figures: Figures = {
        (words,): plots.oversmoothing_figure(table[table["tokens"] == tokens])
        for tokens, words in (("rest", "without the first"), ("all", "all"))
        if (table["tokens"] == tokens).any()
    }
    return make_panel(
        "Do tokens grow alike in the real model?",
        "The same measures with norms, FFN and positions in place, at every boundary between "
        "blocks. The first token of a text is often far from all others, so it is left out at "
        "first. Bands are 95 % intervals over texts; dotted is what random directions give.",
        f"Order, mean cosine and rank of a text's tokens by depth for {spoken(table)}.",
        figures,
        ("Tokens",),
    )


def _numbers(table: pd.DataFrame) -> Any:
    rows = table[table["tokens"].isin(["all", "random"])]
    heads = {
        "variant": "variant",
        "layer": "layer",
        "target": "target",
        "tokens": "tokens",
        "gamma_before": "γ before",
        "gamma_after": "γ after",
        "chance": "γ of chance",
        "rho": "ρ",
        "rho_low": "ρ low",
        "rho_high": "ρ high",
        "predicted_rho": "ρ predicted",
        "criterion": "criterion met",
    }
    return numbers("Alignment by layer", rows, heads)
