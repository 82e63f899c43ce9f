"""OV circuits: what each head writes where it attends, from the weights alone."""

from tl_spectral.ov.circuits import OVCircuits, ov_circuits
from tl_spectral.ov.layers import PrincipalMode

__all__ = ["OVCircuits", "PrincipalMode", "ov_circuits"]
