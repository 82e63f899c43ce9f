"""What ``tl-spectral steer`` prints and writes."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from tl_spectral.steering import SteeringReport, SteeringSweep

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>body {{ font: 15px/1.5 system-ui, sans-serif; color: #1B1F24; max-width: 1100px;
margin: 2rem auto; padding: 0 1rem }} p {{ max-width: 44rem; color: #5B6470 }}</style>
</head><body><h1>{title}</h1><p>{what}</p>{figures}</body></html>
"""


def tell(report: SteeringReport) -> None:
    """Conditions beside their baselines, top tokens, continuations and notes."""
    console, chance = Console(highlight=False), report.conditions[0]["chance"]
    table = Table(
        "condition",
        "|cos| with w",
        "began + side",
        "began - side",
        "on + side",
        "KL, nats",
        "perplexity",
        "strength",
        title=title_of(report),
        caption=f"± is the standard error over texts. Random vectors: |cos| {chance:.3f}. "
        f"{strength_of(report)}",
    )
    for row in report.conditions:
        table.add_row(
            Text(row["condition"], "bold" if row["condition"] == "steered" else ""),
            _with_error(row, "alignment", ".3f"),
            _figure(row["alignment_plus"], ".3f"),
            _figure(row["alignment_minus"], ".3f"),
            _figure(row["positive"], ".0%"),
            _with_error(row, "kl", ".3g"),
            _figure(row["perplexity"], ".3g"),
            _figure(row["strength"], ".3g"),
        )
    console.print(table)
    console.print(_top_tokens(report))
    for spoken in report.generations:
        prompt, before, after = (
            str(spoken[name]).replace("\n", "⏎") for name in ("prompt", "before", "after")
        )
        console.print(Text.assemble("\n", ("Prompt   ", "dim"), prompt))
        console.print(Text.assemble(("without  ", "dim"), before))
        console.print(Text.assemble(("with     ", "bold"), after))
    for note in notes_of(report):
        console.print(Text(note, "dim"))


def title_of(report: SteeringReport | SteeringSweep) -> str:
    """What is steered, and where."""
    return f"Steering {report.provenance.model}, layer {report.layer}, towards {report.source}"


def strength_of(report: SteeringReport) -> str:
    """α and what it makes of the spectrum, or of the stream."""
    if report.method == "additive":
        return f"Added to every position: {report.alpha:.3g} mean lengths of resid_post."
    gap = "" if report.gap is None else f", gap {_plain(report.gap_before)} to {report.gap:.3g}"
    size = f"the edit is {report.relative_edit or 0:.0%} of the layer matrix"
    return f"α {report.alpha:.3g}{gap}; {report.reach or 0:.0%} of w can be read; {size}."


def notes_of(report: SteeringReport) -> Iterable[str]:
    """Notes on the edit, and on the conditions where something fell short."""
    yield from report.notes
    seen = {row["note"]: row["condition"] for row in reversed(report.conditions) if row["note"]}
    yield from (f"{condition}: {note}." for note, condition in reversed(seen.items()))


def _top_tokens(report: SteeringReport) -> Table:
    def listed(tokens: Iterable[tuple[Any, float]]) -> str:
        return "  ".join(f"{token!r} {share:.1%}" for token, share in tokens)

    table = Table(
        "text",
        Column("without", overflow="fold"),
        Column("with", overflow="fold"),
        title="Likeliest at the last position",
    )
    for entry in report.top_tokens:
        table.add_row(str(entry["text"]), listed(entry["before"]), listed(entry["after"]))
    return table


def tell_sweep(sweep: SteeringSweep) -> None:
    """The trade-off by method and gap, beside both rivals."""
    frame = sweep.to_dataframe()
    first = frame.iloc[0]
    table = Table(
        "method",
        "gap",
        "α",
        "KL, nats",
        "|cos|",
        "|cos|, added",
        "perplexity",
        "perplexity, added",
        "|cos|, random w",
        "KL, random w",
        title="What steering buys, and its price",
        caption=f"Not steered: |cos| {first['alignment_before']:.3f}, perplexity "
        f"{_plain(first['perplexity_before'])}; random vectors: |cos| {first['chance']:.3f}. "
        "Added: the vector w at the same KL. Random w: mean over random directions, each with "
        "itself.",
    )
    for (method, gap), rows in frame.groupby(["method", "gap"], sort=False):
        steered, added = (
            rows[rows["condition"] == name].iloc[0] for name in ("steered", "additive at equal KL")
        )
        drawn = rows[rows["condition"].str.startswith("random")]
        table.add_row(
            str(method),
            f"{gap:g}",
            _figure(steered["strength"], ".3g"),
            _figure(steered["kl"], ".3g"),
            _figure(steered["alignment"], ".3f"),
            _figure(added["alignment"], ".3f"),
            _figure(steered["perplexity"], ".4g"),
            _figure(added["perplexity"], ".4g"),
            _figure(drawn["alignment"].mean(), ".3f"),
            _figure(drawn["kl"].mean(), ".3g"),
        )
    Console(highlight=False).print(table)


def write(report: SteeringReport, sweep: SteeringSweep | None, out: Path) -> Path:
    """Tables, results, and one page with the figures.

    Returns:
        The page.
    """
    out.mkdir(parents=True, exist_ok=True)
    report.to_dataframe().to_csv(out / "steering.csv", index=False)
    report.save(out / "steering.safetensors")
    figures = [report.plot()]
    if sweep is not None:
        sweep.to_dataframe().to_csv(out / "sweep.csv", index=False)
        sweep.save(out / "sweep.safetensors")
        figures.append(sweep.plot())
    page = out / "steering.html"
    drawn = (
        figure.to_html(
            full_html=False,
            include_plotlyjs=i == 0,
            div_id=f"figure-{i}",
            config={"displayModeBar": False, "responsive": True},
        )
        for i, figure in enumerate(figures)
    )
    what = " ".join([strength_of(report), *notes_of(report)])
    page.write_text(
        _PAGE.format(
            title=html.escape(title_of(report)), what=html.escape(what), figures="".join(drawn)
        ),
        encoding="utf-8",
    )
    return page


def _figure(value: Any, spec: str) -> Text:
    if value is None or math.isnan(value):
        return Text("-", "dim")
    return Text(format(value, spec))


def _with_error(row: Mapping[str, Any], name: str, spec: str) -> Text:
    error = row[f"{name}_se"]
    spread = "" if not error else f" ± {error:{spec if 'f' in spec else '.1g'}}"
    return _figure(row[name], spec) + spread


def _plain(value: Any) -> str:
    return str(_figure(value, ".4g"))
