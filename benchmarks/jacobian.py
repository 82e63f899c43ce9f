"""The Jacobian of one block at the last position, by everyone who computes it.

All methods give the same ``d × d`` matrix of the same Llama block with random weights; each row's
note is the relative error of ``J − I`` against :func:`floor`. The rivals get the bare Hugging Face
layer, its inputs at hand; this library's rows are whole calls on a TransformerLens bridge: checks,
forward passes for keys, values and states, replay, self-check, matrix, result.

``floor`` is a hand-written assembly for this one architecture from the same matrix products, the
least that a dense Jacobian costs.

TransformerLens' ``JacobianLens`` computes something else from the same backward passes: for every
source layer the Jacobian to the last layer, averaged over source and summed over target positions.
The row beside it gives, for the same prompt and layers, the exact Jacobians to the last layer at
the last position.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Row, Work, measured

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"d": 64, "heads": 4, "groups": 2, "ffn": 160},
    "smollm2-135m": {"d": 576, "heads": 9, "groups": 3, "ffn": 1536},
    "llama-3-8b": {"d": 4096, "heads": 32, "groups": 8, "ffn": 14336},
}
_LENS_LAYERS = 4
_CHUNK = 128  # cotangents per backward pass; faster than all at once


def rows(*, small: bool) -> list[Row]:
    """The table; ``small`` is one width and two lengths, to see that everything runs."""
    shape = "tiny" if small else "smollm2-135m"
    table: list[Row] = []
    for T in (8, 16) if small else (8, 16, 64, 128):
        case, inputs = f"{shape} block, T = {T}", {"shape": shape, "T": T}
        bars = {16: "≥ 12 × is_grads_batched, ≤ 2.5 × floor", 64: "≥ 40 × is_grads_batched"}
        bars[128] = "≤ 1.4 × the cost at T = 8"
        table.append(
            measured(
                ours, table="jacobian", case=case, method="tl_spectral", ours=True, repeat=5,
                bar=bars.get(T, ""), **inputs,
            )
        )  # fmt: skip
        for method, prepare, repeat in (
            ("matrix products alone (floor)", floor_of_block, 5),
            ("tl_spectral, engine='reference'", reference, 1),
            ("autograd.grad(is_grads_batched=True), whole block", grads_batched, 1),
            ("torch.func.jacrev, whole block", jacrev, 1),
            ("torch.autograd.functional.jacobian, whole block", functional, 1),
        ):
            table.append(
                measured(
                    prepare, table="jacobian", case=case, method=method, repeat=repeat, **inputs
                )
            )
    for T in (8,) if small else (16, 64):
        case, inputs = f"to the last of {_LENS_LAYERS} layers, T = {T}", {"shape": shape, "T": T}
        for method, prepare, mine in (
            ("tl_spectral, every layer to the last", to_last_layer, True),
            ("transformer_lens JacobianLens, one prompt", lens, False),
        ):
            table.append(
                measured(
                    prepare, table="jacobian lens", case=case, method=method, ours=mine, **inputs
                )
            )
    if not small:
        inputs = {"shape": "llama-3-8b", "T": 16}
        for method, prepare, bar in (
            ("tl_spectral", ours, "≤ 3 × floor, under 8 GB beside the weights"),
            ("matrix products alone (floor)", floor_of_block, ""),
        ):
            table.append(
                measured(
                    prepare, table="jacobian", case="llama-3-8b block, T = 16", method=method,
                    ours=prepare is ours, bar=bar, **inputs,
                )
            )  # fmt: skip
    return table


# ------------------------------------------------------------------------------------- the methods


def ours(shape: str, T: int, engine: str = "fast", device: str = "cpu") -> Work:
    """A whole call of this library."""
    import tl_spectral as tls

    hf, tokens = llama(shape, 1, T, device)
    truth = floor(*inputs_of(hf, tokens)).cpu()
    model = bridged(hf)
    tls.capture(model, tokens)  # the model's facts are found once, at the first call
    if shape != "llama-3-8b":
        tls.block_jacobian(model, tokens, 0, engine=engine)

    def work() -> str:
        return _error(tls.block_jacobian(model, tokens, 0, engine=engine).matrix, truth)

    return work


def reference(shape: str, T: int) -> Work:
    """This library's architecture-agnostic engine."""
    return ours(shape, T, engine="reference")


def floor_of_block(shape: str, T: int, device: str = "cpu") -> Work:
    """See :func:`floor`."""
    arguments = inputs_of(*llama(shape, 1, T, device))

    def work() -> None:
        floor(*arguments)
        _wait(device)

    return work


def grads_batched(shape: str, T: int, device: str = "cpu") -> Work:
    """One-hot cotangents pulled back through the whole block at all positions."""
    block, X, truth = _bare(shape, T, device)

    def work() -> str:
        leaf = X.clone().requires_grad_(True)
        y = block(leaf)[-1]
        parts = [
            torch.autograd.grad(y, leaf, rows, is_grads_batched=True, retain_graph=True)[0][:, -1]
            for rows in torch.eye(len(y), device=y.device).split(_CHUNK)
        ]
        return _error(torch.cat(parts), truth)

    return work


def jacrev(shape: str, T: int, device: str = "cpu") -> Work:
    """``torch.func.jacrev`` by the last token's state."""
    block, X, truth = _bare(shape, T, device)

    def last(x: Tensor) -> Tensor:
        return block(torch.cat([X[:-1], x[None]]))[-1]

    return lambda: _error(torch.func.jacrev(last, chunk_size=_CHUNK)(X[-1]), truth)


def functional(shape: str, T: int, device: str = "cpu") -> Work:
    """``torch.autograd.functional.jacobian`` by the last token's state."""
    block, X, truth = _bare(shape, T, device)

    def last(x: Tensor) -> Tensor:
        return block(torch.cat([X[:-1], x[None]]))[-1]

    return lambda: _error(torch.autograd.functional.jacobian(last, X[-1]), truth)


def to_last_layer(shape: str, T: int) -> Work:
    """Exact Jacobians from every layer's output to the last one's, at the last position."""
    import tl_spectral as tls

    hf, tokens = llama(shape, _LENS_LAYERS, T)
    model = bridged(hf)
    tls.block_jacobian(model, tokens, 0)

    def work() -> None:
        blocks = list(tls.block_jacobians(model, tokens, range(1, _LENS_LAYERS)))
        product = blocks[-1].matrix
        for block in reversed(blocks[:-1]):
            product = product @ block.matrix

    return work


def lens(shape: str, T: int) -> Work:
    """TransformerLens' lens of one prompt, from every layer to the last."""
    from transformer_lens.tools.analysis import jacobian_lens

    hf, tokens = llama(shape, _LENS_LAYERS, T)
    model = bridged(hf)

    def work() -> None:
        with jacobian_lens._frozen_parameters(model):
            jacobian_lens._jacobian_for_prompt(
                model,
                tokens,
                source_layers=list(range(_LENS_LAYERS - 1)),
                dim_batch=8,  # its default
                skip_first_positions=0,
                backward_provider=jacobian_lens._ordinary_vjp,
            )

    return work


# ---------------------------------------------------------------------------------------- the model


def llama(shape: str, layers: int, T: int, device: str = "cpu") -> tuple[Any, Tensor]:
    """A Hugging Face Llama with random weights, and a prompt."""
    import transformers

    size = SHAPES[shape]
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=size["d"],
        num_hidden_layers=layers,
        num_attention_heads=size["heads"],
        num_key_value_heads=size["groups"],
        intermediate_size=size["ffn"],
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    hf = transformers.LlamaForCausalLM(config).eval().to(device)
    hf.set_attn_implementation("eager")
    return hf, torch.randint(3, 256, (1, T)).to(device)


def bridged(hf: Any) -> Any:
    """The same model as a TransformerLens bridge (which takes its modules over)."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    return build_bridge_from_module(
        hf,
        architecture="LlamaForCausalLM",
        hf_config=hf.config,
        model_name="llama",
        dtype=torch.float32,
    )


@torch.no_grad()
def inputs_of(hf: Any, tokens: Tensor) -> tuple[Any, Tensor, Tensor, Tensor]:
    """What :func:`floor` takes, of the first layer."""
    X = hf.model.embed_tokens(tokens)
    cos, sin = hf.model.rotary_emb(X, torch.arange(tokens.shape[1], device=tokens.device)[None])
    return hf.model.layers[0], X[0], cos[0], sin[0]


def _bare(shape: str, T: int, device: str) -> tuple[Any, Tensor, Tensor]:
    """The Hugging Face layer as a function of its input, the input, and the Jacobian."""
    layer, X, cos, sin = inputs_of(*llama(shape, 1, T, device))
    layer.requires_grad_(False)
    mask = torch.full((T, T), -1e30, device=device).triu(1)[None, None]

    def block(X: Tensor) -> Tensor:
        out = layer(X[None], position_embeddings=(cos[None], sin[None]), attention_mask=mask)
        result: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return result

    return block, X, floor(layer, X, cos, sin).cpu()


def _error(J: Tensor, truth: Tensor) -> str:
    identity = torch.eye(len(truth))
    return f"error {((J.cpu() - truth).norm() / (truth - identity).norm()).item():.0e}"


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------------------------------- the floor


@torch.no_grad()
def floor(layer: Any, X: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The Jacobian of a Llama block at its last position, by hand from its weights.

    Args:
        layer: Hugging Face's decoder layer.
        X: Its input, ``[pos, d_model]``.
        cos: Rotary embedding, ``[pos, d_head]``.
        sin: The same.
    """
    attention, mlp = layer.self_attn, layer.mlp
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    width, d, x = attention.head_dim, X.shape[1], X[-1]
    scale = 1 / math.sqrt(width)
    n = first(X)
    K = _rotate(attention.k_proj(n).view(len(X), -1, width), cos[:, None], sin[:, None])
    V = attention.v_proj(n).view(len(X), -1, width)
    q = _rotate(attention.q_proj(n[-1]).view(-1, width), cos[-1], sin[-1])
    heads, groups = len(q), K.shape[1]
    K, V = (A.transpose(0, 1).repeat_interleave(heads // groups, 0) for A in (K, V))
    p = ((K @ q[:, :, None]) * scale).softmax(dim=1)
    PV = p * V
    z = PV.sum(dim=1)
    W_Q, W_K, W_V = (
        linear.weight.view(-1, width, d)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    by_query = (PV.mT @ K - z[:, :, None] * (p.mT @ K)) * scale
    D = _unrotate(by_query, cos[-1], sin[-1]) @ W_Q
    by_key = (_unrotate(q, cos[-1], sin[-1]).view(groups, -1, width) @ W_K).view(heads, 1, d)
    D += (p[:, -1] * (V[:, -1] - z) * scale)[:, :, None] * by_key
    D.view(groups, -1, width, d).add_(p[:, -1].view(groups, -1, 1, 1) * W_V[:, None])
    J = _through_norm(attention.o_proj.weight @ D.view(-1, d), x, first)
    J.diagonal().add_(1)
    mid = x + attention.o_proj(z.view(-1))
    m = second(mid)
    gate, up = mlp.gate_proj(m), mlp.up_proj(m)
    s = gate.sigmoid()
    D = mlp.gate_proj.weight * (s * (1 + gate * (1 - s)) * up)[:, None]
    D.addcmul_(mlp.up_proj.weight, (gate * s)[:, None])
    return torch.addmm(J, _through_norm(mlp.down_proj.weight @ D, mid, second), J)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _unrotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rows times the rotation's matrix."""
    half, turned = rows.shape[-1] // 2, rows * sin
    return rows * cos + torch.cat([turned[..., half:], -turned[..., :half]], dim=-1)


def _through_norm(M: Tensor, x: Tensor, norm: Any) -> Tensor:
    """``M`` times the Jacobian of an RMSNorm."""
    size = (x.square().mean() + norm.variance_epsilon).rsqrt()
    M = M * norm.weight
    return M * size - torch.outer(M @ x, x * (size**3 / len(x)))
