"""Spectral geometry of transformer blocks, on TransformerLens."""

__version__ = "0.1.0"
