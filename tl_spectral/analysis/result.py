"""A finished run, as the user holds it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor

from tl_spectral.analysis.dynamics import LayerMatrices
from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.store import RunDirectory
from tl_spectral.analysis.tasks import LayerChunk, LayerGraph
from tl_spectral.errors import InputError
from tl_spectral.results import Provenance

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True, eq=False)
class AnalysisResult:
    """Tables, arrays and findings of a run.

    Attributes:
        out: The run directory.
        provenance: Model, texts, options, versions.
        run_options: The options, typed.
        tables: Tidy tables by name: ``spectra``, ``chain``, ``ov``, ``ov_layers``,
            ``power``, ``oversmoothing``, ``consensus``, ``communities``, ``units``, ``coupling``,
            ``trend``, ``findings``.
        arrays: Pictures' raw material: ``eigenvalues/VARIANT/LAYER`` (of J) and
            ``layer_matrix/VARIANT/LAYER`` (eigenvalues of F), complex; and
            ``adjacency/VARIANT/LAYER`` (``row``, ``col``, ``weight``).
    """

    out: Path
    provenance: Provenance
    run_options: RunOptions
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options as plain values."""
        return self.run_options.to_json()

    @property
    def findings(self) -> pd.DataFrame:
        """What the run shows: effect, baseline, uncertainty and verdict, claim by claim."""
        return self.tables["findings"]

    def to_dataframe(self, table: str = "findings") -> pd.DataFrame:
        """One of the tables.

        Raises:
            InputError: If there is no such table.
        """
        if table not in self.tables:
            raise InputError(f"There is no table {table!r}; there are {sorted(self.tables)}.")
        return self.tables[table]

    def plot(self) -> Figure:
        """The spectral profile over depth."""
        from tl_spectral.plots import profile_figure

        return profile_figure(self.tables["spectra"])

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the report, one self-contained HTML file.

        Args:
            path: Where to; by default ``report.html`` in the run directory.

        Returns:
            The file written.
        """
        from tl_spectral.report import write_report

        target = Path(path) if path is not None else self.out / "report.html"
        write_report(self, target)
        return target


def load(out: str | os.PathLike[str]) -> AnalysisResult:
    """Load a finished run.

    Args:
        out: The run directory.

    Returns:
        The run.

    Raises:
        InputError: If there is no finished run.
        CorruptResultError: If a file was truncated or edited.
    """
    directory = RunDirectory(Path(out))
    manifest = directory.manifest()
    tables = directory.read_tables()
    return AnalysisResult(
        out=Path(out),
        provenance=manifest.provenance,
        run_options=manifest.options,
        tables=tables,
        arrays=_arrays(directory, manifest.options),
    )


def _arrays(directory: RunDirectory, options: RunOptions) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    layers = options.layers
    drawn = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    for variant in options.variants:
        for layer in layers:
            chunk = directory.load(LayerChunk, variant, f"jacobian_{layer:03d}_0000")
            eigenvalues: Tensor | None = chunk.eigenvalues
            if eigenvalues is not None:
                arrays[f"eigenvalues/{variant}/{layer}"] = eigenvalues
        if directory.has(variant, "layer_matrices"):
            found = directory.load(LayerMatrices, variant, "layer_matrices")
            for layer, values in zip(found.layers, found.eigenvalues, strict=True):
                arrays[f"layer_matrix/{variant}/{layer}"] = values
        for layer in drawn:
            graph = directory.load(LayerGraph, variant, f"graph_{layer:03d}")
            arrays[f"adjacency/{variant}/{layer}"] = {
                "row": graph.row,
                "col": graph.col,
                "weight": graph.weight,
            }
    return arrays
