"""Independent truths about a model: only TransformerLens' own hooks, nothing of tl_spectral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from zoo import VOCAB, WIDTH

# Parallel blocks: attention and MLP read the same state, so there is none between them.
PARALLEL = ("pythia", "gptj")
ENCODERS = ("bert", "roberta", "albert")


def prompts(n: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids ``[n, length]``, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (n, length), generator=generator)


@dataclass(frozen=True)
class Accuracy:
    """How a model is differentiated numerically, and how close that comes."""

    dtype: torch.dtype
    eps: float
    tolerance: float


def accuracy(architecture: str) -> Accuracy:
    """The best step for an architecture.

    Hugging Face casts the norms or softmaxes of most families to float32 whatever the model's
    dtype; there a smaller step only shows rounding. Mixtral's experts run in float32 alone.
    """
    if architecture in ("gpt2", "pythia", *ENCODERS):
        return Accuracy(torch.float64, 1e-3, 1e-8)
    if architecture == "opt":  # a larger step crosses the kinks of its ReLU
        return Accuracy(torch.float64, 2e-3, 2e-3)
    if architecture == "mixtral":  # and changes the routing of Mixtral's experts
        return Accuracy(torch.float32, 1e-3, 5e-3)
    return Accuracy(torch.float64, 1e-2, 1e-3)


def relative(error: Tensor, size: Tensor) -> float:
    """Frobenius norm of the error over that of what is measured."""
    return (error.norm() / size.norm()).item()


def states(model: Any, tokens: Tensor, layer: int, pos: int, hook: str = "hook_in") -> Tensor:
    """State at one position, ``[sample, d_model]``."""
    seen = {}

    def grab(activation: Tensor, hook: Any) -> None:
        seen["state"] = activation.reshape(*tokens.shape, -1)[:, pos].clone()

    with torch.no_grad():
        model.run_with_hooks(tokens, return_type=None, fwd_hooks=[(f"blocks.{layer}.{hook}", grab)])
    return seen["state"]


def differences(
    model: Any,
    tokens: Tensor,
    layer: int,
    eps: float,
    *,
    source_pos: int,
    reads: Mapping[str, tuple[str, int]],
    state: Tensor | None = None,
) -> dict[str, Tensor]:
    """Central differences (five points) of states by ``resid_pre[layer, source_pos]``.

    Args:
        model: The bridge.
        tokens: One prompt ``[1, pos]``.
        layer: The block whose input is nudged.
        eps: The step.
        source_pos: Where it is nudged.
        reads: Name → (hook, position) of what is read.
        state: Replaces ``resid_pre`` at the source (a token taken out of its context).

    Returns:
        Name → matrix ``[out, in]``.
    """
    d, seen = WIDTH, {}
    size = torch.tensor([1.0, -1, 2, -2], dtype=torch.float64)[:, None, None] * eps
    steps = (size * torch.eye(d, dtype=torch.float64)).reshape(4 * d, d)

    def nudge(activation: Tensor, hook: Any) -> Tensor:
        new = activation.clone().reshape(4 * d, -1, d)
        if state is not None:
            new[:, source_pos] = state.to(new)
        new[:, source_pos] += steps.to(new)
        return new.reshape(activation.shape)

    def read(name: str, pos: int) -> Any:
        def hook(activation: Tensor, hook: Any) -> None:
            seen[name] = activation.reshape(4 * d, -1, d)[:, pos].double()

        return hook

    hooks = [(f"blocks.{layer}.hook_in", nudge)]
    hooks += [(hook, read(name, pos)) for name, (hook, pos) in reads.items()]
    with torch.no_grad():
        model.run_with_hooks(tokens.expand(4 * d, -1), return_type=None, fwd_hooks=hooks)

    def slope(y: Tensor) -> Tensor:
        up, down, up2, down2 = y.reshape(4, d, d)
        return (8 * (up - down) - (up2 - down2)).T / (12 * eps)

    return {name: slope(y) for name, y in seen.items()}


def block_differences(
    model: Any,
    tokens: Tensor,
    layer: int,
    eps: float,
    *,
    pos: int,
    source_pos: int | None = None,
    state: Tensor | None = None,
    architecture: str,
) -> tuple[Tensor, Tensor | None]:
    """Central differences of ``resid_post`` and of the state between attention and MLP.

    That state is ``resid_pre`` plus what attention adds in decoders, and the output of the first
    norm in post-norm encoders, whose skip connection starts there.
    """
    source_pos = pos if source_pos is None else source_pos
    reads = {"post": (f"blocks.{layer}.hook_out", pos)}
    if architecture in ENCODERS:
        reads["mid"] = (f"blocks.{layer}.ln1.hook_out", pos)
    elif architecture not in PARALLEL:
        reads["added"] = (f"blocks.{layer}.hook_attn_out", pos)
    found = differences(model, tokens, layer, eps, source_pos=source_pos, reads=reads, state=state)
    mid = found.get("mid")
    if "added" in found:
        mid = found["added"] + (torch.eye(WIDTH) if pos == source_pos else 0)
    return found["post"], mid
