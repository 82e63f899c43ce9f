"""The report of an edit: its spectrum, its conditions, and what must be known to read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tl_spectral.model.edits import shares_output_weight
from tl_spectral.modes import dominant_modes
from tl_spectral.steering.edit import Editor, RankOne, Shift
from tl_spectral.steering.measurement import Meter, Subject
from tl_spectral.steering.report import SteeringReport
from tl_spectral.steering.rivals import EqualKL, random_directions

_DOMINANT = 0.7  # |cos| with a real v1 from which w may be called the dominant mode


@dataclass(frozen=True)
class Plan:
    """A checked order of :func:`tl_spectral.steer`.

    Attributes:
        subject: What is steered, and what it is measured on.
        method: ``"weights"``, ``"hook"`` or ``"additive"``.
        alpha: Strength of the edit.
        editor: Makes rank-1 edits; ``None`` for the additive vector.
        controls: Draws of each random control.
        generate: Tokens of a continuation.
        options: For the provenance.
    """

    subject: Subject
    method: str
    alpha: float
    editor: Editor | None
    controls: int
    generate: int
    options: Mapping[str, Any]


def report_on(plan: Plan, meter: Meter, edit: RankOne | Shift) -> SteeringReport:
    """Measure an edit, its controls, and what the model says under it."""
    subject = plan.subject
    view = subject.view
    F = None if plan.editor is None else plan.editor.F
    spectrum = _spectrum(plan.editor, edit) if plan.editor and isinstance(edit, RankOne) else {}
    shared = plan.method == "weights" and shares_output_weight(view, subject.layer)
    outcome = meter.run(edit)
    conditions = [
        meter.row("original", meter.original, F=F),
        meter.row("steered", outcome, edit=edit, F=F),
    ]
    if plan.controls:
        rivals = _rivals(plan, meter, edit, outcome.kl)
        conditions += [
            meter.row(name, meter.run(rival), edit=rival, F=F, note=note)
            for name, rival, note in rivals
        ]
    generated = plan.generate and not subject.no_prediction
    return SteeringReport(
        direction=subject.direction,
        read_direction=edit.read if isinstance(edit, RankOne) else None,
        reach=edit.read.square().sum().item() if isinstance(edit, RankOne) else None,
        alpha=plan.alpha,
        gap=spectrum.get("gap"),
        gap_before=spectrum.get("gap_before"),
        eigenvalue=spectrum.get("eigenvalue"),
        eigenvector_cosine=spectrum.get("eigenvector_cosine"),
        relative_edit=spectrum.get("relative_edit"),
        relative_weight_edit=spectrum.get("relative_weight_edit"),
        shared_weight=shared,
        conditions=tuple(conditions),
        top_tokens=meter.top_tokens(outcome),
        generations=meter.generations(edit, plan.generate) if generated else (),
        notes=tuple(_notes(subject, shared, spectrum)),
        layer=subject.layer,
        method=plan.method,
        skip=subject.skip,
        source=subject.source,
        tokens="text" if subject.given else "random ids",
        n_tokens=len(outcome.states),
        provenance=view.provenance(subject.tokens, seed=subject.seed, options=plan.options),
    )


def _spectrum(editor: Editor, edit: RankOne) -> dict[str, Any]:
    F, size = editor.F, edit.delta.norm().item()
    before = dominant_modes(F, skip=editor.skip, count=2)
    after = dominant_modes(F + edit.delta, skip=editor.skip, count=2)

    def gap(modes: Any) -> float | None:
        if len(modes) < 2:
            return None
        return modes[0].strength / modes[1].strength if modes[1].strength else math.inf

    weight = None
    if edit.coefficients is not None:
        weight = edit.strength * edit.coefficients.norm().item() / editor.weight_norm
    return {
        "gap": gap(after),
        "gap_before": gap(before),
        "eigenvalue": after[0].eigenvalue,
        "eigenvector_cosine": (after[0].subspace.T @ edit.write).norm().item(),
        "relative_edit": size / F.norm().item(),
        "relative_weight_edit": weight,
    }


def _notes(subject: Subject, shared: bool, spectrum: Mapping[str, Any]) -> Iterator[str]:
    if not subject.view.causal:
        yield (
            "The model is not causal: top tokens are fillings of the last place, and there are no "
            "generations and no perplexity."
        )
    elif not subject.given:
        yield "Measured on random ids: there are no generations and no perplexity."
    if shared:
        yield (
            "Other layers use the stored W_O, so it is not written: the output projection of this "
            "layer adds what the edited weight would."
        )
    cosine, rotates = spectrum.get("eigenvector_cosine", 1), spectrum.get("eigenvalue", 0).imag != 0
    if rotates or cosine < _DOMINANT:
        mode = "a rotation" if rotates else "v1"
        yield (
            f"The direction is not the dominant mode, which is {mode} with |cos| {cosine:.2f} to "
            "it. A larger α, or a larger gap, makes it so."
        )


def _rivals(
    plan: Plan, meter: Meter, edit: RankOne | Shift, kl: float
) -> Iterator[tuple[str, RankOne | Shift, str]]:
    """+w added at equal KL; random directions and random rank-1 edits of equal ``‖ΔF‖``."""
    subject = plan.subject
    drawn = random_directions(subject.view.d_model, subject.seed + 2)
    if plan.editor is None:
        for i in range(plan.controls):
            yield f"random direction {i}", Shift(edit.strength * next(drawn)), ""
    elif isinstance(edit, RankOne):
        size = edit.delta.norm().item()
        length, note = EqualKL.along_direction(meter).length(kl)
        yield "additive at equal KL", Shift(length * subject.direction), note
        for i in range(plan.controls):
            u = next(drawn)
            yield f"random direction {i}", plan.editor.of_size(u, u, size), ""
            write, read = next(drawn), next(drawn)
            yield f"random rank-1 {i}", plan.editor.of_size(write, read, size), ""
