"""What runs beside a block's skip connection: attention and MLP, each between known linear maps.

A branch reads the stream through linear maps (queries, keys, values; gate and up), does something
non-linear with what they give (its core), and writes the result back through one linear map. The
names and weights here are claims; who uses them checks them against the model's own derivative.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from tl_spectral.model.view import Hook, ModelView


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch of one block: hook names, and the weights of its linear maps.

    Attributes:
        kind: ``"attention"`` (units are heads; readers are queries, keys and values, the last two
            with a head per group of query heads) or ``"mlp"`` (units are neurons of width 1).
        reads: Hook of the state that the readers read.
        readers: Hook of what each reader gives, ``[sample, pos, unit, width]`` or flattened.
        W_in: Weights of the readers, ``[unit, width, d_model]`` each.
        core: Hook of what the writer reads, ``[sample, pos, unit, width]`` or flattened.
        writes: Hook of what the writer gives.
        W_out: Weights of the writer, ``[d_model, unit · width]``.
        scored: Hooks of query and key as they meet in the scores (after rotary embedding), where
            the model shows them; else those of the readers.
    """

    kind: Literal["attention", "mlp"]
    reads: str
    readers: tuple[str, ...]
    W_in: tuple[Float[Tensor, "_ width d_model"], ...]
    core: str
    writes: str
    W_out: Float[Tensor, "d_model inner"]
    scored: tuple[str, ...] = ()


def branches(view: ModelView, layer: int) -> tuple[Branch, ...]:
    """The branches of a block whose maps are within reach; none for an unknown kind of block."""
    found = (_attention(view, layer), _mlp(view, layer))
    return tuple(branch for branch in found if branch is not None)


def _attention(view: ModelView, layer: int) -> Branch | None:
    weights = _weights(view, layer, "attn", ("W_Q", "W_K", "W_V", "W_O"))
    name = f"blocks.{layer}.attn"
    if weights is None or not _hooked(view, name, ("q", "k", "v", "o")):
        return None
    if any(W.ndim != 3 for W in weights):  # else [head, d_model, d_head], W_O the other way round
        return None
    *W_in, W_O = weights
    readers = tuple(f"{name}.{part}.hook_out" for part in "qkv")
    rotated = (f"{name}.hook_rot_q", f"{name}.hook_rot_k")
    return Branch(
        kind="attention",
        reads=f"{name}.hook_in",
        readers=readers,
        scored=rotated if all(n in view.model.hook_dict for n in rotated) else readers[:2],
        W_in=tuple(W.transpose(1, 2) for W in W_in),
        core=f"{name}.o.hook_in",
        writes=f"{name}.o.hook_out",
        W_out=W_O.flatten(0, 1).T,
    )


def _mlp(view: ModelView, layer: int) -> Branch | None:
    name = f"blocks.{layer}.mlp"
    gated = _hooked(view, name, ("gate", "in", "out"))
    if not gated and not _hooked(view, name, ("in", "out")):
        return None
    weights = _weights(view, layer, "mlp", (*(("W_gate",) if gated else ()), "W_in", "W_out"))
    if weights is None or any(W.ndim != 2 for W in weights):
        return None
    *W_in, W_out = weights
    return Branch(
        kind="mlp",
        reads=f"{name}.hook_in",
        readers=tuple(f"{name}.{part}.hook_out" for part in (("gate", "in") if gated else ("in",))),
        W_in=tuple(W.T[:, None] for W in W_in),
        core=f"{name}.out.hook_in",
        writes=f"{name}.out.hook_out",
        W_out=W_out.T,
    )


def _weights(view: ModelView, layer: int, part: str, names: tuple[str, ...]) -> list[Tensor] | None:
    module = getattr(view.model.blocks[layer], part, None)
    try:
        found = [getattr(module, name) for name in names]
    except (AttributeError, NotImplementedError, ValueError):  # as TransformerLens says "not here"
        return None
    return [W.detach() for W in found] if all(isinstance(W, Tensor) for W in found) else None


def _hooked(view: ModelView, name: str, parts: tuple[str, ...]) -> bool:
    hooks = view.model.hook_dict
    return f"{name}.hook_in" in hooks and all(
        f"{name}.{part}.{end}" in hooks for part in parts for end in ("hook_in", "hook_out")
    )


def is_routed(view: ModelView, layer: int) -> bool:
    """Whether tokens are sent to experts, so that a derivative is taken at fixed routing."""
    return any(
        name.startswith(f"blocks.{layer}.") and "expert" in name for name in view.model.hook_dict
    )


@dataclass(frozen=True, eq=False)
class Context:
    """Keys and values of a decoder's earlier tokens; layers after the end of the pass lack them.

    Attributes:
        layers: Per layer keys and values, ``[sample, head, pos, width]``, keys as scored.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]

    def cache(self) -> Any:
        """A fresh cache to hand to one pass over the next token, which writes into it."""
        from transformers import DynamicCache

        cache = DynamicCache()  # without a config it keeps every key, behind a sliding window too
        for layer, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, layer)
        return cache


def prefill(
    view: ModelView, tokens: Int[Tensor, "sample pos"], hooks: Mapping[str, Hook]
) -> Context | None:
    """Run a decoder for its hooks' sake, keeping keys and values of all tokens but the last.

    Args:
        view: The model.
        tokens: Token ids of equal length.
        hooks: As for :meth:`ModelView.run`; where one stops the pass, nothing deeper is kept.

    Returns:
        The context of the last token; ``None`` (and nothing is run) if there is no such thing, as
        in encoders, where every position looks at every other, and in blocks without attention.
    """
    keeps = view.causal and all(
        f"blocks.{layer}.attn.hook_in" in view.model.hook_dict for layer in range(view.n_layers)
    )
    if not keeps:
        return None
    cache = Context(()).cache()
    with torch.no_grad():
        view.run(tokens, hooks, cache=cache)
    return Context(
        tuple((layer.keys[..., :-1, :], layer.values[..., :-1, :]) for layer in cache.layers)
    )
