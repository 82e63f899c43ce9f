"""Does a layer act like a step of the power method? Alignment of tokens with its dominant mode.

[B] arXiv 2605.25619. For isotropic random tokens the answer is nearly a statement about weights,
and mostly yes for untrained ones too: every figure comes with its closed form and its controls.
"""

from tl_spectral.consensus import ConsensusResult, simulate_power
from tl_spectral.power.alignment import power_alignment
from tl_spectral.power.result import PowerAlignment
from tl_spectral.power.rho import predicted_rho

__all__ = [
    "ConsensusResult",
    "PowerAlignment",
    "power_alignment",
    "predicted_rho",
    "simulate_power",
]
