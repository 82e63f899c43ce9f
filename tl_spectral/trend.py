"""Does the coupling of bridge position and gain follow the operator, layer by layer?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral import statistics
from tl_spectral.coupling import CouplingResult
from tl_spectral.errors import InputError
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

DepthProfile: TypeAlias = Sequence[float] | Float[Tensor, " layer"] | Float[np.ndarray, " layer"]
MIN_LAYERS = 6


@dataclass(frozen=True, eq=False)
class CouplingTrend(Result):
    """Does the per-layer coupling follow a property of the layers?

    Attributes:
        name: Name of the property.
        layers: The layers used, ascending.
        coupling: ``unit_rho`` of each.
        character: The property of each.
        rho: Spearman correlation over layers.
        interval: Its 95 % interval: Fisher z over ``n_effective`` layers.
        pearson: Pearson correlation over layers.
        p_shift: Two-sided p over all circular shifts, which keep the autocorrelation of both.
        p_permutation: Two-sided p over permutations, which do not: too small for smooth profiles.
        smallest_p_shift: What ``p_shift`` can reach at best: 1 / number of layers.
        n_layers: Number of layers used.
        n_effective: Effective number of independent layers.
        verdict: ``"holds"``, ``"no effect"`` or ``"cannot tell"``.
        sentence: The finding in words.
        note: What was left out, or why a figure is missing.
    """

    name: str
    layers: tuple[int, ...]
    coupling: Float[Tensor, " layer"]
    character: Float[Tensor, " layer"]
    rho: float
    interval: tuple[float, float]
    pearson: float
    p_shift: float
    p_permutation: float
    smallest_p_shift: float
    n_layers: int
    n_effective: float
    verdict: str
    sentence: str
    note: str = ""

    def to_dataframe(self) -> pd.DataFrame:
        """One row with the trend."""
        import pandas as pd

        row = {
            "character": self.name,
            "rho": self.rho,
            "low": self.interval[0],
            "high": self.interval[1],
            "pearson": self.pearson,
            "p_shift": self.p_shift,
            "p_permutation": self.p_permutation,
            "smallest_p_shift": self.smallest_p_shift,
            "n_layers": self.n_layers,
            "n_effective": self.n_effective,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "note": self.note,
        }
        return pd.DataFrame([row])

    def plot(self) -> go.Figure:
        """Coupling against character, one point per layer."""
        from tl_spectral.plots import trend_figure

        return trend_figure(self)


def coupling_trend(
    couplings: Sequence[CouplingResult],
    character: DepthProfile,
    *,
    name: str = "antisymmetric_energy",
    permutations: int = 5000,
    seed: int = 0,
) -> CouplingTrend:
    """Correlate the per-layer coupling with a property of the layers, such as their rotation.

    Profiles over depth are smooth, so layers are not independent and a permutation test finds
    trends in noise. The test is therefore over circular shifts, and the interval counts effective
    layers (:func:`tl_spectral.statistics.effective_length`). In simulated autoregressive profiles
    of 12 to 48 layers that interval covers in 94–99 % of the cases; a moving-block bootstrap, the
    usual alternative, covers in 83–95 %.

    The verdict is ``"holds"`` if the interval excludes 0 and ``p_shift`` is at most 0.05, or, below
    20 layers where it cannot be that small, as small as it can be. It is ``"cannot tell"`` with
    fewer than 6 layers or a constant profile.

    Args:
        couplings: One result per layer, all with the same gain, operator and units.
        character: The property, in the order of ``couplings``.
        name: Its name, for the sentence.
        permutations: Permutations for ``p_permutation``.
        seed: Their seed.

    Returns:
        The trend and a sentence that says what it shows. Layers without coupling or property
        are left out and listed in ``note``.

    Raises:
        InputError: If lengths differ, a layer is missing or repeated, nothing is given, or the
            couplings measure different things.
        ProvenanceError: If they come from different models.
    """
    _check_trend(couplings, character)
    values = np.array([float(value) for value in character])
    rho_by_layer = np.array([result.unit_rho for result in couplings])
    numbers = np.array([result.layer for result in couplings])
    order = np.argsort(numbers)
    kept = order[np.isfinite(values[order]) & np.isfinite(rho_by_layer[order])]
    x, y = rho_by_layer[kept], values[kept]
    n = len(kept)
    dropped = sorted(set(numbers.tolist()) - set(numbers[kept].tolist()))
    notes = [f"layers without a value: {dropped}"] if dropped else []
    rho = pearson = p_shift = p_permutation = math.nan
    interval, effective = (math.nan, math.nan), math.nan
    varies = n >= 3 and np.ptp(x) > 0 and np.ptp(y) > 0
    if varies:
        basis = statistics.rank_basis(np.empty((0, n)))
        first, second = statistics.rank_residuals(np.stack([x, y]), basis)
        rho, pearson = float(first @ second), float(np.corrcoef(x, y)[0, 1])
        p_shift = statistics.permutation_p(rho, statistics.shift_null(first, second))
        rng = np.random.default_rng(seed)
        null = statistics.freedman_lane(first, second, basis, permutations, rng)
        p_permutation = statistics.permutation_p(rho, null)
        effective = statistics.effective_length(first, second)
        interval = statistics.fisher_interval(rho, effective)
    else:
        notes.append("no trend: fewer than 3 layers, or a profile that does not vary")
    best = 1 / n if n else math.nan
    verdict = _verdict(n, interval, p_shift, best)
    return CouplingTrend(
        name=name,
        layers=tuple(numbers[kept].tolist()),
        coupling=torch.from_numpy(x),
        character=torch.from_numpy(y),
        rho=rho,
        interval=interval,
        pearson=pearson,
        p_shift=p_shift,
        p_permutation=p_permutation,
        smallest_p_shift=best,
        n_layers=n,
        n_effective=effective,
        verdict=verdict,
        sentence=_sentence(verdict, name, rho, interval, p_shift, n),
        note="; ".join(notes),
        provenance=dataclasses.replace(couplings[0].provenance, seed=seed),
    )


def _check_trend(couplings: Sequence[CouplingResult], character: DepthProfile) -> None:
    if not couplings or len(couplings) != len(character):
        raise InputError(
            f"A trend needs one value per layer: got {len(couplings)} couplings and "
            f"{len(character)} values."
        )
    layers = [result.layer for result in couplings]
    if None in layers or len(set(layers)) < len(layers):
        raise InputError(f"Every coupling needs a layer of its own to be put in order: {layers}.")
    kinds = {(result.gain, result.operator, result.units) for result in couplings}
    if len(kinds) > 1:
        raise InputError(f"The couplings measure different gains: {sorted(kinds)}.")
    for result in couplings[1:]:
        couplings[0].provenance.require_same_model(result.provenance, "The couplings")


def _verdict(n: int, interval: tuple[float, float], p_shift: float, best: float) -> str:
    if n < MIN_LAYERS or math.isnan(p_shift):
        return "cannot tell"
    excluded = interval[0] > 0 or interval[1] < 0
    return "holds" if excluded and p_shift <= max(0.05, best) + 1e-9 else "no effect"


def _sentence(
    verdict: str, name: str, rho: float, interval: tuple[float, float], p_shift: float, n: int
) -> str:
    what = name.replace("_", " ")
    if verdict == "cannot tell":
        return f"Cannot tell whether coupling follows {what}: {n} layers do not show a trend."
    low, high = interval
    figures = (
        f"Spearman ρ = {rho:+.2f} over {n} layers (95 % interval {low:+.2f} to {high:+.2f}), "
        f"p = {p_shift:.3f} by circular shifts"
    )
    if verdict == "no effect":
        return f"No effect shown: coupling does not reliably follow {what}; {figures}."
    change = "rises" if rho > 0 else "falls"
    limit = "" if n >= 20 else f", the smallest that {n} layers allow"
    return f"The coupling of bridge position and gain {change} with {what}: {figures}{limit}."
