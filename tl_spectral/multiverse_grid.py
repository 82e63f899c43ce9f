"""One layer under every combination of choices: each graph, partition and gain is made once.

Participation depends on graph and partition, the gain on the Jacobian; a setting is one scalar
product between the two after the confounds are out. All settings of a layer share their
permutations, so that their joint distribution under the null is known as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spectral import statistics
from tl_spectral.capture import ResidualStates
from tl_spectral.communities import communities
from tl_spectral.coupling_levels import MAX_DEGREE, MIN_UNITS, mean_direction, position
from tl_spectral.gains import amplification, chosen_confounds, known_confounds
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.samples import method_for, take, told_before

GAIN_KEYS = ("context", "estimate", "operator", "gain", "units")
GRAPH_KEYS = ("samples", "sign", "top_k", "resolution")
KEYS = (*GRAPH_KEYS, "confounds", *GAIN_KEYS)
PARTS = {"abs": "positive", "positive": "positive", "signed": "positive", "signed-": "negative"}
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class LayerSettings:
    """Every setting of one layer, and the joint null.

    Attributes:
        rows: One per setting.
        null: Coupling of each setting under each permutation, widened by its design effect.
    """

    rows: list[dict[str, Any]]
    null: Float[np.ndarray, "permutation setting"]


def gains_of(
    matrices: Float[Tensor, "sample d d"],
    scale: tuple[Tensor, Tensor] | None,
    choices: Mapping[str, tuple[Any, ...]],
    context: str,
) -> dict[Key, Float[np.ndarray, " d"]]:
    """Log gains by context, estimate, operator, gain and units.

    Args:
        matrices: Jacobians of the samples.
        scale: Deviations at input and output, for natural units.
        choices: The choices of every setting.
        context: Context of the matrices.
    """
    found = {}
    for estimate, operator, kind, units in itertools.product(
        *(choices[name] for name in GAIN_KEYS[1:])
    ):
        lengths = scale if units == "natural" else None
        chosen = matrices.double()
        if estimate == "mean_jacobian":
            chosen = chosen.mean(dim=0, keepdim=True)
        logs = [amplification(matrix, kind, operator, scale=lengths) for matrix in chosen]
        key = (context, estimate, operator, kind, units)
        found[key] = torch.stack(logs).mean(dim=0).numpy()
    return found


def layer_settings(
    states: ResidualStates,
    gains: Mapping[Key, Float[np.ndarray, " d"]],
    layer: int,
    choices: Mapping[str, tuple[Any, ...]],
    *,
    runs: int,
    permutations: int,
    seed: int,
) -> LayerSettings:
    """The coupling of one layer in every setting.

    Args:
        states: States of that layer.
        gains: From :func:`gains_of`.
        layer: The layer.
        choices: The choices of every setting; ``samples`` as counts.
        runs: Runs of the community detection per graph.
        permutations: Permutations, shared by all settings.
        seed: Seed of samples, runs and permutations.
    """
    rng = np.random.default_rng(seed)
    order = rng.permutation(states.n_samples)
    sort_keys = rng.random((permutations, states.resid_pre.shape[-1]))
    rows: list[dict[str, Any]] = []
    nulls: list[np.ndarray] = []
    for samples, sign, top_k in itertools.product(*(choices[name] for name in GRAPH_KEYS[:3])):
        with told_before():
            g = unit_graph(
                take(states, np.sort(order[:samples])),
                layer=layer,
                top_k=top_k,
                sign="signed" if sign == "signed-" else sign,
            )
        for resolution in choices["resolution"]:
            for some, null in _partition(
                g, PARTS[sign], resolution, gains, choices["confounds"], runs, seed, sort_keys
            ):
                head = dict(zip(GRAPH_KEYS, (samples, sign, top_k, resolution), strict=True))
                rows += [{"layer": layer, **head, **row} for row in some]
                nulls.append(null)
    return LayerSettings(rows, np.hstack(nulls))


def _partition(
    g: UnitGraph,
    part: str,
    resolution: float,
    gains: Mapping[Key, Float[np.ndarray, " d"]],
    confounds: tuple[str, ...],
    runs: int,
    seed: int,
    sort_keys: Float[np.ndarray, "permutation d"],
) -> Iterator[tuple[list[dict[str, Any]], Float[np.ndarray, "permutation setting"]]]:
    """All settings that share one partition."""
    names = list(gains)
    if part == "negative" and not bool((g.weight < 0).any()):
        rows = [
            _row(names[i], chosen, note="the graph has no negative edge")
            for chosen in confounds
            for i in range(len(names))
        ]
        yield rows, np.full((len(sort_keys), len(rows)), math.nan)
        return
    com = communities(
        g,
        method=method_for(g),  # type: ignore[arg-type]
        resolution=resolution,
        runs=runs,
        nulls=0,
        seed=seed,
    )
    bridges, spread = position(g, com, part)
    placed = np.array([reason == "" for reason in bridges.reason])
    values = np.stack([gains[name] for name in names])
    known = known_confounds(g, g.norm_gain)
    labels = com.labels.numpy()
    masks = placed & np.isfinite(values)
    unique, member = np.unique(masks, axis=0, return_inverse=True)
    for number, used in enumerate(unique):
        of = np.flatnonzero(member.ravel() == number)
        moved = np.argsort(sort_keys[:, used], axis=1)
        for chosen in confounds:
            with_names, _ = chosen_confounds(None if chosen == "all" else (), known, used)
            controls = np.stack([known[name][used] for name in with_names or ("strength",)])
            if not with_names:
                controls = controls[:0]
            rows, null = _block(
                spread[:, used], values[np.ix_(of, used)], controls, labels[used], moved
            )
            yield (
                [_row(names[i], chosen, **row) for i, row in zip(of, rows, strict=True)],
                null,
            )


def _row(key: Key, confounds: str, **figures: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("rho", "low", "high", "p", "n_effective"), math.nan)
    head = {"confounds": confounds, **dict(zip(GAIN_KEYS, key, strict=True))}
    return {**head, "n_units": 0, **empty, "note": "", **figures}


def _block(
    spread: Float[np.ndarray, "run used"],
    values: Float[np.ndarray, "gain used"],
    controls: Float[np.ndarray, "k used"],
    labels: Any,
    moved: Any,
) -> tuple[list[dict[str, Any]], Float[np.ndarray, "permutation gain"]]:
    """Settings that share participation and confounds: one set of permutations for all gains."""
    n = values.shape[1]
    missing = np.full((len(moved), len(values)), math.nan)
    if n < MIN_UNITS:
        return [{"n_units": n, "note": f"{n} usable units"}] * len(values), missing
    degree = max(1, min(MAX_DEGREE, n // (10 * max(len(controls), 1))))
    basis = statistics.rank_basis(controls, degree)
    x, constant = mean_direction(spread, basis)
    if constant:
        note = "participation does not vary beyond the confounds"
        return [{"n_units": n, "note": note}] * len(values), missing
    agreement = float(np.linalg.norm(x))
    y = statistics.rank_residuals(values, basis)
    shuffled = x[moved]
    explained = np.square(shuffled @ basis).sum(axis=1)
    size = agreement / np.sqrt(agreement**2 - explained)
    null = (shuffled @ y.T) * size[:, None]
    rows = []
    for column, one in enumerate(y):
        if np.isnan(one).any():
            rows.append({"n_units": n, "note": "the gain does not vary beyond the confounds"})
            continue
        rho = float(x @ one)
        inflation = statistics.design_effect(x, one - rho / agreement**2 * x, labels)
        null[:, column] *= math.sqrt(inflation)
        low, high = statistics.fisher_interval(rho, n / inflation, basis.shape[1] - 1, agreement)
        rows.append(
            {
                "n_units": n,
                "rho": rho,
                "low": low,
                "high": high,
                "p": statistics.permutation_p(rho, null[:, column]),
                "n_effective": n / inflation,
            }
        )
    return rows, null


def joint_null(
    layer: LayerSettings,
) -> tuple[Bool[np.ndarray, " setting"], Float[np.ndarray, "permutation coupled"]]:
    """The settings that have a coupling, and their null."""
    known = np.array([not math.isnan(row["rho"]) for row in layer.rows], dtype=bool)
    return known, layer.null[:, known]
