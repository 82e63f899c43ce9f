"""Alignment of tokens with each layer's dominant mode, beside all controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView, Site
from tl_spectral.model.view import Fold, StopForward, by_length
from tl_spectral.power.classes import TokenClasses, describe, token_classes
from tl_spectral.power.result import MEASURES, PowerAlignment
from tl_spectral.power.rho import effective_count, wilson
from tl_spectral.power.targets import Target, Targets, alignment

_BATCH_TOKENS = 2048
_SITES: tuple[Site, Site] = ("resid_pre", "resid_post")


def power_alignment(
    model: Any,
    texts: Any,
    *,
    layers: Sequence[int] | None = None,
    skip: bool = True,
    fold: Fold | str = "none",
    classes: TokenClasses = "position",
    modes: int = 3,
    random_tokens: int = 1024,
    random_maps: int = 3,
    seed: int = 0,
) -> PowerAlignment:
    """Measure whether tokens tilt towards each layer's dominant OV mode, beside all controls.

    Args:
        model: A ``TransformerBridge`` with standard attention, or a ``HookedAlbert``.
        texts: Texts or token ids; every position is measured.
        layers: Which layers; all by default.
        skip: Dominance by ``|1 + λ|`` (the iteration that is run) instead of ``|λ|``.
        fold: ``"none"``: F from the weights as they are; ``"norm"``: with the linear part of the
            norm that attention reads through; ``"norm+post"``: also with the gain of a norm on the
            attention branch.
        classes: Classes of tokens that get rows of their own beside ``all``, ``first`` and
            ``rest``: ``"words"`` for function words, content words, punctuation and special tokens
            (English; needs a tokenizer), a dict of class → token ids, or a function of token id and
            position that names the class. See :func:`tl_spectral.power.classes.token_classes`.
        modes: Modes measured, v1 included; eigenspaces of more than two dimensions (the null space
            of a low-rank F) are left out of the controls.
        random_tokens: Isotropic random tokens per layer.
        random_maps: Draws of a random F of equal norm; 0 leaves out both random maps (``rotated F``
            is drawn once, as each costs an eigendecomposition per layer).
        seed: Seed of tokens and maps.

    Returns:
        γ, ρ with its interval, the criterion and the controls, per layer.

    Raises:
        InputError: If there is no text, a layer does not exist, an option is unknown, or a count is
            not positive.
        UnsupportedModelError: If a layer has no value and output weights per head.
    """
    view = ModelView(model)
    chosen = view.layers(layers)
    for name, count in (("modes", modes), ("random_tokens", random_tokens)):
        if count < 1:
            raise InputError(f"{name} must be at least 1, got {count}.")
    if random_maps < 0:
        raise InputError(f"random_maps must not be negative, got {random_maps}.")
    tokens = view.tokens(texts)
    masks = token_classes(view, tokens, classes)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(random_tokens, view.d_model, generator=generator, dtype=torch.float64)
    made = Targets(
        view, chosen, skip=skip, fold=fold, count=modes, draws=random_maps, x=x, generator=generator
    )
    targets = [made.of(layer) for layer in chosen]
    before, after = _text_alignment(view, tokens, chosen, targets)
    text = torch.cat([torch.full((row.numel(),), i) for i, row in enumerate(tokens)])

    rows: list[dict[str, Any]] = []
    for row, layer in enumerate(chosen):
        start = 0
        for target in targets[row]:
            own = slice(start, start + len(target.modes))
            start = own.stop
            pair = before[row][:, own], after[row][:, own]
            measured = {
                name: _measure(pair[0][mask], pair[1][mask], text[mask])
                for name, mask in masks.items()
            }
            measured["random"] = _measure(target.before, target.after, None)
            rows += [
                {"layer": layer, "target": target.name, "tokens": name} | values | target.facts
                for name, values in measured.items()
            ]

    def column(tokens: str, measure: str, dtype: torch.dtype = torch.float64) -> Tensor:
        found = {r["layer"]: r for r in rows if (r["target"], r["tokens"]) == ("v1", tokens)}
        return torch.tensor([found[layer][measure] for layer in chosen], dtype=dtype)

    return PowerAlignment(
        **{measure: column("all", measure) for measure in MEASURES},
        gamma_chance=column("all", "chance"),
        random_rho=column("random", "rho"),
        criterion=column("random", "criterion", torch.bool),
        criterion_left=column("random", "criterion_left"),
        criterion_right=column("random", "criterion_right"),
        predicted_rho=column("random", "predicted_rho"),
        rows=tuple(rows),
        layers=chosen,
        n_tokens=len(text),
        n_texts=len(tokens),
        skip=skip,
        provenance=view.provenance(
            tokens,
            seed=seed,
            options={
                "skip": skip,
                "fold": fold,
                "classes": describe(classes),
                "modes": modes,
                "random_tokens": random_tokens,
                "random_maps": random_maps,
                "basis": f"residual, {view.weights} weights",
            },
        ),
    )


def _text_alignment(
    view: ModelView,
    tokens: list[Tensor],
    chosen: tuple[int, ...],
    targets: list[list[Target]],
) -> tuple[list[Tensor], list[Tensor]]:
    """Alignment of every token with every target of each layer, before and after it.

    States are projected as they pass, so that none has to be kept.
    """
    total = sum(row.numel() for row in tokens)
    offsets = [0]
    for row in tokens:
        offsets.append(offsets[-1] + row.numel())
    subspaces = [[m.subspace for target in mine for m in target.modes] for mine in targets]
    kept = {
        site: [torch.zeros(total, len(mine), dtype=torch.float64) for mine in subspaces]
        for site in _SITES
    }
    last = view.hook_name(max(chosen), "resid_post")
    for length, members in by_length(tokens).items():
        size = max(1, _BATCH_TOKENS // length)
        for batch in (members[i : i + size] for i in range(0, len(members), size)):
            at = torch.cat([torch.arange(offsets[i], offsets[i] + length) for i in batch])

            def project(row: int, site: Site, name: str, at: Tensor = at) -> Any:
                def hook(activation: Tensor) -> None:
                    states = activation.detach().reshape(-1, view.d_model).cpu().double()
                    for k, Q in enumerate(subspaces[row]):
                        kept[site][row][at, k] = alignment(states, Q)
                    if (site, name) == ("resid_post", last):
                        raise StopForward

                return hook

            hooks: dict[str, Any] = {}
            for index, layer in enumerate(chosen):
                for site in _SITES:
                    name = view.hook_name(layer, site)
                    hooks[name] = project(index, site, name)
            with torch.no_grad():
                view.run(torch.stack([tokens[i] for i in batch]), hooks)
    return kept["resid_pre"], kept["resid_post"]


def _measure(
    before: Float[Tensor, "token draw"],
    after: Float[Tensor, "token draw"],
    cluster: Tensor | None,
) -> dict[str, Any]:
    grown = (after > before).double().mean(dim=1)  # per token, averaged over draws
    rho = grown.mean().item()
    low, high = wilson(rho, effective_count(grown, cluster))
    return {
        "gamma_before": before.mean().item(),
        "gamma_after": after.mean().item(),
        "rho": rho,
        "rho_low": low,
        "rho_high": high,
        "n_tokens": len(before),
    }
