"""From finished tasks to the tidy tables of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd

from tl_spectral.analysis.findings import findings
from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.store import RunDirectory
from tl_spectral.analysis.tasks import CHAIN_SIGMAS, LayerChunk, LayerGraph, Rows
from tl_spectral.coupling import NO_PROJECTOR, CouplingResult
from tl_spectral.statistics import fdr
from tl_spectral.trend import coupling_trend

# The rotational ↔ symmetric character of a layer: the first is the primary one.
CHARACTERS = (
    ("antisymmetric_energy", "R", "natural"),
    ("antisymmetric_energy", "R", "raw"),
    ("antisymmetric_energy", "J", "natural"),
    ("rotation_index", "R", "raw"),
    ("henrici", "R", "natural"),
)
_CHAIN_METRICS = ["effective_rank", "participation_ratio", "log_frobenius", "resolved_rank"]


def assemble(directory: RunDirectory, options: RunOptions) -> dict[str, pd.DataFrame]:
    """Every table of a run whose tasks are finished."""
    tables: dict[str, list[pd.DataFrame]] = {}
    for variant in options.variants:
        spectra = _spectra(directory, options, variant)
        parts = {
            "spectra": spectra,
            "chain": _chain(directory, options, variant),
            **_ov(directory, variant),
            **_dynamics(directory, variant),
            **_graphs(directory, options, variant),
        }
        couplings = [
            directory.load(CouplingResult, variant, f"coupling_{layer:03d}")
            for layer in options.layers
        ]
        parts["coupling"] = _coupling(couplings, options)
        parts["trend"] = _trend(couplings, spectra, options)
        for name, part in parts.items():
            part.insert(0, "variant", variant)
            tables.setdefault(name, []).append(part)
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
    return {**joined, "findings": findings(joined, options)}


def _chunk_numbers(options: RunOptions) -> range:
    return range(-(-options.jacobian_samples // options.chunk))


def _spectra(directory: RunDirectory, options: RunOptions, variant: str) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for layer in options.layers:
        for number in _chunk_numbers(options):
            chunk = directory.load(LayerChunk, variant, f"jacobian_{layer:03d}_{number:04d}")
            rows += chunk.rows
        rows += directory.load(Rows, variant, f"mean_{layer:03d}").rows
    summary = summarise_spectra(rows)
    summary.loc[summary["estimate"] == "mean_jacobian", "n_samples"] = options.jacobian_samples
    return summary


def summarise_spectra(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Mean over samples and its standard error, metric by metric.

    Args:
        rows: Rows of :func:`tl_spectral.analysis.tasks.spectrum_rows`.

    Returns:
        One row per layer, operator, units, estimate and metric, each beside its baselines.
    """
    table = pd.DataFrame(rows)
    keys = ["layer", "operator", "units", "estimate", "metric"]
    numeric = table.astype({"value": float, "baseline": float, "skip_baseline": float})
    grouped = numeric.groupby(keys, sort=False)
    summary = grouped.agg(
        value=("value", "mean"),
        standard_error=("value", "sem"),
        n_samples=("value", "count"),
        baseline=("baseline", "mean"),
        skip_baseline=("skip_baseline", "mean"),
    ).reset_index()
    summary["note"] = ""
    summary.loc[summary["value"].isna(), "note"] = "not defined for this operator"
    single = summary["standard_error"].isna() & summary["value"].notna()
    summary.loc[single, "note"] = "one matrix: no standard error"
    return summary


def _chain(directory: RunDirectory, options: RunOptions, variant: str) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for number in _chunk_numbers(options):
        if directory.has(variant, f"chain_{number:04d}"):
            rows += directory.load(Rows, variant, f"chain_{number:04d}").rows
    if directory.has(variant, "chain_mean"):
        rows += directory.load(Rows, variant, "chain_mean").rows
    columns = ["estimate", "units", "sample", "layer", *_CHAIN_METRICS]
    columns += [f"log_sigma_{k + 1}" for k in range(CHAIN_SIGMAS)]
    table = pd.DataFrame(rows, columns=columns)
    random = table[table["estimate"] == "skip_matched_random"]
    by_layer = random.set_index("layer")["effective_rank"]
    table = table[table["estimate"] != "skip_matched_random"].reset_index(drop=True)
    # The random blocks have the raw norms of single prompts' updates, so they fit those rows only.
    fits = (table["estimate"] == "per_sample") & (table["units"] == "raw")
    table["baseline_effective_rank"] = table["layer"].map(by_layer).where(fits)
    table["note"] = np.where(fits, "", "baseline: for single prompts in raw units only")
    return table


def _ov(directory: RunDirectory, variant: str) -> dict[str, pd.DataFrame]:
    rows = directory.load(Rows, variant, "ov").rows
    heads = [row for row in rows if "head" in row]
    modes = [row for row in rows if "rule" in row]
    refused = [row for row in rows if "reason" in row]
    return {
        "ov": _first(pd.DataFrame(heads or refused), "layer", "head", "copying_score"),
        "ov_layers": _first(pd.DataFrame(modes or refused), "layer", "rule"),
    }


def _dynamics(directory: RunDirectory, variant: str) -> dict[str, pd.DataFrame]:
    keys = {
        "power": ("layer", "target", "tokens"),
        "oversmoothing": ("boundary", "tokens", "measure"),
        "consensus": ("start", "attention", "step", "layer"),
    }
    return {
        name: _first(pd.DataFrame(directory.load(Rows, variant, name).rows), *columns)
        for name, columns in keys.items()
    }


def _first(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Keys before values: a saved row does not keep the order of its columns."""
    keys = [name for name in names if name in table.columns]
    return table[keys + [name for name in table.columns if name not in keys]]


def _graphs(directory: RunDirectory, options: RunOptions, variant: str) -> dict[str, pd.DataFrame]:
    graphs = [directory.load(LayerGraph, variant, f"graph_{layer:03d}") for layer in options.layers]
    return {
        "communities": _first(pd.DataFrame([graph.community for graph in graphs]), "layer"),
        "units": _first(
            pd.DataFrame([row for graph in graphs for row in graph.units]),
            *("layer", "unit", "community", "participation"),
        ),
    }


def _coupling(couplings: list[CouplingResult], options: RunOptions) -> pd.DataFrame:
    table = pd.concat([result.to_dataframe() for result in couplings], ignore_index=True)
    table["n_samples_jacobian"] = options.jacobian_samples
    # The gains are means over prompts; the projector gain needs one matrix.
    table = table.drop(columns="projector_rho")
    table["note"] = table["note"].str.replace(NO_PROJECTOR, "", regex=False).str.strip("; ")
    table["gain"] = f"mean over prompts of the {couplings[0].gain}"
    table["unit_q"] = fdr(table["unit_p"].to_numpy())
    table["community_q"] = fdr(table["community_p"].to_numpy())
    return table


def _trend(
    couplings: list[CouplingResult], spectra: pd.DataFrame, options: RunOptions
) -> pd.DataFrame:
    frames = []
    for metric, operator, units in CHARACTERS:
        chosen = spectra[
            (spectra["metric"] == metric)
            & (spectra["operator"] == operator)
            & (spectra["units"] == units)
            & (spectra["estimate"] == "per_sample")
        ]
        profile = chosen.set_index("layer")["value"].reindex(options.layers)
        name = f"{metric} of {operator} in {units} units"
        trend = coupling_trend(couplings, profile.tolist(), name=name, seed=options.seed)
        frame = trend.to_dataframe()
        plain = coupling_trend(
            [dataclasses.replace(result, unit_rho=result.raw_rho) for result in couplings],
            profile.tolist(),
            name=name,
            seed=options.seed,
        )
        frame["raw_rho"], frame["raw_low"], frame["raw_high"] = plain.rho, *plain.interval
        frame["raw_p_shift"] = plain.p_shift
        frame["character"] = metric
        frame.insert(1, "operator", operator)
        frame.insert(2, "units", units)
        frames.append(frame)
    table: pd.DataFrame = pd.concat(frames, ignore_index=True)
    return table
