"""The Jacobian of a block as a frozen result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


@dataclass(frozen=True, eq=False)
class BlockJacobian(Result):
    """Derivative of one residual state with respect to another, ``[out, in]``.

    Attributes:
        matrix: ``J[i, j] = ∂ target_i / ∂ source_j``; rows are output coordinates. The mean over
            prompts if there were several.
        layer: Layer of the source state.
        stop: One past the layer of the target state (``layer + 1`` for a single block).
        pos: Position of the target state.
        source_pos: Position of the source state.
        context: ``"full"`` (other positions' keys and values held fixed) or ``"isolated"``
            (the block applied to that one token alone).
        scope: ``"block"``, ``"attn"``, ``"mlp"`` or ``"span"``.
        n_samples: Number of prompts averaged over.
        norm_gain: Gain of the norm that reads the source state, if one does.
        engine: ``"fast"`` (one query against fixed keys and values) or ``"reference"``
            (automatic differentiation of the whole forward pass).
        engine_reason: Why that engine.
    """

    matrix: Float[Tensor, "d_model d_model"]
    layer: int
    stop: int
    pos: int
    source_pos: int
    context: str
    scope: str
    n_samples: int
    norm_gain: Float[Tensor, " d_model"] | None
    engine: str
    engine_reason: str

    @property
    def update(self) -> Float[Tensor, "d_model d_model"]:
        """``R = J − I``: the skip connection removed (no skip joins two positions)."""
        if self.pos != self.source_pos:
            return self.matrix
        identity = torch.eye(len(self.matrix), dtype=self.matrix.dtype, device=self.matrix.device)
        return self.matrix - identity

    def to_dataframe(self) -> pd.DataFrame:
        """One row per operator (J, R) and metric, each with its random baseline."""
        import pandas as pd

        from tl_spectral.spectrum import block_spectra

        frames = []
        for (operator, units), spectrum in block_spectra(self).items():
            frame = spectrum.to_dataframe()
            frame.insert(0, "layer", self.layer)
            frame.insert(1, "operator", operator)
            frame.insert(2, "units", units)
            frames.append(frame)
        table: pd.DataFrame = pd.concat(frames, ignore_index=True)
        return table

    def plot(self) -> Figure:
        """Eigenvalues of J in the complex plane, with the unit circle."""
        from tl_spectral.spectrum import spectrum

        return spectrum(self).plot()
