"""The fast engine: one token's own path through a block, everything else held fixed.

``∂ resid_post[t] / ∂ resid_pre[t]`` needs no other position's path, only their keys and values. So
the model is run once to see those and the states, and once more on the query token alone: against
its own key/value cache (decoders), against keys and values captured through hooks (encoders), or
against nothing (a token taken out of its context). The second run must reproduce the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.jacobian.assembly import Cut, assemble, sound_cuts
from tl_spectral.jacobian.engine import Graph, Route
from tl_spectral.model import ModelView
from tl_spectral.model.branches import Branch, Context, branches, is_routed, prefill
from tl_spectral.model.gradients import differentiable
from tl_spectral.model.view import Hook, StopForward

TOLERANCE = 1e-4
"""Largest error of a replayed output, relative to what the block adds to the stream."""

_Claims = Mapping[int, tuple[Branch, ...]]


@dataclass(frozen=True, eq=False)
class QueryGraph(Graph):
    """Graph of the query token alone, with the branches that were cut out of it.

    Attributes:
        cuts: In the order in which their outputs joined the stream.
        context: Number of tokens that the query looks at.
    """

    cuts: tuple[Cut, ...] = ()
    context: int = 1

    def jacobian(
        self, chunk: int | None, max_bytes: int
    ) -> Float[Tensor, "sample d_model d_model"]:
        """The Jacobian of every sample, on the device of the graph."""
        with differentiable():
            J = assemble(
                self.source, self.target, self.cuts, self.context, chunk=chunk, max_bytes=max_bytes
            )
            if self.plus_identity:
                J.diagonal(dim1=1, dim2=2).add_(1)
        return J


def query_graphs(
    view: ModelView,
    tokens: Int[Tensor, "sample pos"],
    routes: Sequence[Route],
    pos: int,
    *,
    isolated: bool = False,
    cut: bool = True,
) -> tuple[list[QueryGraph] | None, str]:
    """Graph of every route at one position, or ``None`` and why there is none.

    Args:
        view: The model.
        tokens: Texts of equal length.
        routes: Single blocks.
        pos: The position, non-negative.
        isolated: The token alone, without its context.
        cut: Cut out the branches whose Jacobian is known in factors.
    """
    known = {route.start: branches(view, route.start) for route in routes}
    attends = {
        layer: branch
        for layer, found in known.items()
        for branch in found
        if branch.kind == "attention" and not (view.causal or isolated)
    }
    if not (view.causal or isolated) and len(attends) < len(routes):
        return None, "the attention of this encoder is not known"
    seen = _look(view, tokens, routes, pos, isolated, attends)
    if seen is None:
        return None, "the model does not show keys and values"
    claims = {r.start: _on_route(known[r.start], r) if cut else () for r in routes}
    graphs, sound = _replay(view, seen, routes, claims)
    while sound != claims:  # fewer each time
        claims = sound
        graphs, sound = _replay(view, seen, routes, claims)
    worst = 0.0
    for route, graph in zip(routes, graphs, strict=True):
        expected, start = seen.targets[route.start], seen.starts[route.start]
        rounding = 8 * torch.finfo(expected.dtype).eps * expected.norm(dim=-1)
        size = (expected - start).norm(dim=-1) + rounding / TOLERANCE
        error = (graph.target.detach() - expected).norm(dim=-1) / size
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    if worst > TOLERANCE:
        return None, f"the replayed output differs from the forward pass by {worst:.1e}"
    return graphs, _reason(view, sound, isolated)


def _on_route(found: tuple[Branch, ...], route: Route) -> tuple[Branch, ...]:
    """The branches that lie between source and target."""
    skipped = set()
    if route.source == "resid_mid":
        skipped.add("attention")
    if route.target == "resid_mid":
        skipped.add("mlp")
    return tuple(branch for branch in found if branch.kind not in skipped)


def _reason(view: ModelView, sound: _Claims, isolated: bool) -> str:
    reason = f"replayed outputs agree with the forward pass to {TOLERANCE:g}"
    if isolated:
        reason = f"a single token is its own context; {reason}"
    kinds = {branch.kind for found in sound.values() for branch in found}
    names = [name for kind, name in (("attention", "attention"), ("mlp", "MLP")) if kind in kinds]
    if names:
        reason += f"; {' and '.join(names)} in closed form"
    if any(is_routed(view, layer) for layer in sound):
        reason += "; experts as routed for this token"
    return reason


# ------------------------------------------------------------------------------- the first pass


@dataclass(frozen=True, eq=False)
class _Seen:
    """What one forward pass over the texts showed of the query position.

    Attributes:
        query: The token alone.
        starts: Layer → state at its input.
        targets: Layer → state at the route's target.
        others: Layer → keys (as scored) and values of the other positions that the query may look
            at, ``[sample, pos, head, width]``.
        attends: Layer → an encoder's attention, replayed by :func:`_attend`.
        decoder: The keys and values as a decoder's own cache holds them.
    """

    query: Int[Tensor, "sample one"]
    starts: Mapping[int, Float[Tensor, "sample d_model"]]
    targets: Mapping[int, Float[Tensor, "sample d_model"]]
    others: Mapping[int, tuple[Tensor, Tensor]]
    attends: Mapping[int, Branch]
    decoder: Context | None


def _look(
    view: ModelView,
    tokens: Int[Tensor, "sample pos"],
    routes: Sequence[Route],
    pos: int,
    isolated: bool,
    attends: Mapping[int, Branch],
) -> _Seen | None:
    found: dict[str, Tensor] = {}
    deepest = max(routes, key=lambda r: r.start)
    last = view.hook_name(deepest.start, "resid_pre" if isolated else deepest.target)
    at_query = {view.hook_name(r.start, "resid_pre") for r in routes}
    if not isolated:
        at_query |= {view.hook_name(r.start, r.target) for r in routes}

    def keep(name: str) -> Hook:
        def hook(activation: Tensor) -> None:
            found[name] = activation.detach()
            if name in at_query:  # OPT flattens its resid_mid
                shaped = found[name].reshape(len(tokens), -1, view.d_model)
                found[name] = shaped[:, pos].clone()
            if name == last:
                raise StopForward

        return hook

    whole = [name for branch in attends.values() for name in _key_and_value(branch)]
    hooks = {name: keep(name) for name in (*at_query, *whole)}
    decoder = None
    with torch.no_grad():
        if view.causal and not isolated:
            tokens = tokens[:, : pos + 1]
            decoder = prefill(view, tokens, hooks)
            if decoder is None:
                return None
        else:
            view.run(tokens, hooks)
    query = tokens[:, pos : pos + 1]
    starts = {r.start: found[view.hook_name(r.start, "resid_pre")] for r in routes}
    if isolated:
        # The definition is a plain pass over the one token; only the cuts could go wrong.
        seen = _Seen(query, starts, {}, {}, {}, None)
        graphs, _ = _replay(view, seen, routes, {})
        targets = {r.start: graph.target.detach() for r, graph in zip(routes, graphs, strict=True)}
        return replace(seen, targets=targets)
    targets = {r.start: found[view.hook_name(r.start, r.target)] for r in routes}
    others: dict[int, tuple[Tensor, Tensor]] = {}
    if not found.keys() >= hooks.keys():
        return None
    for layer, branch in attends.items():
        keys, values = (found[name] for name in _key_and_value(branch))
        others[layer] = _without(keys, pos), _without(values, pos)
    if decoder is not None:
        for layer, (keys, values) in enumerate(decoder.layers):
            others[layer] = keys.transpose(1, 2), values.transpose(1, 2)
    return _Seen(query, starts, targets, others, attends, decoder)


def _without(x: Float[Tensor, "sample pos ..."], pos: int) -> Float[Tensor, "sample rest ..."]:
    return torch.cat([x[:, :pos], x[:, pos + 1 :]], dim=1)


def _key_and_value(attention: Branch) -> tuple[str, str]:
    """Hooks of the key as scored and of the value."""
    return attention.scored[1], attention.readers[2]


# ------------------------------------------------------------------------------ the second pass


class _Taps:
    """Hooks that keep live tensors, hand on others in their place, and cut the graph."""

    def __init__(self, last: str) -> None:
        self.last = last
        self.before: dict[str, Tensor] = {}
        self.after: dict[str, Tensor] = {}
        self.hooks: dict[str, Hook] = {}

    def keep(self, *names: str) -> None:
        """Keep what passes these hooks, unless something more is done there already."""
        for name in names:
            if name not in self.hooks:
                self.change(name)

    def change(
        self, name: str, *, cut: bool = False, give: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Keep what passes a hook, and go on with something else.

        Args:
            name: The hook.
            cut: Go on with a leaf of the same value.
            give: What to take for the activation.
        """

        def hook(activation: Tensor) -> Tensor:
            value = activation if give is None else give(activation)
            self.before[name] = self.after[name] = value
            if cut:
                self.after[name] = value.detach().clone().requires_grad_(True)
            if name == self.last:
                raise StopForward
            return self.after[name]  # the block must go on with the very tensor that is kept

        self.hooks[name] = hook


def _replay(
    view: ModelView, seen: _Seen, routes: Sequence[Route], claims: _Claims
) -> tuple[list[QueryGraph], dict[int, tuple[Branch, ...]]]:
    """Run the query token alone; the graphs, and those of the claimed branches that hold."""
    deepest = max(routes, key=lambda r: r.start)
    taps = _Taps(view.hook_name(deepest.start, deepest.target))
    for route in routes:
        layer = route.start
        start = _instead(seen.starts[layer])
        taps.change(view.hook_name(layer, "resid_pre"), cut=True, give=start)
        for branch in claims.get(layer, ()):
            for name in (*branch.readers, branch.writes):
                taps.change(name, cut=True)
        attention = seen.attends.get(layer)
        if attention is not None:
            taps.change(attention.core, give=_attend(taps, attention, seen, layer))
            taps.keep(*attention.readers, *attention.scored)
        for branch in claims.get(layer, ()):
            taps.keep(branch.reads, *branch.scored, branch.core)
        taps.keep(view.hook_name(layer, route.source), view.hook_name(layer, route.target))
    cache = None if seen.decoder is None else seen.decoder.cache()
    with differentiable(), view.frozen():
        view.run(seen.query, taps.hooks, cache=cache)
        graphs = [_graph(view, taps, route, claims.get(route.start, ()), seen) for route in routes]
        sound = {
            route.start: tuple(c.branch for c in sound_cuts(graph.source, graph.target, graph.cuts))
            for route, graph in zip(routes, graphs, strict=True)
        }
    return graphs, sound


def _instead(state: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda activation: state.reshape(activation.shape).to(activation)


def _attend(taps: _Taps, attention: Branch, seen: _Seen, layer: int) -> Callable[[Tensor], Tensor]:
    """Softmax attention of the one query to everyone's keys and values, its own being live."""

    def give(activation: Tensor) -> Tensor:
        query = taps.after[attention.scored[0]]
        keys, values = _met(taps, attention, seen, layer)
        scores = torch.einsum("sqhw,skhw->shqk", query, keys) / math.sqrt(query.shape[-1])
        z = torch.einsum("shqk,skhw->sqhw", scores.softmax(dim=-1), values)
        return z.reshape(activation.shape)

    return give


def _met(taps: _Taps, attention: Branch, seen: _Seen, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values that the query meets, those of its own token last."""
    key, value = (taps.after[name] for name in _key_and_value(attention))
    if layer not in seen.others:
        return key, value
    keys, values = seen.others[layer]
    return torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)


def _graph(
    view: ModelView, taps: _Taps, route: Route, claimed: Sequence[Branch], seen: _Seen
) -> QueryGraph:
    layer, order = route.start, list(taps.before)
    cuts = []
    for branch in claimed:
        if not {branch.reads, *branch.readers, branch.core, branch.writes} <= taps.before.keys():
            continue
        cut = Cut(
            branch=branch,
            reads=taps.after[branch.reads],
            inputs=tuple(taps.before[name] for name in branch.readers),
            leaves=tuple(taps.after[name] for name in branch.readers),
            core=taps.after[branch.core],
            output=taps.before[branch.writes],
            resumed=taps.after[branch.writes],
        )
        if branch.scored and taps.before.keys() >= {*branch.scored}:  # not shown by every model
            met = _met(taps, branch, seen, layer)
            cut = replace(cut, query=taps.after[branch.scored[0]], context=met)
        cuts.append(cut)
    target = taps.after[view.hook_name(layer, route.target)]
    return QueryGraph(
        source=taps.after[view.hook_name(layer, route.source)],
        target=target.reshape(len(target), -1),
        n_pos=1,
        source_pos=0,
        plus_identity=route.source == "resid_mid" and view.anatomy[layer].mid_on_branch,
        cuts=tuple(sorted(cuts, key=lambda cut: order.index(cut.branch.writes))),
        context=1 + (seen.others[layer][0].shape[1] if layer in seen.others else 0),
    )
