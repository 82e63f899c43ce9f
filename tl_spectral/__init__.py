"""Spectral geometry of transformer blocks, on TransformerLens.

Jacobians of each block, their spectra beside random baselines, their product over depth, OV
circuits, and graphs of residual units whose bridge position is compared with the block's gain.
"""

import os

# Heard only if torch is not loaded yet: its threads then sleep while they wait for each other. They
# would spin, which costs a factor of ten as soon as another process wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tl_spectral import controls
from tl_spectral.alignment import ForwardAlignment, forward_alignment
from tl_spectral.analysis import AnalysisResult, analyze, load
from tl_spectral.bridges import BridgeUnits, bridge_units
from tl_spectral.capture import ResidualStates, capture
from tl_spectral.causal import BridgeIntervention, bridge_intervention
from tl_spectral.chain import ChainResult, OperatorChain, chain
from tl_spectral.communities import Communities, communities
from tl_spectral.compare import Comparison, compare
from tl_spectral.coupling import (
    CouplingResult,
    amplification,
    coupling,
)
from tl_spectral.errors import (
    CorruptResultError,
    InputError,
    ModelStateError,
    ProvenanceError,
    TLSpectralError,
    TLSpectralWarning,
    UnsupportedModelError,
)
from tl_spectral.graph import UnitGraph, unit_graph
from tl_spectral.growth import Growth, growth
from tl_spectral.influence import CommunityInfluence, leave_one_community_out
from tl_spectral.jacobian import (
    BlockJacobian,
    ChainOperator,
    JacobianOperator,
    block_jacobian,
    block_jacobians,
    chain_operator,
    jacobian_operator,
    sample_jacobians,
    span_jacobian,
)
from tl_spectral.learning import LearningCurve, learning_curve
from tl_spectral.model import (
    available_models,
    boot_albert,
    load_model,
    reinitialised,
    weight_shuffled,
)
from tl_spectral.multiverse import Multiverse, multiverse
from tl_spectral.ov import OVCircuits, PrincipalMode, ov_circuits
from tl_spectral.oversmoothing import Oversmoothing, oversmoothing
from tl_spectral.power import (
    ConsensusResult,
    PowerAlignment,
    power_alignment,
    predicted_rho,
    simulate_power,
)
from tl_spectral.profile import Profile, profile
from tl_spectral.results import Provenance
from tl_spectral.spectrum import OperatorSpectrum, Spectrum, block_spectra, spectrum
from tl_spectral.stability import PartitionStability, partition_stability
from tl_spectral.steering import SteeringReport, SteeringSweep, steer, steering_sweep
from tl_spectral.surgery import schur_surgery
from tl_spectral.surgery_chains import SurgeryTable, fixed_skip, surgery_table
from tl_spectral.texts import load_texts
from tl_spectral.trend import CouplingTrend, coupling_trend

__version__ = "0.1.0"

__all__ = [
    "AnalysisResult",
    "BlockJacobian",
    "BridgeIntervention",
    "BridgeUnits",
    "ChainOperator",
    "ChainResult",
    "Communities",
    "CommunityInfluence",
    "Comparison",
    "ConsensusResult",
    "CorruptResultError",
    "CouplingResult",
    "CouplingTrend",
    "ForwardAlignment",
    "Growth",
    "InputError",
    "JacobianOperator",
    "LearningCurve",
    "ModelStateError",
    "Multiverse",
    "OVCircuits",
    "OperatorChain",
    "OperatorSpectrum",
    "Oversmoothing",
    "PartitionStability",
    "PowerAlignment",
    "PrincipalMode",
    "Profile",
    "Provenance",
    "ProvenanceError",
    "ResidualStates",
    "Spectrum",
    "SteeringReport",
    "SteeringSweep",
    "SurgeryTable",
    "TLSpectralError",
    "TLSpectralWarning",
    "UnitGraph",
    "UnsupportedModelError",
    "amplification",
    "analyze",
    "available_models",
    "block_jacobian",
    "block_jacobians",
    "block_spectra",
    "boot_albert",
    "bridge_intervention",
    "bridge_units",
    "capture",
    "chain",
    "chain_operator",
    "communities",
    "compare",
    "controls",
    "coupling",
    "coupling_trend",
    "fixed_skip",
    "forward_alignment",
    "growth",
    "jacobian_operator",
    "learning_curve",
    "leave_one_community_out",
    "load",
    "load_model",
    "load_texts",
    "multiverse",
    "ov_circuits",
    "oversmoothing",
    "partition_stability",
    "power_alignment",
    "predicted_rho",
    "profile",
    "reinitialised",
    "sample_jacobians",
    "schur_surgery",
    "simulate_power",
    "span_jacobian",
    "spectrum",
    "steer",
    "steering_sweep",
    "surgery_table",
    "unit_graph",
    "weight_shuffled",
]
