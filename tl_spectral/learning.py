"""How a coupling grows out of the noise as the graph gets more samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from tl_spectral import statistics
from tl_spectral.communities import Method, agreement, communities
from tl_spectral.coupling import coupling
from tl_spectral.coupling_levels import Part
from tl_spectral.errors import InputError
from tl_spectral.gains import Gain, Jacobian, Operator, Scale, Vector
from tl_spectral.graph import Edges, Hook, Sign, unit_graph
from tl_spectral.results import Result
from tl_spectral.samples import States, count, method_for, one_layer, take, told_before

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(frozen=True, eq=False)
class LearningCurve(Result):
    """The coupling of one layer by the number of samples behind its graph.

    Attributes:
        rows: One per number of samples: ``n_samples``; ``n_subsets`` (disjoint subsets of that
            size); ``unit_rho`` (their mean) and ``sd`` (over them); ``low`` and ``high`` (95 %:
            the uncertainty over units and that over subsets, added as variances); ``ari`` (with the
            partition of all samples); ``reliability`` of participation (mean Spearman correlation
            over pairs of subsets; at the full number by Spearman–Brown from halves);
            ``detectable_rho`` (smallest measured coupling found at 5 % with 80 % power);
            ``detectable_true_rho`` (the same, divided by the square root of the reliability: the
            coupling that a graph without sampling noise would have to show); and ``note``.
        subsets: One per subset: ``n_samples``, ``subset``, ``unit_rho``, ``low``, ``high``, ``p``,
            ``n_effective``, ``detectable_rho``, ``ari``.
        n_units: d, the number of units.
        layer: The layer.
    """

    rows: tuple[dict[str, Any], ...]
    subsets: tuple[dict[str, Any], ...]
    n_units: int
    layer: int | None

    def to_dataframe(self) -> pd.DataFrame:
        """One row per number of samples."""
        import pandas as pd

        return pd.DataFrame(list(self.rows)).assign(layer=self.layer, n_units=self.n_units)

    def plot(self, template: Any = None) -> go.Figure:
        """Coupling and reliability by the number of samples."""
        from tl_spectral.plots.reliability import learning_figure

        return learning_figure(self, template=template)


def learning_curve(
    J: Jacobian | Sequence[Jacobian] | Vector,
    states: States,
    layer: int | None = None,
    *,
    fractions: Sequence[float | int] = FRACTIONS,
    subsets: int = 5,
    edges: Edges = "pearson",
    top_k: int | None = None,
    sign: Sign = "abs",
    hook: Hook = "resid_pre",
    method: Method | None = None,
    resolution: float = 1.0,
    runs: int = 5,
    gain: Gain = "column",
    operator: Operator = "J",
    scale: Scale | None = None,
    confounds: Sequence[str] | None = None,
    part: Part | str = "positive",
    permutations: int = 200,
    seed: int = 0,
) -> LearningCurve:
    """Measure the coupling with graphs of ever more samples; the gains stay the same.

    Subsets of one size are disjoint, so their spread is that of fresh texts. A coupling that still
    grows at the right end has not been measured with enough texts.

    Args:
        J: Jacobian or log gains, as in :func:`tl_spectral.coupling`.
        states: Residual states, or a tensor ``[sample, d_model]``.
        layer: Which layer of the states.
        fractions: Shares of the samples.
        subsets: Most subsets of one size.
        edges: As in :func:`tl_spectral.unit_graph`, like the next three.
        top_k: Strongest edges kept per unit.
        sign: Sign policy.
        hook: Which residual states.
        method: As in :func:`tl_spectral.communities`; by default Leiden for signed graphs.
        resolution: γ.
        runs: Runs of the community detection per graph.
        gain: As in :func:`tl_spectral.coupling`, like the rest.
        operator: ``"J"`` or ``"R"``.
        scale: Natural units.
        confounds: Names of what is regressed out.
        part: Positive or negative edges of a signed graph.
        permutations: Number of permutations behind each p.
        seed: Seed of everything random.

    Returns:
        The curve.

    Raises:
        InputError: If a fraction lies outside (0, 1] or leaves fewer than 3 samples, or as
            :func:`tl_spectral.coupling` does.
    """
    states = one_layer(states, layer)
    n = count(states)
    sizes = _sizes(fractions, n, subsets)
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)
    spreads: dict[int, list[np.ndarray]] = {}
    labels: dict[int, list[np.ndarray]] = {}
    found: list[dict[str, Any]] = []
    units = 0
    for size in sizes:
        for subset in range(min(subsets, n // size)):
            rows = np.sort(order[subset * size : (subset + 1) * size])
            with told_before():
                g = unit_graph(
                    take(states, rows), layer=layer, edges=edges, top_k=top_k, sign=sign, hook=hook
                )
                com = communities(
                    g,
                    method=method or method_for(g),  # type: ignore[arg-type]
                    resolution=resolution,
                    runs=runs,
                    nulls=0,
                    seed=seed,
                )
                result = coupling(
                    J,
                    g,
                    com,
                    gain=gain,
                    operator=operator,
                    scale=scale,
                    confounds=confounds,
                    part=part,
                    permutations=permutations,
                    seed=seed,
                )
            units = g.n_units
            spreads.setdefault(size, []).append(result.participation.numpy())
            labels.setdefault(size, []).append(com.labels.numpy())
            found.append(
                {
                    "n_samples": size,
                    "subset": subset,
                    "unit_rho": result.unit_rho,
                    "low": result.unit_interval[0],
                    "high": result.unit_interval[1],
                    "p": result.unit_p,
                    "n_effective": result.n_effective,
                    "detectable_rho": result.detectable_rho,
                }
            )
    full = labels[sizes[-1]][0]
    every = [label for size in sizes for label in labels[size]]
    for row, label in zip(found, every, strict=True):
        row["ari"] = _ari(label, full)
    reliability = {size: _reliability(spreads[size]) for size in sizes}
    return LearningCurve(
        rows=tuple(_row(size, found, reliability, n) for size in sizes),
        subsets=tuple(found),
        n_units=units,
        layer=result.layer,
        provenance=dataclasses.replace(result.provenance, seed=seed),
    )


def _sizes(fractions: Sequence[float | int], n: int, subsets: int) -> list[int]:
    if subsets < 1:
        raise InputError(f"subsets must be at least 1, got {subsets}.")
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise InputError(f"fractions must lie in (0, 1], got {list(fractions)}.")
    sizes = sorted({int(fraction * n) for fraction in fractions})
    if sizes[0] < 3:
        raise InputError(
            f"{min(fractions):g} of {n} samples are {sizes[0]}; a graph needs 3. Leave that "
            "fraction out, or capture more texts."
        )
    return sizes


def _ari(first: np.ndarray, second: np.ndarray) -> float:
    both = (first >= 0) & (second >= 0)
    return float(agreement(np.stack([first[both], second[both]]))[0][0, 1])


def _reliability(spreads: list[np.ndarray]) -> float:
    """Mean Spearman correlation over pairs of subsets, units known in both."""
    values = []
    for i, first in enumerate(spreads):
        for second in spreads[:i]:
            both = np.isfinite(first) & np.isfinite(second)
            if both.sum() > 2 and np.ptp(first[both]) > 0 and np.ptp(second[both]) > 0:
                values.append(float(stats.spearmanr(first[both], second[both]).statistic))
    return float(np.mean(values)) if values else math.nan


def _row(
    size: int, found: list[dict[str, Any]], reliability: dict[int, float], n: int
) -> dict[str, Any]:
    of = [row for row in found if row["n_samples"] == size]
    rho = np.array([row["unit_rho"] for row in of])
    mean = float(rho.mean())
    halves = np.array([(row["high"] - row["low"]) / 2 for row in of])
    between = float(rho.var(ddof=1)) if len(of) > 1 else 0.0
    half = math.sqrt(float(np.square(halves).mean()) + statistics.Z95**2 * between)
    if len(of) > 1:
        low, high = max(-1.0, mean - half), min(1.0, mean + half)
    else:
        low, high = of[0]["low"], of[0]["high"]
    stable, note = reliability[size], ""
    if math.isnan(stable) and size == n and n // 2 in reliability:
        part = reliability[n // 2]
        stable, note = 2 * part / (1 + part), "reliability by Spearman-Brown from halves"
    elif math.isnan(stable):
        note = "no reliability: one subset only"
    detectable = float(np.mean([row["detectable_rho"] for row in of]))
    return {
        "n_samples": size,
        "n_subsets": len(of),
        "unit_rho": mean,
        "sd": math.sqrt(between) if len(of) > 1 else math.nan,
        "low": low,
        "high": high,
        "ari": float(np.mean([row["ari"] for row in of])),
        "reliability": stable,
        "detectable_rho": detectable,
        "detectable_true_rho": detectable / math.sqrt(stable) if stable > 0 else math.nan,
        "note": note,
    }
