"""What an edit does to a model: states, predictions and continuations beside the unedited ones."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tl_spectral.model import ModelView
from tl_spectral.model.passes import Rerun, continuation
from tl_spectral.modes import chance_alignment
from tl_spectral.steering.direction import unit_direction
from tl_spectral.steering.edit import RankOne, Shift

_SHOWN = 3  # texts whose predictions and continuations are reported


@dataclass(frozen=True)
class Subject:
    """What is steered, and what it is measured on.

    Attributes:
        view: The model.
        layer: Layer edited.
        direction: w, unit length.
        source: What the direction was made from.
        tokens: Token ids of each text.
        given: Whether the texts were given; random ids otherwise.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.
        seed: Seed of everything random.
    """

    view: ModelView
    layer: int
    direction: Float[Tensor, " d_model"]
    source: str
    tokens: tuple[Tensor, ...]
    given: bool
    skip: bool
    seed: int

    @property
    def no_prediction(self) -> str:
        """Why there is no perplexity and no continuation; empty if there is."""
        if not self.view.causal:
            return "no perplexity: the model is not causal"
        return "" if self.given else "no perplexity: random ids are no text"


def subject_of(
    view: ModelView, direction: Any, layer: int, texts: Any, *, skip: bool, seed: int
) -> Subject:
    """What is steered and what it is measured on, checked."""
    w, source = unit_direction(view, layer, direction)
    if texts is None:
        generator = torch.Generator().manual_seed(seed)
        tokens = list(torch.randint(view.n_vocab, (4, min(16, view.n_ctx)), generator=generator))
    else:
        tokens = view.tokens(texts)
    return Subject(view, layer, w, source, tuple(tokens), texts is not None, skip, seed)


@dataclass(frozen=True)
class Outcome:
    """The model under one condition.

    Attributes:
        states: ``resid_post`` of the layer at all positions of all texts, float64.
        kl: Mean over positions of KL(original ‖ condition) of the output distribution, nats.
        kl_se: Its standard error over texts.
        nll: Mean negative log-likelihood of the next token of the texts, nats; ``None`` if the
            model is not causal or no texts were given.
        last: Log-probabilities at the last position of each text.
    """

    states: Float[Tensor, "token d_model"]
    kl: float
    kl_se: float | None
    nll: float | None
    last: tuple[Float[Tensor, " d_vocab"], ...]


class Meter:
    """Compares conditions with the model as it was, which is run once.

    Args:
        subject: What is measured.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        generator = torch.Generator().manual_seed(subject.seed + 1)
        size = (1024, subject.view.d_model)
        self._random = torch.randn(size, generator=generator, dtype=torch.float64)
        self._texts = [Rerun(subject.view, row, subject.layer) for row in subject.tokens]
        self.original = self._outcome([(text.log_probs, text.states) for text in self._texts])
        self.mean_norm = self.original.states.norm(dim=-1).mean().item()

    def run(self, edit: RankOne | Shift) -> Outcome:
        """The model under an edit."""
        if isinstance(edit, Shift):
            return self._outcome([text.shifted(edit.vector) for text in self._texts])
        with edit.apply(self.subject.view, self.subject.layer):
            return self._outcome([text.edited() for text in self._texts])

    def _outcome(self, runs: list[tuple[Tensor, Tensor]]) -> Outcome:
        kl, nll = [], []
        for text, (after, _) in zip(self._texts, runs, strict=True):
            before = text.log_probs
            gain = torch.where(before.isfinite(), before - after, torch.zeros_like(before))
            kl.append((before.exp() * gain).sum(dim=-1))
            nll.append(-after[:-1].gather(1, text.tokens[1:, None].to(after.device))[:, 0])
        states, scored = torch.cat([states for _, states in runs]), torch.cat(nll)
        cost = torch.cat(kl)
        told = not self.subject.no_prediction and len(scored) > 0
        return Outcome(
            states=states,
            kl=cost.mean().item(),
            kl_se=self._error(cost),
            nll=scored.mean().item() if told else None,
            last=tuple(log_probs[-1] for log_probs, _ in runs),
        )

    def _error(self, values: Float[Tensor, " token"]) -> float | None:
        """Standard error of a mean over tokens, texts being the independent draws; None for one."""
        lengths = [len(text.tokens) for text in self._texts]
        n = len(lengths)
        if n < 2:
            return None
        off = torch.stack([part.sum() for part in torch.split(values - values.mean(), lengths)])
        return (off.square().sum() * n / (n - 1)).sqrt().item() / len(values)

    # ------------------------------------------------------------------ in figures

    def row(
        self,
        name: str,
        outcome: Outcome,
        *,
        edit: RankOne | Shift | None = None,
        F: Tensor | None = None,
        target: Tensor | None = None,
        note: str = "",
    ) -> dict[str, Any]:
        """One row of a table, see :meth:`SteeringReport.to_dataframe`.

        Args:
            name: Name of the condition.
            outcome: What it does.
            edit: The edit that it is; none of the original model.
            F: Layer matrix of the original model.
            target: Direction that alignment is measured with; w by default.
            note: What fell short.
        """
        subject = self.subject
        w = subject.direction if target is None else target
        began, now = (cosine_similarity(run.states, w[None]) for run in (self.original, outcome))
        plus, minus = now[began > 0].abs(), now[began < 0].abs()
        notes = [note, subject.no_prediction]
        if not subject.no_prediction and outcome.nll is None:
            notes.append("no perplexity: no text has a second token")
        notes += [f"no token began on the {side} side" for side, of in
                  (("+", plus), ("-", minus)) if not len(of)]  # fmt: skip
        drawn = None
        if F is not None and not isinstance(edit, Shift):
            matrix = F if edit is None else F + edit.delta
            stepped = float(subject.skip) * self._random + self._random @ matrix.T
            drawn = cosine_similarity(stepped, w[None]).abs().mean().item()
        return {
            "condition": name,
            "alignment": now.abs().mean().item(),
            "alignment_se": self._error(now.abs()),
            "alignment_plus": plus.mean().item() if len(plus) else None,
            "alignment_minus": minus.mean().item() if len(minus) else None,
            "positive": (now > 0).double().mean().item(),
            "follows_sign": (began.sign() == now.sign()).double().mean().item(),
            "random_alignment": drawn,
            "kl": outcome.kl,
            "kl_se": outcome.kl_se,
            "nll": outcome.nll,
            "perplexity": None if outcome.nll is None else perplexity(outcome.nll),
            "strength": None if edit is None else edit.strength,
            "chance": chance_alignment(subject.view.d_model),
            "note": "; ".join(filter(None, notes)),
        }

    # ------------------------------------------------------------------ in words

    def top_tokens(self, steered: Outcome, k: int = 5) -> tuple[Mapping[str, Any], ...]:
        """The likeliest tokens at the last position of the first texts, before and after."""
        tokenizer = self.subject.view.source.tokenizer

        def likeliest(log_probs: Tensor) -> tuple[tuple[Any, float], ...]:
            top = log_probs.topk(min(k, len(log_probs)))
            names = [tokenizer.decode([i]) if tokenizer else i for i in top.indices.tolist()]
            return tuple(zip(names, top.values.exp().tolist(), strict=True))

        pairs = list(zip(self.original.last, steered.last, strict=True))[:_SHOWN]
        return tuple(
            {"text": i, "before": likeliest(before), "after": likeliest(after)}
            for i, (before, after) in enumerate(pairs)
        )

    def generations(self, edit: RankOne | Shift, count: int) -> tuple[Mapping[str, Any], ...]:
        """Greedy continuations of the first texts, without and with an edit."""
        subject = self.subject
        prompts = subject.tokens[:_SHOWN]

        def told(ids: Tensor, special: bool = True) -> Any:
            tokenizer = subject.view.source.tokenizer
            if not tokenizer:
                return tuple(ids.tolist())
            return tokenizer.decode(ids.tolist(), skip_special_tokens=not special)

        def continued(context: AbstractContextManager[None]) -> list[Any]:
            with context:
                return [told(continuation(subject.view, row, count)) for row in prompts]

        before = continued(nullcontext())
        after = continued(edit.apply(subject.view, subject.layer))
        return tuple(
            {"prompt": told(row, special=False), "before": old, "after": new}
            for row, old, new in zip(prompts, before, after, strict=True)
        )


def perplexity(nll: float) -> float:
    """``exp`` of a mean negative log-likelihood; infinite where that overflows."""
    return float(torch.tensor(nll, dtype=torch.float64).exp())
