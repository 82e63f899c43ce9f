"""Writes the report: the run's figures and words into one HTML file that needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from tl_spectral.metrics import METRICS
from tl_spectral.plots.tables import variants
from tl_spectral.plots.theme import DARK
from tl_spectral.report.page import Numbers, show
from tl_spectral.report.pieces import table_of
from tl_spectral.report.sections import all_sections, words_of_findings
from tl_spectral.results import write_atomically

_VERDICTS = {"holds": "✓", "no effect": "○", "not learned": "≈", "cannot tell": "?"}


def write_report(result: Any, path: str | os.PathLike[str]) -> Path:
    """Write a run as one self-contained HTML page.

    Args:
        result: A run with ``provenance``, ``options``, ``tables`` (name → DataFrame), ``arrays``
            (name → array) and ``findings``. A table or array that is missing becomes a sentence.
        path: The file to write; its folder is made if need be.

    Returns:
        The path written. The same run gives the same bytes.
    """
    environment = Environment(
        loader=PackageLoader("tl_spectral.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files("tl_spectral.report") / "templates"
    page = environment.get_template("report.html.j2").render(
        model=result.provenance.model,
        facts=_facts(result),
        findings=list(words_of_findings(result)),
        verdicts=_VERDICTS,
        sections=all_sections(result),
        definitions=_definitions(),
        provenance=_provenance(result),
        options={name: show(value) for name, value in result.options.items()},
        css=(folder / "report.css").read_text("utf-8"),
        script=(folder / "report.js").read_text("utf-8"),
        dark=json.dumps(DARK),
        plotly=get_plotlyjs(),
    )
    target = Path(path)
    write_atomically(target, page.encode())
    return target


def _facts(run: Any) -> dict[str, str]:
    """The run at a glance."""
    spectra, units = table_of(run, "spectra"), table_of(run, "units")
    facts = {}
    table = spectra if len(spectra) else units
    if len(table) and "layer" in table:
        facts["layers"] = str(table["layer"].nunique())
    if len(units):
        facts["coordinates"] = f"{units['unit'].nunique():,}"
    else:
        sizes = [np.size(a) for name, a in run.arrays.items() if name.startswith("eigenvalues/")]
        facts |= {"coordinates": f"{max(sizes):,}"} if sizes else {}
    for option, name in (("samples", "samples"), ("jacobian_samples", "Jacobian samples")):
        if run.options.get(option) is not None:
            facts[name] = show(run.options[option])
    has_control = any("control" in variants(t) for t in run.tables.values() if len(t))
    facts["control"] = show(run.options.get("control") or ("yes" if has_control else "none"))
    return facts


def _definitions() -> Numbers:
    """What each metric means, where it is from, and what a random matrix gives."""
    rows = tuple(
        (name.replace("_", " "), metric.definition, metric.baseline, metric.source)
        for name, metric in METRICS.items()
    )
    head = ("metric", "definition", "random matrix", "source")
    return Numbers("Metrics of one operator", head, rows)


def _provenance(run: Any) -> dict[str, str]:
    record = run.provenance
    rows = {
        "model": record.model,
        "weights": record.weights,
        "fingerprint of the weights": record.fingerprint,
        "dtype": record.dtype,
        "seed": record.seed,
        "SHA-256 of the token ids": record.texts,
    }
    versions: Mapping[str, Any] = record.versions
    shown = {name: show(value) for name, value in rows.items() if value not in ("", None)}
    return shown | {name: str(version) for name, version in versions.items()}
