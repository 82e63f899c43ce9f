"""The same model with the entries of its weights in random order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tl_spectral.model.gradients import differentiable
from tl_spectral.model.view import ModelView


def weight_shuffled(
    model: Any, seed: int = 0, *, embeddings: bool = False, norms: bool = False
) -> Any:
    """A copy of a model in which the entries of every weight tensor are permuted.

    Keeps what a re-initialised model does not: each tensor's own distribution of values, outliers
    and norm included. Breaks which entry sits where. Biases are permuted within themselves. A
    tensor that is stored once stays one tensor: tied embeddings remain tied, and all layers of an
    ALBERT share the same permuted weights.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert``; it is not touched.
        seed: Seed of the permutations; torch's global random state is left alone.
        embeddings: Also permute what lies outside the blocks: embeddings, positions, unembedding,
            the head of an encoder.
        norms: Also permute the gains and biases of norms.

    Returns:
        A new model of the same kind on the same device, with the same dtype and weight basis.
    """
    view = ModelView(model)
    with differentiable():
        shuffled = copy.deepcopy(model, _not_copied(model))
    generator = torch.Generator().manual_seed(seed)
    kept = set() if norms else {id(parameter) for parameter in _of_norms(shuffled)}
    where = shuffled if embeddings else shuffled.blocks
    with torch.no_grad():
        for parameter in where.parameters():
            if id(parameter) in kept:
                continue
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view(parameter.shape))
    shuffled.cfg.model_name = f"{view.name} with shuffled weights (seed {seed})"
    return shuffled.eval()


def _not_copied(model: Any) -> dict[int, Any]:
    """What the copy takes over as it is: the tokenizer, and what the last run left behind.

    Some bridges keep their attention pattern, which has a history of derivatives after a run with
    gradients; torch refuses to copy that.
    """
    memo = {id(model.tokenizer): model.tokenizer}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach()
    return memo


def _of_norms(model: torch.nn.Module) -> Iterator[Tensor]:
    """Parameters of modules whose own weight is a vector: a linear map's is a matrix."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            yield from (p for p in module._parameters.values() if p is not None)
