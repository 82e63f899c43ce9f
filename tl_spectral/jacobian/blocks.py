"""Block Jacobians of a model: what a user calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError, UnsupportedModelError
from tl_spectral.jacobian.engine import (
    DEFAULT_MAX_BYTES,
    Graph,
    Route,
    full_precision,
    jacobian_of,
    state_at,
    trace,
)
from tl_spectral.jacobian.plan import CONTEXTS, Context, Engine, Plan, Scope, checked_plan
from tl_spectral.jacobian.query import QueryGraph, query_graphs
from tl_spectral.jacobian.result import BlockJacobian
from tl_spectral.model import ModelView
from tl_spectral.model.view import by_length

__all__ = [
    "CONTEXTS",
    "Context",
    "block_jacobian",
    "block_jacobians",
    "graph_of_one",
    "sample_jacobians",
    "span_jacobian",
]

_MATRICES = 8  # d_model × d_model matrices per sample that the fast engine holds at once


def block_jacobian(
    model: Any,
    tokens: Any,
    layer: int,
    pos: int = -1,
    source_pos: int | None = None,
    context: Context | str = "full",
    scope: Scope | str = "block",
    *,
    engine: Engine | str = "auto",
    chunk: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> BlockJacobian:
    """Exact Jacobian of one block at one position: ``∂ resid_post[l, t] / ∂ resid_pre[l, t']``.

    Full context: keys and values of the other positions are held fixed, those of the token move
    with it; the true derivative. Isolated context: the block applied to that token alone, so the
    softmax is 1 and attention is the OV map after the norm ([A] arXiv 2605.14258, appendix A.2).
    Mixture-of-experts blocks are differentiated at fixed routing.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One prompt, or several: then the mean over prompts.
        layer: Layer; negative counts from the end.
        pos: Target position; negative counts from the end of each prompt.
        source_pos: Source position, by default the same. Full context only.
        context: ``"full"`` or ``"isolated"``.
        scope: ``"block"``, ``"attn"`` (resid_pre → resid_mid) or ``"mlp"`` (resid_mid →
            resid_post).
        engine: ``"reference"`` differentiates the whole forward pass; ``"fast"`` evaluates only
            the query token against fixed keys and values and assembles the matrix from the
            block's weights, which gives the same numbers at a fraction of the cost; ``"auto"`` is
            fast where that is possible and has reproduced the block's output.
        chunk: Rows or columns of the matrix at a time, by default what ``max_bytes`` allows; it
            changes rounding errors only.
        max_bytes: Bound of the working memory beside the states of the texts and the result.

    Returns:
        The Jacobian, row = output coordinate, float32 (float64 for a float64 model), on the CPU.

    Raises:
        InputError: For a layer, position, context or scope that does not exist.
        ModelStateError: If the model is in train mode or holds NaN.
        UnsupportedModelError: If ``engine="fast"`` cannot reproduce the block's output.
    """
    plan = checked_plan(model, tokens, [layer], pos, source_pos, context, scope, engine, chunk)
    return next(_means(plan, chunk, max_bytes))


def block_jacobians(
    model: Any,
    tokens: Any,
    layers: Sequence[int] | None = None,
    pos: int = -1,
    context: Context | str = "full",
    scope: Scope | str = "block",
    *,
    engine: Engine | str = "auto",
    chunk: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[BlockJacobian]:
    """Block Jacobians layer by layer (mean over prompts), never all in memory.

    Arguments and errors are those of :func:`block_jacobian`; arguments are checked at once, the
    work is done as the iterator is consumed.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One or several prompts.
        layers: Which layers, in which order; all by default.
        pos: Position.
        context: ``"full"`` or ``"isolated"``.
        scope: ``"block"``, ``"attn"`` or ``"mlp"``.
        engine: ``"auto"``, ``"fast"`` or ``"reference"``.
        chunk: Rows or columns at a time.
        max_bytes: As in :func:`block_jacobian`.

    Returns:
        An iterator over layers.
    """
    plan = checked_plan(model, tokens, layers, pos, None, context, scope, engine, chunk)
    return _means(plan, chunk, max_bytes)


def sample_jacobians(
    model: Any,
    tokens: Any,
    layers: Sequence[int] | None = None,
    pos: int = -1,
    context: Context | str = "full",
    scope: Scope | str = "block",
    *,
    engine: Engine | str = "auto",
    chunk: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> Iterator[tuple[int, Float[Tensor, "sample d_model d_model"]]]:
    """Like :func:`block_jacobians`, but the Jacobian of every prompt, not their mean.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One or several prompts.
        layers: Which layers; all by default.
        pos: Position.
        context: ``"full"`` or ``"isolated"``.
        scope: ``"block"``, ``"attn"`` or ``"mlp"``.
        engine: ``"auto"``, ``"fast"`` or ``"reference"``.
        chunk: Rows or columns at a time.
        max_bytes: As in :func:`block_jacobian`.

    Returns:
        An iterator of (layer, Jacobians in the order of the prompts).
    """
    plan = checked_plan(model, tokens, layers, pos, None, context, scope, engine, chunk)
    return _per_sample(plan, chunk, max_bytes)


def span_jacobian(
    model: Any,
    tokens: Any,
    start: int,
    stop: int,
    pos: int = -1,
    source_pos: int | None = None,
    *,
    engine: Engine | str = "auto",
    chunk: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> BlockJacobian:
    """``∂ resid_post[stop − 1, t] / ∂ resid_pre[start, t']`` through the real forward pass.

    Paths through other positions are included, so this is not the product of block Jacobians at
    one position (see :func:`tl_spectral.chain`), except where there are no such paths: in a causal
    model no path leads back to a position, and the fast engine multiplies its blocks.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One or several prompts.
        start: First block of the span.
        stop: One past its last block.
        pos: Target position.
        source_pos: Source position, by default the same.
        engine: As in :func:`block_jacobian`.
        chunk: Rows or columns at a time.
        max_bytes: As in :func:`block_jacobian`.

    Returns:
        The Jacobian (mean over prompts).

    Raises:
        InputError: If the span is empty or leaves the model.
    """
    view = ModelView(model)
    first = view.layer(start)
    if isinstance(stop, bool) or not isinstance(stop, int) or not first < stop <= view.n_layers:
        raise InputError(
            f"stop must be an integer from {first + 1} to {view.n_layers} (one past the last "
            f"block of a span that starts at layer {first}), got {stop!r}."
        )
    plan = checked_plan(model, tokens, [start], pos, source_pos, "full", "block", engine, chunk)
    plan = replace(plan, routes=(Route(first, stop),), scope="span")
    return next(_means(plan, chunk, max_bytes))


@dataclass(frozen=True)
class _Batch:
    """Some prompts of one length.

    Attributes:
        members: Which prompts.
        tokens: Their token ids.
        graphs: For each route the graphs of its blocks, or ``None`` without the fast engine.
        reason: Why that engine.
    """

    members: list[int]
    tokens: Int[Tensor, "sample pos"]
    graphs: list[list[QueryGraph]] | None
    reason: str

    @property
    def engine(self) -> str:
        return "reference" if self.graphs is None else "fast"


def _batches(plan: Plan, max_bytes: int) -> list[_Batch]:
    itemsize = torch.empty(0, dtype=plan.view.compute_dtype).element_size()
    most = max(1, max_bytes // (_MATRICES * itemsize * plan.view.d_model**2))
    batches = []
    for same_length in by_length(plan.rows).values():
        for first in range(0, len(same_length), most):
            members = same_length[first : first + most]
            tokens = torch.stack([plan.rows[i] for i in members])
            batches.append(_Batch(members, tokens, *_fast(plan, tokens)))
    return batches


def _fast(
    plan: Plan, tokens: Int[Tensor, "sample pos"], *, cut: bool = True
) -> tuple[list[list[QueryGraph]] | None, str]:
    """Graphs of the query token alone, or ``None`` and why there are none."""
    graphs, reason = _query_graphs(plan, tokens, cut)
    if graphs is None:
        if plan.engine == "fast":
            raise UnsupportedModelError(
                f"The fast engine cannot be used on {plan.view.name}: {reason}. Use engine='auto'."
            )
        return None, reason
    if plan.scope == "span":
        reason += "; a product of blocks, for no path leads back to a position"
    following = iter(graphs)
    return [[next(following) for _ in range(r.start, r.stop)] for r in plan.routes], reason


def _query_graphs(
    plan: Plan, tokens: Int[Tensor, "sample pos"], cut: bool
) -> tuple[list[QueryGraph] | None, str]:
    if plan.engine == "reference":
        return None, "asked for"
    if plan.source_pos != plan.pos:
        return None, "source and target positions differ"
    if plan.scope == "span" and not plan.view.causal:
        return None, "paths through other positions of an encoder lead back"
    blocks = [replace(r, start=i, stop=i + 1) for r in plan.routes for i in range(r.start, r.stop)]
    pos = plan.view.position(plan.pos, tokens.shape[1])
    isolated = plan.context == "isolated"
    with full_precision():
        return query_graphs(plan.view, tokens, blocks, pos, isolated=isolated, cut=cut)


def _slow(plan: Plan, tokens: Int[Tensor, "sample pos"], route: Route) -> Graph:
    """Graph of a route through the whole forward pass, by the reference engine."""
    length = tokens.shape[1]
    pos, source_pos = (plan.view.position(p, length) for p in (plan.pos, plan.source_pos))
    if plan.context == "full":
        return trace(plan.view, tokens, [route], pos=pos, source_pos=source_pos)[0]
    state = state_at(plan.view, tokens, route.start, pos)
    alone = tokens[:, pos : pos + 1]
    return trace(plan.view, alone, [route], pos=0, source_pos=0, states={route.start: state})[0]


def _per_sample(
    plan: Plan, chunk: int | None, max_bytes: int, batches: list[_Batch] | None = None
) -> Iterator[tuple[int, Float[Tensor, "sample d_model d_model"]]]:
    batches = _batches(plan, max_bytes) if batches is None else batches
    d_model = plan.view.d_model
    for number, route in enumerate(plan.routes):
        out = torch.empty(len(plan.rows), d_model, d_model, dtype=plan.view.compute_dtype)
        for batch in batches:
            with full_precision():
                if batch.graphs is None:
                    graph = _slow(plan, batch.tokens, route)
                    out[batch.members] = jacobian_of(graph, chunk=chunk, max_bytes=max_bytes)
                    continue
                first, *later = batch.graphs[number]
                J = first.jacobian(chunk, max_bytes)
                for block in later:
                    J = block.jacobian(chunk, max_bytes) @ J
                out[batch.members] = J.cpu()
        finite = torch.isfinite(out).all(dim=-1).all(dim=-1)
        if not finite.all():
            raise ModelStateError(
                f"The Jacobian of layer {route.start} is not finite for text "
                f"{finite.tolist().index(False)}: the states overflow, or a hook on the model "
                "writes NaN. Use a wider dtype or remove the hook."
            )
        yield route.start, out


def _means(plan: Plan, chunk: int | None, max_bytes: int) -> Iterator[BlockJacobian]:
    batches = _batches(plan, max_bytes)
    engine = "+".join(sorted({batch.engine for batch in batches}))
    reason = "; ".join(sorted({batch.reason for batch in batches}))
    options = {
        "context": plan.context,
        "scope": plan.scope,
        "pos": plan.pos,
        "source_pos": plan.source_pos,
        "engine": engine,
        "engine_reason": reason,
    }
    provenance = plan.view.provenance(plan.rows, options=options)
    work = _per_sample(plan, chunk, max_bytes, batches)
    for route, (layer, matrices) in zip(plan.routes, work, strict=True):
        yield BlockJacobian(
            matrix=matrices.mean(dim=0),
            layer=layer,
            stop=route.stop,
            pos=plan.pos,
            source_pos=plan.source_pos,
            context=plan.context,
            scope=plan.scope,
            n_samples=len(plan.rows),
            norm_gain=plan.view.norm_gain(layer) if route.source == "resid_pre" else None,
            engine=engine,
            engine_reason=reason,
            provenance=provenance,
        )


def graph_of_one(model: Any, tokens: Any, layer: int, pos: int, context: str, scope: str) -> Graph:
    """The live graph of one block for one prompt, for operators that are never formed."""
    plan = checked_plan(model, tokens, [layer], pos, None, context, scope, "auto", None)
    if len(plan.rows) != 1:
        raise InputError(f"An operator belongs to one prompt, got {len(plan.rows)}.")
    (row,) = plan.rows
    graphs, _ = _fast(plan, row[None], cut=False)
    return _slow(plan, row[None], plan.routes[0]) if graphs is None else graphs[0][0]
