"""From the tables of runs to one tidy table of metrics, and what its rows come to over depth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy import stats

from tl_spectral.plots.tables import of_variant
from tl_spectral.statistics import series_mean_error

KEYS = ["family", "metric", "operator", "units"]
VALUES = ["value", "low", "high", "baseline"]


def metric_table(tables: Mapping[str, pd.DataFrame], variant: str) -> pd.DataFrame:
    """Every metric of one variant of a run, layer by layer.

    Args:
        tables: Tables of the run; those that are missing give no rows.
        variant: ``"trained"`` or ``"control"``.

    Returns:
        Columns ``family``, ``metric``, ``operator``, ``units``, ``layer``, ``value``, ``low`` and
        ``high`` (95 %, over samples or units; NaN where unknown) and ``baseline``.
    """
    parts = [
        build(of_variant(tables[name], variant))
        for name, build in _BUILDERS.items()
        if name in tables and len(of_variant(tables[name], variant))
    ]
    parts = [part for part in parts if len(part)]
    columns = [*KEYS, "layer", *VALUES]
    if not parts:
        return pd.DataFrame(columns=columns)
    table: pd.DataFrame = pd.concat(parts, ignore_index=True)[columns]
    return table.dropna(subset=["value"]).reset_index(drop=True)


def _spectra(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[table["estimate"] == "per_sample"].copy()
    half = _t95(rows["n_samples"]) * rows["standard_error"].to_numpy(float)
    return rows.assign(family="spectra", low=rows["value"] - half, high=rows["value"] + half)


def _chain(table: pd.DataFrame) -> pd.DataFrame:
    rows = table[table["estimate"] == "per_sample"]
    frames = []
    for metric, baseline in (
        ("effective_rank", "baseline_effective_rank"),
        ("participation_ratio", ""),
    ):
        if metric not in rows:
            continue
        grouped = rows.groupby(["units", "layer"])[metric].agg(["mean", "sem", "count"])
        half = _t95(grouped["count"]) * grouped["sem"].to_numpy(float)
        frame = pd.DataFrame(
            {
                "value": grouped["mean"],
                "low": grouped["mean"] - half,
                "high": grouped["mean"] + half,
            }
        )
        frame["baseline"] = (
            rows.groupby(["units", "layer"])[baseline].mean() if baseline in rows else math.nan
        )
        frames.append(frame.reset_index().assign(family="chain", metric=metric, operator="J"))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _coupling(table: pd.DataFrame) -> pd.DataFrame:
    frames = [
        pd.DataFrame(
            {
                "layer": table["layer"],
                "metric": metric,
                "value": table[metric],
                "low": table[low] if low else math.nan,
                "high": table[high] if high else math.nan,
                "operator": table.get("operator", "J"),
                "units": table.get("units", "raw"),
            }
        )
        for metric, low, high in (
            ("unit_rho", "unit_low", "unit_high"),
            ("cohens_d", "cohens_low", "cohens_high"),
            ("community_rho", "", ""),
        )
    ]
    return pd.concat(frames, ignore_index=True).assign(family="coupling", baseline=0.0)


def _communities(table: pd.DataFrame) -> pd.DataFrame:
    frames = [
        pd.DataFrame({"layer": table["layer"], "metric": metric, "value": table[metric]}).assign(
            baseline=table[baseline].to_numpy() if baseline else math.nan
        )
        for metric, baseline in (
            ("modularity", "null_mean"),
            ("z_score", ""),
            ("stability_ari", ""),
            ("n_communities", ""),
        )
        if metric in table
    ]
    joined = pd.concat(frames, ignore_index=True)
    return joined.assign(family="communities", operator="", units="", low=math.nan, high=math.nan)


def _ov(table: pd.DataFrame) -> pd.DataFrame:
    if "copying_score" not in table:
        return pd.DataFrame()  # a model without OV circuits: the table holds the reason
    grouped = table.groupby("layer")["copying_score"].agg(["mean", "sem", "count"]).reset_index()
    half = _t95(grouped["count"]) * grouped["sem"].to_numpy(float)
    return pd.DataFrame(
        {
            "layer": grouped["layer"],
            "value": grouped["mean"],
            "low": grouped["mean"] - half,
            "high": grouped["mean"] + half,
        }
    ).assign(family="ov", metric="copying_score", operator="", units="raw", baseline=0.0)


def _power(table: pd.DataFrame) -> pd.DataFrame:
    if "target" not in table:
        return pd.DataFrame()
    rows = table[(table["target"] == "v1") & (table["tokens"] == "all")]
    frames = [
        pd.DataFrame(
            {"layer": rows["layer"], "value": rows["rho"], "low": rows["rho_low"],
             "high": rows["rho_high"], "baseline": 0.5, "metric": "rho"}
        ),
        pd.DataFrame(
            {"layer": rows["layer"], "value": rows["gamma_after"], "low": math.nan,
             "high": math.nan, "baseline": rows["chance"], "metric": "gamma_after"}
        ),
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True).assign(family="power", operator="", units="")


_BUILDERS = {
    "spectra": _spectra,
    "chain": _chain,
    "coupling": _coupling,
    "communities": _communities,
    "ov": _ov,
    "power": _power,
}


def _t95(count: Any) -> Float[np.ndarray, " n"]:
    n = np.asarray(count, dtype=float)
    return np.asarray(stats.t.ppf(0.975, np.where(n > 1, n - 1, np.nan)))


def summarise(tables: Mapping[str, pd.DataFrame], steps: Mapping[str, Any]) -> pd.DataFrame:
    """Each metric of each run over its layers, and its difference to the first run's.

    Args:
        tables: Label → :func:`metric_table`, the run compared with first.
        steps: Label → training step, or ``None``.

    Returns:
        One row per metric and run: ``mean``, ``early`` and ``late`` (first and last third of the
        layers), ``n_layers``; ``difference`` of the means over the layers compared, with
        ``difference_low`` and ``difference_high`` (95 %, over layers, their autocorrelation
        counted); ``sampling_error`` (half-width of a 95 % interval of the difference if samples
        alone made it, the worst case of errors shared by all layers); ``compared`` (by layer, or
        at equal relative depth); ``note``.
    """
    first = next(iter(tables))
    reference = dict(iter(tables[first].groupby(KEYS, sort=False)))
    found = []
    for label, table in tables.items():
        for key, rows in table.groupby(KEYS, sort=False):
            rows = rows.sort_values("layer")
            values = rows["value"].to_numpy(float)
            third = max(1, len(values) // 3)
            row = {
                **dict(zip(KEYS, key, strict=True)),
                "run": label,
                "step": steps[label],
                "mean": float(values.mean()),
                "early": float(values[:third].mean()),
                "late": float(values[-third:].mean()),
                "baseline": float(rows["baseline"].mean()),
                "n_layers": len(values),
            }
            if label == first or key not in reference:
                note = "the run compared with" if label == first else f"not in {first}"
                row |= {**dict.fromkeys(_DIFFERENCE, math.nan), "compared": "", "note": note}
            else:
                row |= _difference(reference[key].sort_values("layer"), rows)
            found.append(row)
    return pd.DataFrame(found)


_DIFFERENCE = ("difference", "difference_low", "difference_high", "sampling_error")


def _difference(reference: pd.DataFrame, rows: pd.DataFrame) -> dict[str, Any]:
    was, now = (table.set_index("layer")["value"].astype(float) for table in (reference, rows))
    shared = was.index.intersection(now.index)
    if len(shared) >= min(len(was), len(now), 3):
        before, after, how = was[shared].to_numpy(), now[shared].to_numpy(), "by layer"
        if len(shared) < max(len(was), len(now)):
            how = f"by layer, the {len(shared)} that both have"
    else:
        before, how = was.to_numpy(), "at equal relative depth"
        after = np.interp(_depth(len(was)), _depth(len(now)), now.to_numpy())
    change = after - before
    mean = float(change.mean())
    half, note = math.nan, "no interval: fewer than 3 layers"
    if len(change) >= 3:
        half, note = series_mean_error(change), ""
    sampling = math.hypot(_half_width(reference), _half_width(rows))
    figures = (mean, mean - half, mean + half, sampling)
    return {**dict(zip(_DIFFERENCE, figures, strict=True)), "compared": how, "note": note}


def _depth(n: int) -> Float[np.ndarray, " n"]:
    return np.linspace(0, 1, n) if n > 1 else np.array([0.5])


def _half_width(rows: pd.DataFrame) -> float:
    half = (rows["high"] - rows["low"]).to_numpy(float) / 2
    known = half[np.isfinite(half)]
    return float(known.mean()) if known.size else math.nan
