"""Where normalised dynamics end: the class of an observed limit, and what theory foretells."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.modes import Mode, eigensystem, left_vector

_FLOOR = 1e-11  # distances below this are rounding
_RATE_TOLERANCE = {"full": 0.02, "causal": 0.05}
_ANGLE_TOLERANCE = 0.01


def classify(
    states: list[Tensor], tol: float, *, shared: bool
) -> tuple[str, float | None, dict[str, float]]:
    """Kind of the limit, its angle per step, and the numbers that decided.

    Args:
        states: The last states of the run, unit rows, oldest first; at least two.
        tol: Share of the energy that may lie off the line or plane, and radians of turning per step
            that count as standing still.
        shared: Whether one matrix was applied throughout. Only then must a consensus stand still,
            and only then can there be a limit cycle.
    """
    last, previous = states[-1], states[-2]
    cosines = (last * previous).sum(dim=-1)
    # atan2 keeps small angles that arccos loses; lines, so the sign is left out
    turns = torch.atan2((last - cosines[:, None] * previous).norm(dim=-1), cosines.abs())
    stacked = torch.cat(states[len(states) // 2 :])
    values, vectors = torch.linalg.eigh(stacked.T @ stacked / len(stacked))
    plane_share = values[-2:].sum().item()
    axis = torch.linalg.eigh(last.T @ last)
    axis_share = axis.eigenvalues[-1].item() / len(last)
    evidence = {
        "order": last.mean(dim=0).norm().item(),
        "axis_share": axis_share,
        "plane_share": plane_share,
        "turn": turns.max().item(),
        "tol": tol,
    }
    still = evidence["turn"] < tol
    if (still or not shared) and axis_share > 1 - tol:
        signs = (last @ axis.eigenvectors[:, -1]).sign()
        kind = "consensus" if (signs == signs[0]).all() else "bipartite"
        angle = (math.pi if cosines.mean() < 0 else 0.0) if still else None
        return kind, angle, evidence
    if shared and not still and plane_share > 1 - tol:
        angle = _turn_in_plane([x @ vectors[:, -2:] for x in states[len(states) // 2 :]])
        if angle is not None and angle > tol:
            return "limit cycle", angle, evidence
    return "none", None, evidence


def _turn_in_plane(states: list[Float[Tensor, "token 2"]]) -> float | None:
    """Angle per step of the 2 × 2 map B that carries the directions on, ``y' ∝ B y``.

    ``y' × B y = 0`` is linear in B, so B is found up to a factor whatever ellipse the cycle has;
    the argument of its eigenvalues is the angle. ``None`` if they are real.
    """
    y, z = torch.cat(states[:-1]), torch.cat(states[1:])
    rows = torch.stack(
        [-z[:, 1] * y[:, 0], -z[:, 1] * y[:, 1], z[:, 0] * y[:, 0], z[:, 0] * y[:, 1]], dim=1
    )
    _, singular, right = torch.linalg.svd(rows, full_matrices=False)
    if len(singular) < 4 or singular[2] < 1e-8 * singular[0]:
        return _turn_of_period(states)
    B = right[-1].reshape(2, 2)
    if (z * (y @ B.T)).sum() < 0:
        B = -B
    trace, determinant = B.trace().item(), torch.linalg.det(B).item()
    if trace**2 >= 4 * determinant:
        return None
    return math.atan2(math.sqrt(4 * determinant - trace**2), trace)


def _turn_of_period(states: list[Float[Tensor, "token 2"]]) -> float | None:
    """Mean turn over one period, for a cycle that visits too few directions to fix a map."""
    y = torch.stack(states)[:, 0]
    turns = torch.atan2(y[:-1, 0] * y[1:, 1] - y[:-1, 1] * y[1:, 0], (y[:-1] * y[1:]).sum(dim=-1))
    for period in range(2, min(8, len(y) - 1) + 1):
        if (y[-1] - y[-1 - period]).norm() < 1e-6:
            return turns[-period:].sum().abs().item() / period
    return None


def predict(
    F: Tensor, mode: Mode, attention: str, mask: str, skip: bool, start: Tensor
) -> dict[str, Any]:
    """What the spectrum of a shared F foretells: kind, angle, rate, and whether λ1 is defective.

    Args:
        F: The matrix, column convention.
        mode: Its dominant mode.
        attention: ``"identity"``, or any that averages.
        mask: ``"full"`` or ``"causal"``: which weights A has at consensus.
        skip: Whether the skip connection is kept.
        start: Tokens before the first step, which side of λ1's left eigenvector they are on.
    """
    values, _ = eigensystem(F)
    n, keep = len(start), float(skip)
    same = values.conj() if mode.eigenvalue.imag else values
    # Along λ1 itself the normalisation takes every deviation out.
    near = torch.minimum((values - mode.eigenvalue).abs(), (same - mode.eigenvalue).abs())
    others = values[torch.argsort(near, stable=True)[mode.multiplicity :]]
    weights = [1.0]  # eigenvalues of A at consensus
    if attention != "identity" and n > 1:
        weights += [1 / i for i in range(2, n + 1)] if mask == "causal" else [0.0]
    rest = max(((keep + a * others).abs().max().item() for a in weights if len(others)), default=0)
    fields: dict[str, Any] = {
        "eigenvalue": mode.eigenvalue,
        "defective": mode.defective,
        "predicted_angle": abs(math.atan2(mode.eigenvalue.imag, mode.eigenvalue.real + keep)),
        "predicted_kind": None,
        "predicted_rate": None,
    }
    if mode.strength == 0:
        return fields
    rate = rest / mode.strength
    fields["predicted_rate"] = 1.0 if mode.defective else rate
    eigenvectors = mode.subspace.shape[1]
    if (rate > 1 - 1e-9 and not mode.defective) or (mode.rotates and eigenvectors > 2):
        fields["predicted_kind"] = "none"
    elif mode.rotates:
        fields["predicted_kind"] = "limit cycle"
    elif attention != "identity":
        fields["predicted_kind"] = "consensus"
    elif eigenvectors > 1:
        fields["predicted_kind"] = "none"  # every token keeps its own direction in the eigenspace
    else:
        signs = (start @ left_vector(F, mode.eigenvalue.real)).sign()
        fields["predicted_kind"] = "consensus" if (signs == signs[0]).all() else "bipartite"
    return fields


def observed_rate(distance: Tensor) -> float | None:
    """``exp`` of the slope of log distance, over the last half of what is above rounding."""
    below = (distance <= _FLOOR).nonzero()
    usable = int(below[0]) if len(below) else len(distance)
    first = usable // 2
    if usable - first < 3:
        return None
    y = distance[first:usable].log()
    t = torch.arange(len(y), dtype=torch.float64)
    t -= t.mean()
    return math.exp((t @ y / (t @ t)).item())


def compare(
    fields: Mapping[str, Any], kind: str, angle: float | None, steps: int, tol: float, mask: str
) -> tuple[bool | None, str]:
    """Whether what was seen is what was foretold, and what else to know.

    Args:
        fields: Of :func:`predict`, and ``observed_rate``.
        kind: Observed class.
        angle: Observed angle per step.
        steps: Length of the run.
        tol: Of :func:`classify`.
        mask: ``"full"`` or ``"causal"``.
    """
    predicted, rate, observed = (
        fields["predicted_kind"], fields["predicted_rate"], fields["observed_rate"],
    )  # fmt: skip
    if predicted is None:
        return None, "No mode is dominant: every eigenvalue of the iteration is zero."
    notes = []
    if fields["defective"]:
        notes.append("λ1 is defective: convergence is like 1/t, not geometric.")
    left = 1 / steps if fields["defective"] else rate**steps
    due = left < math.sqrt(tol) / 10
    if not due and kind == "none" and predicted != "none":
        notes.append("The run is too short for the predicted rate; the kind is not yet due.")
        kind_agrees = True
    else:
        kind_agrees = kind == predicted
    angle_agrees = angle is None or abs(angle - fields["predicted_angle"]) < _ANGLE_TOLERANCE
    rate_agrees = (
        observed is None or predicted == "none" or abs(observed - rate) < _RATE_TOLERANCE[mask]
    )
    if observed is None:
        notes.append("Converged in too few steps to observe a rate.")
    return kind_agrees and angle_agrees and rate_agrees, " ".join(notes)
