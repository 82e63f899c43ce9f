"""From token to token through the residual stream: ``W_E``, the last norm, ``W_U``."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import UnsupportedModelError
from tl_spectral.model.anatomy import Norm, measure_norm
from tl_spectral.model.memo import remembered
from tl_spectral.model.view import Fold, Hook, ModelView

_CHUNK = 8192  # tokens at once


def vocabulary_map(view: ModelView, fold: Fold | str) -> Float[Tensor, "d_model d_model"]:
    """``W_U W_E``, summed over the vocabulary in chunks, float64; never ``d_vocab²``.

    Row convention, as ``W_U [d_model, d_vocab]`` and ``W_E [d_vocab, d_model]``. Positions and
    norms on the embedding are left out.

    Args:
        view: The model.
        fold: Anything but ``"none"`` folds the norm before the unembedding into ``W_U``.

    Raises:
        UnsupportedModelError: If more than a norm stands between the last state and the
            unembedding (masked-token heads), or the two do not fit.
    """
    with view.frozen():
        norm = remembered(view.model, "last norm", lambda: _last_norm(view))
        through = remembered(view.model, "W_U W_E", lambda: _summed(view))
    return norm.before(through) if norm is not None and fold != "none" else through


def _refuse(view: ModelView, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{view.name} ({view.architecture}) has no copying score through the vocabulary: {reason}. "
        "Leave out vocabulary=True; the score in the residual basis does not need it."
    )


def _summed(view: ModelView) -> Float[Tensor, "d_model d_model"]:
    try:
        W_E, W_U = view.model.W_E.detach(), view.model.W_U.detach()
    except (AttributeError, NotImplementedError) as error:
        raise _refuse(view, f"no embedding or unembedding ({error})") from error
    if W_E.T.shape != W_U.shape or len(W_U) != view.d_model:
        raise _refuse(view, f"W_E is {tuple(W_E.shape)} and W_U {tuple(W_U.shape)}")
    through = torch.zeros(len(W_U), len(W_U), dtype=torch.float64)
    for start in range(0, len(W_E), _CHUNK):
        part = slice(start, start + _CHUNK)
        through += W_U[:, part].double().cpu() @ W_E[part].double().cpu()
    return through


def _last_norm(view: ModelView) -> Norm | None:
    """The norm between last state and unembedding, found by running two tokens."""
    seen: dict[str, Tensor] = {}
    state = f"blocks.{view.n_layers - 1}.hook_out"
    names = (state, "ln_final.hook_in", "ln_final.hook_out", "unembed.hook_in", "unembed.hook_out")

    def keep(name: str) -> Hook:
        def hook(activation: Tensor) -> Tensor:
            seen[name] = activation.detach().reshape(2, -1)
            return activation

        return hook

    tokens = torch.tensor([[min(5, view.n_vocab - 1), min(6, view.n_vocab - 2)]])
    with torch.no_grad():
        view.run(tokens, {name: keep(name) for name in names if name in view.model.hook_dict})
    read, out = seen.get("unembed.hook_in"), seen.get("unembed.hook_out")
    if read is None or out is None:
        raise _refuse(view, "its unembedding is out of reach")
    expected = (read[0] - read[1]) @ view.model.W_U.detach()
    if not torch.allclose(expected, out[0] - out[1], rtol=1e-3, atol=1e-3 * float(out.abs().max())):
        raise _refuse(view, "its head is more than a linear map of the state")
    if torch.equal(read, seen[state]):
        return None
    before, after = seen.get("ln_final.hook_in"), seen.get("ln_final.hook_out")
    alone = before is not None and torch.equal(before, seen[state])
    if after is None or not (alone and torch.equal(after, read)):
        raise _refuse(view, "more than a norm stands between the last state and W_U")
    return measure_norm(view.model.ln_final.original_component, read[:1])
