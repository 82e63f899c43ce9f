"""The only place that changes a model: an output weight, or a state through a hook, and back.

A ``TransformerBridge`` shows ``W_O`` as a view of the stored parameter on every architecture
(nn.Linear, Conv1D, fused query-key-value, raw or compatibility mode), so it is written through that
view and its strides do the transposing. Where the view is a copy the edit is refused; where layers
share the parameter (ALBERT), the edit of one of them is a hook that computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import ModelStateError, UnsupportedModelError
from tl_spectral.model.view import ModelView


@contextmanager
def forward_hook(module: torch.nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """A hook of PyTorch's own, which TransformerLens' ``reset_hooks()``, called at will, leaves."""
    handle = module.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()


class _Stack:
    """All edits of one stored weight: they may end in any order, from any model that shares it."""

    def __init__(self, weight: Tensor) -> None:
        self.original = weight.clone()
        self.deltas: dict[object, Tensor] = {}

    def rewrite(self, weight: Tensor) -> None:
        """The original plus the remaining edits, added in the order in which they came."""
        weight.copy_(self.original)
        for delta in self.deltas.values():
            weight.add_(delta)


_stacks: dict[int, _Stack] = {}  # by the address of the stored weight


def _output_weight(view: ModelView, layer: int) -> Float[Tensor, "head_d_head d_model"]:
    """``W_O`` with its heads in one dimension: a view of the parameter itself."""
    weight: Tensor = view.source.blocks[layer].attn.W_O.detach()
    weight = weight.view(-1, weight.shape[-1])
    stored = {p.data_ptr() for p in view.source.parameters() if p.numel() == weight.numel()}
    if weight.data_ptr() not in stored:
        raise UnsupportedModelError(
            f"W_O of layer {layer} of {view.name} ({view.architecture}) is not stored as one "
            "parameter (quantised or computed), so it cannot be edited. Use method='hook'."
        )
    return weight


def shares_output_weight(view: ModelView, layer: int) -> bool:
    """Whether another layer uses the stored ``W_O`` of this one, as all of ALBERT's do."""
    address = _output_weight(view, layer).data_ptr()
    return any(
        parameter.data_ptr() == address
        for other, block in enumerate(view.source.blocks)
        if other != layer
        for parameter in block.parameters()
    )


@contextmanager
def _writable() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def output_weight_plus(
    view: ModelView, layer: int, delta: Float[Tensor, "head_d_head d_model"]
) -> Iterator[None]:
    """``W_O + delta`` inside; bit for bit ``W_O`` after, also after an exception.

    Edits may nest, end in any order, and come from several models that share the weight. Whatever
    else is written to this weight inside is undone as well. Where other layers share the weight,
    it is not written: this layer's output projection adds ``z @ delta`` to what it returns.

    Raises:
        ModelStateError: On leaving, if the model was put in compatibility mode inside: that
            rewrote the weights together with the edit, and nothing can take it out again.
    """
    if shares_output_weight(view, layer):
        with _projection_plus(view, layer, delta):
            yield
        return
    key = object()
    with _writable():
        weight = _output_weight(view, layer)
        address = weight.data_ptr()
        stack = _stacks.setdefault(address, _Stack(weight))
    try:
        with _writable():
            stack.deltas[key] = delta.to(weight.device, weight.dtype)
            stack.rewrite(weight)
        yield
    finally:
        stack.deltas.pop(key, None)
        if not stack.deltas:
            _stacks.pop(address, None)
        model = view.source
        if view.weights == "raw" and (
            model.compatibility_mode or getattr(model, "_weights_processed", False)
        ):
            raise ModelStateError(
                f"{view.name} was put in compatibility mode while it was steered, which folded the "
                "edit into its weights for good. Load it again, and change mode before steering."
            )
        with _writable():
            stack.rewrite(_output_weight(view, layer))


@contextmanager
def _projection_plus(
    view: ModelView, layer: int, delta: Float[Tensor, "head_d_head d_model"]
) -> Iterator[None]:
    projection = view.source.blocks[layer].attn.o
    # What reaches the weights, the user's hooks done; but the sum is not taken there, since layers
    # that share weights may share the module inside the bridge as well.
    inner = getattr(projection, "original_component", projection)
    seen: list[Tensor] = []

    def keep(module: Any, args: tuple[Tensor, ...]) -> None:
        seen[:] = [args[0]]

    def add(module: Any, args: Any, output: Tensor) -> Tensor:
        z = seen[0].reshape(*output.shape[:-1], -1)
        return output + z @ delta.to(z.device, z.dtype)

    handle = inner.register_forward_pre_hook(keep)
    try:
        with forward_hook(projection, add):
            yield
    finally:
        handle.remove()


@contextmanager
def attention_plus(
    view: ModelView,
    layer: int,
    read: Float[Tensor, " d_model"],
    write: Float[Tensor, " d_model"],
) -> Iterator[None]:
    """Add ``write · ⟨read, x⟩`` to the attention output, x being what attention reads there.

    No weight is touched. x is the state at the same position, after the norm if there is one.
    """
    attention = view.source.blocks[layer].attn
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, state: Tensor) -> None:
        seen[:] = [state]

    def add(module: Any, args: Any, output: Tensor) -> Tensor:
        state = seen[0].reshape(output.shape)
        amount = state @ read.to(state.device, state.dtype)
        return output + amount[..., None] * write.to(output.device, output.dtype)

    with forward_hook(attention.hook_in, keep), forward_hook(attention.o, add):
        yield


@contextmanager
def residual_plus(view: ModelView, layer: int, vector: Float[Tensor, " d_model"]) -> Iterator[None]:
    """Add a constant vector to ``resid_post`` of a layer, at every position."""

    def add(module: Any, args: Any, state: Tensor) -> Tensor:
        return state + vector.to(state.device, state.dtype)

    with forward_hook(view.source.blocks[layer].hook_out, add):
        yield


def unembedding(view: ModelView, token: int) -> Float[Tensor, " d_model"]:
    """The column of the unembedding that scores a token."""
    try:
        column: Tensor = view.source.unembed.W_U[:, token].detach()
    except (AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{view.name} ({view.architecture}) has no unembedding ({error}); give the direction "
            "as a vector instead of a token."
        ) from error
    return column.double().cpu()


def query_key_factors(
    view: ModelView, layer: int
) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_model d_head"]]:
    """``W_Q`` and ``W_K`` of a layer, key heads repeated over their query group.

    Raises:
        UnsupportedModelError: If the layer has none per head.
    """
    attention = view.model.blocks[layer].attn
    try:
        factors = [attention.W_Q.detach(), attention.W_K.detach()]
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(
            f"Layer {layer} of {view.name} ({view.architecture}) has no query and key weights per "
            f"head ({error}). Use attention='uniform' or 'identity'."
        ) from error
    d_head = int(view.model.cfg.d_head)
    W_Q, W_K = (
        W.reshape(W.shape[0], -1, d_head).transpose(0, 1) if W.ndim == 2 else W for W in factors
    )
    return W_Q, W_K.repeat_interleave(len(W_Q) // len(W_K), dim=0)
