"""Learned or architectural? Runs side by side: models, their controls, their training."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_spectral.errors import InputError, ProvenanceError
from tl_spectral.results import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from tl_spectral.analysis import AnalysisResult

# Options that change how a run is computed or what else it holds, not what its metrics mean.
_FREE = {"layers", "control", "seed", "permutations", "chunk", "power_texts"}


@dataclass(frozen=True, eq=False)
class Comparison(Result):
    """Metrics of several runs, layer by layer and over depth.

    Attributes:
        labels: The runs; all differences are to the first.
        steps: Training step of each, or ``None``.
        rows: One per run, metric and layer: ``run``, ``step``, ``family`` (spectra, chain,
            coupling, communities, ov, power), ``metric``, ``operator``, ``units``, ``layer``,
            ``depth`` (0 first, 1 last of the layers analysed), ``value``, ``low``, ``high`` (95 %
            over samples or units), ``baseline``.
        summary_rows: One per run and metric, see :func:`tl_spectral.compare_tables.summarise`.
        notes: How the runs differ in ways that are allowed.
    """

    labels: tuple[str, ...]
    steps: tuple[float | int | None, ...]
    rows: tuple[dict[str, Any], ...]
    summary_rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per run, metric and layer."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def summary(self) -> pd.DataFrame:
        """One row per run and metric: over depth, and beside the first run."""
        import pandas as pd

        return pd.DataFrame(list(self.summary_rows))

    def trajectory(self) -> pd.DataFrame:
        """The summary of the runs that have a step, in order of training.

        Raises:
            InputError: If no steps were given.
        """
        table = self.summary()
        table = table[table["step"].notna()]
        if table.empty:
            raise InputError("There is no trajectory without steps: compare(…, steps=[…]).")
        return table.sort_values(["family", "metric", "operator", "units", "step"], kind="stable")

    def plot(self, template: Any = None) -> go.Figure:
        """The main metrics by depth, one line per run."""
        from tl_spectral.plots.compare import compare_figure

        return compare_figure(self.to_dataframe(), self.labels, self.steps, template=template)

    def plot_trajectory(self, template: Any = None) -> go.Figure:
        """The main metrics over training, early and late layers apart.

        Raises:
            InputError: If no steps were given.
        """
        from tl_spectral.plots.compare import trajectory_figure

        return trajectory_figure(self.trajectory(), template=template)


def compare(
    *runs: AnalysisResult | str | os.PathLike[str],
    labels: Sequence[str] | None = None,
    steps: Sequence[float | int] | None = None,
    controls: bool = False,
    texts: str = "same",
) -> Comparison:
    """Set runs beside each other: a model and its control, checkpoints, or several models.

    What can be told apart by the options is refused: a metric of another context or of other texts
    is another number. Different models are allowed, and named in ``notes``.

    Args:
        *runs: Results of :func:`tl_spectral.analyze`, or their directories. A single run is
            compared with its own re-initialised control.
        labels: Names of the runs; by default those of their models.
        steps: Training step of each run, for checkpoints: gives a trajectory. Checkpoints on the
            Hugging Face hub are revisions of one repository (``step1000`` of a Pythia).
        controls: Also take the control of each run that has one.
        texts: ``"same"`` demands the same token ids; ``"any"`` allows others, which models with
            different tokenizers need.

    Returns:
        The comparison.

    Raises:
        InputError: If there is nothing to compare, or labels or steps do not fit.
        ProvenanceError: If the runs differ in what their metrics mean; all differences are named.
    """
    if texts not in ("same", "any"):
        raise InputError(f'texts must be "same" or "any", got {texts!r}.')
    if not runs:
        raise InputError("There is no run to compare.")
    results = [_loaded(run) for run in runs]
    for name, values in (("labels", labels), ("steps", steps)):
        if values is not None and len(values) != len(results):
            raise InputError(f"There are {len(results)} runs and {len(values)} {name}.")
    if steps is not None and (len(set(steps)) < len(steps) or not all(s >= 0 for s in steps)):
        raise InputError(f"Steps are distinct and not negative, got {list(steps)}.")
    names = list(labels) if labels is not None else _names(results)
    if len(set(names)) < len(names):
        raise InputError(f"Labels must be distinct, got {names}.")
    notes = _allowed(results, names, texts)
    entries: list[tuple[str, float | int | None, AnalysisResult, str]] = []
    for i, (result, name) in enumerate(zip(results, names, strict=True)):
        entries.append((name, None if steps is None else steps[i], result, "trained"))
        if "control" in result.run_options.variants and (controls or len(results) == 1):
            entries.append((f"{name}, re-initialised", None, result, "control"))
    if len(entries) < 2:
        raise InputError(
            "One run without a control has nothing to be compared with. Give another run, or "
            "analyse with control='random-init'."
        )
    return _compared(entries, notes)


def _compared(entries: list[tuple[str, Any, AnalysisResult, str]], notes: list[str]) -> Comparison:
    import pandas as pd

    from tl_spectral.analysis.tasks import records
    from tl_spectral.compare_tables import KEYS, metric_table, summarise

    tables, frames = {}, []
    for label, step, result, variant in entries:
        table = metric_table(result.tables, variant)
        if table.empty:
            raise InputError(f"The run {label} ({result.out}) holds no metrics.")
        tables[label] = table
        layers = sorted(table["layer"].unique())
        depth = {layer: i / max(1, len(layers) - 1) for i, layer in enumerate(layers)}
        place = table.assign(run=label, step=step, depth=table["layer"].map(depth))
        columns = ["run", "step", *KEYS, "layer", "depth", "value", "low", "high", "baseline"]
        frames.append(place[columns].astype({"step": object}))
    summary = summarise(tables, {label: step for label, step, _, _ in entries})
    labels = tuple(label for label, *_ in entries)
    first = entries[0][2].provenance
    return Comparison(
        labels=labels,
        steps=tuple(step for _, step, _, _ in entries),
        rows=tuple(_plain(records(pd.concat(frames, ignore_index=True)))),
        summary_rows=tuple(_plain(records(summary.astype({"step": object})))),
        notes=tuple(notes),
        provenance=Provenance(
            model=" | ".join(labels), weights=first.weights, dtype=first.dtype, texts=first.texts
        ),
    )


def _plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Python numbers, which a results file can hold; no step is ``None``."""
    for row in rows:
        for name, value in row.items():
            if hasattr(value, "item"):
                row[name] = value.item()
        if row["step"] is not None and math.isnan(row["step"]):
            row["step"] = None
    return rows


def _loaded(run: Any) -> AnalysisResult:
    from tl_spectral.analysis import AnalysisResult, load

    if isinstance(run, AnalysisResult):
        return run
    if isinstance(run, (str, os.PathLike)):
        return load(run)
    raise InputError(
        f"Runs are results of tls.analyze or their directories, not {type(run).__name__}."
    )


def _names(results: Sequence[AnalysisResult]) -> list[str]:
    """The models' names, without folders; their directories where those do not tell them apart."""
    models = [Path(result.provenance.model).name for result in results]
    if len(set(models)) == len(models):
        return models
    folders = [Path(result.out).name for result in results]
    if len(set(folders)) == len(folders):
        return [f"{m} ({f})" for m, f in zip(models, folders, strict=True)]
    return [str(result.out) for result in results]


def _allowed(results: Sequence[AnalysisResult], names: Sequence[str], texts: str) -> list[str]:
    """Refuse what must not differ, and say what may.

    Raises:
        ProvenanceError: See there.
    """
    first, source = results[0].options, results[0].provenance
    wrong, notes = [], []
    for result, name in zip(results[1:], names[1:], strict=True):
        options, other = result.options, result.provenance
        for option in sorted((first.keys() | options.keys()) - _FREE):
            here, there = first.get(option), options.get(option)
            if here != there:
                wrong.append(f"{option} is {here!r} in {names[0]} and {there!r} in {name}")
        if source.weights != other.weights:
            wrong.append(
                f"weights are {source.weights!r} in {names[0]} and {other.weights!r} in {name}"
            )
        if source.texts != other.texts:
            if texts == "same":
                wrong.append(
                    f"{names[0]} and {name} read other token ids (for models with different "
                    'tokenizers allow that by texts="any", on the command line --any-texts)'
                )
            else:
                notes.append(f"{name} read other token ids than {names[0]}.")
        notes += _differences(source, other, names[0], name)
        if first["layers"] != options["layers"]:
            notes.append(f"{name} has other layers than {names[0]}; see the column 'compared'.")
    if wrong:
        raise ProvenanceError(f"These runs cannot be compared: {'; '.join(wrong)}.")
    models = list(dict.fromkeys(result.provenance.model for result in results))
    if len(models) > 1:
        notes.insert(0, f"These are {len(models)} models: {', '.join(models)}.")
    return list(dict.fromkeys(notes))


def _differences(first: Provenance, other: Provenance, here: str, there: str) -> list[str]:
    notes = []
    if (first.model, first.fingerprint) == (other.model, other.fingerprint):
        notes.append(f"{here} and {there} are the same weights.")
    elif first.model == other.model:
        notes.append(f"{there} has other weights than {here}.")
    if first.dtype != other.dtype:
        notes.append(f"{there} ran in {other.dtype}, {here} in {first.dtype}.")
    if first.seed != other.seed:
        notes.append(f"{there} used seed {other.seed}, {here} seed {first.seed}.")
    changed = [
        f"{name} {first.versions.get(name)} and {other.versions.get(name)}"
        for name in sorted(first.versions.keys() | other.versions.keys())
        if first.versions.get(name) != other.versions.get(name)
    ]
    if changed:
        notes.append(f"{here} and {there} ran with other versions: {', '.join(changed)}.")
    return notes
