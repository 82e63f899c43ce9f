"""From a forward pass to the rows of a Jacobian.

One recipe serves every architecture: cut the graph at the input of the block with a leaf, keep the
live tensors at source and target, and pull one-hot cotangents back with ``torch.autograd.grad`` in
batches. ``torch.func`` fails on some blocks (autograd functions without ``setup_context``), a
cache of activations is detached, and replaying a block with captured arguments meets a live
key/value cache: all three give wrong numbers or errors where this does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_spectral.model import ModelView, Site
from tl_spectral.model.gradients import differentiable
from tl_spectral.model.view import StopForward

# A cotangent's backward pass holds about this many floats per d_model and position at once: the
# block's own activations, its gated MLP being four times as wide.
_FLOATS_PER_COORDINATE = 28
_MOST_COTANGENTS = 128  # larger batches were slower: they fall out of the CPU's caches
DEFAULT_MAX_BYTES = 1 << 29


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in the dtype's full precision inside: no TF32 on a GPU, no bfloat16 on a CPU.

    The setting is the process's own and is put back after.
    """
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Route:
    """From which state to which: source site of layer ``start`` → target site of ``stop − 1``."""

    start: int
    stop: int
    source: Site = "resid_pre"
    target: Site = "resid_post"


@dataclass(frozen=True, eq=False)
class Graph:
    """Live tensors of one route, for a batch of prompts.

    Attributes:
        source: ``[sample, pos, d_model]`` (or flattened over samples and positions).
        target: ``[sample, d_model]``, the target position only.
        n_pos: Number of positions of the source.
        source_pos: The position differentiated with respect to.
        plus_identity: The source tensor is seen beside the skip connection, so the derivative with
            respect to it lacks the identity.
    """

    source: Tensor
    target: Float[Tensor, "sample d_model"]
    n_pos: int
    source_pos: int
    plus_identity: bool


def trace(
    view: ModelView,
    tokens: Int[Tensor, "sample pos"],
    routes: Sequence[Route],
    *,
    pos: int,
    source_pos: int,
    states: Mapping[int, Float[Tensor, "sample d_model"]] | None = None,
) -> list[Graph]:
    """Run the model once and keep the graph of each route.

    Args:
        view: The model; its parameters are frozen, so graphs begin at the first source.
        tokens: Prompts of equal length.
        routes: What to trace; single blocks, or one span.
        pos: Target position, non-negative.
        source_pos: Source position, non-negative.
        states: Layer → states that replace the input of the block (the isolated context).
    """
    shape = (*tokens.shape, view.d_model)
    live: dict[str, Tensor] = {}
    hooks: dict[str, Callable[[Tensor], Tensor | None]] = {}

    def keep(name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(activation: Tensor) -> Tensor:
            live[name] = activation
            if name == last:
                raise StopForward
            return activation  # the block must go on with the very tensor that is kept

        return hook

    def cut(name: str, layer: int) -> Callable[[Tensor], Tensor | None]:
        def hook(activation: Tensor) -> Tensor:
            value = activation.detach()
            if states is not None:
                value = states[layer].to(value).reshape(value.shape)
            live[name] = value.clone().requires_grad_(True)
            return live[name]

        return hook

    names = []
    for route in routes:
        source = view.hook_name(route.start, route.source)
        target = view.hook_name(route.stop - 1, route.target)
        names.append((source, target))
        hooks[source] = keep(source)
        hooks[target] = keep(target)
    for route in routes:
        begin = view.hook_name(route.start, "resid_pre")
        hooks[begin] = cut(begin, route.start)
    # The deepest target ends the pass, whatever the order that the routes were asked for in.
    last = names[max(range(len(routes)), key=lambda i: routes[i].stop)][1]
    with differentiable(), view.frozen():
        view.run(tokens, hooks)
        graphs = []
        for route, (source, target) in zip(routes, names, strict=True):
            on_branch = route.source == "resid_mid" and view.anatomy[route.start].mid_on_branch
            graphs.append(
                Graph(
                    source=live[source],
                    target=live[target].reshape(shape)[:, pos],
                    n_pos=tokens.shape[1],
                    source_pos=source_pos,
                    plus_identity=on_branch and pos == source_pos,
                )
            )
    return graphs


def pull_back(
    graph: Graph, cotangents: Float[Tensor, "cotangent sample d_model"]
) -> Float[Tensor, "cotangent sample d_model"]:
    """``vᵀ J`` for a batch of cotangents, every sample with its own J.

    Args:
        graph: From :func:`trace`; it is kept for further calls.
        cotangents: One vector per cotangent and sample.
    """
    with differentiable():
        (gradient,) = torch.autograd.grad(
            graph.target, graph.source, cotangents, is_grads_batched=True, retain_graph=True
        )
    n, samples, d_model = cotangents.shape
    rows = gradient.reshape(n, samples, graph.n_pos, d_model)[:, :, graph.source_pos]
    return rows + cotangents if graph.plus_identity else rows


def jacobian_of(
    graph: Graph, *, chunk: int | None = None, max_bytes: int = DEFAULT_MAX_BYTES
) -> Float[Tensor, "sample d_model d_model"]:
    """The Jacobian of every sample, ``[sample, out, in]``, on the CPU.

    Args:
        graph: From :func:`trace`.
        chunk: Cotangents per backward pass; by default what ``max_bytes`` allows, at most 128.
        max_bytes: Memory bound for the default chunk: one cotangent is taken to need
            ``28 · itemsize · samples · positions · d_model`` bytes.
    """
    samples, d_model = graph.target.shape
    if chunk is None:
        itemsize = graph.target.element_size()
        each = _FLOATS_PER_COORDINATE * itemsize * samples * graph.n_pos * d_model
        chunk = max(1, min(_MOST_COTANGENTS, max_bytes // each))
    identity = torch.eye(d_model, dtype=graph.target.dtype, device=graph.target.device)
    jacobian = identity.new_empty(samples, d_model, d_model)
    for first in range(0, d_model, chunk):
        one_hot = identity[first : first + chunk]
        cotangents = one_hot[:, None].expand(-1, samples, -1)
        rows = pull_back(graph, cotangents)
        jacobian[:, first : first + len(one_hot)] = rows.transpose(0, 1)
    return jacobian.cpu()


def state_at(
    view: ModelView, tokens: Int[Tensor, "sample pos"], layer: int, pos: int
) -> Float[Tensor, "sample d_model"]:
    """``resid_pre`` of a layer at one position."""
    found: list[Tensor] = []

    def keep(activation: Tensor) -> None:
        found.append(activation[:, pos].detach().clone())
        raise StopForward

    with torch.no_grad():
        view.run(tokens, {view.hook_name(layer, "resid_pre"): keep})
    return found[0]
