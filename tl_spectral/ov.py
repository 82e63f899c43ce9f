"""OV circuits: what each head writes where it attends, from the weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tl_spectral.errors import InputError
from tl_spectral.model import ModelView
from tl_spectral.modes import dominant_modes
from tl_spectral.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_REAL = 1e-9  # |Im λ| below this share of max|λ| counts as real (float64 eigenvalues)


@dataclass(frozen=True, eq=False)
class PrincipalMode(Result):
    """Dominant mode of one layer's OV map under the iteration that is run.

    Attributes:
        eigenvalue: λ₁ of F (with ``Im λ₁ ≥ 0`` when complex).
        subspace: Orthonormal columns ``[d_model, 1]`` (real) or ``[d_model, 2]`` spanning
            (Re v, Im v) (complex), more if the eigenvalue is repeated; defined up to a rotation
            within it.
        gap: Ratio of the dominant modulus to that of the next mode, ≥ 1; its distance from 1 sets
            how fast the iteration aligns. ``None`` if there is no other mode.
        kind: ``"real"`` or ``"complex"``.
        skip: Whether dominance is by ``|1 + λ|`` (skip connection kept) or by ``|λ|``.
        layer: Layer.
    """

    eigenvalue: complex
    subspace: Float[Tensor, "d_model dim"]
    gap: float | None
    kind: str
    skip: bool
    layer: int


@dataclass(frozen=True, eq=False)
class OVCircuits(Result):
    """Per-head OV circuits ``W_V W_O`` of a model.

    Attributes:
        eigenvalues: The ``d_head`` eigenvalues that can differ from zero, per layer and head.
        copying_score: ``Σ Re λ / Σ |λ|`` in [−1, 1]: positive heads copy what they attend to,
            negative heads suppress it (Elhage et al. 2021, on the residual basis instead of the
            vocabulary). Baseline: 0 on average for random heads, standard deviation
            ``copying_score_sd``.
        copying_score_sd: Standard deviation of the copying score over random heads of this shape
            (64 draws of independent Gaussian ``W_V``, ``W_O``, fixed seed).
        rotation_index: ``Σ |Im λ| / Σ |λ|``; real Ginibre baseline 2/π ≈ 0.637.
        complex_fraction: Share of the ``d_head`` eigenvalues with ``|Im λ|`` above 1e-9 of the
            largest modulus; real Ginibre baseline ``1 − sqrt(2 / (π d_head))``.
        spectral_radius: Largest ``|λ|``.
        frobenius: ``‖W_V W_O‖_F``.
        W_V: Value weights, ``[layer, head, d_model, d_head]``, key-value heads repeated.
        W_O: Output weights, ``[layer, head, d_head, d_model]``.
        layers: Row ``i`` of the tensors belongs to layer ``layers[i]``.
    """

    eigenvalues: Complex[Tensor, "layer head d_head"]
    copying_score: Float[Tensor, "layer head"]
    copying_score_sd: float
    rotation_index: Float[Tensor, "layer head"]
    complex_fraction: Float[Tensor, "layer head"]
    spectral_radius: Float[Tensor, "layer head"]
    frobenius: Float[Tensor, "layer head"]
    W_V: Float[Tensor, "layer head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    layers: tuple[int, ...]

    def index(self, layer: int) -> int:
        """Row of a layer; ``InputError`` if it is not among :attr:`layers`."""
        if layer not in self.layers:
            raise InputError(f"Layer {layer} is not here; there are {list(self.layers)}.")
        return self.layers.index(layer)

    def layer_matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """``F_l = Σ_heads (W_V W_O)ᵀ``, column convention, float64 ([B] arXiv 2605.25619).

        Args:
            layer: Layer.

        Returns:
            The matrix that acts on column vectors: what the layer writes if every head attends to
            the state itself, norm gain and biases left out.
        """
        row = self.index(layer)
        summed = torch.einsum("hdk,hke->de", self.W_V[row].double(), self.W_O[row].double())
        return summed.T.contiguous()

    def principal(self, layer: int, skip: bool = True) -> PrincipalMode:
        """Dominant mode of a layer: of ``x + F x`` (argmax |1 + λ|) or of ``F x`` (argmax |λ|).

        Args:
            layer: Layer.
            skip: Whether the iteration keeps the skip connection.
        """
        first, *rest = dominant_modes(self.layer_matrix(layer), skip=skip, count=2)
        return PrincipalMode(
            eigenvalue=first.eigenvalue,
            subspace=first.subspace,
            gap=first.strength / rest[0].strength if rest and rest[0].strength > 0 else None,
            kind="complex" if first.rotates else "real",
            skip=skip,
            layer=layer,
            provenance=self.provenance,
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and head, each score with its random baseline."""
        import pandas as pd

        d_head = self.eigenvalues.shape[-1]
        rows = [
            {
                "layer": layer,
                "head": head,
                "copying_score": self.copying_score[row, head].item(),
                "rotation_index": self.rotation_index[row, head].item(),
                "complex_fraction": self.complex_fraction[row, head].item(),
                "spectral_radius": self.spectral_radius[row, head].item(),
                "frobenius": self.frobenius[row, head].item(),
                "baseline_copying_score": 0.0,
                "baseline_sd": self.copying_score_sd,
                "baseline_rotation_index": 2 / torch.pi,
                "baseline_complex_fraction": 1 - (2 / (torch.pi * d_head)) ** 0.5,
            }
            for row, layer in enumerate(self.layers)
            for head in range(self.eigenvalues.shape[1])
        ]
        return pd.DataFrame(rows)

    def modes_dataframe(self) -> pd.DataFrame:
        """One row per layer and dominance rule: the principal mode of the layer matrix."""
        import pandas as pd

        rows = []
        for layer in self.layers:
            norm = self.layer_matrix(layer).norm().item()
            for skip in (True, False):
                mode = self.principal(layer, skip=skip)
                rows.append(
                    {
                        "layer": layer,
                        "rule": "with_skip" if skip else "without_skip",
                        "eigenvalue_re": mode.eigenvalue.real,
                        "eigenvalue_im": mode.eigenvalue.imag,
                        "gap": mode.gap,
                        "kind": mode.kind,
                        "frobenius": norm,
                    }
                )
        return pd.DataFrame(rows)

    def plot(self, template: str | None = None) -> Figure:
        """Copying score by layer and head."""
        from tl_spectral.plots import ov_figure

        return ov_figure(self.copying_score, template=template)


def ov_circuits(model: Any, layers: Any = None) -> OVCircuits:
    """OV circuits of every head, by the ``d_head × d_head`` product.

    The non-zero eigenvalues of ``W_V W_O`` (``d_model × d_model``) are those of ``W_O W_V``
    (``d_head × d_head``), so no large matrix is formed. Computed in float64 from the weights as
    they are: the norm gain is folded in only if the model is in compatibility mode, and the
    provenance says which.

    Args:
        model: A ``TransformerBridge``.
        layers: Which layers; all by default.

    Returns:
        Eigenvalues and scores per layer and head.

    Raises:
        UnsupportedModelError: If a layer has no value and output weights per head.
    """
    view = ModelView(model)
    chosen = view.layers(layers)
    factors = [view.ov_factors(layer) for layer in chosen]
    W_V = torch.stack([v for v, _ in factors]).cpu()
    W_O = torch.stack([o for _, o in factors]).cpu()
    pairs = [(v.double(), o.double()) for v, o in zip(W_V, W_O, strict=True)]  # layer by layer
    eigenvalues = torch.stack([torch.linalg.eigvals(o @ v) for v, o in pairs])
    moduli = eigenvalues.abs()
    largest = moduli.amax(dim=-1, keepdim=True)
    # ‖W_V W_O‖² = tr(W_Vᵀ W_V · W_O W_Oᵀ): again d_head × d_head
    squared = torch.stack([torch.einsum("hij,hji->h", v.mT @ v, o @ o.mT) for v, o in pairs])
    return OVCircuits(
        eigenvalues=eigenvalues,
        copying_score=eigenvalues.real.sum(dim=-1) / moduli.sum(dim=-1),
        copying_score_sd=_random_copying_score_sd(W_V.shape[2], W_V.shape[3]),
        rotation_index=eigenvalues.imag.abs().sum(dim=-1) / moduli.sum(dim=-1),
        complex_fraction=(eigenvalues.imag.abs() > _REAL * largest).double().mean(dim=-1),
        spectral_radius=largest[..., 0],
        frobenius=squared.sqrt(),
        W_V=W_V,
        W_O=W_O,
        layers=chosen,
        provenance=view.provenance(options={"basis": f"residual, {view.weights} weights"}),
    )


def _random_copying_score_sd(d_model: int, d_head: int, draws: int = 64) -> float:
    generator = torch.Generator().manual_seed(0)
    shape = (draws, d_head, d_model)
    W_O = torch.randn(shape, generator=generator, dtype=torch.float64)
    W_V = torch.randn(shape, generator=generator, dtype=torch.float64).mT
    values = torch.linalg.eigvals(W_O @ W_V)
    scores: Tensor = values.real.sum(dim=-1) / values.abs().sum(dim=-1)
    return float(scores.std())
