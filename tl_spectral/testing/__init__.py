"""Models and data with a known answer, made on the spot. Not imported by ``import tl_spectral``."""

from tl_spectral.testing.planted_activations import PlantedActivations, planted_activations
from tl_spectral.testing.planted_blocks import PlantedBlocks, rotating_blocks
from tl_spectral.testing.planted_coupling import PlantedCoupling, planted_coupling
from tl_spectral.testing.shared_weights import SharedWeightsToy, train_shared_weights
from tl_spectral.testing.toy_gpt import TinyGPT, train_tiny_gpt

__all__ = [
    "PlantedActivations",
    "PlantedBlocks",
    "PlantedCoupling",
    "SharedWeightsToy",
    "TinyGPT",
    "planted_activations",
    "planted_coupling",
    "rotating_blocks",
    "train_shared_weights",
    "train_tiny_gpt",
]
