"""Comparison of runs: exact differences, what is refused, what is said, the command line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_run import synthetic_run
from typer.testing import CliRunner

from tl_spectral.analysis.options import RunOptions
from tl_spectral.analysis.result import AnalysisResult
from tl_spectral.cli import app
from tl_spectral.compare import Comparison, compare
from tl_spectral.compare_tables import metric_table, summarise
from tl_spectral.errors import InputError, ProvenanceError

MAIN = ("spectra", "antisymmetric_energy", "R", "natural")


def a_run(
    name: str, *, seed: int = 0, layers: int = 12, control: bool = False, **changes: Any
) -> AnalysisResult:
    made = synthetic_run(
        Path(f"runs/{name}"), layers=tuple(range(layers)), seed=seed, control=control
    )
    source: dict[str, Any] = {"model": name, "fingerprint": name, "texts": "t"}
    source |= changes.pop("provenance", {})
    options: dict[str, Any] = {
        "layers": tuple(range(layers)), "samples": 1024, "jacobian_samples": 6,
        "spectrum_samples": 4, "tokens_per_text": 16, "pos": -1, "context": "full",
        "control": "random-init" if control else None, "seed": seed,
    } | changes  # fmt: skip
    return AnalysisResult(
        out=made.out,
        provenance=dataclasses.replace(made.provenance, **source),
        run_options=RunOptions(**options),
        tables=made.tables,
        arrays={},
    )


def shifted(run: AnalysisResult, name: str, by: Any) -> AnalysisResult:
    """The same run under another name, its primary metric moved."""
    spectra = run.tables["spectra"].copy()
    chosen = (
        (spectra["metric"] == MAIN[1]) & (spectra["operator"] == "R")
        & (spectra["units"] == "natural") & (spectra["estimate"] == "per_sample")
    )  # fmt: skip
    spectra.loc[chosen, "value"] += by
    source = dataclasses.replace(run.provenance, model=name, fingerprint=name)
    return dataclasses.replace(run, provenance=source, tables={**run.tables, "spectra": spectra})


def row_of(comparison: Comparison, run: str, key: tuple[str, ...] = MAIN) -> pd.Series:
    table = comparison.summary().set_index(["family", "metric", "operator", "units", "run"])
    return table.loc[(*key, run)]


def test_a_planted_difference_comes_out_exactly() -> None:
    first = a_run("one")
    move = np.linspace(0.1, 0.3, 12)
    comparison = compare(first, shifted(first, "two", move))
    row = row_of(comparison, "two")
    assert row["difference"] == pytest.approx(0.2)
    assert row["compared"] == "by layer"
    assert row["difference_low"] < 0.2 < row["difference_high"]
    other = row_of(comparison, "two", ("coupling", "unit_rho", "J", "raw"))
    assert other["difference"] == other["difference_low"] == other["difference_high"] == 0
    base = row_of(comparison, "one")
    spectra = first.tables["spectra"]
    mine = spectra[
        (spectra["metric"] == MAIN[1]) & (spectra["operator"] == "R")
        & (spectra["units"] == "natural") & (spectra["estimate"] == "per_sample")
    ].sort_values("layer")  # fmt: skip
    assert base["mean"] == pytest.approx(mine["value"].mean())
    assert base["early"] == pytest.approx(mine["value"].iloc[:4].mean())
    assert base["late"] == pytest.approx(mine["value"].iloc[-4:].mean())
    assert base["note"] == "the run compared with"
    assert math.isnan(base["difference"])
    assert row["baseline"] == pytest.approx(mine["baseline"].mean())
    error = 2.3646 * mine["standard_error"].mean()  # t of 7 degrees of freedom, 8 samples
    assert row["sampling_error"] == pytest.approx(math.sqrt(2) * error, rel=1e-3)


def test_the_tidy_table_holds_what_the_runs_hold() -> None:
    run = a_run("one")
    table = metric_table(run.tables, "trained")
    assert set(table["family"]) >= {"spectra", "chain", "coupling", "communities", "ov"}
    assert not table.duplicated(["family", "metric", "operator", "units", "layer"]).any()
    assert (table["low"].isna() | (table["low"] <= table["value"])).all()
    chain = run.tables["chain"]
    chosen = chain[(chain["estimate"] == "per_sample") & (chain["units"] == "raw")]
    expected = chosen[chosen["layer"] == 3]["effective_rank"]
    mine = table[
        (table["family"] == "chain") & (table["metric"] == "effective_rank")
        & (table["units"] == "raw") & (table["layer"] == 3)
    ].iloc[0]  # fmt: skip
    assert mine["value"] == pytest.approx(expected.mean())
    half = 2.5706 * expected.std(ddof=1) / math.sqrt(6)
    assert mine["high"] - mine["value"] == pytest.approx(half, rel=1e-3)
    refused = {"ov": pd.DataFrame({"variant": ["trained"], "reason": ["no attention"]})}
    assert metric_table(refused, "trained").empty


def test_one_run_is_compared_with_its_control() -> None:
    comparison = compare(a_run("one", control=True))
    assert comparison.labels == ("one", "one, re-initialised")
    with pytest.raises(InputError, match="without a control"):
        compare(a_run("one"))
    both = compare(a_run("one", control=True), a_run("two", control=True), controls=True)
    assert len(both.labels) == 4
    assert len(compare(a_run("one", control=True), a_run("two", control=True)).labels) == 2


def test_what_differs_in_meaning_is_refused_and_named() -> None:
    first = a_run("one")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"context": "isolated"}, "context is 'full' in one and 'isolated' in two"),
        ({"pos": 3}, "pos is"),
        ({"tokens_per_text": 8}, "tokens_per_text is"),
        ({"samples": 500}, "samples is 1024"),
        ({"top_k": 5}, "top_k is"),
        ({"provenance": {"weights": "compat"}}, "weights are 'raw'"),
        ({"provenance": {"texts": "u"}}, "any-texts"),
    ]
    for changes, words in bad:
        with pytest.raises(ProvenanceError, match=words):
            compare(first, a_run("two", **changes))
    with pytest.raises(ProvenanceError, match=r"pos is .* top_k is"):
        compare(first, a_run("two", pos=3, top_k=5))
    other = a_run("two", provenance={"texts": "u"})
    assert "two read other token ids than one." in compare(first, other, texts="any").notes


def test_what_may_differ_is_said() -> None:
    changes = {"dtype": "bfloat16 upcast to float32", "versions": {"torch": "1"}}
    notes = " ".join(compare(a_run("one"), a_run("two", seed=3, provenance=changes)).notes)
    for words in ("2 models: one, two", "bfloat16", "seed 3", "other versions: numpy"):
        assert words in notes
    same = compare(a_run("one"), a_run("one", seed=1), labels=("a", "b"))
    assert "a and b are the same weights." in same.notes
    changed = a_run("one", seed=1, provenance={"fingerprint": "x"})
    assert "b has other weights than a." in compare(a_run("one"), changed, labels=("a", "b")).notes


def test_other_depths_are_compared_at_equal_relative_depth() -> None:
    def profile(values: np.ndarray, layers: range) -> pd.DataFrame:
        return pd.DataFrame(
            {"family": "spectra", "metric": "m", "operator": "R", "units": "raw",
             "layer": list(layers), "value": values, "low": np.nan, "high": np.nan,
             "baseline": 0.5}
        )  # fmt: skip

    deep = profile(np.linspace(1, 3, 9), range(9))
    flat = profile(np.linspace(0, 2, 2), range(20, 22))
    row = summarise({"a": deep, "b": flat}, {"a": None, "b": None}).iloc[1]
    assert row["compared"] == "at equal relative depth"
    assert row["difference"] == pytest.approx(-1)
    assert row["difference_low"] == row["difference_high"]
    part = profile(np.linspace(1, 3, 9)[2:6] + 1, range(2, 6))
    row = summarise({"a": deep, "b": part}, {"a": None, "b": None}).iloc[1]
    assert row["compared"] == "by layer, the 4 that both have"
    assert row["difference"] == pytest.approx(1)
    short = profile(np.array([1.0, 2.0]), range(2))
    row = summarise({"a": short, "b": short}, {"a": None, "b": None}).iloc[1]
    assert math.isnan(row["difference_low"])
    assert "fewer than 3" in row["note"]


def test_steps_make_a_trajectory(tmp_path: Path) -> None:
    runs = [a_run(f"step{step}", seed=step) for step in (100, 0, 10)]
    comparison = compare(*runs, steps=(100, 0, 10))
    table = comparison.trajectory()
    main = table[(table["metric"] == MAIN[1]) & (table["operator"] == "R")]
    assert main[main["units"] == "natural"]["step"].tolist() == [0, 10, 100]
    fig = comparison.plot_trajectory()
    line = next(trace for trace in fig.data if trace.name == "all layers")
    assert list(line.text) == ["0", "10", "100"]
    assert line.x[0] < 1 <= line.x[1] < line.x[2] == 2
    loaded = Comparison.load(comparison.save(tmp_path / "comparison"))
    assert loaded.steps == (100, 0, 10)
    assert len(loaded.rows) == len(comparison.rows)
    assert loaded.to_dataframe()["step"].unique().tolist() == [100, 0, 10]
    with pytest.raises(InputError, match="no trajectory without steps"):
        compare(*runs[:2]).trajectory()


def test_the_figure_has_a_line_per_run_and_metric() -> None:
    comparison = compare(a_run("one"), a_run("two", seed=1))
    fig = comparison.plot()
    lines = [trace for trace in fig.data if trace.name == "two"]
    assert len(lines) == 8
    rows = comparison.to_dataframe()
    mine = rows[(rows["run"] == "two") & (rows["metric"] == MAIN[1]) & (rows["operator"] == "R")]
    mine = mine[mine["units"] == "natural"]
    np.testing.assert_allclose(lines[0].y, mine["value"], rtol=1e-6)
    assert lines[0].x.tolist() == list(range(12))
    deeper = compare(a_run("one"), a_run("two", layers=8)).plot()
    ends = [trace.x[-1] for trace in deeper.data if trace.name in ("one", "two")]
    assert set(ends) == {1.0}


def test_calls_that_do_not_fit_are_refused() -> None:
    one, two = a_run("one"), a_run("two")
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "no run"),
        ((one, two), {"labels": ["a"]}, "2 runs and 1 labels"),
        ((one, two), {"labels": ["a", "a"]}, "distinct"),
        ((one, two), {"steps": [1]}, "2 runs and 1 steps"),
        ((one, two), {"steps": [1, 1]}, "distinct"),
        ((one, two), {"steps": [-1, 1]}, "not negative"),
        ((one, two), {"steps": [math.nan, 1]}, "not negative"),
        ((one, two), {"texts": "other"}, "texts must be"),
        ((one, "nowhere"), {}, "no run in nowhere"),
    ]
    for runs, options, words in bad:
        with pytest.raises(InputError, match=words):
            compare(*runs, **options)
    alike = compare(a_run("one"), dataclasses.replace(a_run("one"), out=Path("runs/again")))
    assert alike.labels == ("one (one)", "one (again)")


def test_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = {name: a_run(name, seed=i) for i, name in enumerate(("a", "b", "<i>c"))}
    monkeypatch.setattr("tl_spectral.analysis.load", lambda path: held[Path(path).name])
    out = tmp_path / "out"
    arguments = ["compare", "a", "b", "<i>c", "--steps", "0, 10,100", "--out", str(out)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "Compared with a" in result.output
    assert "Antisymmetric energy" in result.output
    assert {path.name for path in out.iterdir()} == {
        "compare.csv", "summary.csv", "compare.safetensors", "compare.html",
    }  # fmt: skip
    page = (out / "compare.html").read_text()
    assert page.count("plotly-graph-div") == 2
    assert "<i>c" not in page.split("<script")[0]
    assert 'src="http' not in page
    table = pd.read_csv(out / "compare.csv")
    assert set(table["run"]) == {"a", "b", "<i>c"}
    assert set(table["step"]) == {0, 10, 100}
    bad = CliRunner().invoke(app, ["compare", "a", "b", "--steps", "x,1"])
    assert bad.exit_code == 2
    assert "--steps takes numbers" in bad.output
    lone = CliRunner().invoke(app, ["compare", "a"])
    assert lone.exit_code == 2
    assert "without a control" in " ".join(lone.output.split())
