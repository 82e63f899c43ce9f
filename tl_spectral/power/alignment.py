"""Alignment of tokens with each layer's dominant mode, beside all controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView, Site
from tl_spectral.model.view import Fold, StopForward, by_length
from tl_spectral.modes import (
    Mode,
    chance_alignment,
    dominant_modes,
    eigensystem,
    layer_matrix,
)
from tl_spectral.power.classes import TokenClasses, describe, token_classes
from tl_spectral.power.result import MEASURES, PowerAlignment
from tl_spectral.power.rho import criterion_sides, effective_count, predicted_rho, wilson

_BATCH_TOKENS = 2048
_SITES: tuple[Site, Site] = ("resid_pre", "resid_post")


@dataclass
class _Target:
    """A subspace to measure alignment with; several draws of a random one are averaged."""

    name: str
    modes: list[Mode]
    maps: list[Tensor]  # the linear map that random tokens pass through, one per mode


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
    targets = _targets(view, chosen, skip, fold, modes, random_maps, generator)
    before, after = _text_alignment(view, tokens, chosen, targets)
    text = torch.cat([torch.full((row.numel(),), i) for i, row in enumerate(tokens)])
    x = torch.randn(random_tokens, view.d_model, generator=generator, dtype=torch.float64)

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
            measured["random"] = _measure(*_random_alignment(x, target), None)
            facts = _facts(target, view.d_model)
            rows += [
                {"layer": layer, "target": target.name, "tokens": name} | values | facts
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


def _targets(
    view: ModelView,
    chosen: tuple[int, ...],
    skip: bool,
    fold: str,
    count: int,
    draws: int,
    generator: torch.Generator,
) -> list[list[_Target]]:
    """Per layer: v1, the next modes, v1 of another layer, v1 of random maps."""
    d = view.d_model
    identity = torch.eye(d, dtype=torch.float64) * float(skip)
    gaussians = [torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(draws)]
    systems = [eigensystem(G) for G in gaussians]
    matrices = {layer: layer_matrix(*view.ov_factors(layer, fold=fold)) for layer in chosen}
    # Two more than asked for: conjugate pairs and null spaces are passed over among the controls.
    found = {layer: dominant_modes(F, skip=skip, count=count + 2) for layer, F in matrices.items()}
    firsts = {layer: modes[0] for layer, modes in found.items()}
    if len(chosen) == 1 and view.n_layers > 1:
        other = (chosen[0] + 1) % view.n_layers
        F = layer_matrix(*view.ov_factors(other, fold=fold))
        firsts[other] = dominant_modes(F, skip=skip)[0]
    order = list(firsts)
    targets = []
    for layer in chosen:
        F, modes = matrices[layer], found[layer]
        M = F + identity
        mine = [_Target("v1", [modes[0]], [M])]
        narrow = [mode for mode in modes[1:] if mode.subspace.shape[1] <= 2]
        mine += [
            _Target(f"v{k + 2}", [mode], [M]) for k, mode in enumerate(narrow[: max(0, count - 1)])
        ]
        if len(order) > 1:
            other = order[(order.index(layer) + 1) % len(order)]
            mine.append(_Target("other layer", [firsts[other]], [M]))
        if draws:
            scales = [(F.norm() / G.norm()).item() for G in gaussians]
            scaled = [G * scale for G, scale in zip(gaussians, scales, strict=True)]
            first = [
                dominant_modes(G, skip=skip, system=(values * scale, vectors))[0]
                for G, scale, (values, vectors) in zip(scaled, scales, systems, strict=True)
            ]
            mine.append(_Target("random F", first, [G + identity for G in scaled]))
            turned = _haar(gaussians[0]) @ F
            first = [dominant_modes(turned, skip=skip)[0]]
            mine.append(_Target("rotated F", first, [turned + identity]))
        targets.append(mine)
    return targets


def _haar(gaussian: Tensor) -> Float[Tensor, "d d"]:
    """Uniformly random rotation from a Gaussian matrix (Mezzadri 2007)."""
    Q, R = torch.linalg.qr(gaussian)
    rotation: Tensor = Q * R.diagonal().sign()
    return rotation


def _alignment(x: Tensor, Q: Tensor) -> Float[Tensor, " token"]:
    """Length of the projection of each unit vector ``x̂`` on a subspace; 0 for a zero vector."""
    norms = x.norm(dim=-1)
    length: Tensor = (x @ Q).norm(dim=-1) / torch.where(norms > 0, norms, torch.ones_like(norms))
    return length


def _text_alignment(
    view: ModelView,
    tokens: list[Tensor],
    chosen: tuple[int, ...],
    targets: list[list[_Target]],
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
                        kept[site][row][at, k] = _alignment(states, Q)
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


def _random_alignment(x: Tensor, target: _Target) -> tuple[Tensor, Tensor]:
    pairs = list(zip(target.modes, target.maps, strict=True))
    before = [_alignment(x, mode.subspace) for mode, _ in pairs]
    after = [_alignment(x @ M.T, mode.subspace) for mode, M in pairs]
    return torch.stack(before, dim=1), torch.stack(after, dim=1)


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


def _facts(target: _Target, d: int) -> dict[str, Any]:
    """What holds for a target whatever the tokens; means over draws of a random map."""
    mode, n = target.modes[0], len(target.modes)
    pairs = list(zip(target.maps, target.modes, strict=True))
    sides = [criterion_sides(M, m.subspace) for M, m in pairs]
    left, right = (sum(side) / n for side in zip(*sides, strict=True))
    return {
        "chance": sum(chance_alignment(d, m.subspace.shape[1]) for m in target.modes) / n,
        "dimension": mode.subspace.shape[1] if n == 1 else None,
        "eigenvalue_re": mode.eigenvalue.real if n == 1 else None,
        "eigenvalue_im": mode.eigenvalue.imag if n == 1 else None,
        "criterion": left > right,
        "criterion_left": left,
        "criterion_right": right,
        "predicted_rho": sum(predicted_rho(M, m.subspace) for M, m in pairs) / n,
    }
