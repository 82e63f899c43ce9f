"""Null models: what a number would be without the thing it is said to show."""

from tl_spectral.controls.activations import PhaseRandomised, SampleShuffled
from tl_spectral.controls.base import Null
from tl_spectral.controls.comparison import NullComparison, compare_with_null
from tl_spectral.controls.graphs import Rewired, ShuffledWeights
from tl_spectral.controls.matrices import Gaussian, Operated, RandomBases, SkipPlusGaussian
from tl_spectral.controls.models import Reinitialised, WeightShuffled
from tl_spectral.controls.order import CircularShift, LabelPermutation
from tl_spectral.controls.registry import NULLS, null_of, null_table

__all__ = [
    "NULLS",
    "CircularShift",
    "Gaussian",
    "LabelPermutation",
    "Null",
    "NullComparison",
    "Operated",
    "PhaseRandomised",
    "RandomBases",
    "Reinitialised",
    "Rewired",
    "SampleShuffled",
    "ShuffledWeights",
    "SkipPlusGaussian",
    "WeightShuffled",
    "compare_with_null",
    "null_of",
    "null_table",
]
