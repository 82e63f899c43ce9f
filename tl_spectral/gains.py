"""How strongly a block amplifies each unit: column and row norms of its Jacobian.

Also what else could explain such a gain: the confounds that a coupling regresses out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.graph import UnitGraph
from tl_spectral.jacobian.result import BlockJacobian

Gain = Literal["column", "row"]
Operator = Literal["J", "R"]
Jacobian: TypeAlias = BlockJacobian | Float[Tensor, "d_model d_model"]
Vector: TypeAlias = Float[Tensor, " d_model"]
Scale: TypeAlias = Vector | tuple[Vector, Vector]
CONFOUNDS = ("norm_gain", "activation_std", "strength", "massive")
MASSIVE_RATIO = 10.0  # root mean square of a massive unit, in medians over the units


def amplification(
    J: Jacobian,
    kind: Gain = "column",
    operator: Operator = "J",
    *,
    scale: Scale | None = None,
) -> Float[Tensor, " d_model"]:
    """Log gain of every unit relative to the median of its layer: > 0 amplified, < 0 suppressed.

    ``"column"`` is the out-gain ``log ‖M e_i‖`` (what the block makes of a push on unit i),
    ``"row"`` the in-gain ``log ‖e_iᵀ M‖`` (how strongly unit i answers).

    Args:
        J: A block Jacobian, row = output.
        kind: Column or row norm.
        operator: ``"J"``, or ``"R"`` = J − I.
        scale: Standard deviation of each coordinate: natural units ``D⁻¹ M D``. A pair
            ``(input, output)`` gives ``D_out⁻¹ M D_in``.

    Returns:
        Natural logarithms, float64. −∞ for a norm of exactly 0; NaN for coordinates of zero
        deviation, which have no natural unit.

    Raises:
        InputError: If an option is unknown, or J or the scale is of the wrong shape, not finite, or
            negative.
    """
    if kind not in ("column", "row"):
        raise InputError(f'kind must be "column" or "row", got {kind!r}.')
    norms, measured = _norms(_operator(J, operator), kind, scale)
    return _relative(norms.log().masked_fill(~measured, math.nan))


@dataclass(frozen=True, eq=False)
class Gains:
    """Log gains of one layer, averaged over its Jacobians, and where they come from."""

    log_gain: Float[Tensor, " d"]
    squares: Float[Tensor, " d"] | None  # mean squared norm, for projectors
    norm_gain: Float[Tensor, " d"] | None
    n_samples: int
    layer: int | None
    text: str


def measure(
    J: Jacobian | Sequence[Jacobian] | Vector,
    g: UnitGraph,
    gain: Gain,
    operator: Operator,
    scale: Scale | None,
) -> Gains:
    """Log gains of one layer that belong to a graph.

    Args:
        J: As in :func:`tl_spectral.coupling`.
        g: The graph.
        gain: ``"column"`` or ``"row"``.
        operator: ``"J"`` or ``"R"``.
        scale: Natural units, see :func:`amplification`.

    Raises:
        InputError: If there is no Jacobian, or sizes differ.
        ProvenanceError: If layers or models differ.
    """
    jacobians = [J] if isinstance(J, Tensor | BlockJacobian) else list(J)
    if not jacobians:
        raise InputError("There is no Jacobian to take gains from.")
    layer, norm_gain, count = g.layer, g.norm_gain, 0
    for one in jacobians:
        d = len(one.matrix if isinstance(one, BlockJacobian) else one)
        if d != g.n_units:
            raise InputError(f"The Jacobian has d_model = {d}, the graph {g.n_units} units.")
        if not isinstance(one, BlockJacobian):
            count += 1
            continue
        count += one.n_samples
        if layer is None:
            layer = one.layer
        if one.layer != layer:
            raise ProvenanceError(f"Jacobian of layer {one.layer}, graph or others of {layer}.")
        one.provenance.require_same_model(g.provenance, "Jacobian and graph")
        if norm_gain is None and one.norm_gain is not None:
            norm_gain = one.norm_gain.detach().to("cpu", torch.float64)
    units = "" if scale is None else ", natural units"
    text = f"log {gain} norm of {operator} over the layer's median{units}"
    if isinstance(J, Tensor) and J.ndim == 1:
        log_gain = _relative(J.detach().to("cpu", torch.float64))
        return Gains(log_gain, None, norm_gain, count, layer, text)
    logs, squares = [], []
    for one in jacobians:
        norms, measured = _norms(_operator(one, operator), gain, scale)
        logs.append(_relative(norms.log().masked_fill(~measured, math.nan)))
        squares.append(norms.square())
    return Gains(
        torch.stack(logs).mean(0), torch.stack(squares).mean(0), norm_gain, count, layer, text
    )


def _operator(J: Jacobian, operator: Operator) -> Float[Tensor, "d d"]:
    if operator not in ("J", "R"):
        raise InputError(f'operator must be "J" or "R", got {operator!r}.')
    if isinstance(J, BlockJacobian):
        matrix = J.matrix if operator == "J" else J.update
        return _checked(matrix)
    matrix = _checked(J)
    if operator == "R":
        matrix = matrix - torch.eye(len(matrix), dtype=torch.float64)
    return matrix


def _checked(matrix: Tensor) -> Float[Tensor, "d d"]:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise InputError(f"A Jacobian must be [d_model, d_model]; got {tuple(matrix.shape)}.")
    matrix = matrix.detach().to("cpu", torch.float64)
    if not bool(matrix.isfinite().all()):
        raise InputError("The Jacobian has entries that are not finite; check the model's dtype.")
    return matrix


def _norms(
    matrix: Float[Tensor, "d d"], kind: Gain, scale: Scale | None
) -> tuple[Float[Tensor, " d"], Bool[Tensor, " d"]]:
    """Column or row norms, and which of them are measured (have a unit of length)."""
    measured = torch.ones(len(matrix), dtype=torch.bool)
    if scale is not None:
        source, target = scale if isinstance(scale, tuple) else (scale, scale)
        source, target = (_checked_scale(side, len(matrix)) for side in (source, target))
        reachable = target > 0
        matrix = matrix * source
        matrix = torch.where(reachable[:, None], matrix / target[:, None], 0.0)
        measured = source > 0 if kind == "column" else reachable
    return torch.linalg.vector_norm(matrix, dim=0 if kind == "column" else 1), measured


def _checked_scale(scale: Tensor, d: int) -> Float[Tensor, " d"]:
    scale = scale.detach().to("cpu", torch.float64)
    if scale.shape != (d,) or not bool((scale.isfinite() & (scale >= 0)).all()):
        raise InputError(
            f"scale must hold {d} finite non-negative deviations; got shape {tuple(scale.shape)}."
        )
    if not bool(scale.any()):
        raise InputError("All coordinates have zero deviation; there are no natural units.")
    return scale


def _relative(logs: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
    """Logs minus their median over the coordinates that have one."""
    known = logs[logs.isfinite()]
    return logs - known.quantile(0.5) if known.numel() else logs


def known_confounds(
    g: UnitGraph, norm_gain: Float[Tensor, " d"] | None
) -> dict[str, Float[np.ndarray, " d"]]:
    """What is known of the units that could explain a gain, by name."""
    known = {"strength": g.strength}
    if norm_gain is not None:
        known["norm_gain"] = norm_gain.abs()
    if g.unit_std is not None and g.unit_mean is not None:
        known["activation_std"] = g.unit_std
        size = torch.hypot(g.unit_mean, g.unit_std)
        known["massive"] = (size > MASSIVE_RATIO * size.median()).double()
    return {name: known[name].numpy() for name in CONFOUNDS if name in known}


def chosen_confounds(
    wanted: Sequence[str] | None,
    known: dict[str, Float[np.ndarray, " d"]],
    used: Bool[np.ndarray, " d"],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The confounds to regress out that vary over the used units, and those that do not.

    Raises:
        InputError: If one is unknown, or not available here.
    """
    names = tuple(known) if wanted is None else tuple(wanted)
    for name in names:
        if name not in CONFOUNDS:
            raise InputError(f"Confound {name!r} is not one of {CONFOUNDS}.")
        if name not in known:
            raise InputError(
                f"Confound {name!r} is not known here. It comes with a graph built from "
                "ResidualStates (norm_gain also with a BlockJacobian)."
            )
    varying = tuple(n for n in names if used.any() and np.ptp(known[n][used]) > 0)
    return varying, tuple(n for n in names if n not in varying)
