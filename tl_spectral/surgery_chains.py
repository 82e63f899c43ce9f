"""What the parts of the blocks explain of their chain: every surgery and its controls in one table.

Non-normality, rotation, the fall of ‖R‖/‖J‖ over depth and mere norms are rival explanations of the
funnel. Each row of the table keeps one of them and gives up the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import Tensor

from tl_spectral.chain import _links, chain
from tl_spectral.decompose import to_matrix
from tl_spectral.errors import InputError
from tl_spectral.results import Provenance, Result
from tl_spectral.surgery import RANDOM, Schur, part_of_update
from tl_spectral.threads import one_blas_thread

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

KINDS = {
    "original": "the blocks as they are",
    "normal": "the same eigenvalues, the non-normal part taken out",
    "matched": "that, scaled to the norm of each block (the same ranks, another growth)",
    "shuffled": "the non-normal part replaced by noise of the same norm",
    "rotated": "the normal part in an unrelated random basis",
    "symmetric": "I + (R + Rᵀ)/2: no rotation",
    "antisymmetric": "I + (R − Rᵀ)/2: rotation alone",
    "fixed_skip": "I + R·c/‖R‖: the same norm of the update at all layers",
    "random_update": "I + noise of the norm of each update: skip and norms alone",
}
"""The rows of the table and what each keeps."""
_DRAWN = (*RANDOM, "random_update")
_FEW = 4  # chains below which an interval over prompts says nothing
Blocks = list[Float[np.ndarray, "d d"]]


@dataclass(frozen=True, eq=False)
class SurgeryTable(Result):
    """Chains after each surgery. Row i is one kind, one seed and one chain of blocks.

    Attributes:
        kind: Kind of each row, see :data:`KINDS`.
        seed: Seed of each row; −1 where nothing is drawn.
        sample: Prompt of each row; −1 for the chain of mean Jacobians.
        layers: Layer of each factor.
        effective_rank: Of the product up to each layer.
        participation_ratio: Likewise.
        log_sigma: Natural logarithm of the largest singular value of the product.
        norm_ratio: ‖R‖_F/‖J‖_F of each factor.
        baseline_effective_rank: Of a product of as many independent Ginibre matrices.
        fixed_norm: The c of ``"fixed_skip"`` in each row, NaN elsewhere.
        d_model: Size of the factors.
        units: ``"raw"`` or ``"natural"``.
        n_dropped: Coordinates left out for lack of variance.
    """

    kind: tuple[str, ...]
    seed: tuple[int, ...]
    sample: tuple[int, ...]
    layers: tuple[int, ...]
    effective_rank: Float[Tensor, "row depth"]
    participation_ratio: Float[Tensor, "row depth"]
    log_sigma: Float[Tensor, "row depth"]
    norm_ratio: Float[Tensor, "row depth"]
    baseline_effective_rank: Float[Tensor, " depth"]
    fixed_norm: Float[Tensor, " row"]
    d_model: int
    units: str
    n_dropped: int

    def to_dataframe(self) -> pd.DataFrame:
        """One row per kind, seed, chain and depth."""
        import pandas as pd

        n, depth = len(self.kind), len(self.layers)
        mean = np.repeat(np.array(self.sample) < 0, depth)
        return pd.DataFrame(
            {
                "kind": np.repeat(self.kind, depth),
                "seed": np.repeat(self.seed, depth),
                "estimate": np.where(mean, "mean_jacobian", "per_sample"),
                "sample": np.repeat(self.sample, depth),
                "layer": np.tile(self.layers, n),
                "effective_rank": self.effective_rank.numpy().ravel(),
                "participation_ratio": self.participation_ratio.numpy().ravel(),
                "log_sigma_1": self.log_sigma.numpy().ravel(),
                "norm_ratio": self.norm_ratio.numpy().ravel(),
                "baseline_effective_rank": np.tile(self.baseline_effective_rank.numpy(), n),
                "units": self.units,
            }
        )

    def summary(self) -> pd.DataFrame:
        """One row per kind and estimate, at the last layer: rank, and ratio to the original.

        Ratios are taken chain by chain, in logarithms, after the mean over seeds. ``low`` and
        ``high`` are a 95 % t-interval over prompts (4 or more), else the range over seeds; ``of``
        says which.
        """
        import pandas as pd

        last = self.to_dataframe().query("layer == @self.layers[-1]").copy()
        last["log"] = np.log(last["effective_rank"])
        rows = []
        for estimate, part in last.groupby("estimate", sort=False):
            chains = part.groupby(["kind", "sample"])["log"].mean()
            original = chains["original"]
            for kind in dict.fromkeys(self.kind):
                ratio = (chains[kind] - original).to_numpy()
                own = part[part["kind"] == kind]
                spread = own["log"].to_numpy() - original.loc[own["sample"]].to_numpy()
                low, high, of = _range(ratio, spread)
                rows.append(
                    {
                        "kind": kind,
                        "estimate": estimate,
                        "effective_rank": math.exp(chains[kind].mean()),
                        "ratio": math.exp(ratio.mean()),
                        "low": math.exp(low),
                        "high": math.exp(high),
                        "of": of,
                        "n_chains": len(ratio),
                        "n_seeds": own["seed"].nunique(),
                        "baseline_effective_rank": float(self.baseline_effective_rank[-1]),
                        "keeps": KINDS[kind],
                    }
                )
        return pd.DataFrame(rows)

    def plot(self, template: Any = None) -> go.Figure:
        """Effective rank and largest singular value by depth, one line per kind."""
        from tl_spectral.plots.surgery import surgery_figure

        return surgery_figure(self.to_dataframe(), template=template)


def surgery_table(
    blocks: Any,
    tokens: Any = None,
    *,
    kinds: Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    scale: Float[Tensor, " d"] | None = None,
    **options: Any,
) -> SurgeryTable:
    """Chains of the blocks after each surgery, with its controls, side by side.

    Args:
        blocks: Block Jacobians in the order of layers (or ``[d, d]`` tensors, taken as J). Or a
            model, with ``tokens``.
        tokens: Prompts, if the first argument is a model: each gets its own chain, and two or more
            also the chain of mean Jacobians, which is another number.
        kinds: Out of :data:`KINDS`; all by default. ``"original"`` is always there.
        seeds: Seeds of the kinds that draw random numbers.
        scale: Standard deviation of each coordinate: surgery and chain in natural units
            ``D⁻¹ J D``, one D for all layers, so that the chain is ``D⁻¹ P D``. Normality,
            symmetry and ranks depend on it; eigenvalues do not.
        **options: Passed to :func:`tl_spectral.block_jacobians` if the first argument is a model.

    Returns:
        The table. One Schur form per layer and chain is kept in memory (two ``d × d`` matrices).

    Raises:
        InputError: For an unknown kind, no seeds, or blocks that are no chain (see
            :func:`tl_spectral.chain`).
    """
    wanted = tuple(KINDS) if kinds is None else tuple(dict.fromkeys(("original", *kinds)))
    for kind in wanted:
        if kind not in KINDS:
            raise InputError(f"There is no surgery {kind!r}. There are {', '.join(KINDS)}.")
    if not seeds and any(kind in _DRAWN for kind in wanted):
        raise InputError(f"{_DRAWN} draw random numbers: pass at least one seed.")
    rows: list[dict[str, Any]] = []
    for source in chains_of(blocks, tokens, scale, options):
        work = _Work(source.matrices)
        for kind in wanted:
            for seed in seeds if kind in _DRAWN else (-1,):
                result = chain(work.factors(kind, seed), k=1)
                rows.append(
                    {
                        "kind": kind,
                        "seed": int(seed),
                        "sample": source.sample,
                        "effective_rank": result.effective_rank,
                        "participation_ratio": result.participation_ratio,
                        "log_sigma": result.log_singular_values[:, 0],
                        "norm_ratio": torch.tensor(work.ratios, dtype=torch.float64),
                        "fixed_norm": work.size if kind == "fixed_skip" else math.nan,
                    }
                )

    def stacked(name: str) -> Float[Tensor, "row depth"]:
        return torch.stack([row[name] for row in rows])

    chosen = {"kinds": wanted, "seeds": tuple(seeds)}
    return SurgeryTable(
        kind=tuple(row["kind"] for row in rows),
        seed=tuple(row["seed"] for row in rows),
        sample=tuple(row["sample"] for row in rows),
        effective_rank=stacked("effective_rank"),
        participation_ratio=stacked("participation_ratio"),
        log_sigma=stacked("log_sigma"),
        norm_ratio=stacked("norm_ratio"),
        fixed_norm=torch.tensor([row["fixed_norm"] for row in rows], dtype=torch.float64),
        layers=source.layers,
        baseline_effective_rank=result.baseline_effective_rank,
        d_model=result.d_model,
        units="raw" if scale is None else "natural",
        n_dropped=source.n_dropped,
        provenance=replace(
            source.provenance, options={**source.provenance.options, "surgery": chosen}
        ),
    )


def fixed_skip(blocks: Sequence[Any], norm: float | None = None) -> list[Float[Tensor, "d d"]]:
    """``I + R·(c/‖R‖_F)``: blocks whose updates all have the same norm.

    ‖R‖/‖J‖ falls over the depth of trained models, and with it all that is measured on J drifts
    towards the identity. Where a trend over depth is gone after this, that fall explains it.

    Args:
        blocks: Block Jacobians, or ``[d, d]`` tensors taken as J.
        norm: The c; by default the geometric mean of the norms of the updates.

    Returns:
        The new blocks, float64.

    Raises:
        InputError: If an update is zero, or ``norm`` is not positive.
    """
    matrices = [to_matrix(J).values for J in blocks]
    if norm is not None and not norm > 0:
        raise InputError(f"norm must be positive, got {norm}.")
    size = _common_norm(matrices) if norm is None else norm
    return [torch.from_numpy(_with_norm(J, size)) for J in matrices]


@dataclass(frozen=True, eq=False)
class Chain:
    """One chain of blocks in the units asked for."""

    matrices: Blocks
    layers: tuple[int, ...]
    sample: int
    n_dropped: int
    provenance: Provenance


def chains_of(
    blocks: Any, tokens: Any, scale: Float[Tensor, " d"] | None, options: dict[str, Any]
) -> Iterator[Chain]:
    """The chain of given blocks; or one per prompt of a model, and that of their mean (sample −1).

    Raises:
        InputError: As :func:`tl_spectral.chain`, and if the scale does not fit.
    """
    if tokens is None:
        if isinstance(blocks, Iterator):
            blocks = list(blocks)
        first = next(iter(blocks), None) if isinstance(blocks, Sequence) else None
        several = getattr(first, "n_samples", 1) > 1
        yield _chain(_links(blocks, None, options), -1 if several else 0, scale)
        return
    from tl_spectral.jacobian import block_jacobians
    from tl_spectral.model import ModelView

    prompts = ModelView(blocks).tokens(tokens)
    for sample, prompt in enumerate(prompts):
        yield _chain(_links(blocks, prompt, options), sample, scale)
    if len(prompts) > 1:
        yield _chain(_links(block_jacobians(blocks, prompts, **options), None, {}), -1, scale)


def _chain(links: Iterator[Any], sample: int, scale: Float[Tensor, " d"] | None) -> Chain:
    found = list(links)
    if not found:
        raise InputError("The chain has no factors.")
    scaled = [to_matrix(torch.from_numpy(link.matrix)).in_units(scale) for link in found]
    return Chain(
        matrices=[matrix.values for matrix in scaled],
        layers=tuple(link.layer for link in found),
        sample=sample,
        n_dropped=scaled[0].n_dropped,
        provenance=found[0].provenance,
    )


class _Work:
    """The factors of one chain under each surgery; Schur forms are computed once."""

    def __init__(self, matrices: Blocks) -> None:
        self.matrices = matrices
        self.schur: list[Schur] = []
        self.size = math.nan
        self.ratios: list[float] = []

    def factors(self, kind: str, seed: int) -> Iterator[Float[Tensor, "d d"]]:
        """The factors, one after the other, for :func:`chain`; notes their norm ratios."""
        self.ratios = []
        make = self._maker(kind)
        for step, J in enumerate(self.matrices):
            rng = np.random.default_rng([max(seed, 0), step])
            with one_blas_thread(len(J)):
                factor = make(step, J, rng)
            update = factor - np.eye(len(J))
            self.ratios.append(float(np.linalg.norm(update) / np.linalg.norm(factor)))
            yield torch.from_numpy(factor)

    def _maker(self, kind: str) -> Callable[[int, np.ndarray, np.random.Generator], np.ndarray]:
        if kind == "original":
            return lambda step, J, rng: J
        if kind in ("symmetric", "antisymmetric"):
            return lambda step, J, rng: part_of_update(J, kind)
        if kind == "fixed_skip":
            self.size = _common_norm(self.matrices)
            return lambda step, J, rng: _with_norm(J, self.size)
        if kind == "random_update":
            return lambda step, J, rng: random_update(J, rng)
        if not self.schur:
            for J in self.matrices:
                with one_blas_thread(len(J)):
                    self.schur.append(Schur.of(J))
        return lambda step, J, rng: self.schur[step].rebuilt(kind, rng)


def random_update(
    J: Float[np.ndarray, "d d"], rng: np.random.Generator
) -> Float[np.ndarray, "d d"]:
    """Identity plus Gaussian entries of the norm of ``J − I``."""
    identity = np.eye(len(J))
    noise = rng.standard_normal(J.shape)
    return np.asarray(identity + noise * (np.linalg.norm(J - identity) / np.linalg.norm(noise)))


def _common_norm(matrices: Blocks) -> float:
    norms = [float(np.linalg.norm(J - np.eye(len(J)))) for J in matrices]
    if min(norms) == 0:
        raise InputError(
            f"Block {norms.index(0.0)} is the identity: its update has no direction to scale. "
            "Leave that layer, or kind 'fixed_skip', out."
        )
    return math.exp(float(np.mean(np.log(norms))))


def _with_norm(J: Float[np.ndarray, "d d"], size: float) -> Float[np.ndarray, "d d"]:
    update = J - np.eye(len(J))
    return np.asarray(np.eye(len(J)) + update * (size / np.linalg.norm(update)))


def _range(
    ratio: Float[np.ndarray, " chain"], spread: Float[np.ndarray, " row"]
) -> tuple[float, float, str]:
    if len(ratio) >= _FEW:
        half = stats.t.ppf(0.975, len(ratio) - 1) * ratio.std(ddof=1) / math.sqrt(len(ratio))
        return ratio.mean() - half, ratio.mean() + half, "95 % interval over prompts"
    if len(spread) > len(ratio):
        return float(spread.min()), float(spread.max()), "range over seeds"
    return math.nan, math.nan, "one chain, nothing drawn" if len(ratio) == 1 else "too few prompts"
