"""What :func:`tl_spectral.power_alignment` returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

COLUMNS = (
    "layer", "target", "tokens", "gamma_before", "gamma_after", "rho", "rho_low", "rho_high",
    "n_tokens", "chance", "dimension", "eigenvalue_re", "eigenvalue_im",
    "criterion", "criterion_left", "criterion_right", "predicted_rho",
)  # fmt: skip
MEASURES = ("gamma_before", "gamma_after", "rho", "rho_low", "rho_high")


@dataclass(frozen=True, eq=False)
class PowerAlignment(Result):
    """Alignment of tokens with each layer's dominant mode, before and after the layer.

    ``γ`` is the mean over tokens of ``|⟨x̂, v1⟩|`` (length of the projection on the plane if λ1 is
    complex), ``ρ`` the share of tokens whose alignment grows through the layer [B].

    Attributes:
        gamma_before: γ of ``resid_pre``, all text tokens, in the real model (norms, FFN and
            positions in place).
        gamma_after: γ of ``resid_post`` with the same v1.
        gamma_chance: γ of isotropic random vectors, in closed form.
        rho: Share of text tokens whose alignment grows; ½ is chance only for a direction that has
            nothing to do with the layer.
        rho_low: Lower end of ρ's 95 % interval (Wilson; tokens of one text count as dependent,
            by the variance between texts, where there are at least two).
        rho_high: Upper end.
        random_rho: ρ of isotropic random tokens through ``x + F x`` (``F x`` without skip): no
            attention, no FFN, no norm.
        criterion: Whether ``‖Mᵀv1‖ > ‖M‖_F/√d`` (M = I + F or F), which makes ``random_rho`` exceed
            ½ whatever the layer was trained for. For a subspace Q of m columns:
            ``‖MᵀQ‖_F/√m`` [ours].
        criterion_left: ``‖Mᵀv1‖``.
        criterion_right: ``‖M‖_F/√d``.
        predicted_rho: What ``random_rho`` should be, from M and v1 alone
            (:func:`tl_spectral.power.predicted_rho`).
        rows: All figures, see :meth:`to_dataframe`.
        layers: Row ``i`` of the tensors belongs to layer ``layers[i]``.
        n_tokens: Number of text tokens.
        n_texts: Number of texts.
        skip: Whether dominance is by ``|1 + λ|`` or ``|λ|``.
    """

    gamma_before: Float[Tensor, " layer"]
    gamma_after: Float[Tensor, " layer"]
    gamma_chance: Float[Tensor, " layer"]
    rho: Float[Tensor, " layer"]
    rho_low: Float[Tensor, " layer"]
    rho_high: Float[Tensor, " layer"]
    random_rho: Float[Tensor, " layer"]
    criterion: Bool[Tensor, " layer"]
    criterion_left: Float[Tensor, " layer"]
    criterion_right: Float[Tensor, " layer"]
    predicted_rho: Float[Tensor, " layer"]
    rows: tuple[Mapping[str, Any], ...]
    layers: tuple[int, ...]
    n_tokens: int
    n_texts: int
    skip: bool

    @property
    def controls(self) -> dict[str, dict[str, Float[Tensor, " layer"]]]:
        """Per control and measure, one value per layer; NaN where a layer lacks that control.

        Measures are those of all text tokens, and of random ones with the prefix ``random_``, and
        ``predicted_rho``. Controls: ``v2``, ``v3``, … (the next modes), ``other layer`` (v1 of the
        next layer), ``random F`` (Gaussian F of equal norm) and ``rotated F`` (``U F``, U a random
        rotation: the singular values are kept, what is written is no longer matched with what is
        read). Of the last two their own v1, and random tokens pass through that F; text tokens
        pass through the model all the same.
        """
        names = dict.fromkeys(row["target"] for row in self.rows if row["target"] != "v1")
        return {
            name: {
                prefix + measure: torch.tensor(
                    [self._value(layer, name, tokens, measure) for layer in self.layers],
                    dtype=torch.float64,
                )
                for prefix, tokens in (("", "all"), ("random_", "random"))
                for measure in MEASURES[:3]
            }
            | {
                "predicted_rho": torch.tensor(
                    [self._value(layer, name, "random", "predicted_rho") for layer in self.layers],
                    dtype=torch.float64,
                )
            }
            for name in names
        }

    def _value(self, layer: int, target: str, tokens: str, measure: str) -> float:
        for row in self.rows:
            if (row["layer"], row["target"], row["tokens"]) == (layer, target, tokens):
                return float(row[measure])
        return math.nan

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer × target × tokens.

        ``target`` is ``v1`` or a control; ``tokens`` is ``all``, ``first`` (first position of each
        text), ``rest``, a class of the option ``classes``, or ``random`` (isotropic, through the
        linear map alone). ``chance`` is the γ of random vectors for a subspace of that dimension.
        The criterion and ``predicted_rho`` are facts about the target, whatever the tokens.
        """
        import pandas as pd

        return pd.DataFrame(list(self.rows), columns=list(COLUMNS))

    def plot(self, template: str | None = None) -> Figure:
        """γ and ρ by layer with controls, and both sides of the criterion."""
        from tl_spectral.plots import power_figure

        return power_figure(self.to_dataframe(), template=template)
