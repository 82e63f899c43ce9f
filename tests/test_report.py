"""The report: one file, no network, nothing empty, nothing lost, readable on a phone."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from synthetic_run import synthetic_run

from tl_spectral.metrics import METRICS
from tl_spectral.plots.theme import DARK
from tl_spectral.report import write_report
from tl_spectral.report.page import Section, embed, numbers, show
from tl_spectral.report.sections import all_sections

SECTIONS = ["gradient", "eigenvalues", "funnel", "ov", "power", "communities", "coupling"]


class Page(HTMLParser):
    """What a browser would make of the file, as far as these tests ask."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.alts: list[str] = []
        self.words: list[str] = []
        self.figures: dict[str, dict[str, dict]] = {}
        self.scripts: list[str] = []
        self._panel = self._key = self._inside = ""
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self._inside, self._key = tag, given.get("data-key")
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        self.loads += [given["src"]] if "src" in given else []
        self.loads += [given["href"]] if tag == "link" else []
        if tag == "figure":
            self._panel = given["id"]
            self.figures[self._panel] = {}
        if given.get("role") == "img":
            self.alts.append(given["aria-label"])

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script" and self._key is not None:
            self.figures[self._panel][self._key] = json.loads(data)
        elif self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return synthetic_run(
        tmp_path_factory.mktemp("run"), layers=(0, 2, 5, 7), d=24, heads=3, samples=3
    )


@pytest.fixture(scope="module")
def page(run: SimpleNamespace) -> Page:
    return Page(write_report(run, run.out / "report.html"))


@pytest.fixture(scope="module")
def sections(run: SimpleNamespace) -> list[Section]:
    return all_sections(run)


def test_page_needs_no_network(run, page):
    assert page.loads == []
    assert all(link.startswith("#") for link in page.links)
    style = (run.out / "report.html").read_text("utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert sum("Plotly" in script and len(script) > 1_000_000 for script in page.scripts) == 1


def test_every_link_leads_to_a_section_and_ids_are_unique(page):
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert set(SECTIONS) | {"summary", "methods"} <= set(page.ids)


def test_every_figure_has_words_and_data_for_each_choice(sections, page):
    panels = [panel for section in sections for panel in section.panels]
    assert len(page.alts) == len(panels) == len(page.figures) == 15
    for panel in panels:
        assert len(panel.caption) > 60
        choices = itertools.product(*(switch.options for switch in panel.switches))
        assert set(page.figures[panel.identity]) == {"|".join(choice) for choice in choices}
    for versions in page.figures.values():
        for figure in versions.values():
            assert figure["data"]
            assert figure["layout"]["height"] > 100
            assert figure["layout"]["meta"]["narrow"]["height"] > 100


def test_findings_are_told_with_effect_baseline_uncertainty_and_verdict(run, page):
    for finding in run.findings.to_dict("records"):
        for part in finding.values():
            assert (str(part) if part is not None else "–") in page.text
    source = (run.out / "report.html").read_text("utf-8")
    kinds = re.findall(r'<article class="finding ([\w-]+)"', source)
    assert kinds == ["holds", "holds", "not-learned", "no-effect", "cannot-tell"]


def test_methods_tell_definitions_options_and_provenance(run, page):
    for name, metric in METRICS.items():
        assert name.replace("_", " ") in page.text
        assert " ".join(metric.definition.split()) in page.text
    for value in (run.provenance.fingerprint, "1024", run.provenance.versions["torch"]):
        assert value in page.text


def test_same_run_gives_the_same_bytes(run, page, tmp_path):
    again = write_report(run, tmp_path / "deep" / "again.html")
    assert again.read_bytes() == (run.out / "report.html").read_bytes()


def test_colours_of_the_dark_page_reach_every_figure(run, page):
    written = set()
    for versions in page.figures.values():
        for figure in versions.values():
            written |= set(re.findall(r"#[0-9A-Fa-f]{6}", json.dumps(figure)))
    assert {"#1B1F24", "#FFFFFF", "#0072B2"} <= written
    assert all(
        colour == colour.upper() for colour in written | set(DARK)
    )  # the script matches case
    same_on_both = {"#009E73", "#CC79A7"}
    assert written <= set(DARK) | same_on_both


TABLES = ["spectra", "chain", "ov", "ov_layers", "communities", "units", "coupling", "trend"]


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_what_a_run_lacks_becomes_a_sentence_and_never_an_empty_figure(run, name, emptied):
    # nothing beside the table but what is drawn together with it
    together = {
        "communities": ["units"],
        "units": ["communities"],
        "coupling": ["spectra", "trend"],
    }
    others = together.get(name, []) + {"ov": ["ov_layers"], "ov_layers": ["ov"]}.get(name, [])
    tables = {other: run.tables[other] for other in others or TABLES if other != name}
    if emptied:
        tables[name] = run.tables[name].iloc[:0]
    arrays = run.arrays if name in ("spectra", "units") else {}
    lacking = SimpleNamespace(**vars(run) | {"tables": tables, "arrays": arrays})
    sections = all_sections(lacking)
    assert [section.identity for section in sections] == SECTIONS
    for section in sections:
        assert section.panels or section.notes
        for panel in section.panels:
            assert all(figure.data for figure in panel.figures.values())


def test_a_refusal_of_the_heads_is_told_in_its_own_words(run):
    refused = pd.DataFrame([{"variant": "trained", "reason": "Blocks have no attention."}])
    tables = {"ov": refused, "ov_layers": refused}
    (section,) = [
        section
        for section in all_sections(SimpleNamespace(**vars(run) | {"tables": tables, "arrays": {}}))
        if section.identity == "ov"
    ]
    assert not section.panels
    assert section.notes[0].count("Blocks have no attention.") == 1


def test_an_empty_run_still_makes_a_page(run, tmp_path):
    bare = SimpleNamespace(
        **vars(run) | {"tables": {}, "arrays": {}, "findings": pd.DataFrame(), "options": {}}
    )
    page = Page(write_report(bare, tmp_path / "bare.html"))
    assert page.figures == {}
    assert "This run drew no findings." in page.text
    assert page.text.count("This run has no") == 6
    assert "This run kept no eigenvalues." in page.text


def test_one_layer_without_control_says_so(tmp_path):
    run = synthetic_run(tmp_path, layers=(7,), d=12, heads=2, samples=1, control=False)
    page = Page(write_report(run, tmp_path / "report.html"))
    assert "no control model" in page.text
    assert "looked at one layer" in page.text
    assert "at least three layers" in page.text
    (version,) = page.figures["eigenvalues-of-j"]
    assert version == ""  # one layer: no slider


def test_missing_values_are_dashes_and_never_nan(run, tmp_path):
    tables = {name: table.copy() for name, table in run.tables.items()}
    tables["units"].loc[:5, ["participation", "within_z", "log_gain_J"]] = np.nan
    tables["units"].loc[:5, ["is_bridge", "role"]] = [False, None]
    tables["coupling"].loc[2, ["unit_rho", "unit_low", "unit_high", "community_rho"]] = np.nan
    tables["trend"].loc[1, ["rho", "low", "high"]] = np.nan
    tables["spectra"].loc[tables["spectra"]["metric"] == "self_alignment", "value"] = np.nan
    lacking = SimpleNamespace(**vars(run) | {"tables": tables})
    page = Page(write_report(lacking, tmp_path / "report.html"))
    assert not re.search(r"\b(nan|None|NaN)\b", page.text)
    assert "have no edges" in page.text
    titles = [
        n["text"] for n in page.figures["coupling-against-character"][""]["layout"]["annotations"]
    ]
    assert titles


def test_tables_read_back_from_csv_give_the_same_figures(run, sections, tmp_path):
    tables = {}
    for name, table in run.tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
        tables[name] = pd.read_csv(tmp_path / f"{name}.csv")
    read = SimpleNamespace(**vars(run) | {"tables": tables})
    for one, other in zip(sections, all_sections(read), strict=True):
        assert one.numbers == other.numbers
        for panel, same in zip(one.panels, other.panels, strict=True):
            assert [embed(f) for f in panel.figures.values()] == [
                embed(f) for f in same.figures.values()
            ]


def test_hostile_names_stay_text(run, tmp_path):
    evil = "</script><script>alert(1)</script><img src=x>"
    findings = run.findings.assign(sentence=evil)
    tables = run.tables | {"coupling": run.tables["coupling"].assign(confounds=evil)}
    tables["spectra"] = run.tables["spectra"].replace({"variant": {"control": evil}})
    hostile = SimpleNamespace(
        **vars(run) | {"findings": findings, "tables": tables, "options": {evil: evil}}
    )
    page = Page(write_report(hostile, tmp_path / "report.html"))
    assert page.loads == []
    assert evil in page.text
    assert len(page.figures) == 15


def test_cells_are_short_and_typographic():
    assert show(-0.123456) == "−0.1235"
    assert show(float("nan")) == show(None) == show(pd.NA) == "–"
    assert show(np.int64(3)) == "3"
    assert show(np.bool_(True)) == "yes"
    assert show((1, 2)) == "[1, 2]"
    table = numbers("t", pd.DataFrame({"a": [1], "b": [0.5]}), {"b": "B", "missing": "M"})
    assert (table.head, table.rows) == (("B",), (("0.5",),))


def test_page_of_a_real_size_stays_light(tmp_path):
    run = synthetic_run(tmp_path, layers=tuple(range(30)), d=576, samples=8)
    assert write_report(run, tmp_path / "report.html").stat().st_size < 9e6


def test_layers_of_a_wide_model_are_thinned_and_it_says_so(run):
    arrays = {f"eigenvalues/trained/{i}": np.exp(1j * np.linspace(0, 6, 8192)) for i in range(32)}
    wide = SimpleNamespace(**vars(run) | {"arrays": arrays, "tables": {}})
    section = all_sections(wide)[1]
    layers = list(section.panels[0].figures)
    assert len(layers) == 7
    assert (layers[0], layers[-1]) == (("layer 0",), ("layer 31",))
    assert "7 of 32 layers" in section.notes[0]


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
PROBE = """
<iframe id="page" src="report.html" style="width:{width}px;height:12000px;border:0"></iframe>
<pre id="out">not run</pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => setTimeout(() => {{
  const page = frame.contentDocument, view = page.defaultView;
  const panels = [...page.querySelectorAll(".panel")];
  const plot = panels[0].querySelector(".plot");
  const before = JSON.stringify(plot.data[0].y);
  const raw = panels[0].querySelector("input[value=raw]");
  raw.checked = true;
  raw.dispatchEvent(new Event("input", {{ bubbles: true }}));
  const slider = page.querySelector("input[type=range]");
  slider.value = 2;
  slider.dispatchEvent(new Event("input", {{ bubbles: true }}));
  setTimeout(() => {{
    document.getElementById("out").textContent = JSON.stringify({{
      panels: panels.length,
      drawn: panels.filter((p) => p.querySelector(".main-svg")).length,
      overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
      wide: panels.filter((p) => p.querySelector(".plot").scrollWidth > view.innerWidth).length,
      switched: JSON.stringify(plot.data[0].y) !== before,
      layer: slider.parentElement.querySelector("output").textContent,
      stacked: plot.layout.xaxis.domain[1] === 1,
    }});
  }}, 500);
}}, 4000);
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium to look at the page with")
@pytest.mark.parametrize("width", [390, 1280])
def test_browser_draws_every_figure_without_sideways_scrolling(run, page, tmp_path, width):
    shutil.copy(run.out / "report.html", tmp_path / "report.html")
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(width=width))
    options = "--headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run"
    command = [str(CHROMIUM), *options.split(), "--disable-sync", "--disable-component-update"]
    command += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--virtual-time-budget=30000", "--window-size=1400,13000", "--dump-dom"]
    finished = subprocess.run(
        [*command, probe.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = re.search(r'<pre id="out">(.*?)</pre>', finished.stdout, re.S)
    assert found is not None
    assert json.loads(found[1]) == {
        "panels": 15,
        "drawn": 15,
        "overflow": 0,
        "wide": 0,
        "switched": True,
        "layer": "layer 5",
        "stacked": width == 390,
    }
