"""A block's Jacobian as a product of known matrices, with little left to autograd.

The graph of a single token is cut at both ends of every branch (see
:class:`tl_spectral.model.branches.Branch`). Between the cuts only small pieces remain:

* a branch's core, whose Jacobian has structure: diagonal for an MLP's gating; for attention one
  block per head by the query, rank one by the token's own key (which moves one score alone), and a
  multiple of the identity by its own value;
* the glue of norms and skip connections, through which d rows are pulled at the cost of
  elementwise operations.

The rest is matrix products: ``M = W_out · core' · W_in`` for each branch, and the chain rule.
Each cut is checked against autograd through the model's own modules (:func:`sound_cuts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.model.branches import Branch
from tl_spectral.model.gradients import differentiable

# Floats per d_model that one row needs while it is pulled back: through norms and skip connections;
# through a whole block, and there for every token that is looked at.
_GLUE, _BLOCK, _PER_TOKEN = 12, 28, 4
_TOLERANCE = 1e-5  # relative error of a cut's derivative along one random direction


@dataclass(frozen=True, eq=False)
class Cut:
    """One branch cut out of a graph; sizes are ``[sample, 1, …]``.

    Attributes:
        branch: Its names and weights.
        reads: What its readers read, a function of earlier leaves.
        inputs: What its readers gave, functions of ``reads``.
        leaves: Went on in place of ``inputs``.
        core: What its writer read, a function of ``leaves``.
        output: What its writer gave, a function of ``core``.
        resumed: Leaf that went on in place of ``output``.
        query: Attention only: the query as it meets the keys, a function of the first leaf.
        context: Attention only: keys and values that it meets, its own included, ``[sample, pos,
            head, width]``.
    """

    branch: Branch
    reads: Tensor
    inputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    core: Tensor
    output: Tensor
    resumed: Tensor
    query: Tensor | None = None
    context: tuple[Tensor, Tensor] | None = None

    @cached_property
    def factors(self) -> _Core:
        """The derivative of the branch, in factors."""
        return (_Attention if self.branch.kind == "attention" else _Elementwise).of(self)


class _Core(Protocol):
    """Jacobian of a core times the readers' weights, ``D = core' · W_in``, never stored whole."""

    def columns(self, which: slice) -> Float[Tensor, "sample inner column"]:
        """Some columns of D."""

    def pull(self, rows: Float[Tensor, "sample inner"]) -> Float[Tensor, "sample d_model"]:
        """``rowsᵀ D``."""


@dataclass(frozen=True, eq=False)
class _Elementwise:
    """The core of an MLP: each neuron by itself."""

    slopes: tuple[Float[Tensor, "sample neuron"], ...]
    weights: tuple[Float[Tensor, "neuron d_model"], ...]

    @classmethod
    def of(cls, cut: Cut) -> _Elementwise:
        slopes = _known(_grad((cut.core,), cut.leaves, (torch.ones_like(cut.core),)))
        samples = len(cut.core)
        return cls(
            slopes=tuple(slope.reshape(samples, -1) for slope in slopes),
            weights=tuple(W.flatten(0, 1) for W in cut.branch.W_in),
        )

    def columns(self, which: slice) -> Float[Tensor, "sample inner column"]:
        first, *others = zip(self.slopes, self.weights, strict=True)
        D = first[0][:, :, None] * first[1][:, which]
        for slope, W in others:
            D.addcmul_(slope[:, :, None], W[:, which])
        return D

    def pull(self, rows: Float[Tensor, "sample inner"]) -> Float[Tensor, "sample d_model"]:
        parts = [(rows * slope) @ W for slope, W in zip(self.slopes, self.weights, strict=True)]
        return torch.stack(parts).sum(dim=0)


@dataclass(frozen=True, eq=False)
class _Attention:
    """The core of softmax attention, by what the token's own query, key and value do to it.

    The own key moves one score s, and ``∂z/∂s`` points from the head's result z to the own value v:
    the Jacobian by the key is ``(v − z) aᵀ``. By the own value it is the own weight times I.

    Attributes:
        by_query: ``∂z_h/∂q_h``.
        towards_own: ``v − z``.
        by_key: The vector a.
        own_weight: Attention that the token pays to itself.
        weights: ``W_Q``, ``W_K``, ``W_V``, each ``[head, width, d_model]``.
    """

    by_query: Float[Tensor, "sample head width width"]
    towards_own: Float[Tensor, "sample head width"]
    by_key: Float[Tensor, "sample group member width"]
    own_weight: Float[Tensor, "sample group member"]
    weights: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, cut: Cut) -> _Attention:
        W_Q, W_K, W_V = cut.branch.W_in
        (heads, width, _), groups, samples = W_Q.shape, len(W_K), len(cut.core)
        members = heads // groups
        _, key, value = cut.leaves
        z = cut.core.detach().reshape(samples, groups, members, width)
        gap = value.detach().reshape(samples, groups, 1, width) - z
        # Heads that share a key are asked one after the other, for their answers add up in it.
        one_by_one = torch.eye(members, dtype=z.dtype, device=z.device)[:, None, None, :, None]
        asked = torch.cat([one_by_one * gap, one_by_one * torch.ones_like(gap)])
        by_key, by_value = _known(_rows(cut.core, (key, value), asked))
        by_key = by_key[:members].reshape(members, samples, groups, width).permute(1, 2, 0, 3)
        by_value = by_value[members:].reshape(members, samples, groups, width).permute(1, 2, 0, 3)
        square = gap.square().sum(dim=-1, keepdim=True)
        return cls(
            by_query=_by_query(cut, heads, width),
            towards_own=gap.reshape(samples, heads, width),
            by_key=torch.where(square > 0, by_key / square, 0),
            own_weight=by_value.mean(dim=-1),
            weights=(W_Q, W_K, W_V),
        )

    def columns(self, which: slice) -> Float[Tensor, "sample inner column"]:
        W_Q, W_K, W_V = (W[:, :, which] for W in self.weights)
        D = self.by_query @ W_Q
        samples, heads, width, n = D.shape
        keys = (self.by_key @ W_K).reshape(samples, heads, 1, n)
        D.addcmul_(self.towards_own[..., None], keys)
        by_group = D.view(samples, len(W_V), -1, width, n)
        by_group.addcmul_(self.own_weight[..., None, None], W_V[:, None])
        return D.flatten(1, 2)

    def pull(self, rows: Float[Tensor, "sample inner"]) -> Float[Tensor, "sample d_model"]:
        W_Q, W_K, W_V = self.weights
        G = rows.reshape(self.towards_own.shape)
        by_group = G.reshape(*self.by_key.shape)
        along = (G * self.towards_own).sum(dim=-1).reshape(self.own_weight.shape)
        queries = torch.einsum("shi,shij,hjd->sd", G, self.by_query, W_Q)
        keys = torch.einsum("sgm,sgmj,gjd->sd", along, self.by_key, W_K)
        values = torch.einsum("sgm,sgmj,gjd->sd", self.own_weight, by_group, W_V)
        return queries + keys + values


def _by_query(cut: Cut, heads: int, width: int) -> Float[Tensor, "sample head width width"]:
    """``∂z/∂q`` of every head.

    Where plain softmax attention reproduces the head's result from query, keys and values, it is
    ``Vᵀ(diag p − ppᵀ)K/√width`` and the way back to the leaf; else it is asked of autograd, one
    coordinate of z at a time, which reads all keys as often.
    """
    samples, leaf = len(cut.core), cut.leaves[0]
    unit = torch.eye(width, dtype=leaf.dtype, device=leaf.device)
    rows, of = unit[:, None, None].expand(width, samples, heads, width), cut.core
    if cut.query is not None and cut.context is not None:
        K, V = (x.movedim(1, 2).repeat_interleave(heads // x.shape[2], 1) for x in cut.context)
        scale = width**-0.5
        q = cut.query.detach().reshape(samples, heads, width, 1)
        p = (K @ q).mul(scale).softmax(dim=2)
        PV = p * V
        z = PV.sum(dim=2)
        known = cut.core.detach().reshape(z.shape)
        if (z - known).norm() <= _TOLERANCE * known.norm():
            by_scored = ((PV.mT @ K) - z[..., None] * (p.mT @ K)) * scale
            rows, of = by_scored.permute(2, 0, 1, 3), cut.query
    (found,) = _known(_rows(of, (leaf,), rows))
    return found.reshape(width, samples, heads, width).permute(1, 2, 0, 3)


def sound_cuts(source: Tensor, target: Tensor, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Those of the cuts that are what they claim to be, along one random cotangent per sample.

    Nothing may reach a cut's leaves but its own output, and that nothing else; its inputs depend on
    the stream through ``reads`` alone; and the derivative is that of the factors.

    Args:
        source: Leaf at the start of the stream.
        target: End of the stream.
        cuts: Every cut between them.
    """
    if not cuts:
        return ()
    stream = (source, *(cut.resumed for cut in cuts))
    inner = [leaf for cut in cuts for leaf in cut.leaves]
    states = (target, *(cut.reads for cut in cuts))
    leaks = _grad(states, inner, [_random_like(state) for state in states])
    leaking = {id(leaf) for leaf, g in zip(inner, leaks, strict=True) if g is not None}
    return tuple(
        cut
        for cut in cuts
        if not leaking & {id(leaf) for leaf in cut.leaves} and _holds(cut, stream, inner)
    )


def _holds(cut: Cut, stream: Sequence[Tensor], inner: Sequence[Tensor]) -> bool:
    samples = len(cut.output)
    shapes = [(samples, W.shape[0] * W.shape[1]) for W in cut.branch.W_in]
    shapes.append((samples, cut.branch.W_out.shape[1]))
    ends = (*cut.leaves, cut.core)
    if shapes != [(len(end), end.numel() // samples) for end in ends]:
        return False
    cotangent = _random_like(cut.output)
    everything = (*stream, *inner)
    by_leaf = _grad((cut.output,), everything, (cotangent,))
    own = {id(leaf) for leaf in cut.leaves}
    reached = {id(leaf) for leaf, g in zip(everything, by_leaf, strict=True) if g is not None}
    if reached != own:
        return False
    exact = _grad(cut.inputs, everything, _known(by_leaf))
    rows = cotangent.reshape(samples, -1) @ cut.branch.W_out
    claimed = _grad((cut.reads,), everything, (cut.factors.pull(rows).reshape(cut.reads.shape),))
    error = size = 0.0
    for one, other in zip(exact, claimed, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None:
            error += float((one - other).double().square().sum())
            size += float(one.double().square().sum())
    return error <= _TOLERANCE**2 * size


def assemble(
    source: Tensor,
    target: Tensor,
    cuts: Sequence[Cut],
    context: int,
    *,
    chunk: int | None,
    max_bytes: int,
) -> Float[Tensor, "sample d_model d_model"]:
    """The Jacobian of every sample, ``[sample, out, in]``, on the device of the graph.

    Args:
        source: Leaf ``[sample, …]``.
        target: What is differentiated.
        cuts: Sound cuts, in the order in which their outputs joined the stream.
        context: Number of tokens looked at, by an attention that was not cut out.
        chunk: Rows or columns at a time; by default what ``max_bytes`` allows.
        max_bytes: Bound of what is held beside a few ``[sample, d_model, d_model]`` matrices.
    """
    samples = len(target)
    d_model = target.numel() // samples
    leaves = (source, *(cut.resumed for cut in cuts))
    glue_only = {cut.branch.kind for cut in cuts} == {"attention", "mlp"}
    each = d_model * (_GLUE if glue_only else _BLOCK + _PER_TOKEN * context)
    pull = _Pull(samples, d_model, each, target.element_size(), chunk, max_bytes)
    identity = torch.eye(d_model, dtype=target.dtype, device=target.device)
    skips = _identities(target, leaves)
    others = [i for i, skip in enumerate(skips) if not skip]
    totals: list[Tensor | None] = [None] * len(leaves)
    if others:
        rows = identity.expand(samples, d_model, d_model)
        for i, found in zip(others, pull(target, [leaves[i] for i in others], rows), strict=True):
            totals[i] = found
    for i in range(len(cuts), 0, -1):
        above, cut = totals[i], cuts[i - 1]
        totals[i] = None
        if above is None and not skips[i]:
            continue  # nothing of the target depends on this branch
        M = _product(cut, d_model, pull)
        if above is not None:
            M = above @ M + M if skips[i] else above @ M
        for j, found in enumerate(pull(cut.reads, leaves[:i], M)):
            if found is not None:
                total = totals[j]
                totals[j] = found if total is None else total.add_(found)
    J = totals[0]
    if J is None:
        J = torch.zeros(samples, d_model, d_model, dtype=target.dtype, device=target.device)
    return J + identity if skips[0] else J


def _product(cut: Cut, d_model: int, pull: _Pull) -> Float[Tensor, "sample d_model d_model"]:
    """``W_out · core' · W_in``: what the branch's output does when ``reads`` moves."""
    W_out = cut.branch.W_out
    M = W_out.new_empty(pull.samples, d_model, d_model)
    for columns in pull.slices(d_model, 2 * W_out.shape[1]):
        for sample, D in enumerate(cut.factors.columns(columns)):
            M[sample, :, columns] = W_out @ D
    return M


def _identities(target: Tensor, leaves: Sequence[Tensor]) -> list[bool]:
    """Which leaves reach the target unchanged, as over a skip connection: told by one cotangent."""
    cotangent = _random_like(target)
    gradients = _grad((target,), leaves, (cotangent,))
    return [g is not None and torch.equal(g.reshape_as(cotangent), cotangent) for g in gradients]


@dataclass(frozen=True)
class _Pull:
    """Rows pulled back through a piece of graph, so many at a time as memory allows."""

    samples: int
    d_model: int
    floats_per_row: int
    itemsize: int
    chunk: int | None
    max_bytes: int

    def slices(self, n: int, floats_each: int) -> Iterator[slice]:
        """Cut ``range(n)`` where each index takes so many floats per sample."""
        chunk = self.chunk
        if chunk is None:
            chunk = max(1, self.max_bytes // (self.itemsize * self.samples * floats_each))
        return (slice(first, min(first + chunk, n)) for first in range(0, n, chunk))

    def __call__(
        self, output: Tensor, leaves: Sequence[Tensor], rows: Float[Tensor, "sample row d_model"]
    ) -> list[Float[Tensor, "sample row d_model"] | None]:
        """``rows · ∂output/∂leaf`` for each leaf, ``None`` where it does not reach the output."""
        totals: list[Tensor | None] = [None] * len(leaves)
        for part in self.slices(self.d_model, self.floats_per_row):
            for i, found in enumerate(_rows(output, leaves, rows[:, part].transpose(0, 1))):
                if found is None:
                    continue
                by_sample = found.reshape(-1, self.samples, self.d_model).transpose(0, 1)
                total = totals[i]
                if total is None:
                    total = totals[i] = torch.empty_like(
                        rows, memory_format=torch.contiguous_format
                    )
                total[:, part] = by_sample
        return totals


def _random_like(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)


def _rows(
    output: Tensor, leaves: Sequence[Tensor], cotangents: Float[Tensor, "row ..."]
) -> tuple[Tensor | None, ...]:
    """Gradients for a batch of cotangents, each of as many numbers as the output."""
    return _grad((output,), leaves, (cotangents.reshape(-1, *output.shape),), batched=True)


def _known(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _grad(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    *,
    batched: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradient of each leaf, ``None`` where it does not reach the outputs."""
    live = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return (None,) * len(leaves)
    with differentiable():
        found = torch.autograd.grad(
            [o for o, _ in live],
            leaves,
            [c for _, c in live],
            is_grads_batched=batched,
            retain_graph=True,
            allow_unused=True,
        )
    return tuple(None if gradient is None else gradient.detach() for gradient in found)
