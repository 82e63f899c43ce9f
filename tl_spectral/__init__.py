"""Spectral geometry of transformer blocks, on TransformerLens."""

from tl_spectral.capture import ResidualStates, capture
from tl_spectral.jacobian import (
    BlockJacobian,
    JacobianOperator,
    block_jacobian,
    block_jacobians,
    jacobian_operator,
    sample_jacobians,
    span_jacobian,
)
from tl_spectral.model import available_models, load_model, reinitialised

__version__ = "0.1.0"
