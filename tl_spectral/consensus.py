"""The paper's own dynamics: attention and normalisation only, and where they lead the tokens.

``x_i ← N(x_i + Σ_h O_h V_h Σ_j A^h_ij x_j)`` with N the L2 norm, no FFN ([B] arXiv 2605.25619).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.layer_modes import leading_modes
from tl_spectral.limits import classify, compare, observed_rate, predict
from tl_spectral.model import ModelView
from tl_spectral.model.edits import query_key_factors
from tl_spectral.model.view import Fold, StopForward
from tl_spectral.modes import dominant_modes, layer_matrix
from tl_spectral.results import Provenance, Result, library_versions
from tl_spectral.token_geometry import effective_rank

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

Attention = Literal["real", "uniform", "identity"]
Mask = Literal["full", "causal"]
Step = Callable[[Tensor], Tensor]

_WINDOW = 64  # last states from which a cycle is read


@dataclass(frozen=True, eq=False)
class ConsensusResult(Result):
    """Where the L2-normalised, FFN-free dynamics lead, and what the spectrum foretold.

    Attributes:
        kind: ``"consensus"`` (all tokens on one direction), ``"bipartite"`` (on ±one direction),
            ``"limit cycle"`` (turning in one plane), or ``"none"``; see ``evidence``.
        angle: Observed turn per step in radians, in [0, π]: of a limit cycle, or π if a consensus
            flips sign at every step, 0 if it stands; ``None`` for ``"none"``, and where layers
            differ and the direction that tokens share still moves from one to the next.
        evidence: The numbers that decided: ``order`` ``‖mean x̂‖``, ``axis_share`` and
            ``plane_share`` (energy in the best line, and plane), ``turn`` (how far a token's line
            moves in the last step, radians), ``tol``.
        order: ``‖mean x̂‖`` before the first step and after each; 1 is consensus.
        mean_cosine: Mean cosine over all pairs of tokens, likewise.
        axis_share: Largest eigenvalue of the mean of ``x̂ x̂ᵀ``: 1 if all lie on one line. Its
            inverse is the stable rank of the tokens.
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²`` of the matrix of tokens: 1 on one line, 2
            for an even spread over a plane, just below the number of tokens for random ones.
        gamma: Alignment with the dominant mode of the layer just applied (of the first layer
            for the start), mean over tokens.
        distance: Root mean square distance to the dominant eigenspace; ``None`` unless one matrix
            is applied throughout.
        final: The tokens at the end, unit length.
        eigenvalue: λ1 of the shared matrix, else ``None``.
        predicted_kind: From the spectrum, for a shared matrix: else ``None``.
        predicted_rate: Factor per step by which the distance shrinks: the strongest other mode
            over ``|1 + λ1|``. With identity attention that is ``|1 + λ2|/|1 + λ1|``; attention that
            averages adds modes ``1 + aλ``, λ ≠ λ1, a being the eigenvalues of A at consensus
            (uniform over what is visible). 1 for a defective λ1: convergence like 1/t.
        predicted_angle: ``|arg(1 + λ1)|``.
        observed_rate: Slope of ``log distance`` over the last half of the steps above rounding.
        defective: λ1 has fewer eigenvectors than its multiplicity; ``None`` if nothing is shared.
        agrees: Whether kind, angle (to 0.01) and rate (to 0.02; 0.05 under a causal mask, where
            each token has rates of its own and the slowest shows late) are as predicted. The kind
            is not held against a run too short for the predicted rate. ``None`` without a
            prediction.
        note: What else to know, in a sentence; empty if nothing.
        attention: ``"real"``, ``"uniform"`` or ``"identity"``.
        mask: ``"causal"`` or ``"full"``.
        layers: Layer applied at each step; empty for plain matrices.
        skip: Whether the skip connection is kept.
    """

    kind: str
    angle: float | None
    evidence: Mapping[str, float]
    order: Float[Tensor, " time"]
    mean_cosine: Float[Tensor, " time"]
    axis_share: Float[Tensor, " time"]
    effective_rank: Float[Tensor, " time"]
    gamma: Float[Tensor, " time"]
    distance: Float[Tensor, " time"] | None
    final: Float[Tensor, "token d_model"]
    eigenvalue: complex | None
    predicted_kind: str | None
    predicted_rate: float | None
    predicted_angle: float | None
    observed_rate: float | None
    defective: bool | None
    agrees: bool | None
    note: str
    attention: str
    mask: str
    layers: tuple[int, ...]
    skip: bool

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len(self.order) - 1

    @property
    def stable_rank(self) -> Float[Tensor, " time"]:
        """``Σσ²/σ₁²`` of the matrix of tokens, the inverse of :attr:`axis_share`."""
        return 1 / self.axis_share

    def to_dataframe(self) -> pd.DataFrame:
        """One row per step (0 is the start): order, cosine, axis share, ranks, γ, distance."""
        import pandas as pd

        distance = [None] * len(self.order) if self.distance is None else self.distance.tolist()
        return pd.DataFrame(
            {
                "step": range(len(self.order)),
                "layer": [None, *(self.layers or [None] * self.steps)],
                "order": self.order.tolist(),
                "mean_cosine": self.mean_cosine.tolist(),
                "axis_share": self.axis_share.tolist(),
                "effective_rank": self.effective_rank.tolist(),
                "stable_rank": self.stable_rank.tolist(),
                "gamma": self.gamma.tolist(),
                "distance": distance,
            }
        )

    def plot(self, template: str | None = None) -> Figure:
        """Order, alignment and distance by step, the predicted rate beside the distance."""
        from tl_spectral.plots import consensus_figure

        return consensus_figure(self, template=template)


def simulate_power(
    model: Any = None,
    x0: Any = None,
    steps: int | None = None,
    attention: Attention | str | None = None,
    *,
    matrices: Tensor | Sequence[Tensor] | None = None,
    layers: Sequence[int] | None = None,
    mask: Mask | str | None = None,
    skip: bool = True,
    fold: Fold | str = "none",
    n_tokens: int = 64,
    tol: float = 1e-3,
    seed: int = 0,
) -> ConsensusResult:
    """Iterate the L2-normalised dynamics without FFN, classify the limit, compare with theory.

    Args:
        model: A ``TransformerBridge``; its layers are applied in order, again and again.
        x0: Where to start: states ``[token, d_model]``, texts or token ids (their embeddings), or
            ``None`` for isotropic random unit vectors.
        steps: Number of steps; by default one pass over the layers, or 256 for one matrix.
        attention: ``"real"``: ``softmax(x W_Q (x W_K)ᵀ/√d_head)`` of the normalised tokens, without
            biases or positions (the default for models); ``"uniform"`` over what the mask leaves;
            ``"identity"``: every token sees itself alone (the default for matrices).
        matrices: Instead of a model: one F ``[d, d]`` in column convention (shared weights) or
            several, applied in order.
        layers: Which layers of the model; one layer alone is iterated as shared weights.
        mask: ``"causal"`` or ``"full"``; by default what the model is, full for matrices.
        skip: Keep the skip connection.
        fold: Gains folded into F (``"none"``, ``"norm"``, ``"norm+post"``), as for
            :func:`power_alignment`; the scores of real attention read the tokens as they are.
        n_tokens: Number of random tokens.
        tol: Tokens count as on a line (plane) if all but this share of their energy is there, and
            as standing still if they turn by less than ``tol`` radians in the last step.
        seed: Seed of random tokens.

    Returns:
        Trajectory, class with evidence, and for a shared matrix the comparison with theory.

    Raises:
        InputError: If both or neither of model and matrices are given, shapes do not fit, real
            attention is asked of plain matrices, or a state vanishes on the way.
        UnsupportedModelError: If a layer has no attention weights per head.
    """
    if (model is None) == (matrices is None):
        raise InputError("Give either a model or matrices, not both and not neither.")
    attention = attention or ("real" if matrices is None else "identity")
    if attention not in ("real", "uniform", "identity"):
        raise InputError(f"attention must be real, uniform or identity, got {attention!r}.")
    if mask not in (None, "causal", "full"):
        raise InputError(f"mask must be causal or full, got {mask!r}.")
    if not 0 < tol < 1:
        raise InputError(f"tol must lie between 0 and 1, got {tol}.")

    view = None
    if matrices is None:
        view = ModelView(model)
        chosen = view.layers(layers)
        Fs = [layer_matrix(*view.ov_factors(layer, fold=fold)) for layer in chosen]
        mask = mask or ("causal" if view.causal else "full")
    else:
        if attention == "real":
            raise InputError(
                "Real attention needs query and key weights, and plain matrices have none. Use "
                "attention='uniform' or 'identity', or pass a model."
            )
        if layers is not None:
            raise InputError("layers selects layers of a model; matrices come already selected.")
        if fold != "none":
            raise InputError("fold is for a model; plain matrices have no norm to fold.")
        chosen, Fs, mask = (), _matrices(matrices), mask or "full"
    if steps is None:
        steps = 256 if len(Fs) == 1 else len(Fs)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps must be a positive integer, got {steps!r}.")
    tokens = None
    if view is not None and x0 is not None and not _are_states(x0):
        tokens = view.tokens(x0)
        x0 = _embeddings(view, tokens)
    x = _start(x0, len(Fs[0]), n_tokens, seed)
    A = _visible(len(x), mask) if attention != "identity" else None
    moves = [
        _real_step(view, layer, skip, fold, A) if attention == "real" and view and A is not None
        else _linear_step(F, A, skip)
        for F, layer in zip(Fs, chosen or (0,) * len(Fs), strict=True)
    ]  # fmt: skip
    modes = (
        [dominant_modes(F, skip=skip)[0] for F in Fs]
        if view is None
        else [leading_modes(view, layer, skip=skip, fold=fold)[0] for layer in chosen]
    )

    shared = modes[0] if len(Fs) == 1 else None
    start = x
    window: deque[Tensor] = deque([x], maxlen=_WINDOW)
    rows = [_summary(x, modes[0].subspace)]
    for t in range(steps):
        x = moves[t % len(Fs)](x)
        norms = x.norm(dim=-1, keepdim=True)
        if not (torch.isfinite(norms).all() and norms.min() > 0):
            raise InputError(
                f"A token vanished or overflowed at step {t + 1}: the map annihilates it. Keep the "
                "skip connection, or start elsewhere."
            )
        x = x / norms
        window.append(x)
        rows.append(_summary(x, modes[t % len(Fs)].subspace))
    order, mean_cosine, axis_share, rank, gamma, distance = torch.tensor(
        rows, dtype=torch.float64
    ).unbind(dim=1)
    kind, angle, evidence = classify(list(window), tol, shared=shared is not None)
    fields: dict[str, Any] = dict.fromkeys(
        ("eigenvalue", "predicted_kind", "predicted_rate", "predicted_angle", "observed_rate")
    )
    fields |= {"defective": None, "agrees": None, "note": ""}
    if shared is not None:
        fields |= predict(Fs[0], shared, attention, mask, skip, start)
        fields["observed_rate"] = observed_rate(distance)
        fields["agrees"], fields["note"] = compare(fields, kind, angle, steps, tol, mask)
    options: dict[str, Any] = {
        "attention": attention, "mask": mask, "skip": skip, "steps": steps, "tol": tol
    }  # fmt: skip
    options |= {"fold": fold} if view is not None else {}
    return ConsensusResult(
        kind=kind,
        angle=angle,
        evidence=evidence,
        order=order,
        mean_cosine=mean_cosine,
        axis_share=axis_share,
        effective_rank=rank,
        gamma=gamma,
        distance=distance if shared is not None else None,
        final=x,
        **fields,
        attention=attention,
        mask=mask,
        layers=tuple(chosen[t % len(Fs)] for t in range(steps)) if chosen else (),
        skip=skip,
        provenance=view.provenance(tokens, seed=seed, options=options)
        if view is not None
        else Provenance(dtype="float64", seed=seed, options=options, versions=library_versions()),
    )


# ---------------------------------------------------------------------- the iteration


def _matrices(matrices: Tensor | Sequence[Tensor]) -> list[Float[Tensor, "d d"]]:
    given = [matrices] if isinstance(matrices, Tensor) and matrices.ndim == 2 else list(matrices)
    if not given:
        raise InputError("matrices is empty. Pass at least one.")
    for i, F in enumerate(given):
        if not isinstance(F, Tensor) or F.ndim != 2 or F.shape != (len(given[0]),) * 2:
            raise InputError(f"Matrix {i} is not a square tensor of the size of the first.")
        if F.is_complex() or not torch.isfinite(F).all():
            raise InputError(f"Matrix {i} is not real and finite.")
    return [F.detach().double().cpu() for F in given]


def _are_states(x0: Any) -> bool:
    return isinstance(x0, Tensor) and x0.is_floating_point()


def _embeddings(view: ModelView, tokens: list[Tensor]) -> Float[Tensor, "token d_model"]:
    """``resid_pre`` of the first block; texts are joined into one sequence of tokens."""
    found: list[Tensor] = []

    def keep(activation: Tensor) -> None:
        found.append(activation.detach().reshape(-1, view.d_model).cpu().double())
        raise StopForward

    with torch.no_grad():
        for row in tokens:
            view.run(row[None], {view.hook_name(0, "resid_pre"): keep})
    return torch.cat(found)


def _start(x0: Any, d: int, n_tokens: int, seed: int) -> Float[Tensor, "token d"]:
    if x0 is None:
        if isinstance(n_tokens, bool) or n_tokens < 1:
            raise InputError(f"n_tokens must be at least 1, got {n_tokens}.")
        generator = torch.Generator().manual_seed(seed)
        x0 = torch.randn(n_tokens, d, generator=generator, dtype=torch.float64)
    if not _are_states(x0) or x0.ndim != 2 or x0.shape[1] != d or len(x0) == 0:
        raise InputError(
            f"x0 must hold states [token, {d}] in floating point"
            + (f"; its shape is {tuple(x0.shape)}." if isinstance(x0, Tensor) else ".")
        )
    x = x0.detach().double().cpu()
    norms = x.norm(dim=-1, keepdim=True)
    if not torch.isfinite(norms).all() or norms.min() == 0:
        raise InputError("x0 holds a state that is zero or not finite; it has no direction.")
    unit: Tensor = x / norms
    return unit


def _visible(n: int, mask: str) -> Float[Tensor, "token token"]:
    """Uniform attention over what the mask leaves."""
    seen = torch.ones(n, n, dtype=torch.float64)
    if mask == "causal":
        seen = seen.tril()
    pattern: Tensor = seen / seen.sum(dim=-1, keepdim=True)
    return pattern


def _linear_step(F: Tensor, A: Tensor | None, skip: bool) -> Step:
    """``x + A x Fᵀ`` on rows; without A every token sees itself alone."""
    return lambda x: skip * x + (x if A is None else A @ x) @ F.T


def _real_step(view: ModelView, layer: int, skip: bool, fold: str, visible: Tensor) -> Step:
    """``x + Σ_h A^h x W_V W_O`` with the pattern of the tokens as they are."""
    W_V, W_O = (W.double().cpu() for W in view.ov_factors(layer, fold=fold))
    W_Q, W_K = (W.double().cpu() for W in query_key_factors(view, layer))

    def step(x: Tensor) -> Tensor:
        scores = (x @ W_Q) @ (x @ W_K).mT / math.sqrt(W_Q.shape[-1])
        pattern = scores.masked_fill(visible == 0, -math.inf).softmax(dim=-1)
        return skip * x + (pattern @ (x @ W_V) @ W_O).sum(dim=0)

    return step


def _summary(x: Tensor, Q: Tensor) -> list[float]:
    """Order, mean pairwise cosine, share of the best line, effective rank, γ, distance to the mode.

    From the smaller of both Gram matrices, as there may be a thousand steps.
    """
    n = len(x)
    order = x.mean(dim=0).norm().item()
    pairs = (n * order**2 - 1) / (n - 1) if n > 1 else 1.0
    energies = torch.linalg.eigvalsh(x @ x.T if n < x.shape[1] else x.T @ x)
    share, rank = energies[-1].item() / n, effective_rank(energies).item()
    inside = x @ Q
    distance = (x - inside @ Q.T).norm(dim=-1).square().mean().sqrt().item()
    return [order, pairs, share, rank, inside.norm(dim=-1).mean().item(), distance]
