"""The command line: the same options as in Python, errors in one line, findings at the end."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from tl_spectral import cli_compare
from tl_spectral.errors import InputError, TLSpectralError, TLSpectralWarning

if TYPE_CHECKING:
    from tl_spectral.analysis import AnalysisResult

app = typer.Typer(
    help="Spectral geometry of transformer blocks: Jacobians, OV circuits, unit graphs, bridges.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its traceback of a bug prints whole tensors
)
_VERDICT_STYLES = {"holds": "green", "not learned": "yellow", "no effect": "cyan"}
_LINES = 20  # progress lines of a run whose output is not a terminal

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face name, a local directory, a .gguf file, or a name of `tl-spectral "
        "models`.",
    ),
]
_Layers = Annotated[
    str | None, typer.Option(help="Layers, as 0-11 or 0,4,8-11; all by default.", metavar="LAYERS")
]
_Run = Annotated[Path, typer.Argument(metavar="DIR", help="A finished run directory.")]


class _Context(str, Enum):
    full = "full"
    isolated = "isolated"


class _Control(str, Enum):
    random_init = "random-init"


class _Method(str, Enum):
    weights = "weights"
    hook = "hook"
    additive = "additive"


class _Fold(str, Enum):
    none = "none"
    norm = "norm"
    norm_and_post = "norm+post"


def _version(asked: bool) -> bool:
    if asked:
        from tl_spectral import __version__

        typer.echo(f"tl-spectral {__version__}")
        raise typer.Exit
    return asked  # what a callback returns is the option's value


@app.callback(epilog="Example: tl-spectral analyze smollm2-135m --out runs/smollm2")
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Spectral geometry of transformer blocks: Jacobians, OV circuits, unit graphs, bridges."""


@app.command(
    epilog="Example: tl-spectral analyze gpt2 --texts prompts.txt --layers 0-5 "
    "--control random-init --out runs/gpt2"
)
def analyze(
    model: _Model,
    out: Annotated[
        Path, typer.Option(help="Run directory; an unfinished run in it goes on.", metavar="DIR")
    ],
    texts: Annotated[
        Path | None,
        typer.Option(
            help='One text a line, or .jsonl with a "text" field; by default prose of Python\'s '
            "standard library.",
            metavar="FILE",
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="A dataset of the hub instead (NAME or NAME:CONFIG).", metavar="NAME"),
    ] = None,
    layers: _Layers = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Texts for graphs and natural units; by default all, 1,000 of the built-in ones.",
            min=1,
        ),
    ] = None,
    jacobian_samples: Annotated[
        int, typer.Option(help="Texts whose Jacobians are averaged.", min=1)
    ] = 32,
    spectrum_samples: Annotated[
        int, typer.Option(help="Texts whose Jacobians are decomposed one by one.", min=1)
    ] = 4,
    tokens: Annotated[
        int, typer.Option(help="Tokens kept of each text; 0 keeps whole texts.", min=0)
    ] = 16,
    pos: Annotated[int, typer.Option(help="Position in each text; -1 is the last token.")] = -1,
    context: Annotated[
        _Context, typer.Option(help="What the token attends to: its text, or itself alone.")
    ] = _Context.full,
    control: Annotated[
        _Control | None, typer.Option(help="Analyse a re-initialised twin beside the model.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.", min=0)] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Parallel workers; one per core by default.", min=1)
    ] = None,
) -> None:
    """Analyse a model: findings, tables, and an HTML report.

    A run that was stopped goes on when the same command is repeated, and ends with the same files.
    """
    began = time.monotonic()
    with _one_line_each():
        if texts is not None and dataset is not None:
            raise InputError("Give --texts or --dataset, not both.")
        from tl_spectral.analysis import analyze as run
        from tl_spectral.texts import load_texts

        chosen = _numbers(layers)
        source = str(texts) if texts is not None else dataset
        if texts is not None and not texts.is_file():
            raise InputError(f"There is no file {texts}.")
        given = None if source is None else load_texts(source, n=samples)
        subject = _load(model)
        with _Steps() as steps:
            result = run(
                subject,
                given,
                out=out,
                layers=chosen,
                samples=samples,
                jacobian_samples=jacobian_samples,
                spectrum_samples=spectrum_samples,
                tokens_per_text=tokens or None,
                pos=pos,
                context=context.value,
                control=control.value if control else None,
                seed=seed,
                jobs=jobs,
                progress=steps,
            )
        report_file = result.report()
        _tell(result)
        _say(f"\nTook {_duration(time.monotonic() - began)}. Tables: {out}")
        _say(f"Report: {report_file}")


@app.command(epilog="Example: tl-spectral report runs/gpt2")
def report(
    run: _Run,
    out: Annotated[
        Path | None, typer.Option(help="File; report.html in DIR by default.", metavar="FILE")
    ] = None,
) -> None:
    """Make the HTML report of a finished run again."""
    with _one_line_each():
        from tl_spectral.analysis import load

        _say(f"Report: {load(run).report(out)}")


@app.command(epilog="Example: tl-spectral models")
def models() -> None:
    """List what can be analysed here without a download."""
    with _one_line_each():
        from tl_spectral.model import available_models

        table = Table("name", "what it is", "to get it")
        for entry in available_models():
            table.add_row(
                Text(entry.name, style="green" if entry.available else "dim"),
                entry.description,
                Text("here" if entry.available else entry.hint),
            )
        Console().print(table)
        _say("Also: any Hugging Face name, local directory or .gguf file TransformerLens boots.")


@app.command(epilog="Example: tl-spectral ov smollm2-135m --layers 0-5 --out runs/ov")
def ov(
    model: _Model,
    layers: _Layers = None,
    fold: Annotated[
        _Fold,
        typer.Option(
            help="Fold in the norm that attention reads through, and the one on its output."
        ),
    ] = _Fold.none,
    vocabulary: Annotated[
        bool,
        typer.Option("--vocabulary", help="Score heads through embedding and unembedding as well."),
    ] = False,
    modes: Annotated[int, typer.Option(help="Modes of each layer in the table.", min=1)] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write heads.csv, layers.csv and the layer matrices (F.safetensors) here.",
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """OV circuits: which heads copy, which suppress, and each layer's dominant modes."""
    with _one_line_each():
        from tl_spectral import cli_ov
        from tl_spectral.ov import ov_circuits

        chosen = _numbers(layers)
        circuits = ov_circuits(_load(model), chosen, fold=fold.value, vocabulary=vocabulary)
        heads, found = circuits.to_dataframe(), circuits.modes_dataframe(modes)
        cli_ov.tell(circuits, heads, found)
        if out is not None:
            cli_ov.write(circuits, heads, found, out)
            _say(f"Tables and layer matrices: {out}")


@app.command(
    epilog='Example: tl-spectral steer smollm2-135m --toward " Paris" --sweep --out runs/paris'
)
def steer(
    model: _Model,
    toward: Annotated[
        str,
        typer.Option(
            help='One token, such as " Paris" (mind the space); with --away any text.',
            metavar="TEXT",
        ),
    ],
    away: Annotated[
        str | None,
        typer.Option(help="Steer along the contrast of --toward with this text.", metavar="TEXT"),
    ] = None,
    layer: Annotated[int, typer.Option(help="Layer to edit; -1 is the last.")] = -1,
    gap: Annotated[
        float | None,
        typer.Option(help="Dominant modulus over the next, after the edit; 5 by default."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Strength of the edit instead; of an additive vector, its length in mean lengths "
            "of the residual stream."
        ),
    ] = None,
    method: Annotated[
        _Method,
        typer.Option(help="Edit W_O, add a hook, or add a constant vector (which needs --alpha)."),
    ] = _Method.weights,
    texts: Annotated[
        Path | None,
        typer.Option(
            help='What to measure on: one text a line, or .jsonl with a "text" field; by default 4 '
            "built-in texts.",
            metavar="FILE",
        ),
    ] = None,
    generate: Annotated[
        int, typer.Option(help="New tokens of the first three texts, without and with.", min=0)
    ] = 20,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also measure over a range of gaps, beside rivals.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random controls.", min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Write tables, results and a page of figures here.", metavar="DIR"),
    ] = None,
) -> None:
    """Steer a layer towards a token or a contrast of texts, and say what that does.

    The files of the model are left alone.
    """
    with _one_line_each():
        from tl_spectral import cli_steer
        from tl_spectral.steering import steer as run
        from tl_spectral.steering import steering_sweep
        from tl_spectral.texts import load_texts

        if texts is not None and not texts.is_file():
            raise InputError(f"There is no file {texts}.")
        given = load_texts(n=4) if texts is None else load_texts(texts)
        direction = toward if away is None else (toward, away)
        subject = _load(model)
        options: dict[str, Any] = {"texts": given, "seed": seed}
        with run(
            subject,
            direction,
            layer,
            gap,
            alpha=alpha,
            method=method.value,
            generate=generate,
            **options,
        ) as report:
            pass  # the report is what is asked for
        cli_steer.tell(report)
        curve = None
        if sweep:
            with _Steps() as steps:
                curve = steering_sweep(subject, direction, layer, progress=steps, **options)
            cli_steer.tell_sweep(curve)
        if out is not None:
            _say(f"Figures and tables: {cli_steer.write(report, curve, out)}")


app.command(epilog=cli_compare.EPILOG)(cli_compare.compare)


def _load(model: str) -> Any:
    from tl_spectral.model import load_model

    Console(stderr=True).print(f"Loading {model} …", highlight=False, markup=False)
    return load_model(model)


def _numbers(layers: str | None) -> list[int] | None:
    """``0-3,7`` → ``[0, 1, 2, 3, 7]``."""
    if layers is None:
        return None
    chosen: set[int] = set()
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(
                f"--layers takes numbers and ranges, as 0-11 or 0,4,8-11, not {layers!r}."
            )
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(chosen)


@contextmanager
def _one_line_each() -> Iterator[None]:
    """Our errors and warnings as one line on stderr; everything else as Python shows it."""
    stderr = Console(stderr=True)
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *where: Any, **rest: Any) -> None:
        if issubclass(category, TLSpectralWarning):
            stderr.print(Text.assemble(("Warning: ", "yellow"), str(message)), soft_wrap=True)
        else:
            show_others(message, category, *where, **rest)

    with warnings.catch_warnings():
        warnings.simplefilter("once", TLSpectralWarning)
        warnings.showwarning = show
        try:
            yield
        except TLSpectralError as error:
            stderr.print(Text.assemble(("Error: ", "red"), str(error)), soft_wrap=True)
            raise typer.Exit(2) from error
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            reason = f"{error.strerror or error}{where}"
            stderr.print(Text.assemble(("Error: ", "red"), reason), soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            stderr.print("Stopped. What is finished is kept: the same command goes on from there.")
            raise typer.Exit(130) from None


class _Steps:
    """Progress with the time left: a bar in a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._began = time.monotonic()
        self._said = -1
        self._bar = Progress(
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            expand=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=None)

    def __enter__(self) -> _Steps:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, total: int, what: str) -> None:
        self._bar.update(self._task, completed=done, total=total, description=what)
        if not self._console.is_terminal and done * _LINES // total > self._said:
            self._said = done * _LINES // total
            elapsed = time.monotonic() - self._began
            left = (
                f", {_duration(elapsed * (total - done) / done)} left" if 0 < done < total else ""
            )
            line = f"{done / total:4.0%} {what} ({_duration(elapsed)}{left})"
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _tell(result: AnalysisResult) -> None:
    """The findings as a table, then in words."""
    console = Console(highlight=False)
    names = ("claim", "effect", "baseline", "uncertainty", "verdict")
    table = Table(
        *(Column(name, overflow="fold") for name in names),
        title=f"Findings: {result.provenance.model}",
        show_lines=True,
    )
    findings = result.findings.fillna("").to_dict("records")
    for row in findings:
        style = _VERDICT_STYLES.get(row["verdict"], "dim")
        table.add_row(*(Text(str(row[name])) for name in names[:-1]), Text(row["verdict"], style))
    console.print(table)
    for row in findings:
        style = _VERDICT_STYLES.get(row["verdict"], "dim")
        console.print(Text.assemble("\n", (f"{row['claim']} ({row['verdict']})", style)))
        console.print(Text(row["sentence"]))


def _say(line: str) -> None:
    """A line of text that is never wrapped, so that a path in it can be copied."""
    Console().print(line, soft_wrap=True, highlight=False, markup=False)
