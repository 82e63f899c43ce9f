"""What a stranger meets first: metadata, pins, make, README and quickstart agree."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import tl_spectral as tls
from tl_spectral.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def _declared() -> list[Requirement]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(line) for lines in (project["dependencies"], *extras) for line in lines]


def _pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_version_is_told_once():
    assert importlib.metadata.version("tl-spectral") == tls.__version__
    assert CliRunner().invoke(app, ["--version"]).stdout.split()[-1] == tls.__version__
    assert f"## {tls.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_has_a_lower_and_an_upper_bound():
    for requirement in _declared():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, requirement
        assert "<" in operators, requirement


def test_every_dependency_is_pinned_within_its_range():
    pins = {}
    for pin in _pins():
        pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    for requirement in _declared():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt lacks {name}"
        for pin in pins[name]:
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            assert requirement.specifier.contains(specifier.version), pin


def test_pins_are_plain_versions():
    for pin in _pins():
        assert pin.url is None
        (specifier,) = pin.specifier
        assert "+" not in specifier.version, f"{pin}: a local build is not on PyPI"
    assert "torch==2.13.0" in [str(pin) for pin in _pins()]


def test_package_data_is_where_it_is_read():
    package = importlib.resources.files("tl_spectral")
    assert (package / "py.typed").is_file()
    templates = {file.name for file in (package / "report" / "templates").iterdir()}
    assert {"report.html.j2", "report.css", "report.js"} <= templates


def test_everything_exported_exists_and_is_documented():
    for name in tls.__all__:
        assert getattr(tls, name).__doc__, name


def test_import_leaves_the_heavy_libraries_alone():
    heavy = ["transformer_lens", "transformers", "plotly", "community", "datasets"]
    code = f"import sys, tl_spectral.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_module_runs_as_the_command_does():
    done = subprocess.run(
        [sys.executable, "-m", "tl_spectral", "--version"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.strip() == f"tl-spectral {tls.__version__}"


def test_make_targets_of_the_readme_and_of_ci_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = re.findall(r"^make ([\w -]+)", ci, re.MULTILINE)
    mentioned = {word for command in commands for word in command.split()}
    mentioned |= set(re.findall(r"[\n`]make ([\w-]+)", README))
    assert mentioned <= targets
    assert {"demo", "demo-small", "test", "test-slow"} <= targets
    assert commands[-1] == "test", "its summary is the closing output"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_commands_and_options_of_the_readme_exist():
    lines = re.findall(r"^tl-spectral (.+?)(?:  +#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        command, *rest = line.split()
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0, command
        for option in re.findall(r"--[\w-]+", " ".join(rest)):
            assert option in shown.stdout, f"{command} has no {option}"


def test_names_of_the_readme_exist():
    names = set(re.findall(r"\btls\.(\w+)", README))
    assert len(names) >= 10
    assert [name for name in sorted(names) if not hasattr(tls, name)] == []


def test_metrics_of_the_readme_are_measured():
    from tl_spectral.metrics import METRICS

    table = README.split("## Definitions and baselines")[1].split("Metrics that measure")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert len(named) >= 7
    assert named <= set(METRICS)


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert len(links) >= 2
    for link in links:
        assert (ROOT / link).is_file(), link


@pytest.mark.slow
def test_code_of_the_readme_runs(smollm2, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tls, "load_model", lambda name: smollm2)
    # The same lines on two layers and fewer texts: what they compute is tested elsewhere.
    profile, chain, texts = tls.profile, tls.chain, tls.load_texts
    monkeypatch.setattr(tls, "profile", lambda *a: profile(*a, layers=[0, 1]))
    monkeypatch.setattr(tls, "chain", lambda *a: chain(*a, layers=[0, 1]))
    monkeypatch.setattr(tls, "load_texts", lambda n: texts(n=24))
    monkeypatch.setattr("plotly.graph_objects.Figure.show", lambda figure: None)
    first, second = re.findall(r"```python\n(.+?)```", README, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(first, namespace)
    with pytest.warns(tls.TLSpectralWarning):  # fewer texts than units
        exec(second, namespace)
    assert len(namespace["profile"].to_dataframe()) == 4
    assert abs(namespace["k"].unit_rho) <= 1


def test_quickstart_was_run_from_top_to_bottom():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert any(cell["outputs"] for cell in code)
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert "error" not in kinds
    opening = [line for line in "".join(code[0]["source"]).splitlines() if line]
    assert len(opening) == 3
    assert "tls.profile" in opening[-1]
    assert NOTEBOOK.stat().st_size < 2_000_000
