"""How alike the tokens of one text are: order, cosine, rank, and what a common mean leaves."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

MEASURES = ("order", "mean_cosine", "effective_rank", "stable_rank", "residual")
"""The measures of :func:`token_geometry`, in order."""


def effective_rank(energies: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
    """``exp(−Σ p ln p)``, ``p = σ²/Σσ²`` (Roy & Vetterli 2007, on energies).

    Args:
        energies: Eigenvalues σ² of the Gram matrix; rounding may leave some just below zero.
    """
    p = energies.clamp(min=0)
    p = p / p.sum(dim=-1, keepdim=True)
    rank: Tensor = torch.special.entr(p).sum(dim=-1).exp()
    return rank


def token_geometry(gram: Float[Tensor, "*batch token token"]) -> Float[Tensor, "*batch measure"]:
    """Likeness of tokens ``X`` from ``X Xᵀ``, which holds everything but their common rotation.

    ``order`` and ``mean_cosine`` look at directions, the others at the matrix X itself, in which
    one token of huge norm weighs as much as its norm says:

    * ``order``: ``‖mean x̂‖``, 1 if all point the same way; isotropic tokens: about ``1/√n``.
    * ``mean_cosine``: mean of ``⟨x̂_i, x̂_j⟩`` over ``i ≠ j``; isotropic tokens: 0.
    * ``effective_rank``: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``.
    * ``stable_rank``: ``Σσ²/σ₁²``.
    * ``residual``: ``‖X − 1x̄ᵀ‖_F/‖X‖_F``, what is lost if every token is replaced by their mean
      (Dong, Cordonnier & Loukas 2021, there in another norm); isotropic tokens: ``√(1 − 1/n)``.

    Args:
        gram: ``X Xᵀ`` in float64, of at least two tokens, none of them zero.

    Returns:
        The five numbers, in the order of :data:`MEASURES`.
    """
    n = gram.shape[-1]
    squares = gram.diagonal(dim1=-2, dim2=-1)
    norms = squares.sqrt()
    directions = (gram / (norms[..., :, None] * norms[..., None, :])).sum(dim=(-2, -1))
    energies = torch.linalg.eigvalsh(gram)
    total = squares.sum(dim=-1)
    kept = gram.sum(dim=(-2, -1)) / n / total  # share of the energy that the mean keeps
    return torch.stack(
        [
            directions.clamp(min=0).sqrt() / n,  # the sum is a square; rounding alone is below 0
            (directions - n) / (n * (n - 1)),
            effective_rank(energies),
            total / energies[..., -1],
            (1 - kept).clamp(min=0).sqrt(),
        ],
        dim=-1,
    )
