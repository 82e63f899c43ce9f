"""Three lines to a layer profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tl_spectral.capture import capture
from tl_spectral.jacobian import sample_jacobians
from tl_spectral.jacobian.blocks import Context
from tl_spectral.model import ModelView
from tl_spectral.results import Result
from tl_spectral.threads import in_threads

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

NATURAL_UNITS_NEED = 16
"""Texts below which a standard deviation per coordinate is too uncertain to measure lengths by."""


@dataclass(frozen=True, eq=False)
class Profile(Result):
    """Spectral metrics of every block, for the operators J and R = J − I.

    Attributes:
        rows: One per layer, operator, units and metric: mean over prompts, its standard error, the
            random baseline, and for J what the identity plus a random update would give.
        layers: Layers, in order.
        n_samples: Number of prompts.
        note: Why there are no natural units, if there are none.
    """

    rows: tuple[dict[str, Any], ...]
    layers: tuple[int, ...]
    n_samples: int
    note: str

    def long(self) -> pd.DataFrame:
        """Tidy: one row per layer, operator, units and metric."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def to_dataframe(self) -> pd.DataFrame:
        """Wide: one row per layer and operator, each metric beside its baseline.

        Columns are ``METRIC``, ``METRIC_se`` (standard error over prompts; missing for one prompt)
        and ``METRIC_baseline`` (random matrix of the same size and norm); for J also
        ``METRIC_skip_baseline`` (identity plus a random update of the same norm). With natural
        units there is a second set with the suffix ``_natural``.
        """
        import pandas as pd

        wide: dict[tuple[int, str], dict[str, Any]] = {}
        for row in self.rows:
            cells = wide.setdefault(
                (row["layer"], row["operator"]),
                {"layer": row["layer"], "operator": row["operator"], "n_samples": self.n_samples},
            )
            name = row["metric"] + ("_natural" if row["units"] == "natural" else "")
            cells[name] = row["value"]
            cells[f"{name}_se"] = row["standard_error"]
            cells[f"{name}_baseline"] = row["baseline"]
            if row["operator"] == "J":
                cells[f"{name}_skip_baseline"] = row["skip_baseline"]
        return pd.DataFrame(list(wide.values()))

    def plot(self, template: str | None = None) -> Figure:
        """Metrics over depth, J and R, with their baselines."""
        from tl_spectral.plots import profile_figure

        units = "natural" if not self.note else "raw"
        return profile_figure(self.long().assign(variant="trained"), units=units, template=template)


def profile(
    model: Any,
    texts: Any,
    *,
    layers: Sequence[int] | None = None,
    pos: int = -1,
    context: Context | str = "full",
) -> Profile:
    """Rotation, normality, gain and rank of every block, over some prompts.

    Args:
        model: A ``TransformerBridge`` in evaluation mode.
        texts: A prompt, several prompts, or token ids. From 16 prompts on, every metric is also
            given in natural units (coordinates divided by their standard deviation over prompts).
        layers: Which layers; all by default.
        pos: Position in each prompt.
        context: Jacobian context, ``"full"`` or ``"isolated"``.

    Returns:
        Metrics with standard errors over prompts and random baselines.

    Raises:
        InputError: For texts, layers or positions that do not exist.
    """
    from tl_spectral.analysis.tables import summarise_spectra
    from tl_spectral.analysis.tasks import records, spectrum_rows

    view = ModelView(model)
    tokens = view.tokens(texts)
    natural = len(tokens) >= NATURAL_UNITS_NEED
    states = capture(model, tokens, pos, layers=layers) if natural else None
    rows: list[dict[str, Any]] = []
    chosen = view.layers(layers)
    for layer, matrices in sample_jacobians(model, tokens, chosen, pos, context=context):
        scale = None if states is None else states.scale(layer)
        calls = (
            (spectrum_rows, matrix, scale, {"layer": layer, "estimate": "per_sample"})
            for matrix in matrices
        )
        for found, _ in in_threads(calls):
            rows += found
    table = summarise_spectra(rows)
    return Profile(
        rows=tuple(records(table)),
        layers=chosen,
        n_samples=len(tokens),
        note=""
        if natural
        else f"natural units need at least {NATURAL_UNITS_NEED} texts, there are {len(tokens)}",
        provenance=view.provenance(tokens, options={"pos": pos, "context": context}),
    )
