"""Jacobians of a block, of a span of blocks, and as operators that are never formed."""

from tl_spectral.jacobian.blocks import (
    block_jacobian,
    block_jacobians,
    sample_jacobians,
    span_jacobian,
)
from tl_spectral.jacobian.operator import (
    ChainOperator,
    JacobianOperator,
    Operator,
    chain_operator,
    jacobian_operator,
)
from tl_spectral.jacobian.result import BlockJacobian

__all__ = [
    "BlockJacobian",
    "ChainOperator",
    "JacobianOperator",
    "Operator",
    "block_jacobian",
    "block_jacobians",
    "chain_operator",
    "jacobian_operator",
    "sample_jacobians",
    "span_jacobian",
]
