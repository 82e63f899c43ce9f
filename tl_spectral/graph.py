"""The graph whose nodes are the coordinates of the residual stream.

Edges are resemblances between units (coordinates) over samples, or couplings read off a Jacobian;
definitions in the project's specification §5. Everything is computed in float64.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy import sparse, stats
from torch import Tensor

from tl_spectral.capture import ResidualStates
from tl_spectral.errors import InputError, TLSpectralWarning
from tl_spectral.jacobian.result import BlockJacobian
from tl_spectral.results import Provenance, Result

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd
    import plotly.graph_objects as go

Edges = Literal["pearson", "spearman", "partial", "cosine", "jacobian"]
Sign = Literal["abs", "positive", "signed"]
Hook = Literal["resid_pre", "resid_mid", "resid_post"]
DEFAULT_TOP_K = 10
_ROWS = 256  # of the dense matrix at a time, beyond which only it is held


@dataclass(frozen=True, eq=False)
class UnitGraph(Result):
    """A sparse weighted graph over the coordinates of the residual stream.

    Attributes:
        n_units: Number of nodes, d_model.
        row: Smaller index of each edge; edges are sorted by (row, col).
        col: Larger index of each edge.
        weight: Weight of each edge, never zero; negative only if ``sign == "signed"``.
        strength: Sum of ``|weight|`` over the edges of each unit.
        edges: Which resemblance: ``"pearson"``, …
        sign: Sign policy: ``"abs"``, ``"positive"`` or ``"signed"``.
        rule: The sparsification, such as ``"top_k=10"``.
        constant_units: Units that do not vary over the samples: isolated, never correlated.
        unit_mean: Mean of each unit over the samples; ``None`` for ``edges="jacobian"``.
        unit_std: Standard deviation (n − 1) of each unit; ``None`` for ``edges="jacobian"``.
        norm_gain: Gain of the norm that reads this layer, if known.
        layer: The layer, if known.
        hook: Hook point of the states; ``None`` for a plain tensor or a Jacobian.
        n_samples: Samples the edges rest on; ``None`` for ``edges="jacobian"``.
        shrinkage: Ledoit–Wolf weight of the identity, for ``edges="partial"`` only.
    """

    n_units: int
    row: Int[Tensor, " edge"]
    col: Int[Tensor, " edge"]
    weight: Float[Tensor, " edge"]
    strength: Float[Tensor, " unit"]
    edges: str
    sign: str
    rule: str
    constant_units: tuple[int, ...] = ()
    unit_mean: Float[Tensor, " unit"] | None = None
    unit_std: Float[Tensor, " unit"] | None = None
    norm_gain: Float[Tensor, " unit"] | None = None
    layer: int | None = None
    hook: str | None = None
    n_samples: int | None = None
    shrinkage: float | None = None

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return self.weight.numel()

    @property
    def density(self) -> float:
        """Share of the pairs of units that are joined by an edge."""
        return self.n_edges / math.comb(self.n_units, 2)

    @property
    def degree(self) -> Int[Tensor, " unit"]:
        """Number of edges of each unit."""
        return torch.bincount(torch.cat([self.row, self.col]), minlength=self.n_units)

    @property
    def isolated(self) -> Bool[Tensor, " unit"]:
        """Units without any edge."""
        return self.degree == 0

    def adjacency(self) -> sparse.csr_array:
        """The symmetric weighted adjacency matrix, float64, without diagonal."""
        row, col, weight = self.row.numpy(), self.col.numpy(), self.weight.numpy()
        indices = (np.concatenate([row, col]), np.concatenate([col, row]))
        shape = (self.n_units, self.n_units)
        return sparse.csr_array((np.concatenate([weight, weight]), indices), shape=shape)

    def to_networkx(self) -> nx.Graph[int]:
        """The graph for networkx: nodes 0 … n−1 in index order, edges with ``weight``.

        Nodes carry ``strength`` and, where known, ``std``, ``mean`` and ``norm_gain``.
        """
        import networkx as nx

        known = {
            "strength": self.strength,
            "std": self.unit_std,
            "mean": self.unit_mean,
            "norm_gain": self.norm_gain,
        }
        graph: nx.Graph[int] = nx.Graph(
            layer=self.layer, edges=self.edges, sign=self.sign, rule=self.rule
        )
        graph.add_nodes_from(range(self.n_units))
        for name, values in known.items():
            if values is not None:
                nx.set_node_attributes(graph, dict(enumerate(values.tolist())), name)
        triples = zip(self.row.tolist(), self.col.tolist(), self.weight.tolist(), strict=True)
        graph.add_weighted_edges_from(triples)
        return graph

    def to_dataframe(self) -> pd.DataFrame:
        """One row per edge: ``row``, ``col``, ``weight``."""
        import pandas as pd

        columns = {"row": self.row, "col": self.col, "weight": self.weight}
        return pd.DataFrame({name: values.numpy() for name, values in columns.items()})

    def plot(self, labels: Int[Tensor, " unit"] | None = None) -> go.Figure:
        """The adjacency matrix, ordered by community if ``labels`` are given."""
        from tl_spectral.plots import graph_figure

        return graph_figure(self, labels)


def unit_graph(
    states: ResidualStates | BlockJacobian | Float[Tensor, "row d_model"],
    layer: int | None = None,
    *,
    edges: Edges = "pearson",
    top_k: int | None = None,
    threshold: float | None = None,
    density: float | None = None,
    sign: Sign = "abs",
    hook: Hook = "resid_pre",
) -> UnitGraph:
    """Build the unit graph of one layer.

    ==========  =====================================================================
    edges       weight of the pair (i, j)
    ==========  =====================================================================
    pearson     correlation over samples [A]
    spearman    correlation of ranks over samples
    partial     ``−P_ij / sqrt(P_ii P_jj)``, P the inverse of the correlation matrix after
                Ledoit–Wolf shrinkage towards the identity (so it exists at any sample size)
    cosine      ``x_i · x_j / (|x_i| |x_j|)`` over samples, means kept
    jacobian    ``(|R_ij| + |R_ji|) / 2``; the skip does not matter off the diagonal
    ==========  =====================================================================

    Exactly one rule makes it sparse, by ``|weight|``; equal weights are kept in index order.

    Args:
        states: Residual states, or a plain tensor ``[sample, d_model]``; for
            ``edges="jacobian"`` a BlockJacobian or a plain ``[d_model, d_model]`` tensor.
        layer: Which layer of the states; may be left out when there is only one. For plain
            tensors it is only recorded.
        edges: Resemblance, see the table.
        top_k: Keep the edges that are among the ``top_k`` strongest of either end (default 10).
        threshold: Keep edges with ``|weight| >= threshold`` instead.
        density: Keep this share of all pairs of varying units instead.
        sign: ``"abs"`` takes absolute values, ``"positive"`` drops negative edges, ``"signed"``
            keeps signs (for signed Leiden).
        hook: Which residual states to read.

    Returns:
        The graph. Units that do not vary beyond rounding (range 0, or standard deviation below
        4 eps·|mean| of their dtype) are isolated and listed.

    Raises:
        InputError: If the input is not finite, has fewer than 3 samples or 2 units, has no such
            layer or hook, or the options contradict each other.
    """
    _check_choices(edges=(edges, Edges), sign=(sign, Sign), hook=(hook, Hook))
    rule, amount = _sparsification(top_k, threshold, density)
    if edges == "jacobian":
        if sign == "signed":
            raise InputError('edges="jacobian" has no signs (|R|); use sign="abs".')
        source = _from_jacobian(states, layer)
    else:
        source = _from_states(states, layer, hook, edges)
    matrix = source.matrix  # ours alone, and large: every step below is in place or by rows
    if sign == "abs":
        np.abs(matrix, out=matrix)
    elif sign == "positive":
        np.maximum(matrix, 0, out=matrix)
    isolated = list(source.constant)
    matrix[isolated, :] = matrix[:, isolated] = 0
    np.fill_diagonal(matrix, 0)
    row, col = _KEEP[rule](matrix, amount, len(matrix) - len(isolated))
    weight = matrix[row, col]
    row, col, weight = (values[weight != 0] for values in (row, col, weight))
    ends = np.concatenate([row, col])
    strength = np.bincount(ends, np.tile(np.abs(weight), 2), minlength=len(matrix)).astype(float)
    options = {"edges": edges, "sign": sign, "rule": f"{rule}={amount:g}"}
    return UnitGraph(
        n_units=len(matrix),
        row=torch.from_numpy(row),
        col=torch.from_numpy(col),
        weight=torch.from_numpy(weight),
        strength=torch.from_numpy(strength),
        edges=edges,
        sign=sign,
        rule=f"{rule}={amount:g}",
        constant_units=source.constant,
        unit_mean=source.mean,
        unit_std=source.std,
        norm_gain=source.norm_gain,
        layer=source.layer,
        hook=source.hook,
        n_samples=source.n_samples,
        shrinkage=source.shrinkage,
        provenance=dataclasses.replace(
            source.provenance, options={**source.provenance.options, "graph": options}
        ),
    )


@dataclass(frozen=True, eq=False)
class _Source:
    """Dense weights of all pairs, and what is known about the units."""

    matrix: Float[np.ndarray, "d d"]
    constant: tuple[int, ...] = ()
    mean: Tensor | None = None
    std: Tensor | None = None
    norm_gain: Tensor | None = None
    layer: int | None = None
    hook: str | None = None
    n_samples: int | None = None
    shrinkage: float | None = None
    provenance: Provenance = dataclasses.field(default_factory=Provenance)


def _from_jacobian(jacobian: object, layer: int | None) -> _Source:
    if isinstance(jacobian, ResidualStates):
        raise InputError('edges="jacobian" needs a BlockJacobian or a matrix, not states.')
    if isinstance(jacobian, BlockJacobian):
        if layer not in (None, jacobian.layer):
            raise InputError(f"layer={layer} was asked of the Jacobian of layer {jacobian.layer}.")
        tensor, layer = jacobian.matrix, jacobian.layer
        gain, provenance = _as_double(jacobian.norm_gain), jacobian.provenance
    else:
        assert isinstance(jacobian, Tensor)
        tensor, gain, provenance = jacobian, None, Provenance()
    values = _finite(tensor, "The Jacobian")
    if values.shape[0] != values.shape[1] or len(values) < 2:
        raise InputError(f"A Jacobian must be [d_model, d_model]; got {tuple(tensor.shape)}.")
    size = np.abs(values)
    return _Source((size + size.T) / 2, norm_gain=gain, layer=layer, provenance=provenance)


def _from_states(states: object, layer: int | None, hook: Hook, edges: str) -> _Source:
    if isinstance(states, BlockJacobian):
        raise InputError(f'edges="{edges}" needs states; for a Jacobian use edges="jacobian".')
    if isinstance(states, ResidualStates):
        layer = _only_layer(states, layer)
        stack = getattr(states, hook)
        if stack is None:
            raise InputError(f"These states have no {hook}; this architecture does not expose it.")
        index = states.index(layer)
        tensor, provenance = stack[index], states.provenance
        gain = None if states.norm_gain is None else states.norm_gain[index]
    else:
        assert isinstance(states, Tensor)
        tensor, gain, provenance = states, None, Provenance()
    plain = isinstance(states, Tensor)
    values = _finite(tensor, "The residual states")
    n, d = values.shape
    if n < 3 or d < 2:
        raise InputError(
            f"A unit graph needs at least 3 samples and 2 units, got {n} samples of {d} units. "
            "Capture more texts."
        )
    if n < d:
        warnings.warn(
            f"{n} samples for {d} units: correlations are rank-deficient and noisy. "
            f"Use at least {d} samples, better several times that.",
            TLSpectralWarning,
            stacklevel=3,
        )
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1)
    eps = torch.finfo(tensor.dtype).eps
    still = (np.ptp(values, axis=0) == 0) | (std <= 4 * eps * np.abs(mean))
    shrinkage = None
    varying = np.flatnonzero(~still)
    if edges == "cosine":
        part = _gram(values[:, varying])
    else:
        seen = values[:, varying]
        standard = stats.rankdata(seen, axis=0) if edges == "spearman" else seen
        standard = standard - standard.mean(axis=0)
        if edges == "partial":
            part, shrinkage = _partial(standard)
        else:
            part = _gram(standard)
    matrix = part
    if len(varying) < d:
        matrix = np.zeros((d, d))
        matrix[np.ix_(varying, varying)] = part
    return _Source(
        matrix,
        constant=tuple(np.flatnonzero(still).tolist()),
        mean=torch.from_numpy(mean),
        std=torch.from_numpy(std),
        norm_gain=_as_double(gain),
        layer=layer,
        hook=None if plain else hook,
        n_samples=n,
        shrinkage=shrinkage,
        provenance=provenance,
    )


def _gram(values: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "d d"]:
    unit = values / np.linalg.norm(values, axis=0)
    return np.asarray(unit.T @ unit)


def _partial(centred: Float[np.ndarray, "n d"]) -> tuple[Float[np.ndarray, "d d"], float]:
    """Partial correlations after Ledoit & Wolf 2004 shrinkage of the correlation to I."""
    n, d = centred.shape
    standard = centred / np.sqrt(np.square(centred).mean(axis=0))
    correlation = standard.T @ standard / n
    energy = float(np.square(correlation).sum())
    distance = energy - d  # ‖C − I‖², as the diagonal of C is 1
    noise = (float(np.square(np.square(standard).sum(axis=1)).sum()) / n - energy) / n
    shrinkage = min(noise / distance, 1.0) if distance > 0 else 1.0
    shrunk = (1 - shrinkage) * correlation
    shrunk[np.diag_indices(d)] += shrinkage
    precision = np.linalg.inv(shrunk)
    scale = np.sqrt(np.diag(precision))
    return -precision / np.outer(scale, scale), shrinkage


Pairs = tuple[Int[np.ndarray, " edge"], Int[np.ndarray, " edge"]]


def _rows(matrix: Float[np.ndarray, "d d"]) -> Iterator[tuple[int, Float[np.ndarray, "b d"]]]:
    """Absolute values of some rows at a time, and which the first one is."""
    for first in range(0, len(matrix), _ROWS):
        yield first, np.abs(matrix[first : first + _ROWS])


def _keep_top_k(matrix: Float[np.ndarray, "d d"], k: float, active: int) -> Pairs:
    d, keys = len(matrix), []
    for first, size in _rows(matrix):
        row, col = np.nonzero(_largest_per_row(size, min(int(k), d)))
        row += first
        keys.append(np.minimum(row, col) * d + np.maximum(row, col))
    edges = np.unique(np.concatenate(keys))  # among the strongest of either end
    return edges // d, edges % d


def _keep_above(matrix: Float[np.ndarray, "d d"], bar: float, active: int) -> Pairs:
    found = []
    for first, size in _rows(matrix):
        row, col = np.nonzero(size >= bar)
        later = col > row + first
        found.append((row[later] + first, col[later]))
    row, col = (np.concatenate(part) for part in zip(*found, strict=True))
    return row, col


def _keep_density(matrix: Float[np.ndarray, "d d"], share: float, active: int) -> Pairs:
    count = round(share * math.comb(active, 2))
    if not count:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    upper = np.concatenate([np.abs(row[i + 1 :]) for i, row in enumerate(matrix)])
    upper.partition(len(upper) - count)
    bar = upper[len(upper) - count]
    ties = count - int(np.sum(upper > bar))
    row, col = _keep_above(matrix, bar, active)
    equal = np.flatnonzero(np.abs(matrix[row, col]) == bar)
    kept = np.ones(len(row), dtype=bool)
    kept[equal[ties:]] = False  # of equals the first
    return row[kept], col[kept]


_KEEP = {"top_k": _keep_top_k, "threshold": _keep_above, "density": _keep_density}


def _largest_per_row(values: Float[np.ndarray, "r c"], k: int) -> Bool[np.ndarray, "r c"]:
    """Mark the k largest of each row; among equals the first. No sort, so fast for wide rows."""
    bar = np.partition(values, -k, axis=1)[:, -k][:, None]
    above, equal = values > bar, values == bar
    missing = k - above.sum(axis=1, keepdims=True)
    return np.asarray(above | (equal & (np.cumsum(equal, axis=1) <= missing)))


def _sparsification(
    top_k: int | None, threshold: float | None, density: float | None
) -> tuple[str, float]:
    given = {
        name: value
        for name, value in (("top_k", top_k), ("threshold", threshold), ("density", density))
        if value is not None
    }
    if len(given) > 1:
        raise InputError(f"Give one of top_k, threshold and density, not {' and '.join(given)}.")
    name, value = next(iter(given.items()), ("top_k", DEFAULT_TOP_K))
    if name == "top_k" and not value >= 1:
        raise InputError(f"top_k must be at least 1, got {value}.")
    if name == "threshold" and not 0 < value < math.inf:
        raise InputError(f"threshold must be positive, got {value}.")
    if name == "density" and not 0 < value <= 1:
        raise InputError(f"density must lie in (0, 1], got {value}.")
    return name, float(value)


def _only_layer(states: ResidualStates, layer: int | None) -> int:
    if layer is not None:
        return layer
    if len(states.layers) != 1:
        raise InputError(f"These states hold layers {states.layers}; say which: layer=…")
    return states.layers[0]


def _finite(tensor: Tensor, what: str) -> Float[np.ndarray, "r c"]:
    if tensor.ndim != 2:
        raise InputError(f"{what} must be two-dimensional, got shape {tuple(tensor.shape)}.")
    values = tensor.detach().to("cpu", torch.float64).numpy()
    bad = ~np.isfinite(values)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"{what}: {int(bad.sum())} values are not finite, the first at {first}. "
            "Check the dtype and the inputs of the model."
        )
    return values


def _as_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float64)


def _check_choices(**choices: tuple[str, object]) -> None:
    for name, (value, allowed) in choices.items():
        if value not in get_args(allowed):
            options = ", ".join(repr(option) for option in get_args(allowed))
            raise InputError(f"{name}={value!r} is not one of {options}.")
