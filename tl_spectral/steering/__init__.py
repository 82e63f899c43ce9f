"""Steering by the power method: a rank-1 edit that makes a chosen direction dominant.

[B] arXiv 2605.25619: add ``α w wᵀ`` to F of one layer, so that tokens are drawn to ±w, by the sign
of ⟨w, x⟩. What that does to the model is measured beside random edits and a plain additive vector.
"""

from tl_spectral.steering.context import steer
from tl_spectral.steering.report import SteeringReport
from tl_spectral.steering.sweep import SteeringSweep, steering_sweep

__all__ = ["SteeringReport", "SteeringSweep", "steer", "steering_sweep"]
