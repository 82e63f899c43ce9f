"""The pipeline: capture → Jacobians → spectra → chain → OV → graph → bridges → coupling → words."""

from tl_spectral.analysis.result import AnalysisResult, load
from tl_spectral.analysis.run import analyze

__all__ = ["AnalysisResult", "analyze", "load"]
