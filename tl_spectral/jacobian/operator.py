"""Jacobians as operators: products with a block, a span or a chain, never the matrix.

Products with ``Jᵀ`` are one backward pass. Products with ``J`` differentiate the (linear) map
``v ↦ vᵀJ`` once more, so no forward-mode automatic differentiation is needed, which most attention
kernels lack; scaled dot-product attention runs in its plain form while the graph is recorded, since
fused kernels cannot be differentiated twice. The model's own choice of attention is left alone.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.jacobian.blocks import graph_of_one
from tl_spectral.jacobian.engine import Graph, Route, jacobian_of, pull_back, trace
from tl_spectral.jacobian.plan import Plan, checked_plan
from tl_spectral.model import ModelView
from tl_spectral.model.gradients import differentiable
from tl_spectral.results import Provenance

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

_CHUNK = 128  # vectors per backward pass; more would fall out of the CPU's caches
OperatorT = TypeVar("OperatorT", bound="Operator")


class Operator(ABC):
    """A square matrix known by its products.

    ``op @ X`` and ``op.T @ X`` take a vector or the columns of a matrix, ``op2 @ op1`` is the
    operator that applies ``op1`` first.

    Attributes:
        shape: ``(d_model, d_model)``.
        dtype: dtype of the products.
        provenance: Where the operator comes from.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    provenance: Provenance
    _transposed = False
    _shift = 0.0

    @property
    def T(self: OperatorT) -> OperatorT:  # noqa: N802 - as torch and numpy call it
        """The transposed operator, on the same graph."""
        other = copy.copy(self)
        other._transposed = not self._transposed
        return other

    @property
    def update(self: OperatorT) -> OperatorT:
        """``R = J − I``, the skip connection removed, on the same graph."""
        other = copy.copy(self)
        other._shift = self._shift - 1
        return other

    def __matmul__(self, X: Any) -> Any:
        """Product with a vector, with the columns of a matrix, or with another operator.

        Raises:
            InputError: If the shape does not fit.
            ProvenanceError: If the operators come from different models or texts.
        """
        if isinstance(X, Operator):
            return ChainOperator([X, self])
        if not isinstance(X, Tensor):
            raise InputError(
                f"Expected a tensor or an operator, got a {type(X).__name__}; op.to_scipy() takes "
                "arrays."
            )
        if X.ndim not in (1, 2) or X.shape[0] != self.shape[0]:
            raise InputError(f"Expected [{self.shape[0]}] or [{self.shape[0]}, k], got {X.shape}.")
        return self._rows(X.reshape(X.shape[0], -1).T).T.reshape(X.shape)

    def _rows(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        """The product with every row."""
        apply = self._pull if self._transposed else self._push
        rows = rows.to(self.dtype)
        product = torch.cat([apply(part) for part in torch.split(rows, _CHUNK)])
        return product + self._shift * rows.to(product) if self._shift else product

    def to_dense(self) -> Float[Tensor, "d_model d_model"]:
        """The matrix itself, on the CPU."""
        matrix = self._dense()
        if self._shift:
            matrix = matrix + self._shift * torch.eye(len(matrix), dtype=matrix.dtype)
        return matrix.T.contiguous() if self._transposed else matrix

    def to_scipy(self) -> LinearOperator:
        """As a ``scipy.sparse.linalg.LinearOperator`` (products in the operator's dtype)."""
        import numpy as np
        from scipy.sparse.linalg import LinearOperator

        def product(operator: Operator) -> Any:
            return lambda x: (operator @ torch.as_tensor(np.ascontiguousarray(x))).cpu().numpy()

        return LinearOperator(
            shape=self.shape,
            dtype=torch.empty(0, dtype=self.dtype).numpy().dtype,
            matvec=product(self),
            rmatvec=product(self.T),
            matmat=product(self),
            rmatmat=product(self.T),
        )

    @abstractmethod
    def _push(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]: ...

    @abstractmethod
    def _pull(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]: ...

    @abstractmethod
    def _dense(self) -> Float[Tensor, "d_model d_model"]: ...


class JacobianOperator(Operator):
    """``J`` of one block, or one span of blocks, for one prompt.

    Made by :func:`jacobian_operator`. A product costs one pass through the block per vector; the
    graph of the forward pass is held as long as the operator is.

    Attributes:
        shape: ``(d_model, d_model)``.
        dtype: dtype of the model's residual stream.
        start: Layer of the source state.
        stop: One past the layer of the target state.
        pos: Position of the target.
        source_pos: Position of the source.
        scope: ``"block"``, ``"attn"``, ``"mlp"`` or ``"span"``.
        provenance: Model, text and options.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        start: int = 0,
        stop: int = 1,
        pos: int = -1,
        source_pos: int = -1,
        scope: str = "block",
        provenance: Provenance | None = None,
    ) -> None:
        self._live = _Live(graph)
        d_model = graph.target.shape[-1]
        self.shape = (d_model, d_model)
        self.dtype = graph.target.dtype
        self.start, self.stop, self.pos, self.source_pos = start, stop, pos, source_pos
        self.scope = scope
        self.provenance = provenance or Provenance()

    @property
    def update(self) -> JacobianOperator:
        """``R = J − I``, the skip connection removed (no skip joins two positions)."""
        return super().update if self.pos == self.source_pos else self

    def _pull(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        graph = self._live.graph
        return pull_back(graph, rows.to(graph.target)[:, None])[:, 0].detach()

    def _push(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        v, row = self._live.row
        with differentiable():
            (product,) = torch.autograd.grad(
                row, v, rows.to(v), is_grads_batched=True, retain_graph=True
            )
        return product[:, 0].detach()

    def _dense(self) -> Float[Tensor, "d_model d_model"]:
        return jacobian_of(self._live.graph)[0]


class _Live:
    """A graph, and on first use ``vᵀJ`` as a differentiable function of v."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def row(self) -> tuple[Tensor, Tensor]:
        graph = self.graph
        with differentiable():
            v = torch.zeros_like(graph.target, requires_grad=True)
            (gradient,) = torch.autograd.grad(graph.target, graph.source, v, create_graph=True)
            row = gradient.reshape(-1, graph.n_pos, v.shape[-1])[0, graph.source_pos]
            return v, row + v[0] if graph.plus_identity else row


class ChainOperator(Operator):
    """The product of operators, ``factors[-1] … factors[0]``.

    Made by :func:`chain_operator` or ``op2 @ op1``.

    Attributes:
        shape: ``(d_model, d_model)``.
        dtype: The widest of its factors'.
        factors: In the order of application.
        provenance: That of the first factor, its options with those of the chain.

    Args:
        factors: Operators of one size, first applied first.

    Raises:
        InputError: If there are none, or their sizes differ.
        ProvenanceError: If they come from different models or texts.
    """

    def __init__(self, factors: Sequence[Operator]) -> None:
        flat = [link for factor in factors for link in _links(factor)]
        if not flat:
            raise InputError("The chain has no operators.")
        first = flat[0]
        for step, factor in enumerate(flat):
            if factor.shape != first.shape:
                raise InputError(
                    f"Operator {step} is {factor.shape[0]} wide, the first one {first.shape[0]}."
                )
            what = f"Operators 0 and {step} of the chain"
            first.provenance.require_same_model(factor.provenance, what)
            if first.provenance.texts != factor.provenance.texts:
                raise ProvenanceError(f"{what} come from different texts.")
        self.factors = tuple(flat)
        self.shape = first.shape
        self.dtype = max((factor.dtype for factor in flat), key=lambda dtype: dtype.itemsize)
        options = {**first.provenance.options, "factors": len(flat)}
        self.provenance = replace(first.provenance, options=options)

    def _push(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        for factor in self.factors:
            rows = factor._rows(rows)
        return rows

    def _pull(self, rows: Float[Tensor, "k d_model"]) -> Float[Tensor, "k d_model"]:
        for factor in reversed(self.factors):
            rows = factor.T._rows(rows)
        return rows

    def _dense(self) -> Float[Tensor, "d_model d_model"]:
        matrix = self.factors[0].to_dense()
        for factor in self.factors[1:]:
            matrix = (factor @ matrix).cpu()
        return matrix


def _links(operator: Operator) -> list[Operator]:
    if not isinstance(operator, ChainOperator) or operator._shift:
        return [operator]
    if operator._transposed:
        return [factor.T for factor in reversed(operator.factors)]
    return list(operator.factors)


def chain_operator(operators: Sequence[Operator]) -> ChainOperator:
    """``J_m … J_l`` of consecutive blocks as one operator: products at one position.

    A chain drops the paths through other positions; ``jacobian_operator(model, tokens, start=l,
    stop=m + 1)`` keeps them. In a causal model there are none from a position to itself, so both
    are the same matrix; a chain then holds one graph per block, and its blocks can be used alone.

    Args:
        operators: Of consecutive layers, first layer first; from one model and prompt.

    Raises:
        InputError: If there are none, they do not follow each other, or do not end where the next
            one starts.
        ProvenanceError: If they come from different models or texts.
    """
    chained = ChainOperator(operators)
    blocks = [factor for factor in chained.factors if isinstance(factor, JacobianOperator)]
    require_consecutive(blocks)
    return chained


def require_consecutive(blocks: Sequence[JacobianOperator]) -> None:
    """Raise ``InputError`` unless each operator starts at the state where the last one ends."""
    for block in blocks:
        if block.scope not in ("block", "span") or block.pos != block.source_pos:
            raise InputError(
                f"Layer {block.start}: a chain multiplies Jacobians of whole blocks at one "
                f"position; this one has scope {block.scope!r}, pos {block.pos}, source_pos "
                f"{block.source_pos}. Use op2 @ op1 for other products."
            )
    for last, block in pairwise(blocks):
        if block.start != last.stop:
            raise InputError(
                f"Layer {block.start} follows layer {last.stop - 1}: the operators of a chain must "
                "be consecutive, first layer first."
            )
        context = [op.provenance.options.get("context") for op in (last, block)]
        if last.pos != block.pos or context[0] != context[1]:
            raise InputError(
                f"The operators of layers {last.start} and {block.start} differ in position or "
                f"context: {last.pos}, {context[0]} and {block.pos}, {context[1]}."
            )


def jacobian_operator(
    model: Any,
    tokens: Any,
    layer: int | None = None,
    pos: int = -1,
    context: str = "full",
    scope: str = "block",
    *,
    start: int | None = None,
    stop: int | None = None,
    source_pos: int | None = None,
) -> JacobianOperator:
    """The Jacobian of one block or span for one prompt, without forming it.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One prompt.
        layer: Layer of a block; negative counts from the end.
        pos: Position of the target.
        context: ``"full"`` or ``"isolated"`` (blocks only).
        scope: ``"block"``, ``"attn"`` or ``"mlp"`` (blocks only).
        start: First block of a span, instead of ``layer``: through the real forward pass, paths
            through other positions included, as :func:`span_jacobian`. Its graph holds the
            activations of all its blocks at all positions.
        stop: One past the last block of the span.
        source_pos: Position of the source, by default ``pos``.

    Returns:
        An operator that supports ``op @ X``, ``op.T @ X``, ``op2 @ op1``, ``op.update``,
        ``op.to_dense()`` and ``op.to_scipy()``.

    Raises:
        InputError: As :func:`block_jacobian` and :func:`span_jacobian`, for more than one prompt,
            or unless either ``layer`` or ``start`` and ``stop`` are given.
    """
    if (layer is None) == (start is None) or (start is None) != (stop is None):
        raise InputError("Give either layer=… (one block) or start=… and stop=… (a span).")
    first: Any = start if layer is None else layer
    plan = checked_plan(model, tokens, [first], pos, source_pos, context, scope, "auto", None)
    (route,) = plan.routes
    if start is not None:
        if (context, scope) != ("full", "block"):
            raise InputError(
                "A span exists in the full context and for whole blocks only; got context "
                f"{context!r}, scope {scope!r}."
            )
        route, scope = _span(plan.view, route.start, stop), "span"
    with sdpa_kernel(SDPBackend.MATH):
        if start is None and plan.source_pos == plan.pos:
            graph = graph_of_one(model, tokens, first, pos, context, scope)
        else:
            graph = _graph_of_route(plan, route)
    options = {"context": context, "scope": scope, "pos": plan.pos, "source_pos": plan.source_pos}
    return JacobianOperator(
        graph,
        start=route.start,
        stop=route.stop,
        pos=plan.pos,
        source_pos=plan.source_pos,
        scope=scope,
        provenance=plan.view.provenance(plan.rows, options=options),
    )


def _span(view: ModelView, first: int, stop: Any) -> Route:
    if isinstance(stop, bool) or not isinstance(stop, int) or not first < stop <= view.n_layers:
        raise InputError(
            f"stop must be an integer from {first + 1} to {view.n_layers} (one past the last block "
            f"of a span that starts at layer {first}), got {stop!r}."
        )
    return Route(first, stop)


def _graph_of_route(plan: Plan, route: Route) -> Graph:
    if len(plan.rows) != 1:
        raise InputError(f"An operator belongs to one prompt, got {len(plan.rows)}.")
    (row,) = plan.rows
    pos = plan.view.position(plan.pos, len(row))
    source_pos = plan.view.position(plan.source_pos, len(row), "source_pos")
    seen = row[: pos + 1] if plan.view.causal else row
    return trace(plan.view, seen[None], [route], pos=pos, source_pos=source_pos)[0]
