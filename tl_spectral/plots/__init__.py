"""Figure builders: pure functions from results or tables to plotly figures.

Functions named after a result (:func:`spectrum_figure`, :func:`chain_figure`, …) are what its
``plot()`` calls; those that take a table of a run make the report. All take ``template=``.
"""

from tl_spectral.plots.circuits import (
    layer_modes_figure,
    layer_spectrum_figure,
    ov_figure,
    ov_table_figure,
)
from tl_spectral.plots.couplings import (
    character_figure,
    coupling_figure,
    coupling_layers_figure,
    trend_figure,
    trend_table_figure,
)
from tl_spectral.plots.depth import chain_figure, funnel_figure
from tl_spectral.plots.dynamics import dynamics_figure
from tl_spectral.plots.power import consensus_figure, oversmoothing_figure, power_figure
from tl_spectral.plots.spectra import (
    eigenvalue_figure,
    plane_reach,
    profile_figure,
    spectrum_figure,
)
from tl_spectral.plots.steering import steering_figure, sweep_figure
from tl_spectral.plots.topology import (
    adjacency_figure,
    cartography_figure,
    cartography_table_figure,
    communities_figure,
    graph_figure,
)

__all__ = [
    "adjacency_figure",
    "cartography_figure",
    "cartography_table_figure",
    "chain_figure",
    "character_figure",
    "communities_figure",
    "consensus_figure",
    "coupling_figure",
    "coupling_layers_figure",
    "dynamics_figure",
    "eigenvalue_figure",
    "funnel_figure",
    "graph_figure",
    "layer_modes_figure",
    "layer_spectrum_figure",
    "ov_figure",
    "ov_table_figure",
    "oversmoothing_figure",
    "plane_reach",
    "power_figure",
    "profile_figure",
    "spectrum_figure",
    "steering_figure",
    "sweep_figure",
    "trend_figure",
    "trend_table_figure",
]
