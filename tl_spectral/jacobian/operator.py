"""A block's Jacobian as an operator: products with it, never the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.jacobian.engine import Graph, jacobian_of, pull_back
from tl_spectral.model.gradients import differentiable

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class JacobianOperator:
    """``J`` of one block and prompt; ``op @ X`` and ``op.T @ X`` cost one block pass per column.

    Products with ``J`` differentiate the (linear) map ``v ↦ vᵀJ`` once more, so no forward-mode
    automatic differentiation is needed: every attention implementation and block works.

    Attributes:
        shape: ``(d_model, d_model)``.
        dtype: dtype of the model's residual stream.
    """

    def __init__(self, graph: Graph, *, transposed: bool = False) -> None:
        self._graph = graph
        self._transposed = transposed
        d_model = graph.target.shape[-1]
        self.shape = (d_model, d_model)
        self.dtype = graph.target.dtype

    @property
    def T(self) -> JacobianOperator:  # noqa: N802 - as torch and numpy call it
        """The transposed operator, on the same graph."""
        return JacobianOperator(self._graph, transposed=not self._transposed)

    def __matmul__(self, X: Float[Tensor, "d_model ..."]) -> Float[Tensor, "d_model ..."]:
        """Product with a vector or with the columns of a matrix.

        Raises:
            InputError: If the shape does not fit.
        """
        if not isinstance(X, Tensor):
            raise InputError(
                f"Expected a tensor, got a {type(X).__name__}; op.to_scipy() takes arrays."
            )
        if X.ndim not in (1, 2) or X.shape[0] != self.shape[0]:
            raise InputError(f"Expected [{self.shape[0]}] or [{self.shape[0]}, k], got {X.shape}.")
        columns = X.reshape(X.shape[0], -1).T.to(self._graph.target)
        product = self._pull(columns) if self._transposed else self._push(columns)
        return product.detach().T.reshape(X.shape)

    def to_dense(self) -> Float[Tensor, "d_model d_model"]:
        """The matrix itself."""
        matrix = jacobian_of(self._graph)[0]
        return matrix.T.contiguous() if self._transposed else matrix

    def to_scipy(self) -> LinearOperator:
        """As a ``scipy.sparse.linalg.LinearOperator`` (products in the model's dtype)."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        def product(operator: JacobianOperator) -> Any:
            return lambda x: (operator @ torch.as_tensor(np.ascontiguousarray(x))).cpu().numpy()

        return LinearOperator(
            shape=self.shape,
            dtype=torch.empty(0, dtype=self.dtype).numpy().dtype,
            matvec=product(self),
            rmatvec=product(self.T),
            matmat=product(self),
            rmatmat=product(self.T),
        )

    def _pull(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        return pull_back(self._graph, rows[:, None])[:, 0]

    def _push(self, columns: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        graph = self._graph
        with differentiable():
            v = torch.zeros_like(graph.target, requires_grad=True)
            (gradient,) = torch.autograd.grad(graph.target, graph.source, v, create_graph=True)
            row = gradient.reshape(-1, graph.n_pos, self.shape[0])[0, graph.source_pos]
            if graph.plus_identity:
                row = row + v[0]
            (product,) = torch.autograd.grad(row, v, columns, is_grads_batched=True)
        return product[:, 0]


def jacobian_operator(
    model: Any,
    tokens: Any,
    layer: int,
    pos: int = -1,
    context: str = "full",
    scope: str = "block",
) -> JacobianOperator:
    """The Jacobian of one block for one prompt, without forming it.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One prompt.
        layer: Layer; negative counts from the end.
        pos: Position.
        context: ``"full"`` or ``"isolated"``.
        scope: ``"block"``, ``"attn"`` or ``"mlp"``.

    Returns:
        An operator that supports ``op @ X``, ``op.T @ X``, ``op.to_dense()``, ``op.to_scipy()``.

    Raises:
        InputError: As :func:`block_jacobian`, and for more than one prompt.
    """
    from tl_spectral.jacobian.blocks import graph_of_one

    return JacobianOperator(graph_of_one(model, tokens, layer, pos, context, scope))
