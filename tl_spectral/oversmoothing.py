"""Oversmoothing: how alike the tokens of one text become over the depth of the real model.

Attention alone drives tokens to rank one (Dong, Cordonnier & Loukas 2021), to consensus in the
words of [B] (arXiv 2605.25619). Here norms, FFN and positions are in place, which may prevent it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.model import ModelView
from tl_spectral.model.view import StopForward, by_length
from tl_spectral.results import Result
from tl_spectral.token_geometry import MEASURES, token_geometry

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

TOKENS = ("all", "rest")
_DRAWS = 16  # of isotropic tokens; their measures hardly vary


@dataclass(frozen=True, eq=False)
class Oversmoothing(Result):
    """Likeness of the tokens of a text at every layer boundary of the real model.

    Measures (:data:`measures`, defined in :func:`tl_spectral.token_geometry.token_geometry`):
    ``order`` ``‖mean x̂‖`` and ``mean_cosine`` of directions, ``effective_rank`` and ``stable_rank``
    of the matrix of tokens X, and ``residual`` ``‖X − 1x̄ᵀ‖_F/‖X‖_F``. Smoothing shows as order and
    cosine rising to 1, ranks falling to 1, the residual falling to 0.

    Each is taken of ``all`` tokens and of the ``rest`` without the first, which in many models is
    an attention sink with a norm a hundred times that of the others: it then *is* the matrix X, and
    the ranks of ``all`` say so rather than that tokens are alike.

    Attributes:
        values: Every measure of every text, ``[variant, boundary, tokens, measure, text]``.
        baseline: The measures of isotropic random tokens, as many as in the texts (mean over
            texts), ``[tokens, measure]``: cosine in closed form (0), the others from 16 draws per
            length of text.
        variants: ``"trained"``, and ``"control"`` if a control was given.
        boundaries: 0 is the embedding, ``l`` the output of layer ``l − 1``, the last one that of
            the whole stack (before the final norm).
        n_tokens: Number of tokens of all texts.
    """

    values: Float[Tensor, "variant boundary tokens measure text"]
    baseline: Float[Tensor, "tokens measure"]
    variants: tuple[str, ...]
    boundaries: tuple[int, ...]
    n_tokens: int

    @property
    def measures(self) -> tuple[str, ...]:
        """Names along the measure dimension."""
        return MEASURES

    @property
    def mean(self) -> Float[Tensor, "variant boundary tokens measure"]:
        """Mean over texts."""
        return self.values.mean(dim=-1)

    @property
    def half_width(self) -> Float[Tensor, "variant boundary tokens measure"] | None:
        """Half of the 95 % interval of the mean (Student's t over texts); ``None`` for one text."""
        n = self.values.shape[-1]
        if n < 2:
            return None
        half: Tensor = stats.t.ppf(0.975, n - 1) * self.values.std(dim=-1) / math.sqrt(n)
        return half

    def to_dataframe(self) -> pd.DataFrame:
        """One row per variant, boundary, tokens and measure: mean, interval over texts, baseline.

        ``low`` and ``high`` are empty for a single text.
        """
        import pandas as pd

        mean, half = self.mean, self.half_width
        rows = []
        for v, variant in enumerate(self.variants):
            for b, boundary in enumerate(self.boundaries):
                for t, tokens in enumerate(TOKENS):
                    for m, measure in enumerate(MEASURES):
                        value = mean[v, b, t, m].item()
                        width = None if half is None else half[v, b, t, m].item()
                        rows.append(
                            {
                                "variant": variant,
                                "boundary": boundary,
                                "tokens": tokens,
                                "measure": measure,
                                "value": value,
                                "low": None if width is None else value - width,
                                "high": None if width is None else value + width,
                                "baseline": self.baseline[t, m].item(),
                            }
                        )
        return pd.DataFrame(rows)

    def plot(self, template: str | None = None) -> Figure:
        """Each measure over depth, with and without the first token, beside isotropic tokens."""
        from tl_spectral.plots import oversmoothing_figure

        return oversmoothing_figure(self.to_dataframe(), template=template)


def oversmoothing(
    model: Any,
    texts: Any,
    *,
    layers: Sequence[int] | None = None,
    control: Any = None,
    batch_tokens: int = 2048,
    seed: int = 0,
) -> Oversmoothing:
    """Measure over depth how alike the tokens of a text are, text by text.

    Args:
        model: A ``TransformerBridge`` or a ``HookedAlbert``.
        texts: Texts or token ids, of at least three tokens each (two without the first).
        layers: Layers whose input and output are measured; all by default.
        control: A second model that reads the same tokens, such as ``tls.reinitialised(model)``:
            what the architecture does untrained.
        batch_tokens: Tokens per forward pass, at least one text of each length.
        seed: Seed of the isotropic tokens.

    Returns:
        Five measures per boundary, their interval over texts, and the baseline.

    Raises:
        InputError: If there is no text, one has fewer than three tokens, a layer does not exist, or
            the control has other layers.
        ModelStateError: If a state is not finite.
    """
    if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int) or batch_tokens < 1:
        raise InputError(f"batch_tokens must be a positive integer, got {batch_tokens!r}.")
    view = ModelView(model)
    views = {"trained": view}
    if control is not None:
        views["control"] = twin = ModelView(control)
        if twin.n_layers != view.n_layers:
            raise InputError(
                f"The control has {twin.n_layers} layers, {view.name} has {view.n_layers}. Use "
                "tls.reinitialised(model)."
            )
    chosen = view.layers(layers)
    boundaries = tuple(sorted({at for layer in chosen for at in (layer, layer + 1)}))
    tokens = view.tokens(texts)
    for index, row in enumerate(tokens):
        if row.numel() < 3:
            raise InputError(
                f"Text {index} has {row.numel()} tokens; likeness without the first needs at least "
                "three. Leave it out, or join it to another."
            )
    values = [_measured(each, tokens, boundaries, batch_tokens) for each in views.values()]
    options: dict[str, Any] = {"layers": chosen, "batch_tokens": batch_tokens}
    if control is not None:
        options["control"] = views["control"].fingerprint
    return Oversmoothing(
        values=torch.stack(values),
        baseline=_isotropic(tokens, view.d_model, seed),
        variants=tuple(views),
        boundaries=boundaries,
        n_tokens=sum(row.numel() for row in tokens),
        provenance=view.provenance(tokens, seed=seed, options=options),
    )


def _both(states: Float[Tensor, "*batch token d"]) -> Float[Tensor, "*batch tokens measure"]:
    """The measures of all tokens, and of all but the first."""
    gram = states @ states.mT
    return torch.stack([token_geometry(gram), token_geometry(gram[..., 1:, 1:])], dim=-2)


def _measured(
    view: ModelView, tokens: list[Tensor], boundaries: tuple[int, ...], batch_tokens: int
) -> Float[Tensor, "boundary tokens measure text"]:
    values = torch.zeros(
        len(boundaries), len(TOKENS), len(MEASURES), len(tokens), dtype=torch.float64
    )
    for length, members in by_length(tokens).items():
        size = max(1, batch_tokens // length)
        for batch in (members[i : i + size] for i in range(0, len(members), size)):
            hooks = {
                _hook_name(view, boundary): _keep(view, values[at], batch, boundary, boundaries)
                for at, boundary in enumerate(boundaries)
            }
            with torch.no_grad():
                view.run(torch.stack([tokens[i] for i in batch]), hooks)
    return values


def _hook_name(view: ModelView, boundary: int) -> str:
    if boundary == view.n_layers:
        return view.hook_name(boundary - 1, "resid_post")
    return view.hook_name(boundary, "resid_pre")


def _keep(
    view: ModelView, kept: Tensor, batch: list[int], boundary: int, boundaries: tuple[int, ...]
) -> Any:
    def hook(activation: Tensor) -> None:
        states = activation.detach().reshape(len(batch), -1, view.d_model).cpu().double()
        norms = states.norm(dim=-1)
        if not (torch.isfinite(norms).all() and norms.min() > 0):
            raise ModelStateError(
                f"At boundary {boundary} of {view.name} a token's state is zero or not finite; "
                f"it has no direction. The texts of this batch: {batch}."
            )
        kept[..., batch] = _both(states).movedim(0, -1)
        if boundary == boundaries[-1]:
            raise StopForward

    return hook


def _isotropic(tokens: list[Tensor], d: int, seed: int) -> Float[Tensor, "tokens measure"]:
    generator = torch.Generator().manual_seed(seed)
    found = torch.zeros(len(TOKENS), len(MEASURES), dtype=torch.float64)
    for length, members in sorted(by_length(tokens).items()):
        x = torch.randn(_DRAWS, length, d, generator=generator, dtype=torch.float64)
        found += _both(x).mean(dim=0) * len(members)
    found /= len(tokens)
    found[:, MEASURES.index("mean_cosine")] = 0.0
    return found
