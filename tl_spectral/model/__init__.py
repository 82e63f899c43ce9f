"""The seam: everything that tl_spectral knows about TransformerLens lives in this package."""

from tl_spectral.model.loading import (
    ModelEntry,
    available_models,
    boot_albert,
    load_model,
    reinitialised,
)
from tl_spectral.model.shuffled import weight_shuffled
from tl_spectral.model.view import ModelView, Site

__all__ = [
    "ModelEntry",
    "ModelView",
    "Site",
    "available_models",
    "boot_albert",
    "load_model",
    "reinitialised",
    "weight_shuffled",
]
