"""Leading modes of a layer of a model, found once and kept until a weight is written to."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tl_spectral.arnoldi import FactoredMap, arnoldi_modes
from tl_spectral.model import ModelView
from tl_spectral.model.memo import remembered
from tl_spectral.modes import Mode, dominant_modes, layer_matrix
from tl_spectral.ov.layers import LARGE

_AT_LEAST = 5  # found at once, so that those who ask for one and for a few share the work


def leading_modes(
    view: ModelView, layer: int, *, skip: bool, fold: str = "none", count: int = 1
) -> tuple[Mode, ...]:
    """The leading modes of a layer's F, strongest first; at least ``count`` if there are so many.

    Args:
        view: The model.
        layer: Layer.
        skip: Order by ``|1 + λ|`` instead of ``|λ|``.
        fold: Gains folded into F, see :meth:`ModelView.ov_factors`.
        count: How many are needed.
    """
    count = max(count, _AT_LEAST)
    return remembered(
        view.model,
        f"{count} modes of layer {layer}, skip {skip}, fold {fold}",
        lambda: modes_of_factors(*view.ov_factors(layer, fold=fold), skip=skip, count=count),
    )


def modes_of_factors(
    W_V: Float[Tensor, "head d_model d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    *,
    skip: bool,
    count: int,
) -> tuple[Mode, ...]:
    """The leading modes of ``F = Σ (W_V W_O)ᵀ``: dense, or by Arnoldi from d = 2048 on."""
    if W_V.shape[1] >= LARGE:
        return arnoldi_modes(FactoredMap(W_V, W_O), skip=skip, count=count)
    return dominant_modes(layer_matrix(W_V, W_O), skip=skip, count=count)
