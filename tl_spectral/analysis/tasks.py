"""The independent pieces of work of a run, and what each leaves behind."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_spectral.analysis.options import RunOptions
from tl_spectral.bridges import bridge_units
from tl_spectral.capture import ResidualStates
from tl_spectral.chain import chain
from tl_spectral.communities import communities
from tl_spectral.coupling import CouplingResult, coupling
from tl_spectral.errors import TLSpectralWarning
from tl_spectral.graph import unit_graph
from tl_spectral.results import Provenance, Result
from tl_spectral.spectrum import METRICS, Spectrum, block_spectra

Row = dict[str, Any]
CHAIN_SIGMAS = 5


@dataclass(frozen=True, eq=False)
class LayerChunk(Result):
    """Jacobians of one layer over a chunk of prompts.

    Attributes:
        jacobian_sum: Sum over the chunk, float64.
        update_norms: ``‖R‖_F`` of each prompt.
        log_gains: Log gain of each unit relative to the median, of each prompt's J and R.
        rows: Spectra of the prompts that are decomposed one by one.
        eigenvalues: Eigenvalues of the first such prompt's J, for the picture.
    """

    jacobian_sum: Float[Tensor, "d_model d_model"]
    update_norms: Float[Tensor, " sample"]
    log_gains: Float[Tensor, "sample operator=2 d_model"]
    rows: tuple[Row, ...]
    eigenvalues: Complex[Tensor, " d_model"] | None


@dataclass(frozen=True, eq=False)
class Rows(Result):
    """A piece of a table."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, eq=False)
class LayerGraph(Result):
    """Unit graph of one layer, its communities, bridges and coupling.

    Attributes:
        row: Smaller unit index of each edge; with ``col`` and ``weight`` the sparse adjacency.
        col: Larger unit index of each edge.
        weight: Weight of each edge.
        units: One row per unit.
        community: The row of the communities table.
    """

    row: Int[Tensor, " edge"]
    col: Int[Tensor, " edge"]
    weight: Float[Tensor, " edge"]
    units: tuple[Row, ...]
    community: Row


def records(table: pd.DataFrame) -> list[Row]:
    """Rows of a table as dictionaries."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def spectrum_rows(
    matrix: Float[Tensor, "d_model d_model"],
    scale: Float[Tensor, " d_model"] | None,
    key: Row,
) -> tuple[list[Row], Complex[Tensor, " d_model"]]:
    """Every metric of J and R, in raw and natural units, and the eigenvalues of J.

    Args:
        matrix: J.
        scale: Standard deviation per coordinate, for the natural units.
        key: Columns that identify the rows.
    """
    spectra = block_spectra(matrix, scale)
    rows = [
        {**key, "operator": operator, "units": units, **metric_row(spectrum, metric)}
        for (operator, units), spectrum in spectra.items()
        for metric in METRICS
    ]
    return rows, spectra[("J", "raw")].eigenvalues


def metric_row(spectrum: Spectrum, metric: str) -> Row:
    """One metric of one spectrum beside its references."""
    skip = spectrum.skip_baseline or {}
    return {
        "metric": metric,
        "value": getattr(spectrum, metric),
        "baseline": spectrum.baseline.get(metric),
        "skip_baseline": skip.get(metric),
    }


def chain_rows(
    matrices: Any, scales: list[Tensor] | None, layers: tuple[int, ...], key: Row
) -> list[Row]:
    """Effective rank and its kin of the product of block Jacobians at every depth.

    Args:
        matrices: J of consecutive layers, first to last.
        scales: Natural units: standard deviations at the input of each layer, and at the output of
            the last; ``None`` for raw units.
        layers: The layers.
        key: Columns that identify the rows.
    """
    result = chain(matrices, k=CHAIN_SIGMAS, scales=scales)
    return [
        {
            **key,
            "layer": layer,
            "effective_rank": result.effective_rank[depth].item(),
            "participation_ratio": result.participation_ratio[depth].item(),
            "log_frobenius": result.log_frobenius[depth].item(),
            "resolved_rank": int(result.resolved_rank[depth]),
            **{
                f"log_sigma_{k + 1}": result.log_singular_values[depth, k].item()
                for k in range(min(CHAIN_SIGMAS, result.log_singular_values.shape[1]))
            },
        }
        for depth, layer in enumerate(layers)
    ]


def layer_graph(
    states: ResidualStates,
    log_gains: Float[Tensor, "operator=2 d_model"],
    layer: int,
    options: RunOptions,
    provenance: Provenance,
) -> tuple[LayerGraph, CouplingResult]:
    """Graph, communities, bridges and coupling of one layer.

    Args:
        states: States of that layer (others may be absent).
        log_gains: Log gain of each unit in J and in R, the mean over prompts.
        layer: Layer.
        options: Options of the run.
        provenance: Where it comes from.
    """
    with warnings.catch_warnings():
        # Said once for the whole run, before it begins.
        warnings.simplefilter("ignore", TLSpectralWarning)
        graph = unit_graph(states, layer=layer, top_k=options.top_k)
        groups = communities(
            graph,
            resolution=options.resolution,
            runs=options.louvain_runs,
            seed=options.seed,
        )
        bridges = bridge_units(graph, groups)
        result = coupling(
            log_gains[0], graph, groups, permutations=options.permutations, seed=options.seed
        )
    table = bridges.to_dataframe()
    table["std"] = states.scale(layer).tolist()
    table["log_gain_J"], table["log_gain_R"] = log_gains.tolist()
    community = {
        "layer": layer,
        "n_communities": groups.n_communities,
        "modularity": groups.modularity,
        "modularity_sd": groups.modularity_std,
        "null_mean": groups.null_mean,
        "null_sd": groups.null_std,
        "z_score": groups.z_score,
        "stability_ari": groups.stability_ari,
        "n_isolated": groups.n_isolated,
        "n_edges": graph.n_edges,
    }
    units = [{"layer": layer, **row} for row in records(table)]
    summary = LayerGraph(
        row=graph.row,
        col=graph.col,
        weight=graph.weight,
        units=tuple(units),
        community=community,
        provenance=provenance,
    )
    return summary, result


def skip_matched_chain(
    update_norms: Float[Tensor, " layer"], d_model: int, layers: tuple[int, ...], seed: int
) -> list[Row]:
    """The funnel that the skip connection and ‖R‖ alone would make.

    Each block is replaced by ``I + G`` with G an iid Gaussian matrix of the block's own ``‖R‖_F``.

    Args:
        update_norms: Mean ``‖R‖_F`` of each layer.
        d_model: Width.
        layers: The layers.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    identity = torch.eye(d_model, dtype=torch.float64)

    def random_blocks() -> Any:
        for norm in update_norms.double():
            noise = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)
            yield identity + noise * (norm / noise.norm())

    return chain_rows(random_blocks(), None, layers, {})
