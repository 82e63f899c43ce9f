"""Block Jacobians of a model: what a user calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.errors import InputError, ModelStateError
from tl_spectral.jacobian.engine import DEFAULT_MAX_BYTES, Graph, Route, jacobian_of, trace
from tl_spectral.jacobian.result import BlockJacobian
from tl_spectral.model import ModelView, Site
from tl_spectral.model.view import Hook, StopForward, by_length

Context = Literal["full", "isolated"]
Scope = Literal["block", "attn", "mlp"]
Engine = Literal["auto", "fast", "reference"]
CONTEXTS = ("full", "isolated")
_SITES: dict[str, tuple[Any, Any]] = {
    "block": ("resid_pre", "resid_post"),
    "attn": ("resid_pre", "resid_mid"),
    "mlp": ("resid_mid", "resid_post"),
}
_FAST_TOLERANCE = 1e-4  # relative error of the replayed block output that the fast engine may show


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
            the query token against cached keys and values, which gives the same matrix at a
            fraction of the cost; ``"auto"`` is fast where that is possible and has reproduced the
            block's output.
        chunk: Cotangents per backward pass, by default what ``max_bytes`` allows.
        max_bytes: Memory bound of a backward pass.

    Returns:
        The Jacobian, row = output coordinate, float32 (float64 for a float64 model), on the CPU.

    Raises:
        InputError: For a layer, position, context or scope that does not exist.
        ModelStateError: If the model is in train mode or holds NaN.
    """
    plan = _plan(model, tokens, [layer], pos, source_pos, context, scope, engine, chunk)
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
        chunk: Cotangents per backward pass.
        max_bytes: Memory bound of a backward pass.

    Returns:
        An iterator over layers.
    """
    plan = _plan(model, tokens, layers, pos, None, context, scope, engine, chunk)
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
        chunk: Cotangents per backward pass.
        max_bytes: Memory bound of a backward pass.

    Returns:
        An iterator of (layer, Jacobians in the order of the prompts).
    """
    plan = _plan(model, tokens, layers, pos, None, context, scope, engine, chunk)
    return _per_sample(plan, chunk, max_bytes)


def span_jacobian(
    model: Any,
    tokens: Any,
    start: int,
    stop: int,
    pos: int = -1,
    source_pos: int | None = None,
    *,
    chunk: int | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> BlockJacobian:
    """``∂ resid_post[stop − 1, t] / ∂ resid_pre[start, t']`` through the real forward pass.

    Paths through other positions are included, so this is not the product of block Jacobians at
    one position (see :func:`tl_spectral.chain`).

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        tokens: One or several prompts.
        start: First block of the span.
        stop: One past its last block.
        pos: Target position.
        source_pos: Source position, by default the same.
        chunk: Cotangents per backward pass.
        max_bytes: Memory bound of a backward pass.

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
    plan = _plan(model, tokens, [start], pos, source_pos, "full", "block", "reference", chunk)
    plan = _Plan(**{**vars(plan), "routes": (Route(first, stop),), "scope": "span"})
    return next(_means(plan, chunk, max_bytes))


@dataclass(frozen=True)
class _Plan:
    """A checked request: everything is known to exist before the first forward pass."""

    view: ModelView
    rows: list[Int[Tensor, " _"]]
    routes: tuple[Route, ...]
    pos: int
    source_pos: int
    context: str
    scope: str
    engine: str


def _plan(
    model: Any,
    tokens: Any,
    layers: Sequence[int] | None,
    pos: int,
    source_pos: int | None,
    context: str,
    scope: str,
    engine: str,
    chunk: int | None,
) -> _Plan:
    view = ModelView(model)
    if context not in CONTEXTS:
        raise InputError(f"context must be one of {CONTEXTS}, got {context!r}.")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise InputError(f"chunk must be a positive integer or None, got {chunk!r}.")
    if scope not in _SITES:
        raise InputError(f"scope must be one of {tuple(_SITES)}, got {scope!r}.")
    if engine not in ("auto", "fast", "reference"):
        raise InputError(f"engine must be 'auto', 'fast' or 'reference', got {engine!r}.")
    rows = view.tokens(tokens)
    source_pos = pos if source_pos is None else source_pos
    same = set()
    for row in rows:
        t, s = view.position(pos, len(row)), view.position(source_pos, len(row), "source_pos")
        same.add(s == t)
        if view.causal and s > t:
            raise InputError(
                f"source_pos {s} lies after pos {t}: in {view.name} a position cannot depend on a "
                "later one, the Jacobian is zero."
            )
        if context == "isolated" and s != t:
            raise InputError("An isolated token has no other position; leave out source_pos.")
        if engine == "fast" and (s != t or context == "isolated" or not view.causal):
            raise InputError(
                "The fast engine needs a causal model, the full context and source_pos = pos. "
                "Use engine='auto'."
            )
    if len(same) > 1:
        raise InputError(
            f"pos {pos} and source_pos {source_pos} are the same position in some texts and not in "
            "others; a mean over both has no meaning. Count both from the same end."
        )
    if same == {True}:  # written in two ways, as -1 and 8: from here on in one
        source_pos = pos
    source, target = _SITES[scope]
    routes = tuple(Route(layer, layer + 1, source, target) for layer in view.layers(layers))
    for route in routes:  # fails for a resid_mid that does not exist
        view.hook_name(route.start, source), view.hook_name(route.start, target)
    return _Plan(view, rows, routes, int(pos), int(source_pos), context, scope, engine)


@dataclass(frozen=True)
class _Batch:
    """Prompts of one length, with the graphs of all routes where these are cheap to hold."""

    members: list[int]
    tokens: Int[Tensor, "sample pos"]
    graphs: list[Graph] | None
    engine: str
    reason: str


def _batches(plan: _Plan) -> list[_Batch]:
    batches = []
    for length, members in by_length(plan.rows).items():
        tokens = torch.stack([plan.rows[i] for i in members])
        pos = plan.view.position(plan.pos, length)
        if plan.context == "isolated":
            graphs: list[Graph] | None = _isolated_graphs(plan, tokens, pos)
            engine, reason = "reference", "a single token needs no other"
        else:
            graphs, reason = _fast_graphs(plan, tokens, pos)
            engine = "reference" if graphs is None else "fast"
        batches.append(_Batch(members, tokens, graphs, engine, reason))
    return batches


def _per_sample(
    plan: _Plan, chunk: int | None, max_bytes: int, batches: list[_Batch] | None = None
) -> Iterator[tuple[int, Float[Tensor, "sample d_model d_model"]]]:
    batches = _batches(plan) if batches is None else batches
    d_model = plan.view.d_model
    for number, route in enumerate(plan.routes):
        out = torch.empty(len(plan.rows), d_model, d_model, dtype=plan.view.compute_dtype)
        for batch in batches:
            if batch.graphs is not None:
                graph = batch.graphs[number]
            else:
                length = batch.tokens.shape[1]
                (graph,) = trace(
                    plan.view,
                    batch.tokens,
                    [route],
                    pos=plan.view.position(plan.pos, length),
                    source_pos=plan.view.position(plan.source_pos, length),
                )
            out[batch.members] = jacobian_of(graph, chunk=chunk, max_bytes=max_bytes)
        finite = torch.isfinite(out).all(dim=-1).all(dim=-1)
        if not finite.all():
            raise ModelStateError(
                f"The Jacobian of layer {route.start} is not finite for text "
                f"{finite.tolist().index(False)}: the states overflow, or a hook on the model "
                "writes NaN. Use a wider dtype or remove the hook."
            )
        yield route.start, out


def _means(plan: _Plan, chunk: int | None, max_bytes: int) -> Iterator[BlockJacobian]:
    batches = _batches(plan)
    engines = sorted({batch.engine for batch in batches})
    reasons = sorted({batch.reason for batch in batches})
    options = {
        "context": plan.context,
        "scope": plan.scope,
        "pos": plan.pos,
        "source_pos": plan.source_pos,
        "engine": "+".join(engines),
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
            engine="+".join(engines),
            engine_reason="; ".join(reasons),
            provenance=provenance,
        )


def _states(
    plan: _Plan, tokens: Int[Tensor, "sample pos"], pos: int, sites: Mapping[int, Site]
) -> dict[int, Float[Tensor, "sample d_model"]]:
    """States at one position, one site in every layer asked for, without a graph."""
    states: dict[int, Tensor] = {}
    last = max(sites)

    def keep(layer: int) -> Hook:
        def hook(activation: Tensor) -> None:
            shaped = activation.detach().reshape(*tokens.shape, -1)  # OPT flattens its resid_mid
            states[layer] = shaped[:, pos]
            if layer == last:
                raise StopForward

        return hook

    hooks = {plan.view.hook_name(layer, site): keep(layer) for layer, site in sites.items()}
    with torch.no_grad():
        plan.view.run(tokens, hooks)
    return states


def _isolated_graphs(plan: _Plan, tokens: Int[Tensor, "sample pos"], pos: int) -> list[Graph]:
    states = _states(plan, tokens, pos, {route.start: "resid_pre" for route in plan.routes})
    one_token = tokens[:, pos : pos + 1]
    return trace(plan.view, one_token, plan.routes, pos=0, source_pos=0, states=states)


def _fast_graphs(
    plan: _Plan, tokens: Int[Tensor, "sample pos"], pos: int
) -> tuple[list[Graph] | None, str]:
    """Graphs of the query token alone against the cached keys and values of those before it.

    Every target must come out as in the full forward pass; else there is no fast answer and the
    reason is returned.
    """
    if plan.engine == "reference":
        return None, "asked for"
    if plan.source_pos != plan.pos:
        return None, "source and target positions differ"
    view = plan.view
    if not view.causal:
        return None, "every position of an encoder looks at every other"
    cache = None
    if pos > 0:
        cache = view.prefill(tokens[:, :pos])
        if cache is None:
            return None, "the model keeps no key/value cache"
    query = tokens[:, pos : pos + 1]
    targets = {route.start: route.target for route in plan.routes}
    expected = _states(plan, tokens[:, : pos + 1], pos, targets)
    graphs = trace(view, query, plan.routes, pos=0, source_pos=0, cache=cache)
    for route, graph in zip(plan.routes, graphs, strict=True):
        error = (graph.target.detach() - expected[route.start]).norm(dim=-1)
        size = expected[route.start].norm(dim=-1)
        if not (error <= _FAST_TOLERANCE * size).all():
            worst = (error / size).max().item()
            return None, f"the replayed output differs from the forward pass by {worst:.1e}"
    return graphs, f"replayed outputs agree with the forward pass to {_FAST_TOLERANCE:g}"


def graph_of_one(model: Any, tokens: Any, layer: int, pos: int, context: str, scope: str) -> Graph:
    """The live graph of one block for one prompt, for operators that are never formed."""
    plan = _plan(model, tokens, [layer], pos, None, context, scope, "auto", None)
    if len(plan.rows) != 1:
        raise InputError(f"An operator belongs to one prompt, got {len(plan.rows)}.")
    (batch,) = _batches(plan)
    if batch.graphs is not None:
        return batch.graphs[0]
    at = plan.view.position(pos, batch.tokens.shape[1])
    return trace(plan.view, batch.tokens, plan.routes, pos=at, source_pos=at)[0]
