"""What a block is made of, found by running one token through it rather than by its class.

TransformerLens aliases ``hook_resid_mid`` to the input of the second norm. That is the state
between attention and MLP in pre-norm blocks, the sum *after* the MLP in post-norm encoders (BERT),
and absent from parallel blocks. The probe decides by the order in which hooks fire and by
the chain rule: a state is the middle one if every path from input to output leads through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.model.gradients import differentiable

if TYPE_CHECKING:
    from tl_spectral.model.view import ModelView


@dataclass(frozen=True)
class BlockAnatomy:
    """Where things are in one block.

    Attributes:
        resid_mid: Name of the hook that sees the state between attention and MLP, or ``None``.
        mid_on_branch: The tensor at that hook feeds the MLP branch only, not the skip connection
            beside it (OPT reshapes in between): a derivative with respect to it lacks the identity.
        norm_gain: Gain per coordinate of the norm that reads ``resid_pre``, or ``None``.
    """

    resid_mid: str | None
    mid_on_branch: bool
    norm_gain: Float[Tensor, " d_model"] | None


def dissect(view: ModelView) -> tuple[BlockAnatomy, ...]:
    """Run one token through the model and describe each block."""
    seen: dict[str, Tensor] = {}  # insertion order is firing order

    def leaf(name: str) -> Any:
        def hook(activation: Tensor) -> Tensor:
            seen[name] = activation.detach().clone().requires_grad_(True)
            return seen[name]

        return hook

    def record(name: str) -> Any:
        def hook(activation: Tensor) -> Tensor:
            seen[name] = activation
            return activation  # OPT shows its hooks a view; only a returned one is used

        return hook

    hooks: dict[str, Any] = {}
    for layer in range(view.n_layers):
        block = f"blocks.{layer}"
        hooks[f"{block}.hook_in"] = leaf(f"{block}.hook_in")
        for part in ("ln1.hook_in", "ln1.hook_out", "ln2.hook_in", "mlp.hook_in", "hook_out"):
            if f"{block}.{part}" in view.model.hook_dict:
                hooks[f"{block}.{part}"] = record(f"{block}.{part}")
    with differentiable():
        token = min(5, view.n_vocab - 1)  # an ordinary one: 0 to 4 are often special
        view.run(torch.full((1, 1), token), hooks)
    return tuple(_describe(view, layer, seen) for layer in range(view.n_layers))


def _describe(view: ModelView, layer: int, seen: dict[str, Tensor]) -> BlockAnatomy:
    block = f"blocks.{layer}"
    start, end = seen[f"{block}.hook_in"], seen[f"{block}.hook_out"]
    mid, on_branch = _find_mid(block, list(seen), seen)
    gain = None
    first_norm = seen.get(f"{block}.ln1.hook_in")
    if first_norm is not None and torch.equal(first_norm, start):
        gain = _measure_gain(view.model.blocks[layer].ln1.original_component, end)
    return BlockAnatomy(resid_mid=mid, mid_on_branch=on_branch, norm_gain=gain)


def _find_mid(block: str, fired: list[str], seen: dict[str, Tensor]) -> tuple[str | None, bool]:
    mlp = f"{block}.mlp.hook_in"
    if mlp not in seen:
        return None, False
    # Pre-norm: the second norm's input. Post-norm on the stream: the first norm's output.
    # Norms on the branches only (OLMo 2): the MLP's own input.
    for part in ("ln2.hook_in", "ln1.hook_out", "mlp.hook_in"):
        name = f"{block}.{part}"
        if name in seen and fired.index(name) <= fired.index(mlp):
            place = _place(seen[f"{block}.hook_in"], seen[name], seen[f"{block}.hook_out"])
            if place is not None:
                return name, place == "branch"
    return None, False


def _place(start: Tensor, middle: Tensor, end: Tensor) -> Literal["stream", "branch"] | None:
    """Where ``middle`` lies, by the chain rule, tried on one fixed cotangent v.

    On the stream: vᵀ dend/dstart = (vᵀ dend/dmiddle) dmiddle/dstart, for every path leads through
    it. On a branch beside the skip connection, vᵀ itself is missing from the bracket.
    """
    if middle.is_leaf or middle.numel() != start.numel():  # a leaf is the input itself
        return None
    v = torch.linspace(-1, 1, end.numel(), dtype=end.dtype, device=end.device).reshape(end.shape)
    (direct,) = torch.autograd.grad(end, start, v, retain_graph=True)
    (upper,) = torch.autograd.grad(
        end, middle, v, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    skip = v.reshape(middle.shape)
    for place, cotangent in (("stream", upper), ("branch", upper + skip)):
        (through,) = torch.autograd.grad(middle, start, cotangent, retain_graph=True)
        if (direct - through).norm() <= 1e-4 * direct.norm():
            return "stream" if place == "stream" else "branch"
    return None


def _measure_gain(norm: torch.nn.Module, like: Tensor) -> Float[Tensor, " d_model"] | None:
    """The gain as the norm applies it: half the difference of its outputs at ±x, over x.

    x alternates ±1 (scaled up against the norm's epsilon) and has mean 0 and mean square 1, so it
    survives both kinds of norm; this reads a plain weight, Gemma's 1 + w and folded norms alike.
    What grows with its input (an identity in a norm's place) is no norm: ``None``.
    """
    x = torch.ones_like(like)
    x[..., 1::2] = -1
    if x.shape[-1] % 2:
        x[..., -1] = -2
        x[..., -2] = 1
        x /= x.square().mean().sqrt()
    with torch.no_grad():
        up, down, further = norm(x * 1e3), norm(x * -1e3), norm(x * 2e3)
        if not torch.allclose(up, further, rtol=1e-3, atol=1e-4):
            return None
        gain: Tensor = ((up - down) / (2 * x)).reshape(-1).float().cpu()
    return gain
