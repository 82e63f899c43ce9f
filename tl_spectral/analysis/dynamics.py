"""The power-method part of a run: do tokens tilt to each layer's mode, and where do they end?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.tasks import Row, records
from tl_spectral.consensus import simulate_power
from tl_spectral.model import ModelView
from tl_spectral.ov import OVCircuits
from tl_spectral.oversmoothing import oversmoothing
from tl_spectral.power import power_alignment
from tl_spectral.results import Result

_STARTS = ("random", "text")
_LEAST_TOKENS = 3  # two beside the first
_ATTENTION = ("real", "uniform", "identity")


@dataclass(frozen=True, eq=False)
class LayerMatrices(Result):
    """Spectra of the layer matrices F.

    Attributes:
        eigenvalues: All eigenvalues of each F.
        frobenius: ``‖F‖_F`` of each.
        layers: Row ``i`` belongs to layer ``layers[i]``.
    """

    eigenvalues: Complex[Tensor, "layer d_model"]
    frobenius: Float[Tensor, " layer"]
    layers: tuple[int, ...]


def layer_matrices(circuits: OVCircuits) -> LayerMatrices:
    """Eigenvalues and norm of every layer matrix.

    Args:
        circuits: The OV circuits of the layers.
    """
    norms = [circuits.layer_matrix(layer).norm() for layer in circuits.layers]
    return LayerMatrices(
        eigenvalues=torch.stack([circuits.layer_eigenvalues(layer) for layer in circuits.layers]),
        frobenius=torch.stack(norms),
        layers=circuits.layers,
        provenance=circuits.provenance,
    )


def alignment_rows(
    view: ModelView, texts: list[Int[Tensor, " pos"]], options: RunOptions
) -> list[Row]:
    """γ, ρ and the criterion by layer, with all controls.

    Args:
        view: The model.
        texts: Token ids whose every position is measured.
        options: Options of the run.
    """
    found = power_alignment(view.source, texts, layers=options.layers, seed=options.seed)
    return records(found.to_dataframe())


def oversmoothing_rows(
    view: ModelView, texts: list[Int[Tensor, " pos"]], options: RunOptions
) -> list[Row]:
    """How alike the tokens of a text are at every depth of the real model.

    Args:
        view: The model.
        texts: Token ids; those of fewer than three tokens say nothing about likeness.
        options: Options of the run.
    """
    long = [text for text in texts if len(text) >= _LEAST_TOKENS]
    if not long:
        return [{"reason": f"No text has {_LEAST_TOKENS} tokens, as the likeness of tokens needs."}]
    found = oversmoothing(view.source, long, layers=options.layers, seed=options.seed)
    table = found.to_dataframe().drop(columns="variant")
    table["n_texts"] = len(long)
    return records(table)


def consensus_rows(
    view: ModelView, texts: list[Int[Tensor, " pos"]], options: RunOptions
) -> list[Row]:
    """The paper's dynamics through the layers once: no FFN, no norm but the L2 one.

    Args:
        view: The model.
        texts: The first of them gives the tokens of one start; random ones give the other.
        options: Options of the run.
    """
    longest = max(texts, key=len)
    rows: list[Row] = []
    for start in _STARTS:
        for attention in _ATTENTION:
            found = simulate_power(
                view.source,
                x0=None if start == "random" else longest,
                attention=attention,
                layers=options.layers,
                n_tokens=len(longest),
                seed=options.seed,
            )
            key: dict[str, Any] = {"start": start, "attention": attention, "kind": found.kind}
            rows += [{**key, **row} for row in records(found.to_dataframe())]
    return rows
