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
class Norm:
    """The linear part of a norm: what it does to a state, up to the state's scale.

    Attributes:
        gain: Factor per coordinate, as it is applied (Gemma's 1 + w included).
        centres: Whether the mean over coordinates is taken out first (LayerNorm, not RMSNorm).
    """

    gain: Float[Tensor, " d_model"]
    centres: bool

    def before(self, W: Float[Tensor, "... d_model out"]) -> Float[Tensor, "... d_model out"]:
        """``N W``: a map that reads the norm's output becomes one that reads its input."""
        scaled = W * self.gain.to(W)[:, None]
        return scaled - scaled.mean(dim=-2, keepdim=True) if self.centres else scaled

    def after(self, W: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """``W N``: a map that writes to the norm becomes one that writes past it."""
        centred = W - W.mean(dim=-1, keepdim=True) if self.centres else W
        return centred * self.gain.to(W)


@dataclass(frozen=True)
class BlockAnatomy:
    """Where things are in one block.

    Attributes:
        resid_mid: Name of the hook that sees the state between attention and MLP, or ``None``.
        mid_on_branch: The tensor at that hook feeds the MLP branch only, not the skip connection
            beside it (OPT reshapes in between): a derivative with respect to it lacks the identity.
        norm_gain: Gain per coordinate of the norm that reads ``resid_pre``, or ``None``.
        attention_norm: The norm through which attention reads ``resid_pre``, or ``None``.
        attention_post_norm: The norm through which attention's output passes before it is added to
            the stream (Gemma 2 and 3, OLMo 2), or ``None``. A norm on the stream itself (BERT) is
            none.
    """

    resid_mid: str | None
    mid_on_branch: bool
    norm_gain: Float[Tensor, " d_model"] | None
    attention_norm: Norm | None
    attention_post_norm: Norm | None


_NORMS = ("ln1", "ln1_post", "ln2")
_PARTS = (
    *(f"{norm}.{hook}" for norm in _NORMS for hook in ("hook_in", "hook_out")),
    *("attn.hook_in", "attn.o.hook_out", "attn.hook_out", "mlp.hook_in", "hook_out"),
)


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
        for part in _PARTS:
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
    first, post = None, None
    if _same(seen.get(f"{block}.ln1.hook_in"), start):
        first = measure_norm(view.model.blocks[layer].ln1.original_component, end)
    reads = _same(seen.get(f"{block}.attn.hook_in"), seen.get(f"{block}.ln1.hook_out"))
    # BLOOM adds the skip connection before attn.hook_out, so its projection is asked first.
    written = seen.get(f"{block}.attn.o.hook_out", seen.get(f"{block}.attn.hook_out"))
    for name in _NORMS:
        read = seen.get(f"{block}.{name}.hook_in")
        if read is not None and _same(read, written) and _place(start, read, end) != "stream":
            post = measure_norm(getattr(view.model.blocks[layer], name).original_component, end)
    return BlockAnatomy(
        resid_mid=mid,
        mid_on_branch=on_branch,
        norm_gain=None if first is None else first.gain,
        attention_norm=first if reads else None,
        attention_post_norm=post,
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are there and hold one state (OPT folds the batch into the positions)."""
    if one is None or other is None or one.numel() != other.numel():
        return False
    return torch.equal(one.reshape(-1), other.reshape(-1))


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


def measure_norm(norm: torch.nn.Module, like: Tensor) -> Norm | None:
    """A norm's linear part as it is applied.

    The gain is half the difference of its outputs at ±x, over x. x alternates ±1 (scaled up against
    the norm's epsilon) and has mean 0 and mean square 1, so it survives both kinds of norm; this
    reads a plain weight, Gemma's 1 + w and folded norms alike. A norm that centres does not see a
    constant added to x. What grows with its input (an identity in a norm's place) is no norm:
    ``None``.
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
        centres = torch.allclose(up, norm((x + 1) * 1e3), rtol=1e-3, atol=1e-4)
    return Norm(gain=gain, centres=centres)
