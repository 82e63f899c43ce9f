"""Does a layer act like a step of the power method? Alignment of tokens with its dominant mode.

[B] arXiv 2605.25619. For isotropic random tokens the answer is nearly a statement about weights,
and mostly yes for untrained ones too: every figure comes with its closed form and its controls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spectral.consensus import ConsensusResult, simulate_power
from tl_spectral.errors import InputError
from tl_spectral.model import ModelView, Site
from tl_spectral.model.view import StopForward, by_length
from tl_spectral.modes import (
    Mode,
    chance_alignment,
    dominant_modes,
    eigensystem,
    layer_matrix,
)
from tl_spectral.results import Result
from tl_spectral.statistics import Z95

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

__all__ = ["ConsensusResult", "PowerAlignment", "power_alignment", "simulate_power"]

_COLUMNS = (
    "layer", "target", "tokens", "gamma_before", "gamma_after", "rho", "rho_low", "rho_high",
    "n_tokens", "chance", "dimension", "eigenvalue_re", "eigenvalue_im",
)  # fmt: skip
_BATCH_TOKENS = 2048
_SITES: tuple[Site, Site] = ("resid_pre", "resid_post")
_MEASURES = ("gamma_before", "gamma_after", "rho", "rho_low", "rho_high")


@dataclass(frozen=True, eq=False)
class PowerAlignment(Result):
    """Alignment of tokens with each layer's dominant mode, before and after the layer.

    ``γ`` is the mean over tokens of ``|⟨x̂, v1⟩|`` (length of the projection on the plane if λ1 is
    complex), ``ρ`` the share of tokens whose alignment grows through the layer [B].

    Attributes:
        gamma_before: γ of ``resid_pre``, all text tokens, in the real model (norms, FFN and
            positions in place).
        gamma_after: γ of ``resid_post`` with the same v1.
        gamma_chance: γ of isotropic random vectors, in closed form.
        rho: Share of text tokens whose alignment grows; ½ is chance only for a direction that has
            nothing to do with the layer.
        rho_low: Lower end of ρ's 95 % interval (Wilson; tokens of one text count as dependent,
            by the variance between texts, where there are at least two).
        rho_high: Upper end.
        random_rho: ρ of isotropic random tokens through ``x + F x`` (``F x`` without skip): no
            attention, no FFN, no norm.
        criterion: Whether ``‖Mᵀv1‖ > ‖M‖_F/√d`` (M = I + F or F), which makes ``random_rho`` exceed
            ½ whatever the layer was trained for. For a subspace Q of m columns:
            ``‖MᵀQ‖_F/√m`` [ours].
        criterion_left: ``‖Mᵀv1‖``.
        criterion_right: ``‖M‖_F/√d``.
        rows: All figures, see :meth:`to_dataframe`.
        layers: Row ``i`` of the tensors belongs to layer ``layers[i]``.
        n_tokens: Number of text tokens.
        n_texts: Number of texts.
        skip: Whether dominance is by ``|1 + λ|`` or ``|λ|``.
    """

    gamma_before: Float[Tensor, " layer"]
    gamma_after: Float[Tensor, " layer"]
    gamma_chance: Float[Tensor, " layer"]
    rho: Float[Tensor, " layer"]
    rho_low: Float[Tensor, " layer"]
    rho_high: Float[Tensor, " layer"]
    random_rho: Float[Tensor, " layer"]
    criterion: Bool[Tensor, " layer"]
    criterion_left: Float[Tensor, " layer"]
    criterion_right: Float[Tensor, " layer"]
    rows: tuple[Mapping[str, Any], ...]
    layers: tuple[int, ...]
    n_tokens: int
    n_texts: int
    skip: bool

    @property
    def controls(self) -> dict[str, dict[str, Float[Tensor, " layer"]]]:
        """Per control and measure, one value per layer; NaN where a layer lacks that control.

        Measures are those of all text tokens, and of random ones with the prefix ``random_``.
        Controls: ``v2``, ``v3``, … (the next modes), ``other layer`` (v1 of the next layer), and
        ``random F`` (Gaussian F of equal norm: its own v1; random tokens pass through that F).
        """
        names = dict.fromkeys(row["target"] for row in self.rows if row["target"] != "v1")
        return {
            name: {
                prefix + measure: torch.tensor(
                    [self._value(layer, name, tokens, measure) for layer in self.layers],
                    dtype=torch.float64,
                )
                for prefix, tokens in (("", "all"), ("random_", "random"))
                for measure in _MEASURES[:3]
            }
            for name in names
        }

    def _value(self, layer: int, target: str, tokens: str, measure: str) -> float:
        for row in self.rows:
            if (row["layer"], row["target"], row["tokens"]) == (layer, target, tokens):
                return float(row[measure])
        return math.nan

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer × target × tokens.

        ``target`` is ``v1`` or a control; ``tokens`` is ``all``, ``first`` (first position of each
        text), ``rest``, or ``random`` (isotropic, through the linear map alone). ``chance`` is
        the γ of random vectors for a subspace of that dimension.
        """
        import pandas as pd

        table = pd.DataFrame(list(self.rows), columns=list(_COLUMNS))
        for name in ("criterion", "criterion_left", "criterion_right"):
            known = dict(zip(self.layers, getattr(self, name).tolist(), strict=True))
            table[name] = [
                known[row["layer"]] if row["target"] == "v1" else None for row in self.rows
            ]
        return table

    def plot(self, template: str | None = None) -> Figure:
        """γ and ρ by layer with controls, and both sides of the criterion."""
        from tl_spectral.plots import power_figure

        return power_figure(self.to_dataframe(), template=template)


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
    modes: int = 3,
    random_tokens: int = 1024,
    random_maps: int = 3,
    seed: int = 0,
) -> PowerAlignment:
    """Measure whether tokens tilt towards each layer's dominant OV mode, beside all controls.

    F is taken from the weights as they are: norm gains are folded in only if the model is in
    compatibility mode, and the provenance says which.

    Args:
        model: A ``TransformerBridge`` with standard attention.
        texts: Texts or token ids; every position is measured.
        layers: Which layers; all by default.
        skip: Dominance by ``|1 + λ|`` (the iteration that is run) instead of ``|λ|``.
        modes: Modes measured, v1 included; eigenspaces of more than two dimensions (the null space
            of a low-rank F) are left out of the controls.
        random_tokens: Isotropic random tokens per layer.
        random_maps: Draws of a random F of equal norm.
        seed: Seed of tokens and maps.

    Returns:
        γ, ρ with its interval, the criterion and the controls, per layer.

    Raises:
        InputError: If there is no text, a layer does not exist, or a count is not positive.
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
    generator = torch.Generator().manual_seed(seed)
    targets = _targets(view, chosen, skip, modes, random_maps, generator)
    before, after = _text_alignment(view, tokens, chosen, targets)
    first = torch.cat([torch.arange(row.numel()) == 0 for row in tokens])
    text = torch.cat([torch.full((row.numel(),), i) for i, row in enumerate(tokens)])
    x = torch.randn(random_tokens, view.d_model, generator=generator, dtype=torch.float64)
    everyone = torch.ones_like(first)

    rows: list[dict[str, Any]] = []
    left, right = [], []
    for row, layer in enumerate(chosen):
        v1 = targets[row][0]
        Q, M = v1.modes[0].subspace, v1.maps[0]
        left.append((M.T @ Q).norm().item() / math.sqrt(Q.shape[1]))
        right.append(M.norm().item() / math.sqrt(view.d_model))
        start = 0
        for target in targets[row]:
            own = slice(start, start + len(target.modes))
            start = own.stop
            pair = before[row][:, own], after[row][:, own]
            drawn = _random_alignment(x, target)
            for name, (was, now), mask, cluster in (
                ("all", pair, everyone, text),
                ("first", pair, first, text),
                ("rest", pair, ~first, text),
                ("random", drawn, None, None),
            ):
                measured = _measure(was, now, mask, cluster)
                if measured is None:  # no text is longer than its first token
                    continue
                rows.append(
                    {"layer": layer, "target": target.name, "tokens": name}
                    | measured
                    | _description(target, view.d_model)
                )

    def column(tokens: str, measure: str) -> Tensor:
        found = {r["layer"]: r for r in rows if (r["target"], r["tokens"]) == ("v1", tokens)}
        return torch.tensor([found[layer][measure] for layer in chosen], dtype=torch.float64)

    sides = torch.tensor(left, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)
    return PowerAlignment(
        **{measure: column("all", measure) for measure in _MEASURES},
        gamma_chance=column("all", "chance"),
        random_rho=column("random", "rho"),
        criterion=sides[0] > sides[1],
        criterion_left=sides[0],
        criterion_right=sides[1],
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
    count: int,
    draws: int,
    generator: torch.Generator,
) -> list[list[_Target]]:
    """Per layer: v1, the next modes, v1 of another layer, v1 of random matrices of equal norm."""
    d = view.d_model
    identity = torch.eye(d, dtype=torch.float64) * float(skip)
    gaussians = [torch.randn(d, d, generator=generator, dtype=torch.float64) for _ in range(draws)]
    systems = [eigensystem(G) for G in gaussians]
    matrices = {layer: layer_matrix(*view.ov_factors(layer)) for layer in chosen}
    # Two more than asked for: conjugate pairs and null spaces are passed over among the controls.
    found = {layer: dominant_modes(F, skip=skip, count=count + 2) for layer, F in matrices.items()}
    firsts = {layer: modes[0] for layer, modes in found.items()}
    if len(chosen) == 1 and view.n_layers > 1:
        other = (chosen[0] + 1) % view.n_layers
        F = layer_matrix(*view.ov_factors(other))
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
        targets.append(mine)
    return targets


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
    mask: Bool[Tensor, " token"] | None,
    cluster: Tensor | None,
) -> dict[str, Any] | None:
    if mask is not None:
        before, after = before[mask], after[mask]
        cluster = None if cluster is None else cluster[mask]
    if not len(before):
        return None
    grown = (after > before).double().mean(dim=1)  # per token, averaged over draws
    rho = grown.mean().item()
    low, high = _wilson(rho, _effective(grown, cluster))
    return {
        "gamma_before": before.mean().item(),
        "gamma_after": after.mean().item(),
        "rho": rho,
        "rho_low": low,
        "rho_high": high,
        "n_tokens": len(before),
    }


def _effective(grown: Float[Tensor, " token"], cluster: Tensor | None) -> float:
    """Number of independent tokens: n divided by the design effect of sampling whole texts.

    The variance of a share over clusters is ``C/(C−1) Σ_c (y_c − ρ n_c)² / n²`` (ratio estimator,
    Cochran 1977); its ratio to ``ρ(1−ρ)/n`` is the design effect, taken as at least 1.
    """
    n = len(grown)
    if cluster is None:
        return float(n)
    rho = grown.mean()
    groups, index = torch.unique(cluster, return_inverse=True)
    binomial = (rho * (1 - rho) / n).item()
    if len(groups) < 2 or binomial == 0:
        return float(n)
    excess = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, index, grown - rho)
    variance = len(groups) / (len(groups) - 1) * excess.square().sum().item() / n**2
    return n / max(1.0, variance / binomial)


def _wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z2 = Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _description(target: _Target, d: int) -> dict[str, Any]:
    mode = target.modes[0]
    single = len(target.modes) == 1
    chances = [chance_alignment(d, m.subspace.shape[1]) for m in target.modes]
    return {
        "chance": sum(chances) / len(chances),
        "dimension": mode.subspace.shape[1] if single else None,
        "eigenvalue_re": mode.eigenvalue.real if single else None,
        "eigenvalue_im": mode.eigenvalue.imag if single else None,
    }
