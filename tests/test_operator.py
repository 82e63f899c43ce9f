"""Products with a Jacobian that is never formed equal those with the matrix.

Changed to see these tests fail: T without effect; the identity of OPT's branch left out of one of
the two products.
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
from zoo import ARCHITECTURES, WIDTH

import tl_spectral as tls
from tl_spectral.errors import InputError

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
