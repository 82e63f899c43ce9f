"""Residual states at one position of many texts, through hook points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.model import ModelView, Site
from tl_spectral.model.view import SITES, StopForward, by_length
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class ResidualStates(Result):
    """Residual-stream states of many texts at one position, layer by layer.

    Attributes:
        resid_pre: Input of each block, ``[layer, sample, d_model]``, float32 (float64 for a float64
            model), on the CPU.
        resid_post: Output of each block, likewise.
        resid_mid: State between attention and MLP, or ``None`` where blocks have none (parallel
            blocks) or it was not asked for.
        norm_gain: Gain of the norm that reads ``resid_pre``, ``[layer, d_model]`` (Gemma's 1 + w
            included), or ``None`` if no norm reads it (post-norm models).
        layers: Row ``i`` of the tensors belongs to layer ``layers[i]``.
        pos: Position in each text; negative counts from each text's end.
    """

    resid_pre: Float[Tensor, "layer sample d_model"]
    resid_post: Float[Tensor, "layer sample d_model"]
    resid_mid: Float[Tensor, "layer sample d_model"] | None
    norm_gain: Float[Tensor, "layer d_model"] | None
    layers: tuple[int, ...]
    pos: int

    @classmethod
    def from_cache(cls, model: Any, cache: Any, pos: int = -1) -> ResidualStates:
        """States from a ``run_with_cache`` that already happened.

        Args:
            model: The ``TransformerBridge`` that produced the cache.
            cache: The ``ActivationCache`` (or a dict of hook name → activation), with the batch
                dimension in place. Texts must be unpadded: states at a padding position, or at a
                position that attended to padding unmasked, are not states of the text.
            pos: Position, the same in every row.

        Raises:
            InputError: If the cache lacks a residual stream or the position.
        """
        view = ModelView(model)
        layers = view.layers(None)
        sites: list[Site] = ["resid_pre", "resid_post"]
        if view.has_mid and all(view.hook_name(layer, "resid_mid") in cache for layer in layers):
            sites.append("resid_mid")
        stacked = {
            site: torch.stack([_from_cache(view, cache, layer, site, pos) for layer in layers])
            for site in sites
        }
        return _build(view, stacked, layers, int(pos), tokens=None)

    @property
    def n_samples(self) -> int:
        """Number of texts."""
        return self.resid_pre.shape[1]

    def index(self, layer: int) -> int:
        """Row of a layer.

        Raises:
            InputError: If the layer was not captured.
        """
        if layer not in self.layers:
            raise InputError(f"Layer {layer} was not captured; there are {list(self.layers)}.")
        return self.layers.index(layer)

    def site(self, site: Site) -> Float[Tensor, "layer sample d_model"]:
        """The states of one site.

        Raises:
            InputError: If the site does not exist in this model or was not captured.
        """
        if site not in SITES:
            raise InputError(f"hook must be one of {SITES}, got {site!r}.")
        states: Tensor | None = getattr(self, site)
        if states is None:
            raise InputError(f"{site} was not captured, or the blocks of this model have none.")
        return states

    def scale(self, layer: int, hook: Site = "resid_pre") -> Float[Tensor, " d_model"]:
        """Standard deviation of each coordinate over the samples: the natural unit of length.

        Raises:
            InputError: If there are fewer than two samples.
        """
        if self.n_samples < 2:
            raise InputError("Natural units need at least two samples; capture more texts.")
        return self.site(hook)[self.index(layer)].double().std(dim=0)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and site: mean norm of the states and of their mean."""
        import pandas as pd

        rows = []
        for row, layer in enumerate(self.layers):
            for site in SITES:
                if getattr(self, site) is None:
                    continue
                states = self.site(site)[row].double()
                norms = states.norm(dim=-1)
                rows.append(
                    {
                        "layer": layer,
                        "site": site,
                        "n_samples": self.n_samples,
                        "mean_norm": norms.mean().item(),
                        "sd_norm": norms.std(unbiased=self.n_samples > 1).item(),
                        "norm_of_mean": states.mean(dim=0).norm().item(),
                    }
                )
        return pd.DataFrame(rows)


def capture(
    model: Any,
    texts_or_tokens: Any,
    pos: int = -1,
    *,
    layers: Sequence[int] | None = None,
    sites: Sequence[Site] | None = None,
    batch_tokens: int = 2048,
    progress: Callable[[int], None] | None = None,
) -> ResidualStates:
    """Residual states of each text at one position.

    Texts of equal length are batched; no text is ever padded, so nothing can leak from padding into
    a state, on any architecture. Only the hooks asked for are read, only the position asked for is
    kept, and the forward pass ends at the last hook of interest.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        texts_or_tokens: A text, a list of texts, or token ids.
        pos: Position; negative counts from the end of each text.
        layers: Which layers; all by default.
        sites: Which of ``resid_pre``, ``resid_mid``, ``resid_post``; by default all that exist.
            ``resid_pre`` and ``resid_post`` are always captured.
        batch_tokens: Most tokens in one forward pass.
        progress: Called with the number of texts done.

    Returns:
        The states, on the CPU.

    Raises:
        InputError: If there is no text, a text is too short for the position, or a layer is not
            there.
        ModelStateError: If the model is in train mode, or a state is not finite.
    """
    view = ModelView(model)
    chosen = view.layers(layers)
    if sites is not None and set(sites) - set(SITES):
        raise InputError(f"sites must be among {SITES}, got {list(sites)}.")
    wanted: list[Site] = ["resid_pre", "resid_post"]
    if view.has_mid if sites is None else "resid_mid" in sites:
        wanted.append("resid_mid")
    tokens = view.tokens(texts_or_tokens)
    for index, row in enumerate(tokens):
        view.position(pos, row.numel(), f"pos (in text {index})")
    shape = (len(chosen), len(tokens), view.d_model)
    stacked: dict[Site, Tensor] = {
        site: torch.empty(shape, dtype=view.compute_dtype) for site in wanted
    }
    names = {
        view.hook_name(layer, site): (row, site)
        for row, layer in enumerate(chosen)
        for site in wanted
    }
    last = view.hook_name(max(chosen), "resid_post")

    done = 0
    for length, members in by_length(tokens).items():
        size = max(1, batch_tokens // length)
        for batch in (members[i : i + size] for i in range(0, len(members), size)):

            def keep(name: str, batch: list[int] = batch, length: int = length) -> Any:
                row, site = names[name]

                def hook(activation: Tensor) -> None:
                    states = activation.detach().reshape(len(batch), length, -1)[:, pos]
                    stacked[site][row, batch] = states.to("cpu", view.compute_dtype)
                    if name == last:
                        raise StopForward

                return hook

            with torch.no_grad():
                view.run(
                    torch.stack([tokens[i] for i in batch]), {name: keep(name) for name in names}
                )
            done += len(batch)
            if progress is not None:
                progress(done)
    return _build(view, stacked, chosen, int(pos), tokens)


def _build(
    view: ModelView,
    stacked: dict[Site, Tensor],
    layers: tuple[int, ...],
    pos: int,
    tokens: list[Tensor] | None,
) -> ResidualStates:
    for site, states in stacked.items():
        finite = torch.isfinite(states).all(dim=-1)
        if not finite.all():
            row, sample = (~finite).nonzero()[0].tolist()
            raise ModelStateError(
                f"{site} of layer {layers[row]} is not finite for text {sample}. Load the weights "
                "again, or use a wider dtype."
            )
    gains = [view.norm_gain(layer) for layer in layers]
    present = [gain for gain in gains if gain is not None]
    return ResidualStates(
        resid_pre=stacked["resid_pre"],
        resid_post=stacked["resid_post"],
        resid_mid=stacked.get("resid_mid"),
        norm_gain=torch.stack(present) if len(present) == len(gains) else None,
        layers=layers,
        pos=pos,
        provenance=view.provenance(tokens, options={"pos": pos}),
    )


def _from_cache(view: ModelView, cache: Any, layer: int, site: Site, pos: int) -> Tensor:
    canonical = view.hook_name(layer, site)
    for name in (canonical, f"blocks.{layer}.hook_{site}"):
        # TransformerLens' alias resid_mid is another tensor on post-norm encoders.
        if name in cache and (name == canonical or site != "resid_mid"):
            activation: Tensor = cache[name].detach()
            if activation.ndim != 3:
                raise InputError(
                    f"{name} has shape {tuple(activation.shape)}; keep the batch dimension "
                    "(run_with_cache without remove_batch_dim)."
                )
            view.position(pos, activation.shape[1])
            return activation[:, pos].to("cpu", view.compute_dtype)
    raise InputError(
        f"The cache has no {canonical}. Run run_with_cache with a names_filter that includes the "
        "residual stream of every layer."
    )
