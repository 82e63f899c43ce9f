"""What is put into a layer: a rank-1 change of F, or a constant vector after it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView
from tl_spectral.model.edits import attention_plus, output_weight_plus, residual_plus
from tl_spectral.modes import layer_matrix
from tl_spectral.steering.alpha import GapSolver

_UNREACHABLE = 1e-3  # share of a direction below which an edit would be all cancellation


@dataclass(frozen=True)
class RankOne:
    """``F + strength · write readᵀ``; ``coefficients`` are its reading half in W_O, if it is there.

    Attributes:
        write: What is written, unit length.
        read: What is read.
        strength: α.
        coefficients: Reading half of ``ΔW_O``, ``[head · d_head]``; ``None`` for a hook.
    """

    write: Float[Tensor, " d_model"]
    read: Float[Tensor, " d_model"]
    strength: float
    coefficients: Float[Tensor, " head_d_head"] | None

    @property
    def delta(self) -> Float[Tensor, "d_model d_model"]:
        """What it adds to F."""
        return self.strength * torch.outer(self.write, self.read)

    def apply(self, view: ModelView, layer: int) -> AbstractContextManager[None]:
        """The model with the edit, for as long as the context lasts."""
        if self.coefficients is None:
            return attention_plus(view, layer, self.strength * self.read, self.write)
        change = self.strength * torch.outer(self.coefficients, self.write)
        return output_weight_plus(view, layer, change)


@dataclass(frozen=True)
class Shift:
    """A vector added to ``resid_post`` at every position.

    Attributes:
        vector: The vector.
    """

    vector: Float[Tensor, " d_model"]

    @property
    def strength(self) -> float:
        """Its length."""
        return float(self.vector.norm())

    def apply(self, view: ModelView, layer: int) -> AbstractContextManager[None]:
        """The model with the vector added, for as long as the context lasts."""
        return residual_plus(view, layer, self.vector)


class Editor:
    """Makes rank-1 edits of one layer, through W_O or a hook.

    Args:
        view: The model.
        layer: The layer.
        method: ``"weights"`` or ``"hook"``.
        cutoff: Singular values of the value map below this share of the largest are not used.
        skip: Dominance by ``|1 + λ|`` instead of ``|λ|``.

    Raises:
        UnsupportedModelError: If the layer has no value and output weights per head.
    """

    def __init__(
        self, view: ModelView, layer: int, *, method: str, cutoff: float, skip: bool
    ) -> None:
        W_V, W_O = view.ov_factors(layer)
        self.layer, self.method, self.skip = layer, method, skip
        self.F = layer_matrix(W_V, W_O)
        self.weight_norm = W_O.double().norm().item()
        self._values = W_V.double().cpu().transpose(0, 1).flatten(1)  # [d_model, head · d_head]
        self._cutoff = max(cutoff, 1e-9)

    @cached_property
    def _inverse(self) -> Tensor:
        inverse: Tensor = torch.linalg.pinv(self._values, rtol=self._cutoff)
        return inverse

    def reading(self, direction: Tensor) -> tuple[Tensor, Tensor | None]:
        """The part of a direction that can be read, and how from the heads' values."""
        if self.method == "hook":
            return direction, None
        coefficients = self._inverse @ direction
        return self._values @ coefficients, coefficients

    def solver(self, w: Tensor) -> GapSolver:
        """α by gap for an edit towards w.

        Raises:
            InputError: If the value map cannot read the direction.
        """
        read, _ = self.reading(w)
        if read @ w < _UNREACHABLE:
            raise InputError(
                f"The value map of layer {self.layer} reads only {(read @ w).item():.1e} of this "
                "direction, so no edit of W_O can make it dominant. Use method='hook'."
            )
        return GapSolver(self.F, w, read, self.skip)

    def edit(self, write: Tensor, read: Tensor, strength: float) -> RankOne:
        """``strength · write readᵀ``, with as much of ``read`` as can be read."""
        reached, coefficients = self.reading(read)
        return RankOne(write, reached, strength, coefficients)

    def of_size(self, write: Tensor, read: Tensor, size: float) -> RankOne:
        """The same with ``‖ΔF‖_F = size``."""
        reached, _ = self.reading(read)
        return self.edit(write, read, size / reached.norm().item())
