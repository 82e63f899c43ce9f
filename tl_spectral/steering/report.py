"""What a steering edit is and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_COLUMNS = (
    "condition", "alignment", "alignment_se", "alignment_plus", "alignment_minus", "positive",
    "follows_sign", "random_alignment", "kl", "kl_se", "nll", "perplexity", "strength", "chance",
    "note",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SteeringReport(Result):
    """What a steering edit is and what it does, measured before control returns to the caller.

    Alignment is the mean ``|cos|`` of tokens with the direction w. What is said of F is ``None``
    for the additive vector, which leaves F alone.

    Attributes:
        direction: w, unit length.
        read_direction: r in ``F + α w rᵀ``: w itself (hook), or its projection on what the value
            map can read (weights).
        reach: ``‖r‖²``, the share of w that can be read; 1 if all of it.
        alpha: α; for the additive vector its length, in mean lengths of ``resid_post``.
        gap: ``|1 + λ1| / |1 + λ2|`` after the edit (``|λ1|/|λ2|`` without skip), as asked for;
            where α was given it may be that of another mode than w (see ``eigenvector_cosine``).
        gap_before: The same ratio before.
        eigenvalue: λ1 after the edit; real if it was made for a gap.
        eigenvector_cosine: ``|⟨v1, w⟩|`` after the edit.
        relative_edit: ``‖ΔF‖_F / ‖F‖_F``.
        relative_weight_edit: ``‖ΔW_O‖_F / ‖W_O‖_F``; ``None`` if W_O is not edited.
        shared_weight: Whether other layers use the stored W_O (ALBERT). It is then not written:
            this layer's output projection adds ``z ΔW_O``, which :func:`tl_spectral.ov_circuits`
            does not see.
        conditions: One entry per condition, see :meth:`to_dataframe`.
        top_tokens: For the first three texts, the likeliest next tokens (for an encoder: fillings
            of the last place) before and after, with probabilities.
        generations: For the first three texts ``prompt``, and its greedy continuation ``before``
            and ``after``, as text (as ids if the model has no tokenizer). None for an encoder,
            without texts, or with ``generate=0``.
        notes: What else must be known to read the figures.
        layer: Layer edited.
        method: ``"weights"`` (through W_O), ``"hook"`` (no weight touched) or ``"additive"``.
        skip: Whether dominance is by ``|1 + λ|``.
        source: What the direction was made from.
        tokens: ``"text"``, or ``"random ids"`` if no texts were given.
        n_tokens: Number of tokens measured.
    """

    direction: Float[Tensor, " d_model"]
    read_direction: Float[Tensor, " d_model"] | None
    reach: float | None
    alpha: float
    gap: float | None
    gap_before: float | None
    eigenvalue: complex | None
    eigenvector_cosine: float | None
    relative_edit: float | None
    relative_weight_edit: float | None
    shared_weight: bool
    conditions: tuple[Mapping[str, Any], ...]
    top_tokens: tuple[Mapping[str, Any], ...]
    generations: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]
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
    def follows_sign(self) -> float:
        """Share of text tokens that end on the side of w on which they were."""
        return float(self.conditions[1]["follows_sign"])

    @property
    def kl(self) -> float:
        """Mean KL(original ‖ steered) of the output distribution over positions, in nats."""
        return float(self.conditions[1]["kl"])

    def to_dataframe(self) -> pd.DataFrame:
        """One row per condition: ``original``, ``steered``, then the controls.

        All but ``random_alignment`` is of text tokens in the real model, at ``resid_post``:

        * ``alignment``: mean ``|cos|`` with w; ``chance`` is that of random vectors.
          ``alignment_se``, ``kl_se``: standard errors over texts, whose tokens go together; none
          for a single text.
        * ``alignment_plus``, ``alignment_minus``: the same over the tokens that were on the side of
          +w, of −w, in the original model.
        * ``positive``: share of tokens on the side of +w; ``follows_sign``: share on the side on
          which they were.
        * ``random_alignment``: mean ``|cos|`` of isotropic random vectors after one linear step
          ``x + F x``; none for a vector added, which leaves F alone.
        * ``kl``: KL(original ‖ condition) of the output distribution, nats, mean over positions.
        * ``nll``: mean negative log-likelihood of the texts' next tokens, nats; ``perplexity`` is
          its ``exp``. Only for causal models with given texts; ``note`` says so.
        * ``strength``: α, or the length of a vector added.
        * ``note``: what fell short.
        """
        import pandas as pd

        return pd.DataFrame(list(self.conditions), columns=list(_COLUMNS))

    def plot(self, template: str | None = None) -> Figure:
        """Alignment against KL, one mark per condition."""
        from tl_spectral.plots.steering import steering_figure

        return steering_figure(self.to_dataframe(), template=template)
