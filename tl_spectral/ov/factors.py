"""TransformerLens' ``FactoredMatrix`` as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError

Pair = tuple[Float[Tensor, "head d d_head"], Float[Tensor, "head d_head d"]]


def is_factored(given: Any) -> bool:
    """Whether it is a ``FactoredMatrix``."""
    from transformer_lens import FactoredMatrix

    return isinstance(given, FactoredMatrix)


def checked_factors(
    given: Any, layers: Sequence[int] | None, fold: str, vocabulary: bool
) -> tuple[tuple[int, ...], list[Pair]]:
    """Layers and factors of a ``FactoredMatrix``; one without a layer dimension is layer 0.

    Raises:
        InputError: If it is not square, real and finite, or an option needs the model.
    """
    if fold != "none" or vocabulary:
        raise InputError(
            "fold and vocabulary need the model: a FactoredMatrix knows neither norms nor "
            "embeddings. Pass the model, or leave them out."
        )
    shape = tuple(given.shape)
    if not 2 <= len(shape) <= 4 or shape[-1] != shape[-2] or 0 in shape:
        raise InputError(
            f"Expected a FactoredMatrix [layer, head, d, d], [head, d, d] or [d, d], got {shape}."
        )
    A, B = given.A.detach(), given.B.detach()
    if not (A.is_floating_point() and B.is_floating_point()):
        raise InputError(f"The factors must be real numbers, got {A.dtype} and {B.dtype}.")
    if not (A.isfinite().all() and B.isfinite().all()):
        raise InputError("The FactoredMatrix holds NaN or infinite values. Look for them upstream.")
    if A.shape[-1] > shape[-1]:  # the factors are wider than the matrix, which then does as well
        A, B = torch.eye(shape[-1], dtype=A.dtype).expand(A.shape[:-1] + shape[-1:]), A @ B
    lead = (1,) * (4 - len(shape))
    A, B = A.reshape(lead + A.shape), B.reshape(lead + B.shape)
    chosen = tuple(range(len(A))) if layers is None else tuple(layers)
    if not chosen or len(set(chosen)) != len(chosen) or any(i not in range(len(A)) for i in chosen):
        raise InputError(
            f"layers must name some of the {len(A)} layers of the FactoredMatrix, each once, got "
            f"{list(chosen)}."
        )
    return chosen, [(A[layer], B[layer]) for layer in chosen]
