"""``tl-spectral compare``: what it prints and writes."""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tl_spectral.errors import InputError

if TYPE_CHECKING:
    from tl_spectral.compare import Comparison

EPILOG = (
    "Example: tl-spectral compare runs/step0 runs/step100 runs/step1000 --steps 0,100,1000 "
    "--out runs/training"
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1B1F24; max-width: 1100px;
margin: 2rem auto; padding: 0 1rem }}
p, li {{ max-width: 46rem; color: #5B6470 }}
div.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 13px }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #E4E7EB; text-align: right }}
th:nth-child(-n+2), td:nth-child(-n+2) {{ text-align: left }}
</style></head><body><h1>{title}</h1>
<p>All differences are to {first}. Their 95 % interval is over layers.</p>
<ul>{notes}</ul>{figures}<h2>Over depth</h2><div class="wide">{table}</div></body></html>
"""


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Finished run directories.")],
    labels: Annotated[
        str | None, typer.Option(help="Names of the runs, separated by commas.", metavar="NAMES")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Training steps of the runs, separated by commas: adds the trajectory.",
            metavar="STEPS",
        ),
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Also take the re-initialised control of each run.")
    ] = False,
    any_texts: Annotated[
        bool,
        typer.Option("--any-texts", help="Allow other token ids: models of other tokenizers."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write tables and a page of figures here.", metavar="DIR")
    ] = None,
) -> None:
    """Compare runs: trained and re-initialised, checkpoints over training, or several models.

    One DIR alone is compared with its own control.
    """
    from tl_spectral.cli import _one_line_each, _say

    with _one_line_each():
        from tl_spectral.compare import compare as run

        comparison = run(
            *runs,
            labels=None if labels is None else [name.strip() for name in labels.split(",")],
            steps=None if steps is None else _steps(steps),
            controls=controls,
            texts="any" if any_texts else "same",
        )
        tell(comparison)
        if out is not None:
            _say(f"Figures and tables: {write(comparison, out)}")


def _steps(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--steps takes numbers, as 0,100,1000, not {text!r}.") from None


def tell(comparison: Comparison) -> None:
    """The main metrics of every run, and how they differ from the first run's."""
    console = Console(highlight=False)
    table = Table(
        Column("metric", overflow="fold"),
        Column("run", overflow="fold"),
        *(Column(name, justify="right") for name in ("mean", "first third", "last third")),
        Column("difference (95 % over layers)", justify="right", overflow="fold"),
        title=f"Compared with {comparison.labels[0]}",
    )
    for title, rows in _headlines(comparison):
        for i, row in enumerate(rows):
            table.add_row(
                Text(title if i == 0 else ""),
                Text(row["run"]),
                *(_figure(row[name]) for name in ("mean", "early", "late")),
                _difference(row),
                end_section=i == len(rows) - 1,
            )
    console.print(table)
    for note in comparison.notes:
        console.print(Text(note, "dim"))


def write(comparison: Comparison, out: Path) -> Path:
    """Tables, the result, and one page with the figures.

    Returns:
        The page.
    """
    out.mkdir(parents=True, exist_ok=True)
    comparison.to_dataframe().to_csv(out / "compare.csv", index=False)
    comparison.summary().to_csv(out / "summary.csv", index=False)
    comparison.save(out / "compare.safetensors")
    figures = [comparison.plot()]
    if any(step is not None for step in comparison.steps):
        figures.append(comparison.plot_trajectory())
    drawn = (
        figure.to_html(
            full_html=False,
            include_plotlyjs=i == 0,
            div_id=f"figure-{i}",
            config={"displayModeBar": False, "responsive": True},
        )
        for i, figure in enumerate(figures)
    )
    title = html.escape("Comparison of " + ", ".join(comparison.labels))
    page = out / "compare.html"
    page.write_text(
        _PAGE.format(
            title=title,
            first=html.escape(comparison.labels[0]),
            notes="".join(f"<li>{html.escape(note)}</li>" for note in comparison.notes),
            figures="".join(drawn),
            table=_html_table(comparison),
        ),
        encoding="utf-8",
    )
    return page


def _headlines(comparison: Comparison) -> list[tuple[str, list[dict[Any, Any]]]]:
    from tl_spectral.plots.compare import headline_rows

    return [
        (f"{line[4]} ({line[5]})", rows.to_dict("records"))
        for line, rows in headline_rows(comparison.summary())
    ]


def _html_table(comparison: Comparison) -> str:
    head = ("metric", "run", "mean", "first third", "last third", "difference", "compared")
    lines = ["<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"]
    for title, rows in _headlines(comparison):
        for i, row in enumerate(rows):
            cells = [
                title if i == 0 else "",
                row["run"],
                *(str(_figure(row[name])) for name in ("mean", "early", "late")),
                str(_difference(row)),
                row["compared"] or row["note"],
            ]
            lines.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    return "\n".join([*lines, "</table>"])


def _difference(row: dict[Any, Any]) -> Text:
    low, high = row["difference_low"], row["difference_high"]
    if math.isnan(row["difference"]):
        return Text("-", "dim")
    if math.isnan(low):
        return Text(f"{row['difference']:+.3g}")
    clear = low * high > 0
    return Text(f"{row['difference']:+.3g} ({low:+.2g} to {high:+.2g})", "bold" if clear else "")


def _figure(value: float) -> Text:
    return Text("-", "dim") if math.isnan(value) else Text(f"{value:.3g}")
