"""Models to test theories on, made on the spot. Not imported by ``import tl_spectral``."""

from tl_spectral.testing.shared_weights import SharedWeightsToy, train_shared_weights

__all__ = ["SharedWeightsToy", "train_shared_weights"]
