"""The pieces of a hooked ALBERT: Hugging Face's own weights with hook points around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def _twin(module: ModuleT) -> ModuleT:
    """The same module again, with the very same parameters."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.original_component = _twin(norm)
        self.hook_in, self.hook_out = HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.hook_out(self.original_component(self.hook_in(x)))
        return normed


class _Linear(nn.Module):
    """A linear map whose input or output its hooks see per head."""

    def __init__(self, linear: nn.Linear, *, heads_in: int = 0, heads_out: int = 0) -> None:
        super().__init__()
        self.original_component = _twin(linear)
        self.heads_in, self.heads_out = heads_in, heads_out
        self.hook_in, self.hook_out = HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        x = self.hook_in(x)
        y: Tensor = self.original_component(x.flatten(-2) if self.heads_in else x)
        out: Tensor = self.hook_out(
            y.reshape(*y.shape[:-1], self.heads_out, -1) if self.heads_out else y
        )
        return out

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """As ``nn.Linear`` stores it."""
        weight: Tensor = self.original_component.weight
        return weight

    @property
    def bias(self) -> Float[Tensor, " out"]:
        """Bias."""
        bias: Tensor = self.original_component.bias
        return bias


class _Attention(nn.Module):
    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.n_heads = n = int(attention.num_attention_heads)
        self.q, self.k, self.v = (
            _Linear(linear, heads_out=n)
            for linear in (attention.query, attention.key, attention.value)
        )
        self.o = _Linear(attention.dense, heads_in=n)
        self.scale = float(attention.scaling)
        self.hook_in, self.hook_out = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.hook_in(x)
        q, k, v = (part(x).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if mask is not None:
            scores = scores + mask
        pattern = self.hook_pattern(self.hook_attn_scores(scores).softmax(dim=-1))
        z = torch.matmul(pattern, v).transpose(1, 2).contiguous()
        out: Tensor = self.hook_out(self.o(z))
        return out

    def _per_head(self, linear: _Linear) -> Float[Tensor, "head d_model d_head"]:
        return linear.weight.reshape(self.n_heads, -1, linear.weight.shape[1]).transpose(1, 2)

    @property
    def W_Q(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802 - TransformerLens' names
        return self._per_head(self.q)

    @property
    def W_K(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802
        return self._per_head(self.k)

    @property
    def W_V(self) -> Float[Tensor, "head d_model d_head"]:  # noqa: N802
        return self._per_head(self.v)

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:  # noqa: N802
        return self.o.weight.T.reshape(self.n_heads, -1, len(self.o.weight))

    @property
    def b_Q(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self.q.bias.reshape(self.n_heads, -1)

    @property
    def b_K(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self.k.bias.reshape(self.n_heads, -1)

    @property
    def b_V(self) -> Float[Tensor, "head d_head"]:  # noqa: N802
        return self.v.bias.reshape(self.n_heads, -1)

    @property
    def b_O(self) -> Float[Tensor, " d_model"]:  # noqa: N802
        return self.o.bias


class _MLP(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.add_module("in", _Linear(layer.ffn))  # TransformerLens' name is a keyword of Python
        self.out = _Linear(layer.ffn_output)
        self.activation: Callable[[Tensor], Tensor] = layer.activation
        self.hook_in, self.hook_out = HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        pre = self.get_submodule("in")(self.hook_in(x))
        out: Tensor = self.hook_out(self.out(self.activation(pre)))
        return out

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"]:  # noqa: N802 - TransformerLens' names
        reader = self.get_submodule("in")
        assert isinstance(reader, _Linear)
        return reader.weight.T

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:  # noqa: N802
        return self.out.weight.T


class AlbertBlock(nn.Module):
    """Post-norm: ``ln2(mid + mlp(mid))`` with ``mid = ln1(x + attn(x))``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.hook_in, self.hook_out = HookPoint(), HookPoint()
        self.attn, self.mlp = _Attention(layer.attention), _MLP(layer)
        self.ln1 = _Norm(layer.attention.LayerNorm)
        self.ln2 = _Norm(layer.full_layer_layer_norm)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """``resid_pre`` to ``resid_post``, under an additive mask."""
        x = self.hook_in(x)
        mid = self.ln1(x + self.attn(x, mask))
        out: Tensor = self.hook_out(self.ln2(self.mlp(mid) + mid))
        return out


class AlbertEmbed(nn.Module):
    """Word, position and segment embeddings, their norm, and the map to ``d_model``."""

    def __init__(self, albert: Any) -> None:
        super().__init__()
        self.embeddings = _twin(albert.embeddings)
        self.mapping = _twin(albert.encoder.embedding_hidden_mapping_in)
        self.hook_out = HookPoint()

    def forward(self, tokens: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """Token ids to the first ``resid_pre``."""
        embedded = self.embeddings(tokens, token_type_ids=token_type_ids)
        out: Tensor = self.hook_out(self.mapping(embedded))
        return out

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:  # noqa: N802
        """Word embedding through the map to ``d_model``, the norm between them left out."""
        weight: Tensor = self.embeddings.word_embeddings.weight @ self.mapping.weight.T
        return weight


class AlbertUnembed(nn.Module):
    """The masked-token head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = _twin(head)
        self.hook_in, self.hook_out = HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """Last ``resid_post`` to logits."""
        logits: Tensor = self.hook_out(self.head(self.hook_in(x)))
        return logits

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:  # noqa: N802
        """The head's two linear maps; its activation and norm between them are left out."""
        weight: Tensor = self.head.dense.weight.T @ self.head.decoder.weight.T
        return weight
