"""What a direction can be given as: a vector, a token, a contrast of texts, a principal mode."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_spectral.capture import capture
from tl_spectral.errors import InputError
from tl_spectral.model import ModelView
from tl_spectral.model.edits import unembedding
from tl_spectral.ov import PrincipalMode


def unit_direction(
    view: ModelView, layer: int, given: Any
) -> tuple[Float[Tensor, " d_model"], str]:
    """The direction w, of unit length in float64, and what it was made from.

    Args:
        view: The model.
        layer: Layer whose ``resid_post`` a contrast of texts is taken at.
        given: See :func:`tl_spectral.steer`.

    Raises:
        InputError: If it is zero, not finite, of the wrong size, or no direction at all.
        ProvenanceError: If it is a mode of another model or weight basis.
    """
    if isinstance(given, PrincipalMode):
        view.provenance().require_same_model(given.provenance, "the model and the direction")
        if given.kind != "real":
            raise InputError("A complex mode is a plane, not a direction; give a real one.")
        vector, source = given.subspace[:, 0], f"principal mode of layer {given.layer}"
    elif isinstance(given, str):
        token = _single_token(view, given)
        vector, source = unembedding(view, token), f"token {given!r}"
    elif isinstance(given, int) and not isinstance(given, bool):
        if not 0 <= given < view.n_vocab:
            raise InputError(f"Token {given} does not exist; ids go from 0 to {view.n_vocab - 1}.")
        vector, source = unembedding(view, given), f"token {given}"
    elif isinstance(given, tuple) and len(given) == 2:
        means = [
            capture(view.source, texts, layers=[layer], sites=[]).resid_post[0].double().mean(dim=0)
            for texts in given
        ]
        vector, source = means[0] - means[1], "contrast of texts"
    elif isinstance(given, Tensor) and given.is_floating_point():
        vector, source = given, "vector"
    else:
        raise InputError(
            "direction must be a float tensor [d_model], a token (string or id), a pair of texts "
            f"(towards, away) or a PrincipalMode, got {type(given).__name__}."
        )
    if vector.shape != (view.d_model,):
        raise InputError(
            f"The direction has shape {tuple(vector.shape)}; {view.name} needs ({view.d_model},)."
        )
    vector = vector.detach().double().cpu()
    norm = vector.norm().item()
    if not math.isfinite(norm) or norm == 0:
        raise InputError("The direction is zero or not finite; it points nowhere.")
    return vector / norm, source


def _single_token(view: ModelView, text: str) -> int:
    tokenizer = view.source.tokenizer
    if tokenizer is None:
        raise InputError(f"{view.name} has no tokenizer; give the token's id instead of {text!r}.")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = [tokenizer.decode([i]) for i in ids]
        raise InputError(
            f"{text!r} is {len(ids)} tokens {pieces}, not one. Choose one of them (a leading space "
            "often matters), or give a pair of texts as a contrast."
        )
    return int(ids[0])
