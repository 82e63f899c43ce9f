"""OV circuits of every head of a model with random weights, beside TransformerLens' own.

``FactoredMatrix.eigenvalues`` gives the eigenvalues alone, in float32; :func:`ov_circuits` is a
whole call in float64, with singular values, scores and their random baselines.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.jacobian import SHAPES, bridged, llama
from benchmarks.measure import Row, Work, measured


def rows(*, small: bool) -> list[Row]:
    """The table; ``small`` is a tiny model."""
    shape, layers = ("tiny", 2) if small else ("smollm2-135m", 30)
    case = f"{shape}, {layers} layers of {SHAPES[shape]['heads']} heads"
    return [
        measured(
            prepare, table="OV circuits", case=case, method=method, ours=prepare is ours,
            repeat=3, shape=shape, layers=layers,
        )
        for method, prepare in (
            ("tl_spectral.ov_circuits", ours),
            ("transformer_lens FactoredMatrix.eigenvalues", factored_matrix),
            ("eigenvalues of W_V W_O, d × d, one head (times all)", naive),
        )
    ]  # fmt: skip


def ours(shape: str, layers: int) -> Work:
    """A whole call of this library."""
    import tl_spectral as tls

    model = bridged(llama(shape, layers, 1)[0])
    tls.ov_circuits(model, [0])  # the model's facts are found once, at the first call
    return lambda: f"{tls.ov_circuits(model).eigenvalues.shape[:2].numel()} heads"


def factored_matrix(shape: str, layers: int) -> Work:
    """The eigenvalues of every head's ``W_V W_O`` by TransformerLens."""
    from transformer_lens import FactoredMatrix

    W_V, W_O = _factors(shape, layers)
    return lambda: f"{FactoredMatrix(W_V, W_O).eigenvalues.shape[:2].numel()} heads"


def naive(shape: str, layers: int) -> Work:
    """The ``d × d`` matrix of one head; the note says how many heads there are."""
    W_V, W_O = _factors(shape, layers)

    def work() -> str:
        torch.linalg.eigvals(W_V[0, 0] @ W_O[0, 0])
        return f"1 of {W_V.shape[:2].numel()} heads"

    return work


def _factors(shape: str, layers: int) -> tuple[Any, Any]:
    from tl_spectral.model import ModelView

    view = ModelView(bridged(llama(shape, layers, 1)[0]))
    pairs = [view.ov_factors(layer) for layer in range(layers)]
    W_V, W_O = (torch.stack(part) for part in zip(*pairs, strict=True))
    return W_V, W_O
