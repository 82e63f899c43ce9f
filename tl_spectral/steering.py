"""Steering by the power method: a rank-1 edit that makes a chosen direction dominant.

[B] arXiv 2605.25619: add ``α w wᵀ`` to F of one layer, so that tokens are drawn to ±w, by the sign
of ⟨w, x⟩. What that does to the model is measured beside random edits and a plain additive vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor

from tl_spectral.capture import capture
from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.model import ModelView
from tl_spectral.model.edits import (
    attention_plus,
    output_weight_plus,
    residual_plus,
    run_once,
    unembedding,
)
from tl_spectral.modes import chance_alignment, dominant_modes, eigensystem, layer_matrix
from tl_spectral.ov import PrincipalMode
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

Method = Literal["weights", "hook"]
_UNREACHABLE = 1e-3  # share of a direction below which an edit would be all cancellation
_COLUMNS = (
    "condition", "alignment", "positive", "random_alignment", "kl", "strength", "chance", "note",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SteeringReport(Result):
    """What a steering edit is and what it does, measured before control returns to the caller.

    Alignment is the mean ``|cos|`` of tokens with the direction w.

    Attributes:
        direction: w, unit length.
        read_direction: r in ``F + α w rᵀ``: w itself (hook), or its projection on what the value
            map can read (weights).
        reach: ``‖r‖²``, the share of w that can be read; 1 if all of it.
        alpha: α.
        gap: ``|1 + λ1| / |1 + λ2|`` after the edit (``|λ1|/|λ2|`` without skip), as asked for.
        gap_before: The same ratio before.
        eigenvalue: λ1 after the edit, real.
        eigenvector_cosine: ``|⟨v1, w⟩|`` after the edit.
        relative_edit: ``‖ΔF‖_F / ‖F‖_F``.
        relative_weight_edit: ``‖ΔW_O‖_F / ‖W_O‖_F``; ``None`` for the hook.
        conditions: One entry per condition, see :meth:`to_dataframe`.
        follows_sign: Share of text tokens that end on the side of w on which they were.
        top_tokens: For the first texts, the likeliest next tokens (or fillings of the last place)
            before and after, with probabilities.
        layer: Layer edited.
        method: ``"weights"`` (through W_O) or ``"hook"`` (no weight touched).
        skip: Whether dominance is by ``|1 + λ|``.
        source: What the direction was made from.
        tokens: ``"text"``, or ``"random ids"`` if no texts were given.
        n_tokens: Number of tokens measured.
    """

    direction: Float[Tensor, " d_model"]
    read_direction: Float[Tensor, " d_model"]
    reach: float
    alpha: float
    gap: float
    gap_before: float | None
    eigenvalue: float
    eigenvector_cosine: float
    relative_edit: float
    relative_weight_edit: float | None
    conditions: tuple[Mapping[str, Any], ...]
    follows_sign: float
    top_tokens: tuple[Mapping[str, Any], ...]
    layer: int
    method: str
    skip: bool
    source: str
    tokens: str
    n_tokens: int

    @property
    def alignment_before(self) -> float:
        """Mean ``|cos|`` of ``resid_post`` with w over the text tokens, model as it was."""
        return float(self.conditions[0]["alignment"])

    @property
    def alignment_after(self) -> float:
        """The same in the steered model."""
        return float(self.conditions[1]["alignment"])

    @property
    def kl(self) -> float:
        """Mean KL(original ‖ steered) of the output distribution over positions, in nats."""
        return float(self.conditions[1]["kl"])

    def to_dataframe(self) -> pd.DataFrame:
        """One row per condition: ``original``, ``steered``, then the controls.

        ``alignment`` and ``positive`` (share of tokens on the side of +w) are of text tokens in the
        real model; ``random_alignment`` of isotropic random vectors after one linear step
        ``x + F x``; ``kl`` in nats; ``strength`` is α, or the length of an additive vector;
        ``chance`` the alignment of random vectors; ``note`` says what fell short.
        """
        import pandas as pd

        return pd.DataFrame(list(self.conditions), columns=list(_COLUMNS))

    def plot(self, template: str | None = None) -> Figure:
        """Alignment against KL, one mark per condition."""
        from tl_spectral.plots import steering_figure

        return steering_figure(self.to_dataframe(), template=template)


@dataclass(frozen=True)
class _Edit:
    """``F + strength · write readᵀ``; ``coefficients`` are its reading half in W_O."""

    write: Tensor
    read: Tensor
    strength: float
    coefficients: Tensor | None

    def delta(self) -> Tensor:
        """What it adds to F."""
        return self.strength * torch.outer(self.write, self.read)

    def apply(self, view: ModelView, layer: int) -> AbstractContextManager[None]:
        if self.coefficients is None:
            return attention_plus(view, layer, self.strength * self.read, self.write)
        change = self.strength * torch.outer(self.coefficients, self.write)
        return output_weight_plus(view, layer, change)


@dataclass(frozen=True)
class _Plan:
    view: ModelView
    layer: int
    F: Tensor
    edit: _Edit
    skip: bool
    method: str
    source: str
    pseudo_inverse: Tensor | None
    W_V: Tensor
    weight_norm: float
    tokens: list[Tensor]
    given: bool
    n_controls: int
    cutoff: float
    seed: int


def steer(
    model: Any,
    direction: Any,
    layer: int = -1,
    gap: float = 5.0,
    *,
    method: Method = "weights",
    skip: bool = True,
    texts: Any = None,
    cutoff: float = 0.05,
    controls: int = 2,
    seed: int = 0,
) -> AbstractContextManager[SteeringReport]:
    """Make a direction the dominant mode of one layer, for as long as the context lasts.

    ``F' = F + α w rᵀ`` with α just large enough for the gap. Tokens are drawn to ±w by the sign of
    ⟨r, x⟩, where x is what attention reads (after the norm, if there is one). On the real model the
    pull is weaker than in the paper's dynamics where the residual stream is longer than what
    the norm hands on, and a norm after attention (Gemma 2, OLMo 2) bounds it.

    Arguments are checked, and α found, when this is called; the model is changed on entering and
    is bit for bit what it was on leaving: also after an exception, nested, in any order, and where
    two models share the weight.

    Args:
        model: A ``TransformerBridge`` with standard attention.
        direction: A float tensor ``[d_model]``; a token (a string that is one token, or its id; its
            unembedding is taken); a pair ``(towards, away)`` of texts (difference of the mean
            ``resid_post`` of this layer at the last position); or a real ``PrincipalMode``.
        layer: Layer; the last by default.
        gap: Required ratio of the dominant modulus to the next, ``PrincipalMode.gap``; above 1.
        method: ``"weights"``: W_O is edited, by least squares through the value map, so that the
            edit acts through the heads' attention; ``"hook"``: no weight is touched,
            ``α w ⟨w, x⟩`` is added to the attention output, every position reading itself.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.
        texts: What to measure on; 4 sequences of 16 random token ids if not given.
        cutoff: Singular values of the value map below this share of the largest are not used. With
            all of them heads cancel each other by huge coefficients, which holds only if they
            attend alike; what it costs is in ``reach``.
        controls: Draws of each random control; 0 leaves out all controls.
        seed: Seed of the random controls and ids.

    Returns:
        A context manager that yields a :class:`SteeringReport`.

    Raises:
        InputError: If the direction is zero, not finite, of the wrong size, or a string of several
            tokens; the layer does not exist; the gap is not above 1; or the value map cannot read
            the direction.
        ProvenanceError: If the direction is a result of another model or weight basis (raw or
            compatibility mode).
        UnsupportedModelError: If the layer has no value and output weights per head.
        ModelStateError: If the weights changed between this call and entering.
    """
    view = ModelView(model)
    layer = view.layer(layer)
    number = isinstance(gap, (int, float)) and not isinstance(gap, bool)
    if not number or not 1 < gap < math.inf:
        raise InputError(
            f"gap must be a number above 1, got {gap!r}: it is the ratio of the dominant modulus "
            "to the next, and at 1 no mode is dominant."
        )
    if method not in ("weights", "hook"):
        raise InputError(f"method must be weights or hook, got {method!r}.")
    if isinstance(controls, bool) or not isinstance(controls, int) or controls < 0:
        raise InputError(f"controls must be a whole number, 0 or more, got {controls!r}.")
    if not 0 <= cutoff < 1:
        raise InputError(f"cutoff must lie between 0 and 1, got {cutoff!r}.")
    W_V, W_O = view.ov_factors(layer)
    w, source = _direction(view, layer, direction)
    generator = torch.Generator().manual_seed(seed)
    if texts is None:
        length = min(16, view.n_ctx)
        tokens = list(torch.randint(view.n_vocab, (4, length), generator=generator))
    else:
        tokens = view.tokens(texts)

    values = W_V.double().cpu().transpose(0, 1).flatten(1)  # [d_model, head · d_head]
    inverse = torch.linalg.pinv(values, rtol=max(cutoff, 1e-9)) if method == "weights" else None
    coefficients = None if inverse is None else inverse @ w
    read = w if coefficients is None else values @ coefficients
    if read @ w < _UNREACHABLE:
        raise InputError(
            f"The value map of layer {layer} reads only {(read @ w).item():.1e} of this direction, "
            "so no edit of W_O can make it dominant. Use method='hook'."
        )
    F = layer_matrix(W_V, W_O)
    alpha = _alpha(F, w, read, float(gap), skip)
    plan = _Plan(
        view=view,
        layer=layer,
        F=F,
        edit=_Edit(w, read, alpha, coefficients),
        skip=skip,
        method=method,
        source=source,
        pseudo_inverse=inverse,
        W_V=values,
        weight_norm=W_O.double().norm().item(),
        tokens=tokens,
        given=texts is not None,
        n_controls=controls,
        cutoff=cutoff,
        seed=seed,
    )
    return _steering(plan)


@contextmanager
def _steering(plan: _Plan) -> Iterator[SteeringReport]:
    view = plan.view
    if ModelView(view.source).fingerprint != view.fingerprint:
        raise ModelStateError(
            f"The weights of {view.name} changed after steer() was called, so its α no longer "
            "fits. Call it again."
        )
    report = _report(plan)
    with plan.edit.apply(view, plan.layer):
        yield report


# ---------------------------------------------------------------------- the edit


def _direction(view: ModelView, layer: int, given: Any) -> tuple[Float[Tensor, " d_model"], str]:
    if isinstance(given, PrincipalMode):
        view.provenance().require_same_model(given.provenance, "the model and the direction")
        if given.kind != "real":
            raise InputError("A complex mode is a plane, not a direction; give a real one.")
        vector, source = given.subspace[:, 0], f"principal mode of layer {given.layer}"
    elif isinstance(given, str):
        token = _single_token(view, given)
        vector, source = unembedding(view, token), f"token {given!r}"
    elif isinstance(given, int) and not isinstance(given, bool):
        if not 0 <= given < view.n_vocab:
            raise InputError(f"Token {given} does not exist; ids go from 0 to {view.n_vocab - 1}.")
        vector, source = unembedding(view, given), f"token {given}"
    elif isinstance(given, tuple) and len(given) == 2:
        means = [
            capture(view.source, texts, layers=[layer], sites=[]).resid_post[0].double().mean(dim=0)
            for texts in given
        ]
        vector, source = means[0] - means[1], "contrast of texts"
    elif isinstance(given, Tensor) and given.is_floating_point():
        vector, source = given, "vector"
    else:
        raise InputError(
            "direction must be a float tensor [d_model], a token (string or id), a pair of texts "
            f"(towards, away) or a PrincipalMode, got {type(given).__name__}."
        )
    if vector.shape != (view.d_model,):
        raise InputError(
            f"The direction has shape {tuple(vector.shape)}; {view.name} needs ({view.d_model},)."
        )
    vector = vector.detach().double().cpu()
    norm = vector.norm().item()
    if not math.isfinite(norm) or norm == 0:
        raise InputError("The direction is zero or not finite; it points nowhere.")
    return vector / norm, source


def _single_token(view: ModelView, text: str) -> int:
    tokenizer = view.source.tokenizer
    if tokenizer is None:
        raise InputError(f"{view.name} has no tokenizer; give the token's id instead of {text!r}.")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = [tokenizer.decode([i]) for i in ids]
        raise InputError(
            f"{text!r} is {len(ids)} tokens {pieces}, not one. Choose one of them (a leading space "
            "often matters), or give a pair of texts as a contrast."
        )
    return int(ids[0])


def _alpha(F: Tensor, w: Tensor, r: Tensor, gap: float, skip: bool) -> float:
    """α for which ``F + α w rᵀ`` has a real dominant mode with the required gap.

    μ is an eigenvalue of ``F + α w rᵀ`` exactly if ``1 = α rᵀ(μ − F)⁻¹ w``, so α follows from μ in
    closed form, and the gap is one equation in μ.
    """
    identity, keep = torch.eye(len(F), dtype=F.dtype), float(skip)

    def alpha(mu: float) -> float:
        resolvent = (r @ torch.linalg.solve(mu * identity - F, w)).item()
        return 1 / resolvent if resolvent > 0 else -1.0

    def excess(mu: float) -> float:
        strength = alpha(mu)
        if strength < 0:
            return -gap
        values, _ = eigensystem(F + strength * torch.outer(w, r))
        rest = torch.cat([values[: (i := int((values - mu).abs().argmin()))], values[i + 1 :]])
        second = (rest + keep).abs().max().item() if len(rest) else 0.0
        return math.inf if second == 0 else (mu + keep) / second - gap

    values, _ = eigensystem(F)
    high = gap * max((values + keep).abs().max().item(), 1e-3)
    while excess(high) < 0:
        high *= 2
        if high > 1e12:
            raise InputError(
                f"No finite edit reaches a gap of {gap}: ask for less, or use method='hook'."
            )
    low = high / 2
    while excess(low) >= 0 and low > 1e-9 * high:
        low /= 2
    if excess(low) >= 0:
        return alpha(low)
    # the root itself may lie a rounding below the gap: the upper end of the bracket does not
    root = float(brentq(excess, low, high, rtol=1e-7))
    return alpha(root * (1 + 1e-6))


# ---------------------------------------------------------------------- what it does


def _report(plan: _Plan) -> SteeringReport:
    view, edit, F = plan.view, plan.edit, plan.F
    before = dominant_modes(F, skip=plan.skip, count=2)
    first, second = dominant_modes(F + edit.delta(), skip=plan.skip, count=2)
    meter = _Meter(plan)
    steered = meter.condition("steered", edit, edit.delta())
    now = meter.last_cosines
    conditions = [meter.original, steered]
    if plan.n_controls:
        conditions += _controls(plan, meter, steered["kl"])
    size = edit.delta().norm().item()
    weight = (
        edit.strength * edit.coefficients.norm().item() / plan.weight_norm
        if edit.coefficients is not None
        else None
    )
    options = {name: getattr(plan, name) for name in ("layer", "method", "skip", "cutoff")}
    options["direction"] = plan.source
    return SteeringReport(
        direction=edit.write,
        read_direction=edit.read,
        reach=edit.read.square().sum().item(),
        alpha=edit.strength,
        gap=first.strength / second.strength if second.strength else math.inf,
        gap_before=before[0].strength / before[1].strength if before[1].strength else None,
        eigenvalue=first.eigenvalue.real,
        eigenvector_cosine=(first.subspace.T @ edit.write).norm().item(),
        relative_edit=size / F.norm().item(),
        relative_weight_edit=weight,
        conditions=tuple(conditions),
        follows_sign=(meter.cosines.sign() == now.sign()).double().mean().item(),
        top_tokens=meter.top_tokens(),
        layer=plan.layer,
        method=plan.method,
        skip=plan.skip,
        source=plan.source,
        tokens="text" if plan.given else "random ids",
        n_tokens=len(meter.cosines),
        provenance=view.provenance(plan.tokens, seed=plan.seed, options=options),
    )


class _Meter:
    """Measures conditions against the unsteered model, which is run once."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        generator = torch.Generator().manual_seed(plan.seed + 1)
        d = plan.view.d_model
        self.random = torch.randn(1024, d, generator=generator, dtype=torch.float64)
        runs = [run_once(plan.view, row, plan.layer) for row in plan.tokens]
        self.log_probs = [log_probs for log_probs, _ in runs]
        self.steered_last: list[Tensor] = []
        states = torch.cat([states for _, states in runs])
        self.mean_norm = states.norm(dim=-1).mean().item()
        self.cosines = torch.nn.functional.cosine_similarity(states, plan.edit.write[None])
        self.last_cosines = self.cosines
        self.original = self._row("original", None, plan.F, self.cosines, 0.0)

    def condition(
        self, name: str, edit: _Edit | Tensor, delta: Tensor | None, note: str = ""
    ) -> dict[str, Any]:
        """Run the model under an edit, or with an additive vector, and compare."""
        plan = self.plan
        with self._applied(edit):
            kl, states, last = self._run()
        if name == "steered":
            self.steered_last = last
        self.last_cosines = torch.nn.functional.cosine_similarity(states, plan.edit.write[None])
        strength = edit.norm().item() if isinstance(edit, Tensor) else edit.strength
        F = None if delta is None else plan.F + delta
        return self._row(name, strength, F, self.last_cosines, kl, note)

    def kl(self, vector: Tensor) -> float:
        """KL that an additive vector costs."""
        with self._applied(vector):
            return self._run()[0]

    def _applied(self, edit: _Edit | Tensor) -> AbstractContextManager[None]:
        plan = self.plan
        if isinstance(edit, Tensor):
            return residual_plus(plan.view, plan.layer, edit)
        return edit.apply(plan.view, plan.layer)

    def _run(self) -> tuple[float, Tensor, list[Tensor]]:
        plan = self.plan
        total, count, states, last = 0.0, 0, [], []
        for row, before in zip(plan.tokens, self.log_probs, strict=True):
            after, state = run_once(plan.view, row, plan.layer)
            gain = torch.where(before.isfinite(), before - after, torch.zeros_like(before))
            total += (before.exp() * gain).sum().item()
            count += len(row)
            states.append(state)
            last.append(after[-1])
        return total / count, torch.cat(states), last

    def _row(
        self,
        name: str,
        strength: float | None,
        F: Tensor | None,
        cosines: Tensor,
        kl: float | None,
        note: str = "",
    ) -> dict[str, Any]:
        plan, drawn = self.plan, None
        if F is not None:
            stepped = float(plan.skip) * self.random + self.random @ F.T
            cosine = torch.nn.functional.cosine_similarity(stepped, plan.edit.write[None])
            drawn = cosine.abs().mean().item()
        return {
            "condition": name,
            "alignment": cosines.abs().mean().item(),
            "positive": (cosines > 0).double().mean().item(),
            "random_alignment": drawn,
            "kl": kl,
            "strength": strength,
            "chance": chance_alignment(plan.view.d_model),
            "note": note,
        }

    def top_tokens(self, texts: int = 3, k: int = 5) -> tuple[dict[str, Any], ...]:
        """The likeliest tokens at the last position of the first texts, before and after."""
        tokenizer = self.plan.view.source.tokenizer

        def likeliest(log_probs: Tensor) -> tuple[tuple[Any, float], ...]:
            top = log_probs.topk(min(k, len(log_probs)))
            names = [tokenizer.decode([i]) if tokenizer else i for i in top.indices.tolist()]
            return tuple(zip(names, top.values.exp().tolist(), strict=True))

        pairs = list(zip(self.log_probs, self.steered_last, strict=True))[:texts]
        return tuple(
            {"text": i, "before": likeliest(before[-1]), "after": likeliest(after)}
            for i, (before, after) in enumerate(pairs)
        )


def _controls(plan: _Plan, meter: _Meter, kl: float) -> list[dict[str, Any]]:
    """Random directions and random rank-1 edits of equal ‖ΔF‖, and +w added at equal KL."""
    generator = torch.Generator().manual_seed(plan.seed + 2)
    size, d = plan.edit.delta().norm().item(), plan.view.d_model

    def unit() -> Tensor:
        vector = torch.randn(d, generator=generator, dtype=torch.float64)
        length: float = vector.norm().item()
        return vector / length

    def edit(write: Tensor, read: Tensor) -> _Edit:
        coefficients = None
        if plan.pseudo_inverse is not None:
            coefficients = plan.pseudo_inverse @ read
            read = plan.W_V @ coefficients
        return _Edit(write, read, size / read.norm().item(), coefficients)

    rows = [_additive(plan, meter, kl)]
    for i in range(plan.n_controls):
        u = unit()
        for name, other in (
            (f"random direction {i}", edit(u, u)),
            (f"random rank-1 {i}", edit(unit(), unit())),
        ):
            rows.append(meter.condition(name, other, other.delta()))
    return rows


def _additive(plan: _Plan, meter: _Meter, kl: float) -> dict[str, Any]:
    """``resid_post + β w`` with β such that it costs the same KL."""
    w, name = plan.edit.write, "additive at equal KL"
    low, high = 0.0, 0.01 * meter.mean_norm
    while meter.kl(high * w) < kl:
        low, high = high, 4 * high
        if high > 1e4 * meter.mean_norm:
            note = "No length of vector costs as much KL; this is the longest tried."
            return meter.condition(name, low * w, None, note)
    for _ in range(20):
        middle = (low + high) / 2
        cost = meter.kl(middle * w)
        if abs(cost - kl) <= 0.01 * kl:
            break
        low, high = (middle, high) if cost < kl else (low, middle)
    return meter.condition(name, (low + high) / 2 * w, None)
