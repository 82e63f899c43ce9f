"""Products with a Jacobian that is never formed equal those with the matrix.

Changed to see these tests fail: T without effect; the identity of OPT's branch left out of one of
the two products; a chain in the wrong order, or transposed factor by factor only; the span's source
position ignored; fused attention kernels left on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import PARALLEL, prompts
from scipy.sparse.linalg import svds
from torch import Tensor
from zoo import ARCHITECTURES, WIDTH, tiny

import tl_spectral as tls
from tl_spectral.errors import InputError, ProvenanceError

ModelOf = Callable[..., Any]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_products(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    generator = torch.Generator().manual_seed(0)
    X, x = torch.randn(WIDTH, 3, generator=generator), torch.randn(WIDTH, generator=generator)
    scopes: tuple[Any, ...] = ("block",) if name in PARALLEL else ("block", "attn", "mlp")
    cases = [("full", scope, pos) for scope in scopes for pos in (-1, 0)]
    for context, scope, pos in [*cases, ("isolated", "block", 4)]:
        J = tls.block_jacobian(model, prompt, 1, pos, context=context, scope=scope).matrix
        op = tls.jacobian_operator(model, prompt, 1, pos, context, scope)
        assert torch.allclose(op @ X, J @ X, atol=1e-4)
        assert torch.allclose(op @ x, J @ x, atol=1e-4)
        assert torch.allclose(op.T @ X, J.T @ X, atol=1e-4)
        assert torch.allclose(op.T.T @ x, J @ x, atol=1e-4)
        assert torch.allclose(op.to_dense(), J, atol=1e-6)
        assert torch.allclose(op.T.to_dense(), J.T, atol=1e-6)


def test_shape_type_and_adjoint(gpt2: Any, prompt: Tensor) -> None:
    op = tls.jacobian_operator(gpt2, prompt, 1)
    assert op.shape == op.T.shape == (WIDTH, WIDTH)
    assert op.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, WIDTH, generator=generator)
    assert (y @ (op @ x)).item() == pytest.approx(((op.T @ y) @ x).item(), rel=1e-4)
    assert not (op @ x).requires_grad


def test_double_precision(model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of("gpt2", torch.float64)
    op = tls.jacobian_operator(model, prompt, 1)
    J = tls.block_jacobian(model, prompt, 1).matrix
    assert op.dtype == torch.float64
    assert torch.allclose(op @ torch.eye(WIDTH, dtype=torch.float64), J, atol=1e-13)


def test_scipy(gpt2: Any, prompt: Tensor) -> None:
    op = tls.jacobian_operator(gpt2, prompt, 1)
    J = tls.block_jacobian(gpt2, prompt, 1).matrix.numpy()
    linear = op.to_scipy()
    X = np.random.default_rng(0).standard_normal((WIDTH, 2)).astype(np.float32)
    assert linear.shape == (WIDTH, WIDTH)
    assert linear.dtype == np.float32
    for left, right in (
        (linear.matvec(X[:, 0]), J @ X[:, 0]),
        (linear.matmat(X), J @ X),
        (linear.rmatvec(X[:, 0]), J.T @ X[:, 0]),
        (linear.rmatmat(X), J.T @ X),
        (linear.H @ X, J.T @ X),
        (linear @ X[:, ::-1], J @ X[:, ::-1]),
    ):
        np.testing.assert_allclose(left, right, atol=1e-4)
    top = svds(linear, k=3, return_singular_vectors=False, rng=np.random.default_rng(0))
    np.testing.assert_allclose(sorted(top), np.linalg.svd(J, compute_uv=False)[2::-1], rtol=1e-4)


@pytest.mark.parametrize("shape", [(WIDTH + 1,), (WIDTH - 1, 2)])
def test_wrong_shapes(shape: tuple[int, ...], gpt2: Any, prompt: Tensor) -> None:
    op = tls.jacobian_operator(gpt2, prompt, 1)
    with pytest.raises(InputError, match=rf"Expected \[{WIDTH}\]"):
        op @ torch.ones(shape)


def test_one_prompt_only(gpt2: Any) -> None:
    with pytest.raises(InputError, match="belongs to one prompt, got 2"):
        tls.jacobian_operator(gpt2, prompts(2, 5), 1)


def test_bad_arguments(gpt2: Any, model_of: ModelOf, prompt: Tensor) -> None:
    with pytest.raises(InputError, match="layer 3"):
        tls.jacobian_operator(gpt2, prompt, 3)
    with pytest.raises(InputError, match="context must be"):
        tls.jacobian_operator(gpt2, prompt, 1, context="none")
    with pytest.raises(InputError, match="no resid_mid"):
        tls.jacobian_operator(model_of("pythia"), prompt, 1, scope="attn")


def dense_products(op: Any, J: Tensor, atol: float = 1e-4) -> None:
    X = torch.randn(WIDTH, 3, generator=torch.Generator().manual_seed(0), dtype=J.dtype)
    assert torch.allclose(op @ X, J @ X, atol=atol)
    assert torch.allclose(op.T @ X, J.T @ X, atol=atol)
    assert torch.allclose(op.to_dense(), J, atol=1e-5)
    assert torch.allclose(op.T.to_dense(), J.T, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "gemma3", "bert"])
def test_spans(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    for start, stop, pos in ((0, 3, -1), (1, 3, 4), (-1, 3, -1)):
        J = tls.span_jacobian(model, prompt, start, stop, pos)
        op = tls.jacobian_operator(model, prompt, start=start, stop=stop, pos=pos)
        assert (op.start, op.stop, op.scope) == (J.layer, J.stop, "span")
        dense_products(op, J.matrix)
        dense_products(op.update, J.update)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_between_positions(name: str, model_of: ModelOf, prompt: Tensor) -> None:
    model = model_of(name)
    J = tls.block_jacobian(model, prompt, 1, pos=6, source_pos=3)
    op = tls.jacobian_operator(model, prompt, 1, pos=6, source_pos=3)
    dense_products(op, J.matrix)
    assert op.update is op  # no skip connection joins two positions
    span = tls.span_jacobian(model, prompt, 0, 2, pos=6, source_pos=3).matrix
    dense_products(tls.jacobian_operator(model, prompt, start=0, stop=2, pos=6, source_pos=3), span)


def test_chains(llama: Any, prompt: Tensor) -> None:
    ops = [tls.jacobian_operator(llama, prompt, layer) for layer in range(3)]
    J0, J1, J2 = (op.to_dense() for op in ops)
    chain = tls.chain_operator(ops)
    assert chain.factors == tuple(ops)
    assert chain.shape == (WIDTH, WIDTH)
    assert chain.provenance.model == ops[0].provenance.model != "tensors"
    assert chain.provenance.texts == ops[0].provenance.texts != ""
    dense_products(chain, J2 @ J1 @ J0)
    dense_products(chain.update, J2 @ J1 @ J0 - torch.eye(WIDTH))
    dense_products(ops[2] @ ops[1], J2 @ J1)
    dense_products(ops[2] @ (ops[1] @ ops[0]).T, J2 @ (J1 @ J0).T)
    dense_products(ops[1].T @ ops[1], J1.T @ J1)
    dense_products(ops[2] @ (ops[1] @ ops[0]).update, J2 @ (J1 @ J0 - torch.eye(WIDTH)))
    vector = torch.ones(WIDTH)
    assert torch.allclose(chain @ vector, J2 @ (J1 @ (J0 @ vector)), atol=1e-4)


@pytest.mark.parametrize(("name", "same"), [("llama", True), ("bert", False)])
def test_a_chain_is_the_span_where_no_path_leaves_the_position(
    name: str, same: bool, model_of: ModelOf, prompt: Tensor
) -> None:
    """In a causal model a perturbation cannot come back from another position."""
    model = model_of(name)
    chain = tls.chain_operator([tls.jacobian_operator(model, prompt, i, 5) for i in range(3)])
    span = tls.jacobian_operator(model, prompt, start=0, stop=3, pos=5)
    assert torch.allclose(chain.to_dense(), span.to_dense(), atol=1e-4) == same


def test_chains_of_what_does_not_belong_together(
    llama: Any, gpt2: Any, model_of: ModelOf, prompt: Tensor
) -> None:
    first, second, last = (tls.jacobian_operator(llama, prompt, layer) for layer in range(3))
    with pytest.raises(InputError, match="no operators"):
        tls.chain_operator([])
    with pytest.raises(InputError, match="Layer 2 follows layer 0"):
        tls.chain_operator([first, last])
    with pytest.raises(InputError, match="scope 'mlp'"):
        tls.chain_operator([first, tls.jacobian_operator(llama, prompt, 1, scope="mlp")])
    with pytest.raises(InputError, match="position or context: -1, full and -1, isolated"):
        tls.chain_operator([first, tls.jacobian_operator(llama, prompt, 1, context="isolated")])
    with pytest.raises(ProvenanceError, match="different models"):
        tls.chain_operator([first, tls.jacobian_operator(gpt2, prompt, 1)])
    with pytest.raises(ProvenanceError, match="different texts"):
        second @ tls.jacobian_operator(llama, prompt[:, :-1], 0)
    with pytest.raises(InputError, match="Expected a tensor or an operator"):
        first @ np.ones(WIDTH)


@pytest.mark.parametrize("name", ["opt", "bert", "llama"])
def test_fused_attention_is_differentiated_twice_and_left_as_found(
    name: str, prompt: Tensor
) -> None:
    model = tiny(name)
    modules = model.original_model.modules()
    configs = [m.config for m in modules if getattr(m, "config", None) is not None]
    for config in configs:
        config._attn_implementation = "sdpa"
    before = sdpa_state()
    J = tls.block_jacobian(model, prompt, 1, engine="reference").matrix
    dense_products(tls.jacobian_operator(model, prompt, 1), J)
    span = tls.span_jacobian(model, prompt, 0, 2).matrix
    dense_products(tls.jacobian_operator(model, prompt, start=0, stop=2), span)
    assert {config._attn_implementation for config in configs} == {"sdpa"}
    assert sdpa_state() == before


def sdpa_state() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def test_products_in_pieces_are_the_same(gpt2: Any, prompt: Tensor) -> None:
    op = tls.jacobian_operator(gpt2, prompt, 1)
    X = torch.randn(WIDTH, 300, generator=torch.Generator().manual_seed(0))  # 128 at a time
    assert torch.allclose(op @ X, op.to_dense() @ X, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either layer"),
        ({"layer": 0, "start": 0, "stop": 2}, "either layer"),
        ({"start": 0}, "either layer"),
        ({"start": 1, "stop": 1}, "stop must be an integer from 2 to 3"),
        ({"start": 1, "stop": 4}, "stop must be an integer from 2 to 3"),
        ({"start": 0, "stop": 2, "scope": "mlp"}, "full context and for whole blocks"),
        ({"start": 0, "stop": 2, "context": "isolated"}, "full context and for whole blocks"),
        ({"layer": 1, "pos": 2, "source_pos": 3}, "lies after pos 2"),
    ],
)
def test_spans_that_do_not_exist(
    arguments: dict[str, Any], message: str, gpt2: Any, prompt: Tensor
) -> None:
    with pytest.raises(InputError, match=message):
        tls.jacobian_operator(gpt2, prompt, **arguments)
