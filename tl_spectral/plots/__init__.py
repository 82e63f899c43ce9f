"""Figure builders: pure functions from results or tables to plotly figures.

Functions named after a result (:func:`spectrum_figure`, :func:`chain_figure`, …) are what its
``plot()`` calls; those that take a table of a run make the report. All take ``template=``.
"""

from tl_spectral.plots.circuits import ov_figure, ov_table_figure, principal_figure
from tl_spectral.plots.couplings import (
    character_figure,
    coupling_figure,
    coupling_layers_figure,
    trend_figure,
    trend_table_figure,
)
from tl_spectral.plots.depth import chain_figure, funnel_figure
from tl_spectral.plots.power import consensus_figure as consensus_figure
from tl_spectral.plots.power import power_figure as power_figure
from tl_spectral.plots.power import steering_figure as steering_figure
from tl_spectral.plots.spectra import (
    eigenvalue_figure,
    plane_reach,
    profile_figure,
    spectrum_figure,
)
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
    "coupling_figure",
    "coupling_layers_figure",
    "eigenvalue_figure",
    "funnel_figure",
    "graph_figure",
    "ov_figure",
    "ov_table_figure",
    "plane_reach",
    "principal_figure",
    "profile_figure",
    "spectrum_figure",
    "trend_figure",
    "trend_table_figure",
]
