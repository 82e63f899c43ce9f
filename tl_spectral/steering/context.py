"""``steer``: checks its arguments, finds α, measures, and lends the edited model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.model import ModelView
from tl_spectral.steering.account import Plan, report_on
from tl_spectral.steering.checks import check_count, check_cutoff, check_gap, is_number
from tl_spectral.steering.edit import Editor, RankOne, Shift
from tl_spectral.steering.measurement import Meter, subject_of
from tl_spectral.steering.report import SteeringReport

Method = Literal["weights", "hook", "additive"]
_DEFAULT_GAP = 5.0


def steer(
    model: Any,
    direction: Any,
    layer: int = -1,
    gap: float | None = None,
    *,
    method: Method | str = "weights",
    alpha: float | None = None,
    skip: bool = True,
    texts: Any = None,
    generate: int = 20,
    cutoff: float = 0.05,
    controls: int = 2,
    seed: int = 0,
) -> AbstractContextManager[SteeringReport]:
    """Make a direction the dominant mode of one layer, for as long as the context lasts.

    ``F' = F + α w rᵀ`` with α just large enough for the gap ([B] arXiv 2605.25619). Tokens are
    drawn to ±w by the sign of ⟨r, x⟩, where x is what attention reads (after the norm, if there is
    one); that need not be the side of w on which ``resid_post`` lay, so that a weak edit can lower
    the alignment. On the real model the pull is weaker than in the paper's dynamics where the
    residual stream is longer than what the norm hands on, and a norm after attention (Gemma 2,
    OLMo 2) bounds it. ``method="additive"`` is the usual rival: a constant vector added to the
    stream.

    Arguments are checked, and α found, when this is called; the model is changed on entering and
    is bit for bit what it was on leaving: also after an exception, nested, in any order, and where
    two models share the weight.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert`` with standard attention.
        direction: A float tensor ``[d_model]``; a token (a string that is one token, or its id; its
            unembedding is taken); a pair ``(towards, away)`` of texts (difference of the mean
            ``resid_post`` of this layer at the last position); or a real ``PrincipalMode``.
        layer: Layer; the last by default.
        gap: Required ratio of the dominant modulus to the next, ``PrincipalMode.gap``; above 1.
            5 if neither it nor ``alpha`` is given.
        method: ``"weights"``: W_O is edited, by least squares through the value map, so that the
            edit acts through the heads' attention; ``"hook"``: no weight is touched,
            ``α w ⟨w, x⟩`` is added to the attention output, every position reading itself;
            ``"additive"``: ``α m w`` is added to ``resid_post`` at every position, m being the mean
            length of ``resid_post`` over the tokens measured. It has no gap.
        alpha: α itself, instead of a gap; positive (for the other side of an additive vector,
            negate the direction). The additive vector needs it; 0.01 to 0.1 is usual.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.
        texts: What to measure on; 4 sequences of 16 random token ids if not given.
        generate: Greedy new tokens, without and with the edit, for the first three texts; only for
            causal models with given texts. 0 for none.
        cutoff: Singular values of the value map below this share of the largest are not used. With
            all of them heads cancel each other by huge coefficients, which holds only if they
            attend alike; what it costs is in ``reach``.
        controls: Draws of each random control; 0 leaves out all controls.
        seed: Seed of the random controls and ids.

    Returns:
        A context manager that yields a :class:`SteeringReport`.

    Raises:
        InputError: If the direction is zero, not finite, of the wrong size, or a string of several
            tokens; the layer does not exist; the gap is not above 1, or given together with α;
            the additive vector has no α; or the value map cannot read the direction.
        ProvenanceError: If the direction is a result of another model or weight basis (raw or
            compatibility mode).
        UnsupportedModelError: If the layer has no value and output weights per head (the additive
            vector needs none).
        ModelStateError: If the weights changed between this call and entering.
    """
    view = ModelView(model)
    layer = view.layer(layer)
    if method not in ("weights", "hook", "additive"):
        raise InputError(f"method must be weights, hook or additive, got {method!r}.")
    _check_strength(gap, alpha, method)
    for name, value in (("controls", controls), ("generate", generate)):
        check_count(name, value)
    check_cutoff(cutoff)
    editor = None
    if method != "additive":
        editor = Editor(view, layer, method=method, cutoff=cutoff, skip=skip)
    subject = subject_of(view, direction, layer, texts, skip=skip, seed=seed)
    if editor is not None:
        solver = editor.solver(subject.direction)
        if alpha is None:
            alpha = solver.alpha(float(_DEFAULT_GAP if gap is None else gap))
    assert alpha is not None  # checked with the method
    return _steering(
        Plan(
            subject=subject,
            method=method,
            alpha=float(alpha),
            editor=editor,
            controls=controls,
            generate=generate,
            options={
                "layer": layer,
                "method": method,
                "skip": skip,
                "cutoff": cutoff,
                "direction": subject.source,
            },
        )
    )


def _check_strength(gap: Any, alpha: Any, method: str) -> None:
    if gap is not None and alpha is not None:
        raise InputError("Give gap or alpha, not both: one follows from the other.")
    if method == "additive" and alpha is None:
        raise InputError(
            "An additive vector leaves F alone, so it has no gap. Give alpha, its length in mean "
            "lengths of resid_post; 0.01 to 0.1 is usual."
        )
    if gap is not None:
        check_gap(gap)
    if alpha is not None and not (is_number(alpha) and 0 < alpha < math.inf):
        raise InputError(
            f"alpha must be a positive number, got {alpha!r}. To steer a vector the other way, "
            "negate the direction."
        )


@contextmanager
def _steering(plan: Plan) -> Iterator[SteeringReport]:
    view = plan.subject.view
    if ModelView(view.source).fingerprint != view.fingerprint:
        raise ModelStateError(
            f"The weights of {view.name} changed after steer() was called, so its α no longer "
            "fits. Call it again."
        )
    meter = Meter(plan.subject)
    w = plan.subject.direction
    edit: RankOne | Shift
    if plan.editor is None:
        edit = Shift(plan.alpha * meter.mean_norm * w)
    else:
        edit = plan.editor.edit(w, w, plan.alpha)
    report = report_on(plan, meter, edit)
    with edit.apply(view, plan.subject.layer):
        yield report
