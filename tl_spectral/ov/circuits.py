"""Every head's OV circuit and every layer's OV map, with what can be read off them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from tl_spectral.arnoldi import FactoredMap, arnoldi_modes
from tl_spectral.errors import InputError
from tl_spectral.model import ModelView
from tl_spectral.model.view import Fold
from tl_spectral.model.vocabulary import vocabulary_map
from tl_spectral.modes import layer_matrix
from tl_spectral.ov import tables
from tl_spectral.ov.factors import checked_factors, is_factored
from tl_spectral.ov.heads import (
    copying_sd,
    is_degenerate,
    measure_heads,
    random_heads,
    random_vocabulary_sd,
    rank_tolerance,
    vocabulary_scores,
)
from tl_spectral.ov.layers import (
    DenseLayer,
    Method,
    PrincipalMode,
    as_results,
    checked_method,
    layer_eigenvalues,
)
from tl_spectral.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


@dataclass(frozen=True, eq=False)
class OVCircuits(Result):
    """Per-head OV circuits ``W_V W_O`` of a model.

    A measure that is 0/0 (a head that is zero, or has no eigenvalue but zero) is NaN, with a note
    in :meth:`to_dataframe`.

    Attributes:
        eigenvalues: The ``d_head`` eigenvalues that can differ from zero, per layer and head.
        copying_score: ``Σ Re λ / Σ |λ|`` in [−1, 1]: positive heads copy what they attend to,
            negative heads suppress it (Elhage et al. 2021, on the residual basis instead of the
            vocabulary). Baseline: 0 on average for random heads, standard deviation
            ``copying_score_sd``.
        copying_score_sd: Standard deviation of the copying score over random heads of this shape
            (independent Gaussian ``W_V``, ``W_O``), about ``1.5 / d_head``: single-ring theorem,
            within 2 % of draws.
        rotation_index: ``Σ |Im λ| / Σ |λ|``; real Ginibre baseline 2/π ≈ 0.637.
        complex_fraction: Share of the ``d_head`` eigenvalues with ``|Im λ|`` above 1e-9 of the
            largest modulus; real Ginibre baseline ``1 − sqrt(2 / (π d_head))``.
        spectral_radius: Largest ``|λ|``; baseline ``frobenius / sqrt(d_model)``, the edge of the
            spectrum of Gaussian heads of that norm (single-ring theorem).
        frobenius: ``‖W_V W_O‖_F``.
        symmetry_score: ``tr(M²) / ‖M‖_F²`` of ``M = W_V W_O``, in [−1, 1]: 1 symmetric, −1
            antisymmetric; ``tr(M²) = tr((W_O W_V)²)``. Baseline ``1 / d_model``.
        rank: Number of singular values of ``W_V W_O`` above ``rank_tolerance`` of the largest;
            ``d_head`` for random heads.
        rank_tolerance: ``max(d_model ε, 1e-6)``, ε the rounding unit of the weights.
        effective_rank: ``exp(−Σ p ln p)``, ``p = σ²/Σσ²``; random heads: see :attr:`baseline`.
        leading_gap: Ratio of the largest modulus to the next (a conjugate pair counts as one), ≥ 1;
            infinite if there is no other.
        eigenvalue_share: ``Σ|λ| / Σσ``, in [0, 1] (Weyl 1949): 1 for a normal circuit, near 0 where
            a head writes elsewhere than it reads, and the copying score divides rounding by
            rounding.
        vocab_copying_score: The copying score of ``W_E W_V W_O W_U``, by its ``d_head`` eigenvalues
            (Elhage et al. 2021); ``None`` unless it was asked for.
        vocab_copying_score_sd: Its standard deviation over Gaussian heads between this model's own
            embedding and unembedding (64 draws, fixed seed); their mean is 0.
        W_V: Value weights, ``[layer, head, d_model, d_head]``, key-value heads repeated, norms
            folded as ``fold`` says.
        W_O: Output weights, ``[layer, head, d_head, d_model]``, likewise.
        layers: Row ``i`` of the tensors belongs to layer ``layers[i]``.
        fold: What was asked to be folded in: ``"none"``, ``"norm"`` or ``"norm+post"``.
        folded: What was there to be folded in, in any of the layers: ``"norm"`` (the norm that
            attention reads through), ``"post"`` (the norm on its output).
    """

    eigenvalues: Complex[Tensor, "layer head d_head"]
    copying_score: Float[Tensor, "layer head"]
    copying_score_sd: float
    rotation_index: Float[Tensor, "layer head"]
    complex_fraction: Float[Tensor, "layer head"]
    spectral_radius: Float[Tensor, "layer head"]
    frobenius: Float[Tensor, "layer head"]
    symmetry_score: Float[Tensor, "layer head"]
    rank: Float[Tensor, "layer head"]
    rank_tolerance: float
    effective_rank: Float[Tensor, "layer head"]
    leading_gap: Float[Tensor, "layer head"]
    eigenvalue_share: Float[Tensor, "layer head"]
    vocab_copying_score: Float[Tensor, "layer head"] | None
    vocab_copying_score_sd: float | None
    W_V: Float[Tensor, "layer head d_model d_head"]
    W_O: Float[Tensor, "layer head d_head d_model"]
    layers: tuple[int, ...]
    fold: str
    folded: tuple[str, ...]

    @property
    def antisymmetric_energy(self) -> Float[Tensor, "layer head"]:
        """``‖(M − Mᵀ)/2‖² / ‖M‖²`` in [0, 1], ``(1 − symmetry_score) / 2``; baseline ½ − 1/(2d)."""
        return (1 - self.symmetry_score) / 2

    @property
    def degenerate(self) -> Bool[Tensor, "layer head"]:
        """Heads of which something cannot be named reliably.

        Either the two leading moduli are within 1 % (which eigenvalue leads is an accident; so for
        a share ``baseline["degenerate"]`` of random heads), or ``eigenvalue_share`` is below 1e-3
        (the sign of the copying score is one).
        """
        return is_degenerate(self.leading_gap, self.eigenvalue_share)

    @property
    def baseline(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each measure over Gaussian heads of this shape.

        64 draws, fixed seed; ``spectral_radius`` is per ``frobenius``.
        """
        drawn = dict(random_heads(*self.W_V.shape[2:]))
        return drawn | {"copying_score": (0.0, self.copying_score_sd)}

    def index(self, layer: int) -> int:
        """Row of a layer; ``InputError`` if it is not among :attr:`layers`."""
        if layer not in self.layers:
            raise InputError(f"Layer {layer} is not here; there are {list(self.layers)}.")
        return self.layers.index(layer)

    def factored(self, layer: int | None = None, head: int | None = None) -> Any:
        """``W_V W_O`` as TransformerLens' ``FactoredMatrix``.

        Args:
            layer: Layer; all by default.
            head: Head; all by default.

        Returns:
            A ``FactoredMatrix`` ``[layer, head, d_model, d_model]``, less what was chosen.

        Raises:
            InputError: If there is no such layer or head.
        """
        from transformer_lens import FactoredMatrix

        n_heads = self.W_V.shape[1]
        if head is not None and head not in range(n_heads):
            raise InputError(f"head {head} does not exist: there are {n_heads}, from 0.")
        rows = slice(None) if layer is None else self.index(layer)
        columns = slice(None) if head is None else head
        return FactoredMatrix(self.W_V[rows, columns], self.W_O[rows, columns])

    # ------------------------------------------------------------------ layer matrices

    def layer_matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """``F_l = Σ_heads (W_V W_O)ᵀ``, column convention, float64 ([B] arXiv 2605.25619).

        Args:
            layer: Layer.

        Returns:
            The matrix that acts on column vectors: what the layer writes if every head attends to
            the state itself, biases left out, norms as :attr:`fold` says.
        """
        row = self.index(layer)
        return layer_matrix(self.W_V[row], self.W_O[row])

    def layer_eigenvalues(self, layer: int) -> Complex[Tensor, " d_model"]:
        """All ``d_model`` eigenvalues of ``F_l``, in no order; found once per layer.

        A random F of the same norm fills the disc of radius ``‖F‖_F / sqrt(d_model)``.

        Args:
            layer: Layer.
        """
        row = self.index(layer)
        if row not in self._spectra:
            self._spectra[row] = layer_eigenvalues(self.layer_matrix(layer))
        return self._spectra[row]

    def principal(
        self, layer: int, skip: bool = True, *, method: Method | str = "auto"
    ) -> PrincipalMode:
        """Dominant mode of a layer: of ``x + F x`` (argmax |1 + λ|) or of ``F x`` (argmax |λ|).

        Args:
            layer: Layer.
            skip: Whether the iteration keeps the skip connection.
            method: As in :meth:`modes`.
        """
        return self.modes(layer, skip, 1, method=method)[0]

    def modes(
        self, layer: int, skip: bool = True, k: int = 3, *, method: Method | str = "auto"
    ) -> tuple[PrincipalMode, ...]:
        """The leading modes of a layer, strongest first.

        Args:
            layer: Layer.
            skip: Whether the iteration keeps the skip connection.
            k: How many modes (conjugate pairs and repeated eigenvalues count as one).
            method: ``"dense"``: one eigendecomposition of ``F_l``, shared by both rules.
                ``"arnoldi"``: Krylov iteration (ARPACK) on the factors, for wide models; each mode
                says its residual. ``"auto"``: dense below d_model = 2048.

        Returns:
            k modes, fewer if F has fewer.

        Raises:
            InputError: If the layer is not here, or for options out of range.
            TLSpectralError: If Arnoldi does not converge.
        """
        row, d = self.index(layer), self.W_V.shape[2]
        W_V, W_O = self.W_V[row], self.W_O[row]
        method = checked_method(method, k, d)
        if method == "arnoldi":
            F = FactoredMap(W_V, W_O)
            found = arnoldi_modes(F, skip=skip, count=k + 1)
            images = [torch.from_numpy(F.forward(mode.subspace.numpy())) for mode in found[:k]]
        else:
            dense = self._dense(row)
            found = dense.modes(skip, k + 1)
            images = [dense.F @ mode.subspace for mode in found[:k]]
        return as_results(
            found, images, skip=skip, layer=layer, method=method, provenance=self.provenance
        )

    @cached_property
    def _spectra(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _latest(self) -> dict[int, DenseLayer]:
        return {}

    def _dense(self, row: int) -> DenseLayer:
        """The decomposition of a layer; only the latest is kept (its vectors fill d² complex)."""
        if row not in self._latest:
            self._latest.clear()
            self._latest[row] = DenseLayer(self.W_V[row], self.W_O[row])
            self._spectra[row] = self._latest[row].values
        return self._latest[row]

    # ------------------------------------------------------------------ tables and figures

    def to_dataframe(self) -> pd.DataFrame:
        """One row per layer and head: each score with its random baseline, and a note."""
        return tables.heads_table(self)

    def modes_dataframe(self, k: int = 1, *, method: Method | str = "auto") -> pd.DataFrame:
        """One row per layer, dominance rule and mode of the layer matrix.

        ``baseline_strength`` is the edge of the spectrum of a random F of the same norm: ``r`` or,
        with skip, ``1 + r``, with ``r = ‖F‖_F / sqrt(d_model)`` (circular law). A missing ``gap``
        or ``condition`` is explained in ``note``.

        Args:
            k: Modes per layer and rule.
            method: As in :meth:`modes`.
        """
        return tables.modes_table(self, k, method)

    def plot(self, template: str | None = None) -> Figure:
        """Copying score by layer and head."""
        from tl_spectral.plots import ov_figure

        return ov_figure(self.copying_score, template=template)


def ov_circuits(
    model: Any,
    layers: Sequence[int] | None = None,
    *,
    fold: Fold | str = "none",
    vocabulary: bool = False,
) -> OVCircuits:
    """OV circuits of every head, by the ``d_head × d_head`` product.

    The non-zero eigenvalues of ``W_V W_O`` (``d_model × d_model``) are those of ``W_O W_V``
    (``d_head × d_head``), so no large matrix is formed. Computed in float64 on the CPU. The
    provenance says in which basis.

    Args:
        model: A ``TransformerBridge`` or ``HookedAlbert``; or a TransformerLens ``FactoredMatrix``
            ``[layer, head, d, d]`` (such as ``model.OV``), ``[head, d, d]`` or ``[d, d]``.
        layers: Which layers; all by default.
        fold: ``"none"``: the weights as they are (the norm is in them only if the model is in
            compatibility mode). ``"norm"``: ``W_V → N W_V``, N the linear part of the norm that
            attention reads through (gain; centring too for LayerNorm), with the eigenvalues of
            compatibility mode. ``"norm+post"``: also ``W_O → W_O N'``, N' of the norm on the
            attention branch (Gemma 2 and 3, OLMo 2). A model without such a norm: nothing happens,
            and :attr:`OVCircuits.folded` says so.
        vocabulary: Also score ``W_E W_V W_O W_U``; positions and norms on the embedding are left
            out, the last norm is folded into ``W_U`` unless ``fold="none"``. Costs one
            ``d_model × d_vocab × d_model`` product.

    Returns:
        Eigenvalues and scores per layer and head.

    Raises:
        InputError: For options out of range, or a factored matrix that is not square or finite.
        UnsupportedModelError: If a layer has no value and output weights per head, or the model no
            linear way from the last state to the vocabulary.
    """
    through = None
    if is_factored(model):
        chosen, factors = checked_factors(model, layers, fold, vocabulary)
        folded: tuple[str, ...] = ()
        provenance = Provenance(options={"fold": "none"})
    else:
        view = ModelView(model)
        chosen = view.layers(layers)
        names = {name for layer in chosen for name in view.folded(layer, fold)}
        folded = tuple(name for name in ("norm", "post") if name in names)
        factors = [view.ov_factors(layer, fold) for layer in chosen]
        if vocabulary:
            through = vocabulary_map(view, fold)
        provenance = view.provenance(
            options={"basis": f"residual, {view.weights} weights", "fold": fold}
        )
    W_V = torch.stack([v for v, _ in factors]).cpu()
    W_O = torch.stack([o for _, o in factors]).cpu()
    tolerance = rank_tolerance(W_V)
    eigenvalues, measures, scores = [], [], []
    for one, other in zip(W_V, W_O, strict=True):  # layer by layer: float64 copies stay small
        v, o = one.double(), other.double()
        values, found = measure_heads(v, o, tolerance)
        eigenvalues.append(values)
        measures.append(found)
        if through is not None:
            scores.append(vocabulary_scores(v, o, through))
    d_model, d_head = W_V.shape[2:]
    return OVCircuits(
        eigenvalues=torch.stack(eigenvalues),
        **{name: torch.stack([found[name] for found in measures]) for name in measures[0]},
        copying_score_sd=copying_sd(d_model, d_head),
        rank_tolerance=tolerance,
        vocab_copying_score=torch.stack(scores) if scores else None,
        vocab_copying_score_sd=None if through is None else random_vocabulary_sd(through, d_head),
        W_V=W_V,
        W_O=W_O,
        layers=chosen,
        fold=str(fold),
        folded=folded,
        provenance=provenance,
    )
