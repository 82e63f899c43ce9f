"""Jacobians known in closed form, the engines that compute them, and what they say of themselves.

Changed to see these tests fail: J transposed (closed forms); update without its identity (update,
silent_blocks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import prompts, relative, states
from torch import Tensor
from transformer_lens import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from zoo import LAYERS, WIDTH

import tl_spectral as tls
from tl_spectral.errors import InputError
from tl_spectral.model import ModelView

ModelOf = Callable[..., Any]


def native(**options: Any) -> Any:
    """A toy of TransformerLens' own: no Hugging Face model inside."""
    shape: dict[str, Any] = {
        "d_model": 12, "d_head": 4, "n_heads": 3, "n_layers": 2, "n_ctx": 8,
        "d_vocab": 20, "d_mlp": 16, "act_fn": "gelu", "seed": 0,
    }  # fmt: skip
    return TransformerBridge.boot_native(TransformerBridgeConfig(**{**shape, **options})).eval()


# ----------------------------------------------------------------------------------- closed forms


def test_silent_blocks_pass_the_stream_on() -> None:
    """Attention and MLP that write nothing: J = I at every position, 0 between positions."""
    model = native()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.o.original_component.weight.zero_()
            block.mlp.out.original_component.weight.zero_()
    tokens = torch.tensor([[1, 2, 3, 4]])
    for scope in ("block", "attn", "mlp"):
        for context in ("full", "isolated"):
            J = tls.block_jacobian(model, tokens, 1, context=context, scope=scope)
            assert torch.equal(J.matrix, torch.eye(12))
            assert not J.update.any()
    assert torch.equal(tls.span_jacobian(model, tokens, 0, 2).matrix, torch.eye(12))
    assert not tls.block_jacobian(model, tokens, 1, -1, 1).matrix.any()


def test_linear_attention_without_norms() -> None:
    """attn_only, no norm: alone J = I + F with F = Σ (W_V W_O)ᵀ, and J(t, t') has F's pattern.

    With W_Q = 0 the pattern is uniform, so J(t, t) = I + F/(t + 1) and J(t, t') = F/(t + 1).
    """
    model = native(attn_only=True, normalization_type=None)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q.original_component.weight.zero_()
            block.attn.q.original_component.bias.zero_()
    W_V, W_O = ModelView(model).ov_factors(1)
    F = torch.einsum("hik,hko->oi", W_V, W_O)
    assert relative(F - F.T, F) > 0.5  # the transpose would not pass
    tokens = torch.tensor([[5, 1, 7, 2]])
    isolated = tls.block_jacobian(model, tokens, 1, context="isolated")
    assert torch.allclose(isolated.update, F, atol=1e-6)
    for pos in range(4):
        J = tls.block_jacobian(model, tokens, 1, pos)
        assert torch.allclose(J.update, F / (pos + 1), atol=1e-6)
        for source in range(pos):
            cross = tls.block_jacobian(model, tokens, 1, pos, source)
            assert torch.allclose(cross.matrix, F / (pos + 1), atol=1e-6)
            assert torch.equal(cross.update, cross.matrix)


def test_span_of_a_linear_model_counts_paths_through_other_positions() -> None:
    """Uniform causal attention twice: from position 0 to 1, by hand.

    h¹₁ = h⁰₁ + F₀(h⁰₀ + h⁰₁)/2 and h¹₀ = h⁰₀ + F₀h⁰₀, hence d h²₁/d h⁰₀ =
    (I + F₁/2) F₀/2 + F₁/2 (I + F₀): two paths at position 1 and one through position 0.
    """
    model = native(attn_only=True, normalization_type=None)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.q.original_component.weight.zero_()
            block.attn.q.original_component.bias.zero_()
    view = ModelView(model)
    F0, F1 = (torch.einsum("hik,hko->oi", *view.ov_factors(layer)) for layer in (0, 1))
    identity = torch.eye(12)
    truth = (identity + F1 / 2) @ F0 / 2 + F1 / 2 @ (identity + F0)
    tokens = torch.tensor([[5, 1]])
    span = tls.span_jacobian(model, tokens, 0, 2, 1, 0).matrix
    assert torch.allclose(span, truth, atol=1e-6)
    blocks = [tls.block_jacobian(model, tokens, layer, 1, 0).matrix for layer in (0, 1)]
    assert not torch.allclose(span, blocks[1] @ blocks[0], atol=1e-3)


def norm_jacobian(kind: str, x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """D norm(x)/dx for LayerNorm and RMSNorm, written out."""
    d = len(x)
    centre = torch.eye(d) - (1 / d if kind == "layer" else 0)
    y = centre @ x
    size = (y.square().mean() + eps).sqrt()
    return gain[:, None] * (torch.eye(d) - torch.outer(y, y) / (d * size**2)) @ centre / size


@pytest.mark.parametrize(
    ("name", "kind", "eps"),
    [("gpt2", "layer", 1e-5), ("llama", "rms", 1e-6), ("qwen2", "rms", 1e-6)],
)
def test_isolated_attention_is_ov_after_the_norm(
    name: str, kind: str, eps: float, model_of: ModelOf, prompt: Tensor
) -> None:
    """Softmax over one token is 1: J_attn = I + Σ (W_V W_O)ᵀ N(x)."""
    model = model_of(name)
    view = ModelView(model)
    for layer in range(LAYERS):
        x = states(model, prompt, layer, 8)[0]
        gain = view.norm_gain(layer)
        assert gain is not None
        W_V, W_O = view.ov_factors(layer)
        F = torch.einsum("hik,hko->oi", W_V, W_O)
        update = F @ norm_jacobian(kind, x, gain, eps)
        J = tls.block_jacobian(model, prompt, layer, context="isolated", scope="attn")
        assert relative(J.update - update, update) < 1e-4


# ---------------------------------------------------------------------------------------- engines


def test_repeated_runs_are_bit_identical(gpt2: Any, prompt: Tensor) -> None:
    for engine in ("fast", "reference"):
        first, second = (tls.block_jacobian(gpt2, prompt, 1, engine=engine) for _ in range(2))
        assert torch.equal(first.matrix, second.matrix)


# ----------------------------------------------------------------------------- positions and layers


def test_one_position_named_in_two_ways(gpt2: Any, prompt: Tensor) -> None:
    J = tls.block_jacobian(gpt2, prompt, 1)
    for pos, source in ((-1, 8), (8, -1), (8, 8), (-1, -1)):
        other = tls.block_jacobian(gpt2, prompt, 1, pos, source)
        assert torch.equal(other.matrix, J.matrix)
        assert torch.equal(other.update, J.update)
        assert other.engine == "fast"


def test_positions_that_coincide_in_some_texts_only(gpt2: Any) -> None:
    texts = [prompts(1, 9)[0], prompts(1, 7)[0]]
    with pytest.raises(InputError, match="same position in some texts and not in others"):
        tls.block_jacobian(gpt2, texts, 1, -1, 6)
    with pytest.raises(InputError, match="lies after pos"):
        tls.block_jacobian(gpt2, texts, 1, 5, -1)
    mean = tls.block_jacobian(gpt2, texts, 1, -1, -3).matrix
    alone = [tls.block_jacobian(gpt2, text, 1, -1, -3).matrix for text in texts]
    assert torch.allclose(mean, torch.stack(alone).mean(0), atol=1e-6)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_layers_in_any_order(engine: Any, gpt2: Any, prompt: Tensor) -> None:
    ordered = [J.matrix for J in tls.block_jacobians(gpt2, prompt, engine=engine)]
    mixed = list(tls.block_jacobians(gpt2, prompt, [2, -3, 1], engine=engine))
    assert [J.layer for J in mixed] == [2, 0, 1]
    for J in mixed:
        assert torch.allclose(J.matrix, ordered[J.layer], atol=1e-6)
        assert torch.equal(J.norm_gain, ModelView(gpt2).norm_gain(J.layer))
    single = tls.block_jacobian(gpt2, prompt, -1, engine=engine)
    assert single.layer == 2
    assert torch.allclose(single.matrix, ordered[2], atol=1e-6)


def test_tokens_after_the_position_are_not_needed(gpt2: Any, prompt: Tensor) -> None:
    long = tls.block_jacobian(gpt2, prompt, 1, 4).matrix
    short = tls.block_jacobian(gpt2, prompt[:, :5], 1).matrix
    assert torch.allclose(long, short, atol=1e-6)


def test_a_span_of_one_block_is_the_block(gpt2: Any, prompt: Tensor) -> None:
    for layer in range(LAYERS):
        span = tls.span_jacobian(gpt2, prompt, layer, layer + 1)
        block = tls.block_jacobian(gpt2, prompt, layer)
        assert torch.allclose(span.matrix, block.matrix, atol=1e-6)
    assert tls.span_jacobian(gpt2, prompt, -1, 3).layer == 2


# ------------------------------------------------------------------------------------- the result


def test_the_result_says_what_it_is(llama: Any, prompt: Tensor, tmp_path: Any) -> None:
    J = tls.block_jacobian(llama, prompt.expand(2, -1), 1, 4, 2, scope="attn")
    facts = (J.layer, J.stop, J.pos, J.source_pos, J.context, J.scope, J.n_samples)
    assert facts == (1, 2, 4, 2, "full", "attn", 2)
    assert J.provenance.options == {
        "context": "full", "scope": "attn", "pos": 4, "source_pos": 2, "engine": "reference",
        "engine_reason": "source and target positions differ",
    }  # fmt: skip
    assert J.matrix.dtype == torch.float32
    assert not J.matrix.requires_grad
    loaded = tls.BlockJacobian.load(J.save(tmp_path / "J"))
    assert torch.equal(loaded.matrix, J.matrix)
    assert loaded.provenance == J.provenance
    assert loaded.engine_reason == J.engine_reason


def test_update(gpt2: Any, prompt: Tensor) -> None:
    J = tls.block_jacobian(gpt2, prompt, 1)
    assert torch.equal(J.update + torch.eye(WIDTH), J.matrix) or torch.allclose(
        J.update + torch.eye(WIDTH), J.matrix, atol=1e-7
    )
    assert J.update.trace().item() == pytest.approx(J.matrix.trace().item() - WIDTH, abs=1e-4)


def test_norm_gain_belongs_to_the_source(gpt2: Any, prompt: Tensor) -> None:
    """The second norm reads resid_mid; its gain is not the one at hand."""
    assert tls.block_jacobian(gpt2, prompt, 1, scope="attn").norm_gain is not None
    assert tls.block_jacobian(gpt2, prompt, 1, scope="mlp").norm_gain is None


def test_dataframe_and_plot(gpt2: Any, prompt: Tensor) -> None:
    J = tls.block_jacobian(gpt2, prompt, 1)
    frame = J.to_dataframe()
    assert set(frame.operator) == {"J", "R"}
    assert (frame.layer == 1).all()
    assert {"metric", "value", "baseline"} <= set(frame.columns)
    assert J.plot().data
